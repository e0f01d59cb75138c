"""`convert diff`: what differs is found and measured, the rest is the same; numpy and ml_dtypes are the oracles."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convert
from convert.comparepairs import side_by_side
from tests.comparing import SAMPLES, Array, compared, tally, whats, write
from tests.oracle import save_with_reference

# --- layouts, formats, sizes -------------------------------------------------------------------------------------

LAYOUTS = ["plain", "fortran", "big", "big fortran", "deflated", "deflated fortran", "safetensors"]


def laid_out(folder: Path, name: str, array: Array, layout: str) -> Path:
    """One array in a file of that layout."""
    if layout == "safetensors":
        return write(folder / f"{name}.safetensors", {"w": array})
    array = np.asarray(array, order="F" if "fortran" in layout else "C")
    array = array.astype(array.dtype.newbyteorder(">")) if "big" in layout else array
    path = folder / f"{name}.npz"
    (np.savez_compressed if "deflated" in layout else np.savez)(path, w=array)
    return path


@pytest.mark.parametrize("other", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_never_counts_and_differences_are_found_in_any(tmp_path: Path, layout: str, other: str) -> None:
    """Equal arrays are the same; one changed element is found at its index in row-major order."""
    a = np.random.default_rng(4).integers(0, 1000, (70, 15, 129)).astype(np.int32)
    b = a.copy()
    first, second = (laid_out(tmp_path, name, array, kind) for name, array, kind in (("a", a, layout), ("b", b, other)))
    found = convert.diff(first, second)
    assert found.same
    assert (found.identical, found.nbytes) == (1, a.nbytes)
    b[31, 7, 128] += 3
    b[69, 0, 0] += 1
    found = convert.diff(first, laid_out(tmp_path, "b", b, other))
    (difference,) = found.differences
    assert difference.first() == (31, 7, 128)
    counted = tally(found)
    assert (counted.bits, counted.max_abs_error) == (2, 3)


@pytest.mark.parametrize("count", [0, 1, 2, 32767, 32768, 32769, (16 << 18) - 1, (16 << 18) + 1, 9 << 20])
def test_every_border_of_chunks_and_spans(tmp_path: Path, count: int) -> None:
    """The first and last elements, and those around the borders, with several threads and one."""
    a = np.zeros(count, np.int32)
    b = a.copy()
    places = [at for at in (0, 32767, 32768, (16 << 18) - 1, 16 << 18, count - 1) if 0 <= at < count]
    path_a, path_b = write(tmp_path / "a.npz", {"w": a}), tmp_path / "b.npz"
    assert convert.diff(path_a, write(path_b, {"w": b})).same
    for at in places:
        b[at] = 1
    write(path_b, {"w": b})
    results = []
    for jobs in (1, 2, 5):
        found = convert.diff(path_a, path_b, jobs=jobs)
        found.seconds = 0
        results.append(found)
    assert results[0] == results[1] == results[2]
    if places:
        counted = tally(results[0])
        assert (counted.bits, counted.first) == (len(set(places)), places[0])
    else:
        assert results[0].same


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float6_e2m3fn", "bfloat16"])
def test_packed_types_over_several_chunks(tmp_path: Path, name: str) -> None:
    """No element is cut by a border; the index is that of the element, not of the byte."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    a = np.ones(800_000, np.float32).astype(dtype)
    b = a.copy()
    for at in (700_001, 799_999):
        b[at] = 2
    found = compared(tmp_path, a, b)
    counted = tally(found)
    assert (counted.bits, counted.first, counted.max_abs_error) == (2, 700_001, 1.0)
    assert (float(counted.first_a), float(counted.first_b)) == (1.0, 2.0)
    wide = tally(compared(tmp_path, a, b.astype(np.float32)))
    assert (wide.values, wide.first, wide.max_abs_error) == (2, 700_001, 1.0)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "S0", "datetime64[s]"])
def test_scalars_and_nothing(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    """Every shape has its place, and elements may have no bytes."""
    a = np.zeros(shape, dtype) if dtype != "S0" else np.ndarray(shape, "S0")
    assert compared(tmp_path, a, a).same
    if a.nbytes:
        b = (a.view(np.int32 if a.itemsize == 4 else np.int64) + 1).view(dtype)
        found = compared(tmp_path, a, b)
        assert found.differences[0].first() == (0,) * a.ndim
        assert tally(found).bits == 1


def test_shards_folders_and_open_checkpoints(tmp_path: Path) -> None:
    """Whatever `open` opens; what was open stays open."""
    arrays = {name: np.arange(3000, dtype=np.int16) + at for at, name in enumerate("abc")}
    one = write(tmp_path / "one.npz", arrays)
    convert.save(arrays, tmp_path / "m.safetensors", max_shard_size=7000)
    convert.save(arrays, f"{tmp_path}/folder/")
    index = tmp_path / "m.safetensors.index.json"
    assert index.exists()
    assert convert.diff(one, index).same
    assert convert.diff([tmp_path / "folder" / f"{name}.npy" for name in "abc"], one).identical == 3
    with convert.open(tmp_path / "folder") as checkpoint:
        assert convert.diff(checkpoint, index).same
        assert checkpoint["b"].numpy()[0] == 1


def test_urls_are_compared_like_files(tmp_path: Path) -> None:
    """One side in a store, the other here; shards in the store too."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    arrays = {"w": np.random.default_rng(8).standard_normal(300_000), "v": np.asfortranarray(np.eye(300))}
    here = write(tmp_path / "a.npz", arrays)
    try:
        store.pipe_file("/diff/a.npz", here.read_bytes())
        assert convert.diff("memory://diff/a.npz", here).same
        convert.save(arrays, "memory://diff/m.safetensors", max_shard_size=800_000)
        assert convert.diff(here, "memory://diff/m.safetensors.index.json").identical == 2
        arrays["w"][250_000] += 1
        assert tally(convert.diff("memory://diff/a.npz", write(here, arrays))).first == 250_000
    finally:
        store.rm("/diff", recursive=True)


def test_limits_hold_for_both_sides(tmp_path: Path) -> None:
    """The second file may be the hostile one."""
    a, b = (
        write(tmp_path / "a.npz", {"x": np.zeros(2)}),
        write(tmp_path / "b.npz", {"x": np.zeros(2), "y": np.zeros(2)}),
    )
    with pytest.raises(convert.LimitError) as caught:
        convert.diff(a, b, limits=convert.Limits(tensors=1))
    assert caught.value.path == str(b)


# --- the way there and back --------------------------------------------------------------------------------------

FILES = sorted(path.name for path in SAMPLES.iterdir() if path.suffix in (".npy", ".npz", ".safetensors"))
NOT_HELD = {"object.npy", "structured.npy", "structured_version_3.npy", "unmappable.npz"}
"""By safetensors, whatever the policy, without loss."""


@pytest.mark.parametrize("name", FILES)
def test_what_was_converted_without_loss_is_the_same(tmp_path: Path, name: str) -> None:
    """Encodings are undone by what the file remembers; each sample with all that can be encoded."""
    policy = convert.Policy.preset("lossless")
    held = []
    for suffix in (".npz", ".safetensors", ".npy"):
        target = tmp_path / f"out{suffix}"
        try:
            convert.convert_file(SAMPLES / name, target, policy=policy)
        except convert.PolicyError:
            continue
        held.append(suffix)
        found = convert.diff(SAMPLES / name, target)
        assert found.same, found.to_dict()
        assert convert.diff(target, SAMPLES / name, rtol=0).same
    assert (".npz" in held) == (name != "object.npy")
    assert (".safetensors" in held) == (name not in NOT_HELD)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("structured.npy", {"structured": "split"}),
        ("object.npy", {"object": "unpickle"}),
        ("longdouble_inexact.npy", {"longdouble": "round"}),
        ("longdouble.npy", {"longdouble": "exact"}),
        ("complex128.npy", {"complex128": "round"}),
        ("float8.npz", {"V1": "float8_e4m3fn"}),
        ("bf16.npy", {"V2": "uint16"}),
        ("blob.npz", {"blob": "skip"}),
        ("unicode.npy", {"str": "skip"}),
    ],
)
def test_the_policy_of_the_conversion_makes_both_sides_alike(tmp_path: Path, name: str, policy: dict[str, str]) -> None:
    """What cannot be undone is done to the other side too."""
    made = convert.Policy([("*", *rule) for rule in policy.items()])
    target = tmp_path / "out.safetensors"
    convert.convert_file(SAMPLES / name, target, policy=made)
    found = convert.diff(SAMPLES / name, target, policy=made)
    assert found.same, found.to_dict()
    if "skip" in policy.values():
        assert any("left out" in note for note in found.notes)


def test_policies_that_only_rename_bits_end(tmp_path: Path) -> None:
    """bfloat16 as V2 as bfloat16 ... would go on for ever."""
    source = write(tmp_path / "a.safetensors", {"w": np.ones(4, ml_dtypes.bfloat16)})
    np.savez(tmp_path / "b.npz", w=np.ones(4, ml_dtypes.bfloat16))
    policy = convert.Policy(bfloat16="V2", float8="V1", V1="float8_e4m3fn")
    assert convert.diff(source, tmp_path / "b.npz", policy=policy).same


def test_metadata_is_reported_and_counts_if_asked(tmp_path: Path) -> None:
    """Keys that one side lacks, and those with another text."""
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, metadata in zip(paths, ({"x": "1", "y": "2", "z": "3"}, {"y": "2", "z": "4"}), strict=True):
        save_with_reference(path, {"w": np.zeros(2)}, metadata)
    found = convert.diff(*paths)
    assert found.same
    assert [row[:3] for row in found.metadata] == [("x", "1", None), ("z", "3", "4")]
    assert not convert.diff(*paths, metadata=True).same
    assert convert.diff(paths[0], paths[0], metadata=True).same


def test_strings_that_a_policy_moves_into_the_metadata_count(tmp_path: Path) -> None:
    """They were values of the file."""
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    np.savez(a, s=np.array("one"), o=np.array({"t": "x"}))
    np.savez(b, s=np.array("two"), o=np.array({"t": "y"}))
    policy = convert.Policy(str="metadata", object="unpickle")
    found = convert.diff(a, b, policy=policy)
    assert whats(found) == {"s": ("values",)}
    assert [(row.key, row.counts) for row in found.metadata] == [("o.t", True)]
    assert not convert.diff(a, b, policy=policy, exclude=["s"]).same
    assert convert.diff(a, a, policy=policy).same


# --- names -------------------------------------------------------------------------------------------------------


def test_names_shapes_and_renames(tmp_path: Path) -> None:
    """Each in A's order, then what only B has."""
    rng = np.random.default_rng(1)
    data = [rng.standard_normal((4, 5)) for _ in range(4)]
    a: dict[str, Array] = {
        "same": data[0],
        "old": data[1],
        "gone": data[2],
        "bent": data[3],
        "twin1": np.zeros(3),
        "twin2": np.zeros(3),
    }
    b: dict[str, Array] = {
        "new": data[1],
        "same": data[0],
        "bent": data[3].reshape(5, 4),
        "zero": np.zeros(3),
        "more": data[2] + 1,
        "cast": data[1].astype(np.float32),
    }
    found = convert.diff(write(tmp_path / "a.npz", a), write(tmp_path / "b.safetensors", b))
    assert list(whats(found).items()) == [
        ("old", ("renamed",)),
        ("gone", ("only in A",)),
        ("bent", ("shape",)),
        ("twin1", ("renamed",)),
        ("twin2", ("only in A",)),
        ("more", ("only in B",)),
        ("cast", ("only in B",)),
    ]
    others = {difference.name: difference.other_name for difference in found.differences}
    assert (others["old"], others["twin1"]) == ("new", "zero")
    assert found.identical == 1
    renamed = convert.diff(tmp_path / "a.npz", tmp_path / "b.safetensors", rename=[("^old$", "new")])
    assert "new" not in whats(renamed)
    assert renamed.identical == 2


def test_renames_are_found_in_fortran_order_too(tmp_path: Path) -> None:
    """By their values, not by how they are stored."""
    array = np.arange(600_000, dtype=np.float32).reshape(600, 1000)
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    np.savez(a, x=np.asfortranarray(array), y=np.zeros(1))
    np.savez_compressed(b, z=array.astype(">f4"), y=np.zeros(1))
    assert whats(convert.diff(a, b)) == {"x": ("renamed",)}


def test_a_lone_npy_has_no_name(tmp_path: Path) -> None:
    """Its tensor is called after the file, which says nothing; in other formats names count."""
    array = np.arange(5)
    first, second = write(tmp_path / "first.npy", {"": array}), write(tmp_path / "second.npy", {"": array})
    assert convert.diff(first, second).same
    other = write(tmp_path / "x.safetensors", {"w": array})
    assert convert.diff(first, other).same
    assert convert.diff(other, second).same
    assert whats(convert.diff(other, write(tmp_path / "y.npz", {"v": array}))) == {"w": ("renamed",)}
    both = write(tmp_path / "z.npz", {"w": array, "v": array})
    assert not convert.diff(first, both).same


def test_include_and_exclude(tmp_path: Path) -> None:
    """The others are not looked at; a glob that matches nothing on either side is a slip."""
    a = write(tmp_path / "a.npz", {"x.w": np.zeros(2), "y.w": np.zeros(2), "y.b": np.zeros(2)})
    b = write(tmp_path / "b.npz", {"x.w": np.zeros(2), "y.w": np.ones(2), "z": np.zeros(2)})
    assert convert.diff(a, b, include=["x.*"]).same
    assert convert.diff(a, b, include=["x.*", "y.*"], exclude=["y.?"]).same
    assert whats(convert.diff(a, b, include=["z"])) == {"z": ("only in B",)}
    with pytest.raises(convert.UsageError, match=r"no tensor matches --include 'q\*'"):
        convert.diff(a, b, include=["q*"])
    assert convert.diff(a, b, include=["x.w"], exclude=["q"]).notes == ["--exclude q matched nothing"]


@pytest.mark.parametrize("options", [{"rtol": -1.0}, {"atol": float("nan")}, {"rtol": float("inf")}, {"jobs": 0}])
def test_a_wrong_call_is_a_usage_error(tmp_path: Path, options: dict[str, Any]) -> None:
    """Before anything is opened."""
    with pytest.raises(convert.UsageError):
        convert.diff(tmp_path / "missing", tmp_path / "missing", **options)


# --- damage ------------------------------------------------------------------------------------------------------


def damaged(path: Path, *arrays: Array) -> Path:
    """Change a byte of each array's data in an archive whose checksums stay."""
    content = bytearray(path.read_bytes())
    for array in arrays:
        at = content.index(array.tobytes())
        content[at + array.nbytes // 2] ^= 1
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("order", ["C", "F"])
def test_damage_is_refused_and_all_of_it_told(tmp_path: Path, order: Any, jobs: int) -> None:
    """Even where both sides are damaged alike and so have the same bytes."""
    rng = np.random.default_rng(9)
    x, y, z = (np.asarray(rng.standard_normal((300, 400)), order=order) for _ in range(3))
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    for path in (a, b):
        np.savez(path, x=x, y=y, z=z)
        damaged(path, x.T if order == "F" else x)
    damaged(b, z.T if order == "F" else z)
    with pytest.raises(convert.CorruptError, match="CRC-32 mismatch") as caught:
        convert.diff(a, b, jobs=jobs)
    assert {(Path(problem.path or "").name, problem.tensor) for problem in caught.value.problems} >= {("b.npz", "z")}
    assert "x" in {problem.tensor for problem in caught.value.problems}
    assert convert.diff(a, b, exclude=["x", "z"]).same


def test_damage_of_tensors_that_are_not_compared_is_found_with_the_name(tmp_path: Path) -> None:
    """Candidates for a rename are read, and checked."""
    x = np.random.default_rng(9).standard_normal(5000)
    a = write(tmp_path / "a.npz", {"x": x})
    b = damaged(write(tmp_path / "b.npz", {"y": x}), x)
    with pytest.raises(convert.CorruptError, match="tensor 'y': CRC-32 mismatch"):
        convert.diff(a, b)


def test_a_tensor_without_elements_owes_its_checksum(tmp_path: Path) -> None:
    """There is nothing to compare, and yet it is damaged."""
    path = write(tmp_path / "a.npz", {"w": np.zeros((0, 3))})
    with zipfile.ZipFile(path) as archive:
        crc = archive.infolist()[0].CRC
    content = path.read_bytes()
    assert content.count(crc.to_bytes(4, "little")) == 2
    path.write_bytes(content.replace(crc.to_bytes(4, "little"), (crc ^ 1).to_bytes(4, "little")))
    with pytest.raises(convert.CorruptError, match="CRC-32 mismatch"):
        convert.diff(path, path)


@pytest.mark.parametrize("sizes", [(1, 2), (5, 7), (6, 4), (100, 1), (3, 100)])
def test_chunks_of_any_size_are_read_side_by_side(sizes: tuple[int, int]) -> None:
    """Whole units of 3 and 2 bytes, equally many of both, and everything to the end."""
    data = bytes(range(60)), bytes(range(100, 140))

    def pieces(whole: bytes, size: int) -> Iterator[memoryview]:
        return (memoryview(whole[at : at + size]) for at in range(0, len(whole), size))

    chunks = pieces(data[0], sizes[0]), pieces(data[1], sizes[1])
    joined = [b"", b""]
    for parts in side_by_side(chunks[0], chunks[1], 3, 2):
        assert len(parts[0]) // 3 == len(parts[1]) // 2 > 0
        joined = [before + bytes(part) for before, part in zip(joined, parts, strict=True)]
    assert tuple(joined) == data
    assert [next(rest, None) for rest in chunks] == [None, None]


def test_both_sides_problems_come_together(tmp_path: Path) -> None:
    """Members that cannot be read, on either side."""
    paths = []
    for name in "ab":
        path = write(tmp_path / f"{name}.npz", {"w": np.arange(3), "v": np.arange(3)})
        content = bytearray(path.read_bytes())
        content[content.index(b"\x93NUMPY")] = 0
        path.write_bytes(content)
        paths.append(path)
    with pytest.raises(convert.InputError) as caught:
        convert.diff(*paths)
    assert [Path(problem.path or "").name for problem in caught.value.problems] == ["a.npz", "b.npz"]
    assert convert.diff(*paths, exclude=["w"]).same


# --- memory ------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from convert.cli.main import run
status = run(sys.argv[1:])
for line in open("/proc/self/status"):
    if line.startswith("VmHWM:"):
        print(line.split()[1])
sys.exit(status)
"""
ROWS, COLUMNS = 1 << 12, 1 << 15


def sparse(path: Path, descr: str, fortran: bool, last: bytes) -> Path:
    """A .npy file of 512 MiB, zeros but for its last element."""
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': ({ROWS}, {COLUMNS}), }}"
    with path.open("wb") as file:
        file.write(b"\x93NUMPY\x01\x00v\x00" + text.ljust(117).encode() + b"\n")
        file.truncate(128 + 4 * ROWS * COLUMNS - 4)
        file.seek(0, os.SEEK_END)
        file.write(last)
    return path


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("first", "second"),
    [(("<f4", False), ("<f4", False)), (("<f4", True), (">f4", False)), (("<f4", True), ("<f4", True)),
     (("<i4", False), ("<f4", False))],
    ids=["equal bytes", "one turned", "both turned", "all looked at"],
)  # fmt: skip
def test_memory_does_not_grow_with_the_tensor(
    tmp_path: Path, first: tuple[str, bool], second: tuple[str, bool]
) -> None:
    """512 MiB on either side, and a difference at its very end, in less than 128 MiB."""
    paths = [
        sparse(tmp_path / f"{name}.npy", descr, fortran, last)
        for name, (descr, fortran), last in (("a", first, b"\0\0\0\0"), ("b", second, b"\1\1\1\1"))
    ]
    command = [sys.executable, "-c", PEAK, "diff", *map(str, paths), "--jobs", "2", "--quiet"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    )
    assert done.returncode == 6, done.stderr
    assert int(done.stdout) < 128 << 10
