"""The round-trip matrix: every reader x every writer x every type x byte order x memory order x shape.

`ROWS` says for each type what has to come out: the bytes under which type, or a refusal and the policy kind that
speaks for it. Sources are written by numpy, ml_dtypes and safetensors, targets read by numpy and `tests.oracle`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import convert

from . import oracle
from .strategies import CANONICAL_NAMES, FLOAT8_NAMES, NUMPY_NAMES, SUBBYTE_NAMES, dtype_of, laid_out, with_bytes

Array = npt.NDArray[Any]
HAS_X87 = np.finfo(np.longdouble).nmant == 63 and np.dtype(np.longdouble).itemsize == 16
RECORD = [("a", ">i2"), ("b", "<f4", (2,)), ("c", [("d", ">u8"), ("e", "S3")])]

READERS = ("npy", "folder", "npz", "npz-deflated", "safetensors")
WRITERS = ("npy", "folder", "npz", "npz-deflated", "safetensors")
SHAPES = {"0d": (), "empty": (0,), "empty3d": (3, 0, 2), "one": (1,), "2d": (2, 4), "3d": (3, 2, 4)}


@dataclass(frozen=True)
class Row:
    """One type: what it has to become, by source and target.

    'numpy' stands for npy, npz and folders of npy; each outcome is a npy type string, a safetensors code, a refusal
    'refused KIND', or '' where the source format has no such type.
    """

    numpy_to_numpy: str
    numpy_to_safetensors: str
    safetensors_to_numpy: str = ""
    safetensors_to_safetensors: str = ""


def _canonical_row(name: str) -> Row:
    code = oracle.SAFETENSORS_CODES.get(name, "")
    if name in NUMPY_NAMES:
        return Row(dtype_of(name).str, code, dtype_of(name).str, code)
    if name == "bfloat16":
        return Row("|V2", code, "|V2", code)  # numpy shows the <V2 of the header as |V2
    if name == "float8_e5m2":  # the one 8-bit float that its npy header names (<f1)
        return Row("|V1", code, "|V1", code)
    if name in FLOAT8_NAMES:
        return Row("|V1", "refused V1", "|V1", code)
    if name in SUBBYTE_NAMES:
        return Row("|V1", "refused V1", "refused subbyte", code)
    assert name == "complex128"
    return Row("<c16", "refused complex128")


ROWS: dict[str, Row] = {
    **{name: _canonical_row(name) for name in CANONICAL_NAMES},
    "datetime64[ns]": Row("<M8[ns]", "refused datetime64"),
    "datetime64": Row("<M8", "refused datetime64"),
    "timedelta64[25s]": Row("<m8[25s]", "refused timedelta64"),
    "timedelta64": Row("<m8", "refused timedelta64"),
    "S5": Row("|S5", "refused bytes"),
    "U3": Row("<U3", "refused str"),
    "V2": Row("|V2", "BF16"),
    "V1": Row("|V1", "refused V1"),
    "V5": Row("|V5", "refused void"),
    "structured": Row("record", "refused structured"),
    "longdouble": Row("<f16", "F64"),
    "clongdouble": Row("<c32", "refused complex128"),  # exact gives complex128, which has to be decided on too
    "longdouble_inexact": Row("<f16", "refused longdouble"),
    "object": Row("refused object", "refused object"),
}
HAS_BYTE_ORDER = (
    *NUMPY_NAMES,
    "complex128",
    "bfloat16",
    *(row for row in ROWS if row.startswith(("date", "time", "U"))),
)
X87_ROWS = ("longdouble", "clongdouble", "longdouble_inexact")
_X87 = pytest.mark.skipif(not HAS_X87, reason="np.longdouble is not x87 in 16 bytes here")


def make(row: str, shape: tuple[int, ...], seed: int) -> Array:
    """An array of a row's type, little-endian and row-major, of arbitrary bits."""
    if row == "object":
        found = np.empty(shape, object)
        found.fill(seed)
        return found
    if row in X87_ROWS:
        pair = row == "clongdouble"
        values = np.random.default_rng(seed).standard_normal((*shape, 2) if pair else shape)
        wide = np.asarray(values, np.longdouble)
        if row == "longdouble_inexact":
            wide = np.asarray(np.abs(wide) + 4 * np.finfo(np.longdouble).eps)
        raw = np.frombuffer(wide.tobytes(), np.uint8).reshape(-1, 16).copy()
        raw[:, 10:] = 0  # numpy leaves stray memory there
        return raw.reshape(-1).view(np.clongdouble if pair else np.longdouble).reshape(shape)
    dtype = np.dtype(RECORD) if row == "structured" else dtype_of(row)
    if row in SUBBYTE_NAMES and shape:
        shape = (*shape[:-1], shape[-1] * 4)
    return with_bytes(dtype, shape, seed)


def variants(row: str) -> dict[str, Array]:
    """Every shape in both byte orders and both memory orders, each under a name that tells which it is."""
    found = {}
    for number, (shape_name, shape) in enumerate(SHAPES.items()):
        little = make(row, shape, number)
        for order in ("little", "big") if little.dtype.itemsize > 1 and row in HAS_BYTE_ORDER else ("little",):
            array = little.astype(little.dtype.newbyteorder(">")) if order == "big" else little
            for layout in ("C", "Fortran") if len(shape) > 1 else ("C",):
                found[f"{shape_name}_{order}_{layout}"] = laid_out(array, layout)
    return found


def write_safetensors(path: Path, row: str, arrays: Mapping[str, Array]) -> None:
    """Through the reference library; it writes no float6 from Python, and no 0-d float4 exists."""
    if not row.startswith("float6"):
        oracle.save_with_reference(path, arrays)
        return
    header: dict[str, Any] = {}
    body = b""
    for name, array in arrays.items():
        data = packed(array)
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": oracle.SAFETENSORS_CODES[row], "shape": list(array.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def packed(array: Array) -> bytes:
    """The bytes a safetensors file has for an array: sub-byte codes packed from the low bits up."""
    data = oracle.canonical(array)
    bits = oracle.CODE_BITS.get(oracle.SAFETENSORS_CODES.get(array.dtype.name, ""), 8)
    if bits == 8 or array.dtype.name not in SUBBYTE_NAMES:
        return data
    joined = sum(code << bits * index for index, code in enumerate(data))
    return joined.to_bytes(len(data) * bits // 8, "little")


def write_source(reader: str, folder: Path, row: str, arrays: Mapping[str, Array]) -> list[tuple[Path, list[str]]]:
    """The sources to convert, and the names in each."""
    if reader == "npy":
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        return [(folder / f"{name}.npy", [name]) for name in arrays]
    path = folder / "source"
    if reader == "folder":
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
    elif reader == "safetensors":
        path = path.with_suffix(".safetensors")
        write_safetensors(path, row, arrays)
    else:
        path = path.with_suffix(".npz")
        save: Any = np.savez if reader == "npz" else np.savez_compressed
        save(path, **arrays)
    return [(path, list(arrays))]


def target_of(writer: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    suffix = {"npz-deflated": ".npz", "folder": ""}.get(writer, f".{writer}")
    options: dict[str, Any] = {"compress": True} if writer == "npz-deflated" else {}
    return folder / f"out{suffix}", {"overwrite": True, **options, **({"to": "npy"} if writer == "folder" else {})}


def read_numpy(writer: str, target: Path, names: list[str]) -> dict[str, Array]:
    if writer == "npy":
        return {names[0]: np.load(target)}
    if writer == "folder":
        return {path.stem: np.load(path) for path in sorted(target.iterdir())}
    with np.load(target) as archive:
        return {name: archive[name] for name in archive.files}


def expected_bytes(array: Array, outcome: str) -> bytes:
    if outcome == "F64":
        return oracle.canonical(array.astype(np.float64))
    return oracle.canonical(array)


def cells() -> list[Any]:
    found = []
    for row in ROWS:
        for reader in READERS:
            for writer in WRITERS:
                if (outcome := outcome_of(row, reader, writer)) != "":
                    marks = [_X87] if row in X87_ROWS else []
                    name = f"{reader}-{writer}-{row}-{outcome.replace(' ', '-')}"
                    found.append(pytest.param(row, reader, writer, outcome, id=name, marks=marks))
    return found


def outcome_of(row: str, reader: str, writer: str) -> str:
    before = "safetensors" if reader == "safetensors" else "numpy"
    after = "safetensors" if writer == "safetensors" else "numpy"
    return str(getattr(ROWS[row], f"{before}_to_{after}"))


@pytest.mark.parametrize(("row", "reader", "writer", "outcome"), cells())
def test_cell(row: str, reader: str, writer: str, outcome: str, tmp_path: Path) -> None:
    """This type from this reader to this writer: exactly these bytes, or refused by this kind with nothing written."""
    arrays = variants(row)
    if reader == "safetensors":
        arrays = {name: array for name, array in arrays.items() if array.ndim or row not in SUBBYTE_NAMES}
    target, options = target_of(writer, tmp_path)
    for source, names in write_source(reader, tmp_path, row, arrays):
        wanted = [[name] for name in names] if writer == "npy" else [names]
        for include in wanted:
            chosen = {name: arrays[name] for name in include}
            before = source.read_bytes() if source.is_file() else b""
            if outcome.startswith("refused"):
                check_refusal(outcome.removeprefix("refused "), source, target, chosen, include=include, **options)
            else:
                convert.convert_file(source, target, include=include, **options)
                check_output(row, writer, outcome, target, chosen)
            assert not before or source.read_bytes() == before, "the source was changed"


def check_refusal(kind: str, source: Path, target: Path, chosen: Mapping[str, Array], **options: Any) -> None:
    if kind == "longdouble":  # one that is not there survives any conversion
        chosen = {name: array for name, array in chosen.items() if array.size}
        if not chosen:
            return
    with pytest.raises(convert.PolicyError) as caught:
        convert.convert_file(source, target, **{**options, "include": list(chosen)})
    assert {problem.tensor for problem in caught.value.problems} == chosen.keys()
    for problem in caught.value.problems:
        assert kind in f"{problem.message} {problem.hint}", str(problem)
    assert not target.exists()
    assert not [path for path in target.parent.iterdir() if path.name.startswith(".")], "something was left behind"


def check_output(row: str, writer: str, outcome: str, target: Path, chosen: Mapping[str, Array]) -> None:
    if writer == "safetensors":
        metadata, tensors = oracle.read_safetensors(target)
        assert metadata == {}
        wanted = {
            name: (outcome, array.shape, packed(array) if row in SUBBYTE_NAMES else expected_bytes(array, outcome))
            for name, array in chosen.items()
        }
        assert tensors == wanted
        return
    found = read_numpy(writer, target, list(chosen))
    assert found.keys() == chosen.keys()
    for name, array in chosen.items():
        got = found[name]
        assert got.shape == array.shape, name
        assert got.flags.c_contiguous, name
        assert oracle.canonical(got) == expected_bytes(array, outcome), name
        if outcome == "record":
            assert got.dtype == np.dtype(RECORD).newbyteorder("<"), name
        else:
            assert got.dtype.str == outcome, name


NUMPY_ONLY_READERS = READERS[:-1]
NUMPY_ONLY_WRITERS = WRITERS[:-1]


@pytest.mark.parametrize("row", ["uint8", "int16", "complex64", "complex128", "datetime64[ns]", "U3"])
@pytest.mark.parametrize("reader", NUMPY_ONLY_READERS)
@pytest.mark.parametrize("writer", NUMPY_ONLY_WRITERS)
def test_byte_order_is_as_asked(row: str, reader: str, writer: str, tmp_path: Path) -> None:
    """numpy finds the byte order that was asked for, and the same values; `keep` is the source's."""
    arrays = {name: array for name, array in variants(row).items() if name.startswith(("0d", "empty_", "2d"))}
    sources = write_source(reader, tmp_path, row, arrays)
    for byteorder in ("little", "big", "native", "keep"):
        for name, got in converted(sources, writer, arrays, tmp_path, byteorder=byteorder).items():
            order = arrays[name].dtype.str[0] if byteorder == "keep" else {"big": ">"}.get(byteorder, "<")
            assert got.dtype.str[0] == ("|" if row == "uint8" else order), name
            assert got.dtype.newbyteorder("<") == arrays[name].dtype.newbyteorder("<"), name
            assert got.flags.c_contiguous, name


@pytest.mark.parametrize("row", ["uint8", "float32", "complex64", "bfloat16", "structured", "S5", "V5"])
@pytest.mark.parametrize("reader", NUMPY_ONLY_READERS)
@pytest.mark.parametrize("writer", NUMPY_ONLY_WRITERS)
def test_memory_order_is_kept_when_asked(row: str, reader: str, writer: str, tmp_path: Path) -> None:
    """`order=keep` leaves Fortran order Fortran, and only that, with every value where it was."""
    arrays = {name: array for name, array in variants(row).items() if not name.startswith("one")}
    sources = write_source(reader, tmp_path, row, arrays)
    for byteorder in ("little", "keep"):
        for name, got in converted(sources, writer, arrays, tmp_path, order="keep", byteorder=byteorder).items():
            assert got.flags.c_contiguous == arrays[name].flags.c_contiguous, name
            assert got.flags.f_contiguous == arrays[name].flags.f_contiguous, name
            if row == "structured" and byteorder == "keep":
                assert got.dtype == np.dtype(RECORD), name


def converted(
    sources: list[tuple[Path, list[str]]], writer: str, arrays: Mapping[str, Array], folder: Path, **options: Any
) -> dict[str, Array]:
    """Every array as numpy finds it after a conversion; its bytes are checked here."""
    target, more = target_of(writer, folder)
    found: dict[str, Array] = {}
    for source, names in sources:
        for include in [[name] for name in names] if writer == "npy" else [names]:
            convert.convert_file(source, target, include=include, **more, **options)
            found |= read_numpy(writer, target, include)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].shape == array.shape, name
        assert oracle.canonical(found[name]) == oracle.canonical(array), name
    return found


@pytest.mark.parametrize("option", [{"byteorder": "big"}, {"order": "keep"}])
def test_safetensors_refuses_another_order(option: dict[str, str], tmp_path: Path) -> None:
    """safetensors is always little-endian and row-major; asking for less is an error, not ignored."""
    np.save(tmp_path / "w.npy", np.zeros((2, 3), ">f4"))
    options: dict[str, Any] = dict(option)
    with pytest.raises(convert.UsageError, match="little-endian and row-major"):
        convert.convert_file(tmp_path / "w.npy", tmp_path / "w.safetensors", **options)


def test_every_canonical_type_is_in_the_matrix() -> None:
    """No type of the toolkit's table is left out; the table is compared by name only."""
    from convert.dtypes import CANONICAL

    assert tuple(dtype.name for dtype in CANONICAL) == CANONICAL_NAMES
    assert set(CANONICAL_NAMES) <= ROWS.keys()
