"""Help that helps: examples that work, words for slips, any width of terminal, pipes, no colours where unwanted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import convert
from convert.cli.job import COMMANDS
from convert.cli.main import EXAMPLES

COMMAND = [sys.executable, "-m", "convert"]
ALL = [[], *([name] for name in COMMANDS)]
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def program(folder: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, its output in pipes."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return subprocess.run(
        [*COMMAND, *argv], capture_output=True, text=True, encoding="utf-8", check=False, cwd=folder,
        env={**kept, "PYTHONUTF8": "1", **env},
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the examples speak of."""
    rng = np.random.default_rng(1)
    arrays = {"w1": rng.normal(size=(4, 3)).astype("f4"), "w2": np.arange(6.0), "b": np.zeros(3, "i2")}
    np.savez(tmp_path / "in.npz", **arrays)  # type: ignore[arg-type]
    convert.save(arrays, tmp_path / "in.safetensors")
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", arrays["b"])
    (tmp_path / "src").mkdir()
    np.savez(tmp_path / "src" / "model.npz", **arrays)  # type: ignore[arg-type]
    return tmp_path


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_shown_and_work(folder: Path, name: str) -> None:
    """Each line of the help's examples, in the order shown, as it would be typed."""
    shown = program(folder, *([] if name == "SOURCE" else [name]), "--help", COLUMNS="100").stdout
    for example in EXAMPLES[name]:
        assert example in shown
        word, *argv = shlex.split(example)
        assert word == "convert"
        result = program(folder, *argv)
        assert result.returncode == 0, (example, result.stderr)


def test_every_command_is_listed(folder: Path) -> None:
    """What the program has, what it suggests, and what its help shows are the same."""
    shown = program(folder, "--help", COLUMNS="100").stdout
    listed = re.findall(r"^│ ([a-z]+) ", shown.partition("Commands ─")[2], re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize("argv", ALL, ids=lambda argv: argv[0] if argv else "main")
def test_help_is_grouped_and_plain(folder: Path, argv: list[str]) -> None:
    """Options have panels; nobody has to know Python's types; the usage line can be typed."""
    shown = program(folder, *argv, "--help", COLUMNS="100").stdout
    assert not re.search(r"<(bool|str|int|list)", shown)
    usage = next(line for line in shown.splitlines() if "Usage:" in line)
    assert not set("{}") & set(usage)
    if argv and argv[0] not in ("formats", "policies", "check"):
        assert shown.count("╭─") >= 4


@pytest.mark.parametrize("columns", ["30", "80", "300"])
@pytest.mark.parametrize("argv", ALL, ids=lambda argv: argv[0] if argv else "main")
def test_help_fits_the_terminal(folder: Path, argv: list[str], columns: str) -> None:
    """No line is wider than the terminal, and every option stays whole on a one of 80."""
    result = program(folder, *argv, "--help", COLUMNS=columns)
    assert result.returncode == 0
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    if columns == "80":
        for option in re.findall(r"--[a-z-]+", program(folder, *argv, "--help", COLUMNS="300").stdout):
            assert option in result.stdout


@pytest.mark.parametrize("argv", [["--help"], ["policies"], ["formats"], ["ls", "in.npz"], ["in.npz", "x", "--no"]])
def test_a_pipe_gets_no_control_characters(folder: Path, argv: list[str]) -> None:
    """Neither colours nor cursor movements, on either stream."""
    result = program(folder, *argv)
    assert len(result.stdout + result.stderr) > 50
    assert "\x1b" not in result.stdout + result.stderr


def test_no_color_wins_over_force_color(folder: Path) -> None:
    """https://no-color.org: whoever forces colours somewhere else gets none here."""
    colours = re.compile(r"\x1b\[(?:\d+;)*[349][0-7]m")
    assert not colours.search(program(folder, "policies", NO_COLOR="1", FORCE_COLOR="1").stdout)


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["lss", "in.npz"], "did you mean convert ls?"),
        (["chek", "in.npz"], "did you mean convert check?"),
        (["polices"], "did you mean convert policies?"),
        (["bach", "src", "dst"], "did you mean convert batch?"),
        (["in.npz", "x.npz", "--byteorder", "litle"], "did you mean little?"),
        (["in.npz", "x.npz", "--order", "c"], "did you mean C?"),
        (["in.npz", "x.npz", "--order", "keepp"], "did you mean keep?"),
        (["in.npz", "x.npz", "--cast", "float32=float16", "--cast-overflow", "Inf"], "did you mean inf?"),
        (["in.npz", "x.safetensor"], "did you mean x.safetensors?"),
        (["in.npz", "x.npz", "--policy", "datetime64"], "--policy datetime64=int64"),
        (["in.npz", "x.npz", "--policy", "objekt"], "did you mean object?"),
        (["in.npz", "x.npz", "--verfy"], "--verify"),
        (["diff", "in.npz", "in.npz", "--ignore-dtypes"], "--ignore-dtype"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_slips_get_the_nearest_word(folder: Path, argv: list[str], hint: str) -> None:
    """Commands, options and their values."""
    result = program(folder, *argv)
    assert result.returncode in (2, 3)
    assert hint in result.stderr
    assert "x.npz" not in os.listdir(folder)


def test_a_missing_file_is_no_misspelt_command(folder: Path) -> None:
    """A name with a suffix is that of a file; and what is there is what was meant."""
    assert "did you mean" not in program(folder, "check.npz", "x.npz").stderr
    (folder / "lss").write_bytes(b"no tensor")
    assert "did you mean" not in program(folder, "lss", "x.npz").stderr
