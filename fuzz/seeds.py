"""What is mutated: every sample, every hard case, every earlier find; and how a file is written as one input."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fuzz.archives import with_zip64_end
from fuzz.body import CHOICES
from fuzz.fields import SUFFIXES

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT / "samples", ROOT / "tests" / "cases" / "files", ROOT / "tests" / "fuzz_finds")
PREFIX_BYTES = 2


class Seed(NamedTuple):
    """A file to begin with."""

    name: str
    suffix: str
    data: bytes


@cache
def seeds(most_bytes: int = 1 << 16) -> tuple[Seed, ...]:
    """All that are not larger than `most_bytes`, the small ones first; with an index, pickles and a zip64 archive."""
    found = []
    for folder in FOLDERS:
        for path in sorted(folder.iterdir()):
            suffix = suffix_of(path.name)
            if suffix is not None and path.is_file() and path.stat().st_size <= most_bytes:
                found.append(Seed(path.name, suffix, path.read_bytes()))
    index = (
        b'{"metadata": {"total_size": 24}, "weight_map": {"w": "w-00001-of-00001.safetensors", "b": "x.safetensors"}}'
    )
    small = next(seed for seed in found if seed.name == "small.npz")
    found += [Seed("index", SUFFIXES[-1], index), Seed("zip64", ".npz", with_zip64_end(small.data)), *_pickles()]
    return tuple(sorted(found, key=lambda seed: (len(seed.data), seed.name)))


def _pickles() -> Iterator[Seed]:
    """Object arrays of everything that a pickle may hold, in every protocol."""
    import ml_dtypes
    import numpy as np

    record = np.zeros(2, [("a", "<f4"), ("b", ">i2", (2,)), ("c", [("d", "S3")])])
    rest: list[Any] = [
        np.float32(1.5),
        np.datetime64(1 << 40, ("s", 25)),
        "text",
        "é",
        b"\xff",
        1 << 70,
        -1,
        1.5,
    ]
    leaves: list[Any] = [np.asfortranarray(np.ones((2, 3), ">f8")), record, np.zeros(2, "<U2"), *rest, True, 1 + 2j]
    leaves += [np.ones(3, ml_dtypes.bfloat16), {"k": [np.int8(1)], 2: (), "o": collections.OrderedDict(a=1)}]
    whole = np.empty(len(leaves), object)
    whole[:] = leaves
    plain = [whole, *(np.array({"x": leaf}, object) for leaf in leaves)]
    for protocol in range(6):
        for number, array in enumerate(plain if protocol in (0, 2, 4) else plain[:1]):
            header = f"{{'descr': '|O', 'fortran_order': False, 'shape': {array.shape}, }}".ljust(117).encode() + b"\n"
            data = b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header
            yield Seed(f"pickle-{protocol}-{number}", ".npy", data + pickle.dumps(array, protocol))


def suffix_of(name: str) -> str | None:
    """Which of the suffixes a name ends in."""
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def packed(data: bytes, suffix: str, choice: int | None) -> bytes:
    """A file as one input of the guided fuzzer: which suffix, which conversion, contents."""
    return bytes([SUFFIXES.index(suffix), CHOICES if choice is None else choice]) + data


def unpacked(one: bytes) -> tuple[bytes, str, int | None]:
    """Contents, suffix and conversion of an input; a third of all second bytes ask for one."""
    head = one[:PREFIX_BYTES].ljust(PREFIX_BYTES, b"\0")
    choice = head[1] % (3 * CHOICES)
    return one[PREFIX_BYTES:], SUFFIXES[head[0] % len(SUFFIXES)], choice if choice < CHOICES else None
