"""Every rule of the npy format, in a file or in a member of an archive.

The decisions are those of `readers.npy`, whose functions are called here one by one, so that a problem with one field
of the header does not hide those of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from convert import dtypes
from convert.errors import CorruptError, InputError
from convert.files import Source
from convert.findings import LIMITS, Findings, Part, Rule
from convert.limits import Limits
from convert.tensor import Extent, Stream
from convert.transfer import stored_chunks
from readers import check_pickle, npy
from readers.literal import Literal

_AGAIN = "download or save the file again."
MAGIC = Rule("NPY-001", r"The file begins with \x93NUMPY.", f"It is something else, or its start is lost: {_AGAIN}")
VERSION = Rule(
    "NPY-002", "The format version is 1.0, 2.0 or 3.0.", "No other has been published; the version bytes are damaged."
)
WHOLE = Rule("NPY-003", "The header is whole.", f"The file is cut short, or the header's length damaged: {_AGAIN}")
UTF8 = Rule("NPY-004", "The header of version 3.0 is UTF-8.", "Version 1.0 and 2.0 are Latin-1. Save the array again.")
LITERAL = Rule(
    "NPY-005",
    "The header is a Python dictionary of plain values.",
    "Strings, integers, booleans, tuples, lists and dictionaries, nested at most 32 deep, each key once. Calls, names "
    "and expressions are not evaluated. JSON (true, false) is none.",
)
KEYS = Rule("NPY-006", "The header has the keys descr, fortran_order and shape, and no others.", "As numpy demands.")
SHAPE = Rule(
    "NPY-007",
    "The shape is a tuple of integers from 0 to 2**63 - 1.",
    "Lists, booleans and hexadecimal sizes are written by no numpy.",
)
ORDER = Rule("NPY-008", "fortran_order is True or False.", "1 and 0 are read differently by different programs.")
DESCR = Rule("NPY-009", "descr is the description of a type.", "A type string, or a list of fields with unique names.")
TYPE = Rule(
    "NPY-010",
    "The type means the same everywhere, and is known.",
    "A C long, an old object type or a big-endian long double depends on the platform that wrote it; load the file "
    "there and save it with an explicit type.",
)
SHORT = Rule("NPY-011", "The data is as long as type and shape say.", f"It is cut short: {_AGAIN}")
AFTER = Rule(
    "NPY-012",
    "Nothing follows the data.",
    "np.save was called twice on one file, a text-mode transfer added carriage returns, or the type is wrong.",
)
ALIGNED = Rule(
    "NPY-101",
    "The data begins at a multiple of 64 bytes.",
    "numpy before 1.14 and MLX align to less. It is read all the same; memory-mapped it is slower.",
)
PADDING = Rule("NPY-102", "The header ends in spaces and one newline.", "Other padding is read here and by numpy.")
SPELLING = Rule(
    "NPY-103",
    "The header is spelled as numpy spells it.",
    "Keys in order, single quotes, one space after a comma. MLX and other small readers look at fixed places and "
    "read another shape from other spellings.",
)
PYTHON2 = Rule(
    "NPY-104", "The header has no Python 2 forms.", "2L and u'...' are read here; other readers stop at them."
)
DIALECT = Rule(
    "NPY-105",
    "The type string is one that numpy writes and reads.",
    "<f1 (ml_dtypes' float8_e5m2), <g2 (bfloat16), =f4, float32 and the like are read here, and refused by np.load or "
    "by other readers.",
)
PICKLED = Rule(
    "NPY-106",
    "The array holds no Python objects.",
    "They are a pickle, and loading a pickle can run code. `--policy object=unpickle` reads plain ones without.",
)
BOOLEAN = Rule(
    "NPY-107", "The bytes of booleans are 0 or 1.", "Others count as true here and there, and break compilers."
)
RULES = (
    MAGIC, VERSION, WHOLE, UTF8, LITERAL, KEYS, SHAPE, ORDER, DESCR, TYPE, SHORT, AFTER, ALIGNED, PADDING,
    SPELLING, PYTHON2, DIALECT, PICKLED, BOOLEAN, *check_pickle.RULES,
)  # fmt: skip


def check(file: Source, findings: Findings, limits: Limits, data: bool) -> None:
    """Add what is wrong with a .npy file; `data` tells whether pickles and booleans are read."""
    part = Part()
    head_bytes, header = check_header(
        lambda count: file.read(0, min(count, file.size)), file.size, findings, limits, part
    )
    if header is None:
        return
    data_bytes = file.size - head_bytes
    check_size(header, head_bytes, data_bytes, findings, part, file.read(head_bytes - 1, 1) == b"\r")
    if data:
        check_data(header, head_bytes, Extent(file, head_bytes, data_bytes), findings, limits, part)


def check_header(
    read: Callable[[int], bytes], size: int, findings: Findings, limits: Limits, part: Part
) -> tuple[int, npy.Header | None]:
    """Length of preamble and header, and what the header says, or None where it cannot be told.

    Args:
        read: Gives the first bytes of the file, as many as asked for or all there are.
        size: Bytes of the whole file.
    """
    start = read(12)
    if start[:6] != npy.MAGIC[: len(start)] or not start:
        message = "no npy file" if size else "the file is empty"
        findings.add(MAGIC, message, expected=repr(npy.MAGIC), found=repr(start[:6]), **part.at(0))
        return 0, None
    width = 2 if start[6:7] == b"\x01" else 4
    if len(start) < 10:
        findings.add(WHOLE, "the header is cut short", expected="10 bytes", found=f"{size}", **part.at(size))
        return 0, None
    if start[6:8] not in (b"\x01\0", b"\x02\0", b"\x03\0"):
        found = f"{start[6]}.{start[7]}"
        findings.add(VERSION, "unknown npy version", expected="1.0, 2.0 or 3.0", found=found, **part.at(6))
        return 0, None
    head_bytes = 8 + width + int.from_bytes(start[8 : 8 + width], "little")
    if head_bytes > limits.header_bytes:
        expected = f"at most {limits.header_bytes} bytes"
        findings.add(LIMITS, "the header is too long", expected=expected, found=f"{head_bytes}", **part.at(8))
        return 0, None
    if head_bytes > size:
        expected = f"{head_bytes} bytes"
        findings.add(WHOLE, "the header is cut short", expected=expected, found=f"{size}", **part.at(size))
        return 0, None
    before = findings.errors
    body = read(head_bytes)[8 + width :]
    header = _as_numpy_writes(body)
    if header is not None:
        _check_aligned(head_bytes, findings, part)
        return head_bytes, header
    text = _Text(body, 8 + width, findings, part)
    text.check(utf8=start[6] == 3)
    if findings.errors > before:
        return head_bytes, None
    with findings.catching(DESCR, unsupported=TYPE, limit=LIMITS, **text.place_of("descr")):
        header = npy.read_header(read, size, limits)[1]
        text.check_spelling()
        if header.dtype is dtypes.OBJECT:
            findings.add(PICKLED, "an array of Python objects, a pickle", **part.at(head_bytes))
        _check_aligned(head_bytes, findings, part)
    return head_bytes, header


def _as_numpy_writes(body: bytes) -> npy.Header | None:
    """The header if it is just what numpy writes for a simple type: a short cut for archives of very many members."""
    if (
        len(body) > 512
        or not body.startswith(_START)
        or not _is_numpys(body[11 : body.find(b"'", 11)].decode("latin-1"))
    ):
        return None
    return npy.parse_common(body)


def _check_aligned(head_bytes: int, findings: Findings, part: Part) -> None:
    if head_bytes % 64:
        where = part.at(head_bytes)
        findings.add(ALIGNED, "the data is not aligned", expected="a multiple of 64", found=f"{head_bytes}", **where)


_START = b"{'descr': '"
_KEYS = ("descr", "fortran_order", "shape")


class _Text:
    """The header of one array, after its length field."""

    def __init__(self, body: bytes, begin: int, findings: Findings, part: Part) -> None:
        self._body = body
        self._begin = begin
        self._findings = findings
        self._part = part
        self._text = ""
        self._utf8 = False
        self._fields: dict[str, object] = {}

    def check(self, utf8: bool) -> None:
        """Add what is wrong with each of the three values."""
        findings, self._utf8 = self._findings, utf8
        try:
            self._text = self._body.decode("utf-8" if utf8 else "latin-1")
        except UnicodeDecodeError as err:
            found = f"{self._body[err.start]:#04x}"
            findings.add(UTF8, "the header is not UTF-8", found=found, **self._part.at(self._begin + err.start))
            return
        try:
            fields = Literal(self._text).whole()
            if not isinstance(fields, dict):
                raise CorruptError("the header is not a dictionary")
        except InputError as err:
            place = re.search(r"at character ([0-9]+)", err.message)
            findings.refused(LITERAL, err, **self._at(int(place[1]) if place else 0))
            return
        self._fields = fields
        for key in _KEYS:
            if key not in fields:
                findings.add(KEYS, "the header lacks a key", expected=key, **self._at(0))
        for key in sorted(fields.keys() - set(_KEYS)):
            findings.add(KEYS, "the header has an unknown key", found=_shown(key), **self.place_of(key))
        self._check_shape(fields.get("shape", ()))
        fortran = fields.get("fortran_order", False)
        if type(fortran) is not bool:
            where = self.place_of("fortran_order")
            findings.add(ORDER, "fortran_order must be True or False", found=_shown(fortran), **where)
        if "descr" in fields:
            self._check_descr(fields["descr"])

    def _at(self, character: int) -> dict[str, Any]:
        before = self._text[:character]
        return self._part.at(self._begin + len(before.encode("utf-8") if self._utf8 else before))

    def place_of(self, key: str) -> dict[str, Any]:
        """Where a key stands."""
        return self._at(max(self._text.find(f"'{key}'"), self._text.find(f'"{key}"'), 0))

    def _check_shape(self, shape: object) -> None:
        where = self.place_of("shape")
        if not isinstance(shape, tuple):
            self._findings.add(SHAPE, "shape must be a tuple", found=_shown(shape), **where)
            return
        for size in shape:
            with self._findings.catching(SHAPE, **where):
                npy.check_dimension(size)

    def _check_descr(self, descr: object) -> None:
        """Each field of a structured type on its own, so that all problems are found."""
        fields = [[field] for field in descr] if isinstance(descr, list) and len(descr) > 1 else [descr]
        where = self.place_of("descr")
        for field in fields:
            with self._findings.catching(DESCR, unsupported=TYPE, limit=LIMITS, **where):
                npy.parse_descr(field)

    def check_spelling(self) -> None:
        """Add warnings about a header that means something, but is not what numpy writes."""
        fields = self._fields
        text = self._text.rstrip(" \n\r\t\f\0")
        padding = self._text[len(text) :]
        if padding.strip(" ") != "\n" or padding[-1:] != "\n":
            found = repr(padding[-12:])
            self._findings.add(
                PADDING, "unusual padding", expected="spaces, newline", found=found, **self._at(len(text))
            )
        modern = _modern(text)
        if modern != text:
            self._findings.add(PYTHON2, "Python 2 forms in the header", **self._at(0))
        usual = "{" + "".join(f"{key!r}: {fields[key]!r}, " for key in sorted(fields)) + "}"
        if modern != usual:
            differ = next((i for i, (a, b) in enumerate(zip(modern, usual, strict=False)) if a != b), len(usual))
            found = repr(modern[differ : differ + 20])
            expected = repr(usual[differ : differ + 20])
            where = self._at(differ if modern == text else 0)
            self._findings.add(SPELLING, "not spelled as numpy does", expected=expected, found=found, **where)
        descr = fields["descr"]
        if isinstance(descr, str) and not _is_numpys(descr):
            self._findings.add(
                DIALECT, "not a type string that numpy writes", found=repr(descr), **self.place_of("descr")
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_STRING = re.compile(r"""([uU]?'(?:[^'\\\n]|\\.)*'|[uU]?"(?:[^"\\\n]|\\.)*")""")


def _modern(text: str) -> str:
    """A header without the suffix and prefix of Python 2."""
    parts = _STRING.split(text)
    parts[::2] = [re.sub(r"([0-9])L\b", r"\1", part) for part in parts[::2]]
    parts[1::2] = [part.lstrip("uU") for part in parts[1::2]]
    return "".join(parts)


_NUMPYS = re.compile(
    r"\|[biu]1|[<>](?:[iuf][248]|c8|c16|f12|f16|c24|c32|[mM]8(?:\[[^\]]*\])?)|[<>]U[0-9]+|\|[SV][0-9]+|<V[12]|\|O"
)
"""Those of `numpy.dtype.str`, and `<V1` and `<V2`, which ml_dtypes' types have."""


def _is_numpys(descr: str) -> bool:
    return _NUMPYS.fullmatch(descr) is not None


def check_size(
    header: npy.Header, head_bytes: int, found: int, findings: Findings, part: Part, ends_with_return: bool = False
) -> None:
    """Add a finding if the data is shorter or longer than the header says."""
    end = head_bytes + min(found, header.nbytes)
    with findings.catching(SHORT if found < header.nbytes else AFTER, **part.at(end)):
        npy.check_size(header, found, ends_with_return=ends_with_return)


_NOT_BOOLEAN = re.compile(rb"[^\x00\x01]")


def check_data(
    header: npy.Header, head_bytes: int, data: Extent | Stream, findings: Findings, limits: Limits, part: Part
) -> None:
    """Read the data and add what is wrong in it; whatever its checksum gives is raised."""
    if header.dtype is dtypes.OBJECT:
        check_pickle.check(header, head_bytes, data, findings, limits, part)
        return
    if isinstance(data, Extent) and data.crc is None and header.dtype.name != "bool":
        return  # nothing could be found
    position = head_bytes
    odd = header.dtype.name != "bool"
    for chunk in stored_chunks(data, 1 << 20):
        view = memoryview(chunk)
        if not odd and (match := _NOT_BOOLEAN.search(view)) is not None:
            odd = True
            found = str(view[match.start()])
            findings.add(
                BOOLEAN, "a boolean is neither", expected="0 or 1", found=found, **part.at(position + match.start())
            )
        position += len(view)
