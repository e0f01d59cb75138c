"""The rules of a member's local header in a ZIP archive.

The decisions are those of `readers.npz`, which stops at the first rule that is broken; here all are told.
"""

from __future__ import annotations

from typing import Any

from convert.errors import CorruptError, LimitError, UnsupportedError
from convert.files import Source
from convert.findings import Findings, Rule
from readers import npz
from readers.zipdir import Entry

LOCAL = Rule(
    "NPZ-010",
    "A member's local header is where the directory says.",
    "Bytes before it were put in, taken out or damaged.",
)
AGREE = Rule(
    "NPZ-011",
    "Local header and directory agree on a member's name, method, sizes and checksum.",
    "Where they differ, different programs read different data. The file is damaged, or made to deceive.",
)
PLAIN = Rule(
    "NPZ-014",
    "A member is a plain file: not encrypted, no patch, no symlink.",
    "Unpack the archive with its password, or pack the file that the link points to.",
)
RULES = (LOCAL, AGREE, PLAIN)
_SIGNATURE = b"PK\x03\x04"


def begin_of(file: Source, entry: Entry, findings: Findings) -> int | None:
    """Where the member's bytes begin, or None if its local header is not to be relied on."""
    try:
        return npz._local_header(file, entry)[0]
    except (CorruptError, UnsupportedError, LimitError) as err:
        before = findings.errors
        begin = _told(file, entry, findings)
        if findings.errors == before:
            findings.refused(AGREE, err, tensor=entry.name, offset=entry.offset)
        return begin


def _told(file: Source, entry: Entry, findings: Findings) -> int | None:
    """Add all that is wrong; the same place, if there is one."""
    where: dict[str, Any] = {"tensor": entry.name, "offset": entry.offset}
    room = 30 + len(entry.raw_name) + 0xFFFF
    start = file.read(entry.offset, min(room, file.size - entry.offset)) if entry.offset < file.size else b""
    if len(start) < 30 or start[:4] != _SIGNATURE:
        findings.add(LOCAL, "no local header", expected=repr(_SIGNATURE), found=repr(start[:4]), **where)
        return None
    name_bytes = int.from_bytes(start[26:28], "little")
    name, flags = start[30 : 30 + name_bytes], int.from_bytes(start[6:8], "little")
    if name != entry.raw_name:
        message = "local and central names differ"
        findings.add(AGREE, message, expected=repr(entry.raw_name[:200]), found=repr(name[:200]), **where)
    elif (flags ^ entry.flags) & 0x800 and not name.isascii():
        findings.add(AGREE, "local and central header differ on whether the name is UTF-8", found=repr(name), **where)
    for bits, what in ((0x2041, "the member is encrypted"), (0x20, "the member is a patch to another file")):
        if (flags | entry.flags) & bits:
            findings.add(PLAIN, what, **where)
    method = int.from_bytes(start[8:10], "little")
    if method != entry.method:
        message = "local and central compression methods differ"
        findings.add(AGREE, message, expected=f"{entry.method}", found=f"{method}", **where)
    with findings.catching(AGREE, **where):
        npz._check_local_sizes(start, entry, flags)
    if entry.is_symlink:
        findings.add(PLAIN, "the member is a symlink entry, not an array", **where)
    return entry.offset + 30 + name_bytes + int.from_bytes(start[28:30], "little") if name == entry.raw_name else None
