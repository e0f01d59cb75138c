"""Fortran order becomes C order for every shape and element size, in bounded memory and with few calls."""

import itertools
import tracemalloc
from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.transpose import RUN_BYTES, Tile, Turner, is_trivial, slabs, squeezed, tiles, write_tile

SHAPES = st.lists(st.integers(0, 9), max_size=6).map(tuple).filter(lambda shape: prod(shape) <= 6000)
ITEMS = st.sampled_from([1, 2, 3, 4, 8, 16, 24])
# From one element to more than any of the arrays.
SIZES = st.one_of(st.integers(1, 200), st.sampled_from([1024, 4096, 1 << 18]))


class Disk:
    """A stored array and an empty result that count the calls and check each range."""

    def __init__(self, stored: bytes, result_bytes: int) -> None:
        self.stored = stored
        self.result = bytearray(result_bytes)
        self.written = bytearray(result_bytes)
        self.reads = self.writes = 0

    def read(self, offset: int, view: memoryview) -> None:
        """Fill a view, which may not be empty nor reach beyond the end."""
        assert 0 <= offset < offset + len(view) <= len(self.stored)
        self.reads += 1
        view[:] = self.stored[offset : offset + len(view)]

    def write(self, offset: int, view: memoryview) -> None:
        """Store a view where nothing was stored before."""
        end = offset + len(view)
        assert 0 <= offset < end <= len(self.result)
        assert not any(self.written[offset:end])
        self.writes += 1
        self.written[offset:end] = b"\1" * len(view)
        self.result[offset:end] = view


def example(shape: tuple[int, ...], item_bytes: int) -> npt.NDArray[Any]:
    """An array of distinct-looking elements, the same on every run."""
    data = np.random.default_rng(7).integers(0, 256, prod(shape) * item_bytes, dtype=np.uint8)
    return np.ndarray(shape, f"V{item_bytes}", data)


def turned(shape: tuple[int, ...], item_bytes: int, boxes: Iterable[Tile], turner: Turner) -> tuple[Disk, bytes]:
    """Turn the example by way of `boxes`; return the disk and all strips, joined in the order they came."""
    array = example(shape, item_bytes)
    disk = Disk(array.tobytes("F"), array.nbytes)
    joined = bytearray()
    for box in boxes:
        for strip, data in turner.strips(disk.read, shape, item_bytes, box):
            assert len(data) == prod(strip.extent) * item_bytes
            write_tile(disk.write, shape, item_bytes, strip, data)
            joined += data
    return disk, bytes(joined)


@given(SHAPES, ITEMS, SIZES, SIZES)
def test_tiles_turn_to_numpys_bytes(shape: tuple[int, ...], item_bytes: int, tile_bytes: int, strip_bytes: int) -> None:
    """Any tiles, in any order, through one reused `Turner`, give `tobytes("C")`; each byte is written once."""
    boxes = list(tiles(shape, item_bytes, tile_bytes))
    disk, _ = turned(shape, item_bytes, reversed(boxes), Turner(strip_bytes))
    assert bytes(disk.result) == example(shape, item_bytes).tobytes("C")
    assert all(disk.written)


@given(SHAPES, ITEMS, SIZES)
def test_reversed_shape_is_the_inverse(shape: tuple[int, ...], item_bytes: int, tile_bytes: int) -> None:
    """With the reversed shape the same functions turn C order to Fortran order."""
    back = shape[::-1]
    disk, _ = turned(back, item_bytes, tiles(back, item_bytes, tile_bytes), Turner(64))
    assert bytes(disk.result) == example(back, item_bytes).tobytes("C")
    assert disk.stored == example(back, item_bytes).T.tobytes("C")


@given(SHAPES, ITEMS, SIZES)
def test_tiles_cover_each_index_once(shape: tuple[int, ...], item_bytes: int, tile_bytes: int) -> None:
    """No index is missing or twice, and no tile is larger than asked, unless it is a single element."""
    seen = np.zeros(squeezed(shape), np.int64)
    for tile in tiles(shape, item_bytes, tile_bytes):
        count = prod(tile.extent)
        assert count == 1 or 1 < count * item_bytes <= tile_bytes
        seen[tuple(map(slice, tile.begin, tile.end))] += 1
    assert (seen == 1).all()


@given(SHAPES, ITEMS, SIZES, SIZES)
def test_slabs_give_the_bytes_in_order(
    shape: tuple[int, ...], item_bytes: int, slab_bytes: int, strip_bytes: int
) -> None:
    """The strips of slabs, joined, are `tobytes("C")`; without slabs there is a reason."""
    array = example(shape, item_bytes)
    boxes = slabs(shape, item_bytes, slab_bytes, run_bytes=2 * item_bytes)
    if boxes is None:
        row_bytes = prod(squeezed(shape)[1:]) * item_bytes
        assert array.nbytes > slab_bytes
        assert slab_bytes // row_bytes < 2
        return
    held = list(boxes)
    assert all(prod(box.extent) * item_bytes <= slab_bytes for box in held)
    _, joined = turned(shape, item_bytes, held, Turner(strip_bytes))
    assert joined == array.tobytes("C")


@given(SHAPES)
def test_trivial_means_same_bytes(shape: tuple[int, ...]) -> None:
    """A trivial shape needs no turning; others have elements that move."""
    array = np.arange(prod(shape), dtype=np.uint16).reshape(shape)
    assert is_trivial(shape) == (array.tobytes("C") == array.tobytes("F"))


@pytest.mark.parametrize("item_bytes", [1, 2, 3, 4, 8, 16, 24])
@pytest.mark.parametrize(
    "shape", [(300, 2, 200), (3, 50_000), (50_000, 3), (100, 50, 3, 3), (3, 3, 50, 100), (17, 5, 1, 700), (2,) * 16]
)
def test_blocks_do_not_show(shape: tuple[int, ...], item_bytes: int) -> None:
    """Arrays of many blocks and strips come out right, with short axes anywhere."""
    disk, _ = turned(shape, item_bytes, tiles(shape, item_bytes, 200_000), Turner(30_000))
    assert bytes(disk.result) == example(shape, item_bytes).tobytes("C")


@pytest.mark.parametrize("tile_bytes", [1 << 12, 1 << 16, 1 << 20])
@pytest.mark.parametrize(
    "shape",
    [
        *[(10_000, 3), (3, 10_000), (2, 20_000), (300, 300), (513, 129), (100, 50, 3, 3), (3, 3, 50, 100), (9,) * 5],
        *[(16, 32, 64), (200, 2, 200), (2,) * 15, (5, 20, 5, 20, 5)],
    ],
)
def test_calls_are_few(shape: tuple[int, ...], tile_bytes: int) -> None:
    """The runs read and written grow with the tile, whatever the shape: never a call for each element."""
    item_bytes = 4
    disk, _ = turned(shape, item_bytes, tiles(shape, item_bytes, tile_bytes), Turner(tile_bytes // 4))
    size = len(disk.stored)
    square = (tile_bytes // item_bytes) ** 0.5 * item_bytes
    assert disk.reads <= 16 + size / (square / 16)
    assert disk.writes <= 16 + size / (square / 2)


def test_calls_of_tiny_axes() -> None:
    """An axis of three is taken whole: a handful of calls, not one for each element."""
    for shape in [(10_000, 3), (3, 10_000)]:
        disk, _ = turned(shape, 4, tiles(shape, 4, 1 << 14), Turner(1 << 14))
        assert disk.reads + disk.writes <= 4 * len(list(tiles(shape, 4, 1 << 14)))


def test_elements_may_change_size_between() -> None:
    """A strip may be converted before it is written, with the new size of an element."""
    array = np.arange(60 * 70, dtype=np.uint16).reshape(60, 70)
    disk = Disk(array.tobytes("F"), 2 * array.nbytes)
    turner = Turner(500)
    for tile in tiles(array.shape, 2, 1000):
        for strip, data in turner.strips(disk.read, array.shape, 2, tile):
            wide = np.frombuffer(data, np.uint16).astype(np.uint32)
            write_tile(disk.write, array.shape, 4, strip, wide.data)
    assert bytes(disk.result) == array.astype(np.uint32).tobytes("C")


def test_strips_are_writable() -> None:
    """An elementwise step may work in place, without touching the next strip."""
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    disk = Disk(array.tobytes("F"), array.nbytes)
    for tile in tiles(array.shape, 1):
        for strip, data in Turner(4).strips(disk.read, array.shape, 1, tile):
            inverted = np.frombuffer(data, np.uint8)
            np.invert(inverted, out=inverted)
            write_tile(disk.write, array.shape, 1, strip, data)
    assert bytes(disk.result) == np.invert(array).tobytes()


def test_nan_payloads_survive() -> None:
    """Elements of 16 bytes are copied as complex numbers, yet bit for bit: signalling NaN stays signalling."""
    array = np.full((40, 30, 2), 0x7FF0_0000_0000_0001, np.uint64)
    disk = Disk(array.transpose(1, 0, 2).tobytes("C"), array.nbytes)
    for tile in tiles((40, 30), 16):
        for strip, data in Turner().strips(disk.read, (40, 30), 16, tile):
            write_tile(disk.write, (40, 30), 16, strip, data)
    assert bytes(disk.result) == array.tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (5, 0, 3), (1 << 40, 1 << 40)])
def test_elements_without_bytes(shape: tuple[int, ...]) -> None:
    """An element size of 0 costs nothing, whatever the shape claims."""
    disk = Disk(b"", 0)
    for boxes in (tiles(shape, 0), slabs(shape, 0)):
        assert boxes is not None
        for tile in boxes:
            assert list(Turner().strips(disk.read, shape, 0, tile)) == []
            write_tile(disk.write, shape, 0, tile, memoryview(b""))
    assert disk.reads == disk.writes == 0


def test_tiles_are_lazy() -> None:
    """Claimed sizes cost nothing until a tile is asked for, and Python integers do not wrap."""
    shape = (1 << 70, 3, 1 << 65)
    first = list(itertools.islice(tiles(shape, 8), 3))
    assert len(first) == 3
    assert first[0].begin == (0, 0, 0)
    assert slabs(shape, 8) is None


def test_slabs_refuse_short_reads() -> None:
    """With runs of less than `RUN_BYTES` a temporary file is cheaper; a tensor that fits whole has no such limit."""
    rows = RUN_BYTES // 4
    assert slabs((1 << 20, 100), 4, (rows - 1) * 400) is None
    boxes = slabs((1 << 20, 100), 4, rows * 400)
    assert boxes is not None
    assert next(boxes) == Tile((0, 0), (rows, 100))
    assert slabs((2, 3), 4) is not None


@pytest.mark.parametrize("item_bytes", [1, 4, 16])
def test_memory_is_a_tile_and_a_strip(item_bytes: int) -> None:
    """Two reused buffers and nothing else, however many tiles there are."""
    tile_bytes, strip_bytes = 1 << 18, 1 << 16
    shape = ((8 << 20) // item_bytes // 1024, 1024)
    turner = Turner(strip_bytes)

    def ignore(offset: int, view: memoryview) -> None:
        """Move nothing."""

    tracemalloc.start()
    try:
        for tile in tiles(shape, item_bytes, tile_bytes):
            for strip, data in turner.strips(ignore, shape, item_bytes, tile):
                write_tile(ignore, shape, item_bytes, strip, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= tile_bytes * 8 // 7 + strip_bytes + (1 << 17)
