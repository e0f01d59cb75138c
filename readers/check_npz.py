"""Every rule of an npz: those of the archive, of each member, and of the npy file in it.

The decisions are those of `readers.npz`. A member that breaks one rule does not hide the others of it, nor the other
members; data is read where the member's place and size are sure, which also keeps archives of overlapping members from
being inflated over and over.
"""

from __future__ import annotations

import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from convert.codec import crc32
from convert.errors import CorruptError
from convert.files import Source
from convert.findings import LIMITS, Findings, Part, Rule
from convert.limits import Limits
from convert.memory import load_metadata
from convert.tensor import Extent
from convert.transfer import stored_chunks
from readers import check_local, check_npy, check_zip, npy, npz
from readers.check_zip import COMMENT, Listing
from readers.inflate import METHODS, Compressed, method_name
from readers.zipdir import Entry

MEMBER = Rule(
    "NPZ-002",
    "Each member that is meant to be an array is a valid npy file.",
    "Its name ends in .npy, or it begins as one does. The rules NPY-... told beside this one say what is wrong.",
)
OVERLAP = Rule(
    "NPZ-012",
    "Members share no bytes with each other nor with the directory.",
    "Sharing is how small archives inflate to terabytes. Data of such members is not read.",
)
UNIQUE = Rule("NPZ-013", "Each name is there once.", "Unpack the archive, rename one, and pack it again.")
METHOD = Rule(
    "NPZ-015",
    "A member is stored, or compressed by deflate, bzip2 or lzma.",
    "Unpack the archive and pack it again with a common zip program.",
)
STORED = Rule(
    "NPZ-016", "A stored member has one size.", "Compressed and full size are the same where nothing is packed."
)
STREAM = Rule(
    "NPZ-017",
    "A member's bytes are whole: they inflate to exactly the size the directory gives, and nothing follows.",
    "The file is damaged or cut short. Download or save it again.",
)
CRC = Rule(
    "NPZ-018",
    "The CRC-32 of a member's bytes is that of the directory.",
    "The data is damaged. np.load does not look at the checksum of a member with more than 4 KB behind the array.",
)
ARRAYS = Rule(
    "NPZ-019",
    "An archive with members has an array among them.",
    "A PyTorch checkpoint is a zip archive too, of a pickle.",
)
BLOB = Rule("NPZ-101", "Every member is an array.", "Others are skipped, unless `--policy blob=uint8` keeps them.")
GAP = Rule(
    "NPZ-102",
    "Every byte before the directory belongs to a member.",
    "What lies between is seen by no reader: left over from an update, or hidden.",
)
UNSAFE = Rule(
    "NPZ-104",
    "Member names are relative paths that stay in their folder.",
    "Unpacked by a careless program, others are written elsewhere. Nothing is unpacked here.",
)
SUFFIX = Rule("NPZ-105", "The name of an array ends in .npy.", "np.savez adds it; convert does too when it writes.")
ALIKE = Rule(
    "NPZ-106",
    "Names differ in more than case or Unicode normalisation.",
    "Unpacked on Windows or macOS, one overwrites the other.",
)
UNUSUAL = Rule(
    "NPZ-108",
    "Members are stored or deflated.",
    "np.savez writes no other methods; bzip2 and lzma are read here and by np.load, and not by MLX and others.",
)
RULES = (
    *check_zip.RULES, *check_local.RULES, MEMBER, OVERLAP, UNIQUE, METHOD, STORED, STREAM, CRC, ARRAYS, BLOB, GAP,
    UNSAFE, SUFFIX, ALIKE, UNUSUAL,
)  # fmt: skip


_FOLDER = -2


class _Span(NamedTuple):
    """What a member takes: up to `end` it may share nothing, up to `covered` (where known) no byte is unaccounted for.

    Behind those of a streaming writer are the sizes once more.
    """

    begin: int
    end: int
    covered: int | None
    streamed: bool


class _Member(NamedTuple):
    entry: Entry
    begin: int
    """Of its bytes, behind the local header."""


@dataclass
class _Names:
    """The names so far, and what kinds of members there are."""

    taken: set[str] = field(default_factory=set)
    folded: set[str] = field(default_factory=set)
    arrays: int = 0
    blobs: int = 0
    torch: bool = False


def check(file: Source, findings: Findings, limits: Limits, data: bool) -> None:
    """Add what is wrong with an archive; `data` tells whether the members are read to their end."""
    found = check_zip.listing(file, findings, limits)
    begins = array.array("q")
    spans: list[_Span] = []
    names = _Names()
    for entry in found.entries(findings):
        is_folder = entry.name.endswith("/") and entry.size == 0
        begin = _folder_end(file, entry) if is_folder else _begin(file, entry, found, findings)
        claimed = entry.offset + 30 + len(entry.raw_name) + entry.packed_size
        end = claimed if begin is None or is_folder else begin + entry.packed_size
        streamed = bool(entry.flags & 8)
        spans.append(_Span(entry.offset, min(max(claimed, end), file.size), begin if is_folder else end, streamed))
        begins.append(_FOLDER if is_folder else -1 if begin is None else begin)
    shared = _check_spans(file, spans, found, findings)
    for entry, begin in zip(found.entries(Findings(file.path)), begins, strict=True):
        if begin >= 0:
            whole = begin + entry.packed_size <= found.end and entry.offset not in shared
            _check_member(file, _Member(entry, begin), names, findings, limits, data and whole)
        elif begin != _FOLDER:
            _check_name(entry, entry.name.removesuffix(".npy"), names, findings)
            names.arrays += 1  # or not; nobody can tell
    if names.blobs and not names.arrays:
        what = (
            "a PyTorch checkpoint, not an npz; it contains a pickle" if names.torch else "a zip archive without arrays"
        )
        findings.add(ARRAYS, what, found=f"{names.blobs} other members")
    _check_comment(file, found.comment, findings)


def _check_comment(file: Source, comment: bytes, findings: Findings) -> None:
    if comment and load_metadata(comment) is None:
        where = file.size - len(comment)
        findings.add(COMMENT, f"a comment of {len(comment)} bytes", found=repr(comment[:40]), offset=where)


def _begin(file: Source, entry: Entry, found: Listing, findings: Findings) -> int | None:
    """Where the member's bytes begin, or None if its local header is not to be relied on."""
    begin = check_local.begin_of(file, entry, findings)
    if begin is None:
        return None
    where: dict[str, Any] = {"tensor": entry.name, "offset": entry.offset}
    end = begin + entry.packed_size
    if end > found.end and found.from_directory:
        message = "the member reaches into the directory"
        findings.add(OVERLAP, message, expected=f"an end by byte {found.end}", found=f"{end}", **where)
    elif end > found.end:
        findings.add(STREAM, "the member is cut short", expected=f"{end} bytes", found=f"{file.size}", **where)
    return begin if begin <= file.size else None


def _folder_end(file: Source, entry: Entry) -> int | None:
    """End of the local header of a folder, which has nothing behind it."""
    if entry.offset + 30 > file.size:
        return None
    lengths = file.read(entry.offset + 26, 4)
    return entry.offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def _check_spans(file: Source, spans: list[_Span], found: Listing, findings: Findings) -> set[int]:
    """Add overlaps and gaps; the places of the members that share bytes."""
    spans.sort(key=lambda span: span[:2])
    shared: set[int] = set()
    sure = found.from_directory and not findings.errors
    reached = before = covered = 0
    streamed = False
    for span in spans:
        if sure:
            _check_gap(file, covered, span.begin, streamed, findings)
        if span.begin < reached:
            message = "members overlap: one begins before another ends"
            expected, actual = f"byte {reached} or later", f"byte {span.begin}"
            findings.add(OVERLAP, message, expected=expected, found=actual, offset=span.begin)
            shared |= {span.begin, before}
        if span.end >= reached:
            reached, before = span.end, span.begin
        if span.covered is not None and span.covered >= covered:
            covered, streamed = span.covered, span.streamed
    if sure:
        _check_gap(file, covered, found.end, streamed, findings)
    return shared


def _check_gap(file: Source, begin: int, end: int, streamed: bool, findings: Findings) -> None:
    """Bytes between members: none, or the sizes that a streaming writer puts behind its data."""
    if streamed and end - begin in (12, 16, 20, 24):
        return
    if begin < end:
        found = repr(file.read(begin, min(end - begin, 16)))
        findings.add(GAP, f"{end - begin} bytes belong to no member", found=found, offset=begin)


def _check_name(entry: Entry, name: str, names: _Names, findings: Findings) -> None:
    where = {"tensor": entry.name, "offset": entry.offset}
    if name in names.taken:
        findings.add(UNIQUE, f"two members give the name {name!r}", **where)
    folded = name.casefold()
    if not folded.isascii():
        from unicodedata import normalize

        folded = normalize("NFC", normalize("NFC", name).casefold())
    if folded in names.folded and name not in names.taken:
        findings.add(ALIKE, "another name differs only in case or Unicode normalisation", **where)
    names.taken.add(name)
    names.folded.add(folded)
    path = entry.name.replace("\\", "/")
    if path.startswith("/") or path[1:2] == ":" or ".." in path.split("/"):
        findings.add(UNSAFE, "unpacked, this name may lead out of the folder", **where)


def _check_member(file: Source, member: _Member, names: _Names, findings: Findings, limits: Limits, data: bool) -> None:
    entry, begin = member
    where: dict[str, Any] = {"tensor": entry.name, "offset": entry.offset}
    before = findings.errors
    if entry.method and entry.method not in METHODS:
        found = f"{entry.method}, {method_name(entry.method)}"
        findings.add(METHOD, "unsupported compression method", found=found, **where)
    if entry.method in METHODS and METHODS[entry.method].name != "deflate":
        findings.add(UNUSUAL, f"compressed by {METHODS[entry.method].name}", **where)
    if not entry.method and entry.packed_size != entry.size and not entry.flags & 0x2041:
        expected, found = f"{entry.size}", f"{entry.packed_size}"
        findings.add(STORED, "a stored member with two sizes", expected=expected, found=found, **where)
    readable = findings.errors == before and begin + entry.packed_size <= file.size
    readable = readable and not (entry.flags & 0x2061 or entry.is_symlink)
    is_array: bool | None = None
    if readable:
        with findings.catching(STREAM, limit=LIMITS, **where):
            is_array = _check_content(file, member, findings, limits, data)
    if is_array is None or is_array:
        names.arrays += 1
        _check_name(entry, entry.name.removesuffix(".npy"), names, findings)
        if is_array and not entry.name.endswith(".npy"):
            findings.add(SUFFIX, "an array whose name does not end in .npy", **where)
    else:
        names.blobs += 1
        names.torch |= entry.name.rpartition("/")[2] == "data.pkl"
        _check_name(entry, entry.name, names, findings)
        findings.add(BLOB, "no array", **where)


def _check_content(file: Source, member: _Member, findings: Findings, limits: Limits, data: bool) -> bool:
    """Whether a member is, or should be, an array; with what is wrong in it."""
    entry, begin = member
    method = METHODS.get(entry.method)
    read: Callable[[int], bytes]
    if method is None:
        part = Part(entry.name, begin)
        read = partial(file.read, begin)
    else:
        part = Part(entry.name, 0, inside=True)
        read = Compressed(file, begin, entry, method, 0).start
    read = partial(npz._first, read(min(npy.PROBE_BYTES, entry.size)), entry.size, read)
    head_bytes, header = 0, None
    base = entry.name.rpartition("/")[2]
    is_array = read(6) == npy.MAGIC
    if is_array or (base.endswith(".npy") and not base.startswith("._") and not entry.name.startswith("__MACOSX/")):
        is_array = True
        before = findings.errors
        head_bytes, header = check_npy.check_header(read, entry.size, findings, limits, part)
        if header is not None:
            check_npy.check_size(header, head_bytes, entry.size - head_bytes, findings, part)
        if findings.errors > before:
            findings.add(MEMBER, "the member is no valid npy file", tensor=entry.name, offset=entry.offset)
            header = None
    if data:
        _check_data(file, member, head_bytes if header else 0, header, findings, limits, part)
    return is_array


def _check_data(
    file: Source,
    member: _Member,
    head_bytes: int,
    header: npy.Header | None,
    findings: Findings,
    limits: Limits,
    part: Part,
) -> None:
    """Read a member to its end: checksum, stream, and what only the data of an array shows."""
    entry, begin = member
    method = METHODS.get(entry.method)
    content: Extent | Compressed
    if method is None:
        seed = crc32(file.read(begin, head_bytes))
        content = Extent(file, begin + head_bytes, entry.size - head_bytes, entry.crc, seed)
    else:
        content = Compressed(file, begin, entry, method, head_bytes)
    try:
        if header is None:
            for _ in stored_chunks(content, 1 << 20):
                pass
        else:
            check_npy.check_data(header, head_bytes, content, findings, limits, part)
    except CorruptError as err:
        rule = CRC if err.message.startswith("CRC-32") else STREAM
        findings.refused(rule, err, tensor=entry.name, offset=begin, hint="copy or download the file again")
