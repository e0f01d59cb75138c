"""Two tensors of one shape, read side by side: equal bytes are passed over, others are looked at as numbers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from math import lcm
from typing import TYPE_CHECKING, cast

from convert.codec import crc32, crc32_combine
from convert.comparison import Tally, Tolerance
from convert.dtypes import BLOB, OBJECT
from convert.errors import ConvertError, PolicyError
from convert.files import read_ahead
from convert.steps import pipe_of
from convert.tensor import Extent, Tensor
from convert.threads import BUFFER_BYTES, Work, new_buffer
from convert.transfer import SPAN_BYTES, check_crc, needs_turn

if TYPE_CHECKING:
    from convert.comparenum import Comparer
    from convert.progress import Progress

_CHUNK_BYTES = BUFFER_BYTES // 2
"""Of each side; both together are what a thread keeps in its core's cache."""


class Pair:
    """Two tensors of one shape, whose types are the same or both numbers.

    Attributes:
        a: On one side.
        b: On the other.
        tally: What differs between them, complete once all work is done.
    """

    def __init__(self, a: Tensor, b: Tensor, tolerance: Tolerance | None) -> None:
        self.a = a
        self.b = b
        self._a, self._b = a, b = as_bytes(a), as_bytes(b)
        self._same_type = a.dtype == b.dtype
        self.tally = Tally(bits=0 if self._same_type else None)
        self._tolerance = tolerance
        self._progress: Progress | None = None
        self._lock = threading.Lock()
        self._comparer: Comparer | None = None
        self._turns = a.nbytes > 0 and (needs_turn(a) or needs_turn(b))
        self._unequal = False
        self._left = 0

    def work(self, progress: Progress | None) -> Iterator[Work]:
        """Pieces that any thread may do, in any order."""
        self._progress = progress
        a, b = self._a, self._b
        extents = isinstance(a.data, Extent) and isinstance(b.data, Extent)
        if a.nbytes == 0 and b.nbytes == 0:
            yield self._nothing
        elif self._turns:
            if extents and _lie_alike(a, b):
                yield from self._spans(a.changed(stored_fortran=False), b.changed(stored_fortran=False))
        elif extents:
            yield from self._spans(a, b)
        else:
            yield self._in_order

    def rest(self) -> Iterator[Work]:
        """What takes more memory than each thread may have, for one thread, when all other work is done."""
        if self._turns and (self._unequal or not _lie_alike(self._a, self._b)):
            yield self._in_order

    def _nothing(self, _: memoryview) -> None:
        """Checksums are owed even so."""
        for tensor in (self._a, self._b):
            for _chunk in tensor.chunks():
                pass

    def _spans(self, tensor_a: Tensor, tensor_b: Tensor) -> Iterator[Work]:
        a, b = _Side(tensor_a), _Side(tensor_b)
        count = tensor_a.count
        unit = lcm(a.unit, b.unit)
        step = max(_CHUNK_BYTES // max(a.stored(unit), b.stored(unit)), 1) * unit
        begins = range(0, count, step * (SPAN_BYTES // _CHUNK_BYTES))
        self._left = len(begins)
        for begin in begins:
            yield partial(self._span, a, b, begin, min(begin + begins.step, count), step)

    def _span(self, a: _Side, b: _Side, begin: int, end: int, step: int, buffer: memoryview) -> None:
        """Elements `[begin, end)`, `step` at a time."""
        room = bytearray(a.stored(min(step, end - begin)))
        view, needed = memoryview(room), b.stored(step)
        buffer = buffer if needed <= len(buffer) else new_buffer(needed)
        crc_a = crc_b = 0
        a.expect(begin, end)
        b.expect(begin, end)
        for at in range(begin, end, step):
            stop = min(at + step, end)
            part_a, crc_a = a.read(at, stop, view, crc_a)
            part_b, crc_b = b.read(at, stop, buffer, crc_b)
            # A bytearray is compared as fast as memory can be read, a memoryview byte by byte.
            mine = room if len(part_a) == len(room) and not a.pipe.steps else bytearray(part_a)
            if not self._same_type or mine != part_b:
                if self._turns:
                    self._unequal = True  # where, `_in_order` will find out
                else:
                    self._look(part_a, part_b, at)
            self._count(len(part_a))
        with self._lock:
            a.sums[begin] = a.stored(end) - a.stored(begin), crc_a
            b.sums[begin] = b.stored(end) - b.stored(begin), crc_b
            self._left -= 1
            if self._left:
                return
        a.check()
        b.check()

    def _in_order(self, _: memoryview) -> None:
        """Tensors that come only from first to last."""
        bits_a, bits_b = self._a.dtype.bits, self._b.dtype.bits
        unit = lcm(lcm(8, bits_a) // bits_a, lcm(8, bits_b) // bits_b)
        unit_a, unit_b = unit * bits_a // 8, unit * bits_b // 8
        chunk = max(_CHUNK_BYTES // max(unit_a, unit_b), 1)
        chunks_a, chunks_b = self._a.chunks(chunk * unit_a), self._b.chunks(chunk * unit_b)
        at = 0
        for part_a, part_b in side_by_side(chunks_a, chunks_b, unit_a, unit_b):
            if not self._same_type or bytearray(part_a) != part_b:
                self._look(part_a, part_b, at)
            at += len(part_a) // unit_a * unit
            if not self._unequal:
                self._count(len(part_a))

    def _look(self, part_a: memoryview, part_b: memoryview, first: int) -> None:
        """Bytes that differ, or have other types."""
        found = self._made().tally(part_a, part_b, first)
        with self._lock:
            self.tally.add(found)

    def _made(self) -> Comparer:
        with self._lock:
            if self._comparer is None:
                from convert.comparenum import Comparer

                x87 = all(is_known(tensor) for tensor in (self._a, self._b))
                self._comparer = Comparer(self._a.dtype, self._b.dtype, self._tolerance, x87)
            return self._comparer

    def _count(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress.add(nbytes, self.a.name)


class _Side:
    """One of the two, read at any element.

    Attributes:
        pipe: From stored bytes to little-endian ones.
        unit: Elements are read in multiples of this.
        sums: Lengths and CRC-32s of stored bytes that were read, by the element where they begin.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._data = cast(Extent, tensor.data)
        self._bits = tensor.dtype.bits
        self.pipe = pipe_of(tensor)
        self.unit = lcm(self.pipe.unit_out * 8, self._bits) // self._bits
        self.sums: dict[int, tuple[int, int]] = {}

    def stored(self, count: int) -> int:
        """Stored bytes of the first `count` elements."""
        return count * self._bits // 8 // self.pipe.unit_out * self.pipe.unit_in

    def expect(self, begin: int, end: int) -> None:
        """Elements `[begin, end)` will be read in order, which a remote file likes to know."""
        read_ahead(self._data.file, self._data.offset + self.stored(begin), self._data.offset + self.stored(end))

    def read(self, begin: int, end: int, room: memoryview, crc: int) -> tuple[memoryview, int]:
        """Elements `[begin, end)`, in `room` or elsewhere, and the CRC-32 continued over their stored bytes."""
        offset = self.stored(begin)
        part = room[: self.stored(end) - offset]
        try:
            self._data.file.readinto(self._data.offset + offset, part)
            if self._data.crc is not None:
                crc = crc32(part, crc)
            if self.pipe.steps:
                part = memoryview(self.pipe.apply(part, offset)).cast("B")
        except ConvertError as err:
            raise err.at(self._tensor.path, self._tensor.name) from None
        return part, crc

    def check(self) -> None:
        """The checksum of all that was read."""
        if self._data.crc is None:
            return
        crc = self._data.seed
        for _, (nbytes, part) in sorted(self.sums.items()):
            crc = crc32_combine(crc, part, nbytes)
        try:
            check_crc(self._data, crc)
        except ConvertError as err:
            raise err.at(self._tensor.path, self._tensor.name) from None


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    """Whether equal stored bytes mean equal tensors."""
    keys = [(t.stored_shape, t.shape, t.stored, t.dtype, t.stored_big, t.stored_fortran) for t in (a, b)]
    extents = isinstance(a.data, Extent) and isinstance(b.data, Extent)
    return extents and keys[0] == keys[1] and not a.steps and not b.steps


def side_by_side(
    a: Iterator[memoryview], b: Iterator[memoryview], unit_a: int, unit_b: int
) -> Iterator[tuple[memoryview, memoryview]]:
    """Equally many units of both at a time, whatever the sizes of their chunks; both are read to their ends."""
    rest_a = rest_b = memoryview(b"")
    while True:
        rest_a, rest_b = _filled(rest_a, a, unit_a), _filled(rest_b, b, unit_b)
        count = min(len(rest_a) // unit_a, len(rest_b) // unit_b)
        if count == 0:
            return
        yield rest_a[: count * unit_a], rest_b[: count * unit_b]
        rest_a, rest_b = rest_a[count * unit_a :], rest_b[count * unit_b :]


def _filled(rest: memoryview, chunks: Iterator[memoryview], unit: int) -> memoryview:
    """What is left of a chunk, with the next one behind it where that is less than a unit."""
    while len(rest) < unit:
        more = next(chunks, None)
        if more is None:
            break
        rest = memoryview(bytes(rest) + bytes(more)) if len(rest) else more
    return rest


def is_known(tensor: Tensor) -> bool:
    """False for long doubles that may be another platform's; they are read until they prove to be x87."""
    if tensor.dtype.kind != "longdouble":
        return True
    from convert.longdouble import prove_x87

    item_bytes = tensor.dtype.swap
    try:
        prove_x87(tensor.changed(stored_fortran=False, fortran=False).chunks(), item_bytes)
    except PolicyError:
        return False
    return True


def digest(tensor: Tensor, progress: Progress | None) -> bytes:
    """SHA-256 of the little-endian row-major bytes."""
    found = hashlib.sha256()
    for chunk in as_bytes(tensor).chunks():
        found.update(chunk)
        if progress is not None:
            progress.add(len(chunk), tensor.name)
    return found.digest()


def as_bytes(tensor: Tensor) -> Tensor:
    """A pickle as the bytes it is; everything else stays."""
    if tensor.dtype is not OBJECT:
        return tensor
    shape = (tensor.data.nbytes,)
    return tensor.changed(dtype=BLOB, stored=BLOB, shape=shape, stored_shape=shape, stored_fortran=False)
