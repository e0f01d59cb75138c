"""Completion in bash, zsh and fish: options, policies, dtypes, names of tensors; by the shells that are installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from convert.cli.complete import _joined
from convert.policy import actions_of

SCRIPT = f"#!{sys.executable}\nfrom convert.cli.main import main\nmain()\n"
NAMES = ["enc.0.weight", "enc.0.bias", "dec.weight"]
HOSTILE = "enc.$(touch owned)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A command `convert`, and a file whose names are asked for; one of them is a trap."""
    command = tmp_path / "bin" / "convert"
    command.parent.mkdir()
    command.write_text(SCRIPT)
    command.chmod(0o755)
    arrays = dict.fromkeys([*NAMES, HOSTILE, "enc.`touch owned`", "enc.\\$(touch owned)"], np.zeros(2))
    np.savez(tmp_path / "in.npz", **arrays)  # type: ignore[arg-type]
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    return tmp_path


def run(folder: Path, argv: list[str], text: str = "", **more: str) -> str:
    """What a command says."""
    env = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "TERM": "dumb",
           "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", **more}  # fmt: skip
    result = subprocess.run(argv, input=text, capture_output=True, text=True, env=env, cwd=folder, check=False)
    assert "Traceback" not in result.stderr, result.stderr
    return result.stdout


CASES = [
    ("convert in.npz out.npz --ali", ["--align"]),
    ("convert in.npz out.npz --policy complex128=p", ["complex128=pair"]),
    ("convert in.npz out.npz --policy=complex128=p", ["complex128=pair"]),
    ("convert in.npz out.npz --policy subbyte=", [f"subbyte={action}" for action in actions_of("subbyte")]),
    ("convert in.npz out.npz --policy opt:str=u", ["opt:str=uint32"]),
    ("convert in.npz out.npz --policy loss", ["lossless", "lossy"]),
    ("convert in.npz out.npz --cast float32=bf", ["float32=bfloat16"]),
    ("convert in.npz out.npz --cast bf", ["bfloat16="]),
    ("convert in.npz out.npz --to np", ["npy", "npz"]),
    ("convert in.npz out.npz --include enc.", ["enc.0.weight", "enc.0.bias"]),
    ("convert in.npz out.npz --policy str=skip --exclude dec", ["dec.weight"]),
    ("convert ls in.npz --include d", ["dec.weight"]),
    ("convert diff in.npz x.npz --exclude enc.0.b", ["enc.0.bias"]),
    ("convert broken.npz out.npz --include e", []),
    ("convert absent.npz out.npz --include e", []),
    ("convert https://127.0.0.1:9/in.npz out.npz --include e", []),
    ("convert check --explain NPZ-00", [f"NPZ-00{number}" for number in range(1, 10)]),
    ("convert pol", ["policies"]),
    ("convert policies --policy V2=u", ["V2=uint16"]),
]
IDS = [line for line, _ in CASES]


def broken_by_bash(line: str) -> list[str]:
    """Words as readline hands them to bash: white space ends one, and `=` and `:` are words of their own."""
    return [part for word in line.split(" ") for part in re.findall(r"[=:]+|[^=:]+", word) or [""]]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("line", "found"), CASES, ids=IDS)
def test_bash(folder: Path, line: str, found: list[str]) -> None:
    """The script that is installed, called as bash calls it; what is inserted after the last `=` or `:`."""
    words = broken_by_bash(line)
    quoted = " ".join(f"'{word}'" for word in words)
    script = (
        'eval "$(convert --show-completion bash)"\n'
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _convert_completion convert\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    answer = run(folder, ["bash", "--norc"], script).split()
    value = found[0] if found else ""
    there = 1 + max(line.rsplit(" ", 1)[-1].removeprefix("--policy=").rfind(mark) for mark in "=:")
    assert answer == [word[there:] for word in found], value
    assert not (folder / "owned").exists()


@pytest.mark.parametrize(("line", "found"), CASES, ids=IDS)
def test_fish_by_its_protocol(folder: Path, line: str, found: list[str]) -> None:
    """A line for each."""
    env = {"_CONVERT_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    answer = run(folder, ["convert"], **env, _TYPER_COMPLETE_ARGS=line)
    assert [row.split("\t")[0] for row in answer.splitlines() if row] == found


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(("line", "found"), CASES, ids=IDS)
def test_fish(folder: Path, line: str, found: list[str]) -> None:
    """Asked what it would offer."""
    script = f"convert --show-completion fish | source\ncomplete -C '{line}'\n"
    answer = [row.split("\t")[0] for row in run(folder, ["fish", "--no-config"], script).splitlines()]
    if found and "--policy=" not in line:  # there fish wants the whole word, and gets its end
        assert sorted(answer) == sorted(found)
    assert found or not set(answer) & set(NAMES)
    assert not (folder / "owned").exists()


@pytest.mark.parametrize(("line", "found"), CASES, ids=IDS)
def test_zsh_by_its_protocol(folder: Path, line: str, found: list[str]) -> None:
    """A call of _arguments with all that may follow, colons escaped; or one that offers files."""
    answer = run(folder, ["convert"], _CONVERT_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line)
    offered = re.findall(r'^(?:_arguments \'\*: :\(\()?"([^"]+)"', answer, re.MULTILINE) if found else []
    assert [word.replace("\\\\:", ":") for word in offered] == found
    assert found or answer.strip() == "_files"


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_what_zsh_evaluates_is_harmless(folder: Path) -> None:
    """Its script evaluates the answer, and _arguments once more: no name of a file's may be more than a word."""
    line = "convert in.npz out.npz --include enc"
    program = (
        '_arguments() { local -a ws; eval "ws=( ${${1##*\\(\\(}%%\\)\\)*} )"; print -rl -- $ws }\n'
        f"eval $(env _TYPER_COMPLETE_ARGS='{line}' _CONVERT_COMPLETE=complete_zsh convert) 2>/dev/null; echo done\n"
    )
    assert run(folder, ["zsh", "-f"], program).split() == ["enc.0.weight", "enc.0.bias", "done"]
    assert not (folder / "owned").exists()


def test_only_harmless_names_are_offered(folder: Path) -> None:
    """A shell may run what it is offered."""
    env = {"_CONVERT_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    answer = run(folder, ["convert"], **env, _TYPER_COMPLETE_ARGS="convert in.npz o.npz --include ")
    assert answer.split() == NAMES


def test_the_words_bash_broke_are_put_together() -> None:
    """Wherever the cursor stands."""
    assert _joined(["convert", "a", "--policy", "x", "=", "p"], 5) == (["convert", "a", "--policy", "x=p"], 3)
    assert _joined(["convert", "--policy", "g", ":", "x", "="], 5) == (["convert", "--policy", "g:x="], 2)
    assert _joined(["convert", "--policy", "=", "x", "=", "p", "--later"], 5) == (["convert", "--policy=x=p"], 1)
    assert _joined(["convert", "a=b", ""], 2) == (["convert", "a=b", ""], 2)
    assert _joined(["convert", "x", "=", "", "y"], 3) == (["convert", "x=", ""], 2)
    assert _joined(["convert"], 0) == (["convert"], 0)
