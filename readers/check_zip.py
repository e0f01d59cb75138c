"""The rules of a ZIP archive as a whole: its end record and its directory; and its members where both are lost.

Source: that of `readers.zipdir`, whose functions decide here too. They are called for one part at a time, so that the
check can go on behind a damaged one.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from convert.errors import CorruptError, InputError, UnsupportedError
from convert.files import Source
from convert.findings import LIMITS, Findings, Rule
from convert.limits import Limits
from readers import zipdir
from readers.zipdir import Entry

_AGAIN = "Download or save the file again."
DIRECTORY = Rule(
    "NPZ-001",
    "The archive is a valid ZIP: the end record is found, and with it the central directory.",
    f"Without it the archive is cut short; its writer was interrupted, or a download broke off. {_AGAIN}",
)
ONE_END = Rule(
    "NPZ-003", "Exactly one end record fits.", "With two, different programs see different archives; one may be hidden."
)
TRAILING = Rule("NPZ-004", "Nothing follows the end record.", "Another file was written over, or appended. Cut it off.")
END = Rule(
    "NPZ-005",
    "The end record is right about the directory's place and size, and agrees with its zip64 form.",
    f"It is damaged, or bytes were put in or taken out before it. {_AGAIN}",
)
SPLIT = Rule("NPZ-006", "The archive is not split over several files.", "Join its parts first.")
ENTRIES = Rule(
    "NPZ-007",
    "The directory's entries are whole, and as many as the end record says.",
    f"The directory is damaged. {_AGAIN}",
)
NAMES = Rule(
    "NPZ-008",
    "A member name that is flagged UTF-8 is UTF-8, and none holds NUL.",
    "Programs cut such names at different places, or read them differently. Pack the archive again.",
)
ZIP64 = Rule(
    "NPZ-009",
    "A member whose sizes or place are promised in a zip64 field has one such field, with all of them.",
    "Its size is not known otherwise. Pack the archive again.",
)
COMMENT = Rule(
    "NPZ-103",
    "The archive has no comment, but that in which convert keeps metadata.",
    "It is not carried over to other formats.",
)
CODE_PAGE = Rule(
    "NPZ-107",
    "Member names beyond ASCII are flagged UTF-8.",
    "Others are read as code page 437 here and by Python, and differently elsewhere.",
)
RULES = (DIRECTORY, ONE_END, TRAILING, END, SPLIT, ENTRIES, NAMES, ZIP64, COMMENT, CODE_PAGE)

_CENTRAL_SIGNATURE, _LOCAL_SIGNATURE, _END_SIGNATURE = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"


class Listing(NamedTuple):
    """The members, where they must end, and whether it is from the directory that they are known.

    `entries` makes them one at a time, as often as it is called, and adds what is wrong with the directory.
    """

    entries: Callable[[Findings], Iterator[Entry]]
    end: int
    from_directory: bool
    comment: bytes = b""


def listing(file: Source, findings: Findings, limits: Limits) -> Listing:
    """The members by the directory, or by their local headers where no directory can be used."""
    end = _find_end(file, findings)
    if end is None:
        entries = list(islice(_local_entries(file), limits.tensors))
        if not findings.errors:
            found = f"local headers of {len(entries)} member{'' if len(entries) == 1 else 's'}"
            message = "truncated archive: no end record, and so no directory"
            findings.add(DIRECTORY, message, found=found, offset=file.size)
        return Listing(lambda _: iter(entries), file.size, False)
    if end.size > limits.directory_bytes:
        expected = f"at most {limits.directory_bytes} bytes"
        findings.add(LIMITS, "the directory is too long", expected=expected, found=f"{end.size}", offset=end.begin)
        return Listing(lambda _: iter(()), end.begin, True)
    return Listing(partial(_entries, file.read(end.begin, end.size), end), end.begin, True, end.comment)


def _find_end(file: Source, findings: Findings) -> zipdir._End | None:
    """The end record; also one that breaks a rule, if the directory can be found by it."""
    tail_bytes = min(file.size, zipdir._END.size + 0xFFFF)
    tail_begin = file.size - tail_bytes
    tail = file.read(tail_begin, tail_bytes)
    found: list[zipdir._End] = []
    problems: list[tuple[int, CorruptError | UnsupportedError]] = []
    trailing: tuple[int, int] | None = None
    at = tail.rfind(_END_SIGNATURE)
    while at >= 0:
        if at + zipdir._END.size <= len(tail):
            end = at + zipdir._END.size + int.from_bytes(tail[at + 20 : at + 22], "little")
            if end == len(tail):
                try:
                    found.append(zipdir._end_at(file, tail_begin + at, tail[at:]))
                except (CorruptError, UnsupportedError) as err:
                    problems.append((tail_begin + at, err))
            elif end < len(tail):
                trailing = trailing or (at, end)
        at = tail.rfind(_END_SIGNATURE, 0, at)
    if len(found) > 1:
        findings.add(ONE_END, "more than one end record fits", expected="1", found=f"{len(found)}", offset=tail_begin)
    elif not found and problems:
        for position, problem in problems:
            rule = SPLIT if isinstance(problem, UnsupportedError) else END
            findings.refused(rule, problem, offset=position)
    elif not found and trailing is not None:
        at, end = trailing
        message = f"{len(tail) - end} bytes follow the end record of the archive"
        findings.add(TRAILING, message, offset=tail_begin + end)
        with findings.catching(END, unsupported=SPLIT, offset=tail_begin + at):
            found.append(zipdir._end_at(file, tail_begin + at, tail[at:end]))
    return found[0] if found else None


def _entries(data: bytes, end: zipdir._End, findings: Findings) -> Iterator[Entry]:
    """All entries that can be made out; behind a damaged one the next is looked for by its signature."""
    at = count = 0
    while at < len(data):
        if data[at : at + 4] != _CENTRAL_SIGNATURE or at + zipdir._CENTRAL.size > len(data):
            found = repr(data[at : at + 4])
            findings.add(ENTRIES, "no directory entry", expected="b'PK\\x01\\x02'", found=found, offset=end.begin + at)
            at = data.find(_CENTRAL_SIGNATURE, at + 1)
            if at < 0:
                break
            continue
        entry: Entry | None
        try:
            entry, at = zipdir._entry(data, at, end.begin)
        except InputError:
            entry, at = _entry(data, at, end.begin, findings)
        else:
            _check_code_page(entry, findings)
        count += 1
        if entry is not None:
            yield entry
    if end.members not in (count, count & 0xFFFF):
        message = "another number of members than the end record says"
        where = end.begin + len(data)
        findings.add(ENTRIES, message, expected=f"{end.members}", found=f"{count}", offset=where)


def _check_code_page(entry: Entry, findings: Findings) -> None:
    raw = entry.raw_name
    if raw.isascii() or entry.flags & 0x800 or entry.name != raw.decode("cp437"):
        return
    message = "the member name is not flagged UTF-8"
    findings.add(CODE_PAGE, message, found=repr(raw[:60]), tensor=entry.name, offset=entry.offset)


def _entry(data: bytes, at: int, begin: int, findings: Findings) -> tuple[Entry | None, int]:
    (
        _, _, system, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes, comment_bytes, disk, _,
        attributes, offset,
    ) = zipdir._CENTRAL.unpack_from(data, at)  # fmt: skip
    name_at = at + zipdir._CENTRAL.size
    raw = data[name_at : name_at + name_bytes]
    extra = data[name_at + name_bytes : name_at + name_bytes + extra_bytes]
    comment_at = name_at + name_bytes + extra_bytes
    end = comment_at + comment_bytes
    if end > len(data):
        message = "a directory entry is cut short"
        findings.add(ENTRIES, message, expected=f"{end} bytes", found=f"{len(data)}", offset=begin + at)
        return None, len(data)
    shown = raw.decode("utf-8", "replace")
    where: dict[str, Any] = {"tensor": shown, "offset": begin + at}
    name = shown
    before = findings.errors
    with findings.catching(NAMES, **where):
        name = zipdir._name(raw, flags)
    with findings.catching(ZIP64, **where):
        fields = zipdir._extra_fields(extra, name)
        size, packed, offset, disk = zipdir._zip64(fields.get(1), size, packed, offset, disk, name)
        unicode_path = fields.get(0x7075, b"")
        if zipdir._is_unicode_path(unicode_path, raw) and not flags & 0x800:
            with findings.catching(NAMES, **where):
                name = zipdir._utf8(unicode_path[5:])
    if disk:
        findings.add(SPLIT, "the member is in another file", found=f"disk {disk}", **where)
    if "\0" in name:
        findings.add(NAMES, "the member name contains NUL", **where)
    if findings.errors > before:
        return None, end
    symlink = system == 3 and stat.S_ISLNK(attributes >> 16)
    return Entry(name, raw, flags, method, crc, packed, size, offset, symlink, data[comment_at:end]), end


# --- without a directory -----------------------------------------------------------------------------------------

_WINDOW_BYTES = 1 << 20


def _local_entries(file: Source) -> Iterator[Entry]:
    """Members by the local headers in the file; those whose size stands behind them are left out."""
    at = 0
    while (at := _find(file, _LOCAL_SIGNATURE, at)) >= 0:
        entry, after = _local_entry(file, at)
        at = after
        if entry is not None:
            yield entry


def _find(file: Source, signature: bytes, at: int) -> int:
    """Where the next signature is, from `at` on, or -1."""
    room = 64
    while at < file.size:
        window = file.read(at, min(room, file.size - at))
        room = min(2 * room, _WINDOW_BYTES)
        found = window.find(signature)
        if found >= 0:
            return at + found
        at += max(len(window) - len(signature) + 1, 1)
    return -1


def _local_entry(file: Source, at: int) -> tuple[Entry | None, int]:
    """The member at a local header as far as that tells, and where to look for the next."""
    head = file.read(at, min(30, file.size - at))
    if len(head) < 30:
        return None, at + 4
    flags, method = int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    crc, packed, size = (int.from_bytes(head[i : i + 4], "little") for i in (14, 18, 22))
    name_bytes, extra_bytes = int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little")
    begin = at + 30 + name_bytes + extra_bytes
    if begin > file.size:
        return None, at + 4
    raw = file.read(at + 30, name_bytes)
    try:
        name = zipdir._name(raw, flags)
        extra = zipdir._extra_fields(file.read(at + 30 + name_bytes, extra_bytes), name)
        size, packed, _, _ = zipdir._zip64(extra.get(1), size, packed, 0, 0, name)
    except CorruptError:
        return None, at + 4
    if flags & 8 and not packed:
        return None, at + 4
    return Entry(name, raw, flags, method, crc, packed, size, at, False, b""), begin + packed
