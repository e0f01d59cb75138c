"""A conversion that is killed or interrupted leaves the target absent, or the old one, and says so where it can."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faultfs import listing

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="looks into /proc to see the work begin")

SOURCE_BYTES = 1 << 30
BEGUN_BYTES = 50 << 20
PATIENCE_SECONDS = 60
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT

# A background shell may have set SIGINT to be ignored; the fallback is what systems without O_TMPFILE do.
PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[1] == "named" and hasattr(os, "O_TMPFILE"):
    del os.O_TMPFILE
from convert.cli.main import main
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Zeros that take no space on the disk, in two tensors."""
    path = tmp_path_factory.mktemp("source") / "in.safetensors"
    half = SOURCE_BYTES // 2
    entries = {
        name: {"dtype": "U8", "shape": [half], "data_offsets": [index * half, (index + 1) * half]}
        for index, name in enumerate(("a", "b"))
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + SOURCE_BYTES)
    return path


def has_begun(process: subprocess.Popen[bytes], folder: Path) -> bool:
    """Whether the process holds a file open in the folder, and has read a good part of the source."""
    try:
        links = [f"/proc/{process.pid}/fd/{name}" for name in os.listdir(f"/proc/{process.pid}/fd")]
        if not any(os.readlink(link).startswith(f"{folder}/") and os.path.isfile(link) for link in links):
            return False
        counters = dict(line.split(": ") for line in Path(f"/proc/{process.pid}/io").read_text("ascii").splitlines())
        return int(counters["rchar"]) > BEGUN_BYTES
    except FileNotFoundError:  # closed, or ended, between two looks
        return False


def interrupted(source: Path, target: str, number: int, way: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    """Start the program, stop it in the middle of its work, send the signal, let it go on."""
    folder = Path(target).parent
    command = [sys.executable, "-c", PROGRAM, way, str(source), target, "--jobs", "2", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        patience = time.monotonic() + PATIENCE_SECONDS
        while not has_begun(process, folder):
            assert process.poll() is None, f"ended before it was seen at work: {process.communicate()}"
            assert time.monotonic() < patience, "it never began"
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


# Slow enough to be caught at work: zlib's best, or a second and third pass over all bytes.
TARGETS = {"out.npz": ["--compress", "9"], "out.safetensors": ["--verify"], "out/": ["--verify"]}


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("way", ["nameless", "named"])
@pytest.mark.parametrize(
    ("target", "number"),
    [("out.npz", KILL), ("out/", KILL), ("out.npz", TERM), ("out/", INT), ("out.safetensors", INT)],
)
def test_killed(source: Path, tmp_path: Path, target: str, number: signal.Signals, way: str, old: bool) -> None:
    """Absent or old; after Ctrl-C and SIGTERM exit status 130, a message and not a trace; after SIGKILL no named file
    where the system has nameless ones."""
    path = tmp_path / target
    kept = path / "old.npy" if target.endswith("/") else path
    if old:
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(b"old")
    options = [*TARGETS[target], *(["--overwrite"] if old else [])]
    result = interrupted(source, f"{tmp_path}/{target}", number, way, *options)
    left = listing(tmp_path)
    if old:
        assert kept.read_bytes() == b"old"
        assert not path.is_dir() or listing(path) == ["old.npy"]
        left.remove(path.name)
    assert result.stdout == b""
    if number == KILL:
        assert result.returncode == -KILL
        assert all(name.startswith(f".{path.name}.") and name.endswith(".convert-tmp") for name in left)
        assert len(left) == (1 if way == "named" or target == "out/" else 0)
        for name in left:  # a gigabyte of reserved space
            shutil.rmtree(tmp_path / name) if target == "out/" else (tmp_path / name).unlink()
    else:
        assert result.returncode == 130
        assert result.stderr == b"interrupted; nothing was written\n"
        assert left == []


def test_what_a_killed_run_left_is_not_in_the_way(source: Path, tmp_path: Path) -> None:
    """The next run takes no notice of the hidden file and succeeds."""
    target = tmp_path / "out.npz"
    interrupted(source, str(target), KILL, "named", "--compress", "9")
    assert len(listing(tmp_path)) == 1
    command = [sys.executable, "-c", PROGRAM, "named", str(source), str(target), "--compress", "1", "--include", "a"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    assert [name for name in listing(tmp_path) if not name.startswith(".")] == ["out.npz"]
