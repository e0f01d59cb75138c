"""`convert diff` on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import convert
from tests.comparing import Array, write
from tests.oracle import save_with_reference

# --- the command line --------------------------------------------------------------------------------------------


def program(*argv: object, columns: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run `convert diff`."""
    env = (
        {**os.environ, "COLUMNS": str(columns)} if columns else {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    )
    command = [sys.executable, "-m", "convert", "diff", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two files with differences of every kind, names that are long or odd among them."""
    a: dict[str, Array] = {
        "layer.0.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "a-rather-long-name." * 6: np.zeros(2),
        "odd \x1b[31m": np.zeros(3), "kept": np.ones(4), "gone": np.ones(5), "old": np.arange(6),
        "bent": np.ones((2, 3)), "cast": np.ones(3, np.float32), "nan": np.array([np.nan, 1]),
    }  # fmt: skip
    b = {name: array.copy() for name, array in a.items() if name not in ("gone", "old", "bent", "cast")}
    b |= {"new": a["old"], "bent": np.ones((3, 2)), "cast": np.ones(3, np.float64), "added": np.zeros(9, bool)}
    b["layer.0.weight"][1, 2] += 0.5
    b["a-rather-long-name." * 6][1] = -0.0
    b["odd \x1b[31m"][0] = 1
    b["nan"][0] = 3
    return write(tmp_path / "a.npz", a), write(tmp_path / "b.safetensors", b)


def test_the_same_is_one_line(two: tuple[Path, Path]) -> None:
    """And status 0."""
    done = program(two[0], two[0])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "same: 9 tensors, 284 B\n"
    quiet = program(two[0], two[0], "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


def test_differences_are_a_table(two: tuple[Path, Path]) -> None:
    """A line or two each, and a summary; status 6."""
    done = program(*two)
    assert (done.returncode, done.stderr) == (6, "")
    text = done.stdout
    assert "layer.0.weight" in text
    assert "max abs 0.5  max rel 0.07692  ULPs 1048576  first at [1, 2]: 6.0 | 6.5" in text
    for words in ("only in A: float64 5", "only in B: bool 9", "name, 'new' in B", "shape 2x3 | 3x2",
                  "dtype float32 | float64", "bits, not values", "NaN on one side 1"):  # fmt: skip
        assert words in text, words
    assert "\x1b" not in text
    assert text.endswith("different: 6 not equal, 1 only in A, 1 only in B, 1 renamed, 1 identical\n")
    quiet = program(*two, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (6, "", "")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_table_fits_the_terminal(two: tuple[Path, Path], columns: int) -> None:
    """No line of it is wider."""
    lines = program(*two, columns=columns).stdout.splitlines()[2:-1]
    assert len(lines) > 10
    assert max(map(len, lines)) <= columns


def test_json_has_everything(two: tuple[Path, Path]) -> None:
    """One object, with numbers that JSON has."""
    done = program(*two, "--json")
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert done.returncode == 6
    assert found["same"] is False
    assert len(found["differences"]) == 9
    weight = found["differences"][0]
    assert weight["first"] == {"index": [1, 2], "a": "6.0", "b": "6.5"}
    assert (weight["bits"], weight["count"], weight["max_abs_error"]) == (1, 12, 0.5)
    assert json.loads(program(two[0], two[0], "--json").stdout)["same"] is True


def test_tolerances_on_the_command_line(two: tuple[Path, Path]) -> None:
    """What they forgive is said in the summary."""
    done = program(*two, "--include", "layer*", "--rtol", "0.1")
    assert done.returncode == 0
    assert done.stdout == "same: 1 tensor, 48 B, 1 of them not bit for bit (max abs 0.5, max rel 0.07692)\n"
    done = program(*two, "--include", "cast", "--ignore-dtype")
    assert done.returncode == 0


def test_options_reach_the_library(two: tuple[Path, Path]) -> None:
    """--rename, --exclude, --policy, --metadata, --jobs."""
    done = program(*two, "--include", "new", "--rename", "^old$=new", "--jobs", "1")
    assert (done.returncode, done.stdout) == (0, "same: 1 tensor, 48 B\n")
    other = two[0].with_name("c.safetensors")
    save_with_reference(other, {"kept": np.ones(4)}, {"format": "pt"})
    done = program(two[0], other, "--include", "kept")
    assert done.returncode == 0
    assert "metadata 'format': none in A, 'pt' in B (does not count without --metadata)\n" in done.stdout
    done = program(two[0], other, "--include", "kept", "--metadata", "--exclude", "nothing", "--policy", "strict")
    assert done.returncode == 6
    assert "note: --exclude nothing matched nothing\n" in done.stderr


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["missing.npz", "missing.npz"], 3, "cannot be read"),
        (["--rtol", "x"], 2, "--rtol takes a number, 1e-5 for one (found 'x')"),
        (["--atol", "-1"], 2, "atol must be a number from 0 up (found -1.0)"),
        (["--policy", "V2=no"], 2, "unknown action 'no'"),
        (["--rename", "x"], 2, "--rename takes REGEX=REPLACEMENT"),
        (["--jobs", "0"], 2, "jobs must be from 1"),
        (["--policy", "longdouble=what"], 2, "unknown action"),
    ],
)
def test_refusals_have_their_status(two: tuple[Path, Path], argv: list[str], status: int, words: str) -> None:
    """One message on stderr, or as JSON."""
    arguments = argv if argv[0][0] != "-" else [*two, *argv]
    done = program(*arguments)
    assert done.returncode == status
    assert words in done.stderr
    assert done.stdout == ""
    shown = json.loads(program(*arguments, "--json").stdout)
    assert shown["error"]["exit_status"] == status


def test_one_file_is_too_few(two: tuple[Path, Path]) -> None:
    """What is missing is named."""
    done = program(two[0])
    assert done.returncode == 2
    assert "Missing argument 'B'" in done.stderr


def test_a_comparison_of_equal_files_loads_no_numpy(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Bytes are compared without it."""
    code = (
        "import sys\nfrom convert.cli.main import run\nstatus = run(sys.argv[1:])\n"
        "assert 'numpy' not in sys.modules and 'rich' not in sys.modules\nsys.exit(status)"
    )
    command = [sys.executable, "-c", code, "diff", str(two[0]), str(two[0])]
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 0


def test_progress_counts_up_to_its_total(two: tuple[Path, Path]) -> None:
    """Candidates for a rename are read too; raising in it cancels."""
    calls: list[tuple[int, int, str]] = []
    convert.diff(*two, progress=lambda done, total, name: calls.append((done, total, name)))
    assert calls[-1][0] == calls[-1][1] > 0

    def cancel(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert.diff(*two, progress=cancel)
