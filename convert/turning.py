"""Fortran order to C order on the way from source to target, within the memory bound.

What can be read at any offset is turned tile by tile, by several threads. What comes only in order (a deflated
member) first goes to a spool, a nameless temporary file beside the target; so does what must leave in order and whose
rows are too far apart in the source.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from math import lcm, prod
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from convert.codec import crc32
from convert.errors import InputError, PolicyError
from convert.files import Spool
from convert.steps import aligned, pipe_of
from convert.tensor import Extent, Stream, Tensor
from convert.threads import Work, check_stopped, new_buffer, run
from convert.transfer import CHUNK_BYTES, Slot, check_crc, stored_chunks
from convert.transpose import TILE_BYTES, Tile, Turner, cut, runs, slabs, tiles, turn, write_tile

if TYPE_CHECKING:
    import numpy.typing as npt

    from convert.output import OutputFile

_SHARED_BYTES = 64 << 20
"""What a tile of a large tensor may hold; with numpy and the rest of the process it stays below 128 MiB."""
_TURNERS = 4
"""Threads that turn it; more would wait for the memory."""
_STRIPS_BYTES = 4 << 20
"""What the strips of these threads together may hold; half of it where a cast may make them longer."""
_SMALL_BYTES = 12 << 20
"""What all threads together may hold of tensors that are one tile each."""

_own = threading.local()

_large = threading.Lock()
"""Held while a large tensor is turned: one such tile is in memory at a time, and all threads turn that."""


def _turner() -> Turner:
    """The buffers of this thread."""
    turner: Turner | None = getattr(_own, "turner", None)
    if turner is None:
        turner = _own.turner = Turner()
    return turner


def turned_chunks(tensor: Tensor, chunk_bytes: int) -> Iterator[memoryview]:
    """The tensor's bytes in the order asked for, first to last; see `Tensor.chunks`."""
    pipe = pipe_of(tensor)
    item_bytes = tensor.stored.item_bytes
    whole = lcm(pipe.unit_in, max(item_bytes, 1))  # chunks hold whole elements
    chunk_bytes = aligned(chunk_bytes, whole if whole <= CHUNK_BYTES else pipe.unit_in)
    with contextlib.ExitStack() as spools:
        data = _extent(tensor, None, spools)
        _verify(data)
        read = _reader(data)
        rows = slabs(tensor.stored_shape, item_bytes)
        if rows is None:
            turned = spools.enter_context(Spool(None))
            for tile in tiles(tensor.stored_shape, item_bytes):
                for strip, view in _turner().strips(read, tensor.stored_shape, item_bytes, tile):
                    write_tile(turned.write_at, tensor.stored_shape, item_bytes, strip, view)
            views: Iterator[memoryview] = (
                memoryview(chunk) for chunk in stored_chunks(Extent(turned, 0, data.nbytes), chunk_bytes)
            )
        else:
            turner = Turner()  # one for all, for what is given back between them may stay with this process
            views = (view for tile in rows for _, view in turner.strips(read, tensor.stored_shape, item_bytes, tile))
        offset = 0
        for view in views:
            check_stopped()
            for begin in range(0, len(view), chunk_bytes):
                part = view[begin : begin + chunk_bytes]
                yield memoryview(pipe.apply(part, offset)).cast("B")
                offset += len(part)


def turn_work(
    slot: Slot, finish: Callable[[Slot], None], count: Callable[[int, str], None], jobs: int
) -> Iterator[Work]:
    """The pieces of work that put one tensor, turned, into its slot."""
    tensor = slot.tensor
    job = _Turning(slot, finish, count, jobs)
    if isinstance(tensor.data, Extent) and not getattr(tensor.data.file, "is_remote", False):
        job.left = 2
        yield job.checksum
        yield job.tiles
    else:
        yield job.spooled


class _Turning:
    """One tensor being turned into its slot."""

    def __init__(
        self, slot: Slot, finish: Callable[[Slot], None], count: Callable[[int, str], None], jobs: int
    ) -> None:
        self._slot = slot
        self._finish = finish
        self._count = count
        self._jobs = jobs
        self._pipe = pipe_of(slot.tensor)
        self._lock = threading.Lock()
        self.left = 1

    def checksum(self, _: memoryview) -> None:
        """Tiles are read out of order; the source's checksum has a pass of its own."""
        self._named(_verify, cast(Extent, self._slot.tensor.data))
        self._done()

    def tiles(self, _: memoryview) -> None:
        """All of it, from where it can be read at any offset."""
        self._named(self._put, cast(Extent, self._slot.tensor.data))
        self._done()

    def spooled(self, _: memoryview) -> None:
        """A tensor that comes only in order, or from far away: through a spool beside the target."""
        tensor = self._slot.tensor
        with contextlib.ExitStack() as spools:
            path = getattr(self._slot.out, "path", None)  # an array in memory has none
            data = _extent(tensor, path and os.path.dirname(os.path.abspath(path)), spools)
            if data is tensor.data:
                self._named(_verify, data)
            self._named(self._put, data)
        self._done()

    def _put(self, data: Extent) -> None:
        if data.nbytes <= _SMALL_BYTES // self._jobs:
            self._put_small(data)
        else:
            self._put_large(data)

    def _put_small(self, data: Extent) -> None:
        """One read, so that threads with a tensor each do not wait for one another."""
        shape, item_bytes = self._slot.tensor.stored_shape, self._slot.tensor.stored.item_bytes
        for tile in tiles(shape, item_bytes):
            for strip, view in _turner().strips(_reader(data), shape, item_bytes, tile):
                self._write(strip, view)

    def _put_large(self, data: Extent) -> None:
        """One thread reads a tile, then all threads turn and write its strips.

        A tile takes many thousand short reads. Python's lock is given up and taken for each, so two threads that read
        wait for one another and are no faster than one; and one that only turns, meanwhile, waits for one that reads.
        """
        shape, item_bytes = self._slot.tensor.stored_shape, self._slot.tensor.stored.item_bytes
        threads = min(self._jobs, _TURNERS)
        strip_bytes = _STRIPS_BYTES // max(2, threads) // (2 if self._pipe.steps else 1)
        with _large:
            turner = Turner()
            for tile in tiles(shape, item_bytes, _SHARED_BYTES):
                stored = turner.load(_reader(data), shape, item_bytes, tile)

                def put(strip: Tile, _: memoryview, stored: npt.NDArray[Any] = stored, tile: Tile = tile) -> None:
                    room = memoryview(bytearray(prod(strip.extent) * item_bytes))
                    self._write(strip, turn(stored, tile, strip, room))

                strips = cut(tile, item_bytes, strip_bytes)
                run((partial(put, strip) for strip in strips), threads)

    def _write(self, strip: Tile, view: memoryview) -> None:
        slot, tensor, pipe = self._slot, self._slot.tensor, self._pipe
        out_bytes = pipe.out(tensor.stored.item_bytes) if pipe.steps else tensor.stored.item_bytes
        try:
            content = memoryview(pipe.apply(view, 0)).cast("B")
        except (InputError, PolicyError):
            # Counted from the strip's first element; run by run, the one at fault is told by its place in the tensor.
            for run_view, offset in runs(view, tensor.stored_shape, tensor.stored.item_bytes, strip):
                pipe.apply(run_view, offset)
            raise

        def write(offset: int, part: memoryview) -> None:
            slot.out.write_at(slot.offset + offset, part)

        write_tile(write, tensor.stored_shape, out_bytes, strip, content)
        self._count(len(content), tensor.name)

    def _named(self, call: Callable[[Extent], None], data: Extent) -> None:
        try:
            call(data)
        except Exception as err:
            _name(err, self._slot.tensor)
            raise

    def _done(self) -> None:
        with self._lock:
            self.left -= 1
            if self.left:
                return
        slot = self._slot
        if slot.seed is not None:
            # Written out of order, so the target's checksum is taken from what was written.
            out = cast("OutputFile | Spool", slot.out)
            buffer = new_buffer(1 << 20)
            crc, nbytes = slot.seed, slot.tensor.nbytes
            for offset in range(0, nbytes, len(buffer)):
                check_stopped()
                part = buffer[: min(len(buffer), nbytes - offset)]
                out.readinto(slot.offset + offset, part)
                crc = crc32(part, crc)
            slot.crc = crc
        self._finish(slot)


def _name(err: Exception, tensor: Tensor) -> None:
    if isinstance(err, (InputError, PolicyError)):
        err.at(tensor.path, tensor.name)


def _reader(data: Extent) -> Callable[[int, memoryview], None]:
    """Reads relative to the tensor; a tile asks for many thousand short runs, so every call counts."""
    begin = data.offset
    at = getattr(data.file, "reader_at", None)
    if at is not None:
        reader: Callable[[int, memoryview], None] = at(begin)
        return reader
    readinto = data.file.readinto

    def read(offset: int, view: memoryview) -> None:
        readinto(begin + offset, view)

    return read


def _verify(data: Extent) -> None:
    if data.crc is None:
        return
    crc = data.seed
    for chunk in stored_chunks(Extent(data.file, data.offset, data.nbytes), 1 << 20):
        crc = crc32(chunk, crc)
    check_crc(data, crc)


def _is_near(data: Extent | Stream) -> TypeGuard[Extent]:
    """Whether it can be read in many short runs: not from a remote file, unless all of it is read at once."""
    return isinstance(data, Extent) and (data.nbytes <= TILE_BYTES or not getattr(data.file, "is_remote", False))


def _extent(tensor: Tensor, folder: str | None, spools: contextlib.ExitStack) -> Extent:
    """The stored bytes at any offset; a compressed member, or one far away, goes to a spool first."""
    data = tensor.data
    if _is_near(data):
        return data
    spool = spools.enter_context(Spool(folder))
    offset = 0
    try:
        for chunk in stored_chunks(data, 1 << 20):
            spool.write_at(offset, chunk)
            offset += memoryview(chunk).nbytes
    except Exception as err:
        _name(err, tensor)
        raise
    return Extent(spool, 0, offset)
