"""Arrays of the real MLX, to files that MLX reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert

mx: Any = pytest.importorskip("mlx.core")

TYPES = [
    "float32", "float16", "bfloat16", "bool_", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "complex64",
]  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_every_type(tmp_path: Path, name: str) -> None:
    """Transposed, strided, without dimensions, empty: MLX loads the same values and types."""
    base = mx.arange(12).reshape(3, 4).astype(getattr(mx, name))
    made = {"t": base.T, "s": base[::2, 1::2], "0": base[1, 1], "e": base[:0]}
    convert.save(made, tmp_path / "a.safetensors")
    back = mx.load(str(tmp_path / "a.safetensors"))
    for key, array in made.items():
        assert (back[key].dtype, back[key].shape) == (array.dtype, array.shape)
        assert mx.array_equal(back[key], array).item()


def test_trees_and_tied_arrays(tmp_path: Path) -> None:
    """`model.parameters()` is a tree."""
    shared = mx.ones((3, 3))
    report = convert.save({"a": shared, "b": {"c": shared}}, tmp_path / "a.npz")
    assert report.notes == ["'a', 'b.c' share their memory (tied weights); each is written in full"]
    assert sorted(mx.load(str(tmp_path / "a.npz"))) == ["a", "b.c"]


def test_a_streaming_writer_takes_arrays(tmp_path: Path) -> None:
    array = mx.arange(20).reshape(5, 4).astype(mx.bfloat16)
    with convert.writer(tmp_path / "a.safetensors", {"w": array}) as out:
        for at in range(5):
            out.write("w", array[at])
    assert mx.array_equal(mx.load(str(tmp_path / "a.safetensors"))["w"], array).item()


def test_what_is_loaded_goes_back_into_mlx(tmp_path: Path) -> None:
    """As docs/pipelines.md has it."""
    array = mx.array([1.5, -2.5]).astype(mx.bfloat16)
    mx.save_safetensors(str(tmp_path / "a.safetensors"), {"w": array})
    found = convert.load(tmp_path / "a.safetensors")["w"]
    assert mx.array_equal(mx.array(found.view(np.uint16)).view(mx.bfloat16), array).item()
