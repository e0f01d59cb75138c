"""The program as people and scripts use it: exit status, streams, options, and what help and tables show."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import convert
from convert.policy import KINDS, PRESETS, actions_of
from convert.version import __version__
from tests import oracle
from tests.cli.running import ANSI, POSIX, SCRIPTS, driver, program
from tests.program import Call

# --- exit status and streams -------------------------------------------------------------------------------------


def test_done_is_0_and_the_summary_goes_to_stderr(call: Call, small: str) -> None:
    """A conversion has no result to print: stdout stays empty."""
    outcome = call(small, "out.safetensors")
    assert (outcome.status, outcome.out) == (0, "")
    assert re.fullmatch(r"out\.safetensors: 2 tensors, 56 B in \d+ B, \d+\.\d\d s\n", outcome.err)
    assert set(oracle.read_safetensors("out.safetensors")[1]) == {"w", "b"}


@pytest.mark.parametrize(
    ("status", "argv", "words"),
    [
        (2, ["in.npz"], "a source and a target are needed"),
        (2, ["in.npz", "out.foo"], "does not tell the format"),
        (2, ["in.npz", "out.npz", "--jobs", "many"], "--jobs"),
        (2, ["in.npz", "out.npz", "--nonsense"], "--nonsense"),
        (2, ["ls"], "Missing argument"),
        (3, ["missing.npz", "out.npz"], "missing.npz: cannot be read"),
        (3, ["empty.npz", "out.npz"], "empty.npz: the file is empty"),
        (3, ["ls", "empty.npz", "in.npz"], "empty.npz: the file is empty"),
        (4, ["complex.npz", "out.safetensors"], "complex.npz: tensor 'c': complex128 cannot be held exactly"),
        (5, ["in.npz", "there.npz"], "there.npz: the target exists already"),
        (5, ["in.npz", "missing/out.npz"], "missing/out.npz: cannot be written"),
    ],
)
def test_refusals_have_their_exit_status_and_go_to_stderr(
    call: Call, small: str, status: int, argv: list[str], words: str
) -> None:
    """2 usage, 3 input, 4 policy, 5 output; nothing on stdout but tables that were asked for."""
    Path("empty.npz").write_bytes(b"")
    Path("there.npz").write_bytes(b"")
    np.savez("complex.npz", c=np.zeros(1, complex))
    outcome = call(*argv)
    assert outcome.status == status
    assert words in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == "" or argv[0] == "ls"


@pytest.mark.parametrize("argv", [["missing.npz", "out.npz"], ["complex.npz", "out.safetensors"], ["in.npz"]])
def test_the_exit_status_reaches_the_shell(call: Call, small: str, argv: list[str], tmp_path: Path) -> None:
    """The same in a real process as in this one."""
    np.savez("complex.npz", c=np.zeros(1, complex))
    outcome = call(*argv)
    result = program(tmp_path, *argv)
    assert (result.returncode, result.stdout, result.stderr) == outcome


def test_a_bug_is_1_with_a_traceback(tmp_path: Path, small: str) -> None:
    """What nobody foresaw is shown whole, so that it can be reported."""
    code = "import convert.api\ndef broken(*_, **__): raise ZeroDivisionError('bug')\nconvert.api.convert_file = broken"
    result = program(tmp_path, small, "out.npz", command=driver(code))
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError: bug" in result.stderr


def test_an_interrupt_is_130(call: Call, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, no traceback."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.api.convert_file", interrupted)
    assert call(small, "out.npz") == (130, "", "interrupted; nothing was written\n")


@pytest.mark.parametrize(
    "command", [[sys.executable, "-m", "convert"], [str(SCRIPTS / "convert")], [str(SCRIPTS / "tensor-convert")]]
)
def test_one_program_under_three_names(tmp_path: Path, small: str, command: list[str]) -> None:
    """ImageMagick and Windows have a `convert` too; all three ways lead to the same program."""
    if shutil.which(command[0]) is None:
        pytest.skip("the scripts are not installed")
    assert program(tmp_path, "--version", command=command).stdout == f"convert {__version__}\n"
    result = program(tmp_path, small, "out.safetensors", "--json", command=command)
    assert (result.returncode, json.loads(result.stdout)["target"]) == (0, "out.safetensors")
    assert program(tmp_path, "missing", "out.npz", command=command).returncode == 3


# --- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["ls", "--help"], ["formats", "-h"], ["policies", "--help"]])
def test_help_is_a_result(call: Call, argv: list[str]) -> None:
    """On stdout, with exit status 0 when it was asked for; no command at all shows it too."""
    outcome = call(*argv)
    assert outcome.status == (0 if argv else 2)
    text = ANSI.sub("", outcome.out + outcome.err)
    assert "Usage: convert" in text
    assert "SOURCE" in text or len(argv) == 2


def test_help_of_the_main_job_shows_every_option(call: Call) -> None:
    """The hidden command's options are those people need most."""
    text = ANSI.sub("", call("--help").out)
    for option in (
        "from", "to", "compress", "byteorder", "order", "align", "include", "exclude", "rename", "cast", "policy",
        "cast-overflow", "metadata", "overwrite", "verify", "fsync", "dry-run", "jobs", "json", "quiet", "no-progress",
        "version",
    ):  # fmt: skip
        assert f"--{option} " in text, option
    assert not re.search(r"^│ SOURCE ", text, re.MULTILINE)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    ("given", "level"), [(["--compress"], 6), (["--compress", "9"], 9), (["--compress=9"], 9), (["--compress", "1"], 1)]
)
def test_compress_takes_a_level_or_none_in_any_place(
    call: Call, small: str, monkeypatch: pytest.MonkeyPatch, position: int, given: list[str], level: int
) -> None:
    """Before, between and after the paths; a path that follows is not taken for a level."""
    levels: list[object] = []

    def noted(*_: object, compress: object, **__: object) -> None:
        levels.append(compress)
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.api.convert_file", noted)
    argv = [small, "out.npz"]
    argv[position:position] = given
    assert call(*argv).status == 130
    assert levels == [level]


@pytest.mark.parametrize("level", ["0", "10", "-1"])
def test_compress_refuses_other_levels(call: Call, small: str, level: str) -> None:
    """0 is no compression, which is the default without the option; it does not mean the default level."""
    outcome = call(small, "out.npz", f"--compress={level}")
    assert outcome.status == 2
    assert f"from 1 to 9 (found {level})" in outcome.err


def test_two_dashes_end_the_options(call: Call) -> None:
    """A file named like an option can be given, and one named like the level of --compress."""
    np.savez("--json.npz", w=np.zeros(1))
    assert call("--", "--json.npz", "--out.npz").status == 0
    assert call("--quiet", "--", "--json.npz", "--compress.npz") == (0, "", "")
    assert Path("--out.npz").exists()
    assert Path("--compress.npz").exists()


@pytest.mark.parametrize("name", ["ls", "formats", "policies", "SOURCE"])
def test_a_file_named_like_a_command(call: Call, small: str, name: str) -> None:
    """`./ls` is a file; so is a path that is no command at all."""
    shutil.copy(small, name)
    assert call(f"./{name}", "out.npz").status == 0
    shutil.copy(small, "out")
    assert call("out", "second.npz").status == 0


def test_quiet_says_nothing_but_errors(call: Call, small: str) -> None:
    """Nothing at all when it worked; the whole message when it did not."""
    assert call(small, "out.npz", "--quiet", "--exclude", "nothing") == (0, "", "")
    outcome = call(small, "out.npz", "--quiet")
    assert outcome.status == 5
    assert "hint: --overwrite" in outcome.err


def test_quiet_still_prints_what_was_asked_for(call: Call, small: str) -> None:
    """A plan and a report are results."""
    assert "'w'  float32  2x3  24 B" in call(small, "out.npz", "--quiet", "--dry-run").out
    outcome = call(small, "out.npz", "--quiet", "--json")
    assert json.loads(outcome.out)["tensors"][0]["name"] == "w"
    assert outcome.err == ""


def test_json_tells_what_was_done(call: Call, small: str) -> None:
    """One line of JSON, for programs; people's words still go to stderr."""
    outcome = call(small, "out.safetensors", "--json", "--cast", "float32=bfloat16", "--exclude", "b", "--verify")
    report = json.loads(outcome.out)
    assert outcome.out.count("\n") == 1
    assert report["sources"] == [small]
    assert report["source_formats"] == ["npz"]
    assert report["verified"] is True
    assert [(row["name"], row["dtype"], row["shape"]) for row in report["tensors"]] == [("w", "bfloat16", [2, 3])]
    assert len(report["tensors"][0]["sha256"]) == 64
    assert report["changes"][0]["how"] == "cast to bfloat16"
    assert report["skipped"][0]["name"] == "b"
    assert report["target_bytes"] == Path("out.safetensors").stat().st_size
    assert "verified" in outcome.err


def test_json_tells_what_was_refused(call: Call) -> None:
    """All problems, each with path, tensor and hint, and the exit status; the same on stderr in words."""
    np.savez("in.npz", a=np.zeros(1, complex), b=np.array(["x"]))
    outcome = call("in.npz", "out.safetensors", "--json")
    error = json.loads(outcome.out)["error"]
    assert (outcome.status, error["exit_status"]) == (4, 4)
    assert [(row["kind"], row["path"], row["tensor"]) for row in error["problems"]] == [
        ("PolicyError", "in.npz", "a"),
        ("PolicyError", "in.npz", "b"),
    ]
    for row in error["problems"]:
        assert row["message"] in outcome.err
        assert f"hint: {row['hint']}\n" in outcome.err


def test_a_dry_run_prints_the_plan_and_writes_nothing(call: Call) -> None:
    """One line a tensor on stdout, what changes and what is left out with it."""
    np.savez("in.npz", a=np.zeros((2, 3), complex), s=np.array(1.5), x=np.zeros(1))
    outcome = call("in.npz", "out.safetensors", "--dry-run", "--policy", "complex128=pair", "--exclude", "x")
    assert outcome.out.splitlines() == [
        "'a'  float64  2x3x2  96 B  (complex128: policy complex128=pair)",
        "'s'  float64  scalar  8 B",
        "'x'  left out (not included, or excluded)",
    ]
    assert outcome.err.splitlines()[-1] == "would write out.safetensors: 2 tensors, 104 B"
    assert os.listdir() == ["in.npz"]


def test_long_reports_are_cut_on_stderr_only(call: Call) -> None:
    """A hundred changed tensors do not scroll the screen away; --json has them all."""
    np.savez("in.npz", **{f"t{index}": np.zeros(1, np.float32) for index in range(100)})  # type: ignore[arg-type]
    outcome = call("in.npz", "out.npz", "--cast", "float32=float16", "--json")
    assert len(json.loads(outcome.out)["changes"]) == 100
    assert len(outcome.err.splitlines()) < 30
    assert "80 more tensors changed; --json lists them all" in outcome.err


@pytest.mark.parametrize(
    ("argv", "suggestion"),
    [
        (["--overwrit"], "--overwrite"),
        (["--polcy", "V2=uint16"], "--policy"),
        (["--to", "safetensor"], "did you mean safetensors?"),
        (["--to", "NPZ"], "did you mean npz?"),
        (["--from", ".npz"], "did you mean npz?"),
        (["--policy", "V2=unit16"], "did you mean uint16?"),
        (["--policy", "objct=skip"], "did you mean object?"),
        (["--policy", "losless"], "did you mean lossless?"),
        (["--cast", "float32=bf16"], "did you mean bfloat16?"),
        (["--cast", "floot32=float16"], "did you mean float32?"),
    ],
)
def test_slips_are_met_with_the_right_word(call: Call, small: str, argv: list[str], suggestion: str) -> None:
    """Unknown options, formats, policies and dtypes: the nearest there is."""
    outcome = call(small, "out.npz", *argv)
    assert outcome.status == 2
    assert suggestion in outcome.err
    assert os.listdir() == [small]


@pytest.mark.parametrize(
    ("argv", "form"),
    [
        (["--rename", "a"], "--rename takes REGEX=REPLACEMENT (found 'a')"),
        (["--rename", "=a"], "--rename takes REGEX=REPLACEMENT (found '=a')"),
        (["--metadata", "format"], "--metadata takes KEY=VALUE (found 'format')"),
        (["--cast", "float16"], "--cast takes FROM=TO (found 'float16')"),
        (["--rename", "(=x"], "invalid rename"),
    ],
)
def test_pairs_tell_their_form(call: Call, small: str, argv: list[str], form: str) -> None:
    """What is missing an equals sign is told what it should look like."""
    outcome = call(small, "out.npz", *argv)
    assert outcome.status == 2
    assert form in outcome.err


def test_every_option_reaches_the_library(call: Call) -> None:
    """One run with all that can go together."""
    np.savez("in.npz", **{"opt/a": np.zeros(1), "m.w": np.asfortranarray(np.ones((3, 2), np.float32))})  # type: ignore[arg-type]
    outcome = call(
        "in.npz", "out", "--to", "npz", "--from", "npz", "--byteorder", "big", "--order", "keep", "--align", "64",
        "--include", "m.*", "--include", "opt/*", "--exclude", "opt/*", "--rename", "^m\\.=",
        "--cast", "m.*:float32=float64", "--cast-overflow", "inf",
        "--metadata", "a=b=c", "--policy", "lossy", "--policy", "x:V2=skip", "--verify",
        "--fsync", "--jobs", "2", "--no-progress", "--json", "--overwrite",
    )  # fmt: skip
    assert outcome.status == 0, outcome.err
    with np.load("out") as archive:
        assert archive.files == ["w"]
        assert archive["w"].dtype == np.dtype(">f8")
        assert archive["w"].flags.f_contiguous
    assert json.loads(outcome.out)["metadata"] == {"a": "b=c"}


def test_several_sources_go_into_one_target(call: Call) -> None:
    """All but the last path are sources."""
    for name in ("a", "b"):
        np.save(f"{name}.npy", np.zeros(2))
    assert call("a.npy", "b.npy", "all.safetensors").status == 0
    assert set(oracle.read_safetensors("all.safetensors")[1]) == {"a", "b"}


# --- tables ------------------------------------------------------------------------------------------------------


def test_ls_shows_what_is_in_a_file(call: Call) -> None:
    """Names, types, shapes, sizes, order and metadata."""
    np.savez("in.npz", w=np.asfortranarray(np.zeros((2, 3), ">f4")), s=np.array(1), date=np.zeros(2, "M8[s]"))
    outcome = call("ls", "in.npz")
    assert outcome.status == 0
    assert outcome.err == ""
    rows = [line.split() for line in outcome.out.splitlines()]
    assert ["w", "float32", "2", "x", "3", "24", "B", "Fortran,", "big-endian"] in rows
    assert ["s", "int64", "scalar", "8", "B"] in rows
    assert ["date", "datetime64[s]", "2", "16", "B"] in rows
    assert "npz, 3 tensors, 48 B" in outcome.out


def test_ls_shows_metadata_and_what_tensors_were(call: Call) -> None:
    """Free text, and what the toolkit remembers for the way back."""
    np.savez("in.npz", z=np.zeros(2, complex))
    call("in.npz", "out.safetensors", "--policy", "complex128=pair", "--metadata", "note=hi\x1b[1m", "--quiet")
    outcome = call("ls", "out.safetensors")
    assert "was complex128" in outcome.out
    assert "metadata note: hi\\x1b[1m" in outcome.out
    found = json.loads(call("ls", "out.safetensors", "--json").out)
    assert found["metadata"] == {"note": "hi\x1b[1m"}
    assert found["tensors"][0]["was"] == {"dtype": "complex128", "shape": [2]}


def test_ls_json_is_a_line_for_each_file(call: Call, small: str) -> None:
    """Files that cannot be read have a line too, and the exit status says so."""
    np.savez("empty.npz")
    outcome = call("ls", small, "missing.npz", "empty.npz", "--json")
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    assert outcome.status == 3
    assert [line["path"] for line in lines] == [small, "missing.npz", "empty.npz"]
    assert [tensor["name"] for tensor in lines[0]["tensors"]] == ["w", "b"]
    assert lines[1]["error"]["problems"][0]["kind"] == "InputError"
    assert lines[2]["tensors"] == []


HOSTILE = {"bell\x07": 1, "red\x1b[31m": 2, "\u202eevil": 3, "new\nline": 4, "[red]markup[/red]": 5, "\u2028": 6}


@pytest.mark.parametrize("argv", [["ls", "in.safetensors"], ["in.safetensors", "out.npz", "--dry-run"]])
def test_hostile_names_do_not_reach_the_terminal(call: Call, argv: list[str]) -> None:
    """Control characters, reversed text and markup in names and messages are shown, not obeyed."""
    arrays = {name: np.zeros(size, np.uint8) for name, size in HOSTILE.items()}
    oracle.save_with_reference("in.safetensors", arrays, {"k\x1b[1m": "v\u202e"})
    outcome = call(*argv)
    text = outcome.out + outcome.err
    assert outcome.status == 0
    assert all(character.isprintable() or character == "\n" for character in text)
    for shown in ("bell\\x07", "red\\x1b[31m", "\\u202eevil", "new\\nline", "[red]markup[/red]", "\\u2028"):
        assert shown in text


def test_hostile_names_in_messages(call: Call) -> None:
    """A refusal quotes names and paths the same way."""
    np.savez("in\x1b[1m.npz", **{"a\x1b[31m\u202e": np.zeros(1, complex)})  # type: ignore[arg-type]
    outcome = call("in\x1b[1m.npz", "out.safetensors")
    assert outcome.status == 4
    assert all(character.isprintable() or character == "\n" for character in outcome.err)
    assert "in\\x1b[1m.npz: tensor 'a\\x1b[31m\\u202e'" in outcome.err


@pytest.mark.skipif(not POSIX, reason="file names of any bytes")
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_any_name_can_be_printed(tmp_path: Path, encoding: str) -> None:
    """A path that is no UTF-8, a tensor's name that the terminal's encoding lacks: JSON stays JSON."""
    source = os.fsdecode(b"\xff.npz")
    np.savez(tmp_path / source, größe=np.zeros(1))
    env = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"}
    for argv in ([source, "out.safetensors", "--json"], ["ls", source, "--json"]):
        result = program(tmp_path, *argv, env=env)
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        assert found["tensors"][0]["name"] == "größe"
        assert source in (found.get("path"), *found.get("sources", []))
    result = program(tmp_path, "ls", source, env=env)
    assert result.returncode == 0
    assert ("größe" if encoding == "utf-8" else r"gr\xf6\xdfe") in result.stdout
    assert program(tmp_path, source, "out.safetensors", env=env).stderr.startswith("out.safetensors: the target exists")


def test_formats_lists_the_table(call: Call) -> None:
    """Names, suffixes, and what can be done."""
    rows = [line.split()[:4] for line in call("formats").out.splitlines()]
    for name in ("npy", "npz", "safetensors"):
        assert [name, f".{name}", "read", "write"] in rows
    found = json.loads(call("formats", "--json").out)
    assert [(row["name"], row["read"], row["write"]) for row in found][:3] == [
        ("npy", True, True),
        ("npz", True, True),
        ("safetensors", True, True),
    ]


def test_policies_lists_every_kind_and_action(call: Call) -> None:
    """All rows of the table, the default marked, the presets below."""
    text = call("policies").out
    rows = [line.split() for line in text.splitlines()]
    for kind in KINDS:
        for index, action in enumerate(kind.actions):
            row = [kind.name, action, "(default)"] if index == 0 else [action]
            assert any(found[: len(row)] == row for found in rows), (kind.name, action)
    assert "skip works for every kind" in text
    assert all(f"--policy {name}: " in text for name in PRESETS)
    found = json.loads(call("policies", "--json").out)
    assert [row["kind"] for row in found["kinds"]] == [kind.name for kind in KINDS]
    assert found["presets"] == PRESETS


# --- completion --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shell", "words"),
    [("bash", "complete -o default"), ("zsh", "#compdef convert"), ("fish", "complete --command convert")],
)
def test_completion_scripts_are_shown(tmp_path: Path, shell: str, words: str) -> None:
    """For each common shell; Typer guesses the shell unless it is told not to."""
    env = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    result = program(tmp_path, "--show-completion", shell, env=env, command=driver())
    assert (result.returncode, result.stderr) == (0, "")
    assert words in result.stdout
    assert "_CONVERT_COMPLETE" in result.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("convert in.npz out.npz --ali", ["--align"]),
        ("convert in.npz out.npz --policy complex128=p", ["pair"]),  # bash takes what follows its last break
        ("convert in.npz out.npz --policy subbyte=", actions_of("subbyte")),
        ("convert in.npz out.npz --policy loss", ["lossless", "lossy"]),
        ("convert in.npz out.npz --to np", ["npy", "npz"]),
        ("convert in.npz out.npz --byteorder b", ["big"]),
        ("convert pol", ["policies"]),
        ("convert ls --js", ["--json"]),
    ],
)
def test_completion_knows_options_and_their_values(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, found: list[str]
) -> None:
    """What the completion script asks for as one types, by bash's protocol."""
    monkeypatch.setenv("_CONVERT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COLUMNS", "80")  # which the program changes
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        call()
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == found


# --- hints: what is printed works when it is typed ---------------------------------------------------------------


def save(**arrays: Any) -> None:
    """The source of most hints."""
    np.savez("in.npz", **arrays)


def save_safetensors(**arrays: Any) -> None:
    """The source of those about npz and npy."""
    oracle.save_with_reference("in.safetensors", arrays, {"note": "x"})


def save_member(array: Any, comment: bytes = b"", blob: bytes | None = None) -> None:
    """An archive of one member, with a comment, and perhaps one that is no array."""
    buffer = BytesIO()
    np.lib.format.write_array(buffer, array)
    with zipfile.ZipFile("in.npz", "w") as archive:
        member = zipfile.ZipInfo("w.npy")
        member.comment = comment
        archive.writestr(member, buffer.getvalue())
        if blob is not None:
            archive.writestr("README.txt", blob)


def damage() -> None:
    """An archive whose first tensor has a wrong checksum."""
    save(w=np.full(100, 7.0), good=np.zeros(1))
    data = bytearray(Path("in.npz").read_bytes())
    data[500] ^= 1
    Path("in.npz").write_bytes(data)


def clean(array: Any) -> Any:
    """Long doubles with zeros where numpy leaves stray bytes."""
    array.view(np.uint8).reshape(-1, 16)[:, 10:] = 0
    return array


def widened() -> None:
    """A float32 that remembers to have been bfloat16, with a value that no bfloat16 has."""
    note = {"tensor-convert": {"dtype": "bfloat16", "encoding": "float32", "shape": [1]}}
    save_member(np.array([1.1], np.float32), json.dumps(note).encode())


def metadata_too_long() -> None:
    """More than fits into the comment of an archive."""
    convert.save({"w": np.zeros(1)}, "in.safetensors", metadata={"k": os.urandom(90_000).hex()})


def policies(kind: str, *actions: str) -> list[str]:
    """What the hint of a refused kind offers."""
    return [f"--policy {kind}={action}" for action in (*actions, "skip")]


def offers(text: str) -> list[str]:
    """All that a user could type in the hints of a message, in order."""
    found: list[str] = []
    for hint in re.findall(r"^hint: (.*)$", text, re.MULTILINE):
        names = re.search(r"the file has (.*)$", hint)
        if names:
            found += [name.strip("'") for name in names[1].split(", ")]
            continue
        for part in hint.split("; "):
            also = re.fullmatch(r"(\w+)=(.*?)(?: \.\.\.)? also work", part)
            if also:
                found += [f"--policy {also[1]}={action}" for action in also[2].split(", ")]
            found += re.findall(
                r"--(?:policy [\w=]+|cast-overflow inf|cast [\w=]+|overwrite|rename '[^']+'|rename REGEX=REPLACEMENT"
                r"|rename|include NAME|exclude)(?![\w-])",
                part,
            )
    return found


def plain() -> None:
    """A source without difficulties."""
    save(w=PLAIN)


def with_target() -> None:
    """A target that is there already."""
    plain()
    Path("out.npz").touch()


def with_folder() -> None:
    """A folder of a file that is there already."""
    plain()
    os.mkdir("out")
    np.save("out/a.npy", PLAIN)


class Refusal(NamedTuple):
    """A call that is refused, and what its hint offers.

    Attributes:
        make: Makes the source.
        argv: The call.
        offers: Every option and word in the hint that a user could type, in order; NAME and REGEX=REPLACEMENT stand for
            what the user knows.
        fill: What a user would put for the placeholders.
    """

    make: Callable[[], object]
    argv: str
    offers: list[str]
    fill: dict[str, str] = {}  # noqa: RUF012
    marks: tuple[pytest.MarkDecorator, ...] = ()


X87 = (
    pytest.mark.skipif(
        np.finfo(np.longdouble).nmant != 63 or np.dtype(np.longdouble).itemsize != 16, reason="no x87 long doubles"
    ),
)
PLAIN = np.zeros(2)
ST = "in.npz out.safetensors"
V1_OFFERS = ["bool", "uint8", "int8", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"]

REFUSALS: dict[str, Refusal] = {
    "V2": Refusal(lambda: save(w=np.zeros(2, "V2")), f"{ST} --policy V2=error", policies("V2", "bfloat16", "uint16")),
    "V1": Refusal(
        lambda: save(w=np.zeros(2, "V1")),
        ST,
        policies("V1", "uint8", *(name for name in V1_OFFERS if name != "uint8")),
    ),
    "void": Refusal(lambda: save(w=np.zeros(2, "V5")), ST, policies("void", "uint8")),
    "longdouble": Refusal(
        lambda: save(w=clean(np.ones(2, np.longdouble))),
        f"{ST} --policy longdouble=error",
        policies("longdouble", "exact", "round", "bytes"),
        marks=X87,
    ),
    "longdouble, inexact": Refusal(
        lambda: save(w=clean(np.ones(2, np.longdouble) / 3)),
        ST,
        ["--policy longdouble=round", "--policy longdouble=bytes"],
        marks=X87,
    ),
    "longdouble, too large": Refusal(
        lambda: save(w=clean(np.ldexp(np.ones(2, np.longdouble), [0, 2000]))),
        f"{ST} --policy longdouble=round",
        ["--cast-overflow inf", "--policy longdouble=bytes"],
        marks=X87,
    ),
    "complex128": Refusal(lambda: save(w=PLAIN + 1j), ST, policies("complex128", "pair", "complex64", "round")),
    "complex128, inexact": Refusal(
        lambda: save(w=np.array([0.1j])),
        f"{ST} --policy complex128=complex64",
        ["--policy complex128=pair", "--policy complex128=round"],
    ),
    "datetime64": Refusal(lambda: save(w=np.zeros(2, "M8[s]")), ST, policies("datetime64", "int64")),
    "timedelta64": Refusal(lambda: save(w=np.zeros(2, "m8[s]")), ST, policies("timedelta64", "int64")),
    "bytes": Refusal(lambda: save(w=np.array(b"ab")), ST, policies("bytes", "uint8", "metadata")),
    "bytes, an array": Refusal(
        lambda: save(w=np.array([b"ab"])), f"{ST} --policy bytes=metadata", ["--policy bytes=uint8"]
    ),
    "str": Refusal(lambda: save(w=np.array("ab")), ST, policies("str", "uint32", "metadata")),
    "str, an array": Refusal(lambda: save(w=np.array(["ab"])), f"{ST} --policy str=metadata", ["--policy str=uint32"]),
    "structured": Refusal(lambda: save(w=np.zeros(2, "i4,f4")), ST, policies("structured", "split")),
    "structured, in a subarray": Refusal(
        lambda: save(w=np.zeros(2, [("a", [("b", "i4")], (2,))])),
        f"{ST} --policy structured=split",
        ["--policy structured=skip"],
    ),
    "object": Refusal(lambda: save(w=np.array({"a": PLAIN}, object)), ST, policies("object", "unpickle")),
    "blob": Refusal(lambda: save_member(PLAIN, blob=b"x"), f"{ST} --policy blob=error", policies("blob", "uint8")),
    "subbyte": Refusal(
        lambda: save_safetensors(w=np.zeros(2, ml_dtypes.float4_e2m1fn)),
        "in.safetensors out.npz",
        policies("subbyte", "packed", "unpack", "float32"),
    ),
    "metadata to npy": Refusal(
        lambda: save_safetensors(w=PLAIN),
        "in.safetensors out.npy --policy metadata=error",
        ["--policy metadata=skip"],
    ),
    "metadata to npz": Refusal(metadata_too_long, "in.safetensors out.npz", ["--policy metadata=skip"]),
    "texts of a pickle to npy": Refusal(
        lambda: save(w=np.array({"a": PLAIN, "n": "x"}, object)),
        "in.npz out/ --policy object=unpickle",
        ["--policy metadata=skip"],
    ),
    "a cast that overflows": Refusal(
        lambda: save(w=PLAIN + 1e9), f"{ST} --cast float64=float16", ["--cast-overflow inf"]
    ),
    "a widened tensor that changed": Refusal(
        widened,
        ST,
        ["--cast float32=bfloat16"],
    ),
    "damage": Refusal(damage, ST, ["--exclude"], {"--exclude": "--exclude w"}),
    "an existing target": Refusal(with_target, "in.npz out.npz", ["--overwrite"]),
    "an existing folder": Refusal(with_folder, "in.npz out/", ["--overwrite"]),
    "a reserved name": Refusal(lambda: save(__metadata__=PLAIN), ST, ["--rename '^__metadata__$=metadata'"]),
    "NUL in a name": Refusal(
        lambda: save_safetensors(**{"a\0b": PLAIN}),
        "in.safetensors out.npz",
        ["--rename REGEX=REPLACEMENT"],
        {"--rename REGEX=REPLACEMENT": "--rename '\\x00=_'"},
    ),
    "a long name": Refusal(
        lambda: save_safetensors(**{"n" * 300: PLAIN}),
        "in.safetensors out/",
        ["--rename REGEX=REPLACEMENT"],
        {"--rename REGEX=REPLACEMENT": "--rename 'n+=n'"},
    ),
    "names that collide": Refusal(
        lambda: save(a=PLAIN, b=PLAIN),
        f"{ST} --rename '.=x'",
        ["--rename", "--exclude"],
        {"--rename": "--rename x=y --exclude b", "--exclude": "--exclude a"},
    ),
    "two tensors for one file": Refusal(
        lambda: save(a=PLAIN, b=PLAIN), "in.npz out.npy", ["--include NAME"], {"--include NAME": "--include a"}
    ),
    "an include that matches nothing": Refusal(
        lambda: save(model=PLAIN), f"{ST} --include mod", ["model"], {"model": "--include 'model'"}
    ),
}
"""One row for every refusal that an option helps against."""


@pytest.mark.parametrize(
    ("refusal", "offer"),
    [
        pytest.param(refusal, offer, id=f"{name}: {offer}", marks=refusal.marks)
        for name, refusal in REFUSALS.items()
        for offer in refusal.offers
    ],
)
def test_every_hint_works_when_it_is_typed(call: Call, refusal: Refusal, offer: str) -> None:
    """The refusal prints it, and the same call with it succeeds."""
    refusal.make()
    argv = shlex.split(refusal.argv)
    refused = call(*argv)
    assert refused.status in (2, 3, 4, 5)
    assert offers(refused.err) == refusal.offers
    option = shlex.split(refusal.fill.get(offer, offer))
    if refusal.argv.split()[-2:] == ["--include", "mod"]:
        argv = argv[:-2]
    done = call(*argv, *option)
    assert done.status == 0, done.err


def test_every_kind_that_refuses_by_default_has_its_row() -> None:
    """A new kind of refusal needs a row above."""
    assert {kind.name for kind in KINDS if "error" in kind.actions} - {"metadata"} <= REFUSALS.keys()


COMMANDS: dict[str, tuple[Callable[[], object], str, list[str]]] = {
    "one path": (plain, "in.npz", ["convert in.npz out.safetensors", "convert ls in.npz"]),
    "unknown kind": (plain, f"{ST} --policy x=y", ["convert policies"]),
    "unknown action": (plain, f"{ST} --policy str=int", ["convert policies"]),
    "unknown format": (plain, f"{ST} --to x", ["convert formats"]),
    "unknown content": (lambda: Path("x").write_bytes(b"abc"), "x out.npz", ["convert formats"]),
    "wrong content": (lambda: Path("in.npz").write_bytes(b"abc"), ST, ["convert formats"]),
    "another format": (lambda: Path("x").write_bytes(b"GGUF"), "x out.npz", ["convert formats"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_a_hint_exists(call: Call, name: str) -> None:
    """What is printed as a command is one."""
    make, argv, commands = COMMANDS[name]
    make()
    refused = call(*shlex.split(argv))
    assert refused.status in (2, 3)
    hint = refused.err.partition("\nhint: ")[2]
    assert all(command in hint for command in commands)
    for command in commands:
        assert call(*command.split()[1:]).status == 0


OTHERS: dict[str, tuple[Callable[[], object], str, str, str]] = {
    "compress": (plain, f"{ST} --compress", "leave out --compress, or --to npz", f"{ST} --compress --to npz"),
    "byteorder": (plain, f"{ST} --byteorder big", "or --to npz", f"{ST} --byteorder big --to npz"),
    "align": (lambda: np.save("a.npy", PLAIN), "a.npy b.npy --align 128", "leave out --align", "a.npy b.npy"),
    "a typing error": (plain, "in.npz out.safetensor", "did you mean out.safetensors?", ST),
    "no suffix": (plain, "in.npz out", "--to FORMAT", "in.npz out --to npz"),
    "an odd suffix": (plain, "in.npz out.q", "--to FORMAT", "in.npz out.q --to safetensors"),
    "several": (lambda: save(a=PLAIN, b=PLAIN), "in.npz out.npy", "give a folder, out/ for one", "in.npz out/"),
    "a folder as file": (with_folder, "in.npz out --to npz", "give the path of a file", "in.npz p.npz"),
    "no folder": (plain, "in.npz sub/out.npz", "mkdir -p", "in.npz sub/out.npz"),
    "a long name": (plain, f"in.npz {'n' * 252}.npz", "choose a shorter name", "in.npz n.npz"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_advice_that_changes_the_call_works(call: Call, name: str) -> None:
    """Leaving an option out, another target, another name: followed to the letter, it succeeds."""
    make, argv, words, better = OTHERS[name]
    make()
    refused = call(*shlex.split(argv))
    assert refused.status in (2, 3, 4, 5)
    assert words in refused.err.partition("\nhint: ")[2]
    if "mkdir -p" in words:
        os.makedirs("sub")
    done = call(*shlex.split(better))
    assert done.status == 0, done.err
