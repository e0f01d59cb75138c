"""Several at once: processes with one target, processes in one folder, threads in one conversion.

`CONVERT_STRESS=N` repeats each race N times; docs/reliability.md says how long that takes.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.cli.main import run
from tests.faultfs import snapshot

ROUNDS = int(os.environ.get("CONVERT_STRESS", "1"))
RACERS = 4
KINDS: dict[str, list[str]] = {
    "out.safetensors": [],
    "out.npz": ["--compress", "1"],
    "out/": [],
    "sharded.safetensors": ["--max-shard-size", "100"],
}


@pytest.fixture(params=["nameless", "named"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With files that have no name until they are complete, and as where there are none."""
    way: str = request.param
    if way == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    return way


def at_once(works: list[Callable[[], int]], folder: Path) -> list[tuple[int, str]]:
    """Do each in a process of its own, all from the same moment; their statuses and what they said."""
    begin, go = os.pipe()
    children = []
    for number, work in enumerate(works):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside the threads of the test runner
            pid = os.fork()
        if pid == 0:
            status = 99
            try:
                os.dup2(os.open(folder / f"errors{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
                sys.stderr = open(2, "w", closefd=False)
                os.close(go)
                os.read(begin, 1)  # until the last descriptor of the other end is closed
                status = work()
                sys.stderr.flush()
            finally:
                os._exit(status)
        children.append(pid)
    os.close(go)
    os.close(begin)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return [(status, (folder / f"errors{number}").read_text()) for number, status in enumerate(statuses)]


def make_sources(top: Path) -> list[Path]:
    """One for each racer: the same names, other values."""
    paths = [top / f"in{number}.npz" for number in range(RACERS)]
    for number, path in enumerate(paths):
        np.savez(path, a=np.full(25, number, "<f4"), b=np.full((5, 5), number, ">i4"), c=np.full(7, number, "u1"))
    return paths


def alone(top: Path, sources: list[Path], target: str) -> list[dict[str, bytes | None]]:
    """What each would leave had it been alone."""
    found = []
    for number, source in enumerate(sources):
        folder = top / f"alone{number}"
        folder.mkdir()
        assert run([str(source), f"{folder}/{target}", "--quiet", *KINDS[target]]) == 0
        found.append(snapshot(folder))
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
@pytest.mark.parametrize("target", KINDS)
def test_processes_with_one_target(tmp_path: Path, route: str, target: str, overwrite: bool) -> None:
    """Without --overwrite one of them wins and the others are told; with it the target is one of theirs, whole."""
    sources = make_sources(tmp_path)
    wanted = alone(tmp_path, sources, target)
    for number in range(3 * ROUNDS):
        folder = tmp_path / f"race{number}"
        folder.mkdir()
        options = [*KINDS[target], "--quiet", "--jobs", "1", *(["--overwrite"] if overwrite else [])]

        def racer(source: Path, folder: Path = folder, options: list[str] = options) -> Callable[[], int]:
            return lambda: run([str(source), f"{folder}/{target}", *options])

        done = at_once([racer(source) for source in sources], tmp_path)
        winners = [index for index, (status, _) in enumerate(done) if status == 0]
        found = snapshot(folder)
        if overwrite:
            assert winners == list(range(RACERS)), done
            assert found in wanted
        else:
            assert len(winners) == 1, done
            assert found == wanted[winners[0]]
            assert all("the target exists already" in said for status, said in done if status == 5), done
            assert sorted(status for status, _ in done) == [0, *[5] * (RACERS - 1)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_in_one_folder(tmp_path: Path, route: str) -> None:
    """Neighbours do not see, nor remove, each other's temporaries."""
    sources = make_sources(tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()

    def worker(number: int) -> Callable[[], int]:
        def work() -> int:
            targets = [
                f"{folder}/{number}-{index}{suffix}" for index, suffix in enumerate((".npz", ".safetensors", "/"))
            ]
            return max(run([str(sources[number % RACERS]), target, "--quiet"]) for target in targets)

        return work

    for _ in range(ROUNDS):
        done = at_once([worker(number) for number in range(8)], tmp_path)
        assert [status for status, _ in done] == [0] * 8, done
        assert sorted(os.listdir(folder)) == sorted(
            f"{number}-{name}" for number in range(8) for name in ("0.npz", "1.safetensors", "2")
        )
        for path in folder.iterdir():
            with np.load(sources[int(path.name[0]) % RACERS]) as arrays:
                found = convert.load(path)
                assert {name: value.tolist() for name, value in found.items()} == {
                    n: arrays[n].tolist() for n in arrays
                }
        shutil.rmtree(folder)
        folder.mkdir()


def test_threads_with_one_target(tmp_path: Path, route: str) -> None:
    """The library too: one of several threads of a program wins."""
    for number in range(3 * ROUNDS):
        target = tmp_path / f"{number}.npz"
        results: list[object] = []
        barrier = threading.Barrier(RACERS)

        def save(value: int, target: Path = target, results: list[object] = results, barrier: Any = barrier) -> None:
            barrier.wait()
            try:
                convert.save({"w": np.full(100, value)}, target)
                results.append(value)
            except convert.TargetExistsError as err:
                results.append(err)

        threads = [threading.Thread(target=save, args=(value,)) for value in range(RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [result for result in results if isinstance(result, int)]
        assert len(results) == RACERS
        assert convert.load(target)["w"].tolist() == [winner] * 100
    assert len(os.listdir(tmp_path)) == 3 * ROUNDS


# --- threads in one conversion -----------------------------------------------------------------------------------


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads that are switched as often as the interpreter can, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many small tensors, some large ones, each order of bytes and elements; in every format."""
    top = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(3)
    arrays: dict[str, Any] = {f"small{number:03}": rng.random(number, np.float32) for number in range(80)}
    arrays["large"] = rng.integers(0, 9, 2_600_000, np.uint8)
    arrays["big-endian"] = rng.random((150, 400)).astype(">f8")
    arrays["fortran"] = np.asfortranarray(rng.random((400, 150)))
    arrays["both"] = np.asfortranarray(rng.integers(0, 9, (3, 50, 200)).astype(">i4"))
    np.savez(top / "in.npz", **arrays)
    np.savez_compressed(top / "deflated.npz", **arrays)
    (top / "folder").mkdir()
    for name, value in arrays.items():
        np.save(top / "folder" / f"{name}.npy", value)
    from safetensors.numpy import save_file

    plain = {name: np.ascontiguousarray(value, value.dtype.newbyteorder("<")) for name, value in arrays.items()}
    save_file(plain, top / "in.safetensors")
    return top


THREADED: dict[str, dict[str, Any]] = {
    "out.npz": {},
    "kept.npz": {"order": "keep", "byteorder": "keep"},
    "deflated.npz": {"compress": 1},
    "out.safetensors": {},
    "cast.safetensors": {"cast": [("float64", "float32")]},
    "shards.safetensors": {"max_shard_size": 500_000},
    "out/": {},
}


@pytest.mark.parametrize("target", THREADED)
@pytest.mark.parametrize("source", ["in.npz", "deflated.npz", "in.safetensors", "folder"])
def test_one_and_eight_threads_give_the_same_bytes(
    sources: Path, tmp_path: Path, hurried: None, monkeypatch: pytest.MonkeyPatch, source: str, target: str
) -> None:
    """Whatever the scheduling: CONVERT_JOBS=1 and 8 differ in nothing."""
    monkeypatch.setenv("CONVERT_JOBS", "1")
    (tmp_path / "1").mkdir()
    convert.convert_file(sources / source, f"{tmp_path}/1/{target}", **THREADED[target])
    wanted = snapshot(tmp_path / "1")
    monkeypatch.setenv("CONVERT_JOBS", "8")
    for number in range(ROUNDS):
        folder = tmp_path / f"8-{number}"
        folder.mkdir()
        convert.convert_file(sources / source, f"{folder}/{target}", **THREADED[target])
        assert snapshot(folder) == wanted


def test_eight_threads_read_what_numpy_reads(sources: Path, tmp_path: Path, hurried: None) -> None:
    """And the bytes they agree on are right."""
    convert.convert_file(sources / "deflated.npz", tmp_path / "out.safetensors", jobs=8)
    from safetensors.numpy import load_file

    found = load_file(tmp_path / "out.safetensors")
    with np.load(sources / "in.npz") as arrays:
        assert found.keys() == set(arrays)
        for name, value in found.items():
            assert value.dtype == arrays[name].dtype.newbyteorder("<")
            assert value.tobytes() == arrays[name].astype(value.dtype).tobytes("C")
