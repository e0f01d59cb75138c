"""Same input, same bytes: what we write is what `np.save`, `np.savez` and safetensors would have written.

The sets are random but repeatable: each failure names the seed of its set. The limits of identity are the references'
own: safetensors orders two or more metadata keys at random, and copies the raw memory of arrays that are not
C-contiguous; deflate depends on the library.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

import convert

from .strategies import NUMPY_NAMES, SHAPES, SPECIAL_NAMES, dtype_of, laid_out, npy_bytes, savez, with_bytes

Array = npt.NDArray[Any]
BATCHES = 8
SETS = 250
"""Sets in one batch: 2,000 in all for each format."""

SAFETENSORS_NAMES = tuple(name for name in NUMPY_NAMES if name != "complex64")
"""`safetensors.numpy` has no complex64; `tests.oracle` covers the other types."""
NPY_NAMES = (*NUMPY_NAMES, "complex128", "datetime64[ns]", "timedelta64[25s]", "datetime64", "S5", "U3", "V5")
LAYOUTS = ("C", "C", "Fortran", "strided", "reversed", "broadcast")


def random_name(rng: np.random.Generator) -> str:
    if rng.random() < 0.3:
        return str(rng.choice(SPECIAL_NAMES))
    ranges = [(0x20, 0x7F), (0x1, 0x800), (0x4E00, 0x4F00), (0x1F300, 0x1F400)]
    low, high = ranges[rng.integers(len(ranges))]
    return "".join(chr(rng.integers(low, high)) for _ in range(rng.integers(0, 12)))


def random_array(rng: np.random.Generator, names: tuple[str, ...], *, any_layout: bool) -> Array:
    dtype = dtype_of(names[rng.integers(len(names))])
    random_shape = tuple(int(size) for size in rng.integers(0, 5, rng.integers(0, 5)))
    shape = SHAPES[rng.integers(len(SHAPES))] if rng.random() < 0.3 else random_shape
    array = with_bytes(dtype, shape, int(rng.integers(1 << 32)))
    return laid_out(array, LAYOUTS[rng.integers(len(LAYOUTS))]) if any_layout else array


def random_set(seed: int, names: tuple[str, ...], *, any_layout: bool = False) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    found = {random_name(rng): random_array(rng, names, any_layout=any_layout) for _ in range(rng.integers(0, 6))}
    found.pop("__metadata__", None)
    return found


def npz_of(arrays: dict[str, Array]) -> bytes:
    """What `np.savez` writes; its own function takes no array called `file` or `allow_pickle`."""
    stream = io.BytesIO()
    if not {"file", "allow_pickle"} & arrays.keys():
        savez(stream, arrays)
        return stream.getvalue()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.save(member, array)
    return stream.getvalue()


def seeds(batch: int, base: int) -> range:
    return range(base + batch * SETS, base + (batch + 1) * SETS)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_safetensors_is_the_reference_byte_for_byte(batch: int, tmp_path: Path) -> None:
    """`convert.save` writes the bytes of `safetensors.numpy.save`, and converting such a file changes none."""
    target, source = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for seed in seeds(batch, 100_000):
        arrays = random_set(seed, SAFETENSORS_NAMES)
        metadata = {random_name(np.random.default_rng(seed)): "v\u00e9\n"} if seed % 2 else None
        wanted = safetensors.numpy.save(arrays, metadata)
        convert.save(arrays, target, metadata=metadata, overwrite=True)
        assert target.read_bytes() == wanted, f"seed {seed}"
        source.write_bytes(wanted)
        convert.convert_file(source, target, overwrite=True, jobs=1 + seed % 3)
        assert target.read_bytes() == wanted, f"seed {seed}"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_npz_is_the_reference_byte_for_byte(batch: int, tmp_path: Path) -> None:
    """`convert.save` writes the bytes of `np.savez`, and converting such a file changes none."""
    target, source = tmp_path / "a.npz", tmp_path / "b.npz"
    for seed in seeds(batch, 200_000):
        arrays = random_set(seed, NPY_NAMES)
        wanted = npz_of(arrays)
        convert.save(arrays, target, overwrite=True)
        assert target.read_bytes() == wanted, f"seed {seed}"
        source.write_bytes(wanted)
        convert.convert_file(source, target, overwrite=True, jobs=1 + seed % 3)
        assert target.read_bytes() == wanted, f"seed {seed}"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_npy_is_the_reference_byte_for_byte(batch: int, tmp_path: Path) -> None:
    """`convert.save` writes the bytes of `np.save`, and converting such a file changes none."""
    target, source = tmp_path / "a.npy", tmp_path / "b.npy"
    for seed in seeds(batch, 300_000):
        rng = np.random.default_rng(seed)
        array = random_array(rng, NPY_NAMES, any_layout=False)
        wanted = npy_bytes(array)
        convert.save({"w": array}, target, overwrite=True)
        assert target.read_bytes() == wanted, f"seed {seed}"
        source.write_bytes(wanted)
        convert.convert_file(source, target, overwrite=True)
        assert target.read_bytes() == wanted, f"seed {seed}"


@pytest.mark.parametrize("batch", range(2))
def test_any_layout_gives_the_bytes_of_its_c_copy(batch: int, tmp_path: Path) -> None:
    """What the references get wrong or write in Fortran order, comes out as if it had been C-contiguous."""
    for seed in seeds(batch, 400_000):
        arrays = random_set(seed, SAFETENSORS_NAMES, any_layout=True)
        dense = {name: array.copy(order="C") for name, array in arrays.items()}
        for suffix, wanted in (("safetensors", safetensors.numpy.save(dense)), ("npz", npz_of(dense))):
            target = tmp_path / f"a.{suffix}"
            convert.save(arrays, target, overwrite=True)
            assert target.read_bytes() == wanted, f"seed {seed}"


@pytest.mark.parametrize("order", ["keep"])
@pytest.mark.parametrize("batch", range(2))
def test_kept_orders_are_the_reference_too(order: str, batch: int, tmp_path: Path) -> None:
    """With byte order and memory order kept, a file of numpy's comes back as it was."""
    target, source = tmp_path / "a.npz", tmp_path / "b.npz"
    for seed in seeds(batch, 500_000):
        arrays = random_set(seed, NPY_NAMES)
        arrays = {
            name: laid_out(array.astype(array.dtype.newbyteorder(">")) if index % 2 else array, "Fortran")
            for index, (name, array) in enumerate(arrays.items())
        }
        source.write_bytes(npz_of(arrays))
        convert.convert_file(source, target, overwrite=True, order=order, byteorder="keep")
        assert target.read_bytes() == source.read_bytes(), f"seed {seed}"


@pytest.mark.parametrize("dtype", ["|u1", "<M8[ns]"])
def test_headers_of_every_length_are_the_reference(dtype: str, tmp_path: Path) -> None:
    """numpy leaves room for one axis to grow and pads to 64: one character more may mean 64 bytes more."""
    lengths = set()
    for axes in range(1, 24):
        for digits in range(1, 16, 2):
            array = np.zeros((0, *(1,) * axes, 10 ** (digits - 1)), dtype)
            convert.save({"w": array}, tmp_path / "w.npy", overwrite=True)
            assert (tmp_path / "w.npy").read_bytes() == npy_bytes(array), array.shape
            lengths.add(len(npy_bytes(array)))
    for axes in range(1, 24):
        for digits in range(1, 4):
            array = np.asfortranarray(np.zeros((10**digits, *(1,) * axes, 2), dtype))
            (tmp_path / "f.npy").write_bytes(npy_bytes(array))
            convert.convert_file(tmp_path / "f.npy", tmp_path / "w.npy", overwrite=True, order="keep")
            assert (tmp_path / "w.npy").read_bytes() == npy_bytes(array), array.shape
    assert len(lengths) > 1


MIXED_SIZES = (0, 1, 5_000, 64 << 10, (64 << 10) + 1, 300_000, (1 << 20) - 128, 1 << 20, (1 << 20) + 1, 3_000_001)
"""Bytes around every border that the writer treats in another way: small groups, chunks, deflate blocks."""


def mixed() -> dict[str, Array]:
    found = {}
    for seed, size in enumerate(MIXED_SIZES):
        raw = with_bytes(np.dtype(np.uint8), (size,), seed)
        raw[: size // 2] = 7  # something to deflate
        found[f"b{size}"] = raw
        found[f"f{size}"] = raw[: size // 4 * 4].view(np.float32)
    turned = np.random.default_rng(0).standard_normal((600, 900)).astype(np.float32)
    return {**found, "fortran": np.asfortranarray(turned), "big": turned.astype(">f4"), "strided": turned[::2, ::-3]}


@pytest.mark.parametrize(
    ("suffix", "compress"), [("safetensors", None), ("npz", None), ("npz", 1), ("npz", 6), ("npz", 9)]
)
def test_threads_change_no_byte(suffix: str, compress: int | None, tmp_path: Path) -> None:
    """One thread or many, from memory or from a file, once or again: the same bytes."""
    arrays = mixed()
    savez(tmp_path / "source.npz", arrays)
    savez(tmp_path / "packed.npz", arrays, compressed=True)
    found = set()
    for jobs in (1, 4) if compress == 9 else (1, 2, 4, 4):  # 9 is zlib's, and slow
        options: dict[str, Any] = {"compress": compress, "jobs": jobs, "overwrite": True}
        convert.save(arrays, tmp_path / f"a.{suffix}", **options)
        found.add((tmp_path / f"a.{suffix}").read_bytes())
        for source in ("source.npz", "packed.npz"):
            convert.convert_file(tmp_path / source, tmp_path / f"b.{suffix}", **options)
            found.add((tmp_path / f"b.{suffix}").read_bytes())
    assert len(found) == 1
    if suffix == "npz":
        with np.load(tmp_path / "a.npz") as archive:
            assert {name: archive[name].tobytes() for name in archive.files} == {
                name: np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).tobytes()
                for name, array in arrays.items()
            }
    elif compress is None:
        dense = {n: np.ascontiguousarray(a.astype(a.dtype.newbyteorder("<"))) for n, a in arrays.items()}
        assert found == {safetensors.numpy.save(dense)}


def test_stored_npz_of_any_size_is_the_reference(tmp_path: Path) -> None:
    """Large members too: spans, chunks and joined checksums leave no trace."""
    arrays = {name: np.ascontiguousarray(array) for name, array in mixed().items() if array.dtype.str[0] != ">"}
    convert.save(arrays, tmp_path / "a.npz")
    assert (tmp_path / "a.npz").read_bytes() == npz_of(arrays)


@pytest.mark.slow
def test_more_members_than_a_plain_zip_has_room_for(tmp_path: Path) -> None:
    """Beyond 65,535 members the directory needs its zip64 form; still the bytes of `np.savez`."""
    arrays = {f"{number:x}": np.array(number % 251, np.uint8) for number in range(65_537)}
    wanted = npz_of(arrays)
    convert.save(arrays, tmp_path / "a.npz")
    assert (tmp_path / "a.npz").read_bytes() == wanted
    convert.convert_file(tmp_path / "a.npz", tmp_path / "b.npz")
    assert (tmp_path / "b.npz").read_bytes() == wanted
    convert.convert_file(tmp_path / "b.npz", tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == safetensors.numpy.save(arrays)


@pytest.mark.slow
def test_as_many_members_as_a_plain_zip_has_room_for(tmp_path: Path) -> None:
    """The border itself: 65,535 members need no zip64 form yet."""
    count = 65_535
    array = np.array(1, np.uint8)
    arrays = dict.fromkeys(map(str, range(count)), array)
    convert.save(arrays, tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert len(archive.infolist()) == count
    tail = (tmp_path / "a.npz").read_bytes()[-98:]
    assert b"PK\x06\x06" not in tail
    with convert.open(tmp_path / "a.npz") as checkpoint:
        assert len(checkpoint) == count


def test_one_long_axis_is_said_to_be_c_order_whatever_the_source_says(tmp_path: Path) -> None:
    """Such an array is both; np.save says C, and so does a kept order."""
    array = np.asfortranarray(np.arange(5.0).reshape(5, 1))
    expected = npy_bytes(array)
    said = expected.replace(b"'fortran_order': False, ", b"'fortran_order': True,  ")
    assert said != expected
    (tmp_path / "in.npy").write_bytes(said)
    convert.convert_file(tmp_path / "in.npy", tmp_path / "out.npy", order="keep")
    assert (tmp_path / "out.npy").read_bytes() == expected


def test_metadata_is_sorted(tmp_path: Path) -> None:
    """Not as it happened to come, so that equal input gives equal bytes."""
    tensors = {"w": np.zeros(2, np.uint8)}
    for name, keys in (("one", "bac"), ("other", "cab")):
        convert.save(tensors, tmp_path / f"{name}.safetensors", metadata=dict.fromkeys(keys, "x"))
    data = (tmp_path / "one.safetensors").read_bytes()
    assert data == (tmp_path / "other.safetensors").read_bytes()
    assert b'"__metadata__":{"a":"x","b":"x","c":"x"}' in data


def test_a_cast_may_come_out_big_endian(tmp_path: Path) -> None:
    """The order is that of what is written, not of what was read."""
    array = np.linspace(-3, 3, 1000, dtype=np.float32)
    np.save(tmp_path / "in.npy", array)
    convert.convert_file(tmp_path / "in.npy", tmp_path / "out.npy", cast=[("float32", "float16")], byteorder="big")
    expected = array.astype(">f2")
    assert (tmp_path / "out.npy").read_bytes() == npy_bytes(expected)
