"""Records: the byte order of every field, whatever was asked for."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert

DTYPES: dict[str, Any] = {
    "mixed": [("a", ">f4"), ("b", "<i2", (2,)), ("c", "u1")],
    "little": [("a", "<f8"), ("s", "S3")],
    "big": [("a", ">u4"), ("t", ">M8[s]"), ("u", ">U2")],
    "nested": [("in", [("x", ">c8"), ("y", "<f4")], (2,)), ("raw", "V2"), ("flag", "?")],
    "padded": np.dtype([("a", "u1"), ("b", ">f8")], align=True),
}


def records(dtype: Any, order: Any = "C") -> np.ndarray[Any, Any]:
    array = np.zeros((3, 4), dtype)
    raw = np.random.default_rng(5).integers(1, 100, array.nbytes, dtype=np.uint8)
    filled = np.frombuffer(raw.tobytes(), array.dtype).reshape(array.shape)
    for name in array.dtype.names or ():  # padding stays zero, as numpy copies field by field
        array[name] = filled[name]
    return np.asarray(array, order=order)


def in_order(dtype: np.dtype[Any], mark: str) -> np.dtype[Any]:
    return dtype.newbyteorder(mark)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("target", ["out.npz", "out.npy"])
@pytest.mark.parametrize(("byteorder", "mark"), [("little", "<"), ("big", ">"), ("keep", "")])
@pytest.mark.parametrize("name", DTYPES)
def test_every_field_has_the_order_asked_for(
    tmp_path: Path, name: str, byteorder: str, mark: str, target: str, order: str
) -> None:
    """numpy reads the dtype with all its fields turned, and the same values; verifying agrees."""
    array = records(DTYPES[name], order)
    np.savez(tmp_path / "in.npz", w=array)
    report = convert.convert_file(tmp_path / "in.npz", tmp_path / target, byteorder=byteorder, verify=True)
    assert report.verified
    loaded = np.load(tmp_path / target)
    found = loaded["w"] if target == "out.npz" else loaded
    wanted = np.ascontiguousarray(array.astype(in_order(array.dtype, mark) if mark else array.dtype))
    assert np.lib.format.dtype_to_descr(found.dtype) == np.lib.format.dtype_to_descr(wanted.dtype)
    for field in wanted.dtype.names or ():  # what lies between them numpy leaves to chance
        assert found[field].tobytes() == wanted[field].tobytes()


@pytest.mark.parametrize("byteorder", ["little", "big", "keep"])
def test_big_endian_bfloat16_in_a_field(tmp_path: Path, byteorder: str) -> None:
    """numpy names it `>V2` in a header, the one void type whose mark is a byte order; the values stay."""
    bits = [0x3FC0, 0xC000, 0x4040]  # 1.5, -2 and 3
    with (tmp_path / "in.npy").open("wb") as file:
        descr: Any = [("a", ">f4"), ("b", ">V2")]
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (3,)})
        file.write(b"".join(struct.pack(">fH", 1, value) for value in bits))
    convert.convert_file(tmp_path / "in.npy", tmp_path / "out.npy", byteorder=byteorder, verify=True)
    mark = ">" if b"'>V2'" in (tmp_path / "out.npy").read_bytes() else "<"
    assert mark == ("<" if byteorder == "little" else ">")
    found = np.load(tmp_path / "out.npy")
    assert found["a"].dtype.str == f"{mark}f4"
    assert np.frombuffer(found["b"].tobytes(), f"{mark}u2").tolist() == bits
    convert.convert_file(
        tmp_path / "out.npy", tmp_path / "split.safetensors", policy=convert.Policy(structured="split")
    )
    assert convert.load(tmp_path / "split.safetensors")["out.b"].tolist() == [1.5, -2, 3]


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "nested"])
def test_fields_split_to_their_values(tmp_path: Path, name: str) -> None:
    """Each field on its own, little-endian, after a detour over big-endian."""
    array = records(DTYPES[name])
    np.savez(tmp_path / "in.npz", w=array)
    convert.convert_file(tmp_path / "in.npz", tmp_path / "big.npz", byteorder="big")
    policy = convert.Policy.parse(["lossless", "structured=split", "V2=uint16"])
    for source in ("in.npz", "big.npz"):
        target = tmp_path / f"{source}.safetensors"
        convert.convert_file(tmp_path / source, target, policy=policy)
    assert (tmp_path / "in.npz.safetensors").read_bytes() == (tmp_path / "big.npz.safetensors").read_bytes()


@pytest.mark.parametrize("chunk_bytes", [1, 6, 12, 1000])
def test_chunks_hold_whole_elements(tmp_path: Path, chunk_bytes: int) -> None:
    """Whatever size is asked for, no element is cut in two."""
    path = tmp_path / "in.npz"
    np.savez(path, f=np.arange(50, dtype="<f4"), b=np.arange(50, dtype=">f8"), r=records(DTYPES["mixed"]))
    with convert.open(path) as checkpoint:
        for tensor in checkpoint.values():
            lengths = [len(chunk) for chunk in tensor.chunks(chunk_bytes)]
            assert sum(lengths) == tensor.nbytes
            assert not any(length % tensor.dtype.item_bytes for length in lengths)


def test_sizes_of_the_local_zip64_field_count(tmp_path: Path) -> None:
    """np.savez puts the sizes there; if they are not those of the directory, one of them is wrong."""
    path = tmp_path / "in.npz"
    np.savez(path, w=np.arange(5))
    data = bytearray(path.read_bytes())
    place = 30 + len("w.npy") + 4
    assert data[place : place + 8] == data[place + 8 : place + 16]
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(convert.CorruptError, match="local and central sizes differ"):
        convert.load(path)
