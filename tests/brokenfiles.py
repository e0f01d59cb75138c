"""Files that break the rules of `convert check`, each by its rule, and whether check and readers agree."""

from __future__ import annotations

import bz2
import json
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import convert
from convert.findings import Finding

from .strategies import npy_bytes

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "samples"
CASES = ROOT / "tests" / "cases" / "files"

# --- files to be checked -----------------------------------------------------------------------------------------

EIGHT = bytes(range(8))
ARRAY = npy_bytes(np.arange(2, dtype="<f4"))


def npy(
    header: str | bytes, data: bytes = EIGHT, version: bytes = b"\x01\0", pad: str = "\n", align: int = 64
) -> bytes:
    """A npy file with a header as given, padded with spaces and ended by `pad`."""
    body = header.encode("utf-8") if isinstance(header, str) else header
    width = 2 if version == b"\x01\0" else 4
    body += b" " * (-(8 + width + len(body) + len(pad)) % align) + pad.encode()
    return b"\x93NUMPY" + version + len(body).to_bytes(width, "little") + body + data


def array_header(descr: str = "'<f4'", fortran: str = "False", shape: str = "(2,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


class Zip:
    """An archive put together by hand; each part of a header can be falsified."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.directory: list[bytes] = []

    def add(
        self,
        name: str | bytes,
        data: bytes = ARRAY,
        *,
        method: int = 0,
        packed: bytes | None = None,
        local: dict[str, Any] | None = None,
        written: bool = True,
        **central: Any,
    ) -> Zip:
        raw = name.encode() if isinstance(name, str) else name
        stored = data if packed is None else packed
        facts: dict[str, Any] = {
            "flags": 0, "method": method, "crc": zlib.crc32(data), "packed": len(stored), "size": len(data), "raw": raw,
            "offset": len(self.body), "disk": 0, "attributes": 0, "system": 0, "comment": b"",
        }  # fmt: skip
        here = facts | central | (local or {})
        header = struct.pack(
            "<4s5H3L2H", b"PK\x03\x04", 20, here["flags"], here["method"], 0, 33, here["crc"], here["packed"],
            here["size"], len(here["raw"]), 0,
        )  # fmt: skip
        if written:
            self.body += header + here["raw"] + stored
        there = facts | central
        self.directory.append(
            struct.pack(
                "<4s2B5H3L5H2L", b"PK\x01\x02", 20, there["system"], 20, there["flags"], there["method"], 0, 33,
                there["crc"], there["packed"], there["size"], len(there["raw"]), 0, len(there["comment"]),
                there["disk"], 0, there["attributes"], there["offset"],
            ) + there["raw"] + there["comment"]
        )  # fmt: skip
        return self

    def gap(self, data: bytes) -> Zip:
        self.body += data
        return self

    def end(self, *, comment: bytes = b"", count: int | None = None, disk: int = 0, shift: int = 0) -> bytes:
        directory = b"".join(self.directory)
        entries = len(self.directory) if count is None else count
        begin = len(self.body) + shift
        counts = (disk, disk, entries, entries, len(directory), begin, len(comment))
        return bytes(self.body) + directory + struct.pack("<4s4H2LH", b"PK\x05\x06", *counts) + comment


def one(name: str | bytes = "w.npy", data: bytes = ARRAY, **facts: Any) -> bytes:
    return Zip().add(name, data, **facts).end()


def deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def overlapping(crc: int | None = None) -> bytes:
    """An array whose bytes are another member, headers and all."""
    inner = bytes(Zip().add("v.npy").body)
    outer = npy_bytes(np.frombuffer(inner, np.uint8))
    facts: dict[str, Any] = {} if crc is None else {"crc": crc}
    archive = Zip().add("w.npy", outer, **facts)
    return archive.add("v.npy", written=False, offset=30 + len("w.npy") + 128).end()


def two_ends() -> bytes:
    """An archive in whose comment lies the end record of another one, whose directory it also holds."""
    inner = Zip().add("w.npy")
    whole = inner.end()
    directory, begin = b"".join(inner.directory), len(inner.body)
    comment = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(directory), len(whole), 0)
    fields = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(directory), begin, len(directory) + len(comment))
    return whole[:-22] + fields + directory + comment


def st_file(header: object, data: bytes = EIGHT, length: int | None = None, align: int = 8) -> bytes:
    """A safetensors file of any header, padded so that the data is aligned."""
    text = header if isinstance(header, (str, bytes)) else json.dumps(header)
    body = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    body += b" " * (-len(body) % align)
    return struct.pack("<Q", len(body) if length is None else length) + body + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def pickled(pickle_bytes: bytes) -> bytes:
    return npy(array_header("'|O'", shape="(1,)"), pickle_bytes)


def objects(*values: object) -> bytes:
    array = np.empty(len(values), object)
    array[:] = values
    return npy_bytes(array)


class Runs:
    """What a hostile pickle calls: it would leave a file behind."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("CONVERT_PWNED",)


def index_of(weight_map: object, **more: object) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map, **more}).encode()


INDEX = "m.safetensors.index.json"
SHARD = st_file({"w": entry()})
Files = dict[str, bytes]

# For each rule files that break it, and nothing else: the first is checked, the others lie beside it.
# NPZ-002 comes with the rule of the npy format that its member breaks.
EXAMPLES: dict[str, Files] = {
    "FILE-001": {"a.npz": b""},
    "FILE-002": {"a.npy": b"\x1f\x8b" + EIGHT},
    "FILE-003": {"a.npy": b"\x93NUMPY\x02\0\xff\xff\xff\x7f" + EIGHT},
    "FILE-101": {"a.npz": ARRAY},
    "NPY-001": {"a.npy": b"\x93NUMPX" + ARRAY[6:]},
    "NPY-002": {"a.npy": b"\x93NUMPY\x04\0" + ARRAY[8:]},
    "NPY-003": {"a.npy": ARRAY[:100]},
    "NPY-004": {"a.npy": npy(b"{'descr': [('\xff', '<f4')], }", version=b"\x03\0")},
    "NPY-005": {"a.npy": npy(array_header("__import__('os').mkdir('CONVERT_PWNED')"))},
    "NPY-006": {"a.npy": npy("{'descr': '<f4', 'shape': (2,), }")},
    "NPY-007": {"a.npy": npy(array_header(shape="(-2,)"))},
    "NPY-008": {"a.npy": npy(array_header(fortran="0"))},
    "NPY-009": {"a.npy": npy(array_header("[('a', '<f4'), ('a', '<f4')]"))},
    "NPY-010": {"a.npy": npy(array_header("'l'"))},
    "NPY-011": {"a.npy": ARRAY[:-1]},
    "NPY-012": {"a.npy": ARRAY + b"\0"},
    "NPY-101": {"a.npy": npy(array_header(), align=16)},
    "NPY-102": {"a.npy": npy(array_header(), pad=" ")},
    "NPY-103": {"a.npy": npy("{'shape': (2,), 'fortran_order': False, 'descr': '<f4', }")},
    "NPY-104": {"a.npy": npy(array_header(shape="(2L,)"))},
    "NPY-105": {"a.npy": npy(array_header("'=f4'"))},
    "NPY-106": {"a.npy": objects(1)},
    "NPY-107": {"a.npy": npy(array_header("'|b1'"), b"\1\2")},
    "PKL-001": {"a.npy": pickled(pickle.dumps(np.arange(2)))},
    "PKL-002": {"a.npy": objects(Runs())},
    "PKL-003": {"a.npy": objects({1, 2})},
    "NPZ-001": {"a.npz": one()[:200]},
    "NPZ-002": {"a.npz": one(data=b"text")},
    "NPZ-003": {"a.npz": two_ends()},
    "NPZ-004": {"a.npz": one() + b"more"},
    "NPZ-005": {"a.npz": Zip().add("w.npy").end(shift=1)},
    "NPZ-006": {"a.npz": Zip().add("w.npy").end(disk=1)},
    "NPZ-007": {"a.npz": Zip().add("w.npy").end(count=2)},
    "NPZ-008": {"a.npz": one(b"\xff.npy", flags=0x800)},
    "NPZ-009": {"a.npz": one(size=0xFFFFFFFF, local={"size": len(ARRAY)})},
    "NPZ-010": {"a.npz": one(offset=1)},
    "NPZ-011": {"a.npz": one(local={"raw": b"v.npy"})},
    "NPZ-012": {"a.npz": overlapping()},
    "NPZ-013": {"a.npz": Zip().add("w.npy").add("w.npy").end()},
    "NPZ-014": {"a.npz": one(flags=1)},
    "NPZ-015": {"a.npz": one(method=9)},
    "NPZ-016": {"a.npz": one(size=len(ARRAY) + 1)},
    "NPZ-017": {"a.npz": one(method=8, packed=deflated(ARRAY) + b"\0")},
    "NPZ-018": {"a.npz": one(crc=1)},
    "NPZ-019": {"a.npz": one("data.pkl", b"text")},
    "NPZ-101": {"a.npz": Zip().add("w.npy").add("notes.txt", b"text").end()},
    "NPZ-102": {"a.npz": Zip().add("w.npy").gap(b"hidden").add("v.npy").end()},
    "NPZ-103": {"a.npz": Zip().add("w.npy").end(comment=b"mine")},
    "NPZ-104": {"a.npz": one("../w.npy")},
    "NPZ-105": {"a.npz": one("w")},
    "NPZ-106": {"a.npz": Zip().add("w.npy").add("W.npy").end()},
    "NPZ-107": {"a.npz": one(b"\x82.npy")},
    "NPZ-108": {"a.npz": one(method=12, packed=bz2.compress(ARRAY))},
    "ST-001": {"a.safetensors": b"\x07\0\0\0\0\0\0\0{}"},
    "ST-002": {"a.safetensors": st_file({}, length=100_000_001)},
    "ST-003": {"a.safetensors": st_file(b'{"\xff": 1}')},
    "ST-004": {"a.safetensors": st_file(" " + json.dumps({"w": entry()}))},
    "ST-005": {"a.safetensors": st_file('{"w": NaN}')},
    "ST-006": {"a.safetensors": st_file(f'{{"w": {json.dumps(entry())}, "w": {json.dumps(entry())}}}')},
    "ST-007": {"a.safetensors": st_file({"__metadata__": {"epoch": 3}, "w": entry()})},
    "ST-008": {"a.safetensors": st_file({"\ud800": entry()})},
    "ST-009": {"a.safetensors": st_file({"w": {"dtype": "F32", "data_offsets": [0, 8]}})},
    "ST-010": {"a.safetensors": st_file({"w": entry("f32")})},
    "ST-011": {"a.safetensors": st_file({"w": entry(shape=[2.0])})},
    "ST-012": {"a.safetensors": st_file({"w": entry(offsets=[8, 0])})},
    "ST-013": {"a.safetensors": st_file({"w": entry(shape=[3])})},
    "ST-014": {"a.safetensors": st_file({"w": entry(), "v": entry(shape=[1], offsets=[4, 8])})},
    "ST-015": {"a.safetensors": st_file({"w": entry(shape=[1], offsets=[4, 8])})},
    "ST-016": {"a.safetensors": st_file({"w": entry()}, EIGHT[:7])},
    "ST-017": {"a.safetensors": st_file({"w": entry()}, EIGHT + b"\0")},
    "ST-101": {"a.safetensors": st_file({"w": entry()}, align=1)},
    "ST-102": {"a.safetensors": st_file({"b": entry("U8", [1], [0, 1]), "w": entry(offsets=[1, 9])}, EIGHT + b"\0")},
    "ST-103": {"a.safetensors": st_file({"w": entry(scale=0.5)})},
    "ST-104": {"a.safetensors": st_file(json.dumps({"w": entry()}) + "\n")},
    "ST-105": {"a.safetensors": st_file({"__metadata__": None, "w": entry()})},
    "ST-106": {"a.safetensors": st_file({"w": entry("BOOL", [8])})},
    "SHARD-001": {INDEX: b'{"weight_map": {}'},
    "SHARD-002": {INDEX: b'{"weight_map": {"w": "a.safetensors", "w": "a.safetensors"}}', "a.safetensors": SHARD},
    "SHARD-003": {INDEX: index_of({"w": 1})},
    "SHARD-004": {INDEX: index_of({"w": "../a.safetensors"})},
    "SHARD-005": {INDEX: index_of({"w": "a.safetensors"})},
    "SHARD-006": {INDEX: index_of({"w": "a.safetensors", "v": "a.safetensors"}), "a.safetensors": SHARD},
    "SHARD-007": {INDEX: index_of({"w": "a.safetensors"}),
                  "a.safetensors": st_file({"w": entry(), "v": entry(shape=[0], offsets=[8, 8])})},
    "SHARD-008": {INDEX: index_of({"w": "a.safetensors", "v": "a.safetensors", "u": "b.safetensors"}),
                  "a.safetensors": SHARD,
                  "b.safetensors": st_file({"v": entry(), "u": entry(shape=[0], offsets=[8, 8])})},
    "SHARD-101": {INDEX: json.dumps({"metadata": {"total_size": 9}, "weight_map": {"w": "a.safetensors"}}).encode(),
                  "a.safetensors": SHARD},
    "SHARD-102": {INDEX: index_of({"w": "a.safetensors"}, version=2), "a.safetensors": SHARD},
    "SHARD-103": {INDEX: index_of({"w": "a.safetensors"}), "a.safetensors": SHARD, "b.safetensors": SHARD},
    "SHARD-104": {INDEX: index_of({"w": "a.safetensors", "v": "b.safetensors"}), "a.safetensors": SHARD,
                  "b.safetensors": st_file({"__metadata__": {"format": "pt"}, "v": entry()})},
}  # fmt: skip
WITH: dict[str, set[str]] = {
    # What cannot be broken alone.
    "NPZ-002": {"NPY-001"},
    "NPZ-019": {"NPZ-101"},
    "PKL-001": {"NPY-106"},
    "PKL-002": {"NPY-106"},
    "PKL-003": {"NPY-106"},
}
MARKER = "CONVERT_PWNED"


def laid_out(files: Files, folder: Path) -> Path:
    """The files in a folder; the path of the first."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder / next(iter(files))


def ids(found: list[Finding]) -> set[str]:
    return {finding.rule for finding in found}


def errors(found: list[Finding]) -> set[str]:
    return {finding.rule for finding in found if finding.severity == "error"}


def refusal(path: Path) -> convert.InputError | None:
    """Why a file, or something in it, cannot be read to its end, pickles included; None if it can."""
    try:
        with convert.open(path) as checkpoint:
            for tensor in checkpoint.tensors:
                if tensor.unpickle is not None:
                    tensor.unpickle()
                for _ in tensor.chunks(1 << 16) if tensor.unpickle is None else ():
                    pass
    except convert.InputError as err:
        return err
    return None


def agree(path: Path) -> list[Finding]:
    """Errors are found just where reading fails, and each by a rule of its format."""
    found, refused = convert.check(path), refusal(path)
    assert bool(errors(found)) == (refused is not None), (found, refused)
    assert "FILE-004" not in ids(found), found
    return found
