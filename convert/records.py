"""Records: fields as tensors of their own, and the byte order of fields, each by itself."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from convert import dtypes
from convert.dtypes import BY_NAME, DType, Field
from convert.errors import UnsupportedError, quoted
from convert.files import MemoryFile
from convert.steps import swap_step
from convert.tensor import Extent, Step, Tensor, Text

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer


def _field_bytes(record_bytes: int, begin: int, end: int, view: memoryview, first: int) -> Buffer:
    import numpy as np

    records = np.frombuffer(view, np.uint8).reshape(-1, record_bytes)
    return np.ascontiguousarray(records[:, begin:end]).data


def split(tensor: Tensor) -> list[Tensor | Text]:
    """One tensor per field, `name.field`, nested fields too; each is read on its own."""
    parts: list[Tensor | Text] = []
    record = tensor.stored
    for path, field, offset, shape in _leaves(record, 0, (), ()):
        nbytes = field.dtype.item_bytes * prod(field.shape)
        steps = [Step(record.item_bytes, nbytes, partial(_field_bytes, record.item_bytes, offset, offset + nbytes))]
        if field.big:
            steps.append(swap_step(field.dtype.swap))
        part = tensor.changed(
            name=".".join((tensor.name, *path)), dtype=field.dtype, shape=tensor.shape + shape, steps=tuple(steps)
        )
        if part.nbytes == 0:
            # What is stored is looked at for its checksum only, if there is nothing else to look at.
            data = tensor.data if tensor.data.nbytes == 0 else Extent(MemoryFile(b"", tensor.path), 0, 0)
            part = part.changed(data=data, steps=(), stored_fortran=False)
        parts.append(part)
    if not any(isinstance(part, Tensor) and part.nbytes for part in parts):
        for _ in tensor.chunks():
            pass
    return parts


def _leaves(
    dtype: DType, offset: int, path: tuple[str, ...], shape: tuple[int, ...]
) -> list[tuple[tuple[str, ...], Field, int, tuple[int, ...]]]:
    found = []
    for field in dtype.fields:
        here = (*path, field.name)
        if field.dtype.kind != "structured":
            found.append((here, field, offset + field.offset, shape + field.shape))
        elif field.shape and field.dtype.fields:
            raise UnsupportedError(
                f"field {quoted('.'.join(here))} is an array of records, which cannot be split",
                hint="--policy structured=skip leaves the tensor out",
            )
        else:
            found += _leaves(field.dtype, offset + field.offset, here, shape)
    return found


def ordered_fields(tensor: Tensor, big: bool = False) -> Tensor:
    """A record tensor as stored, but for its fields, which are all little-endian, or all big-endian."""
    record = tensor.stored
    if not _differs(record, big):
        return tensor.changed(dtype=record, steps=())
    dtype = _ordered(record, big)
    step = Step(record.item_bytes, record.item_bytes, partial(_swap, record, big))
    return tensor.changed(dtype=dtype, steps=(step,))


def _differs(dtype: DType, big: bool) -> bool:
    """Whether a field, or one within it, has the other byte order."""
    return any(_field_differs(field, big) for field in dtype.fields)


def _field_differs(field: Field, big: bool) -> bool:
    if field.dtype.fields:
        return _differs(field.dtype, big)
    if big and field.dtype.descr is None:
        return False  # bfloat16, which no writer has in a record, is left as it is
    return field.dtype.swap > 1 and field.big != big


def _swap(record: DType, big: bool, view: memoryview, first: int) -> Buffer:
    import numpy as np

    records = np.frombuffer(view, np.uint8).reshape(-1, record.item_bytes).copy()
    _swap_fields(record, big, records)
    return records.data


def _swap_fields(record: DType, big: bool, records: np.ndarray[Any, Any]) -> None:
    """Swap in place what has the other byte order in records given as rows of bytes."""
    for field in record.fields:
        if not _field_differs(field, big):
            continue
        end = field.offset + field.dtype.item_bytes * prod(field.shape)
        part = records[:, field.offset : end]
        if part.size == 0:
            continue
        if field.dtype.fields:
            inner = part.reshape(-1, field.dtype.item_bytes).copy()
            _swap_fields(field.dtype, big, inner)
        else:
            inner = part.reshape(-1, field.dtype.swap)[:, ::-1]
        records[:, field.offset : end] = inner.reshape(part.shape)


def _ordered(dtype: DType, big: bool) -> DType:
    fields = tuple(
        field._replace(dtype=_ordered(field.dtype, big))
        if field.dtype.fields
        else field._replace(big=_is_big(field, big))
        for field in dtype.fields
    )
    return dtypes.structured(fields, dtype.item_bytes, _ordered_layout(dtype.layout, big))


def _is_big(field: Field, big: bool) -> bool:
    """The byte order of a field afterwards."""
    return not field.big if _field_differs(field, big) else field.big


def _ordered_layout(layout: object, big: bool) -> object:
    """A descr with every byte order mark turned, but for void types, whose mark is no byte order."""
    if isinstance(layout, str):
        if layout == ">V2" and not big:
            return "<V2"  # bfloat16, whose mark is one
        named = BY_NAME.get(layout)
        text = named.descr or layout if named is not None else layout
        kind = text.lstrip("<>=|")
        if text[0] == "|" or kind[0] in "VSaOb?" or kind in ("u1", "i1") or (big and kind in ("g2", "f1")):
            return layout
        return (">" if big else "<") + kind
    if isinstance(layout, list):
        return [(entry[0], _ordered_layout(entry[1], big), *entry[2:]) for entry in layout]
    if isinstance(layout, tuple):
        return (_ordered_layout(layout[0], big), *layout[1:])
    return layout
