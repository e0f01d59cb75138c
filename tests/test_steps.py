"""Swapping bytes: whole buffers in place, ends of tensors in pieces, every width."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
from convert.steps import Swapper
from convert.threads import BUFFER_BYTES

from . import oracle


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("target", ["out.safetensors", "out.npz"])
def test_large_big_endian_tensors_are_exact(tmp_path: Path, target: str, jobs: int) -> None:
    """Every width, with sizes around a buffer and around a span of several."""
    random = np.random.default_rng(3)
    arrays = {}
    for dtype in (">f2", ">i4", ">f8", ">c8", ">u8"):
        width = np.dtype(dtype).itemsize
        for count in (
            BUFFER_BYTES // width - 1,
            BUFFER_BYTES // width,
            3 * BUFFER_BYTES // width + 5,
            (17 << 20) // width,
        ):
            raw = random.integers(0, 256, count * width, dtype=np.uint8)
            arrays[f"{dtype} {count}"] = raw.view(dtype)
    np.savez(tmp_path / "in.npz", **arrays)  # type: ignore[arg-type]
    convert.convert_file(tmp_path / "in.npz", tmp_path / target, jobs=jobs)
    if target == "out.npz":
        with np.load(tmp_path / target) as loaded:
            found = {name: loaded[name].tobytes() for name in loaded.files}
    else:
        found = {name: row[2] for name, row in oracle.read_safetensors(tmp_path / target)[1].items()}
    assert found == {name: oracle.canonical(array) for name, array in arrays.items()}


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_buffer_swaps_itself(width: int) -> None:
    """What was read into the view is swapped where it is."""
    swapper = Swapper(width, 64)
    raw = bytes(range(64))
    swapper.view[:] = raw
    swapper.swap()
    assert bytes(swapper.view) == np.frombuffer(raw, f"u{width}").byteswap().tobytes()
