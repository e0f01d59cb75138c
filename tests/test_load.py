"""Arrays in memory: `convert.load` and `Tensor.numpy`, by one thread and by several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert import transfer


@pytest.mark.parametrize("jobs", [None, 1, 4])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_load_with_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any, jobs: int | None) -> None:
    """Large in many spans and small, turned, swapped, records, empty: as numpy has them, in the order of the file."""
    monkeypatch.setattr(transfer, "SPAN_BYTES", 64 << 10)
    values = np.random.default_rng(5).standard_normal(200_000)
    arrays: dict[str, Any] = {
        "large": values,
        "turned": np.asfortranarray(values.reshape(400, 500)),
        "big": values.astype(">f4"),
        "records": np.array([(1, 2.5)], [("a", ">i2"), ("b", "<f8")]),
        "strings": np.array(["ä", "bc"]),
        "no letters": np.zeros(3, "S0"),
        "none": np.zeros((0, 3)),
        "number": np.array(7),
        **{f"small{index}": np.full(9, index, np.int16) for index in range(30)},
    }
    save(tmp_path / "in.npz", **arrays)
    found = convert.load(tmp_path / "in.npz", jobs=jobs)
    assert list(found) == list(arrays)
    with convert.open(tmp_path / "in.npz") as checkpoint:
        for name, array in arrays.items():
            for one in (found[name], checkpoint[name].numpy()):
                assert one.dtype == array.dtype.newbyteorder("=")
                assert one.flags.c_contiguous
                assert one.flags.writeable
                assert one.shape == array.shape
                assert np.array_equal(one, array)


@pytest.mark.parametrize("jobs", [1, 4])
def test_load_names_all_that_is_damaged(tmp_path: Path, jobs: int) -> None:
    """Together, and no array comes back."""
    np.savez(tmp_path / "in.npz", a=np.arange(9.0), b=np.arange(70_000.0), c=np.arange(9.0))
    data = bytearray((tmp_path / "in.npz").read_bytes())
    data[data.index(np.float64(7).tobytes())] ^= 1
    data[data.index(np.float64(60_000).tobytes())] ^= 1
    (tmp_path / "in.npz").write_bytes(data)
    with pytest.raises(convert.CorruptError) as caught:
        convert.load(tmp_path / "in.npz", jobs=jobs)
    assert [problem.tensor for problem in caught.value.problems] == ["a", "b"]


def test_load_refuses_no_threads(tmp_path: Path) -> None:
    """Before the file is looked at."""
    with pytest.raises(convert.UsageError, match="jobs"):
        convert.load(tmp_path / "absent.npz", jobs=0)
