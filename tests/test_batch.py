"""A tree of files: which are taken, where they go, what is remembered, and that one failure stops no other."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import unicodedata
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert import batchrun, batchtree
from convert.batch import convert_folder
from convert.batchjob import FileReport
from convert.batchlog import Journal, Run, claim
from convert.batchpool import Crew, workers
from convert.batchrun import BatchReport
from convert.batchwork import do_file as really_do
from convert.cli.main import run
from convert.locks import lock

CASES = Path(__file__).resolve().parent / "cases" / "files"
WANTED = {case["id"]: case for case in json.loads((CASES.parent / "cases.json").read_text("utf-8"))}


def put(path: Path, *names: str, start: int = 0) -> Path:
    """An npz, or npy, of small arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.arange(start, start + 6, dtype=np.float32) for name in names or ("w",)}
    if path.suffix.lower() == ".npy":
        with path.open("wb") as file:
            np.save(file, arrays["w"])
    else:
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    return path


def tree(folder: Path) -> dict[str, bytes]:
    """All files of a folder but those that are remembered."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    relative = [path.relative_to(folder) for path in found]
    return {path.as_posix(): (folder / path).read_bytes() for path in relative if path.parts[0] != batchtree.STATE}


def go(src: Path, dst: Path, **options: Any) -> BatchReport:
    """To safetensors, without waiting for the disk."""
    return convert_folder(src, dst, **{"to": "safetensors", "fsync": False, **options})


def lines(report: BatchReport) -> list[dict[str, Any]]:
    """The report's lines, by source."""
    assert report.report_path is not None
    found = [json.loads(line) for line in Path(report.report_path).read_text("utf-8").splitlines()]
    return sorted(found, key=lambda line: str(line["source"]))


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """Two files in two folders."""
    put(tmp_path / "src" / "a.npz")
    put(tmp_path / "src" / "sub" / "deep" / "b.NPZ", start=5)
    return tmp_path / "src"


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    """Not there yet."""
    return tmp_path / "dst"


# --- which files, and where they go ------------------------------------------------------------------------------


def test_layout_is_kept_and_suffixes_are_replaced(src: Path, dst: Path) -> None:
    """Each source has its target in the same place; each is what convert_file makes."""
    put(src / "model.v1.npy")
    report = go(src, dst)
    assert (report.done, report.failed, report.exit_status) == (3, 0, 0)
    assert list(tree(dst)) == ["a.safetensors", "model.v1.safetensors", "sub/deep/b.safetensors"]
    convert.convert_file(src / "a.npz", dst.parent / "alone.safetensors")
    assert tree(dst)["a.safetensors"] == (dst.parent / "alone.safetensors").read_bytes()


def test_hidden_temporary_and_foreign_files_are_no_sources(src: Path, dst: Path) -> None:
    """Nor are those in hidden folders."""
    for name in ("._a.npz", "b.npz.tmp123", "c.tmp.npz", "d.npz.part", "e.npz~", ".git/f.npz", "g.txt", ".npz"):
        put(src / name)
    go(src, dst, copy_others=True)
    assert list(tree(dst)) == ["a.safetensors", "g.txt", "sub/deep/b.safetensors"]


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"include": ["sub/*"]}, ["sub/deep/b", "sub/x/c"]),
        ({"include": ["x"]}, ["sub/x/c", "x/d"]),
        ({"include": ["*.NPZ"]}, ["sub/deep/b"]),
        ({"exclude": ["sub"]}, ["a", "x/d"]),
        ({"exclude": ["sub/"]}, ["a", "x/d"]),
        ({"exclude": ["sub/*/b*", "a.npz"]}, ["sub/x/c", "x/d"]),
        ({"include": ["sub"], "exclude": ["deep"]}, ["sub/x/c"]),
    ],
)
def test_globs(src: Path, dst: Path, options: dict[str, Any], taken: list[str]) -> None:
    """They match relative paths, and without a slash names of files and folders anywhere."""
    put(src / "sub" / "x" / "c.npz")
    put(src / "x" / "d.npz")
    go(src, dst, **options)
    assert list(tree(dst)) == [f"{name}.safetensors" for name in taken]


def test_links(src: Path, dst: Path) -> None:
    """To files they are followed, to folders not, and one that leads nowhere is a failure."""
    (src / "file.npz").symlink_to(src / "a.npz")
    (src / "folder").symlink_to(src / "sub")
    (src / "up").symlink_to(src)
    (src / "lost.npz").symlink_to(src / "nothing")
    (src / "lost.txt").symlink_to(src / "nothing")
    report = go(src, dst)
    assert list(tree(dst)) == ["a.safetensors", "file.safetensors", "sub/deep/b.safetensors"]
    assert [failure.source for failure in report.failures] == ["lost.npz"]
    assert (report.exit_status, report.notes) == (3, ["2 links to folders were not followed"])


def test_a_folder_that_cannot_be_read_is_a_failure(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others are done."""
    real = os.scandir

    def scandir(path: str) -> Any:
        if os.path.basename(os.fspath(path)) == "deep":
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    report = go(src, dst)
    assert (list(tree(dst)), report.failures[0].source, report.exit_status) == (["a.safetensors"], "sub/deep", 3)


def test_several_tensors_to_npy_become_a_folder(src: Path, dst: Path) -> None:
    """One tensor stays a file."""
    put(src / "many.npz", "w", "v")
    go(src, dst, to="npy")
    assert list(tree(dst)) == ["a.npy", "many/v.npy", "many/w.npy", "sub/deep/b.npy"]
    assert go(src, dst, to="npy").skipped == 3


def test_an_index_owns_its_shards(tmp_path: Path, dst: Path) -> None:
    """They are one source; beside a file of the same name the batch is refused."""
    report = go(CASES / "H01_sharded_ok", dst)
    assert (report.done, list(tree(dst))) == (1, ["model.safetensors"])
    assert sorted(convert.load(dst / "model.safetensors")) == ["a", "b"]
    with pytest.raises(convert.UsageError, match="two inputs map to one output"):
        go(CASES / "H05_stray_file", tmp_path / "other")
    report = go(CASES / "H02_missing_shard", tmp_path / "missing")
    assert (report.exit_status, report.failed, tree(tmp_path / "missing")) == (3, 1, {})


def test_shards_as_a_target(src: Path, dst: Path) -> None:
    """`max_shard_size` is passed on; the set is finished as a whole, and its files go when it becomes one file."""
    put(src / "big.npz", "u", "v", "w")
    assert go(src, dst, max_shard_size=30).failed == 0
    names = [name for name in tree(dst) if name.startswith("big")]
    assert names == [f"big-0000{n}-of-00003.safetensors" for n in (1, 2, 3)] + ["big.safetensors.index.json"]
    assert go(src, dst, max_shard_size=30).skipped == 3
    (dst / names[1]).unlink()
    (dst / names[1]).write_bytes(b"another's")
    assert go(src, dst, max_shard_size=30).failed == 1
    assert go(src, dst, max_shard_size=30, overwrite=True).done == 1
    assert go(src, dst).failed == 0
    assert [name for name in tree(dst) if name.startswith("big")] == ["big.safetensors"]


# --- what is refused before anything runs ------------------------------------------------------------------------


def test_case_h08(dst: Path) -> None:
    """H08: two inputs map to one output; neither may overwrite the other."""
    with pytest.raises(convert.UsageError, match=WANTED["H08"]["right"].split(";")[0]) as caught:
        go(CASES / "H08_output_collision", dst)
    assert all(name in str(caught.value) for name in ("model.npy", "model.npz", "neither may overwrite the other"))
    assert not dst.exists()


@pytest.mark.parametrize("other", ["A.npz", "a\u030a.npz"])
def test_names_that_a_file_system_does_not_tell_apart(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Are refused on such a file system, and fine on others; nothing is left behind by the refusal."""
    put(src / other)
    put(src / unicodedata.normalize("NFC", "a\u030a.npz"))
    assert go(src, dst).failed == 0
    shutil.rmtree(dst)
    monkeypatch.setattr("convert.batch.folds_names", lambda dst, probe: True)
    with pytest.raises(convert.UsageError, match="cannot both be"):
        go(src, dst)
    assert not dst.exists()
    with pytest.raises(convert.UsageError, match="cannot both be"):
        go(src, dst, dry_run=True)


def test_the_file_system_is_asked(dst: Path) -> None:
    """By a file that is gone afterwards."""
    (dst / batchtree.STATE).mkdir(parents=True)
    (dst / "Name").touch()
    assert batchtree.folds_names(str(dst), probe=True) == (dst / "nAME").exists()
    assert os.listdir(dst / batchtree.STATE) == []


@pytest.mark.parametrize(
    ("names", "to"),
    [
        (["m.npz", "m.safetensors/x.npz"], "safetensors"),
        (["m.npz", "m/x.npz"], "npy"),
    ],
)
def test_a_file_and_a_folder_of_one_name(tmp_path: Path, dst: Path, names: list[str], to: str) -> None:
    """A target may not be, nor become, the folder of another."""
    for name in names:
        put(tmp_path / "src" / name, "v", "w")
    with pytest.raises(convert.UsageError, match="cannot both be"):
        go(tmp_path / "src", dst, to=to)


def test_a_file_that_must_stay_one(tmp_path: Path, dst: Path) -> None:
    """Its suffix promised one tensor; more of them would need the folder that others have, even with `overwrite`."""
    put(tmp_path / "src" / "m.npz", "v", "w").rename(tmp_path / "src" / "m.npy")
    put(tmp_path / "src" / "m" / "x.npy")
    for _ in range(2):
        report = go(tmp_path / "src", dst, to="npy", overwrite=True)
        assert (report.exit_status, list(tree(dst))) == (5, ["m/x.npy"])


def test_folders_in_each_other(src: Path, dst: Path) -> None:
    """The target may lie in the source only if it is excluded; never the other way round, nor may they be the same."""
    for one, other, message in (
        (src, src, "the same folder"),
        (src, src / "out", "lies in the source"),
        (src / "sub", src, "lies in the target"),
        (src / "a.npz", dst, "is no folder"),
    ):
        with pytest.raises(convert.UsageError, match=message):
            go(one, other)
    with pytest.raises(convert.UsageError, match="lies in the source"):
        go(src, src / "out", exclude=["out/*.npz"])
    assert go(src, src / "out", exclude=["out"]).done == 2
    assert go(src, src / "out", exclude=["out/*"]).skipped == 2
    with pytest.raises(convert.OutputError, match="the target is a file"):
        go(src, src / "a.npz")


@pytest.mark.parametrize("options", [{"compress": 3}, {"to": "nope"}, {"jobs": 0}, {"rename": [("(", "")]}])
def test_options_are_checked_once(src: Path, dst: Path, options: dict[str, Any]) -> None:
    """A wrong one is one message, not one for each file."""
    with pytest.raises(convert.UsageError):
        go(src, dst, **options)
    assert not dst.exists()


def test_no_room(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is refused with both figures, unless it is not to be asked."""
    usage = shutil.disk_usage(src)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    needed = sum(path.stat().st_size for path in src.rglob("*.[nN]*"))
    with pytest.raises(convert.OutputError, match=f"expected {needed} bytes.*found 100"):
        go(src, dst)
    assert tree(dst) == {}
    assert go(src, dst, space_check=False).done == 2
    assert go(src, dst).skipped == 2


def test_dry_run_writes_nothing(src: Path, dst: Path) -> None:
    """It tells the plan and the bytes."""
    report = go(src, dst, dry_run=True)
    assert not dst.exists()
    assert [(item.source, item.target) for item in report.plan] == [
        ("a.npz", "a.safetensors"), ("sub/deep/b.NPZ", "sub/deep/b.safetensors")
    ]  # fmt: skip
    assert report.plan_bytes == sum(path.stat().st_size for path in src.rglob("*.[nN]*"))


# --- failures ----------------------------------------------------------------------------------------------------


def test_case_h10(dst: Path) -> None:
    """H10: the good are converted, each failure is reported, nothing partial is left."""
    assert "convert the good, report each failure" in WANTED["H10"]["right"][0]
    report = go(CASES / "H10_mixed_folder", dst)
    assert list(tree(dst)) == ["ok.safetensors", "sub/deep/ok2.safetensors", "модель ☃.safetensors"]
    assert sorted(failure.source for failure in report.failures) == ["bad.npz", "obj.npy"]
    assert (report.done, report.failed, report.exit_status) == (3, 2, 3)
    assert not [path for path in dst.rglob("*") if "convert-tmp" in path.name]


@pytest.mark.parametrize(
    ("found", "worst"), [([2, 4], 4), ([4, 3, 2], 3), ([3, 5], 5), ([5, 1, 2], 1), ([], 0), ([2], 2)]
)
def test_the_gravest_status_wins(found: list[int], worst: int) -> None:
    """1 before 5 before 3 before 4 before 2."""
    report = BatchReport("", "", "")
    report.failures = [FileReport("", "", exit_status=status) for status in found]
    assert report.exit_status == worst


def test_a_bug_stops_no_other_file(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the report with its trace, and the status is 1."""
    real = convert.convert_file

    def buggy(source: str, *args: Any, **options: Any) -> Any:
        if source.endswith("a.npz"):
            raise ZeroDivisionError("oh")
        return real(source, *args, **options)

    monkeypatch.setattr("convert.api.convert_file", buggy)
    report = go(src, dst)
    assert (report.done, report.exit_status) == (1, 1)
    assert "ZeroDivisionError: oh" in lines(report)[0]["problems"][0]["trace"]


def test_fail_fast(src: Path, dst: Path) -> None:
    """Nothing further is started; the rest is counted and done by the next run."""
    (src / "bad.npz").write_bytes(b"x" * 100_000)  # the largest comes first
    report = go(src, dst, fail_fast=True)
    assert (report.done, report.failed, report.stopped, tree(dst)) == (0, 1, 2, {})
    assert go(src, dst).done == 2


def test_an_existing_target_is_refused(src: Path, dst: Path) -> None:
    """Unless it may be overwritten."""
    put(dst / "a.safetensors")
    old = tree(dst)["a.safetensors"]
    report = go(src, dst)
    assert (report.exit_status, report.done, tree(dst)["a.safetensors"]) == (5, 1, old)
    assert go(src, dst, overwrite=True).done == 1
    assert tree(dst)["a.safetensors"] != old


# --- resuming ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksum", [False, True])
def test_what_is_finished_is_skipped(src: Path, dst: Path, checksum: bool) -> None:
    """Its target is not touched; what has changed, or is gone, is done again."""
    first = go(src, dst, checksum=checksum)
    times = {path: path.stat().st_mtime_ns for path in dst.rglob("*.safetensors")}
    second = go(src, dst, checksum=checksum)
    assert (first.done, second.done, second.skipped) == (2, 0, 2)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    put(src / "a.npz", start=100)
    (dst / "sub" / "deep" / "b.safetensors").unlink()
    third = go(src, dst, checksum=checksum)
    assert (third.done, third.skipped, third.failed) == (2, 0, 0)
    assert convert.load(dst / "a.safetensors")["w"][0] == 100


def test_times_do_not_matter_to_checksums(src: Path, dst: Path) -> None:
    """A touched file is skipped with `checksum`, and done again without; same size and time do not deceive it."""
    go(src, dst, checksum=True)
    os.utime(src / "a.npz")
    assert go(src, dst, checksum=True).skipped == 2
    assert go(src, dst).skipped == 2  # the new time was noted
    os.utime(src / "a.npz")
    assert go(src, dst).done == 1
    go(src, dst, checksum=True)
    target = dst / "a.safetensors"
    whole = target.read_bytes()
    times, data = target.stat(), bytearray(whole)
    data[-1] ^= 1
    target.write_bytes(data)
    os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert go(src, dst).skipped == 2
    assert go(src, dst, checksum=True).done == 1
    assert target.read_bytes() == whole


def test_changed_settings_are_done_again(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that decide about the bytes, and our version; not those that do not."""
    go(src, dst)
    assert go(src, dst, jobs=2, verify=True).skipped == 2
    assert go(src, dst, metadata={"format": "pt"}).done == 2
    assert b"format" in tree(dst)["a.safetensors"]
    assert go(src, dst, metadata={"format": "pt"}).skipped == 2
    monkeypatch.setattr("convert.batch.__version__", "99")
    assert go(src, dst, metadata={"format": "pt"}).done == 2


def test_torn_and_foreign_lines_of_the_journal_are_ignored(src: Path, dst: Path) -> None:
    """Wherever a crash has cut it; what is in whole lines still counts."""
    go(src, dst)
    journal = dst / batchtree.STATE / "journal.jsonl"
    whole = journal.read_bytes()
    last = whole.rstrip().rindex(b"\n")
    for end in range(last, len(whole), 37):
        journal.write_bytes(whole[:end])
        report = go(src, dst)
        assert (report.failed, report.done + report.skipped) == (0, 2)
        assert go(src, dst).skipped == 2
    for junk in (b"{\n", b"[]\n", b'{"source": 1}\n', b"\xff\n", b'{"what": "done", "source": "a.npz", "root": "x"}\n'):
        journal.write_bytes(whole + junk)
        assert go(src, dst).skipped == 2


def test_a_line_that_another_run_is_just_writing(tmp_path: Path) -> None:
    """It is read when it is whole."""
    (tmp_path / batchtree.STATE).mkdir()
    writer, reader = (Journal(str(tmp_path), ("src", "npz"), run, fsync=False) for run in ("one", "two"))
    writer.begin([("a.npy", "a.npz")])
    path = tmp_path / batchtree.STATE / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    reader.refresh()
    assert reader.begun == {}
    path.write_bytes(whole)
    reader.refresh()
    assert reader.begun == {"a.npy": "a.npz"}
    writer.refresh()
    assert writer.begun == {}  # its own
    writer.close()
    reader.close()


def test_a_target_of_a_dead_run_is_recognised(src: Path, dst: Path) -> None:
    """Begun and not noted as done: equal bytes are kept, anything else is someone's file and refused."""
    go(src, dst)
    journal = dst / batchtree.STATE / "journal.jsonl"
    begun = [line for line in journal.read_bytes().splitlines(keepends=True) if b'"done"' not in line]
    journal.write_bytes(b"".join(begun))
    time = (dst / "a.safetensors").stat().st_mtime_ns
    assert go(src, dst).done == 2
    assert (dst / "a.safetensors").stat().st_mtime_ns == time
    journal.write_bytes(b"".join(begun))
    (dst / "a.safetensors").write_bytes(b"mine")
    report = go(src, dst)
    assert (report.exit_status, tree(dst)["a.safetensors"]) == (5, b"mine")
    journal.unlink()
    assert go(src, dst).failed == 2


def test_two_sources_of_one_target_folder(src: Path, dst: Path) -> None:
    """What another source folder brought is not taken for ours."""
    go(src, dst)
    put(src.parent / "src2" / "a.npz", start=9)
    old = tree(dst)
    assert go(src.parent / "src2", dst).exit_status == 5
    assert tree(dst) == old


def test_two_formats_in_one_target_folder(src: Path, dst: Path) -> None:
    """Neither takes away what the other made, and both resume; copies that are equal are shared."""
    (src / "config.json").write_bytes(b"{}")
    go(src, dst, copy_others=True)
    assert go(src, dst, to="npz", copy_others=True).failed == 0
    assert [go(src, dst, to=to, copy_others=True).skipped for to in ("npz", "safetensors")] == [3, 3]
    assert len(tree(dst)) == 5


def test_a_failed_second_look_can_be_repeated(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target of a dead run is still recognised after a run that had no room for looking."""
    go(src, dst)
    journal = dst / batchtree.STATE / "journal.jsonl"
    begun = [line for line in journal.read_bytes().splitlines(keepends=True) if b'"done"' not in line]
    journal.write_bytes(b"".join(begun))
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise convert.OutputError("no space")

        patch.setattr("convert.batchwork._Maker.adopt", full)
        assert go(src, dst).exit_status == 5
    assert go(src, dst).done == 2


def test_temporaries_of_dead_runs_go(src: Path, dst: Path) -> None:
    """Only those of targets that were begun, and only if no other run lives; an old folder is put back."""
    put(src / "many.npz", "v", "w")
    go(src, dst, to="npy", overwrite=True)
    journal = dst / batchtree.STATE / "journal.jsonl"
    begun = b"".join(line for line in journal.read_bytes().splitlines(keepends=True) if b'"done"' not in line)
    left = dst / ".a.npy.0123456789ab.convert-tmp"
    other = dst / ".other.npy.0123456789ab.convert-tmp"
    aside = dst / ".many.0123456789ab.convert-tmp-old"
    for alive in (True, False):
        journal.write_bytes(begun)
        left.touch()
        other.touch()
        (dst / "many").rename(aside)
        another = Run(str(dst)) if alive else None
        assert go(src, dst, to="npy").failed == 0
        if another is not None:
            another.close()
            assert aside.exists()
            shutil.rmtree(aside)
        assert left.exists() == alive
    assert other.exists()
    assert not aside.exists()
    assert sorted(tree(dst)) == [other.name, "a.npy", "many/v.npy", "many/w.npy", "sub/deep/b.npy"]


def test_the_lock_of_a_dead_run_is_removed(src: Path, dst: Path) -> None:
    """Nobody holds it; that of a run that lives stays."""
    one = Run(str(dst))
    two = Run(str(dst))
    assert (one.alone, two.alone) == (True, False)
    dead = Path(one.path).with_name(Path(one.path).name.replace(".lock", "0.lock"))
    dead.touch()
    two.close()
    assert not Run(str(dst)).alone
    assert not dead.exists()
    one.close()


# --- two runs at once --------------------------------------------------------------------------------------------


def test_two_runs_at_once(tmp_path: Path, dst: Path) -> None:
    """Both succeed, each file is right, and none is converted against the other."""
    src = tmp_path / "src"
    for number in range(30):
        put(src / f"{number}.npz", start=number)
    go(src, tmp_path / "alone")
    gate = threading.Barrier(2)

    def one() -> BatchReport:
        gate.wait()
        return go(src, dst)

    with ThreadPoolExecutor(2) as pool:
        reports = [future.result() for future in [pool.submit(one), pool.submit(one)]]
    assert [report.failures for report in reports] == [[], []]
    assert [report.done + report.skipped for report in reports] == [30, 30]
    assert tree(dst) == tree(tmp_path / "alone")
    assert os.listdir(dst / batchtree.STATE / "claims") == []


def test_a_file_that_another_run_is_at_comes_last(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is done first, then it is waited for."""
    order: list[str] = []
    with claim(str(dst / batchtree.STATE), "a.safetensors", wait=False) as held:
        assert held

        def do_file(job: Any, watch: Any) -> Any:
            order.append(job.item.source)
            report = really_do(replaced(job), watch)
            order.append(report.status)
            return report

        def replaced(job: Any) -> Any:
            return replace(job, wait=False)  # here nobody would ever let go

        monkeypatch.setattr(batchrun, "do_file", do_file)
        go(src, dst)
    assert order[:6] == ["a.npz", "busy", "sub/deep/b.NPZ", "done", "a.npz", "busy"]


def test_a_claim_is_for_one(tmp_path: Path) -> None:
    """A second gets it when the first is gone; the file goes away."""
    with claim(str(tmp_path), "x", wait=False) as one, claim(str(tmp_path), "x", wait=False) as two:
        assert (one, two) == (True, False)
    with claim(str(tmp_path), "x", wait=True) as again:
        assert again
    assert os.listdir(tmp_path / "claims") == []
    with (tmp_path / "file").open("w") as first, (tmp_path / "file").open("w") as second:
        assert lock(first.fileno(), shared=True)
        assert lock(second.fileno(), shared=True)
        assert not lock(second.fileno())


# --- other files, and sources that go ----------------------------------------------------------------------------


def test_other_files_are_copied(src: Path, dst: Path) -> None:
    """Byte for byte, and again when they change; shards that an index owns are not."""
    (src / "sub" / "config.json").write_bytes(b"{}" * 1_000_000)
    report = go(src, dst, copy_others=True)
    assert tree(dst)["sub/config.json"] == (src / "sub" / "config.json").read_bytes()
    assert [line["copied"] for line in lines(report)] == [False, True, False]
    assert go(src, dst, copy_others=True).skipped == 3
    (src / "sub" / "config.json").write_bytes(b"{} ")
    assert go(src, dst, copy_others=True).done == 1
    assert tree(dst)["sub/config.json"] == b"{} "


def test_sources_go_only_when_their_targets_are_proven(src: Path, dst: Path) -> None:
    """Not those that failed, nor those of which something was left out, nor copies."""
    (src / "bad.npz").write_bytes(b"x")
    (src / "config.json").write_bytes(b"{}")
    with (src / "partly.npz").open("wb") as file:
        np.savez(file, w=np.zeros(2), o=np.array([None]))
    report = go(src, dst, delete_source=True, copy_others=True, policy=convert.Policy(object="skip"))
    assert sorted(tree(src)) == ["bad.npz", "config.json", "partly.npz"]
    assert (report.deleted, report.failed) == (2, 1)
    found = {line["source"]: line for line in lines(report)}
    assert (found["a.npz"]["verified"], found["a.npz"]["deleted"]) == (True, True)
    assert any("the source was kept" in note for note in found["partly.npz"]["notes"])


def test_a_source_finished_before_goes_only_if_proven(src: Path, dst: Path) -> None:
    """Without a proof it is done again; with one, its target is read once more."""
    go(src, dst)
    assert go(src, dst, delete_source=True).deleted == 2
    assert tree(src) == {}
    put(src / "a.npz")
    put(src / "c.npz")
    go(src, dst, verify=True)
    data = bytearray(tree(dst)["c.safetensors"])
    times = (dst / "c.safetensors").stat()
    (dst / "c.safetensors").write_bytes(data[:-1] + b"!")
    os.utime(dst / "c.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    report = go(src, dst, delete_source=True)
    assert (report.skipped, report.deleted, list(tree(src))) == (2, 1, ["c.npz"])


def test_a_target_that_is_the_source_is_refused(tmp_path: Path, dst: Path) -> None:
    """Through a link, the source would be replaced, and then deleted."""
    source = tmp_path / "src" / "a.safetensors"
    source.parent.mkdir()
    convert.save({"w": np.zeros(2)}, source)
    data = source.read_bytes()
    dst.mkdir()
    (dst / "a.safetensors").symlink_to(source)
    report = go(source.parent, dst, overwrite=True, delete_source=True)
    assert (report.exit_status, source.read_bytes()) == (5, data)


# --- who does the work -------------------------------------------------------------------------------------------


def test_processes(tmp_path: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small files go to processes; what comes out is the same, failures included."""
    src = tmp_path / "src"
    for number in range(40):
        put(src / f"{number:02}.npz", start=number)
    (src / "bad.npz").write_bytes(b"x")
    alone = go(src, tmp_path / "alone")
    monkeypatch.setattr(batchrun, "_FILES_PER_WORKER", 4)
    monkeypatch.setattr(batchrun, "CHUNK_FILES", 3)
    monkeypatch.setattr(batchrun, "do_file", None)  # none is done in this process
    report = go(src, dst, jobs=2)
    assert (report.done, report.failed, alone.done) == (40, 1, 40)
    assert tree(dst) == tree(tmp_path / "alone")
    assert [line["sha256"] for line in lines(report)] == [line["sha256"] for line in lines(alone)]


def test_a_worker_that_dies(tmp_path: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that killed it is named, with status 1; all others are done."""
    src = tmp_path / "src"
    for number in range(12):
        put(src / f"{number:02}.npz")
    deadly = tmp_path / "sitecustomize.py"
    deadly.write_text(
        "import os, sys\n"
        "def hook(event, args):\n"
        "    if event == 'open' and str(args[0]).endswith('07.npz'):\n"
        "        os._exit(9)\n"
        "sys.addaudithook(hook)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(batchrun, "_FILES_PER_WORKER", 4)
    monkeypatch.setattr(batchrun, "CHUNK_FILES", 2)
    report = go(src, dst, jobs=2)
    assert [(failure.source, failure.exit_status) for failure in report.failures] == [("07.npz", 1)]
    assert "ended" in report.failures[0].problems[0]["message"]
    assert report.done == 11


def test_an_executor_of_the_callers(src: Path, dst: Path) -> None:
    """Gets all the work, as a function and arguments that can be pickled."""
    import pickle

    class Executor:
        def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
            future: Future[Any] = Future()
            fn, args = pickle.loads(pickle.dumps((fn, args)))
            future.set_result(pickle.loads(pickle.dumps(fn(*args))))
            return future

    (src / "bad.npz").write_bytes(b"x")
    report = go(src, dst, executor=Executor())
    assert (report.done, report.failed) == (2, 1)
    with ThreadPoolExecutor(2) as pool:
        assert go(src, dst, executor=pool).skipped == 2


def test_workers_are_told_to_stop(tmp_path: Path, src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt reaches them all at once; a worker that has heard of it leaves its files as they are."""
    crew = Crew(lambda chunk: chunk, lambda job, report: None, lambda: False)

    def interrupted() -> Future[Any]:
        future: Future[Any] = Future()
        with contextlib.suppress(KeyboardInterrupt), workers(1, str(tmp_path / "run"), crew) as pool:
            assert pool is not None
            future = pool.submit(eval, "__import__('convert.batchwork').batchwork._stop.wait(30)")
            while not future.running():
                assert not future.done()
            raise KeyboardInterrupt
        return future

    assert interrupted().result() is True  # and not False after 30 s
    told = threading.Event()
    told.set()
    monkeypatch.setattr("convert.batchwork._stop", told)
    with ThreadPoolExecutor(1) as executor:
        report = go(src, dst, executor=executor)
    assert (report.done, report.failed, report.stopped, tree(dst)) == (0, 0, 2, {})


def test_huge_files_get_all_threads(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, in this process; small ones one thread each."""
    put(src / "huge.npz", "u", "v", "w", "x")
    monkeypatch.setattr(batchrun, "HUGE_BYTES", (src / "huge.npz").stat().st_size)
    threads: dict[str, int | None] = {}

    def do_file(job: Any, watch: Any) -> Any:
        threads[job.item.source] = job.jobs
        return really_do(job, watch)

    monkeypatch.setattr(batchrun, "do_file", do_file)
    go(src, dst, jobs=3)
    assert threads == {"huge.npz": 3, "a.npz": 1, "sub/deep/b.NPZ": 1}


def test_progress_counts_bytes_and_can_stop(src: Path, dst: Path) -> None:
    """It ends with all bytes; what it raises ends the batch, and the next run goes on."""
    seen: list[tuple[int, int]] = []
    go(src, dst, progress=lambda done, total, _: seen.append((done, total)))
    total = sum(path.stat().st_size for path in src.rglob("*.[nN]*"))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    shutil.rmtree(dst)

    def stop(*_: object) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        go(src, dst, progress=stop)
    assert not [name for name in tree(dst) if "convert-tmp" in name]
    assert go(src, dst).failed == 0


def test_an_interrupt_ends_it(src: Path, dst: Path) -> None:
    """Nothing is half written; the next run does the rest."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(src, dst, progress=interrupt)
    assert go(src, dst).done + go(src, dst).skipped >= 2
    assert len(tree(dst)) == 2


# --- what is told ------------------------------------------------------------------------------------------------


def test_report_lines(src: Path, dst: Path) -> None:
    """One per source: sizes, digest of the target, time, what a policy changed, and problems."""
    import hashlib

    with (src / "c.npz").open("wb") as file:
        np.savez(file, z=np.zeros(2, np.complex128))
    (src / "bad.npz").write_bytes(b"x")
    report = go(src, dst, policy=convert.Policy(complex128="pair"))
    found = {line["source"]: line for line in lines(report)}
    assert list(found) == ["a.npz", "bad.npz", "c.npz", "sub/deep/b.NPZ"]
    line = found["a.npz"]
    data = tree(dst)["a.safetensors"]
    assert line["sha256"] == hashlib.sha256(data).hexdigest()
    assert (line["source_bytes"], line["target_bytes"]) == ((src / "a.npz").stat().st_size, len(data))
    assert line["seconds"] > 0
    assert found["c.npz"]["changes"][0]["source_dtype"] == "complex128"
    assert found["bad.npz"]["problems"][0]["path"] == str(src / "bad.npz")
    assert (found["bad.npz"]["status"], found["bad.npz"]["exit_status"]) == ("failed", 3)
    again = lines(go(src, dst, policy=convert.Policy(complex128="pair")))
    assert [line["status"] for line in again] == ["skipped", "failed", "skipped", "skipped"]
    assert again[0]["sha256"] == line["sha256"]


def test_command_line(src: Path, dst: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Failures and the end go to stderr, nothing to stdout; the status is that of the worst file."""
    assert run(["batch", str(src), str(dst), "--to", "safetensors"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{dst}: 2 done (")
    (src / "bad.npz").write_bytes(b"x")
    with (src / "obj.npz").open("wb") as file:
        np.savez(file, o=np.array([None]))
    assert run(["batch", str(src), str(dst), "--to", "safetensors", "--quiet"]) == 3
    out, err = capsys.readouterr()
    assert "bad.npz: " in err
    assert "UnsupportedError  3  bad.npz" in err
    assert "PolicyError  4  obj.npz" in err
    assert run(["batch", str(src), str(dst), "--to", "safetensors", "--policy", "object=skip"]) == 3
    assert "2 finished before" not in capsys.readouterr().err.split("bad.npz")[0]


def test_json_lines(src: Path, dst: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One per file, then a summary; a refusal is an object too."""
    command = ["batch", str(src), str(dst), "--to", "safetensors", "--json"]
    assert run([*command, "--dry-run"]) == 0
    plan = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("target") for line in plan] == ["a.safetensors", "sub/deep/b.safetensors", None]
    assert run(command) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("status") for line in found] == ["done", "done", None]
    assert found[-1]["summary"]["done"] == 2
    assert run(["batch", str(src), str(src), "--to", "safetensors", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_status"] == 2


def test_dry_run_of_the_command(src: Path, dst: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan goes to stdout, the total to stderr."""
    (src / "n.txt").touch()
    assert run(["batch", str(src), str(dst), "--to", "npz", "--compress", "--dry-run", "--copy-others"]) == 0
    out, err = capsys.readouterr()
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        "a.npz -> a.npz", "n.txt -> n.txt", "sub/deep/b.NPZ -> sub/deep/b.npz"
    ]  # fmt: skip
    assert err.startswith("would write 3 files to")


def test_options_of_the_main_job_are_those_of_batch(src: Path, dst: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are listed and passed on."""
    assert run(["batch", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--policy", "--compress", "--cast", "--rename", "--metadata", "--byteorder", "--order", "--align",
                   "--verify", "--jobs", "--overwrite", "--delete-source", "--json"):  # fmt: skip
        assert option in shown, option
    options = ["--rename", "w=v", "--cast", "float32=float16", "--metadata", "format=pt", "--verify", "--no-fsync"]
    assert run(["batch", str(src), str(dst), "--to", "safetensors", *options]) == 0
    with convert.open(dst / "a.safetensors") as checkpoint:
        assert (list(checkpoint), checkpoint["v"].dtype.name) == (["v"], "float16")
        assert checkpoint.metadata == {"format": "pt"}


def test_progress_names_the_files_in_flight(tmp_path: Path) -> None:
    """With one process the file being done; with an executor the first of those handed over, and how many others."""
    (tmp_path / "src").mkdir()
    for name in "abc":
        convert.save({"w": np.arange(8)}, tmp_path / f"src/{name}.npz")
    told: list[str] = []
    convert.convert_folder(
        tmp_path / "src", tmp_path / "out", to="npy", jobs=1, progress=lambda done, total, names: told.append(names)
    )
    assert {name for name in told if "more" not in name} == {"a.npz", "b.npz", "c.npz"}
    told.clear()
    with ThreadPoolExecutor(1) as pool:
        convert.convert_folder(
            tmp_path / "src", tmp_path / "other", to="npy", executor=pool,
            progress=lambda done, total, names: told.append(names),
        )  # fmt: skip
    assert told == ["b.npz and 1 more", "c.npz", "c.npz"]
