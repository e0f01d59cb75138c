"""Run whole processes in turn and take their time, their memory and the size of what they write."""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from benchmarks.jobs import FILES, IN, JOBS, OUT, Command, Job, Peer

_ROOT = Path(__file__).resolve().parents[1]
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class FailedError(Exception):
    """A measured process ended with an error; the text is its last line."""


_AGAIN = 2
"""How often a job over a bound is measured once more: noise of the machine goes, slowness stays."""


@dataclass(frozen=True)
class Sample:
    """One process: wall and CPU seconds, and peak resident bytes."""

    seconds: float
    cpu_seconds: float
    rss_bytes: int


@dataclass
class Runs:
    """All measured runs of one command.

    Attributes:
        samples: In the order of the rounds; empty if it failed.
        output_bytes: Size of what it writes.
        problem: Why there are no samples.
    """

    samples: list[Sample] = field(default_factory=list)
    output_bytes: int = 0
    problem: str = ""

    @property
    def seconds(self) -> float:
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def rss_bytes(self) -> int:
        return max(sample.rss_bytes for sample in self.samples)


@dataclass(frozen=True)
class Row:
    """A job against one of its peers.

    Attributes:
        job: What.
        peer: Against what.
        ours: Measured.
        theirs: Measured in the same rounds.
        work_bytes: The larger of what goes in and what comes out.
    """

    job: Job
    peer: Peer
    ours: Runs
    theirs: Runs
    work_bytes: int

    @property
    def problem(self) -> str:
        return self.ours.problem or self.theirs.problem

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios, ours / theirs."""
        pairs = zip(self.ours.samples, self.theirs.samples, strict=True)
        return statistics.median(ours.seconds / theirs.seconds for ours, theirs in pairs)

    @property
    def cpu_ratio(self) -> float:
        """The same of CPU seconds, which hardly change when others use the machine."""
        pairs = zip(self.ours.samples, self.theirs.samples, strict=True)
        return statistics.median(ours.cpu_seconds / max(theirs.cpu_seconds, 1e-6) for ours, theirs in pairs)

    @property
    def limit(self) -> float | None:
        """The largest ratio within the bound; the seconds granted on top are a part of it."""
        if self.peer.factor is None:
            return None
        return self.peer.factor + self.peer.extra / self.theirs.seconds

    @property
    def over(self) -> list[str]:
        """Which bounds are exceeded: time, RSS, size."""
        peer, limit = self.peer, self.limit
        found = ["time"] if limit is not None and self.ratio > limit else []
        if peer.rss_mib is not None and self.ours.rss_bytes > peer.rss_mib << 20:
            found.append("RSS")
        if peer.no_larger and self.ours.output_bytes > self.theirs.output_bytes:
            found.append("size")
        return found


def timed(command: Sequence[str], folder: Path) -> Sample:
    """Run one process to its end.

    Raises:
        FailedError: It ended with another status than 0.
    """
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").split("\n")
            said = [line for line in lines if line.strip()]
            raise FailedError(said[-1] if said else f"exit status {process.returncode}")
    return Sample(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * _RSS_UNIT)


def environment(folder: Path) -> dict[str, str]:
    """This process's, with this checkout found first by the children, and compiled modules kept in the folder.

    An installed program never compiles its modules; after the warm-up, neither do those measured here.
    """
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    found["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
    return found


@cache
def _programs() -> dict[str, Command]:
    copy: Command = ("cp",)
    said = subprocess.run(["cp", "--version"], capture_output=True, check=False).stdout
    if b"coreutils" in said:
        copy = ("cp", "--reflink=never")
    return {"python": (sys.executable,), "convert": (sys.executable, "-m", "convert"), "cp": copy}


def words(command: Command, source: str, target: str) -> list[str]:
    """The command as it is started."""
    named = {IN: source, OUT: target if command[0] == "convert" else target.rstrip("/")}
    return [*_programs()[command[0]], *(named.get(word, word) for word in command[1:])]


def remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.exists() else 0


class Bench:
    """A folder with inputs, made when first needed.

    Args:
        folder: Where; inputs that are there already are taken as they are.
        divisor: What the inputs' sizes are divided by.
        keep: Leave inputs on the disk when they are no longer needed.
    """

    def __init__(self, folder: Path, divisor: int, *, keep: bool) -> None:
        self._folder = folder
        self._divisor = divisor
        self._keep = keep
        for name, text in FILES.items():
            (folder / name).write_text(text)

    def need(self, name: str) -> int:
        """Make an input if it is not there; its size.

        In a process of its own: memory that this one ever used would count as its children's.
        """
        path = self._folder / name
        if not path.exists():
            command = [sys.executable, "-m", "benchmarks.inputs", name, str(path), str(self._divisor)]
            timed(command, self._folder)
        return size_of(path)

    def forget(self, names: set[str]) -> None:
        """Remove inputs, unless they are kept."""
        if not self._keep:
            for name in names:
                remove(self._folder / name)

    def rounds(
        self, commands: Sequence[tuple[Command, str, str]], count: int, before: list[Runs] | None = None
    ) -> list[Runs]:
        """Run commands (each with source and target) in turn, `count` times after one warm-up; add to those before."""
        found = [Runs() for _ in commands] if before is None else before
        for number in range(count + 1):
            for runs, (command, source, target) in zip(found, commands, strict=True):
                if runs.problem:
                    continue
                output = self._folder / target if target else None
                if output is not None:
                    remove(output)
                try:
                    sample = timed(words(command, source, target), self._folder)
                except FailedError as err:
                    runs.problem = str(err)
                    runs.samples.clear()
                    continue
                if number:
                    runs.samples.append(sample)
                if output is not None:
                    runs.output_bytes = size_of(output)
                    remove(output)
        return found

    def measure(self, job: Job, count: int, jobs: int | None) -> list[Row]:
        """A job against all its peers in the same rounds; more of them, which all count, if a bound is exceeded."""
        source_bytes = self.need(job.source) if job.source else 0
        for peer in job.peers:
            for name in peer.inputs:
                self.need(name)
        threads = () if jobs is None or job.command else ("--jobs", str(jobs))
        ours = job.command or ("convert", IN, OUT, *job.options, *threads)
        here = [peer for peer in job.peers if not peer.needs or is_installed(peer.needs)]
        commands = [
            ours,
            *((*peer.command, *threads) if peer.command[0] == "convert" else peer.command for peer in here),
        ]
        lines = [(command, job.source, job.target) for command in commands]
        measured = self.rounds(lines, count * job.repeat)
        missing = {peer.name: Runs(problem=f"{peer.name} not installed") for peer in job.peers}

        def rows() -> list[Row]:
            first, *others = measured
            found = missing | dict(zip((peer.name for peer in here), others, strict=True))
            work_bytes = max(source_bytes, first.output_bytes)
            return [Row(job, peer, first, found[peer.name], work_bytes) for peer in job.peers]

        for _ in range(_AGAIN if self._divisor == 1 else 0):
            if not any(not row.problem and row.over for row in rows()):
                break
            self.rounds(lines, count * job.repeat, measured)
        return rows()


@cache
def is_installed(module: str) -> bool:
    """Whether a module can be imported; found out in another process."""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None and (
            subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0
        )
    except (ImportError, ValueError):
        return False


def run_jobs(bench: Bench, names: set[str], count: int, jobs: int | None) -> Iterator[Row]:
    """Rows of the named jobs as they come; inputs are removed after the last job that reads them."""
    chosen = [job for job in JOBS if job.name in names]
    for index, job in enumerate(chosen):
        yield from bench.measure(job, count, jobs)
        later = {name for other in chosen[index + 1 :] for name in _reads(other)}
        bench.forget(_reads(job) - later)


def _reads(job: Job) -> set[str]:
    return {name for name in (job.source, *(name for peer in job.peers for name in peer.inputs)) if name}
