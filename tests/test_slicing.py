"""`tensor[...]`: what numpy's basic indexing gives, reading no more than it must."""

from __future__ import annotations

import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import convert
from convert import arrays, slicing, transfer
from convert.files import MemoryFile
from convert.tensor import Extent, Tensor

Array = npt.NDArray[Any]


class CountingFile(MemoryFile):
    """Remembers every range that is read."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.ranges: list[tuple[int, int]] = []

    def readinto(self, offset: int, view: memoryview) -> None:
        self.ranges.append((offset, offset + len(view)))
        super().readinto(offset, view)

    @property
    def count(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


def counted(array: Array) -> tuple[Tensor, CountingFile]:
    """A tensor over the bytes of an array, and the file that counts."""
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    file = CountingFile(array.tobytes("F" if fortran else "C"))
    dtype = arrays.dtype_of(array.dtype)[0]
    big = array.dtype.byteorder == ">"
    return Tensor("w", dtype, array.shape, Extent(file, 0, file.size), big, fortran), file


def same(found: Array, expected: Any) -> None:
    expected = np.asarray(expected)
    assert type(found) is np.ndarray
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype.newbyteorder("<")
    assert found.tobytes() == expected.astype(expected.dtype.newbyteorder("<")).tobytes()
    assert found.flags.c_contiguous


KEYS: list[Any] = [
    (),
    ...,
    0,
    -1,
    np.int64(2),
    slice(1, 3),
    slice(None, None, -1),
    slice(None, None, 3),
    slice(5, 0, -2),
    slice(4, 4),
    slice(-100, 100),
    (1, 2, 3),
    (..., 2),
    (slice(None), 1),
    (slice(1, 4), slice(None, None, -2), 2),
    (None, 1),
    (1, None, ..., None, slice(2, 4)),
    (slice(None), None, 0, slice(None)),
]


@pytest.mark.parametrize("key", KEYS, ids=repr)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<i4", ">i4", ">c16", "u1", "<f2"])
def test_what_numpy_gives(key: Any, order: Any, dtype: str) -> None:
    """For every kind of key, both orders of elements and of bytes."""
    array = np.arange(6 * 5 * 7).reshape(6, 5, 7).astype(dtype).copy(order)
    tensor, _ = counted(array)
    same(tensor[key], array[key])


@given(data=st.data(), array=hnp.arrays(np.int16, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)))
@settings(deadline=None)
def test_any_key_of_any_array(data: st.DataObject, array: Array) -> None:
    """The ways of reading meet where gaps and buffers are small: all of them, by chance."""
    key = data.draw(hnp.basic_indices(array.shape, max_dims=6, allow_newaxis=True, allow_ellipsis=True))
    gap = data.draw(st.sampled_from([0, 3, 4096]))
    chunk = data.draw(st.sampled_from([1, 8, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slicing, "GAP_BYTES", gap)
        patch.setattr(slicing, "CHUNK_BYTES", chunk)
        for order in ("C", "F"):
            tensor, _ = counted(array.copy(order))
            same(tensor[key], array[key])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    ("key", "most"),
    [
        (17, 4 << 12),
        ((slice(None), 17), 512 * 4),
        ((slice(10, 12), slice(None)), 2 * (4 << 12)),
        ((3, slice(100, 200)), 400),
        ((slice(None, None, 200), slice(None, None, 2048)), 6 * 4),
        ((0, 0), 4),
        (slice(0, 0), 0),
    ],
    ids=str,
)
def test_only_what_is_needed_is_read(order: Any, key: Any, most: int) -> None:
    """A row, a column, a corner: their bytes and no others, where what lies between is longer than a page."""
    array = np.arange(512 * 4096, dtype=np.int32).reshape(512, 4096).copy(order)
    tensor, file = counted(array)
    same(tensor[key], array[key])
    if order == "C":
        assert file.count == most
    else:
        page = slicing.GAP_BYTES
        assert file.count <= most + len(file.ranges) * page + array[key].size * 512 * 4


def test_short_gaps_are_read_over() -> None:
    """A column of a narrow matrix is read in large pieces, not element by element."""
    array = np.arange(1 << 20, dtype=np.int32).reshape(-1, 4)
    tensor, file = counted(array)
    same(tensor[:, 2], array[:, 2])
    assert len(file.ranges) <= array.nbytes // transfer.CHUNK_BYTES + 1
    assert file.count <= array.nbytes


@pytest.mark.parametrize("name", ["safetensors", "npz", "deflated.npz", "bzip2.npz", "folder/"])
def test_files_of_every_kind(tmp_path: Path, name: str) -> None:
    """Through the readers, compressed ones too, and types that numpy lacks."""
    rng = np.random.default_rng(3)
    values: dict[str, Array] = {
        "w": np.asfortranarray(rng.standard_normal((300, 200))),
        "b": rng.standard_normal((40, 50)).astype(ml_dtypes.bfloat16),
        "s": np.array(5, np.int8),
    }
    target = f"{tmp_path}/{name if '.' in name or name.endswith('/') else 'out.' + name}"
    if name == "bzip2.npz":
        with zipfile.ZipFile(target, "w", zipfile.ZIP_BZIP2) as archive:
            for key, array in values.items():
                stored = array.view("V2") if key == "b" else array
                np.save(data := io.BytesIO(), stored)
                archive.writestr(f"{key}.npy", data.getvalue())
    else:
        wishes: Any = {"order": "keep", "byteorder": "big"} if "safe" not in name else {}
        convert.save(values, target, compress="deflated" in name or None, **wishes)
    with convert.open(target) as checkpoint:
        w, b = checkpoint["w"], checkpoint["b"]
        same(w[3:200:7, ::-3], values["w"][3:200:7, ::-3])
        same(w[-1], values["w"][-1])
        same(checkpoint["s"][()], values["s"])
        part = b[1:3, 4]
        assert part.tobytes() == values["b"].view("u2")[1:3, 4].tobytes()
        loop: Any = w
        assert len(list(loop)) == 300  # it ends ends, as IndexError says when


def test_encoded_and_packed_tensors(tmp_path: Path) -> None:
    """What is changed on the way out is changed before it is picked."""
    packed = np.arange(16, dtype=np.uint8).astype(np.uint8).reshape(4, 4).view(ml_dtypes.float4_e2m1fn)
    record = np.zeros(5, [("a", ">f4"), ("b", "i2", 2)])
    record["a"], record["b"] = np.arange(5), np.arange(10).reshape(5, 2)
    convert.save({"p": packed}, tmp_path / "p.safetensors")
    np.savez(tmp_path / "r.npz", r=record)
    with convert.open(tmp_path / "p.safetensors") as checkpoint:
        found = checkpoint["p"][1:3, ::-2]
        assert found.dtype == packed.dtype
        assert found.view("u1").tolist() == packed.view("u1")[1:3, ::-2].tolist()
    with convert.open(tmp_path / "r.npz") as checkpoint:
        assert str(checkpoint["r"][1:4:2].tolist()) == str(record[1:4:2].tolist())


def test_strings_of_no_length(tmp_path: Path) -> None:
    """Elements of no bytes have no places."""
    np.savez(tmp_path / "a.npz", s=np.ndarray((3, 4), "S0"))
    with convert.open(tmp_path / "a.npz") as checkpoint:
        assert checkpoint["s"][1:, 0].shape == (2,)


def test_a_compressed_tensor_is_unpacked_to_the_last_byte_needed(tmp_path: Path) -> None:
    """Damage behind it is not seen; before it, and where all is asked for, it is."""
    array = np.random.default_rng(1).integers(0, 99, (4000, 1000), np.int32)
    np.savez_compressed(tmp_path / "a.npz", w=array)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    middle = len(data) * 3 // 4
    data[middle : middle + 4] = b"\xff\xff\xff\xff"
    (tmp_path / "a.npz").write_bytes(data)
    with convert.open(tmp_path / "a.npz") as checkpoint:
        tensor = checkpoint["w"]
        same(tensor[5:7], array[5:7])
        for key in (-1, ..., slice(None, None, 2)):
            with pytest.raises(convert.CorruptError, match="'w'"):
                tensor[key]


@pytest.mark.parametrize("key", [..., slice(None), slice(None, None, -1)])
def test_a_checksum_is_verified_where_all_is_read(tmp_path: Path, key: Any) -> None:
    """A part of a stored member has none; the whole has."""
    np.savez(tmp_path / "a.npz", w=np.zeros(100, np.uint8))
    data = (tmp_path / "a.npz").read_bytes().replace(bytes(50), bytes(49) + b"\1", 1)
    (tmp_path / "a.npz").write_bytes(data)
    with convert.open(tmp_path / "a.npz") as checkpoint:
        assert checkpoint["w"][:3].tolist() == [0, 0, 0]
        with pytest.raises(convert.CorruptError, match="CRC-32"):
            checkpoint["w"][key]


@pytest.mark.parametrize("key", [[0, 1], True, np.array([True]), np.array([0]), 1.5, "a", slice(0, "x")], ids=repr)
def test_other_kinds_of_index_are_refused(key: Any) -> None:
    """With the way to have them."""
    tensor, file = counted(np.zeros((3, 4)))
    for keys in (key, (0, key)):
        with pytest.raises(convert.UsageError, match="tensor 'w'"):
            tensor[keys]
    assert file.ranges == []


@pytest.mark.parametrize("key", [3, -4, (0, 4), (0, 0, 0), (..., ...)], ids=repr)
def test_what_is_out_of_bounds(key: Any) -> None:
    """As numpy has it."""
    array = np.zeros((3, 4))
    tensor, _ = counted(array)
    with pytest.raises(IndexError):
        array[key]
    with pytest.raises(IndexError, match="'w'"):
        tensor[key]


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz", "deflated.npz"])
def test_threads_share_a_checkpoint(tmp_path: Path, name: str) -> None:
    """Many threads read one open checkpoint, parts and wholes, the same tensor too."""
    array = np.random.default_rng(2).standard_normal((600, 400)).astype(np.float32)
    convert.save({"w": array, "v": array[::-1]}, tmp_path / name, compress="deflated" in name or None)
    with convert.open(tmp_path / name) as checkpoint, ThreadPoolExecutor(8) as pool:

        def read(number: int) -> bool:
            tensor = checkpoint["wv"[number % 2]]
            expected = array[:: 1 if number % 2 == 0 else -1]
            row = number * 7 % 600
            return bool((tensor[row] == expected[row]).all() and (tensor.numpy() == expected).all())

        assert all(pool.map(read, range(48)))
