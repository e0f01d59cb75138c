"""A batch that is killed at any moment, and run again, ends with the tree that an undisturbed one makes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from convert.batchtree import STATE

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="sends signals"),
    pytest.mark.slow,
]

MOMENTS = int(os.environ.get("CONVERT_KILLS", "50"))
PATIENCE_SECONDS = 60

# Few files shall do for processes, and for large ones; children know nothing of it, nor need they.
PROGRAM = """
import signal, sys
from convert import batchrun
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell may have it ignored
batchrun._FILES_PER_WORKER, batchrun.CHUNK_FILES, batchrun.HUGE_BYTES = 8, 3, 1 << 20
from convert.cli.main import main
main(["batch", *sys.argv[1:], "--jobs", "2"])
"""
# What systems without O_TMPFILE do, in all processes.
SITE = """
import os
if os.environ.get("NAMED_TEMPORARIES") and hasattr(os, "O_TMPFILE"):
    del os.O_TMPFILE
"""
WAYS = {
    "safetensors": ["--to", "safetensors", "--copy-others"],
    "npy": ["--to", "npy"],
    "shards": ["--to", "safetensors", "--max-shard-size", "200KB", "--no-fsync"],
    "deflated": ["--to", "npz", "--compress", "7", "--verify"],
}


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small ones, some with several tensors, two that count as large, and others to copy."""
    top = tmp_path_factory.mktemp("kill")
    (top / "sitecustomize.py").write_text(SITE)
    generator = np.random.default_rng(1)
    for number in range(24):
        path = top / "src" / f"folder{number % 5}" / f"file{number:02}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {f"t{n}": generator.standard_normal(40_000 // (n + 1)).astype("f4") for n in range(number % 3 + 1)}
        np.savez(path, **arrays)  # type: ignore[arg-type]
        if number % 4 == 0:
            path.with_name(f"config{number}.json").write_bytes(b"{}" * number)
    for number in range(2):
        np.savez(top / "src" / f"large{number}.npz", a=generator.standard_normal(200_000), b=np.zeros(9))
    return top / "src"


def start(src: Path, dst: Path, way: str, *, named: bool) -> subprocess.Popen[bytes]:
    """A batch in a process group of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(src.parent), *sys.path])}
    if named:
        env["NAMED_TEMPORARIES"] = "1"
    command = [sys.executable, "-c", PROGRAM, str(src), str(dst), *WAYS[way]]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Let it come to its end, which must be a good one."""
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors.decode()


def tree(folder: Path) -> dict[str, bytes]:
    """All that is there, hidden or not, but what is remembered."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(f"{STATE}/")}


@pytest.fixture(scope="module")
def undisturbed(src: Path) -> dict[str, tuple[dict[str, bytes], float]]:
    """For each way, what comes out and the seconds it takes."""
    found = {}
    for way in WAYS:
        began = time.monotonic()
        finish(start(src, src.parent / way, way, named=False))
        found[way] = (tree(src.parent / way), time.monotonic() - began)
        assert len(found[way][0]) >= 26
    return found


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_killed_and_resumed(
    src: Path, tmp_path: Path, undisturbed: dict[str, tuple[dict[str, bytes], float]], moment: int
) -> None:
    """Killed twice, alone or with its workers; the next run leaves every byte as it should be and nothing else."""
    seed = int(os.environ.get("CONVERT_KILL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"CONVERT_KILL_SEED={seed}")  # noqa: T201
    chance = random.Random(seed)
    way = list(WAYS)[moment % len(WAYS)]
    wanted, seconds = undisturbed[way]
    named = chance.random() < 0.5
    dst = tmp_path / "dst"
    for _ in range(2):
        process = start(src, dst, way, named=named)
        try:
            process.communicate(timeout=chance.uniform(0.1, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            if chance.random() < 0.5:
                process.kill()  # its workers find out by themselves
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()  # until the last of its workers has closed the pipe
        seen = {name: data for name, data in tree(dst).items() if not any(part[0] == "." for part in name.split("/"))}
        assert seen.keys() <= wanted.keys()
        assert all(data == wanted[name] for name, data in seen.items()), "half written"
    finish(start(src, dst, way, named=named))
    assert tree(dst) == wanted
    state = dst / STATE
    assert os.listdir(state / "runs") == ["gate"]
    assert not any(os.listdir(state / name) for name in ("claims", "again") if (state / name).exists())


def test_an_interrupt_stops_promptly(src: Path, tmp_path: Path) -> None:
    """Status 130, no trace, nothing half written, nothing left that runs; and the next run resumes."""
    dst = tmp_path / "dst"
    process = start(src, dst, "deflated", named=True)
    journal = dst / STATE / "journal.jsonl"
    patience = time.monotonic() + PATIENCE_SECONDS
    while not (journal.exists() and journal.read_bytes().count(b'"done"') > 5):  # the workers are at work
        assert process.poll() is None
        assert time.monotonic() < patience
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, errors
    assert errors.startswith(b"interrupted; ")
    assert errors.count(b"\n") == 1
    assert not [path for path in dst.rglob("*") if "convert-tmp" in path.name]
    assert os.listdir(dst / STATE / "runs") == ["gate"]
    finish(start(src, dst, "deflated", named=True))
