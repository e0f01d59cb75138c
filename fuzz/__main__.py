"""The long forms of the fuzz tests.

python -m fuzz --minutes N       coverage-guided, N minutes of CPU on each of --jobs workers (pip install '.[fuzz]')
python -m fuzz --exhaustive      every prefix, bit flip and field change of every sample, case and find
python -m fuzz --differential N  N random changes of each file, judged by us and by numpy and safetensors
python -m fuzz --replay FOLDER   each input of a corpus once, for coverage: coverage run -m fuzz --replay FOLDER

Broken promises are stored in CORPUS/finds, the smallest file of each kind; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from fuzz.body import CHOICES, MAX_BYTES
from fuzz.exhaustive import all_changes, tally
from fuzz.finds import attempt
from fuzz.seeds import ROOT, packed, seeds, unpacked


def main(argv: list[str] | None = None) -> int:
    """Do one of the three; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--minutes", type=float, help="CPU minutes of each worker")
    what.add_argument("--exhaustive", action="store_true", help="all systematic changes")
    what.add_argument("--differential", type=int, help="changes of each file")
    what.add_argument("--replay", type=Path, help="run a corpus once")
    parser.add_argument("--corpus", type=Path, default=ROOT / "build" / "fuzz", help="where inputs and finds are kept")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--every", type=int, default=1, help="with --exhaustive: only every n-th change")
    parser.add_argument("--only", default="*", help="with --exhaustive: files whose names match a glob")
    parser.add_argument("--pause-file", type=Path, help="wait while this file exists")
    options = parser.parse_args(argv)
    if options.minutes is not None and importlib.util.find_spec("atheris") is None:
        parser.error("--minutes needs atheris: pip install '.[fuzz]'")
    if not any(fnmatch.fnmatchcase(seed.name, options.only) for seed in seeds()):
        parser.error(f"--only {options.only}: no file of samples, cases or finds has such a name")
    if options.differential is not None:
        return _differential(options.differential)
    options.corpus.mkdir(parents=True, exist_ok=True)
    if options.replay is not None:
        counts = _replay(options.replay, options.corpus / "finds")
    elif options.exhaustive:
        counts = _exhaustive(options)
    else:
        counts = _guided(options)
    print(json.dumps(counts))
    finds = sorted((options.corpus / "finds").glob("*.txt"))
    for note in finds:
        print(f"{note}: {note.read_text('utf-8').splitlines()[0]}")
    return 1 if finds else 0


def _sum(counts: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(sum(count[key] for count in counts), 1) for key in counts[0]} if counts else {}


# --- coverage-guided ---------------------------------------------------------------------------------------------


def _guided(options: argparse.Namespace) -> dict[str, float]:
    inputs = options.corpus / "inputs"
    inputs.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds(16 << 10)):
        (inputs / f"seed-{number}").write_bytes(packed(seed.data, seed.suffix, number % CHOICES))
    seconds = 60 * options.minutes
    workers = [_Guided(options, number, seconds) for number in range(options.jobs)]
    while sum(worker.goes_on() for worker in workers):
        time.sleep(1)
    return _sum([worker.total for worker in workers]) | {"corpus": len(list(inputs.iterdir()))}


class _Guided:
    """A worker, begun anew with the time that is left if libFuzzer ended it (a hang, a crash of the interpreter)."""

    def __init__(self, options: argparse.Namespace, number: int, seconds: float) -> None:
        self._options = options
        self._number = number
        self._seconds = seconds
        self._stats = options.corpus / f"stats-{number}.json"
        self._log = options.corpus / f"log-{number}.txt"
        self.total: dict[str, float] = {"executions": 0, "accepted": 0, "converted": 0, "finds": 0, "cpu_seconds": 0}
        self._process = self._begin()

    def _begin(self) -> subprocess.Popen[bytes]:
        self._stats.unlink(missing_ok=True)
        left = self._seconds - self.total["cpu_seconds"]
        command = [sys.executable, "-m", "fuzz.guided", self._options.corpus, "--seconds", str(left)]
        command += ["--number", str(self._number)]
        if self._options.pause_file is not None:
            command += ["--pause-file", self._options.pause_file]
        with self._log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)

    def goes_on(self) -> bool:
        status = self._process.poll()
        if status is None:
            return True
        if not self._stats.exists():
            if status:
                print(f"worker {self._number} ended with status {status}; its log is {self._log}")
            return False
        self.total = _sum([self.total, json.loads(self._stats.read_text())])
        self._stats.unlink()
        if status == 0 or self.total["cpu_seconds"] >= self._seconds:
            return False
        print(f"worker {self._number} was ended with status {status}; its input is in {self._options.corpus}")
        self._process = self._begin()
        return True


# --- exhaustive --------------------------------------------------------------------------------------------------


def _exhaustive(options: argparse.Namespace) -> dict[str, float]:
    finds, began = options.corpus / "finds", time.time()
    chosen = [seed for seed in seeds() if fnmatch.fnmatchcase(seed.name, options.only)]
    work = [(seed, options.every, finds, options.pause_file) for seed in chosen]
    with ProcessPoolExecutor(options.jobs) as pool:  # a Pool waits for ever for a worker that crashed
        counts = []
        for done, future in enumerate(as_completed([pool.submit(all_changes, item) for item in work]), 1):
            name, count = future.result()
            counts.append(count)
            print(f"{time.time() - began:7.0f} s  {done}/{len(work)}  {name}: {_sum([count])}", flush=True)
    return _sum(counts)


def _differential(changes: int) -> int:
    """Print each class of disagreement, how often it came, and a file; 1 if any is not in docs/strictness.md."""
    from fuzz.differ import all_disagreements, listed

    known, found = listed(), all_disagreements(changes)
    for one, (count, seed, number) in sorted(found.items()):
        print(f"{'' if one in known else 'NOT LISTED '}{count} {' | '.join(one)} (change {number} of {seed})")
    return 0 if found.keys() <= known else 1


def _replay(inputs: Path, finds: Path) -> dict[str, float]:
    counts: dict[str, float] = {"executions": 0, "accepted": 0, "converted": 0, "finds": 0}
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    for path in sorted(inputs.iterdir()):
        try:
            data, suffix, choice = unpacked(path.read_bytes())
        except FileNotFoundError:  # a worker that still runs has found a shorter one
            continue
        tally(counts, attempt(data[:MAX_BYTES], suffix, folder, choice, finds))
    shutil.rmtree(folder)
    return counts


if __name__ == "__main__":
    sys.exit(main())
