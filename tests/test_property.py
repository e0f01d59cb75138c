"""Properties that hold for any input: exact or refused, chunks that join, readers that only ever refuse properly."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import convert
from readers import npy

from . import oracle
from . import strategies as given_by
from .strategies import FLOAT8_NAMES, NUMPY_NAMES, REFERENCE, SETTINGS, SUBBYTE_NAMES, npy_bytes, savez

Array = npt.NDArray[Any]
SAMPLES = Path(__file__).resolve().parent.parent / "samples"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """hypothesis runs many examples in one test, each of which needs a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


# --- saved and loaded --------------------------------------------------------------------------------------------


def packed(array: Array) -> bytes:
    """What a safetensors file has for an array."""
    data = oracle.canonical(array)
    if array.dtype.name not in SUBBYTE_NAMES:
        return data
    bits = oracle.CODE_BITS[oracle.SAFETENSORS_CODES[array.dtype.name]]
    joined = sum(code << bits * index for index, code in enumerate(data))
    return joined.to_bytes(len(data) * bits // 8, "little")


any_type = given_by.canonical_names


@settings(max_examples=200, **SETTINGS)
@given(given_by.dictionaries(any_type, given_by.names_with_nul), given_by.metadata)
def test_safetensors_is_exact_or_refused(arrays: dict[str, Array], metadata: dict[str, str]) -> None:
    """Every name, type, layout and bit comes out, or what cannot is named and nothing is written."""
    refused = {name for name, array in arrays.items() if array.dtype.name == "complex128" or name == "__metadata__"}
    with folder() as path:
        target = path / "a.safetensors"
        if refused:
            with pytest.raises(convert.PolicyError) as caught:
                convert.save(arrays, target, metadata=metadata)
            assert {problem.tensor for problem in caught.value.problems} == refused
            assert list(path.iterdir()) == []
            return
        convert.save(arrays, target, metadata=metadata)
        REFERENCE.deserialize(target.read_bytes())
        found, tensors = oracle.read_safetensors(target)
    assert found == metadata
    wanted = {n: (oracle.SAFETENSORS_CODES[a.dtype.name], a.shape, packed(a)) for n, a in arrays.items()}
    assert tensors == wanted
    ranks = [list(oracle.CODE_BITS).index(code) for code, _, _ in tensors.values()]
    assert ranks == sorted(ranks, reverse=True)


@settings(max_examples=200, **SETTINGS)
@given(given_by.dictionaries(any_type, given_by.names_with_nul), st.sampled_from([None, 1, 6]), st.integers(0, 9))
def test_npz_is_exact_or_refused(arrays: dict[str, Array], compress: int | None, align: int) -> None:
    """The same for npz, stored, deflated and aligned, through zipfile and np.load of each member."""
    refused = {name for name, array in arrays.items() if array.dtype.name in SUBBYTE_NAMES or "\0" in name}
    with folder() as path:
        target = path / "a.npz"
        if refused:
            with pytest.raises(convert.PolicyError) as caught:
                convert.save(arrays, target, compress=compress)
            assert {problem.tensor for problem in caught.value.problems} == refused
            assert list(path.iterdir()) == []
            return
        convert.save(arrays, target, compress=compress, align=1 << align)
        with zipfile.ZipFile(target) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    assert [name for name, _ in members] == [f"{name}.npy" for name in arrays]
    for (_, data), (name, array) in zip(members, arrays.items(), strict=True):
        check_npy(data, name, array)


@settings(max_examples=150, **SETTINGS)
@given(given_by.arrays(any_type))
def test_npy_is_exact_or_refused(array: Array) -> None:
    """The same for a single npy file."""
    with folder() as path:
        if array.dtype.name in SUBBYTE_NAMES:
            with pytest.raises(convert.PolicyError, match="cannot be held exactly"):
                convert.save({"w": array}, path / "a.npy")
            assert list(path.iterdir()) == []
            return
        convert.save({"w": array}, path / "a.npy")
        check_npy((path / "a.npy").read_bytes(), "w", array)


def check_npy(data: bytes, name: str, array: Array) -> None:
    got = np.load(io.BytesIO(data))
    opaque = array.dtype.name in (*FLOAT8_NAMES, "bfloat16")
    wanted = np.dtype(f"V{array.dtype.itemsize}") if opaque else array.dtype.newbyteorder("<")
    assert (got.dtype, got.shape) == (wanted, array.shape), name
    assert got.flags.c_contiguous, name
    assert oracle.canonical(got) == oracle.canonical(array), name


@settings(max_examples=150, **SETTINGS)
@given(given_by.dictionaries(st.sampled_from(NUMPY_NAMES)))
def test_a_folder_of_npy_is_exact(arrays: dict[str, Array]) -> None:
    """Whatever the names, each file is found again under its name, and no file leaves the folder."""
    if not arrays:
        return
    with folder() as path:
        if refused := {name for name in arrays if not name or len(name) > 200}:  # hidden, or too long for a file
            with pytest.raises(convert.PolicyError) as caught:
                convert.save(arrays, f"{path}/out/")
            assert {problem.tensor for problem in caught.value.problems} == refused
            assert list(path.iterdir()) == []
            return
        convert.save(arrays, f"{path}/out/")
        assert [entry.name for entry in path.iterdir()] == ["out"]
        files = [file for file in (path / "out").rglob("*") if file.is_file()]
        assert len(files) == len(arrays)
        assert all(file.suffix == ".npy" for file in files)
        convert.convert_file(path / "out", path / "back.safetensors")
        tensors = oracle.read_safetensors(path / "back.safetensors")[1]
    assert {name: data for name, (_, _, data) in tensors.items()} == {n: oracle.canonical(a) for n, a in arrays.items()}


@settings(max_examples=100, **SETTINGS)
@given(given_by.dictionaries(any_type), st.sampled_from(["npz", "safetensors"]), st.booleans())
def test_verify_agrees(arrays: dict[str, Array], suffix: str, keep: bool) -> None:
    """Reading back never finds a difference on a sound disk."""
    arrays = {n: a for n, a in arrays.items() if a.dtype.name not in (*SUBBYTE_NAMES, "complex128")}
    options: dict[str, Any] = {"byteorder": "keep", "order": "keep"} if keep and suffix == "npz" else {}
    with folder() as path:
        report = convert.save(arrays, path / f"a.{suffix}", verify=True, **options)
    assert report.verified
    import hashlib

    assert {row.name: row.sha256 for row in report.tensors} == {
        name: hashlib.sha256(oracle.canonical(array)).hexdigest() for name, array in arrays.items()
    }


# --- chunks ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(array: Array, container: str) -> Iterator[convert.Tensor]:
    """The one tensor of a file that numpy or safetensors wrote."""
    with folder() as path:
        if container == "npy":
            np.save(path / "w.npy", array)
        elif container == "safetensors":
            oracle.save_with_reference(path / "w.safetensors", {"w": array})
        else:
            savez(path / "w.npz", {"w": array}, compressed=container == "deflated")
        (file,) = path.iterdir()
        with convert.open(file) as checkpoint:
            yield checkpoint["w"]


containers = st.sampled_from(["npy", "npz", "deflated", "safetensors"])
plain_arrays = given_by.arrays(st.sampled_from(NUMPY_NAMES))


@settings(max_examples=400, **SETTINGS)
@given(plain_arrays, containers, given_by.chunk_sizes)
def test_chunks_join_to_the_canonical_bytes(array: Array, container: str, chunk_bytes: int) -> None:
    """Any chunk size and any layout give the same bytes, each time they are asked for."""
    with opened(array, container) as tensor:
        first = b"".join(bytes(chunk) for chunk in tensor.chunks(chunk_bytes))
        again = b"".join(bytes(chunk) for chunk in tensor.chunks())
        values = tensor.numpy()
    assert first == again == oracle.canonical(array)
    assert (values.dtype, values.shape) == (array.dtype.newbyteorder("<"), array.shape)
    assert values.tobytes() == first


@settings(max_examples=150, **SETTINGS)
@given(plain_arrays, containers, given_by.chunk_sizes)
def test_chunks_are_about_as_large_as_asked(array: Array, container: str, chunk_bytes: int) -> None:
    """No chunk is empty, or longer than asked for when an element fits; memory would follow."""
    with opened(array, container) as tensor:
        sizes = [len(chunk) for chunk in tensor.chunks(chunk_bytes)]
    assert all(0 < size <= max(chunk_bytes, array.itemsize) for size in sizes)
    assert sum(sizes) == array.nbytes


@pytest.mark.parametrize("container", ["npy", "npz", "deflated"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_large_fortran_arrays_in_chunks(container: str, order: str) -> None:
    """Rows far apart go through a temporary file; many chunks, all sizes, the same bytes."""
    values = np.arange(700 * 1300, dtype=f"{order}f4").reshape(700, 1300)
    with opened(np.asfortranarray(values), container) as tensor:
        for chunk_bytes in (1 << 10, 65_537, 1 << 20, 1 << 24):
            joined = b"".join(bytes(chunk) for chunk in tensor.chunks(chunk_bytes))
            assert joined == oracle.canonical(values), chunk_bytes


def test_chunks_can_be_left_half_way() -> None:
    """A reader that stops early, or two at once, disturb no other."""
    values = np.arange(300_000, dtype=np.int32)
    for container in ("npy", "npz", "deflated", "safetensors"):
        with opened(values, container) as tensor:
            left = tensor.chunks(1000)
            start = bytes(next(left))
            pairs = [(bytes(a), bytes(b)) for a, b in zip(tensor.chunks(4096), tensor.chunks(4096), strict=True)]
            assert all(a == b for a, b in pairs)
            assert b"".join(a for a, _ in pairs) == values.tobytes()
            assert start + bytes(next(left)) == values.tobytes()[:2000]


@settings(max_examples=100, **SETTINGS)
@given(given_by.arrays(any_type))
def test_arrays_in_memory_are_read_whatever_their_layout(array: Array) -> None:
    """`convert.save` then `convert.load` gives the array back: type, shape and bits."""
    if array.dtype.name == "complex128":
        return
    with folder() as path:
        convert.save({"w": array}, path / "a.safetensors")
        found = convert.load(path / "a.safetensors")["w"]
    assert found.shape == array.shape
    assert found.dtype.name == array.dtype.name
    assert found.tobytes() == oracle.canonical(array)


# --- npy headers -------------------------------------------------------------------------------------------------

_DESCRS = ["<f4", ">f4", "|u1", "<u1", ">u1", "|b1", "<b1", "<c8", ">c16", "<f8", "<i8", ">i2", "<f2", "<f1", "|f1"]
_ODD = [">f1", "<g2", ">g2", "<f12", "<f16", ">f16", "<c24", "<c32", "<V2", "|V2", "|V1", "|S5", "<U3", "|O", "<M8"]
_ODDER = ["<f04", "<f3", "<i16", "<f128", "f4", "=f4", "<F4", "<l8", "<p8", "", "<", "<f", "float32", "bfloat16", "|i4"]
descrs = st.one_of(
    st.sampled_from(_DESCRS),
    st.sampled_from(_ODD),
    st.sampled_from(_ODDER),
    st.tuples(st.sampled_from("<>|"), st.characters(codec="ascii", categories=["Ll"]), st.integers(0, 99)).map(
        lambda parts: f"{parts[0]}{parts[1]}{parts[2]}"
    ),
)
sizes = st.one_of(
    st.integers(0, 9).map(str),
    st.integers(0, 10**20).map(str),
    st.sampled_from(["00", "01", "-1", "1.0", "1L", "0x1", "True", "None", "9" * 18, "9" * 19, "9223372036854775807"]),
)


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """The dictionary as numpy writes it, or nearly so."""
    shape = draw(st.lists(sizes, max_size=4))
    inner = ", ".join(shape) + ("," if len(shape) == 1 else "")
    text = (
        f"{{'descr': '{draw(descrs)}', 'fortran_order': {draw(st.sampled_from(['True', 'False']))}, "
        f"'shape': ({inner}), }}{' ' * draw(st.integers(0, 5))}\n"
    )
    if draw(st.booleans()):  # a near-miss: one change
        at = draw(st.integers(0, len(text)))
        cut = draw(st.integers(0, 2))
        text = (
            text[:at] + draw(st.sampled_from(["", " ", ",", "'", "(", ")", "1", "\n", "\0", "\t"])) + text[at + cut :]
        )
    return text.encode("latin-1")


@settings(max_examples=1500, **SETTINGS)
@given(headers(), st.booleans())
@example(b"{'descr': '|f1', 'fortran_order': False, 'shape': (3,), }\n", False)
@example(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3), }\n", False)
@example(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4,), }\n", False)
@example(b"{'descr': '<f4', 'fortran_order': True, 'shape': (), }\n", False)
@example(b"{'descr': '<f4', 'fortran_order': True, 'shape': (,), }\n", False)
def test_the_fast_path_agrees_with_the_grammar(body: bytes, utf8: bool) -> None:
    """What the short cut for common headers accepts, the strict parser reads the same."""
    common = npy.parse_common(body)
    if common is not None:
        assert common == npy._parse_strict(body, utf8)
        assert npy.parse_header(body, utf8=utf8) == common


@settings(max_examples=1000, **SETTINGS)
@given(headers())
def test_headers_mean_what_numpy_thinks(body: bytes) -> None:
    """Where both read a header, shape, order and type are the same; where we do not, it is refused properly."""
    try:
        header = npy.parse_header(body)
    except convert.ConvertError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, about `2L` and the alias 'a'
        try:
            literal = np.lib.format.read_array_header_1_0(io.BytesIO(len(body).to_bytes(2, "little") + body))
        except ValueError:
            return  # a type of ours that numpy lacks
    shape, fortran, dtype = literal
    assert header.shape == shape
    assert header.fortran == fortran
    if header.dtype.kind in ("plain", "complex128"):
        assert header.dtype.name == dtype.name
        assert header.big == (dtype.byteorder == ">")
    assert header.dtype.bits == 8 * dtype.itemsize or dtype.hasobject


# --- damaged files -----------------------------------------------------------------------------------------------


def drain(checkpoint: convert.Checkpoint) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything a checkpoint hands out; a refusal of one tensor leaves it out."""
    found = {}
    for tensor in checkpoint.values():
        with contextlib.suppress(convert.ConvertError):
            if tensor.dtype.kind in ("object", "broken"):
                assert tensor.problem is not None or tensor.dtype.kind == "object"
                continue
            found[tensor.name] = (
                tensor.dtype.name,
                tensor.shape,
                b"".join(bytes(chunk) for chunk in tensor.chunks(1 << 16)),
            )
    return found


def read_ours(data: bytes, suffix: str) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """What we make of any bytes: tensors, or None for a refusal; anything else fails the test."""
    with folder() as path:
        file = path / f"w.{suffix}"
        file.write_bytes(data)
        caught: convert.ConvertError | None = None
        try:
            with convert.open(file, format=suffix) as checkpoint:
                return drain(checkpoint)
        except convert.ConvertError as err:
            caught = err
        assert all(str(file) in str(problem) for problem in caught.problems)
        return None


def read_numpy(data: bytes, suffix: str) -> dict[str, Array]:
    """What numpy makes of them; empty where it refuses, whatever it raises."""
    found = {}
    with contextlib.suppress(Exception):
        if suffix == "npy":
            return {"w": np.load(io.BytesIO(data))}
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                with contextlib.suppress(Exception):
                    found[info.filename.removesuffix(".npy")] = np.load(io.BytesIO(archive.read(info)))
    return found


def read_reference(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with contextlib.suppress(Exception):
        pairs = REFERENCE.deserialize(data)
        return {name: (value["dtype"], tuple(value["shape"]), bytes(value["data"])) for name, value in pairs}
    return {}


def check_any_bytes(data: bytes, suffix: str) -> None:
    ours = read_ours(data, suffix)
    if ours is None:
        return
    if suffix == "safetensors":
        reference = read_reference(data)
        for name in ours.keys() & reference.keys():
            kind, shape, content = ours[name]
            assert (oracle.SAFETENSORS_CODES[kind], shape, content) == reference[name]
        return
    for name, array in read_numpy(data, suffix).items():
        if name not in ours or array.dtype.hasobject:
            continue
        kind, shape, content = ours[name]
        if kind != "blob":
            assert shape == array.shape + array.dtype.shape, name
            assert content == oracle.canonical(array), name


def seeds_of(suffix: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(SAMPLES.glob(f"*.{suffix}"))]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to three changes, mostly where the structure is."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(out) + 1)
        change = rng.randrange(7)
        if change == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif change == 1 and at < len(out):
            out[at] = rng.choice(b"\x00\xff\x01\x7f\x80 '\"(){}[]:,0129-")
        elif change == 2:
            del out[at : at + rng.choice([1, 2, 4, 8, 30])]
        elif change == 3:
            out[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice([1, 2, 4, 8])))
        elif change == 4:
            out[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x01\0\0\0", b"\xff\xff\xff\x7f"])
        elif change == 5:
            other = rng.randrange(len(out) + 1)
            out[at : at + 16] = out[other : other + 16]
        else:
            del out[at:]
    return bytes(out)


@pytest.mark.parametrize("batch", range(4))
@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_damaged_samples_give_tensors_or_a_refusal(suffix: str, batch: int) -> None:
    """Whatever is done to a valid file: tensors or a ConvertError, and never other bytes than the references see."""
    samples = seeds_of(suffix)
    for seed in range(batch * 300, (batch + 1) * 300):
        rng = random.Random(seed)
        data = mutated(rng.choice(samples), rng)
        try:
            check_any_bytes(data, suffix)
        except BaseException as err:
            err.add_note(f"seed {seed}, {suffix}: {data[:400]!r}")
            raise


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_every_prefix_of_a_sample_is_refused_or_read(suffix: str) -> None:
    """A cut file never gives tensors that the whole one has not, and never another error."""
    for data in sorted(seeds_of(suffix), key=len)[:6]:
        whole = read_ours(data, suffix)
        for length in range(0, len(data), 1 if len(data) < 300 else 7):
            part = read_ours(data[:length], suffix)
            assert part is None or whole is None or part.items() <= whole.items(), length


@settings(max_examples=300, **SETTINGS)
@given(st.binary(max_size=300), st.sampled_from(["npy", "npz", "safetensors"]))
def test_random_bytes_give_tensors_or_a_refusal(data: bytes, suffix: str) -> None:
    """Noise is refused properly."""
    check_any_bytes(data, suffix)


_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(allow_nan=False), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)
_entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(sorted(oracle.CODE_BITS)), _json),
        "shape": st.one_of(st.lists(st.integers(0, 3), max_size=3), _json),
        "data_offsets": st.one_of(st.tuples(st.integers(0, 16), st.integers(0, 16)).map(sorted), _json),
    },
    optional={"extra": _json},
)


@settings(max_examples=500, **SETTINGS)
@given(
    st.dictionaries(st.one_of(st.text(max_size=3), st.just("__metadata__")), st.one_of(_entries, _json), max_size=3),
    st.binary(max_size=16),
)
def test_any_json_header_gives_tensors_or_a_refusal(header: dict[str, Any], body: bytes) -> None:
    """A header that is JSON of any kind: what we accept, the reference reads the same."""
    text = json.dumps(header).encode()
    check_any_bytes(len(text).to_bytes(8, "little") + text + body, "safetensors")


@settings(max_examples=200, **SETTINGS)
@given(headers(), st.binary(max_size=40), st.sampled_from([b"\x01\0", b"\x02\0", b"\x03\0", b"\x01\x01"]))
def test_any_npy_header_gives_a_tensor_or_a_refusal(body: bytes, data: bytes, version: bytes) -> None:
    """The same for npy headers with any data behind them."""
    length = len(body).to_bytes(2 if version[0] == 1 else 4, "little")
    check_any_bytes(b"\x93NUMPY" + version + length + body + data, "npy")


def test_the_oracle_itself_is_strict() -> None:
    """A check of the checkers: numpy's bytes through our reader and through the oracle differ in nothing."""
    check: Callable[[bytes, str], None] = check_any_bytes
    for array in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3))):
        ours = read_ours(npy_bytes(array), "npy")
        assert ours == {"w": (array.dtype.name, array.shape, oracle.canonical(array))}
        check(npy_bytes(array), "npy")
