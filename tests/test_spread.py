"""Other people's executors: work that is lost, given back or done twice, and one large file among several workers."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import convert
from convert import batchpool, batchrun, cluster, spread, transfer
from convert.batch import convert_folder
from convert.batchjob import Job, Order
from convert.batchpool import Hands
from convert.batchtree import STATE
from convert.batchwork import StoppedError, check_place, do_chunk, following
from convert.version import __version__


def tree(folder: Path) -> dict[str, bytes]:
    """All that is there, hidden or not, but what is remembered."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(f"{STATE}/")}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """One that counts as large, two small ones."""
    top = tmp_path / "src"
    top.mkdir()
    values = np.random.default_rng(1).standard_normal(300_000).astype("f4")
    np.savez(top / "large.npz", a=values, b=values[:100_001].astype(">f4"), c=np.float64(1), d=values[:40_000])
    for name in ("one", "two"):
        np.savez(top / f"{name}.npz", a=values[:7])
    return top


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[spread.Range]:
    """A little is large here, and any executor is taken for a cluster; returns the ranges that are copied."""
    monkeypatch.setattr(batchrun, "SPREAD_BYTES", 1 << 20)
    monkeypatch.setattr(spread, "LEAST_BYTES", 1 << 18)
    monkeypatch.setattr(spread, "RANGE_BYTES", 1 << 18)
    monkeypatch.setattr(Hands, "threads", 2)
    seen: list[spread.Range] = []
    really = spread.copy_range

    def copy_range(piece: spread.Range) -> tuple[int, int, int]:
        seen.append(piece)
        return really(piece)

    monkeypatch.setattr(spread, "copy_range", copy_range)
    return seen


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Two threads."""
    with ThreadPoolExecutor(2) as made:
        yield made


class Tricky:
    """An executor that does as it is told, unless `trick` has another answer for the n-th call."""

    def __init__(self, trick: Callable[[int, Any, Any], Any]) -> None:
        self._trick = trick
        self.calls = 0

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        answer = self._trick(self.calls, fn, args)
        if answer == "cancelled":
            future.cancel()
            future.set_running_or_notify_cancel()
        elif isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(fn(*args))
        return future


# --- one large file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"to": "safetensors"}, {"to": "npz", "align": 64}, {"to": "npy"}])
def test_ranges_are_whole_blocks(
    src: Path, tmp_path: Path, sizes: list[spread.Range], pool: ThreadPoolExecutor, options: dict[str, Any]
) -> None:
    """No block of the target is written twice, or by two machines; the bytes are those of one process."""
    seen: list[tuple[int, int]] = []
    report = convert_folder(
        src, tmp_path / "dst", executor=pool, progress=lambda done, total, _: seen.append((done, total)), **options
    )
    assert report.exit_status == 0
    convert_folder(src, tmp_path / "alone", **options)
    assert tree(tmp_path / "dst") == tree(tmp_path / "alone")
    places = sorted((piece.target, piece.at, piece.nbytes) for piece in sizes)
    assert len(places) > 4
    assert all(at % spread.BLOCK_BYTES == nbytes % spread.BLOCK_BYTES == 0 for _, at, nbytes in places)
    assert all(a[0] != b[0] or a[1] + a[2] <= b[1] for a, b in pairwise(places))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == report.plan_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"to": "npz"},  # big-endian items across the borders of blocks
        {"to": "npz", "compress": True},
        {"to": "safetensors", "max_shard_size": 1_000_000},
        {"to": "safetensors", "cast": [("float32", "float16")]},
    ],
)
def test_what_cannot_be_cut_goes_to_one_worker(
    src: Path, tmp_path: Path, sizes: list[spread.Range], pool: ThreadPoolExecutor, options: dict[str, Any]
) -> None:
    """As a whole, with the same bytes."""
    assert convert_folder(src, tmp_path / "dst", executor=pool, **options).exit_status == 0
    convert_folder(src, tmp_path / "alone", **options)
    assert tree(tmp_path / "dst") == tree(tmp_path / "alone")
    assert sizes == []


def test_damage_is_found(src: Path, tmp_path: Path, sizes: list[spread.Range], pool: ThreadPoolExecutor) -> None:
    """The checksums of the ranges are joined: the same problems as here, all of them, and no target."""
    data = bytearray((src / "large.npz").read_bytes())
    data[500_000] ^= 1
    data[1_400_000] ^= 1
    (src / "large.npz").write_bytes(data)
    reports = [convert_folder(src, tmp_path / str(number), to="safetensors", executor=pool) for number in range(1)]
    reports.append(convert_folder(src, tmp_path / "alone", to="safetensors"))
    found = [[(one["tensor"], one["message"]) for one in report.failures[0].problems] for report in reports]
    assert found[0] == found[1]
    assert [tensor for tensor, _ in found[0]] == ["a", "b"]
    assert list(tree(tmp_path / "0")) == ["one.safetensors", "two.safetensors"]
    assert sizes


def test_a_source_that_changes(
    src: Path, tmp_path: Path, sizes: list[spread.Range], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker finds out; nothing is written."""
    really: Any = transfer.copy_span

    def copy_span(*args: Any) -> Any:
        os.utime(src / "large.npz", (1, 1))
        return really(*args)

    monkeypatch.setattr(spread, "copy_span", copy_span)
    report = convert_folder(src, tmp_path / "dst", to="safetensors", executor=pool)
    assert [failure.exit_status for failure in report.failures] == [3]
    assert "changed while it was read" in report.failures[0].problems[0]["message"]
    assert list(tree(tmp_path / "dst")) == ["one.safetensors", "two.safetensors"]


def test_a_full_disk(
    src: Path, tmp_path: Path, sizes: list[spread.Range], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the worker is; nothing is left behind."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    really: Any = transfer.copy_span
    monkeypatch.setattr(spread, "copy_span", lambda *args: really(*args[:4], full, *args[5:]))
    report = convert_folder(src, tmp_path / "dst", to="safetensors", executor=pool)
    assert [failure.exit_status for failure in report.failures] == [5]
    assert "No space left" in report.failures[0].problems[0]["message"]
    assert list(tree(tmp_path / "dst")) == ["one.safetensors", "two.safetensors"]


@pytest.mark.parametrize("answer", [BrokenExecutor("killed"), "cancelled"])
@pytest.mark.parametrize(("times", "status"), [(2, 0), (3, 5)])
def test_lost_ranges_are_copied_again(
    src: Path, tmp_path: Path, sizes: list[spread.Range], answer: Any, times: int, status: int
) -> None:
    """By others; after three tries in vain the file has failed, and nothing else."""
    lost: dict[int, int] = {}

    def trick(_: int, fn: Any, args: Any) -> Any:
        if fn is do_chunk or args[0].at != first.setdefault("at", args[0].at):
            return None
        lost[0] = lost.get(0, 0) + 1
        return answer if lost[0] <= times else None

    first: dict[str, int] = {}
    report = convert_folder(src, tmp_path / "dst", to="safetensors", executor=Tricky(trick))
    assert (report.exit_status, report.done) == (status, 3 if status == 0 else 2)
    if status:
        assert "died, again and again" in report.failures[0].problems[0]["message"]
    assert [name for name in tree(tmp_path / "dst") if "tmp" in name] == []


def test_an_executor_that_takes_nothing(src: Path, tmp_path: Path, sizes: list[spread.Range]) -> None:
    """Each file has failed; the next run does them."""
    with ThreadPoolExecutor(1) as pool:
        pass
    report = convert_folder(src, tmp_path / "dst", to="safetensors", executor=pool)
    assert {failure.source: failure.exit_status for failure in report.failures} == {
        "large.npz": 5, "one.npz": 1, "two.npz": 1,
    }  # fmt: skip
    assert convert_folder(src, tmp_path / "dst", to="safetensors").done == 3


# --- work that is lost, given back or done twice --------------------------------------------------------------------


@pytest.mark.parametrize("to", ["safetensors", "npy"])
def test_work_that_is_done_twice(src: Path, tmp_path: Path, to: str) -> None:
    """As when its worker dies with the answer: the second try knows the target for its own."""

    def trick(_: int, fn: Any, args: Any) -> Any:
        fn(*args)

    report = convert_folder(src, tmp_path / "dst", to=to, executor=Tricky(trick))
    assert (report.done, report.failed) == (3, 0)
    convert_folder(src, tmp_path / "alone", to=to)
    assert tree(tmp_path / "dst") == tree(tmp_path / "alone")


def test_a_strangers_target_is_refused(src: Path, tmp_path: Path) -> None:
    """Though it may be taken for what a dead worker has left: it was there before."""
    (tmp_path / "dst").mkdir()
    convert.convert_file(src / "one.npz", tmp_path / "dst" / "one.safetensors")
    report = convert_folder(src, tmp_path / "dst", to="safetensors", executor=Tricky(lambda *_: None))
    assert [(failure.source, failure.exit_status) for failure in report.failures] == [("one.npz", 5)]

    def trick(_: int, fn: Any, args: Any) -> Any:
        for job in args[0]:
            Path(job.order.dst, job.item.target).write_bytes(b"a stranger's")

    report = convert_folder(src, tmp_path / "dst2", to="safetensors", executor=Tricky(trick))
    assert {failure.exit_status for failure in report.failures} == {5}
    assert set(tree(tmp_path / "dst2").values()) == {b"a stranger's"}


def test_work_that_is_given_back(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is handed over again, but not for ever."""
    monkeypatch.setattr(batchrun, "CHUNK_FILES", 1)
    executor = Tricky(lambda call, *_: "cancelled" if call in (1, 3, 4) else None)
    assert convert_folder(src, tmp_path / "dst", to="npz", executor=executor).done == 3
    assert executor.calls == 6
    monkeypatch.setattr(batchpool, "_MOST_RETURNS", 5)
    with pytest.raises(convert.OutputError, match="gives all work back"):
        convert_folder(src, tmp_path / "dst2", to="npz", executor=Tricky(lambda *_: "cancelled"))


def test_a_worker_at_the_wrong_place(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the batch: it would fail file after file."""
    really = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).endswith(".lock") and really(path))
    with pytest.raises(convert.OutputError, match="does not see this folder"):
        convert_folder(src, tmp_path / "dst", to="npz", executor=Tricky(lambda *_: None))
    assert tree(tmp_path / "dst") == {}


def order(folder: Path, run: str | None, version: str = __version__) -> Order:
    """Of no batch."""
    return Order(str(folder), str(folder), "npz", {}, "", False, False, False, False, run, version)


def test_a_worker_looks_where_it_is(tmp_path: Path) -> None:
    """The run's file proves the folder; the version must be the same; without a run all is well."""
    check_place(order(tmp_path, None))
    (tmp_path / "run").touch()
    check_place(order(tmp_path, str(tmp_path / "run")))
    with pytest.raises(convert.OutputError, match=r"another version .*expected 0.0.9, found"):
        check_place(order(tmp_path, str(tmp_path / "run"), "0.0.9"))
    with pytest.raises(convert.OutputError, match="does not see this folder") as caught:
        check_place(order(tmp_path, str(tmp_path / "elsewhere")))
    assert caught.value.path == str(tmp_path)


def test_work_ends_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker looks from time to time, and stops when the run's file is gone."""
    monkeypatch.setattr("convert.batchwork._LOOK_SECONDS", 0)
    run = tmp_path / "run"
    run.touch()
    watch = following(str(run))
    watch(1, 2, "")
    run.unlink()
    with pytest.raises(StoppedError):
        watch(1, 2, "")


# --- a cluster ------------------------------------------------------------------------------------------------------


class Client:
    """The part of dask's that is used."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.status = "running"
        self.threads = {"tcp://a:1": 2, "tcp://b:1": 1}
        self.scheduler = SimpleNamespace(address="tcp://scheduler:8786")
        self.given: list[dict[str, Any]] = []
        self._pool = pool

    def get_executor(self, **options: Any) -> ThreadPoolExecutor:
        self.given.append(options)
        return self._pool

    def run_on_scheduler(self, fn: Any, *args: Any) -> Any:
        return fn(*args)

    def nthreads(self) -> dict[str, int]:
        return self.threads


@pytest.fixture
def client(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Connected, with three threads; distributed itself is not needed."""
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(KilledWorker=KeyError))
    monkeypatch.setattr(cluster, "_LOOK_SECONDS", 0)
    return Client(pool)


def test_the_window_follows_the_cluster(client: Client) -> None:
    """Workers come and go. Options of the caller's executor are kept, but equal calls are never taken for one."""
    made = cluster.Cluster(client, {"retries": 2, "pure": True})
    assert client.given == [{"retries": 2, "pure": False}]
    assert (made.threads, made.window()) == (3, 6)
    client.threads["tcp://c:1"] = 40
    made.check()
    assert (made.threads, made.window()) == (43, 86)


def test_all_workers_are_lost(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are waited for, but not for ever."""
    made = cluster.Cluster(client, {})
    client.threads.clear()
    made.check()
    assert (made.threads, made.window()) == (0, 2)
    monkeypatch.setattr(cluster, "NO_WORKER_SECONDS", -1)
    with pytest.raises(convert.OutputError, match="lost all its workers") as caught:
        made.check()
    assert caught.value.path == "tcp://scheduler:8786"


def test_the_connection_is_lost(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client tries for a while; what comes of it decides."""
    made = cluster.Cluster(client, {})
    client.status = "connecting"
    monkeypatch.setattr("time.sleep", lambda _: setattr(client, "status", "running"))
    made.check()
    client.status = "closed"
    with pytest.raises(convert.OutputError, match="connection to the scheduler is lost"):
        made.check()


def test_what_is_no_executor(src: Path, tmp_path: Path) -> None:
    """Is said at once; nothing was written."""
    wrong: Any = 8
    with pytest.raises(convert.UsageError, match=r"no submit \(found int\)"):
        convert_folder(src, tmp_path / "dst", to="npz", executor=wrong)
    assert not (tmp_path / "dst").exists()


def test_without_the_extra(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint installs it."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(convert.UsageError, match="not installed") as caught:
        convert_folder(src, tmp_path / "dst", to="npz", executor="tcp://127.0.0.1:1")
    assert caught.value.hint == "pip install distributed"


def test_jobs_can_be_sent(tmp_path: Path) -> None:
    """What goes over the wire is small, and the same when it arrives."""
    import pickle

    from convert.batchfiles import Stamp
    from convert.batchtree import Item

    job = Job(order(tmp_path, "run"), Item("a", "b", False, Stamp(1, 2)))
    sent = pickle.dumps(job)
    assert pickle.loads(sent) == job
    assert len(sent) < 2000
