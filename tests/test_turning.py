"""Fortran order in whole conversions: tensors of one tile, and large ones whose tiles are shared by all threads."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import convert
from convert import PolicyError, transpose, turning

SHAPES = [(64, 33), (3, 50, 7), (2, 3, 4, 5, 6), (500, 2), (2, 500), (1, 40, 1, 30)]


@pytest.fixture(params=["one tile", "shared tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors count as small, or as large: cut into many tiles, all threads at each."""
    if request.param == "shared tiles":
        monkeypatch.setattr(turning, "_SMALL_BYTES", 0)
        monkeypatch.setattr(turning, "_SHARED_BYTES", 2000)


def fortran(shape: tuple[int, ...], dtype: str = "f4") -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    values = np.random.default_rng(5).standard_normal(shape).astype(dtype)
    return np.asfortranarray(values)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("source", ["npy", "npz", "deflated"])
def test_every_shape_in_either_byte_order(tmp_path: Path, source: str, jobs: int) -> None:
    """Values, and in an npz the checksum that is taken from what was written out of order, are numpy's."""
    arrays = {f"{code}{index}": fortran(shape, code) for index, shape in enumerate(SHAPES) for code in ("<f4", ">f8")}
    if source == "npy":
        path = tmp_path / "in"
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
    else:
        path = tmp_path / "in.npz"
        (np.savez if source == "npz" else np.savez_compressed)(path, **arrays)  # type: ignore[arg-type]
    convert.convert_file(path, tmp_path / "out.safetensors", jobs=jobs)
    convert.convert_file(path, tmp_path / "out.npz", order="C", jobs=jobs)
    stored = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    with np.load(tmp_path / "out.npz") as archive:
        for name, array in arrays.items():
            assert stored[name].tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes("C")
            assert archive[name].flags.c_contiguous
            assert np.array_equal(archive[name], array)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("jobs", [1, 4])
def test_casts_on_the_way(tmp_path: Path, jobs: int) -> None:
    """Elements change their size between what is read and what is written."""
    array = fortran((70, 31, 5))
    np.save(tmp_path / "in.npy", array)
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float64", np.float64)):
        out = tmp_path / f"{name}.safetensors"
        convert.convert_file(tmp_path / "in.npy", out, cast=[("float32", name)], jobs=jobs)
        assert convert.load(out)["in"].tobytes() == array.astype(dtype).tobytes("C")


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("jobs", [1, 4])
def test_a_value_that_stops_the_run_is_named(tmp_path: Path, jobs: int) -> None:
    """A refusal in one strip names the tensor and the element's place in it, and leaves nothing."""
    array = fortran((70, 31))
    array[69, 26] = 1e30
    np.save(tmp_path / "in.npy", array)
    with pytest.raises(PolicyError, match=r"in\.npy: tensor 'in': .* at element 2165\n"):
        convert.convert_file(
            tmp_path / "in.npy", tmp_path / "out.safetensors", cast=[("float32", "float16")], jobs=jobs
        )
    assert [path.name for path in tmp_path.iterdir()] == ["in.npy"]


def test_large_tensors_wait_for_one_another_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large tensors, one is in memory at a time: tiles of two are never held together."""
    monkeypatch.setattr(turning, "_SMALL_BYTES", 0)
    monkeypatch.setattr(turning, "_SHARED_BYTES", 2000)
    held: list[bool] = []
    load = transpose.Turner.load

    def watched(self: transpose.Turner, *arguments: object) -> object:
        held.append(turning._large.locked())
        return load(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(transpose.Turner, "load", watched)
    np.savez(tmp_path / "in.npz", **{f"w{index}": fortran((40, 30)) for index in range(6)})  # type: ignore[arg-type]
    convert.convert_file(tmp_path / "in.npz", tmp_path / "out.safetensors", jobs=4)
    assert len(held) > 6
    assert all(held)
    assert not turning._large.locked()
