"""Every rule of the npy reader: each refusal, and the legal neighbour beside it. Headers are written by hand."""

from __future__ import annotations

import contextlib
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import convert

from .. import oracle
from ..strategies import npy_bytes

Array = npt.NDArray[Any]
CORRUPT, UNSUPPORTED, LIMIT = convert.CorruptError, convert.UnsupportedError, convert.LimitError


def file_of(
    text: str | bytes, data: bytes = b"", version: tuple[int, int] = (1, 0), length: int | None = None
) -> bytes:
    """An npy file of any header text."""
    body = text.encode("utf-8" if version == (3, 0) else "latin-1") if isinstance(text, str) else text
    count = len(body) if length is None else length
    return b"\x93NUMPY" + bytes(version) + count.to_bytes(2 if version[0] == 1 else 4, "little") + body + data


def header(descr: str = "'<f4'", fortran: str = "False", shape: str = "(2,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


EIGHT = bytes(range(8))
F4 = ("float32", (2,), EIGHT)

# --- accepted ----------------------------------------------------------------------------------------------------

LEGAL: dict[str, tuple[bytes, tuple[str, tuple[int, ...], bytes]]] = {
    "plain": (file_of(header(), EIGHT), F4),
    "version-2": (file_of(header(), EIGHT, (2, 0)), F4),
    "version-3": (file_of(header(), EIGHT, (3, 0)), F4),
    "no-padding": (file_of(header().strip(), EIGHT), F4),
    "nul-padding": (file_of(header() + "\0\0", EIGHT), F4),
    "much-padding": (file_of(header() + " " * 5000, EIGHT), F4),
    "double-quotes": (file_of(header().replace("'", '"'), EIGHT), F4),
    "no-spaces": (file_of(header().replace(" ", ""), EIGHT), F4),
    "many-spaces": (file_of(header().replace(" ", "\t \f "), EIGHT), F4),
    "no-last-comma": (file_of(header().replace(", }", "}"), EIGHT), F4),
    "key-order": (file_of("{'shape': (2,), 'descr': '<f4', 'fortran_order': False}", EIGHT), F4),
    "python-2-long": (file_of(header(shape="(2L,)"), EIGHT), F4),
    "python-2-unicode": (file_of(header(descr="u'<f4'"), EIGHT), F4),
    "escape": (file_of(header(descr=r"'\x3cf4'"), EIGHT), F4),
    "0d": (file_of(header(shape="()"), EIGHT[:4]), ("float32", (), EIGHT[:4])),
    "empty": (file_of(header(shape="(0,)")), ("float32", (0,), b"")),
    "empty-large": (file_of(header(shape="(0, 9223372036854775807)")), ("float32", (0, (1 << 63) - 1), b"")),
    "shape-without-last-comma": (file_of(header(shape="(1, 2)"), EIGHT), ("float32", (1, 2), EIGHT)),
    "shape-with-last-comma": (file_of(header(shape="(1, 2, )"), EIGHT), ("float32", (1, 2), EIGHT)),
    "dimensions-255": (file_of(header(shape=f"({'1, ' * 254}2)"), EIGHT), ("float32", (*(1,) * 254, 2), EIGHT)),
    "one-byte-any-mark": (file_of(header("'<u1'"), b"ab"), ("uint8", (2,), b"ab")),
    "one-byte-big": (file_of(header("'>u1'"), b"ab"), ("uint8", (2,), b"ab")),
    "native-mark": (file_of(header("'=f4'"), EIGHT), F4),
    "no-mark": (file_of(header("'f4'"), EIGHT), F4),
    "by-name": (file_of(header("'float32'"), EIGHT), F4),
    "by-name-bfloat16": (file_of(header("'bfloat16'"), EIGHT[:4]), ("bfloat16", (2,), EIGHT[:4])),
    "big": (file_of(header("'>f4'"), EIGHT), ("float32", (2,), bytes([3, 2, 1, 0, 7, 6, 5, 4]))),
    "complex-big": (
        file_of(header("'>c8'", shape="(1,)"), EIGHT),
        ("complex64", (1,), bytes([3, 2, 1, 0, 7, 6, 5, 4])),
    ),
    "fortran": (file_of(header("'<i2'", "True", "(2, 2)"), EIGHT), ("int16", (2, 2), bytes([0, 1, 4, 5, 2, 3, 6, 7]))),
    "fortran-1d": (file_of(header(fortran="True"), EIGHT), F4),
    "e5m2": (file_of(header("'<f1'"), b"ab"), ("float8_e5m2", (2,), b"ab")),
    "old-bfloat16": (file_of(header("'<g2'"), EIGHT[:4]), ("bfloat16", (2,), EIGHT[:4])),
    "V2-big": (file_of(header("'>V2'"), EIGHT[:4]), ("bfloat16", (2,), bytes([1, 0, 3, 2]))),
    "V2": (file_of(header("'<V2'"), EIGHT[:4]), ("V2", (2,), EIGHT[:4])),
    "V2-plain": (file_of(header("'|V2'"), EIGHT[:4]), ("V2", (2,), EIGHT[:4])),
    "old-bytes": (file_of(header("'|a4'"), EIGHT), ("S4", (2,), EIGHT)),
    "datetime": (file_of(header("'<M8[ns]'", shape="(1,)"), EIGHT), ("datetime64[ns]", (1,), EIGHT)),
    "datetime-generic": (file_of(header("'<M8'", shape="(1,)"), EIGHT), ("datetime64", (1,), EIGHT)),
    "timedelta-big": (file_of(header("'>m8[25s]'", shape="(1,)"), EIGHT), ("timedelta64[25s]", (1,), EIGHT[::-1])),
    "subarray": (file_of(header("('<i2', (2,))"), EIGHT), ("int16", (2, 2), EIGHT)),
    "subarray-int": (file_of(header("('<i2', 2)"), EIGHT), ("int16", (2, 2), EIGHT)),
    "dtype-metadata": (file_of(header("('<f4', {})"), EIGHT), F4),
    "record": (file_of(header("[('a', '<i2'), ('b', '|i1'), ('', '|V1')]"), EIGHT), ("structured", (2,), EIGHT)),
    "record-big": (
        file_of(header("[('a', '>i2'), ('b', '<i2')]"), EIGHT),
        ("structured", (2,), bytes([1, 0, 2, 3, 5, 4, 6, 7])),
    ),
    "record-nested-big": (
        file_of(header("[('a', [('b', '>i2')], (2,))]"), EIGHT),
        ("structured", (2,), bytes([1, 0, 3, 2, 5, 4, 7, 6])),
    ),
    "record-subarray-big": (
        file_of(header("[('a', '>i2', (2,))]"), EIGHT),
        ("structured", (2,), bytes([1, 0, 3, 2, 5, 4, 7, 6])),
    ),
    "record-title": (file_of(header("[(('title', 'a'), '<i4')]"), EIGHT), ("structured", (2,), EIGHT)),
    "record-many-nested-of-nothing": (
        file_of(header("[('a', [('b', '>i2')], (1073741823,))]", shape="(0,)")),
        ("structured", (0,), b""),
    ),
    "record-unicode": (file_of(header("[('\u4f60', '<i4')]"), EIGHT, (3, 0)), ("structured", (2,), EIGHT)),
}


@pytest.mark.parametrize("case", LEGAL)
def test_legal_headers_are_read(case: str, tmp_path: Path) -> None:
    """Each legal neighbour of a refusal gives its one tensor, named after the file."""
    data, wanted = LEGAL[case]
    (tmp_path / "w.npy").write_bytes(data)
    with convert.open(tmp_path / "w.npy") as checkpoint:
        (tensor,) = checkpoint.values()
        assert tensor.name == "w"
        assert (tensor.dtype.name, tensor.shape, b"".join(map(bytes, tensor.chunks()))) == wanted
        assert tensor.nbytes == len(wanted[2])


# --- refused -----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[bytes, type[convert.ConvertError], tuple[str, ...]]] = {
    "no-bytes": (b"", CORRUPT, ("empty",)),
    "other-magic": (b"\x93NUMPX\x01\0" + bytes(90), CORRUPT, ("expected b'\\\\x93NUMPY'", "found")),
    "magic-only": (b"\x93NUMPY", CORRUPT, ("cut short", "at least 10 bytes, found 6")),
    "magic-half": (b"\x93NU", CORRUPT, ("cut short", "found 3")),
    "version-4": (file_of(header(), EIGHT, (4, 0)), UNSUPPORTED, (r"version 4\.0", r"expected 1\.0, 2\.0 or 3\.0")),
    "version-1.1": (file_of(header(), EIGHT, (1, 1)), UNSUPPORTED, (r"version 1\.1",)),
    "version-0": (file_of(header(), EIGHT, (0, 0)), UNSUPPORTED, (r"version 0\.0",)),
    "header-past-the-end": (file_of(header(), EIGHT, length=999), CORRUPT, ("header is cut short", "expected 1009")),
    "header-empty": (file_of("", EIGHT), CORRUPT, ("header",)),
    "header-too-long": (
        file_of(header(), EIGHT, (2, 0), length=1 << 30),
        LIMIT,
        ("header is too long", f"found {(1 << 30) + 12}"),
    ),
    "version-3-not-utf-8": (
        file_of(header().encode().replace(b"<f4", b"\xff"), EIGHT, (3, 0)),
        CORRUPT,
        ("not UTF-8", "0xff at byte 11"),
    ),
    # the literal
    "no-dictionary": (file_of("('<f4', False, (2,))", EIGHT), CORRUPT, ("not a dictionary",)),
    "number": (file_of("5", EIGHT), CORRUPT, ("not a dictionary",)),
    "two-literals": (file_of(header() + "{}", EIGHT), CORRUPT, ("literal", "nothing more")),
    "unclosed": (file_of(header()[:-4], EIGHT), CORRUPT, ("literal", "expected")),
    "key-twice": (file_of(header().replace("'shape'", "'descr': '<f4', 'shape'"), EIGHT), CORRUPT, ("each key once",)),
    "key-no-string": (file_of(header().replace("'shape'", "1"), EIGHT), CORRUPT, ("each key once",)),
    "no-colon": (file_of(header().replace("'shape':", "'shape',"), EIGHT), CORRUPT, ("a colon",)),
    "no-comma": (file_of(header().replace("False,", "False"), EIGHT), CORRUPT, ("comma",)),
    "call": (file_of(header(shape="tuple([2])"), EIGHT), CORRUPT, ("literal",)),
    "expression": (file_of(header(shape="(1+1,)"), EIGHT), CORRUPT, ("literal", r"found '\+1")),
    "float": (file_of(header(shape="(2.0,)"), EIGHT), CORRUPT, ("literal",)),
    "hexadecimal": (file_of(header(shape="(0x2,)"), EIGHT), CORRUPT, ("literal",)),
    "octal": (file_of(header(shape="(02,)"), EIGHT), CORRUPT, ("leading zeros",)),
    "digits": (file_of(header(shape=f"({'9' * 5000},)"), EIGHT), CORRUPT, ("number of 5000 digits",)),
    "unknown-escape": (file_of(header(descr=r"'<f4\q'"), EIGHT), CORRUPT, ("escapes",)),
    "string-with-newline": (file_of(header(descr="'<f4\n'"), EIGHT), CORRUPT, ("literal",)),
    "nested": (
        file_of(header(shape="(" * 40 + ")" * 40), EIGHT),
        LIMIT,
        (
            "nested too deeply",
            "--max-depth",
        ),
    ),
    "nested-very": (
        file_of(header(shape="(" * 200_000), EIGHT, (2, 0)),
        LIMIT,
        (
            "nested too deeply",
            "--max-depth",
        ),
    ),
    "minus-bomb": (file_of(header(shape="(" + "-" * 100_000 + "1,)"), EIGHT, (2, 0)), CORRUPT, ("literal",)),
    # the keys
    "key-missing": (file_of("{'descr': '<f4', 'shape': (2,)}", EIGHT), CORRUPT, ("lacks fortran_order",)),
    "keys-missing": (file_of("{}", EIGHT), CORRUPT, ("lacks descr, fortran_order, shape",)),
    "key-unknown": (file_of(header().replace("}", "'more': 1}"), EIGHT), CORRUPT, ("unknown key 'more'",)),
    "shape-list": (file_of(header(shape="[2]"), EIGHT), CORRUPT, ("shape must be a tuple", r"found \[2\]")),
    "shape-number": (file_of(header(shape="2"), EIGHT), CORRUPT, ("shape must be a tuple", "found 2")),
    "shape-in-brackets": (file_of(header(shape="(2)"), EIGHT), CORRUPT, ("shape must be a tuple", "found 2")),
    "dimension-bool": (file_of(header(shape="(True, 2)"), EIGHT), CORRUPT, ("must be an integer", "found True")),
    "dimension-none": (file_of(header(shape="(None,)"), EIGHT), CORRUPT, ("must be an integer", "found None")),
    "dimension-string": (file_of(header(shape="('2',)"), EIGHT), CORRUPT, ("must be an integer", "found '2'")),
    "dimension-negative": (file_of(header(shape="(-2,)"), EIGHT), CORRUPT, ("negative", "found -2")),
    "dimension-large": (
        file_of(header(shape="(9223372036854775808,)"), EIGHT),
        CORRUPT,
        (r"over 2\*\*63 - 1", "9223372036854775808"),
    ),
    "dimensions-256": (file_of(header(shape=f"({'1, ' * 256})"), EIGHT), LIMIT, ("expected at most 255, found 256",)),
    "dimensions-endless": (
        file_of(header(shape=f"({'9223372036854775807, ' * 40_000})"), EIGHT, (2, 0)),
        LIMIT,
        ("too many dimensions", "found 40000", "--max-dimensions"),
    ),
    "fortran-number": (
        file_of(header(fortran="1"), EIGHT),
        CORRUPT,
        ("fortran_order must be True or False", "found 1"),
    ),
    "fortran-string": (file_of(header(fortran="'False'"), EIGHT), CORRUPT, ("must be True or False", "'False'")),
    # the type
    "descr-number": (file_of(header("4"), EIGHT), CORRUPT, ("invalid descr", "found 4")),
    "descr-none": (file_of(header("None"), EIGHT), CORRUPT, ("invalid descr", "found None")),
    "descr-empty": (file_of(header("''"), EIGHT), UNSUPPORTED, ("unknown descr", "found ''")),
    "descr-unknown": (file_of(header("'<f3'"), EIGHT), UNSUPPORTED, ("unknown descr", "<f3")),
    "descr-zeros": (file_of(header("'<f04'"), EIGHT), UNSUPPORTED, ("unknown descr", "<f04")),
    "descr-i16": (file_of(header("'<i16'"), EIGHT), UNSUPPORTED, ("unknown descr", "<i16")),
    "e5m2-without-mark": (file_of(header("'|f1'"), b"ab"), UNSUPPORTED, ("unknown descr", r"\|f1")),
    "e5m2-big": (file_of(header("'>f1'"), b"ab"), UNSUPPORTED, ("unknown descr", ">f1")),
    "e4m3": (file_of(header("'float8_e4m3'"), b"ab"), UNSUPPORTED, ("unknown descr", "float8_e4m3fn")),
    "sub-byte": (file_of(header("'float4_e2m1fn'"), b"ab"), UNSUPPORTED, ("unknown descr",)),
    "c-long": (file_of(header("'<l'"), EIGHT), UNSUPPORTED, ("C long", "by platform", "<i8")),
    "c-long-double": (file_of(header("'<g'"), EIGHT), UNSUPPORTED, ("long double", "differs by platform")),
    "pointer": (file_of(header("'<P'"), EIGHT), UNSUPPORTED, ("pointer size",)),
    "int": (file_of(header("'int'"), EIGHT), UNSUPPORTED, ("C long",)),
    "long-double-big": (file_of(header("'>f16'", shape="(1,)"), bytes(16)), UNSUPPORTED, ("another platform", ">f16")),
    "old-object": (file_of(header("'|O8'"), EIGHT), UNSUPPORTED, ("object array", "pickle", r"\|O8")),
    "datetime-unit": (file_of(header("'<M8[fortnight]'", shape="(1,)"), EIGHT), UNSUPPORTED, ("unknown descr",)),
    "datetime-empty-unit": (file_of(header("'<M8[]'", shape="(1,)"), EIGHT), UNSUPPORTED, ("unknown descr",)),
    "datetime-4": (file_of(header("'<M4[s]'"), EIGHT), UNSUPPORTED, ("unknown descr",)),
    "subarray-fortran": (file_of(header("('<i2', (2,))", "True"), EIGHT), UNSUPPORTED, ("subarray", "Fortran")),
    "subarray-negative": (file_of(header("('<i2', (-2,))"), EIGHT), CORRUPT, ("negative",)),
    "field-short": (file_of(header("[('a',)]"), EIGHT), CORRUPT, ("invalid field",)),
    "field-no-tuple": (file_of(header("['a']"), EIGHT), CORRUPT, ("invalid field",)),
    "field-name": (file_of(header("[(1, '<i4')]"), EIGHT), CORRUPT, ("invalid field name", "found 1")),
    "field-twice": (file_of(header("[('a', '<i2'), ('a', '<i2')]"), EIGHT), CORRUPT, ("two fields",)),
    "field-object": (file_of(header("[('a', '|O')]"), EIGHT), UNSUPPORTED, ("object field 'a'", "pickle")),
    "field-unknown": (file_of(header("[('a', '<x4')]"), EIGHT), UNSUPPORTED, ("unknown descr", "<x4")),
    "field-endless": (
        file_of(header("[('a', '<i4', (9223372036854775807, 4))]", shape="(0,)")),
        CORRUPT,
        ("a size beyond 2147483647", "found 9223372036854775807"),
    ),
    "field-large": (
        file_of(header("[('a', '<i4', (2147483647,))]", shape="(0,)")),
        CORRUPT,
        ("more than 2147483647 bytes an element", "found 8589934588"),
    ),
    "subarray-large": (file_of(header("('<i4', (65536, 65536))", shape="(0,)")), CORRUPT, ("bytes an element",)),
    "subarray-of-nothing": (file_of(header("('<U0', (2,))", shape="(0,)")), CORRUPT, ("a subarray of U0",)),
    "field-of-nothing": (file_of(header("[('a', 'S0', (2,))]", shape="(0,)")), CORRUPT, ("a subarray of S0",)),
    "string-large": (file_of(header("'<U536870912'", shape="(0,)")), CORRUPT, ("found 2147483648",)),
    "fields-deep": (
        file_of(header("[('a', " * 18 + "'<i4'" + ")]" * 18), EIGHT),
        LIMIT,
        ("nested too deeply", "--max-depth"),
    ),
    # the data
    "short": (file_of(header(), EIGHT[:-1]), CORRUPT, ("cut short", "expected 8 bytes for float32", "found 7")),
    "long": (file_of(header(), EIGHT + b"x"), CORRUPT, ("1 bytes follow the array", "found 9", "np.save")),
    "overflow": (
        file_of(header(shape="(4611686018427387904, 4)"), EIGHT),
        CORRUPT,
        (r"shape claims more than 2\*\*63 bytes", "found 8"),
    ),
    "carriage-return": (
        file_of(header().replace("\n", "\r"), b"\n" + EIGHT),
        CORRUPT,
        ("1 bytes follow the array", "carriage returns", "binary"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_broken_files_are_refused(case: str, tmp_path: Path) -> None:
    """Each rule has its refusal, which says what was expected and what was found."""
    data, kind, patterns = REFUSED[case]
    (tmp_path / "w.npy").write_bytes(data)
    with pytest.raises(kind) as caught:
        convert.convert_file(tmp_path / "w.npy", tmp_path / "w.safetensors", format="npy")
    text = str(caught.value)
    assert text.startswith(str(tmp_path / "w.npy"))
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern!r} not in: {text}"
    assert [path.name for path in tmp_path.iterdir()] == ["w.npy"]


@pytest.mark.parametrize("letter", "bBhHiIqQefdFD?c")
def test_other_spellings_mean_what_numpy_says_or_are_refused(letter: str, tmp_path: Path) -> None:
    """Type characters without a size are not written by numpy; taken or not, they are never taken wrong."""
    (tmp_path / "w.npy").write_bytes(file_of(header(f"'<{letter}'", shape="(1,)"), bytes(np.dtype(letter).itemsize)))
    try:
        with convert.open(tmp_path / "w.npy") as checkpoint:
            found = checkpoint["w"].dtype.name
    except convert.UnsupportedError:
        return
    assert found == np.dtype(letter).name


def test_headers_longer_than_numpy_allows_are_read(tmp_path: Path) -> None:
    """numpy refuses its own headers beyond 10,000 characters unless told otherwise; they are no less valid."""
    array = np.zeros(2, [(f"field{number}", "<f4") for number in range(2_000)])
    data = npy_bytes(array)
    assert len(data) - array.nbytes > 40_000
    (tmp_path / "w.npy").write_bytes(data)
    convert.convert_file(tmp_path / "w.npy", tmp_path / "v.npy")
    assert (tmp_path / "v.npy").read_bytes() == data


def test_header_limit(tmp_path: Path) -> None:
    """The limit is on the header with its preamble."""
    data = file_of(header() + " " * 500, EIGHT)
    size = len(data) - 8
    (tmp_path / "w.npy").write_bytes(data)
    with convert.open(tmp_path / "w.npy", limits=convert.Limits(header_bytes=size)) as checkpoint:
        assert list(checkpoint) == ["w"]
    with pytest.raises(convert.LimitError, match=f"at most {size - 1} bytes, found {size}"):
        convert.open(tmp_path / "w.npy", limits=convert.Limits(header_bytes=size - 1))


def test_long_headers_are_not_kept(tmp_path: Path) -> None:
    """What is remembered of headers for the next file does not grow with their length."""
    tracemalloc.start()
    try:
        for number in range(40):
            (tmp_path / "w.npy").write_bytes(file_of(header() + " " * (1_000_000 + number), EIGHT, (2, 0)))
            convert.open(tmp_path / "w.npy").close()
        assert tracemalloc.get_traced_memory()[0] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([("a", ">i2"), ("b", "<f8"), ("c", "S3"), ("d", ">U2"), ("e", ">M8[s]")]),
        np.dtype([("a", ">i2"), ("b", "<f8")], align=True),
        np.dtype({"names": ["a", "b"], "formats": ["<i4", ">i2"], "offsets": [4, 12], "itemsize": 20}),
        np.dtype([("a", [("b", ">i4", (2, 3)), ("c", [("d", ">c16")], (2,))]), ("e", "?")]),
        np.dtype([("a", ">f4", (0,)), ("b", ">i2")]),
        np.dtype([(("title", "a"), ">i2"), ("b", "<i2")]),
    ],
    ids=["flat", "aligned", "gaps", "nested", "empty-subarray", "title"],
)
def test_records_come_out_little_endian(dtype: np.dtype[Any], tmp_path: Path) -> None:
    """Each field is swapped on its own, by its parts; padding stays where it was."""
    raw = np.random.default_rng(0).integers(0, 2, 6 * dtype.itemsize, np.uint8)
    array = raw.view(dtype).reshape(2, 3)
    np.save(tmp_path / "w.npy", array)
    np.save(tmp_path / "f.npy", np.asfortranarray(array))
    for name in ("w", "f"):
        convert.convert_file(tmp_path / f"{name}.npy", tmp_path / "out.npy", overwrite=True)
        found = np.load(tmp_path / "out.npy")
        assert found.dtype == np.dtype(np.lib.format.descr_to_dtype(little(np.lib.format.dtype_to_descr(dtype))))
        assert found.shape == array.shape
        for field in dtype.names or ():
            assert oracle.canonical(np.ascontiguousarray(found[field])) == fields_of(array[field]), field


def little(descr: Any) -> Any:
    if isinstance(descr, str):
        return descr.replace(">", "<")
    if isinstance(descr, list):
        return [(entry[0], little(entry[1]), *entry[2:]) for entry in descr]
    return descr


def fields_of(array: Array) -> bytes:
    """The canonical bytes of a field, by numpy alone."""
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


@pytest.mark.parametrize("rule", ["structured=split", "*:structured=split"])
def test_records_can_be_split(rule: str, tmp_path: Path) -> None:
    """One tensor per field, nested ones by path, swapped, of the record's shape and the subarray's."""
    dtype = np.dtype([("a", ">i2"), ("n", [("b", "<f4", (2,)), ("c", ">u8")]), ("z", "<f4", (0,))], align=True)
    array = np.random.default_rng(0).integers(0, 256, 6 * dtype.itemsize, np.uint8).view(dtype).reshape(2, 3)
    for layout in (array, np.asfortranarray(array)):
        np.savez(tmp_path / "w.npz", w=layout)
        convert.convert_file(
            tmp_path / "w.npz", tmp_path / "out.safetensors", policy=convert.Policy.parse([rule]), overwrite=True
        )
        assert oracle.read_safetensors(tmp_path / "out.safetensors")[1] == {
            "w.a": ("I16", (2, 3), fields_of(array["a"])),
            "w.n.b": ("F32", (2, 3, 2), fields_of(array["n"]["b"])),
            "w.n.c": ("U64", (2, 3), fields_of(array["n"]["c"])),
            "w.z": ("F32", (2, 3, 0), b""),
        }


def test_an_array_of_records_in_a_record_cannot_be_split(tmp_path: Path) -> None:
    """A field that is itself an array of records has no one path; refused with the way out, which works."""
    np.savez(tmp_path / "w.npz", w=np.zeros(2, [("a", [("b", "<i4")], (2,))]), v=np.zeros(1, "u1"))
    with pytest.raises(convert.UnsupportedError, match="field 'a' is an array of records"):
        convert.convert_file(tmp_path / "w.npz", tmp_path / "w.safetensors", policy=convert.Policy(structured="split"))
    report = convert.convert_file(
        tmp_path / "w.npz", tmp_path / "w.safetensors", policy=convert.Policy(structured="skip")
    )
    assert [row.name for row in report.skipped] == ["w"]
    assert list(oracle.read_safetensors(tmp_path / "w.safetensors")[1]) == ["v"]


def test_records_whose_fields_npy_cannot_describe_are_refused(tmp_path: Path) -> None:
    """Overlapping fields, or fields out of order, have no npy header; numpy raises, we refuse with a way out."""
    for offsets in ([0, 2], [4, 0]):
        dtype = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i4"], "offsets": offsets})
        with pytest.raises(convert.UnsupportedError, match="overlap or are out of order") as caught:
            convert.save({"w": np.zeros(2, dtype)}, tmp_path / "w.npz")
        assert "repack_fields" in str(caught.value.hint)
        assert list(tmp_path.iterdir()) == []


def test_the_header_of_version_1_is_latin_1(tmp_path: Path) -> None:
    """And that of version 3 UTF-8; numpy writes the first where it can, for the name of a field."""
    for name, version in (("é", 1), ("ŝ", 3)):
        array = np.zeros(2, [(name, "<f4")])
        path = tmp_path / f"{version}.npy"
        with pytest.warns(UserWarning, match="format 3") if version == 3 else contextlib.nullcontext():
            np.save(path, array)
        assert path.read_bytes()[6] == version
        with convert.open(path) as checkpoint:
            assert [field.name for field in checkpoint.tensors[0].dtype.fields] == [name]
