"""Arrays in memory as tensors and back; the only part of the core that knows numpy arrays.

As a target of a plan (`load`), numpy holds everything but pickles, members that are no arrays, and `<V2`, about which
the policy decides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from convert import dtypes
from convert.dtypes import BY_NAME, DType, Field
from convert.encodings import pack_step, unpack_step
from convert.errors import ConvertError, LimitError, UnsupportedError, UsageError, quoted
from convert.files import MemoryFile
from convert.records import ordered_fields
from convert.tensor import Extent, Tensor
from convert.threads import default_jobs
from convert.transfer import SPAN_BYTES, Slot, fill

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from convert.plan import Plan

_MAX_DIMENSIONS = 64


def holds(tensor: Tensor) -> bool:
    return tensor.dtype.kind not in ("object", "blob", "V2", "broken")


def remembers(metadata: Mapping[str, str], encoded: bool) -> bool:
    return True


def check(plan: Plan) -> list[ConvertError]:
    return []


def dtype_for(tensor: Tensor) -> np.dtype[Any]:
    """The type of a tensor's array.

    Raises:
        ConvertError: It has none.
    """
    if tensor.problem is not None:
        raise tensor.problem
    if tensor.dtype.kind in ("object", "broken"):
        raise UsageError("a pickle has no array of its own", path=tensor.path, tensor=tensor.name)
    if len(tensor.shape) > _MAX_DIMENSIONS:
        raise UsageError(
            f"numpy stops at {_MAX_DIMENSIONS} dimensions (found {len(tensor.shape)})",
            path=tensor.path,
            tensor=tensor.name,
        )
    try:
        return tensor.dtype.numpy()
    except (TypeError, ValueError) as err:  # a long double of another size than this machine's, for one
        raise UsageError(f"numpy has no {tensor.dtype} here ({err})", path=tensor.path, tensor=tensor.name) from err


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """See `Tensor.numpy`; a large one is read by all cores."""
    jobs = default_jobs() if tensor.data.nbytes > SPAN_BYTES else 1
    return to_arrays([tensor], jobs)[tensor.name]


def to_arrays(tensors: Iterable[Tensor], jobs: int) -> dict[str, np.ndarray[Any, Any]]:
    """New C-ordered arrays by name, read by `jobs` threads."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}

    def slots() -> Iterator[Slot]:  # an array is made when its turn has come: damage before it costs no memory
        for tensor in tensors:
            dtype = dtype_for(tensor)
            plain = tensor.changed(big=False, fortran=False) if tensor.big or tensor.fortran else tensor
            if plain.dtype.kind == "subbyte":
                plain = plain.changed(dtype=BY_NAME["uint8"], steps=(*plain.steps, unpack_step(plain.dtype)))
            try:
                array = np.ndarray(plain.shape, dtype)  # np.empty makes S1 of S0, and U1 of U0
            except (MemoryError, ValueError) as err:
                raise LimitError(
                    f"an array of {plain.nbytes} bytes: {err}", path=plain.path, tensor=plain.name
                ) from err
            arrays[tensor.name] = array
            yield Slot(plain, _Room(array), 0)  # type: ignore[arg-type]  # nothing is done with it but writing

    fill(slots(), jobs)
    return arrays


class _Room:
    """An array as something to write to, from any thread."""

    __slots__ = ("_flat",)

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._flat = np.frombuffer(array.reshape(-1).view(np.uint8).data, np.uint8) if array.nbytes else None

    def write_at(self, offset: int, data: Buffer) -> None:
        if self._flat is not None:
            content = np.frombuffer(memoryview(data), np.uint8)
            self._flat[offset : offset + content.size] = content


def from_arrays(values: object, separator: str) -> tuple[list[Tensor], list[str]]:
    """Tensors of arrays by name, dictionaries within dictionaries flattened, and notes about them.

    Raises:
        UsageError: No dictionary, one that holds itself, or two arrays that would have the same name.
        UnsupportedError: As of `from_array`.
    """
    if not isinstance(values, Mapping):
        what = f"a dictionary of arrays by name is needed (found a {type(values).__qualname__})"
        raise UsageError(what, hint=_state_hint(values) or "{'w': array} for one")
    tensors: dict[str, Tensor] = {}
    shared: dict[tuple[int, int], list[str]] = {}
    notes: list[str] = []

    def add(values: Mapping[Any, Any], prefix: str, within: tuple[int, ...]) -> None:
        if id(values) in within:
            raise UsageError("the dictionary holds itself", tensor=prefix.removesuffix(separator))
        if not values and prefix:
            notes.append(f"{quoted(prefix.removesuffix(separator))} is an empty dictionary, which leaves no trace")
        for key, value in values.items():
            if not isinstance(key, str):
                raise UsageError(f"names must be texts (found {key!r})")
            name = prefix + key
            if isinstance(value, Mapping):
                add(value, name + separator, (*within, id(values)))
                continue
            if name in tensors:
                hint = "another separator, separator='/' for one"
                raise UsageError(
                    "two arrays would have this name when dictionaries are flattened", tensor=name, hint=hint
                )
            array = value if isinstance(value, np.ndarray) else _as_numpy(name, value)
            tensors[name] = from_array(name, array)
            if array.nbytes:
                shared.setdefault((array.__array_interface__["data"][0], array.nbytes), []).append(name)

    add(values, "", ())
    for names in shared.values():
        if len(names) > 1:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            listed = ", ".join(map(quoted, names[:5]))
            notes.append(f"{listed}{more} share their memory (tied weights); each is written in full")
    return list(tensors.values()), notes


def from_array(name: str, value: Any) -> Tensor:
    """A tensor whose bytes are those of an array; nothing is copied but what is not contiguous, in pieces.

    Raises:
        UnsupportedError: An object array, or a type that no format here has.
    """
    if not isinstance(name, str):
        raise UsageError(f"names must be texts (found {name!r})")
    array = value if isinstance(value, np.ndarray) else _as_numpy(name, value)
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise UnsupportedError(
            "a masked array that hides values, which no format here can say",
            tensor=name,
            hint="save array.filled(...) or array.data, and the mask under a name of its own",
        )
    array = array.view(np.ndarray)
    try:
        dtype, big = dtype_of(array.dtype)
    except UnsupportedError as err:
        raise err.at(None, name) from None
    if array.flags.c_contiguous or (array.flags.f_contiguous and dtype.kind != "subbyte"):
        fortran = not array.flags.c_contiguous
        raw = (array.T if fortran else array).reshape(-1)
        data: Extent | _Strided = Extent(MemoryFile(_bytes(raw)), 0, array.nbytes)
    else:
        fortran, data = False, _Strided(array)
    tensor = Tensor(name, dtype, array.shape, data, big, fortran)
    if dtype.fields:
        return ordered_fields(tensor)
    if dtype.kind == "subbyte":
        tensor = tensor.changed(stored=BY_NAME["uint8"], steps=(pack_step(dtype),))
        if array.size * dtype.bits % 8:
            raise UnsupportedError(f"{array.size} elements of {dtype} do not fill whole bytes", tensor=name)
    return tensor


def _bytes(flat: np.ndarray[Any, Any]) -> memoryview:
    """The memory of a one-dimensional contiguous array."""
    if flat.nbytes == 0:
        return memoryview(b"")
    return flat.view(np.uint8).data


class _Strided:
    """An array in memory that is not contiguous, as a stream of its elements in row-major order."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.nbytes = array.nbytes
        self.path = "memory"
        self._array = array

    def chunks(self, chunk_bytes: int) -> Iterator[memoryview]:
        array = self._array
        if array.nbytes == 0:
            return
        count = max(chunk_bytes // array.itemsize, 1)
        raw = array.view(f"V{array.itemsize}") if array.dtype.names is None else array
        for begin in range(0, array.size, count):
            yield _bytes(np.ascontiguousarray(raw.flat[begin : begin + count]))


def dtype_of(dtype: np.dtype[Any]) -> tuple[DType, bool]:
    """Our type for a numpy or ml_dtypes type, and whether it is big-endian.

    Raises:
        UnsupportedError: There is none.
    """
    big = dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big")
    if dtype.names is not None:
        return _record(dtype), False
    # By name, not by character: some of ml_dtypes' characters are those of numpy's long doubles.
    known = BY_NAME.get(dtype.name)
    if known is not None:
        return known, big and known.swap > 1
    if dtype.kind in "mM":
        kind = "datetime64" if dtype.kind == "M" else "timedelta64"
        unit, count = np.datetime_data(dtype)
        return dtypes.time(kind, "" if unit == "generic" else unit if count == 1 else f"{count}{unit}"), big
    if dtype.kind in "SUV" and dtype.type in (np.bytes_, np.str_, np.void):
        length = dtype.itemsize // 4 if dtype.kind == "U" else dtype.itemsize
        return dtypes.sized(dtype.kind, length), big and dtype.kind == "U"
    if dtype.type in (np.longdouble, np.clongdouble) and np.finfo(np.longdouble).nmant == 63 and not big:
        return dtypes.LONG_DOUBLES[dtype.name], False
    if dtype.kind == "O":
        raise UnsupportedError(
            "an array of Python objects", hint="give each array inside it a name of its own in the dictionary"
        )
    raise UnsupportedError(
        f"no format here has the type {dtype}", hint="convert formats | policies list what can be held"
    )


def dtype_from(value: Any) -> DType:
    """Our type for what people call one: a name, or a dtype of numpy, ml_dtypes, torch, JAX or MLX.

    Raises:
        ConvertError: None of ours, or big-endian.
        TypeError: No type at all.
    """
    if isinstance(value, DType):
        return value
    if type(value).__module__.partition(".")[0] in ("torch", "mlx"):
        value = str(value).rpartition(".")[2]
    if isinstance(value, str) and (named := dtypes.by_name(value)) is not None and named.kind != "blob":
        return named
    dtype, big = dtype_of(np.dtype(value))
    if big or dtype.fields:
        what = f"{np.dtype(value)} is a record" if dtype.fields else f"{value!r} is big-endian"
        hint = (
            "give each field a name of its own" if dtype.fields else f"give {dtype.name!r}; arrays of either order do"
        )
        raise UsageError(what, hint=hint)
    return dtype


def _record(dtype: np.dtype[Any]) -> DType:
    fields = []
    members: Mapping[str, Any] = dtype.fields or {}
    for name in dtype.names or ():
        inner, offset = members[name][:2]
        base, big = dtype_of(inner.base)
        fields.append(Field(name, base, offset, tuple(inner.shape), big))
    try:
        layout = np.lib.format.dtype_to_descr(dtype)
    except ValueError as err:
        raise UnsupportedError(
            f"the fields of {dtype} overlap or are out of order, which npy cannot describe",
            hint="numpy.lib.recfunctions.repack_fields puts fields in order; an array for each field always works",
        ) from err
    return dtypes.structured(tuple(fields), dtype.itemsize, layout)


def _as_numpy(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Arrays of other libraries, which the caller has imported already; none is imported here."""
    modules = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    try:
        if "torch" in modules and hasattr(value, "detach"):
            return _from_torch(value)
        if "mlx" in modules and hasattr(value, "dtype"):
            return _from_mlx(value)
        if hasattr(value, "__array__") or isinstance(value, (bool, int, float, complex, list, tuple, np.generic)):
            return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as err:
        raise UnsupportedError(f"cannot be taken as an array: {err}", tensor=name) from err
    raise UnsupportedError(f"a {type(value).__qualname__} is no array", tensor=name, hint=_state_hint(value))


def _state_hint(value: Any) -> str | None:
    return "its arrays by name: .state_dict()" if hasattr(value, "state_dict") else None


def _from_torch(value: Any) -> np.ndarray[Any, Any]:
    value = value.detach().cpu().resolve_conj().resolve_neg()
    known = BY_NAME.get(str(value.dtype).removeprefix("torch."))
    if known is None or known.kind not in ("bfloat16", "float8"):
        return np.asarray(value.numpy())
    torch = sys.modules["torch"]  # numpy lacks the type: it sees the bits, wherever they lie
    bits = torch.uint8 if known.kind == "float8" else torch.int16
    return np.asarray(value.view(bits).numpy().view(known.numpy()))


def _from_mlx(value: Any) -> np.ndarray[Any, Any]:
    if str(value.dtype) == "mlx.core.bfloat16":
        raw = np.asarray(value.view(sys.modules["mlx.core"].uint16))
        return raw.view(BY_NAME["bfloat16"].numpy())
    return np.asarray(value)


__all__ = [
    "check",
    "dtype_for",
    "dtype_from",
    "dtype_of",
    "from_array",
    "from_arrays",
    "holds",
    "remembers",
    "to_arrays",
    "to_numpy",
]
