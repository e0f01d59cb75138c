"""Fortran order on disk to C order, for any rank, in bounded memory.

A Fortran-order tensor of shape (d0, ..., dn-1) lies in its file as a C-order array of shape (dn-1, ..., d0). Reversing
all axes is its own inverse: to go from C to Fortran order, call everything here with the reversed shape.

Three sizes of box, each cut from the one before:

- a *tile* is read into memory at once; it is shaped so that contiguous runs are long in the file read and in the
  file written, and tiles do not depend on each other;
- a *strip* is a consecutive piece of the tile in C order, small enough to stay in the cache while it is turned,
  converted element by element and written;
- a *block* is what one numpy copy turns, small enough that both sides of the copy stay in the innermost cache.

Usage, per thread::

    turner = Turner()
    for tile in tiles(shape, item_bytes):
        for strip, data in turner.strips(read, shape, item_bytes, tile):
            write_tile(write, shape, item_bytes, strip, data)

Memory is one tile, at most a seventh more to spread it over the cache, and one strip per `Turner`; never less than one
element of each.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from math import isqrt, prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Transfer = Callable[[int, memoryview], object]
"""Moves the bytes of a view from or to an offset, counted in bytes from the start of the tensor's data."""

# Measured by benchmarks of whole conversions, page cache warm: larger tiles make longer runs, hence fewer system calls,
# but beyond this the gain is small for the memory; at half of this and less the calls begin to show.
TILE_BYTES = 24 << 20
# The turned bytes should still be in the cache when they are converted and written.
STRIP_BYTES = 2 << 20
# A write costs more than a read of the same length (locks, page allocation), so runs written are longer than runs read,
# by the square of this; more would make reads so short that a cold disk fetches each page several times.
WRITE_RATIO = 4
# Below this, slabs read so often that writing and reading a temporary file costs less, from cache and from disk.
RUN_BYTES = 1 << 10
# One numpy copy: both sides together stay in the second-level cache. Smaller blocks are as fast in one thread, but
# between them several threads wait for Python's lock.
BLOCK_BYTES = 128 << 10
BLOCK_HEAD = 128
# The system copies runs that begin at a multiple of a cache line faster. As a count of elements it fits every size.
ALIGN = 64
# Loops shorter than this cost more to start than to run.
SHORT = 16

_DTYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Tile(NamedTuple):
    """A box `[begin, end)` in the axes of the result, axes of size 1 left out."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return tuple(end - begin for begin, end in zip(self.begin, self.end, strict=True))


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape without axes of size 1: they change neither the bytes nor the work."""
    return tuple(size for size in shape if size != 1)


def is_trivial(shape: Sequence[int]) -> bool:
    """Tell whether C and Fortran order are the same bytes: at most one axis is longer than 1, or no elements."""
    return len(squeezed(shape)) <= 1 or 0 in shape


def tiles(shape: Sequence[int], item_bytes: int, tile_bytes: int = TILE_BYTES) -> Iterator[Tile]:
    """Cut a tensor into boxes whose contiguous runs are long both as stored and as written.

    Args:
        shape: Shape of the result, axes of size 1 allowed.
        item_bytes: Size of an element as stored; 0 is allowed and gives one tile without bytes.
        tile_bytes: Most bytes of a tile; a tile holds at least one element.

    Returns:
        Tiles in C order that cover each index once; a generator, for there may be very many.
    """
    axes = squeezed(shape)
    items = max(1, tile_bytes // item_bytes) if item_bytes else prod(axes)
    return _cover((0,) * len(axes), axes, _even(axes, _balanced(axes, items, isqrt(items) // WRITE_RATIO or 1)))


def slabs(
    shape: Sequence[int], item_bytes: int, slab_bytes: int = TILE_BYTES, run_bytes: int = RUN_BYTES
) -> Iterator[Tile] | None:
    """Cut a tensor into whole rows, for output that can only be written from the first byte to the last.

    Args:
        shape: Shape of the result, axes of size 1 allowed.
        item_bytes: Size of an element as stored.
        slab_bytes: Most bytes of a slab.
        run_bytes: Least bytes of a read, unless a slab holds the whole tensor.

    Returns:
        Ranges of the first axis, in order, all other axes whole; None where a row does not fit or the reads would be
        so short that a way through a temporary file, by `tiles`, is cheaper.
    """
    axes = squeezed(shape)
    if prod(axes) * item_bytes <= slab_bytes:
        return _cover((0,) * len(axes), axes, [max(1, size) for size in axes])
    rows = slab_bytes // (prod(axes[1:]) * item_bytes)
    if rows == 0 or rows * item_bytes < run_bytes:
        return None
    return _cover((0,) * len(axes), axes, _even(axes, (rows, *axes[1:])))


class Turner:
    """Turns tiles to C order in two buffers it owns and reuses; each thread needs its own."""

    def __init__(self, strip_bytes: int = STRIP_BYTES) -> None:
        self._strip_bytes = strip_bytes
        self._stored = np.empty(0, np.uint8)
        self._turned = np.empty(0, np.uint8)

    def strips(
        self, read: Transfer, shape: Sequence[int], item_bytes: int, tile: Tile
    ) -> Iterator[tuple[Tile, memoryview]]:
        """Read one tile and turn it strip by strip.

        Args:
            read: Fills a view with the bytes stored at an offset.
            shape: Shape of the result, axes of size 1 allowed.
            item_bytes: Size of an element as stored.
            tile: One of `tiles(shape, ...)` or `slabs(shape, ...)`.

        Returns:
            Boxes that follow each other in the C order of the tile, each with its bytes in C order, writable and valid
            until the next is asked for. The strips of all slabs, joined, are the tensor's bytes in C order.
        """
        stored = self.load(read, shape, item_bytes, tile)
        for strip in cut(tile, item_bytes, self._strip_bytes):
            size = prod(strip.extent) * item_bytes
            if self._turned.size < size:
                self._turned = np.empty(size, np.uint8)
            yield strip, turn(stored, tile, strip, self._turned.data)

    def load(self, read: Transfer, shape: Sequence[int], item_bytes: int, tile: Tile) -> npt.NDArray[Any]:
        """Read a tile; return it with the axes of the result, in the order of the file, valid until the next."""
        extent = tile.extent
        if not prod(extent) * item_bytes:
            return np.empty(extent, _dtype(item_bytes))
        run_bytes, offsets = _runs(squeezed(shape)[::-1], item_bytes, Tile(tile.begin[::-1], tile.end[::-1]))
        count = prod(extent) * item_bytes // run_bytes
        pitch = run_bytes
        if count > 1 and run_bytes >= 512:
            pitch = -(-run_bytes // ALIGN) * ALIGN
            # Runs a multiple of a power of two apart would compete for a few lines of the cache.
            pitch += 0 if pitch % 512 else ALIGN
        if self._stored.size < count * pitch:
            self._stored = np.empty(count * pitch, np.uint8)
        view = self._stored.data
        for begin, offset in zip(range(0, count * pitch, pitch), offsets, strict=True):
            read(offset, view[begin : begin + run_bytes])
        strides = []
        stride = item_bytes
        for size in extent:
            strides.append(stride)
            stride *= size
            stride = pitch if stride == run_bytes else stride
        return np.ndarray(extent, _dtype(item_bytes), view, strides=strides)


def cut(tile: Tile, item_bytes: int, strip_bytes: int = STRIP_BYTES) -> Iterator[Tile]:
    """The strips of a tile, in its C order, each of at most `strip_bytes` or one element; none if it has no bytes."""
    extent = tile.extent
    if prod(extent) * item_bytes:
        yield from _cover(tile.begin, tile.end, _rows(extent, max(1, strip_bytes // item_bytes)))


def turn(stored: npt.NDArray[Any], tile: Tile, strip: Tile, room: memoryview) -> memoryview:
    """Turn one strip of a tile into `room`, which has its size at least; threads may share a tile.

    Args:
        stored: What `Turner.load` gave for the tile.
        tile: That tile.
        strip: One of `cut(tile, ...)`.
        room: Writable bytes.

    Returns:
        The part of `room` with the strip's bytes in C order.
    """
    here = tuple(slice(b - o, e - o) for b, e, o in zip(strip.begin, strip.end, tile.begin, strict=True))
    source = stored[here]
    data = room[: source.size * source.itemsize]
    _turn(source, np.ndarray(source.shape, source.dtype, data))
    return data


def write_tile(write: Transfer, shape: Sequence[int], item_bytes: int, tile: Tile, data: memoryview) -> None:
    """Write a tile or strip to its places in the result, in as few calls as it has contiguous runs.

    Args:
        write: Stores the bytes of a view at an offset.
        shape: Shape of the result, axes of size 1 allowed.
        item_bytes: Size of an element as written; it may differ from the size read.
        tile: Where the data belongs.
        data: The tile's bytes in C order.
    """
    for view, offset in runs(data, shape, item_bytes, tile):
        write(offset, view)


def runs(data: memoryview, shape: Sequence[int], item_bytes: int, tile: Tile) -> Iterator[tuple[memoryview, int]]:
    """A tile's bytes in C order cut into the runs that are contiguous in the tensor, each with its offset there."""
    if data.nbytes:
        view = data.cast("B")
        run_bytes, offsets = _runs(squeezed(shape), item_bytes, tile)
        for begin, offset in zip(range(0, len(view), run_bytes), offsets, strict=True):
            yield view[begin : begin + run_bytes], offset


def _grow(extent: list[int], shape: Sequence[int], axes: Iterable[int], items: int) -> None:
    """Lengthen a box along one axis after the other, each to its full size, while it holds at most `items`."""
    for axis in axes:
        extent[axis] = min(shape[axis], items * extent[axis] // prod(extent))
        if extent[axis] < shape[axis]:
            return


def _balanced(shape: Sequence[int], items: int, head: int) -> list[int]:
    """Return the extent of a box of at most `items`: runs of `head` along the first axes, the rest along the last.

    What one end cannot use, because its axes are short, goes to the other.
    """
    extent = [1] * len(shape)
    if 0 not in shape:
        _grow(extent, shape, range(len(shape)), min(head, items))
        _grow(extent, shape, reversed(range(len(shape))), items)
        _grow(extent, shape, range(len(shape)), items)
    return extent


def _rows(shape: Sequence[int], items: int) -> list[int]:
    """Return the extent of a box of at most `items` that is contiguous in C order."""
    extent = [1] * len(shape)
    _grow(extent, shape, reversed(range(len(shape))), items)
    return extent


def _even(shape: Sequence[int], extent: Sequence[int]) -> list[int]:
    """Shorten the extent so that boxes are nearly equal, none is a sliver, and long runs stay aligned."""
    steps = []
    for size, step in zip(shape, extent, strict=True):
        unit = ALIGN if 4 * ALIGN <= step < size else 1
        pieces = -(-size // (step // unit * unit))
        steps.append(-(-size // (max(1, pieces) * unit)) * unit or 1)
    return steps


def _cover(begin: Sequence[int], end: Sequence[int], extent: Sequence[int]) -> Iterator[Tile]:
    """Cut `[begin, end)` into boxes of an extent, in C order; those at the end may be smaller."""
    counts = [-(-(e - b) // step) if e > b else 0 for b, e, step in zip(begin, end, extent, strict=True)]
    for number in range(prod(counts)):
        rest = number
        corner = []
        for first, step, count in zip(reversed(begin), reversed(extent), reversed(counts), strict=True):
            rest, index = divmod(rest, count)
            corner.append(first + index * step)
        corner.reverse()
        yield Tile(tuple(corner), tuple(min(b + step, e) for b, step, e in zip(corner, extent, end, strict=True)))


def _runs(shape: Sequence[int], item_bytes: int, tile: Tile) -> tuple[int, Iterator[int]]:
    """Return the length and the offsets, in bytes, of a tile's contiguous runs in a C-order array."""
    run_bytes = stride = item_bytes
    contiguous = True
    steps = []
    for size, begin, end in zip(reversed(shape), reversed(tile.begin), reversed(tile.end), strict=True):
        if contiguous:
            steps.append(range(begin * stride, begin * stride + 1))
            run_bytes *= end - begin
            contiguous = end - begin == size
        else:
            steps.append(range(begin * stride, end * stride, stride))
        stride *= size
    return run_bytes, map(sum, product(*reversed(steps)))


def _dtype(item_bytes: int) -> np.dtype[Any]:
    """Return a type that numpy copies bit for bit, as fast as it can for this size."""
    return np.dtype(_DTYPES.get(item_bytes, f"V{item_bytes}"))


def _turn(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Copy between arrays of one shape and opposite orders, block by block."""
    shape = list(source.shape)
    if max(shape, default=0) >= SHORT:
        # The innermost loop of a numpy copy runs along the last axis: short ones are better looped over here.
        while shape[-1] < SHORT:
            shape.pop()
    shape += [1] * (source.ndim - len(shape))
    block = _balanced(shape, max(1, BLOCK_BYTES // source.itemsize), BLOCK_HEAD)
    for begin, end in _cover((0,) * source.ndim, source.shape, block):
        here = tuple(map(slice, begin, end))
        target[here] = source[here]
