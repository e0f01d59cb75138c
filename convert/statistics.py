"""What the values of tensors are like, in one pass over the data and bounded memory.

The pass is that of a conversion: the same threads read, check and swap the same chunks, which end here and not in a
file. Fortran order is not turned, as nothing here depends on the order of the elements. Each chunk is summed up by
itself in float64 (integers exactly) and the sums are joined exactly, so that the result does not depend on the threads.

The histogram needs no second pass either; `convert.bins` tells how.
"""

from __future__ import annotations

import math
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from convert import dtypes
from convert.bins import Grid, Histogram, Number, float_grid, integer_grid
from convert.errors import ConvertError, InputError, PolicyError, gather, without_secrets
from convert.progress import Callback, Progress
from convert.tensor import Checkpoint, Tensor
from convert.threads import default_jobs

if TYPE_CHECKING:
    from typing_extensions import Buffer

_USUAL_EXPONENT = 300
"""Up to here squares, and sums of very many of them, are far from the ends of float64."""
_AT_ONCE = 1000
"""Tensors in hand at a time, each with its sums."""
_SMALL_FLOATS = ("bfloat16", "float8", "subbyte")

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Stats:
    """What the values of one tensor are like.

    Complex numbers are described by their magnitudes, booleans as 0 and 1, long doubles rounded to float64. Of types
    that are no numbers (dates, strings, records, pickles, void) only `count` is set, and `note` says so.

    Attributes:
        count: Elements.
        zeros: Elements that are 0 or -0.
        nans: Elements that are no number; of complex ones, those with a part that is none.
        infs: Infinite elements.
        min, max: Of the finite elements, exact; None where there are none.
        mean, std: Of the finite elements, std with divisor n; None where there are none.
        counts: Finite elements in each bin of the histogram, whose bins `edges` tells.
        note: How the values were taken, or why there are none; empty where that is plain.
        grid: The bins in numbers, see `convert.bins`.
    """

    count: int
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    min: Number | None = None
    max: Number | None = None
    mean: float | None = None
    std: float | None = None
    counts: tuple[int, ...] = ()
    note: str = ""
    grid: Grid | None = None

    @property
    def edges(self) -> tuple[Number, ...]:
        """Where bins begin, and where the last one ends. A value on an edge belongs to the bin above it."""
        return () if self.grid is None else self.grid.edges(integers=isinstance(self.min, int))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        found = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "grid"}
        edges = [None if math.isinf(edge) else edge for edge in self.edges]
        return {**found, "counts": list(self.counts), "edges": edges}


@overload
def stats(source: Tensor, *, jobs: int | None = None, progress: Callback | None = None) -> Stats: ...


@overload
def stats(
    source: Checkpoint | Path | Sequence[Path], *, jobs: int | None = None, progress: Callback | None = None
) -> dict[str, Stats]: ...


def stats(
    source: Tensor | Checkpoint | Path | Sequence[Path], *, jobs: int | None = None, progress: Callback | None = None
) -> Stats | dict[str, Stats]:
    """Minimum, maximum, mean, deviation, histogram, and counts of zeros, NaNs and infinities; all data is read once.

    Args:
        source: A tensor, an open checkpoint, or what `convert.open` takes.
        jobs: Threads; default the cores this process may use.
        progress: Called with bytes done, bytes in all and a tensor's name; raise in it to cancel.

    Returns:
        For a tensor its `Stats`, else a dictionary of them by name.

    Raises:
        InputError: The file is damaged; all damaged tensors are named.
    """
    if not isinstance(source, (Tensor, Checkpoint)):
        from convert.api import open as open_checkpoint

        with open_checkpoint(source) as checkpoint:
            return stats(checkpoint, jobs=jobs, progress=progress)
    tensors = [source] if isinstance(source, Tensor) else source.tensors
    found = measure(tensors, jobs, progress)
    if isinstance(source, Checkpoint):
        for file in source.files:
            file.check_unchanged()
    problems = [one for one in found if isinstance(one, ConvertError)]
    if problems:
        raise gather(problems)
    good = [one for one in found if isinstance(one, Stats)]
    return good[0] if isinstance(source, Tensor) else dict(zip(source, good, strict=True))


def measure(
    tensors: Sequence[Tensor], jobs: int | None = None, progress: Callback | None = None
) -> list[Stats | ConvertError]:
    """For each tensor what its values are like, or why they cannot be read: one damaged tensor spoils no other."""
    from convert.options import check_jobs

    check_jobs(jobs)
    watch = Progress(progress, sum(tensor.nbytes for tensor in tensors)) if progress else None
    found: list[Stats | ConvertError] = []
    for begin in range(0, len(tensors), _AT_ONCE):
        found += _measure(tensors[begin : begin + _AT_ONCE], jobs or default_jobs(), watch)
    return found


def _measure(tensors: Sequence[Tensor], jobs: int, progress: Progress | None) -> list[Stats | ConvertError]:
    from convert.transfer import Slot, fill

    found: list[Stats | ConvertError | _Gatherer] = []
    slots: list[Slot] = []
    for tensor in tensors:
        try:
            values, note = _as_numbers(tensor)
        except InputError as err:
            found.append(err.at(tensor.path, tensor.name))
            continue
        if values is None:
            found.append(Stats(tensor.count, note=note))
            continue
        gatherer = _Gatherer(values, note)
        found.append(gatherer)
        slots.append(Slot(values, gatherer, 0))  # type: ignore[arg-type]  # nothing is done with it but writing
    spoilt: dict[tuple[str | None, str | None], ConvertError] = {}
    try:
        fill(slots, jobs, progress=progress)
    except (InputError, PolicyError) as err:
        spoilt = {(problem.path, problem.tensor): problem for problem in err.problems}
    return [
        spoilt.get((without_secrets(one.tensor.path), one.tensor.name)) or one.result()
        if isinstance(one, _Gatherer)
        else one
        for one in found
    ]


def _as_numbers(tensor: Tensor) -> tuple[Tensor | None, str]:
    """The tensor in a type that numpy calculates with, or None if it has no numbers, and a note about that."""
    from convert import encodings

    if tensor.problem is not None:
        raise tensor.problem
    before = dtypes.by_name(tensor.origin.dtype) if tensor.origin is not None else None
    note = ""
    if before is not None and before.kind in _SMALL_FLOATS:
        tensor = encodings.decode(tensor)
        note = f"as {before}, which it was"
    elif tensor.dtype.kind == "V2":
        tensor = encodings.as_bytes_of(tensor, dtypes.BY_NAME["bfloat16"], tensor.shape, remember=False)
        note = "as bfloat16"
    tensor = tensor.changed(stored_fortran=False, fortran=False, big=False)
    kind = tensor.dtype.kind
    if kind in _SMALL_FLOATS:
        return encodings.widened(tensor), note
    if kind == "longdouble":
        try:
            rounded = encodings.encode(tensor, "round", True)
        except PolicyError as err:
            return None, err.message
        assert isinstance(rounded, Tensor)
        return rounded, "rounded to float64"
    if kind not in ("plain", "complex128"):
        return None, "one of many 8-bit types" if kind == "V1" else "no numbers"
    return tensor, "magnitudes" if tensor.dtype.name.startswith("complex") else note


# --- one chunk ---------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """One chunk, summed up. `low` to `counts` are about its finite elements; `size` is how many there are.

    `mean` and `squares`, the sum of squared differences from it, are those of the elements divided by 2**`scale`.
    """

    zeros: int
    nans: int
    infs: int
    size: int
    low: Number = 0
    high: Number = 0
    mean: float = 0.0
    squares: float = 0.0
    scale: int = 0
    total: int = 0
    grid: Grid = Grid(0, 0, 0)
    counts: Sequence[int] = ()


def _floats(values: NDArray[Any]) -> _Part:
    zeros = values.size - int(np.count_nonzero(values))
    low, high = float(values.min()), float(values.max())
    nans = infs = 0
    if not (math.isfinite(low) and math.isfinite(high)):
        finite = np.isfinite(values)
        nans = int(np.count_nonzero(np.isnan(values)))
        infs = values.size - int(np.count_nonzero(finite)) - nans
        values = values[finite]
        if not values.size:
            return _Part(zeros, nans, infs, 0)
        low, high = float(values.min()), float(values.max())
    grid = float_grid(low, high)
    wide = values.astype(np.float64)
    bins = np.floor(np.ldexp(wide, -grid.exponent) if abs(grid.exponent) > 1000 else wide * 2.0**-grid.exponent)
    if grid.exponent > 0 and low < 0:
        bins[(bins == 0) & (wide < 0)] = -1  # too small to be divided
    bins -= grid.first
    counts = np.bincount(bins.astype(np.intp), minlength=grid.width).tolist()
    scale = _scale(max(-low, high))
    if scale:
        np.ldexp(wide, -scale, out=wide)
    mean = _between(float(wide.sum() / wide.size), math.ldexp(low, -scale), math.ldexp(high, -scale))
    wide -= mean
    np.multiply(wide, wide, out=wide)
    return _Part(zeros, nans, infs, wide.size, low, high, mean, float(wide.sum()), scale, 0, grid, counts)


def _between(mean: float, low: float, high: float) -> float:
    """The mean, kept in the range that rounding may have left: the mean of equal values is their value."""
    return min(max(mean, low), high)


def _scale(largest: float) -> int:
    """The power of two to divide by, so that squares neither overflow nor vanish; 0 for all usual values."""
    exponent = math.frexp(largest)[1] if largest else -1074
    return exponent if abs(exponent) > _USUAL_EXPONENT else 0


def _integers(values: NDArray[Any]) -> _Part:
    kind = values.dtype.type
    low, high = int(values.min()), int(values.max())
    grid = integer_grid(low, high)
    bins = np.right_shift(values, kind(grid.exponent)) - kind(grid.first)
    counts = np.bincount(bins.astype(np.intp), minlength=grid.width).tolist()
    if values.itemsize == 8:  # in halves, whose sums cannot overflow
        total = (int((values >> kind(32)).sum()) << 32) + int((values & kind(0xFFFFFFFF)).sum())
    else:
        total = int(values.sum(dtype=np.int64))
    mean = total / values.size
    wide = values.astype(np.float64)
    wide -= mean
    np.multiply(wide, wide, out=wide)
    zeros = values.size - int(np.count_nonzero(values))
    return _Part(zeros, 0, 0, values.size, low, high, mean, float(wide.sum()), 0, total, grid, counts)


def _booleans(values: NDArray[Any]) -> _Part:
    return _integers((values != 0).view(np.uint8))


def _complexes(values: NDArray[Any]) -> _Part:
    """Magnitudes in float64; one with a NaN beside an infinity, or too large for float64, counts as hypot says."""
    sizes = np.abs(values.astype(np.complex128))
    sizes[np.isnan(values)] = np.nan
    return _floats(sizes)


def _looker(dtype: dtypes.DType) -> tuple[np.dtype[Any], Callable[[NDArray[Any]], _Part]]:
    """How numpy sees the bytes of a type, and what sums up an array of it."""
    found = np.dtype(np.uint8) if dtype.name == "bool" else dtype.numpy()
    if dtype.name == "bool":
        return found, _booleans
    return found, {"f": _floats, "c": _complexes}.get(found.kind, _integers)


# --- one tensor --------------------------------------------------------------------------------------------------


class _Gatherer:
    """Where the chunks of a tensor go, in any order and from several threads.

    Memory grows by 32 bytes a chunk, 13 MB for a tensor of 100 GB: sums of floats must wait to be joined exactly.
    """

    def __init__(self, tensor: Tensor, note: str) -> None:
        self.tensor = tensor
        self._note = note
        self._numpy, self._look = _looker(tensor.dtype)
        self._integers = self._numpy.kind in "iu"
        self._lock = threading.Lock()
        self._seen_bytes = 0
        self._zeros = self._nans = self._infs = self._size = self._total = 0
        self._sizes, self._scales = array("q"), array("q")
        self._means, self._squares = array("d"), array("d")
        self._histogram = Histogram(integers=self._integers)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Take one chunk of whole elements; where it stands does not matter."""
        values = np.frombuffer(memoryview(data), self._numpy)
        if not values.size:
            return
        with np.errstate(all="ignore"):
            part = self._look(values)
        with self._lock:
            self._seen_bytes += values.nbytes
            self._zeros += part.zeros
            self._nans += part.nans
            self._infs += part.infs
            if part.size:
                self._join(part)

    def _join(self, part: _Part) -> None:
        self._size += part.size
        self._total += part.total
        self._sizes.append(part.size)
        self._scales.append(part.scale)
        self._means.append(part.mean)
        self._squares.append(part.squares)
        self._histogram.add(part.low, part.high, part.grid, part.counts)

    def result(self) -> Stats:
        """When all chunks were taken."""
        if self._seen_bytes != self.tensor.nbytes:
            raise AssertionError(f"saw {self._seen_bytes} of {self.tensor.nbytes} bytes of {self.tensor.name!r}")
        facts = (self.tensor.count, self._zeros, self._nans, self._infs)
        if not self._size:
            return Stats(*facts, note=self._note)
        mean, std = self._moments()
        shape = self._histogram
        return Stats(*facts, shape.low, shape.high, mean, std, tuple(shape.counts), self._note, shape.grid)

    def _moments(self) -> tuple[float, float]:
        """Mean and deviation of all chunks; each sum is exact and rounded once, whatever the order."""
        scale = max(self._scales)
        sizes, ldexp = self._sizes, math.ldexp
        shifts = [each - scale for each in self._scales]
        means = [ldexp(mean, shift) for mean, shift in zip(self._means, shifts, strict=True)]
        if self._integers:
            mean = self._total / self._size
        else:
            mean = math.fsum(size * one for size, one in zip(sizes, means, strict=True)) / self._size
            mean = _between(mean, min(means), max(means))
        within = math.fsum(ldexp(one, 2 * shift) for one, shift in zip(self._squares, shifts, strict=True))
        between = math.fsum(size * (one - mean) ** 2 for size, one in zip(sizes, means, strict=True))
        return ldexp(mean, scale), ldexp(math.sqrt((within + between) / self._size), scale)
