"""One worker of the coverage-guided form: atheris (libFuzzer) with the changes of `fuzz.mutate` as its mutator.

    python -m fuzz.guided CORPUS --seconds N --number K [--pause-file PATH]

Runs until it has used N seconds of CPU. The corpus grows in CORPUS/inputs, broken promises are in CORPUS/finds, and
CORPUS/stats-K.json tells how far it came.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import atheris

_MODULES = {
    "convert": "api arrays longdouble numeric transpose turning verify",
    "readers": "npy npz pickles safetensors shards",
    "writers": "npy npz safetensors shards",
}
with atheris.instrument_imports(include=list(_MODULES)):  # all that is imported here for the first time
    from fuzz.body import CHOICES, MAX_BYTES
    from fuzz.finds import attempt
    from fuzz.mutate import changed
    from fuzz.seeds import PREFIX_BYTES, packed, unpacked

    for package, names in _MODULES.items():
        for name in names.split():
            importlib.import_module(f"{package}.{name}")

_CHECK_EVERY = 50


class Worker:
    """The state of one process: counts, the clock, the folder it writes into."""

    def __init__(self, corpus: Path, seconds: float, number: int, pause_file: Path | None) -> None:
        self.corpus = corpus
        self.seconds = seconds
        self.stats = corpus / f"stats-{number}.json"
        self.pause_file = pause_file
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self.counts = {"executions": 0, "accepted": 0, "converted": 0, "finds": 0, "cpu_seconds": 0.0}
        self.mutations = 0

    def run(self, one: bytes) -> None:
        """One execution."""
        data, suffix, choice = unpacked(one)
        outcome = attempt(data[:MAX_BYTES], suffix, self.folder, choice, self.corpus / "finds", alarm=False)
        self.counts["executions"] += 1
        if outcome is None:
            self.counts["finds"] += 1
        else:
            self.counts["accepted"] += outcome.accepted
            self.counts["converted"] += outcome.converted

    def mutate(self, one: bytes, most: int, seed: int) -> bytes:
        """The next input; between two executions is also the time to stop, or to pause."""
        self.mutations += 1
        if self.mutations % _CHECK_EVERY == 0:
            self._look_around()
        rng = random.Random(seed)
        data, suffix, choice = unpacked(one)
        if rng.random() < 0.1:
            choice = rng.randrange(CHOICES)
        if rng.random() < 0.3:
            data = atheris.Mutate(data, max(most - PREFIX_BYTES, 1)) if data else b"\x93"
        else:
            data = changed(data, suffix, rng)
        return packed(data, suffix, choice)[:most]

    def _look_around(self) -> None:
        self.counts["cpu_seconds"] = time.process_time()
        self.stats.write_text(json.dumps(self.counts))
        while self.pause_file is not None and self.pause_file.exists():
            time.sleep(1)
        if time.process_time() > self.seconds:
            os.rmdir(self.folder)
            os._exit(0)  # libFuzzer has no other way to stop from within


def main() -> None:
    """Parse the arguments and never return."""
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--pause-file", type=Path)
    options = parser.parse_args()
    worker = Worker(options.corpus, options.seconds, options.number, options.pause_file)
    inputs = options.corpus / "inputs"
    flags = [
        "-timeout=150",
        "-rss_limit_mb=2048",
        f"-max_len={MAX_BYTES}",
        "-len_control=0",
        "-reload=1",
        "-print_final_stats=1",
    ]
    flags.append(f"-artifact_prefix={options.corpus}/")
    atheris.Setup([sys.argv[0], str(inputs), *flags], worker.run, custom_mutator=worker.mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
