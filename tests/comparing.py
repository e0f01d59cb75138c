"""Two arrays as files, and what their comparison found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import convert
from convert.comparison import Tally
from tests.oracle import SAFETENSORS_CODES, save_with_reference

Array = npt.NDArray[Any]
SAMPLES = Path(__file__).resolve().parent.parent / "samples"
needs_x87 = pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="numpy's long double is not x87 here")


def write(path: Path, arrays: dict[str, Array]) -> Path:
    """A file by numpy or the safetensors library; by convert.save for types that library does not write."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    elif path.suffix == ".npy":
        np.save(path, next(iter(arrays.values())))
    elif any(array.dtype.name.startswith("float6_") for array in arrays.values()):
        convert.save(arrays, path, overwrite=True)
    else:
        save_with_reference(path, arrays)
    return path


def compared(tmp_path: Path, a: Array, b: Array, **options: Any) -> convert.Comparison:
    """Two arrays of one name, each in the format that has its type."""
    paths = [
        write(tmp_path / f"{side}{'.safetensors' if array.dtype.name in SAFETENSORS_CODES else '.npz'}", {"w": array})
        for side, array in (("a", a), ("b", b))
    ]
    return convert.diff(*paths, **options)


def tally(found: convert.Comparison) -> Tally:
    """That of the only tensor that differs."""
    (difference,) = [*found.differences, *found.tolerated]
    assert difference.tally is not None
    return difference.tally


def whats(found: convert.Comparison) -> dict[str, tuple[str, ...]]:
    """In what each tensor differs."""
    return {difference.name: difference.what for difference in found.differences}
