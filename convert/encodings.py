"""Changing a tensor into something its target can hold, and back where the file remembers what it was.

Each function takes a tensor and gives tensors whose steps do the work when their bytes are asked for; nothing is read
here but pickles and 0-d strings. What is reversible records an `Origin`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from convert import dtypes
from convert.dtypes import BY_NAME, DType
from convert.errors import ConvertError, PolicyError, UnsupportedError
from convert.files import MemoryFile
from convert.limits import DEFAULT, Limits, exceeded
from convert.records import split
from convert.tensor import Extent, Origin, Step, Tensor, Text

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer


# --- the same bytes under another type ---------------------------------------------------------------------------


def as_bytes_of(tensor: Tensor, dtype: DType, shape: tuple[int, ...], *, remember: bool = True) -> Tensor:
    """The tensor's bytes as another type and shape."""
    origin = Origin(tensor.dtype.name, tensor.shape, "bytes") if remember else None
    return tensor.changed(dtype=dtype, shape=shape, origin=origin)


def _as(name: str, *axes: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: as_bytes_of(tensor, BY_NAME[name], (*tensor.shape, *axes))


def _with_axis(name: str) -> Callable[[Tensor], Tensor]:
    """A new last axis that holds the parts of one element."""

    def encode(tensor: Tensor) -> Tensor:
        parts = tensor.dtype.item_bytes // BY_NAME[name].item_bytes
        return as_bytes_of(tensor, BY_NAME[name], (*tensor.shape, parts))

    return encode


def _interpreted(name: str) -> Callable[[Tensor], Tensor]:
    """Opaque bytes taken as a type; little-endian, as every writer of them leaves them."""

    def encode(tensor: Tensor) -> Tensor:
        return as_bytes_of(tensor, BY_NAME[name], tensor.shape, remember=False)

    return encode


def _void(length: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: as_bytes_of(tensor, dtypes.sized("V", length, "<"), tensor.shape)


def _packed(tensor: Tensor) -> Tensor:
    last = tensor.shape[-1] * tensor.dtype.bits if tensor.shape else 1
    shape = (*tensor.shape[:-1], last // 8) if last % 8 == 0 else (tensor.nbytes,)
    return as_bytes_of(tensor, BY_NAME["uint8"], shape)


# --- values in another type --------------------------------------------------------------------------------------


def _stepped(tensor: Tensor, dtype: DType, *steps: Step, encoding: str | None = None) -> Tensor:
    origin = Origin(tensor.dtype.name, tensor.shape, encoding) if encoding else None
    return tensor.changed(dtype=dtype, steps=(*tensor.steps, *steps), origin=origin)


def unpack_step(dtype: DType) -> Step:
    return Step(1, 2, _unpack4) if dtype.bits == 4 else Step(3, 4, _unpack6)


def pack_step(dtype: DType) -> Step:
    return Step(2, 1, _pack4) if dtype.bits == 4 else Step(4, 3, _pack6)


def _unpack(tensor: Tensor) -> Tensor:
    return _stepped(tensor, BY_NAME["uint8"], unpack_step(tensor.dtype), encoding="unpack")


def widened(tensor: Tensor) -> Tensor:
    """bfloat16 or a smaller float as float32, exact and reversible."""
    dtype = tensor.dtype
    before = (unpack_step(dtype),) if dtype.kind == "subbyte" else ()
    step = Step(max(dtype.item_bytes, 1), 4, partial(_widen, dtype.name))
    return _stepped(tensor, BY_NAME["float32"], *before, step, encoding="float32")


def _long_double(tensor: Tensor, mode: str, inf: bool) -> Tensor:
    """Long doubles as float64. This reads the tensor now, in bounded memory, until its bytes prove that it is x87.

    Nearly always that is its first chunk; a damaged file may come to light here.
    """
    from convert.longdouble import prove_x87

    pair = tensor.dtype.name.startswith("complex")
    item = tensor.dtype.item_bytes // 2 if pair else tensor.dtype.item_bytes
    # In stored order, whatever that is: turning a Fortran-order tensor only to look at it would be costly.
    prove_x87(tensor.changed(stored_fortran=False, fortran=False).chunks(), item)
    step = Step(item, 8, partial(_from_x87, item, mode, inf))
    return _stepped(tensor, BY_NAME["complex128" if pair else "float64"], step)


def _complex64(tensor: Tensor, exact: bool, inf: bool) -> Tensor:
    return _stepped(tensor, BY_NAME["complex64"], Step(16, 8, partial(_to_complex64, exact, inf)))


def cast_to(tensor: Tensor, target: DType, inf: bool) -> Tensor:
    """Values rounded to nearest even; an integer target takes only values it holds exactly.

    Raises:
        PolicyError: There is no cast between these types.
    """
    from convert.numeric import castable

    if tensor.dtype.kind == "subbyte":
        tensor = widened(tensor)
    if not castable(tensor.dtype.name, target.name):
        raise PolicyError(f"there is no cast from {tensor.dtype} to {target}", path=tensor.path, tensor=tensor.name)
    step = Step(tensor.dtype.item_bytes, target.item_bytes, partial(_cast, tensor.dtype.name, target.name, inf))
    return _stepped(tensor, target, step)


# The kernels live in modules that import numpy, which a plain copy does not need.


def _unpack4(view: memoryview, first: int) -> Buffer:
    from convert import numeric

    return _plain(numeric.unpack4(view))


def _unpack6(view: memoryview, first: int) -> Buffer:
    from convert import numeric

    return _plain(numeric.unpack6(view))


def _pack4(view: memoryview, first: int) -> Buffer:
    from convert import numeric

    return _plain(numeric.pack4(view))


def _pack6(view: memoryview, first: int) -> Buffer:
    from convert import numeric

    return _plain(numeric.pack6(view))


def _plain(array: np.ndarray[Any, Any]) -> memoryview:
    """A view of an array's bytes."""
    return array.reshape(-1).view("u1").data


def _widen(name: str, view: memoryview, first: int) -> Buffer:
    from convert import numeric

    return _plain(numeric.widen(view, name, first=first))


def _narrow(name: str, view: memoryview, first: int) -> Buffer:
    from convert import numeric

    return _plain(numeric.narrow(view, name, first=first))


def _cast(source: str, target: str, inf: bool, view: memoryview, first: int) -> Buffer:
    from convert import numeric

    return _plain(numeric.cast(view, source, target, inf=inf, first=first))


def _to_complex64(exact: bool, inf: bool, view: memoryview, first: int) -> Buffer:
    from convert import numeric

    return _plain(numeric.complex128_to_complex64(view, exact=exact, inf=inf, first=first))


def _from_x87(item: int, mode: str, inf: bool, view: memoryview, first: int) -> Buffer:
    from convert import longdouble

    exact = mode == "exact"
    return _plain(
        longdouble.longdouble_to_float64(view, item, mode="exact" if exact else "round", inf=inf, first=first)
    )


# --- strings and pickles -----------------------------------------------------------------------------------------


def _text(tensor: Tensor, limits: Limits) -> Text:
    """A 0-d string for the metadata."""
    if tensor.shape:
        raise PolicyError(
            f"only 0-d strings go into the metadata (found shape {list(tensor.shape)})",
            hint=f"--policy {tensor.dtype.kind}={'uint8' if tensor.dtype.kind == 'bytes' else 'uint32'} keeps an array",
        )
    if tensor.nbytes > limits.text_bytes:
        raise exceeded("text_bytes", "the string is too long for the metadata", limits.text_bytes, tensor.nbytes)
    data = b"".join(bytes(chunk) for chunk in tensor.chunks())
    try:
        text = data.decode("utf-8" if tensor.dtype.kind == "bytes" else "utf-32-le").rstrip("\0")
        text.encode("utf-8")
    except UnicodeError:
        raise PolicyError("the string is not valid Unicode, so the metadata cannot hold it") from None
    return Text(tensor.name, str(tensor.dtype), text, Origin(tensor.dtype.name, (), "text"))


def text_tensor(name: str, dtype: DType, text: str, path: str) -> Tensor | None:
    """The 0-d string tensor that `_text` moved into the metadata, or None if it does not fit its type."""
    data = text.encode("utf-8" if dtype.kind == "bytes" else "utf-32-le")
    if dtype.kind not in ("bytes", "str") or len(data) > dtype.item_bytes:
        return None
    data = data.ljust(dtype.item_bytes, b"\0")
    return Tensor(name, dtype, (), Extent(MemoryFile(data, path), 0, len(data)))


def _unpickle(tensor: Tensor) -> list[Tensor | Text]:
    if tensor.unpickle is None:
        raise UnsupportedError("the pickle cannot be reached")
    return tensor.unpickle()


# --- the table ---------------------------------------------------------------------------------------------------

Encoded = Tensor | Text | list[Tensor | Text]
_ONE: dict[tuple[str, str], Callable[[Tensor], Encoded]] = {
    ("V2", "bfloat16"): _interpreted("bfloat16"),
    ("V2", "uint16"): _as("uint16"),
    ("void", "uint8"): _with_axis("uint8"),
    ("longdouble", "bytes"): _with_axis("uint8"),
    ("complex128", "pair"): _as("float64", 2),
    ("datetime64", "int64"): _as("int64"),
    ("timedelta64", "int64"): _as("int64"),
    ("bytes", "uint8"): _with_axis("uint8"),
    ("str", "uint32"): _with_axis("uint32"),
    ("structured", "split"): split,
    ("object", "unpickle"): _unpickle,
    ("blob", "uint8"): _as("uint8"),
    ("bfloat16", "V2"): _void(2),
    ("bfloat16", "uint16"): _as("uint16"),
    ("bfloat16", "float32"): widened,
    ("float8", "V1"): _void(1),
    ("float8", "uint8"): _as("uint8"),
    ("float8", "float32"): widened,
    ("subbyte", "packed"): _packed,
    ("subbyte", "unpack"): _unpack,
    ("subbyte", "float32"): widened,
}


def encode(tensor: Tensor, action: str, inf: bool, limits: Limits = DEFAULT) -> Encoded:
    """Do what the policy says with a tensor its target cannot hold.

    Raises:
        ConvertError: It cannot be done with this tensor.
    """
    kind = tensor.dtype.kind
    try:
        if kind == "V1":
            remember = action in ("uint8", "int8")
            return as_bytes_of(tensor, BY_NAME[action], tensor.shape, remember=remember)
        if kind == "longdouble" and action in ("exact", "round"):
            return _long_double(tensor, action, inf)
        if kind == "complex128" and action in ("complex64", "round"):
            return _complex64(tensor, action == "complex64", inf)
        if action == "metadata":
            return _text(tensor, limits)
        return _ONE[kind, action](tensor)
    except ConvertError as err:
        err.at(tensor.path, tensor.name)
        raise


def decode(tensor: Tensor) -> Tensor:
    """The tensor as it was before it was encoded, going by its origin."""
    origin = tensor.origin
    if origin is None:
        return tensor
    dtype = dtypes.by_name(origin.dtype)
    if dtype is None:
        return tensor
    tensor = tensor.changed(origin=None)
    if origin.encoding == "bytes":
        # The bytes are those of the original, so what swaps them from here on is its component width.
        return tensor.changed(dtype=dtype, stored=dtype, shape=origin.shape, stored_shape=origin.shape)
    if origin.encoding == "unpack":
        return _stepped(tensor, dtype, pack_step(dtype)).changed(shape=origin.shape)
    step = Step(4, max(dtype.item_bytes, 1), partial(_narrow, dtype.name))
    after = (pack_step(dtype),) if dtype.kind == "subbyte" else ()
    return _stepped(tensor, dtype, step, *after).changed(shape=origin.shape)
