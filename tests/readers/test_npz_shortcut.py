"""The short cut for plain members says exactly what the strict path says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.tensor import Extent, Tensor
from readers import npz

ROOT = Path(__file__).resolve().parents[2]
ARCHIVES = sorted([*ROOT.glob("samples/*.npz"), *ROOT.glob("tests/cases/files/*.npz")])


def facts(tensor: Tensor) -> tuple[Any, ...]:
    data = tensor.data
    place = (data.offset, data.nbytes, data.crc, data.seed) if isinstance(data, Extent) else (data.nbytes,)
    problem = None if tensor.problem is None else str(tensor.problem)
    return (tensor.name, tensor.dtype, tensor.shape, place, tensor.stored_big, tensor.stored_fortran, problem)


def outcome(path: Path) -> list[tuple[Any, ...]] | str:
    try:
        with npz.open(path) as checkpoint:
            return [facts(tensor) for tensor in checkpoint.tensors]
    except convert.ConvertError as err:
        return str(err)


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.name)
def test_both_paths_agree_on_every_archive(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, types, places, checksums and problems are the same with and without the short cut."""
    short = outcome(path)
    monkeypatch.setattr(npz, "_plain", lambda *_: None)
    assert outcome(path) == short


def test_both_paths_agree_on_damaged_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every single damaged byte of the headers of an archive gives the same outcome on both paths."""
    path = tmp_path / "a.npz"
    np.savez(path, w=np.arange(6, dtype="<f4").reshape(2, 3), v=np.arange(400, dtype=">i2"))
    good = path.read_bytes()
    for position in [*range(300), *range(len(good) - 200, len(good))]:
        for bit in (0, 5, 7):
            damaged = bytearray(good)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            short = outcome(path)
            with monkeypatch.context() as patch:
                patch.setattr(npz, "_plain", lambda *_: None)
                assert outcome(path) == short, (position, bit)


def test_the_short_cut_is_taken(tmp_path: Path) -> None:
    """What np.savez writes needs no second look."""
    path = tmp_path / "a.npz"
    np.savez(path, w=np.arange(600, dtype="<f4"))
    taken = []
    original = npz._plain

    def watched(*args: Any) -> Any:
        taken.append(original(*args))
        return taken[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npz, "_plain", watched)
        npz.open(path).close()
    assert len(taken) == 1
    assert taken[0] is not None
