"""`convert.stats` against numpy: every type, whatever the file's order, compression or number of threads."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

import convert
from convert import Stats
from convert.arrays import from_array
from convert.bins import BINS, float_grid, integer_grid
from convert.statistics import _Gatherer, measure

RNG = np.random.default_rng(20261129)
FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def stats_of(array: np.ndarray[Any, Any], folder: Path, **options: Any) -> Stats:
    """Of an array, by way of a file that numpy wrote."""
    path = folder / "x.npz"
    np.savez(path, x=array)
    found: dict[str, Stats] = convert.stats(path, **options)
    return found["x"]


def expect(found: Stats, values: np.ndarray[Any, Any]) -> None:
    """What numpy says of these values, NaNs and infinities included."""
    values = values.reshape(-1)
    assert found.count == values.size
    assert found.zeros == np.count_nonzero(values == 0)
    finite = values
    if values.dtype.kind == "f":
        assert found.nans == np.count_nonzero(np.isnan(values))
        assert found.infs == np.count_nonzero(np.isinf(values))
        finite = values[np.isfinite(values)]
    if not finite.size:
        assert (found.min, found.max, found.mean, found.std, found.counts) == (None, None, None, None, ())
        return
    assert found.min == finite.min()
    assert found.max == finite.max()
    scale = max(abs(float(finite.min())), abs(float(finite.max())))
    with np.errstate(all="ignore"):
        wide = finite.astype(np.float64) / (scale or 1.0)  # numpy's own sums overflow beyond 1e154
    assert found.mean == pytest.approx(wide.mean() * scale, rel=1e-12, abs=1e-13 * scale)
    assert found.std == pytest.approx(wide.std() * scale, rel=1e-9, abs=1e-13 * scale)
    expect_histogram(found, finite)


def expect_histogram(found: Stats, finite: np.ndarray[Any, Any]) -> None:
    """Exactly numpy's counts for the same edges, which are multiples of a power of two; outer bins are not empty."""
    edges = list(found.edges)
    assert len(edges) == len(found.counts) + 1
    assert 1 <= len(found.counts) <= BINS
    assert found.counts[0]
    assert found.counts[-1]
    exact = np.array(edges[1:-1], dtype=finite.dtype if finite.dtype.kind in "iu" else np.float64)
    index = np.searchsorted(exact, finite, side="right")
    assert np.bincount(index, minlength=len(found.counts)).tolist() == list(found.counts)
    if all(map(math.isfinite, edges)):
        width = edges[1] - edges[0]
        assert math.frexp(width)[0] == 0.5
        assert all(edge % width == 0 for edge in edges)
    distinct = len(set(finite.tolist()))
    if distinct > BINS and finite.dtype.kind == "f":
        assert len(found.counts) > BINS // 2


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_floats(name: str, suffix: str, tmp_path: Path) -> None:
    """Normal numbers, zeros of both signs, NaNs and infinities, in every float type a file can hold."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = np.concatenate([RNG.normal(0, 3, 999), [0.0, -0.0, 0.0, np.nan, np.inf, -np.inf]]).astype(dtype)
    if suffix == ".npz" and name == "float8_e4m3fn":
        pytest.skip("an npz does not say which 8-bit type it is")
    path = tmp_path / f"x{suffix}"
    if suffix == ".npz":
        np.savez(path, x=values)
    else:
        save_file({"x": values}, path)
    found = convert.stats(path)["x"]
    expect(found, values.astype(np.float64))
    assert found.note == ("as bfloat16" if (name, suffix) == ("bfloat16", ".npz") else "")


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_exact(name: str, tmp_path: Path) -> None:
    """Over the whole range, where float64 could not tell neighbours apart and sums of 64 bits overflow."""
    info = np.iinfo(name)
    values = RNG.integers(info.min, info.max, 70_000, dtype=name, endpoint=True)
    values[:2] = info.min, info.max
    found = stats_of(values, tmp_path)
    expect(found, values)
    assert isinstance(found.min, int)
    assert isinstance(found.edges[0], int)
    assert found.mean == sum(values.tolist()) / values.size


def test_neighbours_beyond_float64_are_told_apart(tmp_path: Path) -> None:
    """2**63 - 1 and 2**63 - 2 are the same float64."""
    values = np.array([2**63 - 2, 2**63 - 1, 2**63 - 1])
    found = stats_of(values, tmp_path)
    assert (found.min, found.max, found.counts) == (2**63 - 2, 2**63 - 1, (1, 2))
    assert found.edges == (2**63 - 2, 2**63 - 1, 2**63)


def test_booleans_are_0_and_1(tmp_path: Path) -> None:
    """The mean is the share of those that are true."""
    found = stats_of(np.array([True, False, True, True]), tmp_path)
    assert (found.min, found.max, found.mean, found.zeros, found.counts) == (0, 1, 0.75, 1, (1, 3))


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_complex_numbers_by_magnitude(name: str, tmp_path: Path) -> None:
    """As the note says; a NaN in either part makes it one, also beside an infinity."""
    parts = RNG.normal(size=(2, 500))
    values = (parts[0] + 1j * parts[1]).astype(name)
    found = stats_of(values, tmp_path)
    expect(found, np.abs(values.astype(np.complex128)))
    assert found.note == "magnitudes"
    odd = np.array([complex(math.nan, math.inf), complex(math.inf, 0), complex(0, math.nan), 0, 3 + 4j], name)
    found = stats_of(odd, tmp_path)
    assert (found.nans, found.infs, found.zeros, found.min, found.max) == (2, 1, 1, 0.0, 5.0)


def test_small_floats_that_npz_cannot_name(tmp_path: Path) -> None:
    """What the file remembers is used; `|V1` alone could be anything."""
    values = np.array([0.5, -1.5, 2, 448, 0], ml_dtypes.float8_e4m3fn)
    save_file({"x": values}, tmp_path / "a.safetensors")
    convert.convert_file(tmp_path / "a.safetensors", tmp_path / "b.npz", policy=convert.Policy(float8="V1"))
    found = convert.stats(tmp_path / "b.npz")["x"]
    expect(found, values.astype(np.float64))
    assert found.note == "as float8_e4m3fn, which it was"
    np.savez(tmp_path / "c.npz", x=values)
    unknown = convert.stats(tmp_path / "c.npz")["x"]
    assert (unknown.count, unknown.min, unknown.note) == (5, None, "one of many 8-bit types")


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2"])
def test_packed_types(code: str, tmp_path: Path) -> None:
    """Elements of 4 and 6 bits, unpacked as numpy's own types read them."""
    name = {"F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn"}[code]
    bits = 4 if code == "F4" else 6
    codes = RNG.integers(0, 1 << bits, 64, dtype=np.uint8)
    number = sum(int(one) << (bits * index) for index, one in enumerate(codes))
    data = number.to_bytes(64 * bits // 8, "little")
    header = json.dumps({"x": {"dtype": code, "shape": [64], "data_offsets": [0, len(data)]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    found = convert.stats(tmp_path / "x.safetensors")["x"]
    expect(found, codes.view(getattr(ml_dtypes, name)).astype(np.float64))


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "bc"]),
        np.array([b"a", b"bc"]),
        np.array(["2026-01-01", "2026-01-02"], "M8[D]"),
        np.zeros(2, [("a", "<f4"), ("b", "<i2")]),
        np.array([b"12345"] * 2, "V5"),
        np.array([{}, []], dtype=object),
    ],
    ids=["U", "S", "M8", "records", "V5", "pickle"],
)
def test_what_is_no_number_is_counted(array: np.ndarray[Any, Any], tmp_path: Path) -> None:
    """Nothing is made up for dates, strings, records and pickles, and no pickle is read."""
    assert stats_of(array, tmp_path) == Stats(2, note="no numbers")


@pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="long double is not x87's here")
def test_long_doubles_are_rounded(tmp_path: Path) -> None:
    """Described as float64, and the note says so."""
    values = np.arange(1, 9, dtype=np.longdouble) / 2
    values.view(np.uint8).reshape(8, -1)[:, 10:] = 0  # numpy leaves stray memory there, which would prove nothing
    found = stats_of(values, tmp_path)
    expect(found, values.astype(np.float64))
    assert found.note == "rounded to float64"


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2)])
def test_few_and_no_elements(shape: tuple[int, ...], tmp_path: Path) -> None:
    """A scalar, one element, none."""
    expect(stats_of(np.full(shape, 2.5), tmp_path), np.full(shape, 2.5))


def test_all_equal_is_one_bin(tmp_path: Path) -> None:
    """Whatever the value."""
    for value in (0.0, -0.0, 5e-324, -1.7e308, 3.0):
        found = stats_of(np.full(10, value), tmp_path)
        assert (found.min, found.max, found.counts) == (value, value, (10,))
        assert found.mean == pytest.approx(value)
        assert found.std == 0


@pytest.mark.parametrize("scale", [1e300, 1.7e308, 1e-300, 1e-310, 5e-324])
def test_the_ends_of_float64(scale: float, tmp_path: Path) -> None:
    """Squares would overflow, or vanish: mean and deviation are still right."""
    values = np.array([-1.0, -0.5, 0.0, 0.25, 1.0]) * scale
    found = stats_of(values, tmp_path)
    expect(found, values)
    assert found.std
    assert math.isfinite(found.std)


def test_large_and_small_together(tmp_path: Path) -> None:
    """A chunk of tiny values beside one of zeros and one of huge ones."""
    values = np.zeros(200_000)
    values[:70_000] = 1e-200
    values[-70_000:] = -1e200
    expect(stats_of(values, tmp_path), values)
    expect(stats_of(values[:140_000], tmp_path), values[:140_000])


def layouts(folder: Path, array: np.ndarray[Any, Any]) -> list[Path]:
    """The same values stored in many ways."""
    np.savez(folder / "stored.npz", x=array)
    np.savez_compressed(folder / "deflated.npz", x=array)
    np.savez(folder / "fortran.npz", x=np.asfortranarray(array))
    np.savez_compressed(folder / "both.npz", x=np.asfortranarray(array))
    np.save(folder / "big.npy", array.astype(array.dtype.newbyteorder(">")))
    save_file({"x": array}, folder / "plain.safetensors")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("name", ["float32", "int64"])
def test_order_compression_and_threads_change_nothing(name: str, tmp_path: Path) -> None:
    """Several spans and many chunks: the same figures to the last bit for one thread and four."""
    array = (RNG.normal(0, 1e6, (2300, 2000))).astype(name)
    assert array.nbytes > 16 << 20
    found = {}
    for path in layouts(tmp_path, array):
        one, four = convert.stats(path, jobs=1), convert.stats(path, jobs=4)
        assert one == four, path
        found[path.name] = next(iter(one.values()))
        expect(found[path.name], array)
    in_row_order = {found[name] for name in ("stored.npz", "plain.safetensors", "deflated.npz")}
    assert len(in_row_order) == 1


@given(
    hnp.arrays(
        np.float64,
        st.integers(0, 300),
        elements=st.floats(width=64) | st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1.7e308, -1.7e308, 1.0, -1.0]),
    ),
    st.integers(0, 300),
)
def test_any_floats_in_any_chunks(values: np.ndarray[Any, Any], cut: int) -> None:
    """However far apart, and wherever chunks end: numpy's counts for the same edges."""
    tensor = from_array("x", values)
    whole, parts = _Gatherer(tensor, ""), _Gatherer(tensor, "")
    whole.write_at(0, values.tobytes())
    for part in (values[cut:], values[:cut]):  # in the wrong order too
        parts.write_at(0, part.tobytes())
    found = parts.result()
    expect(found, values)
    assert (found.counts, found.edges, found.min, found.max) == (
        whole.result().counts, whole.result().edges, whole.result().min, whole.result().max,
    )  # fmt: skip


@given(st.integers(-(2**63), 2**64 - 1), st.integers(-(2**63), 2**64 - 1))
def test_grids_are_the_finest_that_fit(one: int, other: int) -> None:
    """Of at most BINS bins; half the width would need more."""
    low, high = min(one, other), max(one, other)
    grid = integer_grid(low, high)
    assert grid.width <= BINS
    assert grid.exponent == 0 or (high >> grid.exponent - 1) - (low >> grid.exponent - 1) >= BINS
    fine = float_grid(float(low), float(high))
    assert fine.width <= BINS
    edges = fine.edges(integers=False)
    assert edges[0] <= float(low) < edges[1]
    assert edges[-2] <= float(high) < edges[-1]


# --- damage, callers ---------------------------------------------------------------------------------------------


def damaged(folder: Path) -> Path:
    """An archive in which one member's data has a flipped bit."""
    path = folder / "bad.npz"
    np.savez(path, good=np.arange(5.0), bad=np.arange(1000.0), more=np.ones(3))
    data = bytearray(path.read_bytes())
    at = data.index(np.float64(500).tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    return path


def test_damage_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    """No figure is given for bytes that are not what was written."""
    with pytest.raises(convert.CorruptError, match="CRC-32 mismatch") as caught:
        convert.stats(damaged(tmp_path))
    assert caught.value.tensor == "bad"


def test_damage_spoils_no_other_tensor(tmp_path: Path) -> None:
    """`measure`, which listings use, has the figures of the others."""
    with convert.open(damaged(tmp_path)) as checkpoint:
        good, bad, more = measure(checkpoint.tensors)
    assert isinstance(good, Stats)
    assert isinstance(more, Stats)
    assert (good.max, more.max) == (4, 1)
    assert isinstance(bad, convert.CorruptError)


def test_a_tensor_a_checkpoint_a_path(tmp_path: Path) -> None:
    """All three give the same."""
    np.savez(tmp_path / "x.npz", a=np.arange(4.0), b=np.ones(2))
    by_path = convert.stats(tmp_path / "x.npz")
    with convert.open(tmp_path / "x.npz") as checkpoint:
        assert convert.stats(checkpoint) == by_path
        assert convert.stats(checkpoint["a"]) == by_path["a"]
    assert list(by_path) == ["a", "b"]


def test_very_many_tensors(tmp_path: Path) -> None:
    """More than are in hand at a time, in order."""
    save_file({f"t{index:04}": np.full(3, index, np.float32) for index in range(2500)}, tmp_path / "x.safetensors")
    found = convert.stats(tmp_path / "x.safetensors")
    assert [(name, one.mean) for name, one in found.items()] == [(f"t{index:04}", index) for index in range(2500)]


def test_progress_counts_all_bytes_and_can_cancel(tmp_path: Path) -> None:
    """As in a conversion."""
    np.savez(tmp_path / "x.npz", a=np.zeros(300_000), b=np.zeros(5))
    seen: list[tuple[int, int, str]] = []
    convert.stats(tmp_path / "x.npz", progress=lambda *call: seen.append(call))
    assert seen[-1][:2] == (2_400_040, 2_400_040)

    class EnoughError(Exception):
        pass

    def stop(*_: object) -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        convert.stats(tmp_path / "x.npz", progress=stop)


def test_wrong_threads_are_a_usage_error(tmp_path: Path) -> None:
    """As everywhere."""
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    with pytest.raises(convert.UsageError, match="jobs must be from 1"):
        convert.stats(tmp_path / "x.npz", jobs=0)


def test_json_holds_everything(tmp_path: Path) -> None:
    """And nothing that JSON cannot say, such as an infinite edge."""
    found = stats_of(np.array([1.7e308, -1.7e308, np.nan]), tmp_path)
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert json.loads(text) == {
        "count": 3, "zeros": 0, "nans": 1, "infs": 0, "min": -1.7e308, "max": 1.7e308, "mean": 0.0, "std": 1.7e308,
        "counts": list(found.counts), "note": "", "edges": [None if math.isinf(e) else e for e in found.edges],
    }  # fmt: skip


def test_the_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands in docs/ls.md."""
    text = (Path(__file__).parents[1] / "docs" / "ls.md").read_text("utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", w=np.array([1.0, np.nan]), n=np.arange(3))
    exec(compile(code, "docs/ls.md", "exec"), {})


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peaks are read from /proc")
@pytest.mark.parametrize("fortran", [False, True])
def test_memory_does_not_grow_with_the_tensor(fortran: bool, tmp_path: Path) -> None:
    """A gibibyte of zeros that takes no room on the disk, in either order: less than 128 MiB."""
    path = tmp_path / "x.npy"
    with path.open("wb") as file:
        facts = {"descr": "<f4", "fortran_order": fortran, "shape": (16384, 16384)}
        np.lib.format.write_array_header_1_0(file, facts)
        file.truncate(file.tell() + (1 << 30))
    code = (  # not by getrusage, which counts what the test run held before this process began
        "import sys, convert\nfound = convert.stats(sys.argv[1], jobs=2)['x']\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(found.zeros, peak.split()[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    zeros, peak = map(int, done.stdout.split())
    assert zeros == 1 << 28
    assert peak < 128 << 10
