"""What a format cannot say natively is remembered, so that the way back gives the original, byte for byte."""

from __future__ import annotations

import base64
import json
import random
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

import convert

from . import oracle
from .strategies import FLOAT8_NAMES, REFERENCE, SUBBYTE_NAMES, dtype_of, npy_bytes, savez, with_bytes

Array = npt.NDArray[Any]
KEY = "tensor-convert"
HAS_X87 = np.finfo(np.longdouble).nmant == 63 and np.dtype(np.longdouble).itemsize == 16
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0, 2), (1,), (2, 4), (3, 5, 8), (4, 3))

ENCODINGS = {
    **{name: ("",) for name in oracle.SAFETENSORS_CODES if dtype_of(name).kind != "V"},
    "bfloat16": ("V2", "uint16", "float32"),
    **dict.fromkeys(FLOAT8_NAMES, ("V1", "uint8", "float32")),
    **dict.fromkeys(SUBBYTE_NAMES, ("packed", "unpack", "float32")),
}
KIND_OF = {"bfloat16": "bfloat16", **dict.fromkeys(FLOAT8_NAMES, "float8"), **dict.fromkeys(SUBBYTE_NAMES, "subbyte")}

Entries = Mapping[str, tuple[str, tuple[int, ...], bytes]]


def write_reference(path: Path, entries: Entries, metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file in the reference's own form; the library writes it, float4 and float6 excepted.

    From Python it writes no float6, and no float4 whose last axis is odd.
    """
    assert metadata is None or len(metadata) < 2, "the library orders keys at random"
    if not any(code in ("F4", "F6_E2M3", "F6_E3M2") for code, _, _ in entries.values()):
        arrays = {name: _as_array(code, shape, data) for name, (code, shape, data) in entries.items()}
        oracle.save_with_reference(path, arrays, metadata)
        return path.read_bytes()
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    body = b""
    for name, (code, shape, data) in sorted(entries.items(), key=lambda item: (-_rank(item[1][0]), item[0])):
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    REFERENCE.deserialize(path.read_bytes())  # the library agrees that it is one
    return path.read_bytes()


def _rank(code: str) -> int:
    return list(oracle.CODE_BITS).index(code)


def _as_array(code: str, shape: tuple[int, ...], data: bytes) -> Array:
    name = next(name for name, known in oracle.SAFETENSORS_CODES.items() if known == code)
    return np.frombuffer(data, dtype_of(name)).reshape(shape)


def entries_of(name: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Tensors of one type in every shape it has, of arbitrary bits."""
    code = oracle.SAFETENSORS_CODES[name]
    found = {}
    for seed, shape in enumerate(SHAPES):
        bits = int(np.prod(shape)) * oracle.CODE_BITS[code]
        if bits % 8 == 0:
            raw = with_bytes(np.dtype(bool if name == "bool" else np.uint8), (bits // 8,), seed)
            found[f"w{seed}"] = (code, shape, raw.tobytes())
    return found


@pytest.mark.parametrize(
    ("name", "action"), [(name, action) for name, actions in ENCODINGS.items() for action in actions]
)
@pytest.mark.parametrize("compress", [None, True], ids=["stored", "deflated"])
def test_safetensors_through_npz_is_the_same_file(
    name: str, action: str, compress: bool | None, tmp_path: Path
) -> None:
    """Whatever the encoding in the npz, the way back gives the first file's bytes, header and all."""
    before = write_reference(tmp_path / "a.safetensors", entries_of(name), {"format": "pt"})
    policy = convert.Policy.parse([f"{KIND_OF[name]}={action}"] if action else [])
    convert.convert_file(tmp_path / "a.safetensors", tmp_path / "b.npz", policy=policy, compress=compress)
    with np.load(tmp_path / "b.npz") as archive:
        assert set(archive.files) == set(entries_of(name))
        wanted = {"": dtype_of(name).str, "V2": "|V2", "V1": "|V1", "uint16": "<u2", "float32": "<f4"}.get(
            action, "|u1"
        )
        assert {archive[key].dtype.str for key in archive.files} == {wanted}
    convert.convert_file(tmp_path / "b.npz", tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == before


@pytest.mark.parametrize("byteorder", ["little", "big", "keep"])
def test_byte_order_in_between_does_not_matter(byteorder: str, tmp_path: Path) -> None:
    """Encoded tensors survive a big-endian npz too."""
    entries = {f"{name}.{key}": entry for name in oracle.SAFETENSORS_CODES for key, entry in entries_of(name).items()}
    before = write_reference(tmp_path / "a.safetensors", entries)
    for rules in (
        ["bfloat16=uint16", "float8=uint8", "subbyte=unpack"],
        ["bfloat16=float32", "float8=float32", "subbyte=float32"],
    ):
        policy = convert.Policy.parse(rules)
        options: dict[str, Any] = {"byteorder": byteorder, "overwrite": True, "policy": policy}
        convert.convert_file(tmp_path / "a.safetensors", tmp_path / "b.npz", **options)
        convert.convert_file(tmp_path / "b.npz", tmp_path / "c.npz", order="keep", **options)
        convert.convert_file(tmp_path / "c.npz", tmp_path / "d.safetensors", overwrite=True)
        assert (tmp_path / "d.safetensors").read_bytes() == before


def test_float32_means_the_values(tmp_path: Path) -> None:
    """`float32` holds what ml_dtypes says the small float is worth."""
    for name in ("bfloat16", *FLOAT8_NAMES):
        codes = np.arange(256, dtype=np.uint8)
        array = (np.repeat(codes, 2) if name == "bfloat16" else codes).view(dtype_of(name))
        oracle.save_with_reference(tmp_path / "a.safetensors", {"w": array})
        policy = convert.Policy.parse([f"{KIND_OF[name]}=float32"])
        convert.convert_file(tmp_path / "a.safetensors", tmp_path / "w.npy", policy=policy, overwrite=True)
        found, wanted = np.load(tmp_path / "w.npy"), array.astype(np.float32)
        numbers = ~np.isnan(wanted)
        assert found.dtype == np.float32
        assert np.array_equal(np.isnan(found), ~numbers), name
        assert found[numbers].tobytes() == wanted[numbers].tobytes(), name


# --- metadata ----------------------------------------------------------------------------------------------------

RICH = {
    "empty": {},
    "one": {"format": "pt"},
    "unicode": {"": '\u4f60\u597d \U0001f9ca \x00\x1f\x7f\u2028 "quotes" \\ \n\t'},
    "json": {"config": json.dumps({"a": [1, 2.5, None], "tensor-convert": {"x": "y"}})},
    "compressible": {"log": "epoch 1, loss 0.5; " * 20_000},
}


@pytest.mark.parametrize("case", RICH)
@pytest.mark.parametrize("compress", [None, True], ids=["stored", "deflated"])
def test_metadata_survives_an_npz(case: str, compress: bool | None, tmp_path: Path) -> None:
    """Metadata comes back exactly, however rich, and more than 64 KiB of it if it compresses."""
    before = write_reference(tmp_path / "a.safetensors", entries_of("float32"), RICH[case])
    convert.convert_file(tmp_path / "a.safetensors", tmp_path / "b.npz", compress=compress)
    with zipfile.ZipFile(tmp_path / "b.npz") as archive:
        assert archive.testzip() is None
        assert len(archive.comment) <= 0xFFFF
        assert bool(archive.comment) == bool(RICH[case])
    convert.convert_file(tmp_path / "b.npz", tmp_path / "c.safetensors")
    after = (tmp_path / "c.safetensors").read_bytes()
    if RICH[case]:
        assert after == before
    else:  # the reference writes an empty object, we leave it out
        metadata, tensors = oracle.read_safetensors(tmp_path / "c.safetensors")
        assert (metadata, tensors) == ({}, entries_of("float32"))


def test_many_metadata_keys_survive_an_npz(tmp_path: Path) -> None:
    """Several keys too; ours are sorted, so a file of ours comes back as it was."""
    metadata = {"b": "2", "a": "1", "\u00e9": "3", "": "0"}
    convert.save({"w": np.arange(3)}, tmp_path / "a.safetensors", metadata=metadata)
    convert.convert_file(tmp_path / "a.safetensors", tmp_path / "b.npz")
    convert.convert_file(tmp_path / "b.npz", tmp_path / "c.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()
    assert oracle.read_safetensors(tmp_path / "c.safetensors")[0] == metadata


def test_metadata_that_does_not_fit_is_refused_and_the_hint_works(tmp_path: Path) -> None:
    """More than 64 KiB of noise fits no npz: refused, nothing written; the policy in the hint goes through."""
    noise = base64.b64encode(random.Random(0).randbytes(90_000)).decode()
    write_reference(tmp_path / "a.safetensors", entries_of("float32"), {"noise": noise})
    with pytest.raises(convert.PolicyError, match="no room for metadata 'noise'") as caught:
        convert.convert_file(tmp_path / "a.safetensors", tmp_path / "b.npz")
    assert "--policy metadata=skip" in str(caught.value.hint)
    assert not (tmp_path / "b.npz").exists()
    convert.convert_file(tmp_path / "a.safetensors", tmp_path / "b.npz", policy=convert.Policy(metadata="skip"))
    with np.load(tmp_path / "b.npz") as archive:
        assert {name: archive[name].tobytes() for name in archive.files} == {
            name: data for name, (_, _, data) in entries_of("float32").items()
        }
    with zipfile.ZipFile(tmp_path / "b.npz") as archive:
        assert archive.comment == b""


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_metadata_that_is_no_unicode_is_refused(text: str, suffix: str, tmp_path: Path) -> None:
    """A lone surrogate is no text; it is refused before anything is written."""
    for metadata in ({"k": text}, {text: "v"}):
        with pytest.raises(convert.PolicyError, match="not valid Unicode"):
            convert.save({"w": np.zeros(1)}, tmp_path / f"a.{suffix}", metadata=metadata)
    assert list(tmp_path.iterdir()) == []


# --- npz -> safetensors -> npz -----------------------------------------------------------------------------------

UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
TIMES = ["", *(f"[{unit}]" for unit in UNITS), "[25s]", "[7D]", "[100ns]"]

LOSSLESS: list[tuple[str, str]] = [
    *((f"{kind}{unit}", f"{kind}=int64") for kind in ("datetime64", "timedelta64") for unit in TIMES),
    ("complex128", "complex128=pair"),
    ("S1", "bytes=uint8"),
    ("S5", "bytes=uint8"),
    ("U1", "str=uint32"),
    ("U3", "str=uint32"),
    ("V5", "void=uint8"),
    ("V16", "void=uint8"),
    ("V1", "V1=uint8"),
    ("V1", "V1=int8"),
    ("V2", "V2=uint16"),
]


@pytest.mark.parametrize(("name", "rule"), LOSSLESS, ids=[f"{name}-{rule}" for name, rule in LOSSLESS])
def test_npz_through_safetensors_is_the_same_arrays(name: str, rule: str, tmp_path: Path) -> None:
    """The npy members come back byte for byte: type, unit, shape and bits."""
    arrays = {f"w{seed}": with_bytes(np.dtype(name), shape, seed) for seed, shape in enumerate(SHAPES)}
    assert through_safetensors(arrays, rule, tmp_path) == npy_members(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["S0", "U0", "V0"])
def test_types_without_bytes_come_back(name: str, tmp_path: Path) -> None:
    """Zero-width elements are still typed and shaped."""
    array = np.ndarray((3,), np.dtype(name))
    assert array.dtype.itemsize == 0
    rule = {"S": "bytes=uint8", "U": "str=uint32", "V": "void=uint8"}[name[0]]
    assert through_safetensors({"w": array}, rule, tmp_path) == npy_members(tmp_path / "a.npz")


@pytest.mark.skipif(not HAS_X87, reason="np.longdouble is not x87 in 16 bytes here")
@pytest.mark.parametrize("name", ["longdouble", "clongdouble"])
def test_long_doubles_come_back_with_every_bit(name: str, tmp_path: Path) -> None:
    """`longdouble=bytes` keeps even what is no number."""
    arrays = {f"w{seed}": with_bytes(np.dtype(name), shape, seed) for seed, shape in enumerate(SHAPES)}
    assert through_safetensors(arrays, "longdouble=bytes", tmp_path) == npy_members(tmp_path / "a.npz")


@pytest.mark.parametrize("order", ["little", "big"])
def test_sources_of_any_order_come_back_little(order: Literal["little", "big"], tmp_path: Path) -> None:
    """Byte order is canonical afterwards; values and types are the same."""
    names = ("datetime64[ns]", "timedelta64[25s]", "complex128", "U3")
    arrays = {name: np.asfortranarray(with_bytes(np.dtype(name).newbyteorder(order), (2, 3), 5)) for name in names}
    savez(tmp_path / "a.npz", arrays)
    policy = convert.Policy.preset("lossless")
    convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors", policy=policy)
    convert.convert_file(tmp_path / "b.safetensors", tmp_path / "c.npz", policy=policy)
    with np.load(tmp_path / "c.npz") as archive:
        for name, array in arrays.items():
            assert archive[name].dtype == array.dtype.newbyteorder("<")
            assert archive[name].tobytes() == oracle.canonical(array)


def test_blobs_come_back(tmp_path: Path) -> None:
    """A member that is no array becomes bytes with a memory of its name, and a member again."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("w.npy", npy_bytes(np.arange(3)))
        archive.writestr("README.txt", b"hello")
        archive.writestr("empty", b"")
        archive.writestr("folder/x.json", b"{}", zipfile.ZIP_DEFLATED)
    convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors", policy=convert.Policy(blob="uint8"))
    tensors = oracle.read_safetensors(tmp_path / "b.safetensors")[1]
    assert tensors["README.txt"] == ("U8", (5,), b"hello")
    convert.convert_file(tmp_path / "b.safetensors", tmp_path / "c.npz")
    with zipfile.ZipFile(tmp_path / "a.npz") as before, zipfile.ZipFile(tmp_path / "c.npz") as after:
        assert {name: after.read(name) for name in after.namelist()} == {
            name: before.read(name) for name in before.namelist()
        }


def test_blobs_alone_are_no_npz(tmp_path: Path) -> None:
    """Nobody would read an archive without arrays, we included; the bytes go where the hint says."""
    np.savez(tmp_path / "in.npz", a=np.arange(3))
    with zipfile.ZipFile(tmp_path / "in.npz", "a") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(convert.PolicyError, match="no array in the npz") as caught:
        convert.convert_file(tmp_path / "in.npz", tmp_path / "out.npz", include=["readme.txt"])
    assert "safetensors" in str(caught.value.hint)
    policy = convert.Policy(blob="uint8")
    convert.convert_file(tmp_path / "in.npz", tmp_path / "out.safetensors", include=["readme.txt"], policy=policy)
    assert convert.load(tmp_path / "out.safetensors")["readme.txt"].tobytes() == b"hello"
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".npz"] == ["in.npz"]


def test_a_note_of_a_blob_fits_bytes_only(tmp_path: Path) -> None:
    """An array of another type, or of other dimensions, never was a member without a type."""
    note = {"x": {"dtype": "blob", "encoding": "bytes", "shape": []}}
    metadata = {"tensor-convert": json.dumps(note)}
    safetensors.numpy.save_file({"x": np.array(True)}, tmp_path / "in.safetensors", metadata)
    convert.convert_file(tmp_path / "in.safetensors", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as archive:
        assert archive["x"].dtype == bool


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (np.array(b"hello"), "bytes=metadata"),
        (np.array(b"hello", "S9"), "bytes=metadata"),
        (np.array("caf\u00e9 \U0001f9ca"), "str=metadata"),
        (np.array("", "U4"), "str=metadata"),
    ],
    ids=["S5", "S9", "U6", "U4"],
)
def test_0d_strings_come_back_from_the_metadata(value: Array, rule: str, tmp_path: Path) -> None:
    """A 0-d string lives in the metadata, where people read it, and is an array again on the way back."""
    arrays = {"name": value, "w": np.arange(3.0)}
    assert through_safetensors(arrays, rule, tmp_path) == npy_members(tmp_path / "a.npz")
    metadata, tensors = oracle.read_safetensors(tmp_path / "b.safetensors")
    assert metadata["name"] == (value.item().decode() if value.dtype.kind == "S" else value.item())
    assert set(tensors) == {"w"}


@pytest.mark.parametrize(
    ("value", "rule"),
    [(np.array(["a"]), "str=metadata"), (np.array(b"\xff"), "bytes=metadata"), (np.array("a\ud800"), "str=metadata")],
    ids=["1d", "no-utf8", "surrogate"],
)
def test_other_strings_are_no_metadata(value: Array, rule: str, tmp_path: Path) -> None:
    """What metadata cannot hold exactly is refused."""
    np.savez(tmp_path / "a.npz", name=value)
    with pytest.raises(convert.PolicyError):
        convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors", policy=convert.Policy.parse([rule]))
    assert not (tmp_path / "b.safetensors").exists()


def test_a_metadata_text_of_that_name_is_not_overwritten(tmp_path: Path) -> None:
    """Two texts of one name are refused, not merged."""
    np.savez(tmp_path / "a.npz", name=np.array("x"))
    with pytest.raises(convert.PolicyError, match="already"):
        convert.convert_file(
            tmp_path / "a.npz",
            tmp_path / "b.safetensors",
            policy=convert.Policy(str="metadata"),
            metadata={"name": "y"},
        )


def through_safetensors(arrays: Mapping[str, Array], rule: str, folder: Path) -> dict[str, bytes]:
    """a.npz -> b.safetensors (encoded) -> c.npz; the members of the last."""
    savez(folder / "a.npz", arrays)
    policy = convert.Policy.parse([rule])
    convert.convert_file(folder / "a.npz", folder / "b.safetensors", policy=policy)
    REFERENCE.deserialize((folder / "b.safetensors").read_bytes())
    oracle.read_safetensors(folder / "b.safetensors")
    convert.convert_file(folder / "b.safetensors", folder / "c.npz")
    return npy_members(folder / "c.npz")


def npy_members(path: Path) -> dict[str, bytes]:
    """The npy files in an archive; `<V2` and `|V2` are two spellings of one type, as numpy sees it."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).replace(b"'<V", b"'|V") for name in archive.namelist()}


# --- npy cannot remember -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["out.npy", "out/"])
def test_npy_reports_what_it_cannot_remember(target: str, tmp_path: Path) -> None:
    """Metadata and encodings are named in the report when npy drops them, refused under `metadata=error`."""
    entries = {"w": ("BF16", (2,), b"abcd")}
    write_reference(tmp_path / "a.safetensors", entries, {"format": "pt"})
    report = convert.convert_file(tmp_path / "a.safetensors", f"{tmp_path}/{target}")
    (note,) = report.notes
    assert "cannot remember" in note
    assert "'format'" in note
    assert "encoded" in note
    written = tmp_path / "out" / "w.npy" if target == "out/" else tmp_path / "out.npy"
    assert np.load(written).tobytes() == b"abcd"

    with pytest.raises(convert.PolicyError, match="no room for metadata 'format' and how encoded"):
        convert.convert_file(
            tmp_path / "a.safetensors", f"{tmp_path}/new{target}", policy=convert.Policy(metadata="error")
        )
    assert not (tmp_path / f"new{target}").exists()
    quiet = convert.convert_file(
        tmp_path / "a.safetensors", f"{tmp_path}/{target}", overwrite=True, policy=convert.Policy(metadata="skip")
    )
    assert quiet.notes == []


def test_npy_needs_no_note_when_nothing_is_lost(tmp_path: Path) -> None:
    """No metadata, no encoding: no note, and `metadata=error` has nothing to refuse."""
    write_reference(tmp_path / "a.safetensors", {"w": ("F32", (1,), b"abcd")})
    report = convert.convert_file(
        tmp_path / "a.safetensors", tmp_path / "w.npy", policy=convert.Policy(metadata="error")
    )
    assert report.notes == []


# --- copies keep the memory --------------------------------------------------------------------------------------


def test_a_copy_keeps_the_memory(tmp_path: Path) -> None:
    """safetensors to safetensors, and npz to npz, carry what is remembered; so does any number of steps."""
    times = np.array(["2020-01-01", "NaT"], "M8[D]")
    np.savez(tmp_path / "a.npz", t=times, z=np.array([1 + 2j]))
    policy = convert.Policy.preset("lossless")
    convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors", policy=policy, metadata={"k": "v"})
    convert.convert_file(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()
    convert.convert_file(tmp_path / "c.safetensors", tmp_path / "d.npz")
    assert npy_members(tmp_path / "d.npz") == npy_members(tmp_path / "a.npz")

    write_reference(tmp_path / "e.safetensors", entries_of("float6_e2m3fn"), {"format": "pt"})
    convert.convert_file(tmp_path / "e.safetensors", tmp_path / "f.npz", policy=policy)
    convert.convert_file(tmp_path / "f.npz", tmp_path / "g.npz", compress=True)
    convert.convert_file(tmp_path / "g.npz", tmp_path / "h.npz")
    assert (tmp_path / "f.npz").read_bytes() == (tmp_path / "h.npz").read_bytes()
    convert.convert_file(tmp_path / "h.npz", tmp_path / "i.safetensors")
    assert (tmp_path / "e.safetensors").read_bytes() == (tmp_path / "i.safetensors").read_bytes()


def test_a_wish_about_the_original_type_reaches_it(tmp_path: Path) -> None:
    """Policies and casts speak about what a tensor was, not about how it is encoded."""
    np.savez(tmp_path / "a.npz", z=np.array([1 + 2j, 3 - 4j]))
    convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors", policy=convert.Policy(complex128="pair"))
    convert.convert_file(
        tmp_path / "b.safetensors", tmp_path / "c.safetensors", policy=convert.Policy(complex128="complex64")
    )
    wanted = np.array([1 + 2j, 3 - 4j], np.complex64).tobytes()
    assert oracle.read_safetensors(tmp_path / "c.safetensors") == ({}, {"z": ("C64", (2,), wanted)})


# --- notes that do not fit ---------------------------------------------------------------------------------------


def _note(**values: object) -> dict[str, object]:
    return {"dtype": "datetime64[ns]", "encoding": "bytes", "shape": [4], **values}


DAMAGED: dict[str, object] = {
    "null": None,
    "list": [],
    "text": "datetime64",
    "number": 5,
    "empty": {},
    "no-dtype": {"encoding": "bytes", "shape": [4]},
    "no-shape": {"dtype": "datetime64[ns]", "encoding": "bytes"},
    "no-encoding": {"dtype": "datetime64[ns]", "shape": [4]},
    "dtype-null": _note(dtype=None),
    "dtype-list": _note(dtype=["int64"]),
    "dtype-unknown": _note(dtype="float1024"),
    "dtype-empty": _note(dtype=""),
    "dtype-object": _note(dtype="object"),
    "dtype-structured": _note(dtype="structured"),
    "dtype-broken": _note(dtype="unreadable"),
    "dtype-huge": _note(dtype="V" + "9" * 18),
    "dtype-huger": _note(dtype="S" + "9" * 5000),
    "dtype-surrogate": _note(dtype="\ud800"),
    "shape-too-long": _note(shape=[5]),
    "shape-too-short": _note(shape=[]),
    "shape-text": _note(shape="4"),
    "shape-null": _note(shape=None),
    "shape-of-text": _note(shape=["4"]),
    "shape-of-float": _note(shape=[4.0]),
    "shape-of-bool": _note(shape=[True, 4]),
    "shape-negative": _note(shape=[-2, -2]),
    "shape-huge": _note(shape=[1 << 200]),
    "shape-endless": _note(shape=[(1 << 63) - 1] * 2_000),
    "shape-endless-zero": _note(shape=[(1 << 63) - 1] * 2_000 + [0]),
    "shape-of-too-many-axes": _note(shape=[1] * 255 + [4]),
    "encoding-null": _note(encoding=None),
    "encoding-unknown": _note(encoding="rot13"),
    "encoding-list": _note(encoding=["bytes"]),
    "encoding-text": _note(dtype="S32", shape=[], encoding="text"),
    "encoding-unpack": _note(dtype="float4_e2m1fn", encoding="unpack"),
    "encoding-float32": _note(dtype="bfloat16", encoding="float32"),
    "float4-odd": _note(dtype="float4_e2m1fn", shape=[63]),
}
WRONG_JSON = {
    "none": b"",
    "no-json": b"{",
    "list": b"[]",
    "deep": b'{"a":' * 20_000,
    "not-utf8": b'{"\xff":1}',
    "nan": b'{"w":NaN}',
    "other": b'{"other":{"dtype":"datetime64[ns]","encoding":"bytes","shape":[4]}}',
}
CONTENT = np.arange(4, dtype=np.int64)


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_note_in_safetensors_is_ignored(case: str, tmp_path: Path) -> None:
    """A note that does not fit its tensor, or has a wrong shape or type, changes nothing and stays metadata."""
    text = json.dumps({"w": DAMAGED[case], "gone": _note()})
    write_reference(tmp_path / "a.safetensors", {"w": ("I64", (4,), CONTENT.tobytes())}, {KEY: text})
    convert.convert_file(tmp_path / "a.safetensors", tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz") as archive:
        assert archive.files == ["w"]
        assert (archive["w"].dtype.str, archive["w"].tobytes()) == ("<i8", CONTENT.tobytes())
    convert.convert_file(tmp_path / "a.safetensors", tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


@pytest.mark.parametrize("case", WRONG_JSON)
def test_a_note_that_is_no_json_is_ignored(case: str, tmp_path: Path) -> None:
    """Anything under our key, in the metadata or a comment, that is not our JSON is left alone."""
    text = WRONG_JSON[case].decode("utf-8", "replace")
    write_reference(tmp_path / "a.safetensors", {"w": ("I64", (4,), CONTENT.tobytes())}, {KEY: text})
    with convert.open(tmp_path / "a.safetensors") as checkpoint:
        assert checkpoint.metadata == {KEY: text}
        assert checkpoint["w"].numpy().tobytes() == CONTENT.tobytes()

    npz_with_comments(tmp_path / "a.npz", CONTENT, WRONG_JSON[case][:0xFFFF], WRONG_JSON[case][:0xFFFF])
    convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors")
    assert oracle.read_safetensors(tmp_path / "b.safetensors") == ({}, {"w": ("I64", (4,), CONTENT.tobytes())})


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_comment_in_npz_is_ignored(case: str, tmp_path: Path) -> None:
    """The same for the comments of archive members."""
    comment = json.dumps({KEY: DAMAGED[case]}).encode()[:0xFFFF]
    npz_with_comments(tmp_path / "a.npz", CONTENT, comment, b"")
    convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors")
    assert oracle.read_safetensors(tmp_path / "b.safetensors") == ({}, {"w": ("I64", (4,), CONTENT.tobytes())})


def packed_comment(data: bytes) -> bytes:
    import zlib

    packed = base64.b85encode(zlib.compress(data, 9)).decode()
    return json.dumps({KEY: {"packed_metadata": packed}}).encode()


ARCHIVE_COMMENTS = {
    "not-ours": b"made by hand",
    "list": json.dumps({KEY: []}).encode(),
    "metadata-list": json.dumps({KEY: {"metadata": []}}).encode(),
    "metadata-numbers": json.dumps({KEY: {"metadata": {"a": 1}}}).encode(),
    "metadata-surrogate": json.dumps({KEY: {"metadata": {"a": "\ud800"}}}).encode(),
    "metadata-surrogate-key": json.dumps({KEY: {"metadata": {"\udfff": "a"}}}).encode(),
    "packed-number": json.dumps({KEY: {"packed_metadata": 5}}).encode(),
    "packed-no-base85": json.dumps({KEY: {"packed_metadata": "\u00e9\x00 not base 85"}}).encode(),
    "packed-no-zlib": json.dumps({KEY: {"packed_metadata": base64.b85encode(b"junk" * 9).decode()}}).encode(),
    "packed-no-json": packed_comment(b"{nothing"),
    "packed-list": packed_comment(b"[]"),
    "packed-numbers": packed_comment(b'{"a":1}'),
    "packed-surrogate": packed_comment(b'{"a":"\\ud800"}'),
    "packed-bomb": packed_comment(b'{"a":"' + bytes(10_000_000)),
}


@pytest.mark.parametrize("case", ARCHIVE_COMMENTS)
def test_a_damaged_archive_comment_is_ignored(case: str, tmp_path: Path) -> None:
    """The comment of an archive that is not our metadata is noted as not carried over, and nothing else."""
    npz_with_comments(tmp_path / "a.npz", CONTENT, b"", ARCHIVE_COMMENTS[case])
    report = convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors")
    assert oracle.read_safetensors(tmp_path / "b.safetensors") == ({}, {"w": ("I64", (4,), CONTENT.tobytes())})
    assert any("comment" in note for note in report.notes)


def test_a_note_in_fortran_or_big_endian_data_is_ignored_where_bytes_would_move(tmp_path: Path) -> None:
    """The bytes of an encoded tensor are taken as they lie, so notes fit only data that lies as ours does."""
    fortran = np.asfortranarray(np.arange(8, dtype=np.uint8).reshape(2, 4))
    big = np.arange(4, dtype=">u4")
    for array, shape in ((fortran, [2]), (big, [4])):
        note = json.dumps({KEY: _note(dtype="S4", shape=shape)}).encode()
        npz_with_comments(tmp_path / "a.npz", array, note, b"")
        convert.convert_file(tmp_path / "a.npz", tmp_path / "b.npz", overwrite=True)
        with np.load(tmp_path / "b.npz") as archive:
            assert archive["w"].dtype == array.dtype.newbyteorder("<")
            assert archive["w"].shape == array.shape
            assert archive["w"].tobytes() == oracle.canonical(array)
        dense = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))  # the legal neighbour
        npz_with_comments(tmp_path / "a.npz", dense, note, b"")
        convert.convert_file(tmp_path / "a.npz", tmp_path / "b.npz", overwrite=True)
        with np.load(tmp_path / "b.npz") as archive:
            assert (archive["w"].dtype, archive["w"].shape) == (np.dtype("S4"), tuple(shape))


@pytest.mark.parametrize(
    ("dtype", "encoding", "array"),
    [
        ("bfloat16", "float32", np.array([1.1], np.float32)),
        ("float4_e2m1fn", "unpack", np.array([1, 16], np.uint8)),
        ("float6_e3m2fn", "float32", np.array([1, 2, 3, 100], np.float32)),
    ],
)
def test_values_that_a_note_cannot_mean_are_refused(dtype: str, encoding: str, array: Array, tmp_path: Path) -> None:
    """Data changed since it was encoded is refused with the way out, never rounded in silence."""
    note = json.dumps({KEY: _note(dtype=dtype, encoding=encoding, shape=list(array.shape))}).encode()
    npz_with_comments(tmp_path / "a.npz", array, note, b"")
    with pytest.raises(convert.PolicyError, match="expected"):
        convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize(("dtype", "bits"), [("float4_e2m1fn", 4), ("float6_e2m3fn", 6)])
def test_a_note_that_ends_within_a_byte_is_ignored(dtype: str, bits: int, tmp_path: Path) -> None:
    """safetensors has no tensor that ends within a byte, so a note that claims one is not believed."""
    for encoding, count, array in (
        ("bytes", 1, np.array([5], np.uint8)),
        ("unpack", 3, np.array([1, 2, 3], np.uint8)),
        ("float32", 3, np.array([1, 2, 3], np.float32)),
    ):
        note = json.dumps({KEY: _note(dtype=dtype, encoding=encoding, shape=[count])}).encode()
        npz_with_comments(tmp_path / "a.npz", array, note, b"")
        convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors", overwrite=True)
        (found,) = oracle.read_safetensors(tmp_path / "b.safetensors")[1].values()
        assert found == (oracle.SAFETENSORS_CODES[array.dtype.name], array.shape, array.tobytes())


def test_a_note_about_itself_is_ignored(tmp_path: Path) -> None:
    """Our own key cannot be one of the texts that become tensors."""
    text = json.dumps({KEY: {"dtype": "S500", "encoding": "text", "shape": []}})
    write_reference(tmp_path / "a.safetensors", {"w": ("U8", (1,), b"x")}, {KEY: text})
    with convert.open(tmp_path / "a.safetensors") as checkpoint:
        assert list(checkpoint) == ["w"]
        assert checkpoint.metadata == {KEY: text}


TEXT_NOTES: dict[str, dict[str, object]] = {
    "too-short": {"dtype": "S2", "encoding": "text", "shape": []},
    "huge": {"dtype": "S999999999", "encoding": "text", "shape": []},
    "endless": {"dtype": "U" + "9" * 18, "encoding": "text", "shape": []},
    "no-string": {"dtype": "float32", "encoding": "text", "shape": []},
    "unknown": {"dtype": "T5", "encoding": "text", "shape": []},
}


@pytest.mark.parametrize("case", TEXT_NOTES)
def test_a_text_note_that_does_not_fit_leaves_the_text(case: str, tmp_path: Path) -> None:
    """Metadata stays metadata when the note about it cannot be true, or claims memory out of proportion."""
    metadata = {"name": "hello", KEY: json.dumps({"name": TEXT_NOTES[case]})}
    write_two_keys(tmp_path / "a.safetensors", metadata)
    with convert.open(tmp_path / "a.safetensors") as checkpoint:
        assert checkpoint.metadata == metadata
        assert list(checkpoint) == []


def test_many_text_notes_do_not_add_up(tmp_path: Path) -> None:
    """Each text may come back padded to its type; a thousand tiny texts cannot claim a gigabyte together."""
    import tracemalloc

    names = [f"t{number}" for number in range(1000)]
    note = {"dtype": "S1000000", "encoding": "text", "shape": []}
    write_two_keys(
        tmp_path / "a.safetensors", {**dict.fromkeys(names, "x"), KEY: json.dumps(dict.fromkeys(names, note))}
    )
    tracemalloc.start()
    try:
        with convert.open(tmp_path / "a.safetensors") as checkpoint:
            assert len(checkpoint) + len(checkpoint.metadata) >= len(names)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def write_two_keys(path: Path, metadata: Mapping[str, str]) -> None:
    text = json.dumps({"__metadata__": dict(metadata)}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    REFERENCE.deserialize(path.read_bytes())


def npz_with_comments(path: Path, array: Array, member: bytes, comment: bytes) -> None:
    info = zipfile.ZipInfo("w.npy")
    info.comment = member
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, npy_bytes(array))
        archive.comment = comment
