"""`convert check` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convert.checking import all_rules
from convert.findings import MAX_PER_RULE
from tests.brokenfiles import ARRAY, Zip, entry, laid_out, one, st_file
from tests.program import Call

# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def call(call: Call) -> Call:
    """`convert check`."""
    return lambda *argv: call("check", *argv)


def test_clean_files(call: Call, tmp_path: Path) -> None:
    """Exit status 0, a line for each file, and the count."""
    laid_out({"a.npy": ARRAY, "b.npz": one()}, tmp_path)
    assert call("a.npy", "b.npz") == (0, "a.npy: clean\nb.npz: clean\n2 files, 0 errors, 0 warnings\n", "")


def test_errors_and_warnings(call: Call, tmp_path: Path) -> None:
    """Errors make the status 3; warnings do only with --strict."""
    laid_out({"a.npz": one(crc=1), "b.npz": one("w")}, tmp_path)
    status, out, err = call("a.npz", "b.npz")
    assert (status, err) == (3, "")
    lines = out.splitlines()
    assert lines[0] == "a.npz"
    assert lines[1].split()[:2] == ["error", "NPZ-018"]
    assert "at byte 35" in lines[1]
    assert lines[2].split()[0] == "hint:"
    assert lines[3:5][0] == "b.npz"
    assert lines[4].split()[:2] == ["warning", "NPZ-105"]
    assert lines[5] == "2 files, 1 error, 1 warning"
    assert call("b.npz")[0] == 0
    assert call("--strict", "b.npz")[0] == 3
    assert call("--headers", "a.npz")[0] == 0


def test_json(call: Call, tmp_path: Path) -> None:
    """One document with all files, those that cannot be opened included."""
    laid_out({"a.npz": one(crc=1), "b.npy": ARRAY}, tmp_path)
    status, out, err = call("--json", "a.npz", "b.npy", "missing.npy")
    assert status == 3
    assert err.startswith("missing.npy: cannot be read")
    document = json.loads(out)
    assert [file["path"] for file in document["files"]] == ["a.npz", "b.npy", "missing.npy"]
    (finding,) = document["files"][0]["findings"]
    assert (finding["rule"], finding["severity"], finding["tensor"], finding["offset"]) == (
        "NPZ-018",
        "error",
        "w.npy",
        35,
    )
    assert document["files"][1]["findings"] == []
    assert document["files"][2]["error"]["exit_status"] == 3
    assert (document["files_checked"], document["errors"], document["warnings"], document["clean"]) == (2, 1, 0, False)


def test_a_missing_file_stops_no_other(call: Call, tmp_path: Path) -> None:
    """The others are told; the missing one is on stderr."""
    laid_out({"a.npy": ARRAY}, tmp_path)
    status, out, err = call("missing.npy", "a.npy")
    assert status == 3
    assert "a.npy: clean" in out
    assert "missing.npy: cannot be read" in err
    assert "hint:" in err


def test_rules_are_listed_and_explained(call: Call) -> None:
    """All of them, or one in any case; a wrong id is a usage error with a way out."""
    status, out, _ = call("--rules")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [rule.id for rule in all_rules()]
    assert json.loads(call("--rules", "--json")[1])[0]["id"] == "FILE-001"
    status, out, _ = call("--explain", "npz-1")
    assert status == 0
    assert "central directory" in out
    status, _, err = call("--explain", "NPZ-999")
    assert status == 2
    assert "convert check --rules" in err
    assert call()[0] == 2


def test_a_limit_is_raised_by_the_option_that_is_named(call: Call, tmp_path: Path) -> None:
    """The hint works when typed."""
    laid_out({"a.npz": Zip().add("a.npy").add("b.npy").end()}, tmp_path)
    status, out, _ = call("a.npz", "--max-tensors", "1")
    assert status == 3
    assert "FILE-003" in out
    assert "--max-tensors 2" in out
    assert call("a.npz", "--max-tensors", "2")[0] == 0


def test_many_findings_in_the_text(call: Call, tmp_path: Path) -> None:
    """The count of those that are not listed is told, and is in the total."""
    header = {f"t{index}": entry("f32") for index in range(MAX_PER_RULE + 30)}
    laid_out({"a.safetensors": st_file(header)}, tmp_path)
    _, out, _ = call("a.safetensors")
    assert "ST-010   ... and 30 more" in out
    assert f", {MAX_PER_RULE + 30 + MAX_PER_RULE + 29} errors" in out
