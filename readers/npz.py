"""NumPy's archive of arrays: a ZIP file whose members are .npy files named after their keys.

    local header, name, extra, npy file    one for each member
    central directory                      the members again, with sizes, checksums and places
    end record                             preceded by its zip64 form in large archives

The archive is read here with structs, not with a zipfile object per member: a hundred thousand small arrays are
common, and every rule can be checked. What other readers could read otherwise (two end records, names or sizes that
differ between the two headers, members that overlap) is refused. A member that is no array is kept as a blob.

Sources: PKWARE APPNOTE.TXT 6.3.10, sections 4.3 to 4.5; numpy 2.4 `numpy.lib.npyio`.
"""

from __future__ import annotations

import array
import operator
import os
import struct
from collections.abc import Callable, Iterable
from functools import partial

from convert import dtypes
from convert.codec import crc32
from convert.errors import ConvertError, CorruptError, LimitError, UnsupportedError, quoted
from convert.files import Source, open_source
from convert.limits import DEFAULT, Budget, Limits, exceeded
from convert.memory import load_metadata, load_origin
from convert.tensor import Checkpoint, Extent, Tensor
from readers import npy
from readers.inflate import METHODS, Compressed, Method, method_name
from readers.zipdir import Directory, Entry, read_directory

_LOCAL = struct.Struct("<4s2B4H3L2H")
_LOCAL_BYTES = _LOCAL.size
_ZIP64 = struct.Struct("<2H2Q")
_NPY_1 = npy.MAGIC + b"\x01\x00"
_LOCAL_SIGNATURE = b"PK\x03\x04"
_SMALL_BYTES = 64 << 20
"""What members may inflate to, whatever the size of the archive."""
_LONG_HEADERS = 16


def open(path: str | os.PathLike[str], limits: Limits = DEFAULT) -> Checkpoint:
    """The arrays of an archive, in the order of its directory; headers are read, data is not.

    A member that cannot be read becomes a tensor whose `problem` says why, so that all problems are known together
    and the others can still be had.

    Raises:
        CorruptError: The archive as a whole breaks a rule.
        UnsupportedError: A split or encrypted archive, or one of another program.
        LimitError: Too many members, or they would inflate to too much.
    """
    file = open_source(path)
    try:
        directory = read_directory(file, limits)
        versions: set[str] = set()
        tensors, notes = _members(file, directory, limits, versions), []
        metadata = load_metadata(directory.comment, limits)
    except ConvertError as err:
        file.close()
        err.at(path)
        raise
    if metadata is None and directory.comment:
        notes.append(f"the archive's comment ({len(directory.comment)} bytes) is not carried over")
    version = f"npy {', '.join(sorted(versions))}" if versions else ""
    return Checkpoint(os.fspath(path), "npz", tensors, metadata or {}, notes, [file], version)


def _members(file: Source, directory: Directory, limits: Limits, versions: set[str]) -> list[Tensor]:
    tensors: list[Tensor] = []
    spans = array.array("Q")
    taken: set[str] = set()
    long_headers = Budget(
        _LONG_HEADERS * limits.header_bytes, "the headers are too long together", "header_bytes", limits.header_bytes
    )
    allowed = max(_SMALL_BYTES, limits.ratio * file.size)
    claimed = reached = 0
    sorted_so_far = True
    for entry in directory.entries():
        if entry.method:
            claimed += entry.size
            if claimed > allowed:
                raise _inflates_too_far(directory, allowed, file.size)
        if sorted_so_far and entry.offset < reached:
            sorted_so_far = False
            _check_places(directory)
        reached = entry.offset + _LOCAL_BYTES + len(entry.raw_name) + entry.packed_size
        if entry.name.endswith("/") and entry.size == 0:
            continue  # a folder
        name = entry.name
        try:
            if (plain := _plain(file, entry, limits)) is not None and plain[0] <= directory.begin:
                end, tensor = plain
                spans.extend((entry.offset, end))
                if tensor.name not in taken:
                    taken.add(tensor.name)
                    tensors.append(tensor)
                    versions.add("1.0")
                    continue
            begin, start = _local_header(file, entry)
            spans.extend((entry.offset, min(begin + entry.packed_size, file.size)))
            if begin + entry.packed_size > directory.begin:
                raise CorruptError(
                    f"member {quoted(name)} reaches into the directory (expected to end by byte {directory.begin}, "
                    f"found {begin + entry.packed_size})"
                )
            tensor = _tensor(file, entry, begin, start, limits, long_headers, versions)
        except ConvertError as err:
            tensor = Tensor(name.removesuffix(".npy"), dtypes.BROKEN, (), Extent(file, 0, 0))
            tensor.problem = err.at(file.path, name).with_traceback(None)  # which would keep what was read alive
        if tensor.name in taken:
            raise CorruptError(
                f"two members give the same name {quoted(tensor.name)} (the second is {quoted(name)})",
                hint="unpack the archive, rename one and pack it again",
            )
        taken.add(tensor.name)
        tensors.append(tensor)
    _check_overlaps(spans)
    blobs = [tensor for tensor in tensors if tensor.dtype is dtypes.BLOB]
    if blobs and len(blobs) == len(tensors):
        _no_arrays(blobs)
    return tensors


def _inflates_too_far(directory: Directory, allowed: int, size: int) -> LimitError:
    """A small archive that would fill the disk; deflated zeros are 1032 times as long as their stream."""
    claimed = sum(entry.size for entry in directory.entries() if entry.method)
    return exceeded(
        "ratio", "the members would inflate to too many bytes", allowed, claimed, needed=-(-claimed // size)
    )


def _check_places(directory: Directory) -> None:
    """Overlaps that the directory alone gives away, found before anything is inflated again and again."""
    spans = array.array("Q")
    for entry in directory.entries():
        end = entry.offset + _LOCAL_BYTES + len(entry.raw_name) + entry.packed_size
        spans.extend((entry.offset, min(end, (1 << 64) - 1)))
    _check_overlaps(spans)


def _plain(file: Source, entry: Entry, limits: Limits) -> tuple[int, Tensor] | None:
    """End and tensor of a stored member as numpy writes it, or None for whatever is not exactly that.

    A short cut for archives of very many members: one read and no more than a few comparisons each. It accepts only
    what the checks below would accept too, with the same result.
    """
    if entry.method or entry.flags & ~0x800 or entry.packed_size != entry.size or entry.is_symlink or entry.comment:
        return None
    room = _LOCAL_BYTES + len(entry.raw_name) + 20 + npy.PROBE_BYTES
    if entry.offset + room > file.size:
        return None
    start = file.read(entry.offset, room)
    signature, _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = _LOCAL.unpack_from(start)
    head = _LOCAL_BYTES + name_bytes + extra_bytes
    body = head + 10
    extra, zip64 = start[head - extra_bytes : head], _ZIP64.pack(1, 16, entry.size, entry.size)
    if (
        signature != _LOCAL_SIGNATURE
        or flags & ~0x800
        or (flags != entry.flags and not entry.raw_name.isascii())
        or method
        or start[_LOCAL_BYTES : _LOCAL_BYTES + name_bytes] != entry.raw_name
        or crc != entry.crc
        or not (packed == size == entry.size or (packed == size == 0xFFFFFFFF and extra == zip64))
        or start[head : head + 8] != _NPY_1
    ):
        return None
    data = body + int.from_bytes(start[head + 8 : body], "little")
    header = npy.parse_common(start[body:data]) if data <= min(room, head + limits.header_bytes) else None
    if header is None or header.nbytes != entry.size - (data - head):
        return None
    extent = Extent(file, entry.offset + data, header.nbytes, crc, crc32(start[head:data]))
    tensor = Tensor(entry.name.removesuffix(".npy"), header.dtype, header.shape, extent, header.big, header.fortran)
    return entry.offset + head + entry.size, tensor


def _check_overlaps(spans: array.array[int]) -> None:
    """Begin and end of each member: those that share bytes are how small archives inflate to terabytes."""
    reached = 0
    begins, ends = spans[::2], spans[1::2]
    pairs: Iterable[tuple[int, int]] = zip(begins, ends, strict=True)
    if any(map(operator.gt, ends, begins[1:])):
        pairs = sorted(pairs)
    for begin, end in pairs:
        if begin < reached:
            raise CorruptError(
                f"members overlap: one begins at byte {begin}, before another ends (expected byte {reached} or later)"
            )
        reached = end


def _no_arrays(blobs: list[Tensor]) -> None:
    if any(tensor.name.rpartition("/")[2] == "data.pkl" for tensor in blobs):
        raise UnsupportedError(
            "a PyTorch checkpoint, not an npz; it contains a pickle",
            hint="load it in PyTorch with weights_only=True and save the state dict with safetensors.torch.save_file",
        )
    raise UnsupportedError(
        f"a zip archive without arrays (found {len(blobs)} other members, {quoted(blobs[0].name)} for one)",
        hint="if it holds data files, unpack it and convert those",
    )


def _local_header(file: Source, entry: Entry) -> tuple[int, bytes]:
    """Where the member's bytes begin, and the first of them that came along; checked against the directory."""
    room = _LOCAL_BYTES + len(entry.raw_name) + 20 + npy.PROBE_BYTES
    start = file.read(entry.offset, min(room, file.size - entry.offset)) if entry.offset < file.size else b""
    if len(start) < _LOCAL_BYTES or start[:4] != _LOCAL_SIGNATURE:
        raise CorruptError(f"no member header (expected {_LOCAL_SIGNATURE!r} at byte {entry.offset})")
    name_bytes = int.from_bytes(start[26:28], "little")
    begin = _LOCAL_BYTES + name_bytes + int.from_bytes(start[28:30], "little")
    name = start[_LOCAL_BYTES : _LOCAL_BYTES + name_bytes]
    if name != entry.raw_name:
        raise CorruptError(f"local and central names differ (expected {entry.raw_name[:200]!r}, found {name[:200]!r})")
    flags = int.from_bytes(start[6:8], "little")
    if (flags ^ entry.flags) & 0x800 and not name.isascii():
        raise CorruptError(f"local and central header differ on whether the name is UTF-8 (found {name[:200]!r})")
    if (flags | entry.flags) & 0x2041:
        raise UnsupportedError("the member is encrypted", hint="unpack it with its password and pack it again without")
    if (flags | entry.flags) & 0x20:
        raise UnsupportedError("the member is stored as a patch to another file")
    method = int.from_bytes(start[8:10], "little")
    if method != entry.method:
        raise CorruptError(f"local and central compression methods differ (expected {entry.method}, found {method})")
    _check_local_sizes(start, entry, flags)
    if entry.is_symlink:
        raise UnsupportedError("the member is a symlink entry, not an array", hint="pack the file it points to")
    return entry.offset + begin, start[begin:]


def _check_local_sizes(start: bytes, entry: Entry, flags: int) -> None:
    """Sizes and checksum in the local header are those of the directory, or left out (zero) by streaming writers."""
    if flags & 8:
        return
    found = tuple(int.from_bytes(start[at : at + 4], "little") for at in (14, 18, 22))
    if found == (0, 0, 0):
        return
    for what, local, central in zip(
        ("checksums", "compressed sizes", "sizes"), found, (entry.crc, entry.packed_size, entry.size), strict=True
    ):
        if local not in (central, 0xFFFFFFFF):
            raise CorruptError(f"local and central {what} differ (expected {central}, found {local})")
    _check_local_zip64(start, found[1], found[2], entry)


def _check_local_zip64(start: bytes, packed: int, size: int, entry: Entry) -> None:
    """The local zip64 field, where the plain sizes point to it: size, then compressed size, zeros if left out."""
    name_bytes, extra_bytes = (int.from_bytes(start[at : at + 2], "little") for at in (26, 28))
    extra = start[_LOCAL_BYTES + name_bytes : _LOCAL_BYTES + name_bytes + extra_bytes]
    at = 0
    while at + 4 <= len(extra):
        kind, length = int.from_bytes(extra[at : at + 2], "little"), int.from_bytes(extra[at + 2 : at + 4], "little")
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            for plain, central in ((size, entry.size), (packed, entry.packed_size)):
                if plain == 0xFFFFFFFF and len(field) >= 8:
                    local, field = int.from_bytes(field[:8], "little"), field[8:]
                    if local not in (central, 0):
                        raise CorruptError(f"local and central sizes differ (expected {central}, found {local})")
        at += 4 + length


def _tensor(
    file: Source, entry: Entry, begin: int, start: bytes, limits: Limits, long_headers: Budget, versions: set[str]
) -> Tensor:
    """The array, or the blob, that a member is; the version of its header is added to `versions`."""
    method = METHODS.get(entry.method)
    read: Callable[[int], bytes]
    if entry.method == 0:
        if entry.packed_size != entry.size:
            raise CorruptError(f"a stored member with two sizes (expected {entry.size}, found {entry.packed_size})")
        read = partial(_first, start, entry.size, partial(file.read, begin))
    elif method is not None:
        whole = Compressed(file, begin, entry, method, 0)
        read = partial(_first, whole.start(npy.PROBE_BYTES), entry.size, whole.start)
    else:
        raise UnsupportedError(
            f"unsupported compression method {entry.method} ({method_name(entry.method)}; expected stored, deflate, "
            "bzip2 or lzma)",
            hint="unpack the archive and pack it again with a common zip program",
        )
    first = read(6)
    if first != npy.MAGIC:
        return _blob(file, entry, begin, method, first)
    head_bytes, header = npy.read_header(read, entry.size, limits, long_headers)
    versions.add(header.version)
    npy.check_size(header, entry.size - head_bytes)
    if method is not None:
        data: Extent | Compressed = Compressed(file, begin, entry, method, head_bytes)
    else:
        seed = crc32(start[:head_bytes] if head_bytes <= len(start) else read(head_bytes))
        data = Extent(file, begin + head_bytes, entry.size - head_bytes, entry.crc, seed)
    tensor = npy.make_tensor(entry.name.removesuffix(".npy"), header, data, limits)
    if entry.comment:
        tensor.origin = load_origin(entry.comment, tensor)
    return tensor


def _first(known: bytes, size: int, more: Callable[[int], bytes], count: int) -> bytes:
    """The first `count` of a member's `size` bytes; `known` are those that came along with its header."""
    count = min(count, size)
    return known[:count] if count <= len(known) else more(count)


def _blob(file: Source, entry: Entry, begin: int, method: Method | None, first: bytes) -> Tensor:
    base = entry.name.rpartition("/")[2]
    if base.endswith(".npy") and not base.startswith("._") and not entry.name.startswith("__MACOSX/"):
        if entry.size == 0:
            raise CorruptError("the member is empty (expected an npy file)")
        raise CorruptError(f"no npy file (expected {npy.MAGIC!r} at byte 0, found {first!r})")
    if method is None:
        return Tensor(entry.name, dtypes.BLOB, (entry.size,), Extent(file, begin, entry.size, entry.crc))
    return Tensor(entry.name, dtypes.BLOB, (entry.size,), Compressed(file, begin, entry, method, 0))
