"""A histogram of unknown range in one pass, exact and the same in whatever order values come.

Bins are as wide as a power of two and begin at multiples of their width. When a value lies outside, neighbours are
joined in pairs until at most `BINS` bins cover everything, which gives the counts that these bins would have had from
the start. Integers are only shifted; floats are only multiplied by powers of two, which loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BINS = 32
"""At most; values that are not all equal get more than half as many, unless they are integers of a narrow range."""
_LEAST_EXPONENT = -1074
"""Of the smallest float64."""

Number = int | float


class Grid(NamedTuple):
    """Bins of width 2**exponent: the first begins at `first` times that, the last at `last` times that."""

    exponent: int
    first: int
    last: int

    @property
    def width(self) -> int:
        """Number of bins."""
        return self.last - self.first + 1

    def edges(self, *, integers: bool) -> tuple[Number, ...]:
        """Where bins begin, and where the last one ends; infinite where float64 ends before."""
        if integers:
            return tuple(number << self.exponent for number in range(self.first, self.last + 2))
        return tuple(_times(number, self.exponent) for number in range(self.first, self.last + 2))


def _times(number: int, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def float_grid(low: float, high: float) -> Grid:
    """The finest grid of at most BINS bins, numbered below 2**53, that has both in it."""
    largest = max(-low, high)
    exponent = _LEAST_EXPONENT
    if largest:
        exponent = max(exponent, math.frexp(largest)[1] - 53)
        if width := high / BINS - low / BINS:
            exponent = max(exponent, math.frexp(width)[1] - 2)
    while True:
        grid = Grid(exponent, _floor(low, exponent), _floor(high, exponent))
        if grid.width <= BINS:
            return grid
        exponent += 1


def _floor(value: float, exponent: int) -> int:
    found = math.floor(math.ldexp(value, -exponent))
    return -1 if found == 0 and value < 0 else found  # it was too small to be divided


def integer_grid(low: int, high: int) -> Grid:
    """The same for integers, with bins of at least 1."""
    exponent = max((high - low).bit_length() - BINS.bit_length(), 0)
    while (high >> exponent) - (low >> exponent) >= BINS:
        exponent += 1
    return Grid(exponent, low >> exponent, high >> exponent)


class Histogram:
    """Counts that grow, and the range of what was counted.

    Attributes:
        low, high: The smallest and largest value so far; 0 before the first.
        grid: The bins.
        counts: Of each bin.
    """

    def __init__(self, *, integers: bool) -> None:
        self.low: Number = 0
        self.high: Number = 0
        self.counts: list[int] = []
        self._integers = integers
        self.grid = Grid(0, 0, 0)

    def add(self, low: Number, high: Number, grid: Grid, counts: Sequence[int]) -> None:
        """Take in the counts of some values from `low` to `high`, made on the grid for these two."""
        if not self.counts:
            self.low, self.high, self.grid, self.counts = low, high, grid, list(counts)
            return
        self.low, self.high = min(self.low, low), max(self.high, high)
        if not self._has_room_for(grid):
            old, before = self.grid, self.counts
            if self._integers:
                self.grid = integer_grid(int(self.low), int(self.high))
            else:
                self.grid = float_grid(self.low, self.high)
            self.counts = [0] * self.grid.width
            self._put(old, before)
        self._put(grid, counts)

    def _has_room_for(self, other: Grid) -> bool:
        """Whether the other grid is as fine as this one, or finer, and lies in it."""
        shift = self.grid.exponent - other.exponent
        return shift >= 0 and self.grid.first <= other.first >> shift and other.last >> shift <= self.grid.last

    def _put(self, finer: Grid, counts: Sequence[int]) -> None:
        shift = self.grid.exponent - finer.exponent
        for index, count in enumerate(counts):
            if count:
                self.counts[((finer.first + index) >> shift) - self.grid.first] += count
