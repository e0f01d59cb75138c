"""Make one input file; run as a program, so that the measuring process never holds the arrays.

    python -m benchmarks.inputs NAME PATH [DIVISOR]

NAME is a key of `BUILDERS`, or `COUNTxBYTES.npz`, `COUNTxBYTES.safetensors` for COUNT float32 tensors of BYTES each.
The sizes named there are divided by DIVISOR. Values are seeded: the same name gives the same file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

import convert

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

MIB = 1 << 20
_ROW = 1024
"""Elements in a row of most tensors here."""


def weights(count: int, seed: int = 1) -> npt.NDArray[np.float32]:
    """Values as in a trained layer: normal, small, all mantissa bits in use."""
    values = np.random.default_rng(seed).standard_normal(count, np.float32)
    values *= np.float32(0.02)
    return values


def layers(values: Array, count: int) -> Arrays:
    """Cut values into `count` matrices of uneven sizes, as views."""
    rows = values.reshape(-1, min(_ROW, max(1, values.size // count)))
    edges = np.rint(np.linspace(0, 1, count + 1) ** 1.5 * len(rows)).astype(int).tolist()
    return {f"model.layers.{index}.weight": rows[begin:end] for index, (begin, end) in enumerate(pairwise(edges))}


def even(count: int, nbytes: int) -> Arrays:
    """`count` float32 tensors of `nbytes` each, as views of one array."""
    values = weights(count * (nbytes // 4)).reshape(count, -1)
    return {f"model.layers.{index // 10}.part.{index % 10}.weight": row for index, row in enumerate(values)}


def _hundred(divisor: int) -> Arrays:
    """1 GiB in 100 tensors."""
    return layers(weights(256 * MIB // divisor), 100)


def _one(nbytes: int) -> Arrays:
    return {"weight": weights(nbytes // 4).reshape(-1, _ROW)}


def _savez(path: Path, arrays: Arrays) -> None:
    np.savez(path, **arrays)  # type: ignore[arg-type]  # the stub takes the names for options of its own


def _tensors_npz(path: Path, divisor: int) -> None:
    _savez(path, _hundred(divisor))


def _tensors_safetensors(path: Path, divisor: int) -> None:
    save_file(_hundred(divisor), path)


def _aligned_safetensors(path: Path, divisor: int) -> None:
    convert.save(_hundred(divisor), path, align=4096)


def _tensors_folder(path: Path, divisor: int) -> None:
    path.mkdir()
    for name, array in _hundred(divisor).items():
        np.save(path / f"{name}.npy", array)


def _big_endian_npz(path: Path, divisor: int) -> None:
    _savez(path, {name: array.astype(">f4") for name, array in _hundred(divisor).items()})


def _one_npy(path: Path, divisor: int) -> None:
    np.save(path, _one(1024 * MIB // divisor)["weight"])


def _large_safetensors(path: Path, divisor: int) -> None:
    save_file(_one(2048 * MIB // divisor), path)


def _bfloat16_safetensors(path: Path, divisor: int) -> None:
    save_file(layers(weights(256 * MIB // divisor).astype(ml_dtypes.bfloat16), 100), path)


def _weights_safetensors(path: Path, divisor: int) -> None:
    save_file(layers(weights(128 * MIB // divisor), 16), path)


def _rounded_safetensors(path: Path, divisor: int) -> None:
    """float32 that came from bfloat16: the lower half of every element is zero."""
    save_file(layers(weights(16 * MIB // divisor).astype(ml_dtypes.bfloat16).astype(np.float32), 16), path)


def _indices_safetensors(path: Path, divisor: int) -> None:
    values = np.random.default_rng(2).integers(0, 50_000, 8 * MIB // divisor, np.int64)
    save_file(layers(values, 16), path)


def _deflated_npz(path: Path, divisor: int) -> None:
    np.savez_compressed(path, **layers(weights(128 * MIB // divisor), 16))  # type: ignore[arg-type]  # as above


def _many_npz(path: Path, divisor: int) -> None:
    _savez(path, even(100_000 // divisor, 256))


def _fortran_npy(path: Path, divisor: int) -> None:
    side = round(divisor**0.5)
    np.save(path, np.asfortranarray(weights((16384 // side) * (8192 // side)).reshape(16384 // side, -1)))


def _tiny_npz(path: Path, divisor: int) -> None:
    _savez(path, {"weight": weights(128)})


BUILDERS: dict[str, Callable[[Path, int], None]] = {
    "tensors.npz": _tensors_npz,
    "tensors.safetensors": _tensors_safetensors,
    "aligned.safetensors": _aligned_safetensors,
    "tensors": _tensors_folder,
    "big-endian.npz": _big_endian_npz,
    "one.npy": _one_npy,
    "large.safetensors": _large_safetensors,
    "bfloat16.safetensors": _bfloat16_safetensors,
    "weights.safetensors": _weights_safetensors,
    "rounded.safetensors": _rounded_safetensors,
    "indices.safetensors": _indices_safetensors,
    "deflated.npz": _deflated_npz,
    "many.npz": _many_npz,
    "fortran.npy": _fortran_npy,
    "tiny.npz": _tiny_npz,
}


def build(name: str, path: Path, divisor: int = 1) -> None:
    """Make the input of that name; it gets its path when it is complete."""
    part = path.with_name("part-" + path.name)  # numpy insists on the suffix
    if sized := re.fullmatch(r"([0-9]+)x([0-9]+)\.(npz|safetensors)", name):
        arrays = even(int(sized[1]), int(sized[2]))
        if sized[3] == "npz":
            _savez(part, arrays)
        else:
            save_file(arrays, part)
    else:
        BUILDERS[name](part, divisor)
    part.rename(path)


def main(arguments: list[str]) -> None:
    """`NAME PATH [DIVISOR]`."""
    name, path, *divisor = arguments
    build(name, Path(path), *map(int, divisor))


if __name__ == "__main__":
    main(sys.argv[1:])
