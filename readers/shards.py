"""A checkpoint in several safetensors files, the shards, with an index that tells where each tensor is.

    {"metadata": {"total_size": bytes, ...}, "weight_map": {"tensor": "file beside the index", ...}}

The index and the shards must agree on every tensor: an index that was left over from another set, or a download that
broke off, is refused with all that is wrong. `metadata` is about the index, not the tensors, and is dropped; what all
shards have in their own `__metadata__` is the metadata of the checkpoint. Unknown fields of the index are ignored.

Source: huggingface_hub/serialization/_torch.py, version 2.4, which writes and loads it. It only warns of tensors that
the index omits, and it accepts paths into folders below, which no writer produces.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Any

from convert.errors import ConvertError, CorruptError, gather, quoted
from convert.files import Source, beside, name_part, names_beside, open_source
from convert.jsontext import is_unicode, kind_of, parse_json
from convert.limits import DEFAULT, Limits, exceeded
from convert.tensor import Checkpoint, Extent, Tensor
from readers import safetensors

_OPEN_FILES = 64
"""Checkpoints with more shards than this do not keep them all open."""
_STALE = "the index and the shards are not of the same set; download or save all of them again"
_UNSAFE = re.compile(r"[/\\\0]|^\.{0,2}$|^[A-Za-z]:")


def open(path: str | os.PathLike[str], limits: Limits = DEFAULT) -> Checkpoint:
    """The tensors of all shards, shard by shard in the order of their names; only headers are read.

    Raises:
        CorruptError: The index breaks a rule, or disagrees with the shards; all problems together.
        InputError: A shard cannot be read.
        LimitError: An index longer than `limits.json_bytes`.
    """
    index = open_source(path)
    shards: list[Checkpoint] = []
    try:
        weight_map = _weight_map(_parse(index, limits))
        problems: list[ConvertError] = []
        for name in sorted(set(weight_map.values())):
            try:
                shards.append(_open_shard(beside(index.path, name), limits))
            except ConvertError as err:
                problems += err.problems
                continue
            if len(shards) > _OPEN_FILES:
                shards[-1].files[0].park()
        _check(weight_map, shards, problems)
        if problems:
            raise gather(problems)
    except BaseException as err:
        for file in (index, *(shard.files[0] for shard in shards)):
            file.close()
        if isinstance(err, ConvertError):
            err.at(path)
            for problem in err.problems:
                problem.at(path)
        raise
    index.park()
    return _joined(index, shards)


def _parse(index: Source, limits: Limits) -> dict[str, Any]:
    """The index' JSON object."""
    if index.size > limits.json_bytes:
        raise exceeded("json_bytes", "the index is too long", limits.json_bytes, index.size)
    data = index.read(0, index.size)
    try:
        found = parse_json(data.decode("utf-8"), "the index", limits, _unique)
    except UnicodeDecodeError as err:
        raise CorruptError(f"the index is not UTF-8 (found {data[err.start]:#04x} at byte {err.start})") from err
    except ValueError as err:
        raise CorruptError(f"invalid JSON in the index: {err}", hint="download the index again") from err
    if not isinstance(found, dict):
        raise CorruptError(f"the index is not a JSON object (found {kind_of(found)})")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = [key for key, count in counts.items() if count > 1]
        raise CorruptError(f"duplicate key {', '.join(map(quoted, twice[:5]))} in the index")
    return found


def _weight_map(index: dict[str, Any]) -> dict[str, str]:
    """Tensor -> shard; every entry proved to name a file beside the index."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        what = kind_of(weight_map) if "weight_map" in index else "none"
        raise CorruptError(f"the index must have an object weight_map (found {what})")
    problems: list[ConvertError] = []
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            problems.append(CorruptError(f"weight_map must name a file (found {kind_of(shard)})", tensor=name))
        elif not is_unicode(name) or not is_unicode(shard):
            problems.append(CorruptError("weight_map is not valid Unicode (a lone surrogate)", tensor=name))
        elif _UNSAFE.search(shard):
            problems.append(
                CorruptError(
                    f"unsafe path in weight_map: {quoted(shard)} (expected the plain name of a file beside the index)",
                    tensor=name,
                    hint="do not use this index unless you know who wrote it",
                )
            )
    if problems:
        raise gather(problems)
    return weight_map


def _open_shard(path: str, limits: Limits) -> Checkpoint:
    try:
        return safetensors.open(path, limits)
    except ConvertError as err:
        if isinstance(err.__cause__, FileNotFoundError):
            message = "this shard, which the index names, is missing: an incomplete download?"
            raise CorruptError(message, path=path, hint="download the missing file") from err
        raise


def _check(weight_map: dict[str, str], shards: list[Checkpoint], problems: list[ConvertError]) -> None:
    """Add a problem for each tensor on which the index and the shards that could be opened disagree."""
    homes: dict[str, str] = {}
    for shard in shards:
        here = _name(shard)
        for tensor in shard.tensors:
            other = homes.setdefault(tensor.name, here)
            said = weight_map.get(tensor.name)
            what = None
            if other != here:
                what = f"the tensor is in this shard and in {quoted(other)}: each has one home"
            elif said is None and _is_stored(tensor, shard):
                what = "this shard holds the tensor, but the index omits it: a stale index?"
            elif said is not None and said != here:
                what = f"this shard holds the tensor, but the index says it is in {quoted(said)}: a stale index?"
            if what is not None:
                problems.append(CorruptError(what, path=shard.path, tensor=tensor.name, hint=_STALE))
    by_name = {_name(shard): shard for shard in shards}
    for name, said in weight_map.items():
        if said in by_name and name not in homes:
            what = "the index names the tensor, but this shard lacks it: a stale index?"
            problems.append(CorruptError(what, path=by_name[said].path, tensor=name, hint=_STALE))


def _name(shard: Checkpoint) -> str:
    return os.path.basename(name_part(shard.path))


def _is_stored(tensor: Tensor, shard: Checkpoint) -> bool:
    """Whether a tensor's bytes are in the file; a string may have come back from the metadata instead."""
    return isinstance(tensor.data, Extent) and tensor.data.file is shard.files[0]


def _joined(index: Source, shards: list[Checkpoint]) -> Checkpoint:
    """One checkpoint for all shards."""
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    notes = [note for shard in shards for note in shard.notes]
    common = dict(shards[0].metadata) if shards else {}
    for shard in shards:
        common = {key: text for key, text in common.items() if shard.metadata.get(key) == text}
    texts = {tensor.name for shard in shards for tensor in shard.tensors if not _is_stored(tensor, shard)}
    lost = {key for shard in shards for key in shard.metadata} - common.keys() - texts
    if lost:
        shown = ", ".join(map(quoted, sorted(lost)[:5])) + (" ..." if len(lost) > 5 else "")
        notes.append(f"metadata that differs from shard to shard was left out: {shown}")
    if strays := _strays(index.path, {_name(shard) for shard in shards}):
        shown = ", ".join(map(quoted, strays[:5])) + (" ..." if len(strays) > 5 else "")
        notes.append(f"not in the index, and left out: {shown}")
    files = [index, *(shard.files[0] for shard in shards)]
    return Checkpoint(index.path, "shards", tensors, common, notes, files)


def _strays(index: str, shards: set[str]) -> list[str]:
    """Other safetensors files beside the index, which a user may take for a part of it."""
    there = names_beside(index)
    return [name for name in there if name.lower().endswith(".safetensors") and name not in shards and name[0] != "."]
