"""Make the sample files, with numpy, ml_dtypes, safetensors and zipfile; never with this toolkit.

    python samples/make.py OUTDIR

writes every sample, `expected.json` (what each holds, from the arrays themselves) and `PROVENANCE.md`. Fixed values,
fixed dates: running it again gives the same bytes. Files whose bytes were put together by hand, because no tool at
hand writes them, are marked. The samples of x87 long doubles are made only where numpy has them.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import io
import json
import platform
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors

Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = dict[str, Array]
Facts: TypeAlias = dict[str, Any]

IS_X87 = np.finfo(np.longdouble).nmant == 63 and np.dtype(np.longdouble).itemsize == 16

# Bit patterns, so that no conversion decides what a NaN looks like:
# 0, -0, 1, -1.5, infinity, -infinity, a NaN with a payload, the smallest subnormal.
FLOAT_BITS = {
    "float16": (0x0000, 0x8000, 0x3C00, 0xBE00, 0x7C00, 0xFC00, 0x7E01, 0x0001),
    "bfloat16": (0x0000, 0x8000, 0x3F80, 0xBFC0, 0x7F80, 0xFF80, 0x7FC1, 0x0001),
    "float32": (0x00000000, 0x80000000, 0x3F800000, 0xBFC00000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x00000001),
    "float64": (0, 1 << 63, 0x3FF << 52, 0xBFF8 << 48, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48 | 1, 1),
}
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz")
OTHER_V1 = {  # name -> bits; none of these has a place in safetensors as numpy stores it
    "float8_e4m3": 8,
    "float8_e3m4": 8,
    "float8_e4m3b11fnuz": 8,
    "float6_e2m3fn": 6,
    "float6_e3m2fn": 6,
    "float4_e2m1fn": 4,
    "int4": 4,
    "uint4": 4,
}
CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


PROVENANCE = """\
# Where the samples come from

`python samples/make.py samples` wrote every sample, `expected.json` and this file; running it again gives the same
bytes. No sample was made or touched by the toolkit under test.

Made with: {made_with}.

`expected.json` tells the size, the SHA-256 and the tensors of each file:

- `dtype`: the name numpy or ml_dtypes gives the type (`longdouble` and `clongdouble` where numpy's own name depends on
  the platform);
- `stored`: the type as the file spells it. `<V1` and `<V2` in an npy header do not say which type was saved, `dtype`
  does;
- `sha256`: of the little-endian row-major bytes. A structured array has every field little-endian and no padding; F4
  and F6 count as packed in the file; pickled objects have none, `unpickled` lists the tensors inside;
- `blobs`: the members of an archive that are no arrays; `metadata`: that of a safetensors file;
- `platform: x87`: can be made only where numpy's long double is the 80-bit type of x87 padded to 16 bytes.

The bytes of compressed members depend on the version of the compression library, those of the pickle on numpy 2.

| file | bytes | SHA-256 | made by |
|---|---|---|---|"""


@dataclass(frozen=True)
class Sample:
    """One file: its bytes, what is in it, and how it came to be."""

    data: bytes
    tensors: list[Facts]
    how: str
    hand_made: bool = False
    x87: bool = False
    metadata: dict[str, str] | None = None
    blobs: dict[str, bytes] = field(default_factory=dict)


def named_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def values(name: str) -> Array:
    """A small array of this type that holds its edge cases."""
    dtype = named_dtype(name)
    if name in FLOAT_BITS:
        return np.array(FLOAT_BITS[name], f"<u{dtype.itemsize}").view(dtype).reshape(2, 4)
    if name == "bool":
        return np.array([[True, False, True], [False, False, True]])
    if name in INTEGERS:
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        return np.array([low, high, 0, 1, high // 3, high - 1], dtype).reshape(3, 2)
    if name == "complex64":
        return values("float32").view(dtype)
    if name == "complex128":
        return values("float64").view(dtype)
    every = np.arange(2 ** OTHER_V1.get(name, 8), dtype=np.uint8)  # one byte an element: every bit pattern
    return every.view(dtype).reshape(-1, 8)


def canonical(array: Array) -> bytes:
    """Little-endian row-major bytes of an array."""
    if array.dtype.isbuiltin != 2:  # types of ml_dtypes have no byte order to change
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.tobytes()


def dtype_name(dtype: np.dtype[Any]) -> str:
    # numpy calls an x87 long double float96 or float128, after its padding.
    return {np.longdouble: "longdouble", np.clongdouble: "clongdouble"}.get(dtype.type, dtype.name)


def fact(name: str, array: Array, stored: object) -> Facts:
    """What a reader has to find: `stored` is the type as the file spells it."""
    data = None if array.dtype.hasobject else canonical(array)
    return {
        "name": name,
        "dtype": dtype_name(array.dtype),
        "shape": list(array.shape),
        "sha256": None if data is None else hashlib.sha256(data).hexdigest(),
        "stored": stored,
    }


def npy(array: Array, version: tuple[int, int] | None = None) -> bytes:
    buffer = io.BytesIO()
    if version is None:
        np.save(buffer, array, allow_pickle=array.dtype.hasobject)
    else:
        np.lib.format.write_array(buffer, array, version=version)
    return buffer.getvalue()


def stored_descr(data: bytes) -> object:
    """The descr in the header of an npy file, as it stands there."""
    start = 10 if data[6] == 1 else 12
    length = int.from_bytes(data[8:start], "little")
    return ast.literal_eval(data[start : start + length].decode("utf-8"))["descr"]


def npz(arrays: Mapping[str, Any], *, compressed: bool = False) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)
    return buffer.getvalue()


def zip_entry(name: str, method: int) -> zipfile.ZipInfo:
    """A member with a fixed date and fixed attributes, the same on every system."""
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type = method
    entry.create_system = 3
    entry.external_attr = 0o600 << 16
    return entry


def zipped(arrays: Arrays, method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(zip_entry(f"{name}.npy", method), npy(array))
    return buffer.getvalue()


class Pipe(io.RawIOBase):
    """A stream that cannot seek, which makes zipfile write sizes after the data."""

    def __init__(self) -> None:
        self.content = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.content += data
        return len(data)


def npz_facts(arrays: Arrays) -> list[Facts]:
    return [fact(name, array, stored_descr(npy(array))) for name, array in arrays.items()]


def safetensors_bytes(arrays: Arrays, metadata: dict[str, str] | None = None) -> bytes:
    """What safetensors writes; its random order of metadata keys is drawn again until it is sorted."""
    buffers = {name: ctypes.create_string_buffer(canonical(a), max(a.nbytes, 1)) for name, a in arrays.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=array.dtype.name,
            shape=list(array.shape),
            data_ptr=ctypes.addressof(buffers[name]),
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    while True:
        data = bytes(safetensors.serialize(specs, metadata=metadata))
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        keys = list(header.get("__metadata__", {}))
        if keys == sorted(keys):
            return data


def safetensors_sample(arrays: Arrays, metadata: dict[str, str] | None = None) -> Sample:
    facts = [fact(name, array, CODES[array.dtype.name]) for name, array in arrays.items()]
    return Sample(safetensors_bytes(arrays, metadata), facts, "safetensors.serialize", metadata=metadata)


def npy_samples() -> Iterator[tuple[str, Sample]]:
    def one(
        stem: str, array: Array, version: tuple[int, int] | None = None, *, x87: bool = False
    ) -> tuple[str, Sample]:
        data = npy(array, version)
        how = "numpy.save" if version is None else f"numpy.lib.format.write_array(version={version})"
        return f"{stem}.npy", Sample(data, [fact(stem, array, stored_descr(data))], how, x87=x87)

    numbers = np.arange(24, dtype="<f4") / np.float32(8) - np.float32(1)
    yield one("w_f32", np.arange(256, dtype="<f4").reshape(4, 64) / np.float32(16))
    for name in ("bool", "int8", "uint64", "float16", "float64", "complex64", "complex128"):
        yield one(name, values(name))
    yield one("bf16", values("bfloat16"))
    for name in ("float8_e4m3fn", "float8_e5m2"):
        yield one(name, values(name))
    yield one("scalar", np.array(-1.5, "<f8"))
    yield one("empty", np.empty((0, 3), "<f4"))
    yield one("fortran", np.asfortranarray(numbers.reshape(4, 6)))
    yield one("fortran_3d", np.asfortranarray(np.arange(24, dtype="<i2").reshape(2, 3, 4)))
    yield one("fortran_bf16", np.asfortranarray(values("bfloat16")))
    yield one("big_endian", numbers.reshape(4, 6).astype(">f4"))
    yield one("big_endian_fortran", np.asfortranarray(numbers.reshape(4, 6).astype(">f4")))
    yield one("big_endian_complex64", values("complex64").byteswap().view(">c8"))
    yield one("version_2", numbers.reshape(2, 12), (2, 0))
    yield one("version_3", numbers.reshape(3, 8), (3, 0))
    yield one("datetime64", np.array(["2000-01-01T00:00:00.000000001", "NaT", "1969-12-31"], "<M8[ns]"))
    yield one("timedelta64", np.array([-1, 0, 86400], "<m8[s]"))
    yield one("big_endian_datetime64", np.array(["2000-01-01", "NaT"], ">M8[D]"))
    yield one("bytes", np.array([b"a", b"", b"abcde"], "S5"))
    yield one("unicode", np.array(["a", "", "é☃𝄞"], "<U4"))
    yield one("big_endian_unicode", np.array(["a", "", "é☃𝄞"], ">U4"))
    yield one("void", np.arange(18, dtype=np.uint8).view("V6"))
    fields = np.array([(1.5, -2, True), (-0.0, 32767, False)], [("a", "<f4"), ("b", ">i2"), ("c", "?")])
    yield one("structured", fields)
    yield one("structured_version_3", np.array([(1, 2.5)], [("int", "<i4"), ("整形", "<f4")]), (3, 0))
    if IS_X87:
        yield one("longdouble", x87([0.0, -0.0, 1.0, -1.5, float("inf"), 2.0**-1074]), x87=True)
        third = x87([1.0, 2.0]) / x87([3.0, 1.0])
        yield one("longdouble_inexact", x87_padding_cleared(third), x87=True)
        yield one("clongdouble", x87([1.0, -2.0, 0.5, 0.0]).view(np.clongdouble), x87=True)
    yield object_sample()


def x87(numbers: list[float]) -> Array:
    return x87_padding_cleared(np.array(numbers, np.longdouble))


def x87_padding_cleared(array: Array) -> Array:
    """The same numbers with the six bytes of padding of each, which may hold anything, set to zero."""
    content = np.array(array)
    content.view(np.uint8).reshape(-1, 16)[:, 10:] = 0
    return content


def object_sample() -> tuple[str, Sample]:
    """The classic `np.save("weights.npy", {...})`: a pickled dictionary of arrays."""
    weights = {"conv1": [values("float32"), values("float16")], "scale": values("int64")}
    holder = np.array(weights, dtype=object)
    data = npy(holder)
    inner: Arrays = {
        "object.conv1.0": values("float32"),
        "object.conv1.1": values("float16"),
        "object.scale": values("int64"),
    }
    facts = fact("object", holder, stored_descr(data)) | {"unpickled": npz_facts(inner)}
    return "object.npy", Sample(data, [facts], "numpy.save(allow_pickle=True)")


def npz_samples() -> Iterator[tuple[str, Sample]]:
    def saved(arrays: Arrays, *, compressed: bool = False) -> Sample:
        how = "numpy.savez_compressed" if compressed else "numpy.savez"
        return Sample(npz(arrays, compressed=compressed), npz_facts(arrays), how)

    small: Arrays = {
        "w_f32": np.arange(256, dtype="<f4").reshape(4, 64) / np.float32(16),
        "b_f16": np.arange(8, dtype="<f2") - np.float16(4),
        "e_bf16": np.array([0x3F80, 0xBF80, 0x4000, 0x0000, 0x7F80, 0x3DCD], "<u2")
        .view(named_dtype("bfloat16"))
        .reshape(2, 3),
        "i_i32": np.array([[-(2**31), -1], [0, 1], [42, 2**31 - 1]], "<i4"),
        "s_f32": np.array(3.5, "<f4"),
    }
    yield "small.npz", saved(small)

    shared = {name: values(name) for name in ("bool", *INTEGERS, *FLOAT_BITS, "complex64")}
    yield "dtypes.npz", saved(shared)
    yield "compressed.npz", saved(shared, compressed=True)
    yield "float8.npz", saved({name: values(name) for name in FLOAT8})
    yield "other_V1.npz", saved({name: values(name) for name in OTHER_V1})
    yield "empty_archive.npz", saved({})

    layouts: Arrays = {}
    for name in ("int16", "uint32", "int64", "float16", "float32", "float64", "complex64"):
        layouts[f"big/{name}"] = values(name).byteswap().view(values(name).dtype.newbyteorder(">"))
        layouts[f"fortran/{name}"] = np.asfortranarray(values(name))
    layouts["fortran/empty"] = np.empty((2, 0, 3), "<f4", order="F")
    yield "layouts.npz", saved(layouts)
    yield "layouts_compressed.npz", saved(layouts, compressed=True)

    names = ("größe", "重み/層.0", "☃", "emoji 🙂", "a b", "w.npy", "é", "e\u0301", "W", "w")
    yield "utf8.npz", saved({name: np.array([index], "<i4") for index, name in enumerate(names)})

    refused: Arrays = {
        "ok": values("float32"),
        "when": np.array(["2000-01-01", "NaT"], "<M8[D]"),
        "text": np.array(["a", "bc"], "<U2"),
        "record": np.array([(1, 2.5)], [("a", "<i4"), ("b", "<f4")]),
        "z": values("complex128"),
    }
    yield "unmappable.npz", saved(refused)

    pair: Arrays = {"w": small["w_f32"], "b": small["b_f16"]}
    for method, word in ((zipfile.ZIP_BZIP2, "bzip2"), (zipfile.ZIP_LZMA, "lzma")):
        yield f"{word}.npz", Sample(zipped(pair, method), npz_facts(pair), f"numpy.save and zipfile, {word}")

    pipe = Pipe()
    streamed: Arrays = {"stored": small["w_f32"], "deflated": small["w_f32"], "last": small["i_i32"]}
    with zipfile.ZipFile(pipe, "w") as archive:
        for name, array in streamed.items():
            method = zipfile.ZIP_DEFLATED if name == "deflated" else zipfile.ZIP_STORED
            archive.writestr(zip_entry(f"{name}.npy", method), npy(array))
    yield (
        "data_descriptor.npz",
        Sample(bytes(pipe.content), npz_facts(streamed), "numpy.save and zipfile into a stream that cannot seek"),
    )

    text = b"A member that is no array.\n"
    buffer = io.BytesIO(npz(pair))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(zip_entry("README.txt", zipfile.ZIP_STORED), text)
    yield (
        "blob.npz",
        Sample(buffer.getvalue(), npz_facts(pair), "numpy.savez, then zipfile", blobs={"README.txt": text}),
    )

    buffer = io.BytesIO(npz(pair))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = b"an archive comment"
    yield "comment.npz", Sample(buffer.getvalue(), npz_facts(pair), "numpy.savez, then zipfile")


def safetensors_samples() -> Iterator[tuple[str, Sample]]:
    weights: Arrays = {
        "layer.0.weight": np.arange(256, dtype="<f4").reshape(4, 64) / np.float32(16),
        "layer.0.bias": values("float16"),
        "step": np.array(7, "<i8"),
    }
    yield "plain.safetensors", safetensors_sample(weights, {"format": "pt"})
    yield "no_metadata.safetensors", safetensors_sample(weights)
    notes = {"": "", "format": "np", "json": '{"a": [1, 2]}', "größe": "snow ☃\nand a \\ backslash"}
    yield "metadata.safetensors", safetensors_sample(weights, notes)
    yield "metadata_only.safetensors", safetensors_sample({}, {"format": "pt"})
    yield "no_tensors.safetensors", safetensors_sample({})
    yield "scalar.safetensors", safetensors_sample({"s": np.array(-1.5, "<f4"), "t": np.array(True)})
    empty: Arrays = {"a": np.empty((0, 3), "<f4"), "b": np.empty((2, 0), "<i8"), "c": np.empty(0, np.uint8)}
    yield "empty.safetensors", safetensors_sample(empty)
    bf16: Arrays = {"w": values("bfloat16"), "scale": np.array([0.5], "<f4")}
    yield "bf16.safetensors", safetensors_sample(bf16)
    names = (
        "größe",
        "重み/層.0",
        "☃",
        "emoji 🙂",
        "a b",
        "w.npy",
        'quo"te',
        "tab\t",
        "../up",
        "allow_pickle",
        "file",
        "",
    )
    yield "names.safetensors", safetensors_sample({n: np.array([i], "<i4") for i, n in enumerate(names)})

    every: Arrays = {name: values(name) for name in CODES}
    yield "dtypes.safetensors", safetensors_sample(every)

    # Four bits an element, two in a byte, the first in the low half. The library is told the shape in pairs.
    codes = values("float4_e2m1fn")
    packed = (codes.view(np.uint8)[:, ::2] | codes.view(np.uint8)[:, 1::2] << 4).astype(np.uint8)
    buffer = ctypes.create_string_buffer(packed.tobytes(), packed.nbytes)
    spec = safetensors.TensorSpec(
        dtype="float4_e2m1fn_x2",
        shape=list(packed.shape),
        data_ptr=ctypes.addressof(buffer),
        data_len=packed.nbytes,
    )
    four = sub_byte_fact("f4", "float4_e2m1fn", list(codes.shape), "F4", packed.tobytes())
    yield "float4.safetensors", Sample(bytes(safetensors.serialize({"f4": spec})), [four], "safetensors.serialize")

    # The library reads six-bit floats and has no name by which to write them.
    content = bytes(range(48))
    six = {
        "e2m3": ("F6_E2M3", "float6_e2m3fn", [2, 16], content[:24]),
        "e3m2": ("F6_E3M2", "float6_e3m2fn", [32], content[24:]),
    }
    header: dict[str, Any] = {}
    facts = []
    position = 0
    for name, (code, dtype, shape, data) in six.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [position, position + len(data)]}
        facts.append(sub_byte_fact(name, dtype, shape, code, data))
        position += len(data)
    how = "bytes by hand; safetensors.deserialize reads it"
    yield "float6.safetensors", Sample(by_hand(header, content, align=8), facts, how, hand_made=True)

    # As MLX writes: metadata null, the header not padded, so that the data begins at an odd offset.
    odd = np.arange(5, dtype="<i4")
    header = {"__metadata__": None, "odd": {"dtype": "I32", "shape": [5], "data_offsets": [0, 20]}}
    how = "bytes by hand, laid out as MLX does; safetensors.deserialize reads it"
    sample = Sample(by_hand(header, odd.tobytes(), align=1), [fact("odd", odd, "I32")], how, hand_made=True)
    yield "unaligned.safetensors", sample


def sub_byte_fact(name: str, dtype: str, shape: list[int], code: str, packed: bytes) -> Facts:
    """Facts of a tensor whose elements share bytes: the digest is that of the packed bytes."""
    digest = hashlib.sha256(packed).hexdigest()
    return {"name": name, "dtype": dtype, "shape": shape, "sha256": digest, "stored": code}


def by_hand(header: dict[str, Any], content: bytes, align: int) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % align)
    data = struct.pack("<Q", len(text)) + text + content
    read: Callable[[bytes], object] = safetensors.deserialize
    read(data)  # raises unless the library takes it
    return data


def expectation(name: str, sample: Sample) -> Facts:
    facts: Facts = {
        "format": name.rsplit(".", 1)[1],
        "size": len(sample.data),
        "sha256": hashlib.sha256(sample.data).hexdigest(),
    }
    if sample.x87:
        facts["platform"] = "x87"
    if sample.metadata is not None:
        facts["metadata"] = sample.metadata
    if sample.blobs:
        facts["blobs"] = {key: hashlib.sha256(value).hexdigest() for key, value in sample.blobs.items()}
    return facts | {"tensors": sample.tensors}


def provenance(samples: dict[str, Sample]) -> str:
    versions = {
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "safetensors": safetensors.__version__,
        "zlib": zlib.ZLIB_RUNTIME_VERSION,
        "machine": f"{platform.system()} {platform.machine()}",
    }
    made_with = ", ".join(f"{tool} {version}" for tool, version in versions.items())
    lines = [PROVENANCE.format(made_with=made_with)]
    for name, sample in samples.items():
        digest = hashlib.sha256(sample.data).hexdigest()
        how = f"**hand-made**: {sample.how}" if sample.hand_made else sample.how
        lines.append(f"| {name} | {len(sample.data)} | `{digest}` | {how} |")
    return "\n".join(lines) + "\n"


def as_json(expected: dict[str, Facts]) -> str:
    """JSON with a line for each tensor, so that a change shows where it is."""

    def line(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    files = []
    for name, facts in expected.items():
        rest = ", ".join(f"{line(key)}: {line(value)}" for key, value in facts.items() if key != "tensors")
        tensors = ",\n".join(f"    {line(tensor)}" for tensor in facts["tensors"])
        files.append(f'  {line(name)}: {{{rest}, "tensors": [{tensors and chr(10) + tensors + chr(10) + "  "}]}}')
    return "{\n" + ",\n".join(files) + "\n}\n"


def make(folder: Path) -> None:
    """Write all samples, `expected.json` and `PROVENANCE.md` into a folder."""
    samples = dict(sorted([*npy_samples(), *npz_samples(), *safetensors_samples()]))
    folder.mkdir(parents=True, exist_ok=True)
    for name, sample in samples.items():
        (folder / name).write_bytes(sample.data)
    expected = {name: expectation(name, sample) for name, sample in samples.items()}
    (folder / "expected.json").write_bytes(as_json(expected).encode())
    (folder / "PROVENANCE.md").write_bytes(provenance(samples).encode())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python samples/make.py OUTDIR")
    make(Path(sys.argv[1]))
