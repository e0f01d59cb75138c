"""Threads: how many, that they stop together, and that the parts of one tensor do."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import convert
from convert import threads, transfer
from convert.errors import CorruptError, OutputError
from convert.steps import Pipe
from convert.tensor import Extent


@pytest.fixture(autouse=True)
def no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONVERT_JOBS", raising=False)


def test_affinity_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process bound to some cores uses no more."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5, 7}, raising=False)
    monkeypatch.setattr(threads, "_QUOTAS", ())
    assert threads.default_jobs() == 3


def test_systems_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and macOS tell the number of cores only."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(threads, "_QUOTAS", ())
    assert threads.default_jobs() == 6


@pytest.mark.parametrize(
    ("text", "jobs"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("nonsense", 8), ("1 0", 8)],
)
def test_quota_is_respected(text: str, jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's share of the cores counts, rounded up; what cannot be read does not."""
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "_QUOTAS", ((str(tmp_path / "cpu.max"),),))
    assert threads.default_jobs() == jobs


def test_quota_of_the_first_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files there, -1 for no quota."""
    quota, period = tmp_path / "quota", tmp_path / "period"
    quota.write_text("300000\n")
    period.write_text("100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "_QUOTAS", ((str(tmp_path / "none"),), (str(quota), str(period))))
    assert threads.default_jobs() == 3
    quota.write_text("-1\n")
    assert threads.default_jobs() == 8


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONVERT_JOBS wins over the cores; a wrong value is a usage error that names it."""
    monkeypatch.setenv("CONVERT_JOBS", "5")
    assert threads.default_jobs() == 5
    for wrong in ("0", "many", "-1", "99"):
        monkeypatch.setenv("CONVERT_JOBS", wrong)
        with pytest.raises(convert.UsageError, match=wrong):
            threads.default_jobs()


@pytest.mark.parametrize("jobs", [1, 3])
def test_bad_input_stops_nothing_and_is_told_in_order(jobs: int) -> None:
    """All damaged pieces are named, each tensor once, sorted, whatever the threads do."""
    done: list[int] = []

    def piece(number: int) -> threads.Work:
        def work(buffer: memoryview) -> None:
            done.append(number)
            if number % 3 == 0:
                raise CorruptError("damaged", path="a.npz", tensor=f"t{9 - number // 3 % 4}")

        return work

    with pytest.raises(CorruptError) as caught:
        threads.run(iter([piece(number) for number in range(24)]), jobs)
    assert sorted(done) == list(range(24))
    assert [problem.tensor for problem in caught.value.problems] == ["t6", "t7", "t8", "t9"]


def test_a_failed_output_stops_the_others() -> None:
    """A full disk is raised at once; work that has not begun is left."""
    begun = 0
    lock = threading.Lock()

    def pieces() -> Iterator[threads.Work]:
        def work(buffer: memoryview) -> None:
            nonlocal begun
            with lock:
                begun += 1
            raise OutputError("full")

        for _ in range(1000):
            yield work

    with pytest.raises(OutputError, match="full"):
        threads.run(pieces(), 4)
    assert begun <= 4


@pytest.mark.parametrize("jobs", [1, 4])
def test_results_come_in_order(jobs: int) -> None:
    """Whoever is first, the sink sees the items as they were drawn, each with its own buffer."""
    numbers = iter(range(200))
    found: list[int] = []

    def draw(buffer: bytearray) -> tuple[int, bytearray] | None:
        number = next(numbers, None)
        if number is None:
            return None
        buffer[:] = bytes([number]) * (number + 1)  # grows from item to item
        return number, buffer

    def work(item: tuple[int, bytearray]) -> tuple[int, bytes]:
        return item[0], bytes(item[1])

    def sink(done: tuple[int, bytes]) -> None:
        assert done[1] == bytes([done[0]]) * (done[0] + 1)
        found.append(done[0])

    threads.in_order(draw, work, sink, jobs)
    assert found == list(range(200))


@pytest.mark.parametrize("where", ["draw", "work", "sink"])
def test_a_failure_anywhere_ends_the_line(where: str) -> None:
    """No thread waits for a turn that never comes."""
    numbers = iter(range(100))

    def fail(number: int) -> None:
        if number == 20:
            raise OutputError(where)

    def draw(buffer: bytearray) -> int | None:
        number = next(numbers, None)
        if where == "draw" and number is not None:
            fail(number)
        return number

    def work(number: int) -> int:
        if where == "work":
            fail(number)
        return number

    def sink(number: int) -> None:
        if where == "sink":
            fail(number)

    with pytest.raises(OutputError, match=where):
        threads.in_order(draw, work, sink, 4)


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "cast"),
    [("<f4", "bfloat16"), ("<f4", "float64"), (">f4", "bfloat16"), (">f8", "float32"), ("<f4", None), (">f4", None)],
)
def test_spans_of_one_tensor_find_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, cast: str | None, jobs: int
) -> None:
    """A tensor in many spans, whose elements grow, shrink or are swapped on the way, checksums on both sides."""
    monkeypatch.setattr(transfer, "SPAN_BYTES", 64 << 10)
    array = np.random.default_rng(3).integers(-9000, 9000, 150_001).astype(dtype)
    np.savez(tmp_path / "in.npz", w=array)
    name = array.dtype.name
    for target in ("out.safetensors", "out.npz"):
        convert.convert_file(
            tmp_path / "in.npz", tmp_path / target, cast=[(name, cast)] if cast else [], jobs=jobs, verify=True
        )
        expected = array.astype(getattr(ml_dtypes, cast) if cast == "bfloat16" else cast or array.dtype)
        found = convert.load(tmp_path / target)["w"]
        assert found.dtype == expected.dtype.newbyteorder("=")
        assert np.array_equal(found, expected)


def test_threads_within_a_piece_of_work_stop_with_those_around_it() -> None:
    """A tensor that all threads turn, tile by tile, does not go on to its end after Ctrl-C or a failure elsewhere."""
    began = threading.Event()
    done = 0

    def step(_: memoryview) -> None:
        nonlocal done
        done += 1
        began.set()

    def long(_: memoryview) -> None:
        for _tile in range(1 << 40):
            threads.run(iter([step] * 10), 2)

    def failing(_: memoryview) -> None:
        began.wait()
        raise OutputError("full")

    with pytest.raises(OutputError, match="full"):
        threads.run(iter([long, failing]), 2)
    assert done < 1 << 20


class Endless:
    """Data of a size that nobody could read to its end."""

    path = "endless"
    nbytes = size = 1 << 55

    def __init__(self) -> None:
        self.began = threading.Event()

    def chunks(self, chunk_bytes: int) -> Iterator[bytes]:
        for _ in range(0, self.nbytes, chunk_bytes):
            self.began.set()
            yield bytes(100)

    def readinto(self, _: int, view: memoryview) -> None:
        self.began.set()

    def read(self, _: int, count: int) -> bytes:
        return bytes(count)


@pytest.mark.parametrize("way", ["inflated", "stored", "span"])
def test_large_tensors_stop_in_the_middle(way: str) -> None:
    """Ctrl-C, and a failure elsewhere, do not wait until the tensors in hand have come to their end."""
    data = Endless()
    extent = Extent(data, 0, data.nbytes)

    def long(buffer: memoryview) -> None:
        if way == "span":
            pipe = Pipe(1, 1, ())
            transfer.copy_span(extent, pipe, 0, data.nbytes, lambda *_: None, 0, False, buffer, None)
        else:
            for _chunk in transfer.stored_chunks(extent if way == "stored" else data, 1 << 18):
                pass

    def failing(_: memoryview) -> None:
        data.began.wait()
        raise OutputError("full")

    with pytest.raises(OutputError, match="full"):
        threads.run(iter([long, failing]), 2)


@pytest.mark.parametrize("nbytes", [0, 1, 5000, threads.BUFFER_BYTES, (1 << 20) + 1])
def test_buffers(nbytes: int) -> None:
    """As long as asked for, zero, writable; the large ones begin with a page."""
    buffer = threads.new_buffer(nbytes)
    assert (len(buffer), buffer.format, buffer.readonly) == (nbytes, "B", False)
    assert bytes(buffer) == bytes(nbytes)
    if nbytes >= threads.BUFFER_BYTES:
        assert ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % mmap.PAGESIZE == 0
    buffer[:] = b"\xff" * nbytes


def test_memory_that_runs_out_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says so in its own way; whoever inflates or reads expects Python's."""

    def none(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", none)
    with pytest.raises(MemoryError):
        threads.new_buffer(1 << 20)
