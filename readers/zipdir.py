"""The directory of a ZIP archive, zip64 included, read strictly.

Source: PKWARE APPNOTE.TXT 6.3.10: end record 4.3.16, zip64 4.3.14 and 4.3.15, directory headers 4.3.12, extra fields
4.5.3 (zip64) and 4.6.9 (Unicode path).
"""

from __future__ import annotations

import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from convert.errors import CorruptError, UnsupportedError, quoted
from convert.files import Source
from convert.limits import Limits, exceeded

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s2B5H3L5H2L")
_FULL = 0xFFFFFFFF
_MAX_EXTRA_FIELDS = 100
"""Of one member; archivers write at most a handful."""


class Entry(NamedTuple):
    """One member as the directory lists it."""

    name: str
    raw_name: bytes
    flags: int
    method: int
    crc: int
    packed_size: int
    size: int
    offset: int
    is_symlink: bool
    comment: bytes


class Directory(NamedTuple):
    """All members, where the directory begins, and the comment of the archive.

    `entries()` makes the members one at a time: of a hundred thousand, only what becomes of them is kept.
    """

    entries: Callable[[], Iterator[Entry]]
    begin: int
    comment: bytes


class _End(NamedTuple):
    members: int
    size: int
    begin: int
    comment: bytes


def read_directory(file: Source, limits: Limits) -> Directory:
    """The members in directory order.

    Raises:
        CorruptError: No directory, more than one, or one that breaks a rule.
        UnsupportedError: An archive split over several files.
        LimitError: A directory longer than `limits.directory_bytes`, or of more members than `limits.tensors`.
    """
    end = _find_end(file)
    if end.size > limits.directory_bytes:
        raise exceeded("directory_bytes", "the directory is too long", limits.directory_bytes, end.size)
    if end.members > limits.tensors:
        raise exceeded("tensors", "too many members", limits.tensors, end.members)
    data = file.read(end.begin, end.size)
    return Directory(partial(_entries, data, end, limits), end.begin, end.comment)


def _entries(data: bytes, end: _End, limits: Limits) -> Iterator[Entry]:
    at = count = 0
    while at < len(data):
        if count == limits.tensors:
            raise exceeded("tensors", "too many members", limits.tensors)
        entry, at = _entry(data, at, end.begin)
        count += 1
        yield entry
    if end.members not in (count, count & 0xFFFF):
        raise CorruptError(f"the directory is incomplete (expected {end.members} members, found {count})")


def _find_end(file: Source) -> _End:
    """The end record; it is the one whose comment ends with the file and whose directory lies before it."""
    tail_bytes = min(file.size, _END.size + 0xFFFF)
    tail_begin = file.size - tail_bytes
    tail = file.read(tail_begin, tail_bytes)
    found: list[_End] = []
    problem: Exception | None = None
    trailing = None
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        if at + _END.size <= len(tail):
            comment_bytes = int.from_bytes(tail[at + 20 : at + 22], "little")
            left = len(tail) - at - _END.size - comment_bytes
            if left == 0:
                try:
                    found.append(_end_at(file, tail_begin + at, tail[at:]))
                except (CorruptError, UnsupportedError) as err:
                    problem = problem or err
            elif left > 0:
                trailing = left
        at = tail.rfind(b"PK\x05\x06", 0, at)
    if len(found) == 1:
        return found[0]
    if found:
        raise CorruptError(f"{len(found)} end records fit; which one counts is ambiguous")
    if problem is not None:
        raise problem
    if trailing is not None:
        raise CorruptError(
            f"{trailing} bytes follow the end record of the archive",
            hint="was it written over a longer file? cut them off, or make the archive again",
        )
    raise CorruptError(
        "truncated archive (no end-of-central-directory record)",
        hint="was the program that wrote it interrupted? copy, download or save the file again",
    )


def _end_at(file: Source, position: int, record: bytes) -> _End:
    _, disk, first_disk, here, count, size, begin, _ = _END.unpack_from(record)
    comment = record[_END.size :]
    end = position
    locator = file.read(position - _LOCATOR.size, _LOCATOR.size) if position >= _LOCATOR.size else b""
    if locator[:4] == b"PK\x06\x07":
        disk64, disks = int.from_bytes(locator[4:8], "little"), int.from_bytes(locator[16:20], "little")
        end = int.from_bytes(locator[8:16], "little")
        if disk64 or disks > 1:
            raise UnsupportedError("an archive split over several files", hint="join its parts first")
        if end + _END64.size > position - _LOCATOR.size:
            raise CorruptError(f"the zip64 end record is not where its locator says (byte {end})")
        sign, _, _, _, disk64, first64, here64, count64, size64, begin64 = _END64.unpack(file.read(end, _END64.size))
        if sign != b"PK\x06\x06":
            raise CorruptError(f"no zip64 end record (expected at byte {end}, found {sign!r})")
        for small, large, full in (
            (disk, disk64, 0xFFFF),
            (first_disk, first64, 0xFFFF),
            (here, here64, 0xFFFF),
            (count, count64, 0xFFFF),
            (size, size64, _FULL),
            (begin, begin64, _FULL),
        ):
            if small not in (large, full):
                raise CorruptError(f"the two end records differ (expected {large}, found {small})")
        disk, first_disk, here, count, size, begin = disk64, first64, here64, count64, size64, begin64
    if disk or first_disk or here != count:
        raise UnsupportedError("an archive split over several files", hint="join its parts first")
    if begin + size != end:
        raise CorruptError(
            f"the directory does not end where the end record begins (expected byte {end}, found {begin + size})"
        )
    return _End(count, size, begin, comment)


def _entry(data: bytes, at: int, directory_begin: int) -> tuple[Entry, int]:
    if at + _CENTRAL.size > len(data) or data[at : at + 4] != b"PK\x01\x02":
        raise CorruptError(f"the directory is damaged (expected a member at byte {directory_begin + at})")
    (
        _, _, system, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes, comment_bytes, disk, _,
        attributes, offset,
    ) = _CENTRAL.unpack_from(data, at)  # fmt: skip
    at += _CENTRAL.size
    raw = data[at : at + name_bytes]
    extra_at = at + name_bytes
    comment_at = extra_at + extra_bytes
    end = comment_at + comment_bytes
    if end > len(data):
        raise CorruptError(f"the directory is cut short (expected {end} bytes, found {len(data)})")
    name = _name(raw, flags)
    if extra_bytes:
        extra = _extra_fields(data[extra_at:comment_at], name)
        size, packed, offset, disk = _zip64(extra.get(1), size, packed, offset, disk, name)
        unicode_path = extra.get(0x7075, b"")
        if _is_unicode_path(unicode_path, raw) and not flags & 0x800:
            name = _utf8(unicode_path[5:])
    elif _FULL in (size, packed, offset):
        raise _no_zip64(name)
    if disk:
        raise UnsupportedError("an archive split over several files", hint="join its parts first")
    if "\0" in name:
        raise CorruptError(f"the member name {quoted(name)} contains NUL, where readers cut it at different places")
    symlink = system == 3 and stat.S_ISLNK(attributes >> 16)
    comment = data[comment_at:end] if comment_bytes else b""
    return Entry(name, raw, flags, method, crc, packed, size, offset, symlink, comment), end


def _name(raw: bytes, flags: int) -> str:
    """UTF-8 where flagged, else the IBM PC's code page 437 as the standard and zipfile have it."""
    if raw.isascii():
        return raw.decode("ascii")
    return _utf8(raw) if flags & 0x800 else raw.decode("cp437")


def _is_unicode_path(field: bytes, raw: bytes) -> bool:
    """Version 1, then the CRC-32 of the plain name it stands for."""
    return len(field) > 5 and field[0] == 1 and int.from_bytes(field[1:5], "little") == zlib.crc32(raw)


def _utf8(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as err:
        raise CorruptError(f"a member name is flagged UTF-8 and is not (found {raw[:100]!r})") from err


def _extra_fields(extra: bytes, name: str) -> dict[int, bytes]:
    fields: dict[int, bytes] = {}
    at = count = 0
    while at + 4 <= len(extra):
        count += 1
        if count > _MAX_EXTRA_FIELDS:
            raise CorruptError(f"member {quoted(name)} has more than {_MAX_EXTRA_FIELDS} extra fields")
        kind, length = struct.unpack_from("<2H", extra, at)
        if at + 4 + length > len(extra):
            break  # some writers leave padding that is no field; what counts is read strictly
        if kind in fields and kind == 1:
            raise CorruptError(f"member {quoted(name)} has two zip64 fields")
        fields[kind] = extra[at + 4 : at + 4 + length]
        at += 4 + length
    return fields


def _zip64(field: bytes | None, size: int, packed: int, offset: int, disk: int, name: str) -> tuple[int, int, int, int]:
    """Sizes and place, from the zip64 field where the plain ones are saturated."""
    if _FULL not in (size, packed, offset) and disk != 0xFFFF:
        return size, packed, offset, disk
    if field is None:
        raise _no_zip64(name)
    at = 0
    values = []
    for value, full, width in ((size, _FULL, 8), (packed, _FULL, 8), (offset, _FULL, 8), (disk, 0xFFFF, 4)):
        if value == full:
            if at + width > len(field):
                raise _no_zip64(name)
            value = int.from_bytes(field[at : at + width], "little")
            at += width
        values.append(value)
    return values[0], values[1], values[2], values[3]


def _no_zip64(name: str) -> CorruptError:
    return CorruptError(f"member {quoted(name)}: zip64 sizes are promised but absent")
