"""Hugging Face's safetensors, byte for byte as the reference library writes it.

Tensors are ordered by alignment of their type, descending, then by name; the JSON is compact; the header is padded
with spaces to a multiple of 8. Metadata keys, which the reference leaves in the order of a hash map, are sorted.

Source: safetensors/src/tensor.rs of the safetensors repository, version 0.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import TYPE_CHECKING

from convert.dtypes import CANONICAL
from convert.errors import ConvertError, PolicyError
from convert.memory import KEY, dump_origins
from convert.output import OutputFile, committed
from convert.transfer import Slot, fill

if TYPE_CHECKING:
    from convert.plan import Plan
    from convert.tensor import Tensor
    from convert.writing import Settings

_ALIGNMENT = 8
_MAX_HEADER_BYTES = 100_000_000
_RANK = {dtype.name: rank for rank, dtype in enumerate(reversed(CANONICAL))}


def holds(tensor: Tensor) -> bool:
    return tensor.dtype.safetensors is not None


def remembers(metadata: Mapping[str, str], encoded: bool) -> bool:
    return True


def check(plan: Plan) -> list[ConvertError]:
    """The reserved name, and sub-byte tensors that end within a byte."""
    problems: list[ConvertError] = []
    for tensor in plan.tensors:
        if tensor.dtype.kind == "subbyte" and tensor.count * tensor.dtype.bits % 8:
            problems.append(
                PolicyError(
                    f"{tensor.count} elements of {tensor.dtype} do not fill whole bytes",
                    path=tensor.path,
                    tensor=tensor.name,
                    hint="pad its last axis",
                )
            )
        if tensor.name == "__metadata__":
            problems.append(
                PolicyError(
                    "this name is reserved for metadata in safetensors",
                    path=tensor.path,
                    tensor=tensor.name,
                    hint="--rename '^__metadata__$=metadata' gives it another",
                )
            )
    return problems


def write(plan: Plan, settings: Settings) -> OutputFile:
    """Write the plan's tensors; the file is complete but not yet in its place."""
    tensors = sorted(plan.tensors, key=lambda tensor: (_RANK[tensor.dtype.name], tensor.name))
    header, offsets = _header(tensors, _metadata(plan), settings.align)
    output = OutputFile(plan.target, overwrite=settings.overwrite)
    with committed(output):
        begin = len(header)
        output.reserve(begin + offsets[-1])
        output.write_at(0, header)
        slots = (Slot(tensor, output, begin + offset) for tensor, offset in zip(tensors, offsets, strict=False))
        fill(slots, settings.jobs, progress=settings.progress)
    return output


def _metadata(plan: Plan) -> dict[str, str]:
    origins = {tensor.name: tensor.origin for tensor in plan.tensors if tensor.origin is not None}
    origins |= plan.text_origins
    return {**plan.metadata, KEY: dump_origins(origins)} if origins else plan.metadata


def _header(tensors: list[Tensor], metadata: dict[str, str], align: int) -> tuple[bytes, list[int]]:
    """Length and JSON with padding, and the offsets in the data: begin of each tensor, then the end."""
    parts: list[str] = []
    if metadata:
        texts = (f"{encode_basestring(key)}:{encode_basestring(metadata[key])}" for key in sorted(metadata))
        parts.append(f'"__metadata__":{{{",".join(texts)}}}')
    offsets = [0]
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        shape = ",".join(map(str, tensor.shape))
        parts.append(
            f'{encode_basestring(tensor.name)}:{{"dtype":"{tensor.dtype.safetensors}","shape":[{shape}],'
            f'"data_offsets":[{begin},{end}]}}'
        )
        offsets.append(end)
        begin = end
    body = f"{{{','.join(parts)}}}".encode()
    padding = -(8 + len(body)) % max(align, _ALIGNMENT)
    length = len(body) + padding
    if length > _MAX_HEADER_BYTES:
        raise PolicyError(
            f"the header is too long for safetensors (expected at most {_MAX_HEADER_BYTES} bytes, found {length})",
            hint="--exclude or --rename: fewer tensors, or shorter names",
        )
    return length.to_bytes(8, "little") + body + b" " * padding, offsets
