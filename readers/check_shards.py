"""Every rule of an index of shards, and of the shards it names.

The decisions are those of `readers.shards`. What is wrong in a shard is told with the path of the shard.
"""

from __future__ import annotations

import json
import re
from typing import Any

from convert.errors import InputError, LimitError, quoted
from convert.files import Source, beside, names_beside, open_source
from convert.findings import LIMITS, Findings, Rule
from convert.jsontext import is_unicode, parse_json
from convert.limits import Limits
from convert.memory import KEY
from readers import check_safetensors
from readers.check_safetensors import Found, place_findings

_STALE = "Index and shards are not of one set. Download or save all of them again."
JSON = Rule("SHARD-001", "The index is a JSON object in UTF-8.", "It is damaged. Download the index again.")
KEYS = Rule("SHARD-002", "No key is there twice.", "Programs differ in which one they take.")
MAP = Rule(
    "SHARD-003", "The index has weight_map, an object of strings.", "It tells for each tensor in which file it is."
)
SAFE = Rule(
    "SHARD-004",
    "weight_map names plain files beside the index.",
    "Other paths could lead anywhere. Do not use the index unless you know who wrote it.",
)
THERE = Rule("SHARD-005", "Every shard is there.", "An incomplete download: get the missing file.")
LACKS = Rule("SHARD-006", "Every tensor of the index is in a shard.", _STALE)
OMITS = Rule("SHARD-007", "Every tensor of a shard is in the index.", _STALE)
HOME = Rule("SHARD-008", "Every tensor is in the shard that the index names, and in no other.", _STALE)
SIZE = Rule("SHARD-101", "total_size is the size of all tensors.", "Nothing reads it but progress bars.")
FIELDS = Rule("SHARD-102", "The index has no fields but metadata and weight_map.", "Others are ignored, and lost.")
STRAY = Rule(
    "SHARD-103", "No other safetensors files are beside the index.", "They look like a part of it and are not."
)
DIFFER = Rule("SHARD-104", "All shards have the same metadata.", "What differs is left out when they become one file.")
RULES = (JSON, KEYS, MAP, SAFE, THERE, LACKS, OMITS, HOME, SIZE, FIELDS, STRAY, DIFFER)

_UNSAFE = re.compile(r"[/\\\0]|^\.{0,2}$|^[A-Za-z]:")


def check(file: Source, findings: Findings, limits: Limits, data: bool) -> None:
    """Add what is wrong with an index and the shards it names."""
    parsed = _parsed(file, findings, limits)
    if parsed is None:
        return
    text, index = parsed
    for key in sorted(index.keys() - {"metadata", "weight_map"}):
        findings.add(FIELDS, "unknown field in the index", found=quoted(key), offset=_at(text, key))
    weight_map = index.get("weight_map")
    if isinstance(weight_map, dict):
        _check_shards(file.path, text, index, findings, limits, data)
    else:
        where = _at(text, "weight_map") if "weight_map" in index else 0
        findings.add(MAP, "weight_map is missing, or no object", offset=where)
    place_findings(text, 0, 2, findings)


def _check_shards(path: str, text: str, index: dict[str, Any], findings: Findings, limits: Limits, data: bool) -> None:
    weight_map: dict[str, Any] = index["weight_map"]
    homes = {name: shard for name, shard in weight_map.items() if _is_safe(name, shard, findings)}
    shards: dict[str, Found] = {}
    complete = len(homes) == len(weight_map)
    named = set(homes.values())
    for shard in sorted(named):
        found = _check_shard(path, shard, text, findings, limits, data)
        if found is None:
            complete = False
        else:
            shards[shard] = found
    _check_homes(homes, shards, findings)
    if complete:
        _check_metadata(text, index, shards, findings)
    for name in names_beside(path):
        if name.lower().endswith(".safetensors") and name[0] != "." and name not in named:
            findings.add(STRAY, f"{quoted(name)} is beside the index and not in it")


def _at(text: str, word: str) -> int | None:
    """The byte where a string first stands in the index, if it is not escaped there."""
    found = text.find(json.dumps(word, ensure_ascii=False))
    return None if found < 0 else len(text[:found].encode("utf-8"))


def _parsed(file: Source, findings: Findings, limits: Limits) -> tuple[str, dict[str, Any]] | None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    findings.add(KEYS, f"duplicate key {quoted(key)}", tensor=key)
                seen.add(key)
        return found

    if file.size > limits.json_bytes:
        expected = f"at most {limits.json_bytes} bytes"
        findings.add(LIMITS, "the index is too long", expected=expected, found=f"{file.size}", offset=0)
        return None
    raw = file.read(0, file.size)
    try:
        text = raw.decode("utf-8")
        index = parse_json(text, "the index", limits, unique)
    except LimitError as err:
        findings.refused(LIMITS, err, offset=0)
        return None
    except UnicodeDecodeError as err:
        findings.add(JSON, "the index is not UTF-8", found=f"{raw[err.start]:#04x}", offset=err.start)
        return None
    except json.JSONDecodeError as err:
        at = len(err.doc[: err.pos].encode("utf-8"))
        findings.add(JSON, f"the index is not JSON: {err.msg}", found=repr(raw[at : at + 20]), offset=at)
        return None
    except ValueError as err:
        findings.add(JSON, f"the index is not JSON: {err}")
        return None
    if not isinstance(index, dict):
        findings.add(JSON, "the index is not a JSON object", expected="'{'", found=repr(raw[:1]), offset=0)
        return None
    return text, index


def _is_safe(name: str, shard: object, findings: Findings) -> bool:
    if not isinstance(shard, str):
        findings.add(MAP, "weight_map must name a file", found=json.dumps(shard)[:60], tensor=name)
    elif not is_unicode(name) or not is_unicode(shard):
        findings.add(MAP, "weight_map is not valid Unicode: half of a surrogate pair", tensor=name)
    elif _UNSAFE.search(shard):
        expected = "the plain name of a file beside the index"
        findings.add(SAFE, "unsafe path in weight_map", expected=expected, found=quoted(shard), tensor=name)
    else:
        return True
    return False


def _check_shard(index: str, shard: str, text: str, findings: Findings, limits: Limits, data: bool) -> Found | None:
    """What is in a shard; its own findings are added with its own path."""
    path = beside(index, shard)
    try:
        file = open_source(path)
    except InputError as err:
        message = f"the shard {quoted(shard)}, which the index names, {_missing(err)}"
        findings.add(THERE, message, offset=_at(text, shard), hint=_hint(err))
        return None
    try:
        with findings.about(path):
            return check_safetensors.check(file, findings, limits, data)
    finally:
        file.close()


def _missing(err: InputError) -> str:
    return "is missing" if isinstance(err.__cause__, FileNotFoundError) else err.message


def _hint(err: InputError) -> str | None:
    return "download the missing file" if isinstance(err.__cause__, FileNotFoundError) else err.hint


def _check_homes(homes: dict[str, str], shards: dict[str, Found], findings: Findings) -> None:
    first: dict[str, str] = {}
    for shard, found in shards.items():
        for name in sorted(found.names):
            said, other = homes.get(name), first.setdefault(name, shard)
            if other != shard:
                message = f"the tensor is in {quoted(shard)} and in {quoted(other)}"
                findings.add(HOME, message, expected="one shard", found="2", tensor=name)
            elif said is None:
                findings.add(OMITS, f"{quoted(shard)} holds the tensor, but the index omits it", tensor=name)
            elif said != shard:
                expected, actual = quoted(said), quoted(shard)
                findings.add(HOME, "the tensor is in another shard", expected=expected, found=actual, tensor=name)
    for name, said in homes.items():
        if said in shards and name not in first and not _is_text(name, shards[said]):
            findings.add(LACKS, f"{quoted(said)} lacks the tensor that the index names", tensor=name)


def _is_text(name: str, shard: Found) -> bool:
    """A string that convert put into the metadata, and finds there again."""
    return KEY in shard.metadata and name in shard.metadata


def _check_metadata(text: str, index: dict[str, Any], shards: dict[str, Found], findings: Findings) -> None:
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    real = sum(found.data_bytes for found in shards.values())
    if isinstance(total, int) and total != real:
        where = _at(text, "total_size")
        findings.add(SIZE, "total_size is wrong", expected=f"{real}", found=f"{total}", offset=where)
    all_of_them = [found.metadata for found in shards.values()]
    keys = {key for each in all_of_them for key in each} - {KEY}
    for key in sorted(keys):
        if len({each.get(key) for each in all_of_them}) > 1:
            findings.add(DIFFER, f"the shards' metadata differ in {quoted(key)}")
