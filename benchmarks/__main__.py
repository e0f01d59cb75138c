"""Measure conversions as whole processes against their peers, page cache warm.

    python -m benchmarks                        about 10 minutes, 5 GB in the temporary folder
    python -m benchmarks --small                about a minute, inputs a sixteenth of the size
    python -m benchmarks --only fortran,inflate --runs 9
    python -m benchmarks --scaling              seconds per GB and per tensor
    python -m benchmarks --folders              trees of small and of large files

Every job runs in turn with its peers (ours, cp, script, ours, cp, script, ...) after one warm-up of each; outputs are
removed outside the timed part. `ratio` is the median of the rounds' ratios of wall time, `cpu` that of CPU time, which
changes less when others use the machine. A job over a bound is measured up to twice more, and all rounds count: the
number behind the verdict. The bounds are for full size and an idle machine; nothing here fails because of one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import chart, folders, run, scaling
from benchmarks.jobs import JOBS

_FULL_BYTES = 6 << 30
_SMALL_DIVISOR = 16
_NOISE_SECONDS = 0.04


def main(arguments: Sequence[str]) -> int:
    """Run what the options ask for; 130 when interrupted."""
    wanted = _options(arguments)
    if not hasattr(os, "wait4"):
        sys.exit("this system has no wait4, which the measurements need")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    divisor = _SMALL_DIVISOR if wanted.small else 1
    count = wanted.runs or (3 if wanted.small else 5)
    try:
        with _folder(wanted.keep, wanted.small) as name:
            free = shutil.disk_usage(name).free
            if free < _FULL_BYTES // divisor:
                sys.exit(f"{_FULL_BYTES // divisor >> 20} MiB of disk are needed in {name}; {free >> 20} are free")
            bench = run.Bench(Path(name).resolve(), divisor, keep=wanted.keep is not None)
            if wanted.folders:
                found = folders.show(folders.measure(bench, Path(name).resolve(), divisor, count))
            else:
                found = (_scaling if wanted.scaling else _speed)(bench, wanted, count)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    if wanted.json:
        facts = {"machine": _machine(), "small": wanted.small, "runs": count, **found}
        Path(wanted.json).write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [job.name for job in JOBS]

    def chosen(text: str) -> set[str]:
        given = set(text.split(","))
        if unknown := given - set(names):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))} (one of {', '.join(names)})")
        return given

    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"a number from 1 is needed (found {text!r})")
        return int(text)

    parser.add_argument("--small", action="store_true", help="inputs a sixteenth of the size, 3 runs")
    parser.add_argument("--scaling", action="store_true", help="time against bytes and number of tensors instead")
    parser.add_argument("--folders", action="store_true", help="trees of small and of large files instead")
    parser.add_argument("--only", metavar="NAME,...", type=chosen, default=set(names), help="some of the jobs")
    parser.add_argument("--runs", metavar="R", type=positive, help="rounds (default 5, small 3)")
    parser.add_argument("--jobs", metavar="N", type=positive, help="threads of convert (default its own)")
    parser.add_argument("--json", metavar="FILE", help="write every sample there")
    parser.add_argument("--svg", metavar="FILE", help="draw the ratios there")
    parser.add_argument("--keep", metavar="DIR", help="make the inputs there, leave them, use them again")
    return parser.parse_args(arguments)


def _folder(keep: str | None, small: bool) -> AbstractContextManager[str]:
    """Where everything is written: a temporary folder that is removed in any case, or the one to be kept."""
    if keep is None:
        return tempfile.TemporaryDirectory(prefix="convert-benchmarks-", ignore_cleanup_errors=True)
    folder = Path(keep, "small" if small else "full")
    folder.mkdir(parents=True, exist_ok=True)
    return nullcontext(str(folder))


# --- against peers -----------------------------------------------------------------------------------------------

_COLUMNS = (
    ("job", -24), ("peer", -17), ("ours s", 7), ("peer s", 7), ("ratio", 6), ("cpu", 6), ("bound", -13),
    ("verdict", -10), ("MB/s", 6), ("RSS MiB", 7), ("MB", 8), ("peer's", 8),
)  # fmt: skip


def _speed(bench: run.Bench, wanted: argparse.Namespace, count: int) -> dict[str, Any]:
    rows = []
    _line(name for name, _ in _COLUMNS)
    for row in run.run_jobs(bench, wanted.only, count, wanted.jobs):
        rows.append(row)
        _line(_cells(row))
    if wanted.small:
        print("bounds are meant for the full size")
    if wanted.svg:
        facts = _machine()
        about = f"{facts['cores']} cores, page cache warm, whole processes, median of {count} rounds"
        Path(wanted.svg).write_text(chart.draw(rows, f"{about}, {facts['cpu']}" if facts["cpu"] else about))
    return {"rows": [_facts(row) for row in rows]}


def _line(cells: Iterable[str]) -> None:
    padded = (
        f"{cell:{'<' if width < 0 else '>'}{abs(width)}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True)
    )
    print("  ".join(padded).rstrip(), flush=True)


def _cells(row: run.Row) -> list[str]:
    if row.problem:
        return [row.job.name, row.peer.name, *[""] * 9, row.problem]
    ours, theirs = row.ours, row.theirs
    speed = f"{row.work_bytes / ours.seconds / 1e6:.0f}" if row.work_bytes > 1e6 else ""
    sizes = [
        f"{size / 1e6:.2f}" if row.job.target and size else "" for size in (ours.output_bytes, theirs.output_bytes)
    ]
    return [
        row.job.name, row.peer.name, f"{ours.seconds:.3f}", f"{theirs.seconds:.3f}", f"{row.ratio:.3f}",
        f"{row.cpu_ratio:.3f}", _bound(row), _verdict(row), speed, f"{ours.rss_bytes / (1 << 20):.0f}", *sizes,
    ]  # fmt: skip


def _bound(row: run.Row) -> str:
    if row.peer.factor is None:
        return ""
    return f"{row.peer.factor:g}x" + (f" + {row.peer.extra:g} s" if row.peer.extra else "")


def _verdict(row: run.Row) -> str:
    if row.over:
        return f"over: {', '.join(row.over)}"
    return "" if row.peer.factor is None else f"ok ({len(row.ours.samples)})"


def _facts(row: run.Row) -> dict[str, Any]:
    facts: dict[str, Any] = {"job": row.job.name, "peer": row.peer.name}
    if row.problem:
        return {**facts, "problem": row.problem}
    for name, runs in (("ours", row.ours), ("theirs", row.theirs)):
        facts[name] = {
            "seconds": [round(sample.seconds, 4) for sample in runs.samples],
            "cpu_seconds": [round(sample.cpu_seconds, 4) for sample in runs.samples],
            "rss_bytes": runs.rss_bytes,
            "output_bytes": runs.output_bytes,
        }
    return {
        **facts, "ratio": round(row.ratio, 4), "cpu_ratio": round(row.cpu_ratio, 4), "limit": row.limit,
        "rss_mib_bound": row.peer.rss_mib, "over": row.over, "work_bytes": row.work_bytes,
    }  # fmt: skip


# --- growth ------------------------------------------------------------------------------------------------------


def _scaling(bench: run.Bench, wanted: argparse.Namespace, count: int) -> dict[str, Any]:
    points = []
    series = ""
    titles = ("tensors", "MB", "s", "s - start", "s/GB", "us/tensor", "RSS MiB")
    for point in scaling.measure(bench, wanted.small, count, wanted.jobs):
        if point.name != series:
            series = point.name
            print(f"\n{series}\n" + "  ".join(f"{title:>9}" for title in titles))
        points.append(point)
        cells = (
            f"{point.tensors}", f"{point.nbytes / 1e6:.2f}", f"{point.seconds:.3f}", f"{point.over_start:.3f}",
            *(_per(point.over_start, scale) for scale in (point.nbytes / 1e9, point.tensors / 1e6)),
            f"{point.rss_bytes / (1 << 20):.0f}",
        )  # fmt: skip
        print("  ".join(f"{cell:>9}" for cell in cells), flush=True)
    return {"points": [point._asdict() for point in points]}


def _per(seconds: float, units: float) -> str:
    """Seconds per unit, where they are more than the noise of starting a process."""
    return f"{seconds / units:.2f}" if seconds > _NOISE_SECONDS else ""


def _machine() -> dict[str, Any]:
    cpu = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    packages = {}
    for name in ("tensor-convert", "numpy", "safetensors", "ml_dtypes", "isal", "typer", "mlx"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": cpu, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "packages": packages,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
