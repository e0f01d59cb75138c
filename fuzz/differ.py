"""Where numpy and safetensors judge a file otherwise than we do: who accepts it, and why the other does not.

`disagreements` gives the classes that docs/strictness.md lists with their reasons.
"""

from __future__ import annotations

import io
import random
import re
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import deserialize

import convert
from convert.errors import ConvertError
from convert.files import MemoryFile
from convert.tensor import Extent
from fuzz.body import bounded
from fuzz.mutate import changed
from fuzz.seeds import Seed, seeds

_READ_BYTES = 4 << 20
STRICTNESS = Path(__file__).resolve().parents[1] / "docs" / "strictness.md"
_MAGIC = b"\x93NUMPY"


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
    record: Any = None


def listed() -> set[Disagreement]:
    """The classes in docs/strictness.md."""
    found, sides = set(), iter(("refused", "accepted", "different"))
    side = ""
    for line in STRICTNESS.read_text("utf-8").splitlines():
        if line.startswith("## "):
            side = next(sides)
        elif row := re.match(r"\| (numpy|safetensors) \| `(.*?)` \| \S", line):
            found.add(Disagreement(row[1], side, row[2]))
    return found


def template(message: str) -> str:
    """What is wrong, without the names and numbers of this file."""
    text = re.split(r" \((?:expected|found)|[;.] [Ee]xpected|: line \d", message.split("\n")[0])[0]
    text = re.sub(r"b?'(?:[^'\\]|\\.)*'(?:\.\.\.)?|b?\"(?:[^\"\\]|\\.)*\"|`[^`]*`", "'...'", text)
    text = text.replace("'...''...'", "'...'")
    text = re.sub(r"'\.\.\.' \(\d+ characters\)", "'...'", text)
    text = re.sub(r" shape \(.*| ?\[.*", "", re.sub(r"into shape.*", "into shape", text))
    text = re.sub(r"\b(?:0x)?[0-9a-f]*[0-9][0-9a-f]*\b", "N", text)
    return text.removesuffix(": '...'")[:90].strip(" :")


def disagreements(path: Path) -> set[Disagreement]:
    """The classes of all disagreements about a file; none if both sides see the same, or both nothing."""
    data, format = path.read_bytes(), path.suffix[1:]
    reference = "safetensors" if format == "safetensors" else "numpy"
    theirs, their_refusal = _theirs(data, format)
    ours, our_refusal = _ours(path)
    if format == "npy":  # one array, whatever its name
        ours, theirs = (dict(zip([""], side.values(), strict=False)) for side in (ours, theirs))
    if our_refusal is not None:
        accepted = their_refusal is None and (not theirs or any(found.refusal is None for found in theirs.values()))
        return {Disagreement(reference, "refused", template(our_refusal))} if accepted else set()
    if their_refusal is not None:
        accepted = not ours or any(found.refusal is None and found.dtype != "object" for found in ours.values())
        return {Disagreement(reference, "accepted", template(their_refusal))} if accepted else set()
    if format == "npz":  # theirs are by members, ours by keys; a blob keeps its whole name
        theirs = {_key(name, ours): content for name, content in theirs.items()}
    found = {_judged(reference, ours.get(name), theirs.get(name)) for name in ours.keys() | theirs.keys()}
    return {one for one in found if one is not None}


def all_disagreements(changes: int) -> dict[Disagreement, tuple[int, str, int]]:
    """Of every file that has a reference, as it is and changed at random: how often, and by which change of which."""
    found: dict[Disagreement, tuple[int, str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for seed in seeds(16 << 10):
            path = Path(folder) / f"w{seed.suffix}"
            for number in range(changes + 1 if seed.suffix.count(".") == 1 else 0):
                path.write_bytes(change(seed, number))
                with bounded():
                    for one in disagreements(path):
                        found[one] = (found.get(one, (0,))[0] + 1, seed.name, number)
    return found


def change(seed: Seed, number: int) -> bytes:
    """The file itself for 0, else one of its changes."""
    rng = random.Random(f"{seed.name} {number}")
    return changed(seed.data, seed.suffix, rng) if number else seed.data


def _key(member: str, ours: dict[str, Content]) -> str:
    blob = member in ours and ours[member].dtype == "blob"
    return member if blob else member.removesuffix(".npy")


def _judged(reference: str, ours: Content | None, theirs: Content | None) -> Disagreement | None:
    if ours is not None and ours.dtype == "object":
        return None  # numpy was not asked to unpickle
    if ours is None or ours.refusal is not None:
        if theirs is None or theirs.refusal is not None:
            return None
        return Disagreement(reference, "refused", "no such name" if ours is None else template(ours.refusal or ""))
    if theirs is None or theirs.refusal is not None:
        return Disagreement(reference, "accepted", "no such name" if theirs is None else template(theirs.refusal or ""))
    if ours.dtype != theirs.dtype:
        return Disagreement(reference, "different", f"type: {ours.dtype} for {theirs.dtype}")
    if ours.shape != theirs.shape:
        return Disagreement(reference, "different", "shape")
    mine = ours.data
    if theirs.record is not None and theirs.record.itemsize:
        mine = _without_padding(np.frombuffer(mine, theirs.record.newbyteorder("<")))
    return None if mine == theirs.data else Disagreement(reference, "different", f"bytes of {ours.dtype}")


def _ours(path: Path) -> tuple[dict[str, Content], str | None]:
    found = {}
    safe = path.suffix == ".safetensors"
    try:
        with convert.open(path, format=path.suffix[1:]) as checkpoint:
            for name, tensor in checkpoint.items():
                try:
                    if isinstance(tensor.data, Extent) and isinstance(tensor.data.file, MemoryFile):
                        continue  # a text that came back from the metadata, which the reference leaves there
                    if tensor.dtype.kind == "object":
                        found[name] = Content("object", tensor.shape, b"")
                    elif tensor.nbytes <= _READ_BYTES:
                        content = b"".join(bytes(chunk) for chunk in tensor.chunks())
                        dtype = (tensor.dtype.safetensors if safe else None) or tensor.dtype.name
                        found[name] = Content(dtype, tensor.shape, content)
                except ConvertError as err:
                    found[name] = Content("", (), b"", err.problems[0].message)
    except ConvertError as err:
        return {}, err.problems[0].message
    return found, None


def _theirs(data: bytes, format: str) -> tuple[dict[str, Content], str | None]:
    try:
        if format == "safetensors":
            pairs = deserialize(data)  # type: ignore[no-untyped-call]
            return {name: Content(one["dtype"], tuple(one["shape"]), bytes(one["data"])) for name, one in pairs}, None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _numpys(data, format), None
    except Exception as err:  # the references raise what they like
        return {}, f"{type(err).__name__}: {err}"


def _numpys(data: bytes, format: str) -> dict[str, Content]:
    magic = data[:6] == _MAGIC if format == "npy" else data[:4] in (b"PK\x03\x04", b"PK\x05\x06")
    if not magic:
        raise ValueError("no magic")  # np.load would try another format, or a pickle
    loaded = np.load(io.BytesIO(data), allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return {"w": _content_of(loaded)}
    members = [info for info in loaded.zip.infolist() if info.file_size or not info.filename.endswith("/")]
    return {info.filename: _member(loaded.zip, info) for info in members}


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Content:
    """What numpy does for a key, but by member: its keys lack the suffix, and 'w' may mean two of them."""
    try:
        with archive.open(info) as file:
            magic = file.read(len(_MAGIC)) == _MAGIC
        with archive.open(info) as file:
            if magic:
                return _content_of(np.lib.format.read_array(file, allow_pickle=False))
            return Content("blob", (info.file_size,), file.read())
    except Exception as err:
        return Content("", (), b"", f"{type(err).__name__}: {err}")


def _content_of(array: Any) -> Content:
    dtype = array.dtype
    if dtype.fields is not None:
        return Content("structured", array.shape, _without_padding(array), None, dtype)
    big = dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big")
    name = dtype.name
    if dtype.kind in "SU" or name.startswith("void"):  # ml_dtypes' types are of kind V too, if it was imported
        name = f"{dtype.kind}{dtype.itemsize // (4 if dtype.kind == 'U' else 1)}"
    return Content(name, array.shape, (array.byteswap() if big else array).tobytes())


def _without_padding(array: Any) -> bytes:
    """The values of all fields, field by field, little-endian."""
    if array.dtype.fields is None:
        return array.astype(array.dtype.newbyteorder("<")).tobytes()  # type: ignore[no-any-return]
    return b"".join(_without_padding(array[name]) for name in array.dtype.names)
