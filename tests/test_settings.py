"""Policies of a project: where they are found, what they do, and who wins over whom."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.policy import BY_KIND
from convert.settings import find_settings
from tests.program import Call

POSIX = os.name == "posix"
DATES = np.array(["2026-11-29", "NaT"], "datetime64[D]")


def in_force(call: Call, *argv: str) -> dict[str, tuple[str, str]]:
    """Kind -> action and origin, for what holds for all names."""
    found = json.loads(call("policies", "--json", *argv).out)["effective"]
    return {row["kind"]: (row["action"], row["from"]) for row in found if row["glob"] == "*"}


FORMS = {
    "convert.toml": 'policy = ["datetime64=int64"]',
    "pyproject.toml": '[project]\nname = "x"\n[tool.convert]\npolicy = ["datetime64=int64"]\n',
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("below", [".", "a/b"])
def test_settings_decide_in_their_folder_and_below(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, below: str
) -> None:
    """A run is refused without them and done with them; the report names the file."""
    folder = tmp_path / below
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    np.savez("in.npz", when=DATES)
    assert call("in.npz", "out.safetensors").status == 4
    (tmp_path / name).write_text(FORMS[name])
    outcome = call("in.npz", "out.safetensors")
    assert outcome.status == 0
    assert f"note: the policies of {tmp_path / name} apply" in outcome.err
    assert convert.load("out.safetensors")["when"].tobytes() == DATES.view("<i8").tobytes()
    report = json.loads(call("in.npz", "out.safetensors", "--overwrite", "--json", "--quiet").out)
    assert f"the policies of {tmp_path / name} apply" in report["notes"]


def test_options_win_over_settings(call: Call, tmp_path: Path) -> None:
    """One kind by one option, all of them by the preset that is the defaults."""
    Path("convert.toml").write_text('policy = ["lossy", "datetime64=int64"]')
    np.savez("in.npz", when=DATES, z=np.array([1 / 3 + 1j]))
    assert call("in.npz", "a.safetensors").status == 0
    outcome = call("in.npz", "b.safetensors", "--policy", "complex128=error")
    assert (outcome.status, "tensor 'z'" in outcome.err, "tensor 'when'" in outcome.err) == (4, True, False)
    outcome = call("in.npz", "b.safetensors", "--policy", "strict")
    assert (outcome.status, "tensor 'z'" in outcome.err, "tensor 'when'" in outcome.err) == (4, True, True)
    assert sorted(os.listdir()) == ["a.safetensors", "convert.toml", "in.npz"]


def test_batch_and_diff_obey_too(call: Call) -> None:
    """They take the policies of a conversion, and so its settings."""
    os.mkdir("src")
    np.savez("src/in.npz", when=DATES)
    assert call("batch", "src", "dst", "--to", "safetensors", "--quiet", "--no-fsync").status == 4
    Path("convert.toml").write_text('policy = ["datetime64=int64"]')
    outcome = call("batch", "src", "dst", "--to", "safetensors", "--no-fsync")
    assert outcome.status == 0
    assert "convert.toml apply" in outcome.err
    outcome = call("diff", "src/in.npz", "dst/in.safetensors")
    assert (outcome.status, "convert.toml apply" in outcome.err) == (0, True)


def test_the_nearest_file_counts_alone(tmp_path: Path) -> None:
    """convert.toml before pyproject.toml, a folder before the one above; a pyproject.toml without us is passed by."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.convert]\npolicy = ["str=skip"]')
    (inner / "pyproject.toml").write_text('[project]\nname = "convert"\n[tool.other]\nx = 1')
    assert find_settings(str(inner)).path == str(tmp_path / "pyproject.toml")
    (tmp_path / "convert.toml").write_text('policy = ["str=uint32"]')
    assert find_settings(str(inner)).policies == ("str=uint32",)
    (tmp_path / "a" / "convert.toml").write_text("")
    assert find_settings(str(inner)) == convert_settings(tmp_path / "a" / "convert.toml")


def convert_settings(path: Path) -> Any:
    """Those of an empty file."""
    from convert.settings import Settings

    return Settings(str(path), ())


@pytest.mark.skipif(not POSIX, reason="POSIX modes")
def test_a_folder_shared_by_all_is_not_looked_into(tmp_path: Path) -> None:
    """What lies in /tmp may be a stranger's; a folder below it of one's own counts."""
    shared = tmp_path / "shared"
    mine = shared / "mine"
    mine.mkdir(parents=True)
    (shared / "convert.toml").write_text('policy = ["lossy"]')
    assert find_settings(str(mine)).policies == ("lossy",)
    shared.chmod(0o1777)
    assert find_settings(str(mine)).policies == ()
    assert find_settings(str(shared)).policies == ()
    (mine / "convert.toml").write_text('policy = ["lossless"]')
    assert find_settings(str(mine)).policies == ("lossless",)


def test_the_library_does_what_its_caller_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are the command line's."""
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", when=DATES)
    Path("convert.toml").write_text('policy = ["lossy"]')
    with pytest.raises(convert.PolicyError):
        convert.convert_file("in.npz", "out.safetensors")


WRONG = {
    "no TOML": (b"policy = [", "is no TOML"),
    "no text": (b"\xff\xfe", "is no TOML"),
    "another key": (b'polcy = ["lossy"]', "did you mean policy?"),
    "a key of nothing": (b"x = 1", "unknown setting 'x' (expected one of policy)"),
    "a table": (b'[policy]\nstr = "skip"', "policy must be a list of texts"),
    "a text": (b'policy = "lossy"', "policy must be a list of texts"),
    "numbers": (b"policy = [1]", "policy must be a list of texts"),
    "an unknown kind": (b'policy = ["objekt=skip"]', "did you mean object?"),
    "an unknown action": (b'policy = ["object=skpi"]', "did you mean skip?"),
    "an unknown preset": (b'policy = ["losless"]', "did you mean lossless?"),
    "too long": (b"#" * ((1 << 20) + 1), "too long"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("argv", [["in.npz", "out.npz"], ["policies"], ["diff", "in.npz", "in.npz"]], ids=" ".join)
def test_what_settings_say_is_never_ignored(call: Call, case: str, argv: list[str]) -> None:
    """A slip is a usage error that names the file, and nothing is written."""
    data, message = WRONG[case]
    np.savez("in.npz", w=np.zeros(3))
    Path("convert.toml").write_bytes(data)
    outcome = call(*argv)
    assert outcome.status == 2
    assert outcome.err.startswith(os.path.abspath("convert.toml") + ": ")
    assert message in outcome.err
    assert sorted(os.listdir()) == ["convert.toml", "in.npz"]


def test_a_table_that_is_none(call: Call) -> None:
    """`convert = 1` below [tool]; a `tool` that is no table is not about us."""
    np.savez("in.npz", w=np.zeros(3))
    Path("pyproject.toml").write_text("[tool]\nconvert = 1")
    outcome = call("in.npz", "out.npz")
    assert (outcome.status, "tool.convert is no table" in outcome.err) == (2, True)
    Path("pyproject.toml").write_text('tool = "convert"')
    assert call("in.npz", "out.npz").status == 0


@pytest.mark.skipif(not POSIX or os.geteuid() == 0, reason="needs a user who can be refused")
def test_a_file_that_cannot_be_read_is_no_absent_file(call: Call) -> None:
    """It might say that something must be refused."""
    np.savez("in.npz", w=np.zeros(3))
    Path("convert.toml").touch(0o000)
    outcome = call("in.npz", "out.npz")
    assert (outcome.status, "the settings cannot be read: Permission denied" in outcome.err) == (2, True)


# --- convert policies --------------------------------------------------------------------------------------------


def test_policies_tells_what_is_in_force_and_who_said_so(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind once for all names; from the default, a preset in a file, a rule in a file, or an option."""
    monkeypatch.setenv("COLUMNS", "500")
    path = str(tmp_path / "convert.toml")
    Path(path).write_text('policy = ["lossless", "str=skip", "opt/*:object=skip"]')
    found = in_force(call, "--policy", "V1=uint8")
    assert list(found) == list(BY_KIND)
    assert found["str"] == ("skip", path)
    assert found["datetime64"] == ("int64", f"{path} (lossless)")
    assert found["V1"] == ("uint8", "--policy V1=uint8")
    assert found["object"] == ("error", "default")
    assert found["blob"] == ("uint8", f"{path} (lossless)")
    rows = json.loads(call("policies", "--json").out)["effective"]
    assert {"kind": "object", "glob": "opt/*", "action": "skip", "from": path} in rows
    lines = [line.split() for line in call("policies").out.splitlines()]
    assert ["object", "skip", "opt/*", path] in lines
    assert ["object", "error", "all", "default"] in lines


def test_what_is_in_force_is_what_is_done() -> None:
    """The table agrees with the policy that a conversion gets, for any rules and names."""
    from convert.settings import Settings, effective

    settings = Settings("f", ("lossy", "a*:str=skip", "strict", "b*:object=skip", "V2=uint16", "b*:V2=skip"))
    options = ["lossless", "bc:object=error", "a*:V2=bfloat16"]
    policy = settings.policy(options)
    rows = effective(settings, options)
    for kind in BY_KIND:
        for name in ("a", "ab", "b", "bc", "c"):
            first = next(row for row in rows if row.kind == kind and row.glob in ("*", name, f"{name[0]}*"))
            assert first.action == policy.action(kind, name), (kind, name)


def test_without_settings_the_defaults_are_in_force(call: Call) -> None:
    """And it says that nobody speaks."""
    assert {origin for _, origin in in_force(call).values()} == {"default"}
    assert "In force here: the defaults" in call("policies").out
    assert json.loads(call("policies", "--json").out)["settings"] is None
