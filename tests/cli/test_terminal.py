"""The program on terminals, in pipes and on disks that end."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.cli.running import ANSI, POSIX, driver, program
from tests.program import Call

# --- terminals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["ls", "in.npz"], ["formats"], ["policies"], ["--help"]])
@pytest.mark.parametrize("columns", [20, 40, 200])
def test_tables_fit_the_terminal(
    call: Call, small: str, monkeypatch: pytest.MonkeyPatch, argv: list[str], columns: int
) -> None:
    """However narrow: nothing is wider than it, and nothing fails."""
    monkeypatch.setenv("COLUMNS", str(columns))
    outcome = call(*argv)
    assert (outcome.status, outcome.err) == (0, "")
    lines = ANSI.sub("", outcome.out).splitlines()
    tables = [line for line in lines if not line.startswith(("skip works", "A glob", "--policy", "In force"))]
    assert max(map(len, tables)) <= columns


def test_in_a_pipe_names_stay_whole(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """`convert ls | grep` finds a long name on one line."""
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "model.decoder.layers." * 7 + "weight"
    np.savez("in.npz", **{name: np.zeros(1)})  # type: ignore[arg-type]
    assert name in call("ls", "in.npz").out


def on_terminal(folder: Path, command: list[str], *argv: str, **env: str) -> tuple[int, str, str]:
    """Run with stderr, and where `BOTH` is set stdout, on a pseudo-terminal: status, stdout, stderr."""
    import fcntl
    import pty
    import termios

    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    both = env.pop("BOTH", "")
    process = subprocess.Popen(
        [*command, *argv],
        stdout=inside if both else subprocess.PIPE,
        stderr=inside,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env={**os.environ, "TERM": "xterm-256color", **env},
    )
    os.close(inside)
    seen = b""
    while True:
        try:
            piece = os.read(outside, 65536)
        except OSError:  # Linux' way to say that the other end is closed
            piece = b""
        if not piece:
            break
        seen += piece
    os.close(outside)
    out = b"" if process.stdout is None else process.stdout.read()
    if process.stdout is not None:
        process.stdout.close()
    return process.wait(), out.decode(), seen.decode()


# The bar waits a second before it shows; this one does not, so that nothing here depends on time.
EAGER = driver(
    """
import tqdm
class Eager(tqdm.tqdm):
    def __init__(self, *args, **options):
        super().__init__(*args, **{**options, "delay": 0, "mininterval": 0, "miniters": 1})
tqdm.tqdm = Eager
"""
)


@pytest.mark.skipif(not POSIX, reason="pseudo-terminals")
@pytest.mark.parametrize("silent", [[], ["--quiet"], ["--no-progress"], ["--dry-run"]])
def test_progress_shows_on_a_terminal_only_and_on_stderr(tmp_path: Path, silent: list[str]) -> None:
    """Bytes, rate and the tensor in hand; stdout has the report alone; some options turn it off."""
    np.savez(tmp_path / "in.npz", **{"weight\x1b[1m": np.zeros(3_000_000)})  # type: ignore[arg-type]
    status, out, err = on_terminal(tmp_path, EAGER, "in.npz", "out.safetensors", "--json", *silent)
    assert status == 0
    assert json.loads(out)["tensors"][0]["nbytes"] == 24_000_000
    if silent:
        assert "%" not in err
    else:
        assert "B/s" in err
        assert "100%" in err
        assert r"weight\x1b[1m" in err
        assert "weight\x1b[1m" not in err


def test_no_progress_in_a_pipe(tmp_path: Path) -> None:
    """A log has the summary and nothing else."""
    np.savez(tmp_path / "in.npz", w=np.zeros(3_000_000))
    result = program(tmp_path, "in.npz", "out.safetensors", command=EAGER)
    assert result.returncode == 0
    assert re.fullmatch(r"out\.safetensors: 1 tensor, .*\n", result.stderr)


@pytest.mark.skipif(not POSIX, reason="pseudo-terminals")
def test_short_work_shows_no_bar(tmp_path: Path, small: str) -> None:
    """A bar that flashes by helps nobody."""
    status, _, err = on_terminal(tmp_path, driver(), small, "out.safetensors")
    assert status == 0
    assert ANSI.sub("", err).strip().startswith("out.safetensors: 2 tensors")


@pytest.mark.skipif(not POSIX, reason="pseudo-terminals")
@pytest.mark.parametrize("argv", [["--help"], ["policies"], ["ls", "in.npz"], ["in.npz", "x", "--nonsense"]])
def test_no_color_is_respected(tmp_path: Path, small: str, argv: list[str]) -> None:
    """https://no-color.org: no colours on a terminal either."""
    colours = re.compile(r"\x1b\[(?:\d+;)*[349][0-7]m")
    _, _, err = on_terminal(tmp_path, driver(), *argv, BOTH="1", NO_COLOR="1")
    assert len(err) > 100
    assert not colours.search(err)


# --- pipes and disks that end ------------------------------------------------------------------------------------

PRINTING = [["ls", "in.npz"], ["policies"], ["--help"], ["--version"], ["in.npz", "out.npz", "--json", "--quiet"]]


@pytest.mark.skipif(not POSIX, reason="POSIX pipes")
@pytest.mark.parametrize("argv", PRINTING, ids=" ".join)
def test_a_reader_that_has_gone_is_no_error(tmp_path: Path, small: str, argv: list[str]) -> None:
    """`convert ls FILE | head`: silent, exit status 0."""
    reading, writing = os.pipe()
    os.close(reading)
    result = program(tmp_path, *argv, stdout=writing)
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("argv", PRINTING, ids=" ".join)
def test_results_that_cannot_be_written_are_an_error(tmp_path: Path, small: str, argv: list[str]) -> None:
    """`convert ls FILE > list` on a full disk: exit status 5 and a sentence."""
    with open("/dev/full", "w") as full:
        result = program(tmp_path, *argv, stdout=full)
    assert (result.returncode, result.stderr) == (5, "the output cannot be written: No space left on device\n")
