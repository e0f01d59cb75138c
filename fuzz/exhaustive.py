"""All systematic changes of one file; a module of its own, for the processes that do it import it."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from fuzz.body import CHOICES, MAX_BYTES
from fuzz.finds import attempt
from fuzz.mutate import systematic
from fuzz.seeds import Seed

_CONVERT_EVERY = 16


def all_changes(work: tuple[Seed, int, Path, Path | None]) -> tuple[str, dict[str, float]]:
    """A file's name, and what came of its changes: the file, each n-th of them, where finds go, when to wait."""
    seed, every, finds, pause_file = work
    counts = {"executions": 0, "accepted": 0, "converted": 0, "finds": 0, "cpu_seconds": -time.process_time()}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for number, data in enumerate(systematic(seed.data, seed.suffix)):
            if number % every:
                continue
            if number % 256 == 0:
                while pause_file is not None and pause_file.exists():
                    time.sleep(1)
            choice = number // _CONVERT_EVERY % CHOICES if number % _CONVERT_EVERY == 0 else None
            tally(counts, attempt(data[:MAX_BYTES], seed.suffix, Path(folder), choice, finds))
    counts["cpu_seconds"] += time.process_time()
    return seed.name, counts


def tally(counts: dict[str, float], outcome: object) -> None:
    """Add what one attempt came to."""
    counts["executions"] += 1
    accepted, converted = outcome if isinstance(outcome, tuple) else (False, False)
    counts["accepted"] += accepted
    counts["converted"] += converted
    counts["finds"] += outcome is None
