"""`--verify`: what reads back other than it was planned is not kept; what does not is told by its digest."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convert
from convert import api
from convert.output import OutputFile
from convert.tensor import Checkpoint, Tensor

BITS = np.random.default_rng(7).integers(0, 1 << 16, (300, 700), np.uint16)
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "large": np.random.default_rng(1).integers(0, 255, 5_000_000, np.uint8),
    "turned": np.asfortranarray(np.arange(210_000, dtype=">f8").reshape(300, 700)),
    "half": (BITS & 0x3FFF).view(ml_dtypes.bfloat16),
    "none": np.zeros((0, 3), np.int32),
    **{f"small{index}": np.full(9, index, np.int16) for index in range(40)},
}
TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("out.npz", {}),
    ("out.npz", {"compress": 1}),
    ("out.npz", {"order": "keep", "byteorder": "keep"}),
    ("out.safetensors", {}),
    ("out.safetensors", {"max_shard_size": 2_000_000}),
    ("out/", {}),
]
ways = pytest.mark.parametrize(("target", "options"), TARGETS)
threads = pytest.mark.parametrize("jobs", [1, 4])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Large and small, one in Fortran order and big-endian, one bfloat16."""
    folder = tmp_path / "source"
    folder.mkdir()
    np.savez(folder / "in.npz", **ARRAYS)  # type: ignore[arg-type]
    return folder / "in.npz"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where targets go."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def flip(monkeypatch: pytest.MonkeyPatch, *needles: bytes) -> None:
    """A disk that turns the last bit of these bytes wherever they stand in what is written."""
    real = OutputFile.write_at

    def faulty(self: OutputFile, offset: int, data: Any) -> None:
        content = bytearray(data)
        for needle in needles:
            at = content.find(needle)
            if at >= 0:
                content[at + len(needle) - 1] ^= 1
        real(self, offset, content)

    monkeypatch.setattr(OutputFile, "write_at", faulty)


@ways
@threads
def test_digests_are_those_of_the_elements(
    source: Path, out: Path, target: str, options: dict[str, Any], jobs: int
) -> None:
    """SHA-256 of the little-endian row-major bytes, as numpy has them, in the source's order."""
    report = convert.convert_file(source, f"{out}/{target}", verify=True, jobs=jobs, **options)
    assert report.verified
    assert [tensor.name for tensor in report.tensors] == list(ARRAYS)
    for tensor in report.tensors:
        array = ARRAYS[tensor.name]
        plain = array if array.dtype == ml_dtypes.bfloat16 else array.astype(array.dtype.newbyteorder("<"))
        assert tensor.sha256 == hashlib.sha256(plain.tobytes()).hexdigest()


@pytest.mark.parametrize(("target", "options"), [TARGETS[0], *TARGETS[3:]])
@threads
def test_a_flipped_bit_is_not_kept(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, target: str, options: dict[str, Any], jobs: int
) -> None:
    """All tensors that it hit are named, each once, whatever the threads; an old target stays."""
    flip(monkeypatch, ARRAYS["large"][3_000_000:3_000_040].tobytes(), ARRAYS["small7"].tobytes())
    with pytest.raises(convert.CorruptError) as caught:
        convert.convert_file(source, f"{out}/{target}", verify=True, jobs=jobs, **options)
    assert sorted(problem.tensor or "" for problem in caught.value.problems) == ["large", "small7"]
    assert list(out.iterdir()) == []


@threads
def test_a_tensor_that_reads_back_under_another_name_is_missed(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    """The message says that nothing was found."""
    flip(monkeypatch, b'"half')
    with pytest.raises(
        convert.CorruptError, match=r"'half': the target reads back different \(expected .*, found None"
    ):
        convert.convert_file(source, out / "out.safetensors", verify=True, jobs=jobs)
    assert list(out.iterdir()) == []


def test_a_tensor_too_many_is_noticed(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that were planned read back right, and one that was not planned."""
    real = api.open

    def more(path: Any, **options: Any) -> Checkpoint:
        checkpoint = real(path, **options)
        if checkpoint.format == "safetensors":  # it is what was written
            checkpoint.tensors.append(checkpoint.tensors[0].changed(name="more"))
        return checkpoint

    monkeypatch.setattr(api, "open", more)
    with pytest.raises(convert.CorruptError, match="with other tensors"):
        convert.convert_file(source, out / "out.safetensors", verify=True)
    assert list(out.iterdir()) == []


@ways
@threads
def test_progress_counts_what_is_read_back(
    source: Path, out: Path, target: str, options: dict[str, Any], jobs: int
) -> None:
    """From something to twice the bytes, rising; reading back is the second half."""
    seen: list[tuple[int, int]] = []
    report = convert.convert_file(
        source, f"{out}/{target}", verify=True, jobs=jobs, progress=lambda *now: seen.append(now[:2]), **options
    )
    total = 2 * sum(tensor.nbytes for tensor in report.tensors)
    counts = [done for done, _ in seen]
    assert counts == sorted(counts)
    assert {whole for _, whole in seen} == {total}
    assert total <= counts[-1] <= total * 1.01  # headers of small members may be counted with them


@ways
@threads
def test_reading_back_can_be_cancelled(
    source: Path, out: Path, target: str, options: dict[str, Any], jobs: int
) -> None:
    """By an exception of the callback, as the writing can."""

    def watch(done: int, total: int, _: str) -> None:
        if done > total * 0.7:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        convert.convert_file(source, f"{out}/{target}", verify=True, jobs=jobs, progress=watch, **options)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("order", ["C", "keep"])
def test_tensors_that_are_turned_are_read_by_one_thread(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Each takes the memory that all may have."""
    arrays = {f"w{index}": np.asfortranarray(np.ones((90, 70))) for index in range(9)}
    np.savez(tmp_path / "in.npz", **arrays)  # type: ignore[arg-type]
    real = Tensor.chunks
    readers: set[int] = set()

    def chunks(self: Tensor, *sizes: int) -> Any:
        if self.stored_fortran:
            readers.add(threading.get_ident())
        return real(self, *sizes)

    monkeypatch.setattr(Tensor, "chunks", chunks)
    assert convert.convert_file(tmp_path / "in.npz", out / "out.npz", verify=True, jobs=4, order=order).verified
    assert readers == {threading.get_ident()}
