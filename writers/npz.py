"""NumPy's archive of arrays: stored, byte for byte as `np.savez` writes it, or deflated in parallel.

Every member has a zip64 field in its local header, as numpy forces it; dates are 1980-01-01, so the same input gives
the same bytes. Where the target cannot seek, sizes and checksum of a member follow its data, as in zipfile's output to
such a stream. What numpy has no place for goes where other readers do not look: how an encoded tensor was before in
the comment of its member, metadata in the comment of the archive.

Sources: PKWARE APPNOTE.TXT 6.3.10; Python's `zipfile` and numpy's `savez` for the choices they leave.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from convert import dtypes
from convert.codec import DEFAULT_LEVEL, DEFLATE_END, WINDOW_BYTES, crc32, crc32_combine, deflate_block
from convert.errors import ConvertError, InputError, PolicyError, gather
from convert.memory import dump_metadata, dump_origin
from convert.output import FileOutput, committed, open_output
from convert.threads import in_order
from convert.transfer import Slot, chunks, fill
from convert.writing import Begun
from writers.npy import header, too_large

if TYPE_CHECKING:
    from convert.plan import Plan
    from convert.tensor import Tensor
    from convert.writing import Settings

_LOCAL = struct.Struct("<4s2B4HL2L2H")
_ZIP64 = struct.Struct("<2H2Q")
_CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_DATE = 1 << 5 | 1
"""1980-01-01, the earliest a zip file can say."""
_LARGE = (1 << 31) - 1
"""From here on `zipfile` uses zip64 fields in the directory."""
_ATTRIBUTES = 0o600 << 16
_ALIGN_FIELD = 0xD935
"""The extra field Android's zipalign pads with: alignment (2 bytes), zeros."""
_DESCRIPTOR = struct.Struct("<4sL2Q")
_FOLLOWS = 0x8
"""The flag of members whose sizes and checksum follow their data."""
_MAX_NAME_BYTES = 0xFFFF
_BLOCK_BYTES = 1 << 20
_TOGETHER_BYTES = 128 << 10
"""Members smaller than this are deflated several at a time, so that threads need not meet for each."""
_STORED, _DEFLATED = 0, 8
_ENTRIES = 4096
"""Entries of the directory that are held and written at once."""


def holds(tensor: Tensor) -> bool:
    if tensor.dtype.kind == "object":
        return False
    return tensor.dtype.descr is not None or tensor.dtype.layout is not None or tensor.dtype is dtypes.BLOB


def remembers(metadata: Mapping[str, str], encoded: bool) -> bool:
    try:
        dump_metadata(dict(metadata), "")
    except PolicyError:
        return False
    return True


def check(plan: Plan) -> list[ConvertError]:
    """Names that a zip file, or those who read it, can hold."""
    problems = too_large(plan)
    for tensor in plan.tensors:
        name = tensor.name
        length = len(name) if name.isascii() else len(name.encode("utf-8", "surrogatepass"))
        if length > _MAX_NAME_BYTES - 4:
            message = (
                f"the name is too long for a zip file (expected at most {_MAX_NAME_BYTES - 4} bytes, found {length})"
            )
        elif "\0" in name:
            message = "the name contains NUL, where zip readers cut it"
        else:
            continue
        hint = "--rename REGEX=REPLACEMENT changes it"
        problems.append(PolicyError(message, path=tensor.path, tensor=name, hint=hint))
    return problems + _blobs_alone(plan) + _blobs_named_like_arrays(plan)


def _blobs_alone(plan: Plan) -> list[ConvertError]:
    """An archive without arrays is no npz: no reader would take it for one."""
    if not plan.tensors or any(tensor.dtype is not dtypes.BLOB for tensor in plan.tensors):
        return []
    first = plan.tensors[0]
    what = "there would be no array in the npz, only members that are none"
    hint = "take an array along; a safetensors target and --policy blob=uint8 keep the bytes as tensors"
    return [PolicyError(what, path=first.path, tensor=first.name, hint=hint)]


def _blobs_named_like_arrays(plan: Plan) -> list[ConvertError]:
    """A blob keeps its whole name, an array's member has `.npy` added; they must not meet."""
    blobs = [tensor for tensor in plan.tensors if tensor.dtype is dtypes.BLOB]
    arrays = {tensor.name + ".npy" for tensor in plan.tensors if tensor.dtype is not dtypes.BLOB} if blobs else set()
    return [
        PolicyError(
            "an array would have the same member name",
            path=blob.path,
            tensor=blob.name,
            hint="--rename REGEX=REPLACEMENT changes it; --policy blob=skip leaves it out",
        )
        for blob in blobs
        if blob.name in arrays
    ]


class _Member:
    """One member of the archive being written."""

    __slots__ = ("comment", "crc", "extra", "flags", "head", "method", "name", "offset", "packed", "size", "tensor")

    def __init__(self, tensor: Tensor, method: int, follows: bool) -> None:
        blob = tensor.dtype is dtypes.BLOB
        name = tensor.name if blob else tensor.name + ".npy"
        self.tensor = tensor
        self.head = b"" if blob else header(tensor)
        self.flags = (0 if name.isascii() else 0x800) | (_FOLLOWS if follows else 0)
        self.name = name.encode("utf-8")
        self.method = method
        self.size = self.packed = len(self.head) + tensor.nbytes
        self.crc = 0
        self.offset = 0
        self.extra = b""
        self.comment = b"" if tensor.origin is None else dump_origin(tensor.origin)

    @property
    def local_bytes(self) -> int:
        return _LOCAL.size + len(self.name) + _ZIP64.size + len(self.extra)

    def align(self, to: int) -> None:
        """Pad the local header so that the array's first byte lies at a multiple of `to`."""
        padding = -(self.offset + self.local_bytes + len(self.head)) % to
        if padding:
            while padding < 6:
                padding += to
            self.extra = struct.pack("<3H", _ALIGN_FIELD, padding - 4, to) + bytes(padding - 6)

    @property
    def all_bytes(self) -> int:
        """All that it takes, what follows its data included."""
        return self.local_bytes + self.packed + (_DESCRIPTOR.size if self.flags & _FOLLOWS else 0)

    def local(self) -> bytes:
        size, packed, crc = (0, 0, 0) if self.flags & _FOLLOWS else (self.size, self.packed, self.crc)
        zip64 = _ZIP64.pack(1, 16, size, packed)
        fixed = _LOCAL.pack(
            b"PK\x03\x04", 45, 0, self.flags, self.method, 0, _DATE, crc, 0xFFFFFFFF, 0xFFFFFFFF,
            len(self.name), len(zip64) + len(self.extra),
        )  # fmt: skip
        return fixed + self.name + zip64 + self.extra

    def descriptor(self) -> bytes:
        """What follows the data in a target that cannot seek."""
        return _DESCRIPTOR.pack(b"PK\x07\x08", self.crc, self.packed, self.size)

    def central(self) -> bytes:
        size, packed, offset = self.size, self.packed, self.offset
        large: list[int] = []
        if size > _LARGE or packed > _LARGE:
            large += [size, packed]
            size = packed = 0xFFFFFFFF
        if offset > _LARGE:
            large.append(offset)
            offset = 0xFFFFFFFF
        extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        fixed = _CENTRAL.pack(
            b"PK\x01\x02", 45, 3, 45, 0, self.flags, self.method, 0, _DATE, self.crc, packed, size,
            len(self.name), len(extra), len(self.comment), 0, 0, _ATTRIBUTES, offset,
        )  # fmt: skip
        return fixed + self.name + extra + self.comment


def write(plan: Plan, settings: Settings) -> FileOutput:
    """Write the plan's tensors; the archive is complete but not yet in its place."""
    begun = begin(plan, settings)
    if begun is None:
        return _write_deflated(plan, settings)
    with committed(begun.output):
        fill(
            begun.slots,
            settings.jobs,
            head=begun.head,
            tail=begun.tail,
            progress=settings.progress,
            spread=settings.spread,
        )
        begun.finish()
    return begun.output


def begin(plan: Plan, settings: Settings) -> Begun | None:
    """Where everything goes, for whoever brings the bytes in any order; None if it is to be deflated."""
    if settings.level is not None:
        return None
    comment = dump_metadata(plan.metadata, plan.target)
    output = open_output(plan.target, settings)
    with committed(output):
        members = [_Member(tensor, _STORED, output.sequential) for tensor in plan.tensors]
        at = 0
        for member in members:
            member.offset = at
            if settings.align > 1:
                member.align(settings.align)
            at += member.all_bytes
        output.reserve(at)
    finish = partial(_write_directory, members, output, at, comment)
    return Begun(output, _slots(members, output), _head, _tail, finish)


def _write_deflated(plan: Plan, settings: Settings) -> FileOutput:
    comment = dump_metadata(plan.metadata, plan.target)
    output = open_output(plan.target, settings)
    with committed(output):
        members = [_Member(tensor, _DEFLATED, output.sequential) for tensor in plan.tensors]
        end = _Deflating(members, output, settings).write()
        _write_directory(members, output, end, comment)
    return output


def _slots(members: list[_Member], output: FileOutput) -> Iterator[Slot]:
    for member in members:
        head_bytes = member.local_bytes + len(member.head)
        yield Slot(member.tensor, output, member.offset + head_bytes, head_bytes, crc32(member.head), member)


def _head(slot: Slot) -> bytes:
    member = cast(_Member, slot.tag)
    member.crc = slot.crc
    return member.local() + member.head


def _tail(slot: Slot) -> bytes:
    member = cast(_Member, slot.tag)
    member.crc = slot.crc
    return member.descriptor()


class _Block(NamedTuple):
    """A piece of a member, so that threads can share one tensor; `before` is the end of the piece before."""

    member: _Member
    data: memoryview
    before: bytes
    is_first: bool
    is_last: bool


class _Packed(NamedTuple):
    block: _Block
    data: bytes
    crc: int


class _Deflating:
    """Deflates members in blocks, in parallel, and writes them in order."""

    def __init__(self, members: list[_Member], output: FileOutput, settings: Settings) -> None:
        self._output = output
        self._settings = settings
        self._level = settings.level or DEFAULT_LEVEL
        self._at = 0
        self._pending: list[bytes] = []
        self._pending_bytes = self._flushed = 0
        self._problems: list[ConvertError] = []
        self._pieces = self._cut(members)
        if output.sequential:
            output.reserve(sum(member.all_bytes for member in members))

    def write(self) -> int:
        """Returns where the last member ends."""
        in_order(self._draw, self._pack, self._put, self._settings.jobs)
        if self._problems:
            raise gather(self._problems)
        self._flush()
        return self._at

    def _cut(self, members: list[_Member]) -> Iterator[_Block]:
        """Blocks without the header, valid until the next; their borders do not depend on the number of threads."""
        for member in members:
            left = member.tensor.nbytes
            try:
                if not left:
                    for _ in chunks(member.tensor, _BLOCK_BYTES):
                        pass  # a checksum is owed even so
                    yield _Block(member, memoryview(b""), b"", True, True)
                before, first = b"", True
                for chunk in chunks(member.tensor, _BLOCK_BYTES) if left else ():
                    left -= len(chunk)
                    yield _Block(member, chunk, before, first, not left)
                    before, first = bytes(chunk[-WINDOW_BYTES:]) if left else b"", False
            except (InputError, PolicyError) as err:
                self._problems.extend(err.problems)  # go on, so that all damaged tensors are named together

    def _draw(self, buffer: bytearray) -> list[_Block] | None:
        """The next blocks with their bytes in the buffer, the header first in a member's first block."""
        places: list[tuple[_Block, int, int]] = []
        at = 0
        for block in self._pieces:
            head = block.member.head if block.is_first else b""
            middle, end = at + len(head), at + len(head) + len(block.data)
            if len(buffer) < end:
                buffer.extend(bytes(end - len(buffer)))
            buffer[at:middle] = head
            buffer[middle:end] = block.data
            places.append((block, at, end))
            at = end
            if at > _TOGETHER_BYTES or not block.is_last:
                break
        view = memoryview(buffer)
        return [block._replace(data=view[begin:end]) for block, begin, end in places] or None

    def _pack(self, blocks: list[_Block]) -> list[_Packed]:
        level = self._level
        return [_Packed(block, deflate_block(block.data, level, block.before), crc32(block.data)) for block in blocks]

    def _put(self, packed: list[_Packed]) -> None:
        for block, data, crc in packed:
            member = block.member
            if block.is_first:
                member.crc, member.packed = 0, 0
                member.offset = self._at
                self._at += member.local_bytes
            member.crc = crc32_combine(member.crc, crc, len(block.data)) if member.packed else crc
            member.packed += len(data)
            follows = member.flags & _FOLLOWS
            if block.is_last:
                member.packed += len(DEFLATE_END)
            if block.is_first:
                whole = block.is_last or follows
                self._append(member.local() if whole else bytes(member.local_bytes))
            self._append(data)
            if block.is_last:
                self._append(DEFLATE_END, member.descriptor() if follows else b"")
            if block.is_last and not block.is_first and not follows:
                self._flush()
                self._output.write_at(member.offset, member.local())
            self._at = member.offset + (member.all_bytes if block.is_last else member.local_bytes + member.packed)
            if self._settings.progress is not None:
                self._settings.progress.add(len(block.data), member.tensor.name)

    def _append(self, *parts: bytes) -> None:
        """Bytes that follow each other are written together."""
        self._pending += parts
        self._pending_bytes += sum(map(len, parts))
        if self._pending_bytes > _BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._output.write_at(self._flushed, b"".join(self._pending))
        self._flushed += self._pending_bytes
        self._pending, self._pending_bytes = [], 0


def _write_directory(members: list[_Member], output: FileOutput, begin: int, comment: bytes) -> None:
    """Central directory and end record; the comment is the archive's."""
    at = begin
    for first in range(0, len(members), _ENTRIES):
        entries = b"".join(member.central() for member in members[first : first + _ENTRIES])
        output.write_at(at, entries)
        at += len(entries)
    count, size = len(members), at - begin
    end64 = b""
    if count > 0xFFFF or begin > _LARGE or size > _LARGE:
        end64 = _END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, begin)
        end64 += _LOCATOR.pack(b"PK\x06\x07", 0, at, 1)
        count, size, begin = min(count, 0xFFFF), min(size, 0xFFFFFFFF), min(begin, 0xFFFFFFFF)
    end = _END.pack(b"PK\x05\x06", 0, 0, count, count, size, begin, len(comment))
    output.write_at(at, end64 + end + comment)
