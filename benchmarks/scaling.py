"""Time against bytes and against the number of tensors: both should grow in proportion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.jobs import IN, OUT, Command
from benchmarks.run import Bench

_DECADES = 4
_TENSORS = 100
_SMALL_BYTES = 1000
"""A tensor where their number is what counts."""


class Point(NamedTuple):
    """One size. `over_start` are the seconds beyond those of a file of 1 KB."""

    name: str
    tensors: int
    nbytes: int
    seconds: float
    over_start: float
    rss_bytes: int


class Series(NamedTuple):
    """A command, and inputs as numbers of tensors and bytes of each."""

    name: str
    suffix: str
    target: str
    options: Command
    sizes: tuple[tuple[int, int], ...]


def _series(small: bool) -> tuple[Series, ...]:
    by_bytes = tuple((_TENSORS, (1_000_000 if small else 20_000_000) // 10**power) for power in range(_DECADES)[::-1])
    by_count = tuple((10**power, _SMALL_BYTES) for power in range(1, 5 if small else 6))
    return (
        Series("bytes, npz to safetensors", "npz", "out.safetensors", (), by_bytes),
        Series("bytes, safetensors to deflated npz", "safetensors", "out.npz", ("--compress",), by_bytes),
        Series("tensors, npz to safetensors", "npz", "out.safetensors", (), by_count),
        Series("tensors, safetensors to npz", "safetensors", "out.npz", (), by_count),
    )


def measure(bench: Bench, small: bool, count: int, jobs: int | None) -> Iterator[Point]:
    """All points, series by series, each in ascending order."""
    threads = () if jobs is None else ("--jobs", str(jobs))
    start = _run(bench, "tiny.npz", "out.safetensors", threads, 2 * count)[0]
    for series in _series(small):
        for tensors, each in series.sizes:
            name = f"{tensors}x{each}.{series.suffix}"
            bench.need(name)
            seconds, rss_bytes = _run(bench, name, series.target, (*series.options, *threads), count)
            bench.forget({name})
            yield Point(series.name, tensors, tensors * each, seconds, max(seconds - start, 0.0), rss_bytes)


def _run(bench: Bench, source: str, target: str, options: Command, count: int) -> tuple[float, int]:
    bench.need(source)
    [runs] = bench.rounds([(("convert", IN, OUT, *options), source, target)], count)
    if runs.problem:
        raise RuntimeError(f"convert {source} {target}: {runs.problem}")
    return runs.seconds, runs.rss_bytes
