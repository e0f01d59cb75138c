"""Where numpy and safetensors judge a file otherwise than we do: who accepts it, and why the other does not.

`disagreements` gives the classes that docs/strictness.md lists with their reasons.
"""

from __future__ import annotations

import io
import re
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import deserialize

import convert
from convert.errors import ConvertError

_READ_BYTES = 4 << 20
_BY_STANDING: dict[str, str] = {"safetensors": "safetensors", "npy": "numpy", "npz": "numpy"}


class Disagreement(NamedTuple):
    """One class: we 'refused' or 'accepted' what the reference did not, or see it 'different'; `what` says why."""

    reference: str
    side: str
    what: str


class Content(NamedTuple):
    """A tensor as one side sees it, or why it does not."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    refusal: str | None = None


def template(message: str) -> str:
    """What is wrong, without the names and numbers of this file."""
    text = re.split(r" \((?:expected|found)|; expected|: line \d", message.split("\n")[0])[0]
    text = re.sub(r"b?'(?:[^'\\]|\\.)*'(?:\.\.\.)?|b?\"(?:[^\"\\]|\\.)*\"|`[^`]*`", "'...'", text)
    text = re.sub(r"\('...'.*|\[.*", "...", text)
    text = re.sub(r"\b(?:0x)?[0-9a-f]*[0-9][0-9a-f]*\b", "N", text)
    return text[:90].strip()


def disagreements(data: bytes, suffix: str, folder: Path) -> set[Disagreement]:
    """The classes of all disagreements about a file; none if both sides see the same, or both nothing."""
    format = suffix[1:]
    reference = _BY_STANDING[format]
    theirs, their_refusal = _theirs(data, format)
    ours, our_refusal = _ours(data, suffix, folder)
    if our_refusal is not None:
        accepted = their_refusal is None and (not theirs or any(found.refusal is None for found in theirs.values()))
        return {Disagreement(reference, "refused", template(our_refusal))} if accepted else set()
    if their_refusal is not None:
        return {Disagreement(reference, "accepted", template(their_refusal))}
    if format == "npz":  # theirs are by members, ours by keys; a blob keeps its whole name
        theirs = {name if name in ours else name.removesuffix(".npy"): content for name, content in theirs.items()}
    found = {_judged(reference, name, ours.get(name), theirs.get(name)) for name in ours.keys() | theirs.keys()}
    return {one for one in found if one is not None}


def _judged(reference: str, name: str, ours: Content | None, theirs: Content | None) -> Disagreement | None:
    if ours is not None and ours.dtype == "object":
        return None  # numpy was not asked to unpickle
    if ours is None or ours.refusal is not None:
        if theirs is None or theirs.refusal is not None:
            return None
        return Disagreement(reference, "refused", "no such name" if ours is None else template(ours.refusal or ""))
    if theirs is None or theirs.refusal is not None:
        return Disagreement(reference, "accepted", "no such name" if theirs is None else template(theirs.refusal or ""))
    for what, mine, other in (("type", ours.dtype, theirs.dtype), ("shape", ours.shape, theirs.shape)):
        if mine != other:
            return Disagreement(reference, "different", f"{what}: {mine} for {other}" if what == "type" else what)
    return None if ours.data == theirs.data else Disagreement(reference, "different", f"bytes of {ours.dtype}")


def _ours(data: bytes, suffix: str, folder: Path) -> tuple[dict[str, Content], str | None]:
    path = folder / f"w{suffix}"
    path.write_bytes(data)
    found = {}
    try:
        with convert.open(path, format=suffix[1:]) as checkpoint:
            for name, tensor in checkpoint.items():
                try:
                    dtype = tensor.dtype.safetensors if suffix == ".safetensors" else tensor.dtype.name
                    if tensor.dtype.kind == "object":
                        found[name] = Content("object", tensor.shape, b"")
                        continue
                    if tensor.nbytes > _READ_BYTES:
                        continue
                    content = b"".join(bytes(chunk) for chunk in tensor.chunks())
                    found[name] = Content(dtype or tensor.dtype.name, tensor.shape, content)
                except ConvertError as err:
                    found[name] = Content("", (), b"", err.problems[0].message)
    except ConvertError as err:
        return {}, err.problems[0].message
    finally:
        path.unlink()
    return found, None


def _theirs(data: bytes, format: str) -> tuple[dict[str, Content], str | None]:
    try:
        if format == "safetensors":
            pairs = deserialize(data)  # type: ignore[no-untyped-call]
            return {name: Content(one["dtype"], tuple(one["shape"]), bytes(one["data"])) for name, one in pairs}, None
        return _numpys(data, format), None
    except Exception as err:  # the references raise what they like
        return {}, f"{type(err).__name__}: {err}"


def _numpys(data: bytes, format: str) -> dict[str, Content]:
    magic = data[:6] == b"\x93NUMPY" if format == "npy" else data[:4] in (b"PK\x03\x04", b"PK\x05\x06")
    if not magic:
        raise ValueError("no magic")  # np.load would try another format, or a pickle
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = np.load(io.BytesIO(data), allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"w": _content_of(loaded)}
        # By the names of the members: those of `files` lack their suffix, and 'w' may mean two of them.
        return {name: _member(loaded, name) for name in loaded.zip.namelist() if not name.endswith("/")}


def _member(loaded: Any, name: str) -> Content:
    try:
        return _content_of(loaded[name])
    except Exception as err:
        return Content("", (), b"", f"{type(err).__name__}: {err}")


def _content_of(array: Any) -> Content:
    if isinstance(array, bytes):
        return Content("blob", (len(array),), array)
    dtype = array.dtype
    name = _NAMES.get(dtype.str, dtype.name)
    if dtype.fields is not None:
        return Content("structured", array.shape, array.astype(dtype.newbyteorder("<")).tobytes())
    big = dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big")
    if dtype.kind in "SUV":
        name = f"{dtype.kind}{dtype.itemsize // (4 if dtype.kind == 'U' else 1)}"
    return Content(name, array.shape, (array.byteswap() if big else array).tobytes())


_NAMES: dict[str, str] = {}
