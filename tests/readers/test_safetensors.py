"""Every rule of the safetensors reader: each refusal, and the legal neighbour beside it.

Headers are written by hand; the reference library has to agree with every verdict but the few that are listed.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

import convert

from .. import oracle
from ..strategies import REFERENCE

CORRUPT, UNSUPPORTED, LIMIT = convert.CorruptError, convert.UnsupportedError, convert.LimitError
EIGHT = bytes(range(8))


def file_of(header: object, data: bytes = EIGHT, length: int | None = None) -> bytes:
    """A safetensors file of any header: an object to be dumped, or text or bytes as they are."""
    text = header if isinstance(header, (str, bytes)) else json.dumps(header)
    body = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return struct.pack("<Q", len(body) if length is None else length) + body + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


W = {"w": entry()}
TEXT = json.dumps(W)
Wanted = dict[str, tuple[str, tuple[int, ...], bytes]]
ONE: Wanted = {"w": ("F32", (2,), EIGHT)}

LEGAL: dict[str, tuple[bytes, Wanted]] = {
    "plain": (file_of(W), ONE),
    "no-tensors": (file_of({}, b""), {}),
    "metadata-only": (file_of({"__metadata__": {"k": "v"}}, b""), {}),
    "metadata-empty": (file_of({"__metadata__": {}, **W}), ONE),
    "metadata-null": (file_of({"__metadata__": None, **W}), ONE),
    "metadata-odd-keys": (file_of({"__metadata__": {"": "", "dtype": "x"}, **W}), ONE),
    "padding": (file_of(TEXT + " " * 77), ONE),
    "padding-newlines": (file_of(TEXT + "\n\t\r "), ONE),
    "spaces-inside": (file_of(json.dumps(W, indent=3)), ONE),
    "unaligned": (file_of(TEXT + " "), ONE),
    "unknown-field": (file_of({"w": entry(note={"a": [1, None]})}), ONE),
    "key-order": (file_of('{"w":{"data_offsets":[0,8],"shape":[2],"dtype":"F32"}}'), ONE),
    "escapes": (file_of('{"\\u0077":{"dtype":"F\\u00332","shape":[2],"data_offsets":[0,8]}}'), ONE),
    "0d": (file_of({"w": entry("F64", ())}), {"w": ("F64", (), EIGHT)}),
    "empty": (file_of({"w": entry(shape=[0], offsets=[0, 0])}, b""), {"w": ("F32", (0,), b"")}),
    "empty-large": (
        file_of({"w": entry(shape=[0, (1 << 63) - 1], offsets=[0, 0])}, b""),
        {"w": ("F32", (0, (1 << 63) - 1), b"")},
    ),
    "zero-before-overflow": (
        file_of({"w": entry(shape=[0, 1 << 40, 1 << 40], offsets=[0, 0])}, b""),
        {"w": ("F32", (0, 1 << 40, 1 << 40), b"")},
    ),
    "empty-at-the-end": (
        file_of({"w": entry(), "z": entry(shape=[0], offsets=[8, 8])}),
        {**ONE, "z": ("F32", (0,), b"")},
    ),
    "empty-in-between": (
        file_of(
            {
                "b": entry(shape=[1], offsets=[4, 8]),
                "e": entry(shape=[0], offsets=[4, 4]),
                "a": entry(shape=[1], offsets=[0, 4]),
            }
        ),
        {"a": ("F32", (1,), EIGHT[:4]), "e": ("F32", (0,), b""), "b": ("F32", (1,), EIGHT[4:])},
    ),
    "another-order": (
        file_of({"b": entry(shape=[1], offsets=[4, 8]), "a": entry(shape=[1], offsets=[0, 4])}),
        {"a": ("F32", (1,), EIGHT[:4]), "b": ("F32", (1,), EIGHT[4:])},
    ),
    "dimensions-255": (file_of({"w": entry(shape=[1] * 254 + [2])}), {"w": ("F32", (*(1,) * 254, 2), EIGHT)}),
    "float4": (file_of({"w": entry("F4", [4, 4])}), {"w": ("F4", (4, 4), EIGHT)}),
    "float4-odd-axis": (file_of({"w": entry("F4", [16, 1])}), {"w": ("F4", (16, 1), EIGHT)}),
    "float6": (file_of({"w": entry("F6_E2M3", [8], [0, 6])}, EIGHT[:6]), {"w": ("F6_E2M3", (8,), EIGHT[:6])}),
    "names": (
        file_of({"": entry(shape=[1], offsets=[0, 4]), "\u4f60/\x01": entry(shape=[1], offsets=[4, 8])}),
        {"": ("F32", (1,), EIGHT[:4]), "\u4f60/\x01": ("F32", (1,), EIGHT[4:])},
    ),
    "names-like-metadata": (file_of({"__metadata": entry()}), {"__metadata": ("F32", (2,), EIGHT)}),
}


@pytest.mark.parametrize("case", LEGAL)
def test_legal_files_are_read(case: str, tmp_path: Path) -> None:
    """Each legal neighbour of a refusal gives its tensors in the order of their bytes; the reference agrees."""
    data, wanted = LEGAL[case]
    (tmp_path / "a.safetensors").write_bytes(data)
    codes = oracle.SAFETENSORS_CODES
    with convert.open(tmp_path / "a.safetensors") as checkpoint:
        found = {
            tensor.name: (codes[tensor.dtype.name], tensor.shape, b"".join(map(bytes, tensor.chunks())))
            for tensor in checkpoint.values()
        }
    assert found == wanted
    assert list(found) == list(wanted)
    reference = dict(REFERENCE.deserialize(data))
    assert {n: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for n, t in reference.items()} == wanted


@pytest.mark.parametrize("code", oracle.CODE_BITS)
def test_every_code_is_read(code: str, tmp_path: Path) -> None:
    """All 22 codes, with as many bytes as their bits say."""
    count = 8
    size = count * oracle.CODE_BITS[code] // 8
    body = bytes(size)
    (tmp_path / "a.safetensors").write_bytes(file_of({"w": entry(code, [count], [0, size])}, body))
    with convert.open(tmp_path / "a.safetensors") as checkpoint:
        assert oracle.SAFETENSORS_CODES[checkpoint["w"].dtype.name] == code
        assert checkpoint["w"].nbytes == size
    bad = file_of({"w": entry(code, [count], [0, size + 1])}, body + b"x")
    (tmp_path / "a.safetensors").write_bytes(bad)
    with pytest.raises(CORRUPT, match=f"expected {size} bytes for {code}.*found {size + 1}"):
        convert.open(tmp_path / "a.safetensors")


Case = tuple[bytes, type[convert.ConvertError], tuple[str, ...]]
REFUSED: dict[str, Case] = {
    # length
    "no-bytes": (b"", CORRUPT, ("empty",)),
    "7-bytes": (bytes(7), CORRUPT, ("cut short", "expected at least 8 bytes, found 7")),
    "length-0": (file_of("", b""), CORRUPT, ("empty header", "found length 0 at byte 0")),
    "length-past-the-end": (
        file_of(W, length=500),
        CORRUPT,
        ("exceeds the file", f"expected at most {len(TEXT) + 8} bytes, found 500"),
    ),
    "length-limit": (file_of(W, length=100_000_001), LIMIT, ("expected at most 100000000 bytes, found 100000001",)),
    "length-endless": (file_of(W, length=(1 << 64) - 1), LIMIT, ("found 18446744073709551615",)),
    # text
    "not-utf-8": (file_of(TEXT.encode().replace(b"w", b"\xff")), CORRUPT, ("not UTF-8", "0xff at byte 10")),
    "list": (file_of("[]", b""), CORRUPT, ("not a JSON object", r"found '\['")),
    "number": (file_of("12", b""), CORRUPT, ("not a JSON object", "found '1'")),
    "leading-space": (file_of(" " + TEXT), CORRUPT, ("not a JSON object", "found ' '")),
    "byte-order-mark": (file_of("\ufeff" + TEXT), CORRUPT, ("not a JSON object", r"\\ufeff")),
    "unclosed": (file_of(TEXT[:-1]), CORRUPT, ("invalid JSON",)),
    "comma": (file_of(TEXT[:-1] + ",}"), CORRUPT, ("invalid JSON",)),
    "single-quotes": (file_of(TEXT.replace('"', "'")), CORRUPT, ("invalid JSON",)),
    "two-objects": (file_of(TEXT + "{}"), CORRUPT, ("invalid JSON",)),
    "nul-padding": (file_of(TEXT + "\0"), CORRUPT, ("invalid JSON",)),
    "control-character": (file_of(TEXT.replace("w", "\x01")), CORRUPT, ("invalid JSON",)),
    "nan": (file_of(TEXT.replace("[2]", "[NaN]")), CORRUPT, ("invalid JSON", "NaN")),
    "infinity": (file_of(TEXT.replace("[2]", "[Infinity]")), CORRUPT, ("invalid JSON", "Infinity")),
    "nested": (file_of('{"a":' + "[" * 200_000, b""), CORRUPT, ("invalid JSON", "nests too deeply")),
    "digits": (file_of(TEXT.replace("[2]", f"[{'9' * 9999}]")), CORRUPT, ("invalid JSON",)),
    "duplicate": (file_of(TEXT[:-1] + "," + TEXT[1:]), CORRUPT, ("duplicate key 'w'",)),
    "duplicate-field": (file_of(TEXT.replace('"shape"', '"dtype":"F32","shape"')), CORRUPT, ("duplicate key 'dtype'",)),
    "duplicate-metadata": (
        file_of('{"__metadata__":{"a":"1","a":"1"}}', b""),
        CORRUPT,
        ("duplicate key 'a'",),
    ),
    "surrogate-name": (file_of(TEXT.replace('"w"', '"\\ud800"')), CORRUPT, ("not valid Unicode", "surrogate")),
    "surrogate-metadata": (
        file_of('{"__metadata__":{"a":"\\udfff"}}', b""),
        CORRUPT,
        ("not valid Unicode", "surrogate"),
    ),
    # metadata
    "metadata-list": (file_of({"__metadata__": []}, b""), CORRUPT, ("__metadata__", "found an array")),
    "metadata-text": (file_of({"__metadata__": "x"}, b""), CORRUPT, ("__metadata__", "found a string")),
    "metadata-number": (file_of({"__metadata__": {"a": 1}}, b""), CORRUPT, ("found a number for 'a'",)),
    "metadata-null-value": (file_of({"__metadata__": {"a": None}}, b""), CORRUPT, ("found null for 'a'",)),
    "metadata-nested": (file_of({"__metadata__": {"a": {}}}, b""), CORRUPT, ("found an object for 'a'",)),
    "metadata-tensor": (file_of({"__metadata__": entry()}), CORRUPT, ("reserved", "save it again under another")),
    # entries
    "entry-list": (file_of({"w": []}, b""), CORRUPT, ("'w'", "not an object", "found an array")),
    "entry-null": (file_of({"w": None}, b""), CORRUPT, ("'w'", "not an object", "found null")),
    "no-dtype": (file_of({"w": {"shape": [], "data_offsets": [0, 0]}}, b""), CORRUPT, ("'w'", "dtype is missing")),
    "no-shape": (file_of({"w": {"dtype": "F32", "data_offsets": [0, 0]}}, b""), CORRUPT, ("shape is missing",)),
    "no-offsets": (file_of({"w": {"dtype": "F32", "shape": []}}, b""), CORRUPT, ("data_offsets is missing",)),
    "old-offsets": (
        file_of({"w": {"dtype": "F32", "shape": [], "offsets": [0, 0]}}, b""),
        CORRUPT,
        ("data_offsets is missing", r"before 0\.2"),
    ),
    "dtype-unknown": (file_of({"w": entry("F128")}), UNSUPPORTED, ("unknown dtype 'F128'", "expected one of BOOL")),
    "dtype-lower": (file_of({"w": entry("f32")}), UNSUPPORTED, ("unknown dtype 'f32'", "upper case: F32")),
    "dtype-number": (file_of({"w": entry(5)}), UNSUPPORTED, ("unknown dtype a number",)),
    "dtype-list": (file_of({"w": entry(["F32"])}), UNSUPPORTED, ("unknown dtype an array",)),
    "shape-number": (file_of({"w": entry(shape=2)}), CORRUPT, ("must be arrays",)),
    "shape-null": (file_of({"w": entry(shape=None)}), CORRUPT, ("must be arrays",)),
    "offsets-object": (file_of({"w": entry(offsets={})}), CORRUPT, ("must be arrays",)),
    "offsets-one": (file_of({"w": entry(offsets=[0])}), CORRUPT, ("two entries", "found 1")),
    "offsets-three": (file_of({"w": entry(offsets=[0, 8, 8])}), CORRUPT, ("two entries", "found 3")),
    "offsets-float": (file_of({"w": entry(offsets=[0, 8.0])}), CORRUPT, ("must be integers",)),
    "offsets-bool": (file_of({"w": entry("BOOL", [1], [False, True])}, b"x"), CORRUPT, ("must be integers",)),
    "offsets-text": (file_of({"w": entry(offsets=["0", "8"])}), CORRUPT, ("must be integers", "a string")),
    "offsets-negative": (file_of({"w": entry(offsets=[-8, 0])}), CORRUPT, ("negative offset -8",)),
    "offsets-backward": (file_of({"w": entry(offsets=[8, 0])}), CORRUPT, ("begin > end", "8 and 0")),
    "dimension-negative": (file_of({"w": entry(shape=[-2])}), CORRUPT, ("from 0 to", "found negative -2")),
    "dimensions-negative": (file_of({"w": entry(shape=[-1, -2])}), CORRUPT, ("found negative -1",)),
    "dimension-float": (file_of({"w": entry(shape=[2.0])}), CORRUPT, ("must be an integer", "a number")),
    "dimension-bool": (file_of({"w": entry(shape=[True, 2])}), CORRUPT, ("must be an integer", "a boolean")),
    "dimension-text": (file_of({"w": entry(shape=["2"])}), CORRUPT, ("must be an integer", "a string")),
    "dimension-large": (file_of({"w": entry(shape=[1 << 64])}), CORRUPT, (r"2\*\*64 - 1", "18446744073709551616")),
    "dimensions-256": (file_of({"w": entry(shape=[1] * 256)}), LIMIT, ("expected at most 255, found 256",)),
    "dimensions-endless": (
        file_of({"w": entry(shape=[(1 << 63) - 1] * 100_000 + [0], offsets=[0, 0])}, b""),
        LIMIT,
        ("too many dimensions", "found 100001"),
    ),
    "overflow-64": (
        file_of({"w": entry(shape=[1 << 32, 1 << 30, 2])}),
        CORRUPT,
        ("do not fit the byte range", "found 8"),
    ),
    "overflow-128": (file_of({"w": entry(shape=[1 << 63] * 9)}), CORRUPT, (r"more than 2\*\*64 - 1", "found 8")),
    "overflow-then-zero": (
        file_of({"w": entry(shape=[1 << 40, 1 << 40, 0], offsets=[0, 0])}, b""),
        CORRUPT,
        (r"more than 2\*\*64 - 1 elements", "found 0"),
    ),
    "shape-small": (file_of({"w": entry(shape=[1])}), CORRUPT, ("expected 4 bytes for F32", "found 8")),
    "float4-half": (file_of({"w": entry("F4", [3], [0, 2])}, b"ab"), CORRUPT, (r"expected 1\.5 bytes", "found 2")),
    "float6-part": (file_of({"w": entry("F6_E3M2", [2], [0, 2])}, b"ab"), CORRUPT, (r"expected 1\.5 bytes",)),
    # cover
    "hole-before": (
        file_of({"w": entry(shape=[1], offsets=[4, 8])}),
        CORRUPT,
        (r"hole in the data section \(bytes 0\.\.4\)",),
    ),
    "hole-between": (
        file_of({"a": entry("U8", [2], [0, 2]), "b": entry("U8", [4], [4, 8])}),
        CORRUPT,
        (r"'b'.*hole in the data section \(bytes 2\.\.4\)",),
    ),
    "overlap": (
        file_of({"a": entry("U8", [6], [0, 6]), "b": entry("U8", [4], [4, 8])}),
        CORRUPT,
        ("'b'.*overlapping", "expected to begin at byte 6 of the data, found 4"),
    ),
    "same-bytes": (file_of({"a": entry(), "b": entry()}), CORRUPT, ("overlapping ranges", "one owner", "tied tensors")),
    "inside": (
        file_of({"a": entry("U8", [8], [0, 8]), "b": entry("U8", [1], [3, 4])}),
        CORRUPT,
        ("'b'.*overlapping", "found 3"),
    ),
    "empty-inside": (
        file_of({"a": entry("U8", [8], [0, 8]), "b": entry("U8", [0], [3, 3])}),
        CORRUPT,
        ("'b'.*overlapping", "found 3"),
    ),
    "empty-beyond": (file_of({"w": entry(), "z": entry(shape=[0], offsets=[9, 9])}), CORRUPT, (r"hole.*bytes 8\.\.9",)),
    "short": (
        file_of(W, EIGHT[:-1]),
        CORRUPT,
        ("1 bytes short", f"expected {len(TEXT) + 16}, found {len(TEXT) + 15}", "incomplete"),
    ),
    "trailing": (file_of(W, EIGHT + b"xy"), CORRUPT, ("2 bytes at the end belong to no tensor", "expected", "found")),
    "trailing-without-tensors": (file_of({}, b"x"), CORRUPT, ("1 bytes at the end belong to no tensor",)),
}
STRICTER_THAN_THE_REFERENCE = {"duplicate", "duplicate-metadata", "leading-space"}
"""What the library lets pass and its README forbids; we follow the README."""


@pytest.mark.parametrize("case", REFUSED)
def test_broken_files_are_refused(case: str, tmp_path: Path) -> None:
    """Each rule has its refusal, which says what was expected and what was found."""
    data, kind, patterns = REFUSED[case]
    source = tmp_path / "a.safetensors"
    source.write_bytes(data)
    with pytest.raises(kind) as caught:
        convert.convert_file(source, tmp_path / "a.npz", format="safetensors")
    text = str(caught.value)
    assert text.startswith(str(source))
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern!r} not in: {text}"
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("case", [case for case, (_, kind, _) in REFUSED.items() if kind is not LIMIT])
def test_the_reference_refuses_the_same(case: str) -> None:
    """Apart from the listed cases we are no stricter than the library; limits are our own."""
    try:
        REFERENCE.deserialize(REFUSED[case][0])
        accepted = True
    except REFERENCE.SafetensorError:
        accepted = False
    assert accepted == (case in STRICTER_THAN_THE_REFERENCE)


def test_all_broken_entries_are_named_together(tmp_path: Path) -> None:
    """Each entry's fault is told in one error."""
    header = {"a": entry("F99"), "b": entry(), "c": entry(shape=[-1]), "d": {}}
    (tmp_path / "a.safetensors").write_bytes(file_of(header))
    with pytest.raises(convert.InputError) as caught:
        convert.open(tmp_path / "a.safetensors")
    assert [problem.tensor for problem in caught.value.problems] == ["a", "c", "d"]


def test_header_limit(tmp_path: Path) -> None:
    """The limit is on the JSON."""
    (tmp_path / "a.safetensors").write_bytes(file_of(W))
    with convert.open(tmp_path / "a.safetensors", limits=convert.Limits(json_bytes=len(TEXT))) as checkpoint:
        assert list(checkpoint) == ["w"]
    with pytest.raises(convert.LimitError, match=f"at most {len(TEXT) - 1} bytes, found {len(TEXT)}"):
        convert.open(tmp_path / "a.safetensors", limits=convert.Limits(json_bytes=len(TEXT) - 1))


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    """No prefix of a file is a file."""
    data = file_of({"__metadata__": {"k": "v"}, **W})
    for length in range(len(data)):
        (tmp_path / "a.safetensors").write_bytes(data[:length])
        with pytest.raises(convert.InputError):
            convert.open(tmp_path / "a.safetensors")


def test_sub_byte_tensors_that_end_within_a_byte_are_not_written(tmp_path: Path) -> None:
    """Arrays of them are refused before anything is written."""
    import ml_dtypes
    import numpy as np

    for name, count in (("float4_e2m1fn", 3), ("float6_e2m3fn", 2), ("float6_e3m2fn", 5)):
        dtype: Any = getattr(ml_dtypes, name)
        with pytest.raises(convert.ConvertError, match="do not fill whole bytes"):
            convert.save({"w": np.zeros(count, dtype)}, tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []
