"""Trees of files: `convert batch` against a loop of the numpy and safetensors script, and against `cp -r`.

    python -m benchmarks --folders [--small]

10,000 npz files of 20 KB with three tensors each, and 4 of 512 MiB, to safetensors. `cp -r` and the script do not force
their files to the disk; so neither does `convert batch` here (`--no-fsync`).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.jobs import IN, OUT, Command
from benchmarks.run import Bench, Runs, size_of, timed

MIB = 1 << 20
_LOOP = """
import os, sys
import numpy as np
from safetensors.numpy import save_file
source, target = sys.argv[1:]
for folder, _, names in os.walk(source):
    there = os.path.join(target, os.path.relpath(folder, source))
    os.makedirs(there, exist_ok=True)
    for name in names:
        tensors = dict(np.load(os.path.join(folder, name)))
        save_file({key: np.asarray(a, order="C") for key, a in tensors.items()}, f"{there}/{name[:-4]}.safetensors")
"""
WAYS: dict[str, Command] = {
    "convert batch": ("convert", "batch", IN, OUT, "--to", "safetensors", "--no-fsync"),
    "script": ("python", "-c", _LOOP, IN, OUT),
    "cp -r": ("cp", "-R", IN, OUT),
}


class Case(NamedTuple):
    """A tree: files, and about how large each is."""

    name: str
    files: int
    nbytes: int
    folders: int


def cases(divisor: int) -> tuple[Case, ...]:
    return (
        Case("small files", 10_000 // divisor, 20_000, 100),
        Case("large files", 4, 512 * MIB // divisor, 1),
    )


class Point(NamedTuple):
    """One way to do one tree: medians of the rounds, ratios taken within a round.

    Attributes:
        case: Name of the tree.
        way: Name of the command.
        files: In the tree.
        nbytes: Read.
        seconds: Wall time.
        to_script: Ratio of wall time to the loop's.
        to_cp: Ratio to that of `cp -r`.
        rss_bytes: Of the largest process.
        problem: Why there are no figures.
    """

    case: str
    way: str
    files: int
    nbytes: int
    seconds: float
    to_script: float
    to_cp: float
    rss_bytes: int
    problem: str = ""


def measure(bench: Bench, folder: Path, divisor: int, count: int) -> Iterator[Point]:
    """All ways with each tree, in turn."""
    for case in cases(divisor):
        name = case.name.replace(" ", "-")
        if not (folder / name).exists():
            command = [sys.executable, "-m", "benchmarks.folders", str(folder / name), *map(str, case[1:])]
            timed(command, folder)
        nbytes = size_of(folder / name)
        found = bench.rounds([(command, name, "out") for command in WAYS.values()], count)
        by_way = dict(zip(WAYS, found, strict=True))
        for way, runs in by_way.items():
            if problem := runs.problem or by_way["script"].problem or by_way["cp -r"].problem:
                yield Point(case.name, way, case.files, nbytes, 0, 0, 0, 0, problem)
                continue
            to_script, to_cp = _ratio(runs, by_way["script"]), _ratio(runs, by_way["cp -r"])
            yield Point(case.name, way, case.files, nbytes, runs.seconds, to_script, to_cp, runs.rss_bytes)
        bench.forget({name})


def _ratio(ours: Runs, theirs: Runs) -> float:
    pairs = zip(ours.samples, theirs.samples, strict=True)
    return statistics.median(one.seconds / other.seconds for one, other in pairs)


def show(points: Iterator[Point]) -> dict[str, Any]:
    """Print the table as it grows; the facts."""
    row = "{:<12}  {:<14}  {:>7}  {:>8}  {:>7}  {:>9}  {:>7}  {:>7}"
    print(row.format("tree", "way", "s", "files/s", "MB/s", "to script", "to cp", "RSS MiB"))
    found = []
    for point in points:
        found.append(point)
        if point.problem:
            print(row.format(point.case, point.way, *[""] * 6) + point.problem)
            continue
        print(
            row.format(
                point.case, point.way, f"{point.seconds:.2f}", f"{point.files / point.seconds:.0f}",
                f"{point.nbytes / point.seconds / 1e6:.0f}", f"{point.to_script:.2f}", f"{point.to_cp:.2f}",
                f"{point.rss_bytes / MIB:.0f}",
            ),
            flush=True,
        )  # fmt: skip
    return {"folders": [point._asdict() for point in found]}


def make(path: Path, files: int, nbytes: int, folders: int) -> None:
    """A tree of npz files, each of about `nbytes` in three tensors; seeded.

    Run in a process of its own: memory that the measuring one ever used would count as its children's.
    """
    import numpy as np

    from benchmarks.inputs import weights

    values = weights(nbytes // 4)
    for number in range(files):
        folder = path / f"run{number % folders:03}"
        folder.mkdir(parents=True, exist_ok=True)
        values[: min(1024, len(values))] += np.float32(1)  # no two are equal
        third = len(values) // 3
        np.savez(
            folder / f"checkpoint{number:05}.npz", weight=values[: 2 * third].reshape(2, -1), other=values[2 * third :],
            step=np.int64(number),
        )  # fmt: skip


if __name__ == "__main__":
    make(Path(sys.argv[1]), *map(int, sys.argv[2:]))
