"""Shared hypothesis strategies (names, shapes, types, memory layouts, byte orders, chunk sizes) and reference writers.

Every dimension that has bitten a converter is drawn often: 0-d, zero lengths, big-endian, negative strides, names that
are keywords elsewhere. Nothing here imports the product.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors
from hypothesis import strategies as st

from . import oracle

Array = npt.NDArray[Any]

SETTINGS: dict[str, Any] = {"deadline": None, "print_blob": True}
"""Tests never time things; a failure prints what reproduces it."""

# --- what the references write and read ---------------------------------------------------------------------------

REFERENCE: Any = safetensors
"""The library, whose stubs leave much untyped."""


def npy_bytes(array: Array) -> bytes:
    """The file `np.save` writes."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def savez(path: Any, arrays: Mapping[str, Array], *, compressed: bool = False) -> None:
    """`np.savez`, or its compressed form."""
    save: Any = np.savez_compressed if compressed else np.savez
    save(path, **arrays)


# --- names -------------------------------------------------------------------------------------------------------

SPECIAL_NAMES = (
    "",
    "/",
    "a/",
    "/a",
    "a/b",
    ".",
    "..",
    "../up",
    ".npy",
    "w",
    "w.npy",
    "w.npy.npy",
    "W",
    "file",
    "allow_pickle",
    "arr_0",
    "__metadata",
    "__metadata__ ",
    "__Metadata__",
    "metadata__",
    "tensor-convert",
    "dtype",
    "caf\u00e9",
    "cafe\u0301",  # the same to the eye
    "\u0130\u0131",
    "\ufeffbom",
    "\u202eright",
    "\U0001f9ca",
    "a\tb\nc\r",
    "\x01\x1f\x7f\x80",
    'quote"back\\slash',
    "%2F",
    "con",
    " lead",
    "trail. ",
    "x" * 300,
)
"""Names that some program takes for something else."""

_ALPHABET = st.characters(exclude_categories=["Cs"])
names_with_nul: st.SearchStrategy[str] = st.one_of(
    st.sampled_from(SPECIAL_NAMES), st.text(_ALPHABET, max_size=8), st.text("ab/.\0", max_size=5)
)
"""Any Unicode name."""

names: st.SearchStrategy[str] = names_with_nul.filter(lambda name: "\0" not in name and name != "__metadata__")
"""Any Unicode name that all three formats hold."""

# --- types -------------------------------------------------------------------------------------------------------

NUMPY_NAMES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "float16",
    "int32",
    "uint32",
    "float32",
    "complex64",
    "float64",
    "int64",
    "uint64",
)
"""Types that all three formats and numpy itself hold."""

FLOAT8_NAMES = ("float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz")
SUBBYTE_NAMES = ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")

CANONICAL_NAMES = (*oracle.SAFETENSORS_CODES, "complex128")
"""Every type the toolkit moves between formats, in the order of the safetensors library."""


def dtype_of(name: str) -> np.dtype[Any]:
    """numpy's type of a canonical name, ml_dtypes' where numpy has none."""
    return np.dtype(getattr(ml_dtypes, name, name))


canonical_names: st.SearchStrategy[str] = st.sampled_from(CANONICAL_NAMES)
numpy_names: st.SearchStrategy[str] = st.sampled_from(NUMPY_NAMES)
byte_orders: st.SearchStrategy[str] = st.sampled_from("<>")

# --- shapes ------------------------------------------------------------------------------------------------------

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 0, 2), (1, 1, 1), (2, 3), (1, 5), (5, 1), (2, 3, 4))
"""Sampled always: 0-d and zero lengths are where converters break."""

shapes: st.SearchStrategy[tuple[int, ...]] = st.one_of(
    st.sampled_from(SHAPES), st.lists(st.integers(0, 5), max_size=5).map(tuple)
)
chunk_sizes: st.SearchStrategy[int] = st.one_of(
    st.integers(1, 40), st.sampled_from([63, 64, 65, 255, 256, 257, 4095, 4096, 1 << 20])
)

# --- content and memory layout -----------------------------------------------------------------------------------


def with_bytes(dtype: np.dtype[Any], shape: Sequence[int], seed: int) -> Array:
    """An array of arbitrary bit patterns, NaN payloads included, of which `dtype` has valid ones (bool, sub-byte)."""
    count = math.prod(shape)
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, np.uint8)
    if dtype == np.bool_:
        raw &= 1
    elif dtype.name in SUBBYTE_NAMES:
        raw &= 0x0F if dtype.name == "float4_e2m1fn" else 0x3F
    return raw.view(dtype).reshape(tuple(shape)) if dtype.itemsize else np.zeros(tuple(shape), dtype)


def _strided(array: Array) -> Array:
    wide = np.zeros(tuple(2 * size + 1 for size in array.shape), array.dtype)
    view = wide[tuple(slice(1, 2 * size + 1, 2) for size in array.shape)]
    view[...] = array
    return view


def _reversed(array: Array) -> Array:
    backward = tuple(slice(None, None, -1) for _ in array.shape)
    return array[backward].copy()[backward]


def _broadcast(array: Array) -> Array:
    """Every element of the first axis is the first one, in the same memory."""
    return np.broadcast_to(array[:1], array.shape) if array.ndim and array.shape[0] else array


def _turned(array: Array) -> Array:
    """Axes that lie in memory in no usual order."""
    return np.moveaxis(np.moveaxis(array, -1, 0).copy(), 0, -1) if array.ndim > 1 else array


LAYOUTS: Mapping[str, Callable[[Array], Array]] = {
    "C": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "strided": _strided,
    "reversed": _reversed,
    "broadcast": _broadcast,
    "turned": _turned,
}
"""How the same values can lie in memory."""

layouts: st.SearchStrategy[str] = st.sampled_from(list(LAYOUTS))


def laid_out(array: Array, layout: str) -> Array:
    """The array in another layout, its shape kept: `np.ascontiguousarray` makes 0-d arrays 1-d."""
    return LAYOUTS[layout](array) if array.ndim else array


@st.composite
def arrays(draw: st.DrawFn, type_names: st.SearchStrategy[str] = numpy_names) -> Array:
    """An array of any type, byte order, shape, layout and bits."""
    dtype = dtype_of(draw(type_names))
    shape = draw(shapes)
    if dtype.name in SUBBYTE_NAMES:  # whole bytes only: all that a safetensors file holds
        shape = (*shape, 4)
    elif dtype.kind != "V" and draw(byte_orders) == ">":
        dtype = dtype.newbyteorder(">")
    return laid_out(with_bytes(dtype, shape, draw(st.integers(0, 1 << 32))), draw(layouts))


def dictionaries(
    type_names: st.SearchStrategy[str] = numpy_names, keys: st.SearchStrategy[str] = names, max_size: int = 5
) -> st.SearchStrategy[dict[str, Array]]:
    """Sets of named arrays."""
    return st.dictionaries(keys, arrays(type_names), max_size=max_size)


metadata: st.SearchStrategy[dict[str, str]] = st.dictionaries(
    st.text(_ALPHABET, max_size=6), st.text(_ALPHABET, max_size=20), max_size=3
)
"""Free text beside the tensors."""
