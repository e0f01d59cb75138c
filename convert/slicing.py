"""A part of a tensor, by numpy's basic indexing; only the bytes that are needed are read.

Where stored bytes can be read in any order, so are the parts; gaps shorter than a page are read over, as asking again
costs more. Compressed ones are unpacked up to the last byte that is needed. A checksum covers all bytes of a tensor, so
it is verified only where all are asked for, or the last one is unpacked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from convert.arrays import dtype_for, to_numpy
from convert.dtypes import BY_NAME
from convert.encodings import unpack_step
from convert.errors import ConvertError, CorruptError, UsageError
from convert.files import read_ahead
from convert.tensor import Extent, RandomAccess, Tensor
from convert.transfer import CHUNK_BYTES, chunks, stored_chunks

if TYPE_CHECKING:
    from typing_extensions import Buffer

GAP_BYTES = 4096
"""Gaps up to this are read over."""

Array = np.ndarray[Any, Any]
Key = int | slice | EllipsisType | None
Read = Callable[[int, memoryview], None]
"""Takes the place of the first byte within the stored ones, and what to fill."""


class _Axis(NamedTuple):
    """The elements `start`, `start + step`, ... of an axis, `taken` of them; `step` is positive."""

    size: int
    start: int
    step: int
    taken: int


def take(tensor: Tensor, key: Any) -> Array:
    """See `Tensor.__getitem__`."""
    axes, last = _parsed(tensor, key if isinstance(key, tuple) else (key,))
    dtype = dtype_for(tensor)
    if all(axis.taken == axis.size for axis in axes) or not dtype.itemsize:
        picked = to_numpy(tensor)[tuple(slice(a.start, a.start + a.taken * a.step, a.step) for a in axes)]
        return _copied(picked[last])
    if tensor.dtype.kind == "subbyte":
        tensor = tensor.changed(dtype=BY_NAME["uint8"], steps=(*tensor.steps, unpack_step(tensor.dtype)))
    is_plain = not tensor.steps
    fortran = is_plain and tensor.stored_fortran
    if fortran:
        axes.reverse()
    found = np.ndarray(tuple(axis.taken for axis in axes), dtype)
    if found.size:
        try:
            with _Reading(tensor.data if is_plain else _Canonical(tensor)) as read:
                _fill(found.view(f"V{dtype.itemsize}"), axes, read)
        except ConvertError as err:
            raise err.at(tensor.path, tensor.name) from None
        if is_plain and tensor.stored_big and tensor.stored.swap > 1:
            found.reshape(-1).view(f"u{tensor.stored.swap}").byteswap(inplace=True)
    return _copied((found.T if fortran else found)[last])


def _copied(array: Array) -> Array:
    """In C order, and no view of more than is shown."""
    return array if array.flags.c_contiguous else array.copy(order="C")


def _parsed(tensor: Tensor, keys: tuple[Any, ...]) -> tuple[list[_Axis], tuple[Key, ...]]:
    """What to take of each axis, and what is left to do to the array of that: drop axes, reverse and add some."""
    for key in keys:
        if isinstance(key, (bool, np.bool_)) or not (
            key is None
            or key is Ellipsis
            or isinstance(key, slice)
            or (hasattr(key, "__index__") and np.ndim(key) == 0)
        ):
            raise UsageError(
                f"an index may hold whole numbers, slices, ... and None (found a {type(key).__name__})",
                path=tensor.path,
                tensor=tensor.name,
                hint="tensor.numpy()[...] reads all of it and takes whatever numpy takes",
            )
    named = sum(key is not None and key is not Ellipsis for key in keys)
    dots = sum(key is Ellipsis for key in keys)
    if dots > 1 or named > len(tensor.shape):
        found = "more than one ..." if dots > 1 else f"found {named} indices"
        raise IndexError(f"tensor {tensor.name!r} has {len(tensor.shape)} dimensions ({found})")
    if not dots:
        keys = (*keys, ...)
    axes: list[_Axis] = []
    last: list[Key] = []
    for key in keys:
        if key is None:
            last.append(None)
        elif key is Ellipsis:
            for size in tensor.shape[len(axes) : len(axes) + len(tensor.shape) - named]:
                axes.append(_Axis(size, 0, 1, size))
                last.append(slice(None))
        else:
            axis, rest = _axis(tensor, key, len(axes))
            axes.append(axis)
            last.append(rest)
    return axes, (*last, ...)


def _axis(tensor: Tensor, key: Any, number: int) -> tuple[_Axis, Key]:
    size = tensor.shape[number]
    if isinstance(key, slice):
        try:
            picked = range(size)[key]
        except TypeError as err:
            raise UsageError(f"not a slice: {err}", path=tensor.path, tensor=tensor.name) from None
        if picked.step < 0:
            return _Axis(size, picked[-1] if picked else 0, -picked.step, len(picked)), slice(None, None, -1)
        return _Axis(size, picked.start, picked.step, len(picked)), slice(None)
    at = operator.index(key)
    if not -size <= at < size:  # what also ends a loop over a tensor
        raise IndexError(f"tensor {tensor.name!r}: {at} is out of bounds for axis {number} of size {size}")
    return _Axis(size, at % size, 1, 1), 0


# --- bytes -------------------------------------------------------------------------------------------------------


class _Canonical:
    """A tensor's bytes as they are handed out, as a stream."""

    def __init__(self, tensor: Tensor) -> None:
        self.nbytes = tensor.nbytes
        self.chunks = partial(chunks, tensor)


class _Reading:
    """Reads at places that never go back, from any kind of stored bytes."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._stream: Iterator[Buffer] = iter(())
        self._chunk = memoryview(b"")
        self._end = 0

    def __enter__(self) -> Read:
        if isinstance(self._data, Extent):
            return partial(_read_at, self._data.file, self._data.offset)
        self._stream = stored_chunks(self._data, CHUNK_BYTES)
        return self._forward

    def _forward(self, offset: int, view: memoryview) -> None:
        while len(view):
            while self._end <= offset:
                chunk = next(self._stream, None)
                if chunk is None:
                    raise CorruptError(f"the data ends at byte {self._end}")
                self._chunk = memoryview(chunk).cast("B")
                self._end += len(self._chunk)
            part = self._chunk[len(self._chunk) - (self._end - offset) :][: len(view)]
            view[: len(part)] = part
            view, offset = view[len(part) :], offset + len(part)

    def __exit__(self, kind: object, err: object, traceback: object) -> None:
        if err is None and self._end == getattr(self._data, "nbytes", -1):
            for _ in self._stream:  # whatever is owed at the end
                pass
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()


def _read_at(file: RandomAccess, begin: int, offset: int, view: memoryview) -> None:
    if len(view) > CHUNK_BYTES:
        read_ahead(file, begin + offset, begin + offset + len(view))
    for at in range(0, len(view), CHUNK_BYTES):
        file.readinto(begin + offset + at, view[at : at + CHUNK_BYTES])


def _fill(out: Array, axes: list[_Axis], read: Read) -> None:
    """Fill an array with the chosen elements of row-major bytes, in as few reads as pay."""
    item = out.dtype.itemsize
    inner = [item * prod(axis.size for axis in axes[number + 1 :]) for number in range(len(axes))]
    # Of axis `number` and those inside it: where the first byte needed lies, how many it is to the last, and whether
    # these are needed all, or all but short gaps.
    lead, span = [0] * (len(axes) + 1), [item] * (len(axes) + 1)
    whole, dense = [True] * (len(axes) + 1), [True] * (len(axes) + 1)
    for number in reversed(range(len(axes))):
        axis, stride = axes[number], axes[number].step * inner[number]
        gap = stride - span[number + 1] if axis.taken > 1 else 0
        lead[number] = lead[number + 1] + axis.start * inner[number]
        span[number] = (axis.taken - 1) * stride + span[number + 1]
        whole[number] = whole[number + 1] and gap == 0
        dense[number] = dense[number + 1] and gap <= GAP_BYTES

    def fill(out: Array, number: int, offset: int) -> None:
        """`offset` is where the first byte needed lies."""
        if whole[number]:
            read(offset, out.reshape(-1).view(np.uint8).data)
            return
        axis, stride = axes[number], axes[number].step * inner[number]
        if not dense[number] or span[number + 1] > CHUNK_BYTES:
            for index in range(axis.taken):
                fill(out[index : index + 1].reshape(out.shape[1:]), number + 1, offset + index * stride)
            return
        strides = [each.step * width for each, width in zip(axes[number:], inner[number:], strict=True)]
        group = max((CHUNK_BYTES - span[number + 1]) // stride + 1, 1)
        for first in range(0, axis.taken, group):
            part = out[first : first + group]
            buffer = bytearray((len(part) - 1) * stride + span[number + 1])
            read(offset + first * stride, memoryview(buffer))
            part[...] = np.ndarray(part.shape, part.dtype, buffer, 0, strides)

    fill(out, 0, lead[0])
