"""Every rule of safetensors, checked for all entries of the header, not only up to the first that breaks one.

The decisions are those of `readers.safetensors`; see there for the sources.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from convert.dtypes import BY_CODE, DType
from convert.errors import LimitError, quoted
from convert.files import Source
from convert.findings import LIMITS, Findings, Rule
from convert.jsontext import parse_json
from convert.limits import Limits

_AGAIN = "Download or save the file again."
LENGTH = Rule(
    "ST-001",
    "The first 8 bytes are the length of the header, which is not 0 and within the file.",
    f"The file is cut short, or something else. {_AGAIN}",
)
LONG = Rule(
    "ST-002",
    "The header is at most 100 MB long.",
    "The limit of the reference library. Mostly the file is no safetensors file, and its first bytes are no length.",
)
UTF8 = Rule("ST-003", "The header is UTF-8.", f"It is damaged. {_AGAIN}")
BRACE = Rule("ST-004", "The header begins with {.", "No space before it, so that the start of a file tells its format.")
JSON = Rule("ST-005", "The header is JSON.", "Without NaN and Infinity, and nothing behind the object but white space.")
KEYS = Rule("ST-006", "No key is there twice.", "Programs differ in which one they take. Save the file again.")
METADATA = Rule(
    "ST-007",
    "__metadata__ is an object whose values are strings.",
    "Other JSON is not allowed there, nor a tensor of that name. Keep other values as JSON in a string.",
)
UNICODE = Rule(
    "ST-008", "Names and metadata are valid Unicode.", "Half of a surrogate pair cannot be written as UTF-8."
)
ENTRY = Rule(
    "ST-009",
    "Each entry is an object with dtype, shape and data_offsets.",
    "Files of a version before 0.2 have `offsets`; save them again with a current library.",
)
DTYPE = Rule("ST-010", "The dtype is one that the format knows.", "Codes are upper case: F32, BF16, I64 ...")
SHAPE = Rule(
    "ST-011",
    "The shape is an array of integers from 0 to 2**64 - 1, whose product is no larger.",
    "Negative sizes, fractions and strings are none. The reference library refuses a product that overflows.",
)
OFFSETS = Rule(
    "ST-012",
    "data_offsets are two integers, begin and end, 0 <= begin <= end.",
    "They count from the end of the header.",
)
RANGE = Rule("ST-013", "A tensor's range is as long as its shape and dtype say.", "Shape, dtype or range is damaged.")
OVERLAP = Rule(
    "ST-014",
    "Ranges do not overlap.",
    "Each byte has one owner; tied tensors need bytes of their own each. Save the file again.",
)
HOLE = Rule("ST-015", "The data has no holes.", "Bytes that no tensor owns could hide another file (a polyglot).")
SHORT = Rule("ST-016", "The data is all there.", f"An incomplete download or copy. {_AGAIN}")
AFTER = Rule(
    "ST-017", "No bytes follow the last tensor.", "Something was appended, or the header is that of another file."
)
ALIGNED = Rule(
    "ST-101",
    "The data begins at a multiple of 8 bytes.",
    "The reference library pads its header to that; MLX does not. Memory-mapped arrays are slower or refused.",
)
TENSOR_ALIGNED = Rule(
    "ST-102", "Each tensor begins at a multiple of its element's size.", "Else it cannot be used in place when mapped."
)
FIELDS = Rule(
    "ST-103", "An entry has no other fields.", "They are ignored here and by the reference library, and lost."
)
PADDING = Rule(
    "ST-104", "The header is padded with spaces only.", "Other white space is JSON too; the format names spaces."
)
NULL = Rule("ST-105", "__metadata__ is not null.", "MLX writes it so; it is taken for none.")
BOOLEAN = Rule("ST-106", "The bytes of BOOL tensors are 0 or 1.", "Others count as true here and there.")
RULES = (
    LENGTH, LONG, UTF8, BRACE, JSON, KEYS, METADATA, UNICODE, ENTRY, DTYPE, SHAPE, OFFSETS, RANGE, OVERLAP, HOLE, SHORT,
    AFTER, ALIGNED, TENSOR_ALIGNED, FIELDS, PADDING, NULL, BOOLEAN,
)  # fmt: skip
_LARGEST = (1 << 64) - 1


class Placed(NamedTuple):
    """A tensor whose range is known; offsets count from the begin of the data."""

    begin: int
    end: int
    name: str
    dtype: DType | None


class Found(NamedTuple):
    """What a header tells, as far as it can be made out."""

    names: set[str]
    metadata: dict[str, str]
    data_bytes: int


def check(file: Source, findings: Findings, limits: Limits, data: bool) -> Found | None:
    """Add what is wrong with a file; `data` tells whether booleans are read.

    Returns:
        Its tensors' names and its metadata, for an index that names the file; None if there is no header to be read.
    """
    text = _header_text(file, findings, limits)
    if text is None:
        return None
    data_begin = 8 + len(text.encode("utf-8"))
    header = _parsed(text, findings, limits)
    if header is None:
        return None
    stripped = text.rstrip(" \n\r\t")
    if text[len(stripped) :].strip(" "):
        found = repr(text[len(stripped) :][:12])
        where = data_begin - len(text) + len(stripped)
        findings.add(PADDING, "the header is padded with other white space", found=found, offset=where)
    if data_begin % 8:
        found = f"{data_begin}"
        findings.add(ALIGNED, "the data is not aligned", expected="a multiple of 8", found=found, offset=data_begin)
    metadata = header.pop("__metadata__", {})
    _check_metadata(metadata, findings)
    placed: list[Placed] = []
    for name, entry in header.items():
        if _lone_surrogate(name):
            findings.add(UNICODE, "the name is not valid Unicode: half of a surrogate pair", tensor=name)
        one = _check_entry(name, entry, findings, limits)
        if one is not None:
            placed.append(one)
    place_findings(text, 8, 1, findings)
    place_findings(text, 8, 2, findings)
    complete = len(placed) == len(header) and not findings.counts[KEYS.id]
    _check_ranges(file, placed, complete, data_begin, findings)
    if data:
        _check_booleans(file, placed, data_begin, findings)
    kept = {key: text for key, text in metadata.items() if isinstance(text, str)} if isinstance(metadata, dict) else {}
    return Found(set(header), kept, sum(one.end - one.begin for one in placed))


def _header_text(file: Source, findings: Findings, limits: Limits) -> str | None:
    if file.size < 8:
        findings.add(
            LENGTH, "the file is cut short", expected="at least 8 bytes", found=f"{file.size}", offset=file.size
        )
        return None
    count = int.from_bytes(file.read(0, 8), "little")
    if count == 0:
        findings.add(LENGTH, "empty header", expected="a JSON object", found="length 0", offset=0)
        return None
    if count > limits.json_bytes:
        expected = f"at most {limits.json_bytes} bytes"
        findings.add(LONG, "the header length is over the limit", expected=expected, found=f"{count}", offset=0)
        return None
    if count > file.size - 8:
        expected = f"at most {file.size - 8} bytes"
        findings.add(LENGTH, "the header length exceeds the file", expected=expected, found=f"{count}", offset=0)
        return None
    raw = file.read(8, count)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as err:
        findings.add(UTF8, "the header is not UTF-8", found=f"{raw[err.start]:#04x}", offset=8 + err.start)
        return None
    if text[0] != "{":
        findings.add(BRACE, "the header is not a JSON object", expected="'{'", found=repr(text[0]), offset=8)
        if text.lstrip(" \n\r\t")[:1] != "{":
            return None
    return text


def _parsed(text: str, findings: Findings, limits: Limits) -> dict[str, Any] | None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Usual:
        if len(pairs) == 3 and tuple(key for key, _ in pairs) == _Usual._fields:
            return _Usual(*(value for _, value in pairs))
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    findings.add(KEYS, f"duplicate key {quoted(key)} in the header", tensor=key)
                seen.add(key)
        return found

    try:
        header: dict[str, Any] | _Usual = parse_json(text, "the header", limits, unique)
    except LimitError as err:
        findings.refused(LIMITS, err, offset=8)
        return None
    except ValueError as err:
        message, at = f"invalid JSON in the header: {err}", 8
        if isinstance(err, json.JSONDecodeError):
            message, at = f"invalid JSON in the header: {err.msg}", 8 + len(text[: err.pos].encode("utf-8"))
        findings.add(JSON, message, found=repr(text[err.pos :][:20]) if isinstance(err, json.JSONDecodeError) else None,
                     offset=at)  # fmt: skip
        return None
    return _plain(header)  # type: ignore[no-any-return]


class _Usual(NamedTuple):
    """An entry with the usual fields in the usual order; takes far less memory than the dictionary."""

    dtype: Any
    shape: Any
    data_offsets: Any


def _plain(value: Any) -> Any:
    """The value without that economy, which is for what is an entry only."""
    if isinstance(value, _Usual):
        return {key: _plain(item) for key, item in zip(_Usual._fields, value, strict=True)}
    return value


def _check_metadata(metadata: object, findings: Findings) -> None:
    name, metadata = "__metadata__", _plain(metadata)
    if metadata is None:
        findings.add(NULL, "__metadata__ is null", tensor=name)
        return
    if not isinstance(metadata, dict):
        findings.add(METADATA, "__metadata__ is no object", found=_shown(metadata), tensor=name)
        return
    for key, text in metadata.items():
        if not isinstance(text, str):
            message = f"the value of {quoted(key)} is no string"
            findings.add(METADATA, message, expected="a string", found=_shown(text), tensor=name)
        elif _lone_surrogate(key) or _lone_surrogate(text):
            findings.add(UNICODE, f"{quoted(key)} is not valid Unicode: half of a surrogate pair", tensor=name)


def _check_entry(name: str, entry: object, findings: Findings, limits: Limits) -> Placed | None:
    """Where the tensor is, if its range can be told, whatever else is wrong with it."""
    entry = _plain(entry)
    if not isinstance(entry, dict):
        findings.add(ENTRY, "the entry is no object", found=_shown(entry), tensor=name)
        return None
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            findings.add(ENTRY, f"{key} is missing from the entry", found=_shown(list(entry)), tensor=name)
    if extra := entry.keys() - {"dtype", "shape", "data_offsets"}:
        findings.add(FIELDS, "unknown fields in the entry", found=_shown(sorted(extra)), tensor=name)
    code = entry.get("dtype", "")
    dtype = BY_CODE.get(code) if isinstance(code, str) else None
    if dtype is None and "dtype" in entry:
        upper = code.upper() if isinstance(code, str) else ""
        expected = f'"{upper}"' if upper in BY_CODE else None
        findings.add(DTYPE, "unknown dtype", expected=expected, found=_shown(code), tensor=name)
    count = _count(name, entry.get("shape", []), findings, limits)
    offsets = entry.get("data_offsets", [])
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(offset) is not int for offset in offsets):
        if "data_offsets" in entry:
            found = _shown(offsets)
            findings.add(OFFSETS, "data_offsets must be two integers", found=found, tensor=name)
        return None
    begin, end = offsets
    if not 0 <= begin <= end:
        findings.add(OFFSETS, "data_offsets must be 0 <= begin <= end", found=_shown(offsets), tensor=name)
        return None
    if dtype is not None and count is not None and "shape" in entry and (end - begin) * 8 != count * dtype.bits:
        expected = f"{count * dtype.bits / 8:.15g} bytes"
        message = f"shape and dtype do not fit the range: {code} {_shown(entry['shape'])}"
        findings.add(RANGE, message, expected=expected, found=f"{end - begin}", tensor=name)
    return Placed(begin, end, name, dtype)


def _count(name: str, shape: object, findings: Findings, limits: Limits) -> int | None:
    """Number of elements, if the shape is one."""
    if not isinstance(shape, list):
        findings.add(SHAPE, "the shape is no array", found=_shown(shape), tensor=name)
        return None
    if len(shape) > limits.dimensions:
        expected = f"at most {limits.dimensions}"
        findings.add(LIMITS, "too many dimensions", expected=expected, found=f"{len(shape)}", tensor=name)
        return None
    count = 1
    for size in shape:
        if type(size) is not int or not 0 <= size <= _LARGEST:
            message = "a dimension must be an integer from 0 to 2**64 - 1"
            findings.add(SHAPE, message, found=_shown(size), tensor=name)
            return None
        if count <= _LARGEST:  # once over, a zero cannot help: the reference library has overflowed
            count *= size
    if count > _LARGEST:
        findings.add(SHAPE, "the shape claims more than 2**64 - 1 elements", found=_shown(shape), tensor=name)
        return None
    return count


def _check_ranges(file: Source, placed: list[Placed], complete: bool, data_begin: int, findings: Findings) -> None:
    """All bytes owned exactly once; holes can only be told where the place of every tensor is known."""
    placed.sort(key=lambda one: (one.begin, one.end))
    data_bytes = file.size - data_begin
    reached = 0
    for one in placed:
        where = {"tensor": one.name, "offset": data_begin + one.begin}
        if one.begin < reached:
            expected, found = f"a begin at {reached} of the data or later", f"{one.begin}"
            findings.add(OVERLAP, "the range overlaps the one before", expected=expected, found=found, **where)
        elif one.begin > reached and complete:
            message = f"a hole before the tensor: bytes {reached}..{one.begin} of the data belong to none"
            findings.add(HOLE, message, tensor=one.name, offset=data_begin + reached)
        if one.end > data_bytes:
            message = "the tensor's data is not all there"
            expected = f"{data_begin + one.end} bytes of file"
            findings.add(SHORT, message, expected=expected, found=f"{file.size}", tensor=one.name, offset=file.size)
        size = one.dtype.item_bytes if one.dtype is not None else 0
        if size > 1 and (data_begin + one.begin) % size and one.end > one.begin and data_begin % 8 == 0:
            expected, found = f"a multiple of {size}", f"{data_begin + one.begin}"
            findings.add(TENSOR_ALIGNED, "the tensor is not aligned", expected=expected, found=found, **where)
        reached = max(reached, one.end)
    if data_bytes > reached and complete:
        message = f"{data_bytes - reached} bytes at the end belong to no tensor"
        expected = f"{data_begin + reached} bytes"
        findings.add(AFTER, message, expected=expected, found=f"{file.size}", offset=data_begin + reached)


_NOT_BOOLEAN = re.compile(rb"[^\x00\x01]")
_CHUNK_BYTES = 1 << 20


def _check_booleans(file: Source, placed: list[Placed], data_begin: int, findings: Findings) -> None:
    for one in placed:
        if one.dtype is None or one.dtype.name != "bool":
            continue
        end = min(data_begin + one.end, file.size)
        for at in range(data_begin + one.begin, end, _CHUNK_BYTES):
            chunk = file.read(at, min(_CHUNK_BYTES, end - at))
            if (match := _NOT_BOOLEAN.search(chunk)) is not None:
                found, where = f"{chunk[match.start()]}", at + match.start()
                findings.add(
                    BOOLEAN, "a boolean is neither", expected="0 or 1", found=found, tensor=one.name, offset=where
                )
                break


# --- places in the header ----------------------------------------------------------------------------------------

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],]', re.DOTALL)


def place_findings(text: str, begin: int, level: int, findings: Findings) -> None:
    """Give the findings about a name the byte where its key stands; of a duplicate key, where the last does.

    Args:
        text: The JSON.
        begin: Its first byte in the file.
        level: How many objects deep the keys are: 1 for those of the outermost.
        findings: Those of the file.
    """
    wanted = findings.without_place()
    if not wanted:
        return
    places: dict[str, int] = {}
    depth, is_key = 0, False
    at, byte = 0, begin
    for token in _TOKEN.finditer(text):
        first = token[0][0]
        if first in "{[":
            depth += 1
            is_key = first == "{" and depth == level
        elif first in "}]":
            depth -= 1
            is_key = False
        elif first == ",":
            is_key = depth == level
        elif is_key:
            is_key = False
            name = json.loads(token[0], strict=False)
            if name in wanted:
                byte += len(text[at : token.start()].encode("utf-8", "surrogatepass"))
                at = token.start()
                places[name] = byte
    findings.place(places)


def _lone_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _shown(value: object) -> str:
    text = json.dumps(_plain(value), ensure_ascii=True)
    return text if len(text) <= 60 else text[:57] + "..."
