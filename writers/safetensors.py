"""Hugging Face's safetensors, byte for byte as the reference library writes it.

Tensors are ordered by alignment of their type, descending, then by name; the JSON is compact; the header is padded
with spaces to a multiple of 8. Metadata keys, which the reference leaves in the order of a hash map, are sorted.

Source: safetensors/src/tensor.rs of the safetensors repository, version 0.8.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from json.encoder import encode_basestring
from typing import TYPE_CHECKING

from convert.dtypes import CANONICAL
from convert.errors import ConvertError, InputError, PolicyError, UsageError, gather
from convert.memory import KEY, dump_origins
from convert.output import FileOutput, committed, open_output
from convert.transfer import Slot, fill
from convert.writing import Begun

if TYPE_CHECKING:
    from convert.outputset import SetOutput
    from convert.plan import Plan
    from convert.tensor import Origin, Tensor
    from convert.writing import Settings
    from writers.shards import Split

_ALIGNMENT = 8
_LENGTH_BYTES = 8
_PARTS = 1024
_MAX_HEADER_BYTES = 100_000_000
_LARGEST_COUNT = (1 << 64) - 1
_RANK = {dtype.name: rank for rank, dtype in enumerate(reversed(CANONICAL))}


def holds(tensor: Tensor) -> bool:
    return tensor.dtype.safetensors is not None


def remembers(metadata: Mapping[str, str], encoded: bool) -> bool:
    return True


def check(plan: Plan) -> list[ConvertError]:
    """The reserved name, sub-byte tensors that end within a byte, and empty ones of impossible shapes."""
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
        if not _countable(tensor.shape):
            problems.append(
                PolicyError(
                    "the sizes of its shape multiply to more than 2**64 - 1 before a zero, which no reader takes",
                    path=tensor.path,
                    tensor=tensor.name,
                    hint="it is empty; --exclude leaves it out",
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


def _countable(shape: tuple[int, ...]) -> bool:
    """Whether readers that multiply size by size in 64 bits, as the reference library does, get to the end."""
    count = 1
    for size in shape:
        count *= size
        if count > _LARGEST_COUNT:
            return False
    return True


def write(plan: Plan, settings: Settings) -> FileOutput:
    """Write the plan's tensors; the file is complete but not yet in its place."""
    output, slots, *_ = begin(plan, settings)
    with committed(output):
        fill(slots, settings.jobs, progress=settings.progress, spread=settings.spread)
    return output


def begin(plan: Plan, settings: Settings) -> Begun:
    """Write all but the tensors' bytes, for whoever brings these."""
    output = open_output(plan.target, settings)
    with committed(output):
        return Begun(output, _slots(plan, plan.tensors, plan.text_origins, output, settings))


def split(plan: Plan, max_shard_size: int | str | None) -> Split:
    """Which tensors go into which of several files, of at most `max_shard_size` each; a note in the plan tells.

    Raises:
        UsageError: Not a size, or the target's name does not allow for shards.
    """
    if max_shard_size is None:
        raise UsageError(
            "an index is written for a checkpoint in several files only",
            path=plan.target,
            hint="--max-shard-size 5GB, or a target without .index.json",
        )
    from convert.sizes import parse_size
    from writers import shards

    largest = parse_size(max_shard_size, "the largest size of a shard")
    found = shards.split(shards.one_file(plan.target), plan.tensors, largest)
    count = len(found.shards)
    what = "everything fits into one file" if count == 1 else f"{count} shards"
    plan.notes.append(f"{what}: {', '.join(found.paths[:2])}{', ...' if count > 2 else ''}")
    return found


def write_split(plan: Plan, found: Split, settings: Settings, own: Collection[str]) -> SetOutput:
    """Write the shards and their index; all are complete but not yet in their places.

    Args:
        plan: What `found` was made of.
        found: From `split`.
        settings: How to write; `overwrite` is what the user said.
        own: Real paths of source files that may be replaced.
    """
    from convert.outputset import MANY_FILES, open_set

    output = open_set(found.paths, found.index, found.stale(), settings, own)
    problems: list[ConvertError] = []
    with committed(output):
        for begin in range(0, len(found.shards), MANY_FILES):
            slots: list[Slot] = []
            for number, tensors in enumerate(found.shards[begin : begin + MANY_FILES], begin):
                # A string that became metadata belongs to one shard; in each, it would come back as often.
                slots += _slots(plan, tensors, {} if number else plan.text_origins, output.add(), settings)
            try:
                fill(slots, settings.jobs, progress=settings.progress)
            except (InputError, PolicyError) as err:
                problems += err.problems
            output.park()
        if problems:
            raise gather(problems)
    return output


def _slots(
    plan: Plan, tensors: list[Tensor], text_origins: Mapping[str, Origin], output: FileOutput, settings: Settings
) -> Iterator[Slot]:
    """Write the header of a file and give the places of its tensors."""
    tensors = sorted(tensors, key=lambda tensor: (_RANK[tensor.dtype.name], tensor.name))
    header, offsets = _header(tensors, _metadata(plan.metadata, tensors, text_origins), settings.align)
    begin = len(header)
    output.reserve(begin + offsets[-1])
    output.write_at(0, header)
    return (Slot(tensor, output, begin + offset) for tensor, offset in zip(tensors, offsets, strict=False))


def _metadata(metadata: dict[str, str], tensors: list[Tensor], text_origins: Mapping[str, Origin]) -> dict[str, str]:
    origins = {tensor.name: tensor.origin for tensor in tensors if tensor.origin is not None}
    origins |= text_origins
    return {**metadata, KEY: dump_origins(origins)} if origins else metadata


def _header(tensors: list[Tensor], metadata: dict[str, str], align: int) -> tuple[bytearray, list[int]]:
    """Length and JSON with padding, and the offsets in the data: begin of each tensor, then the end."""
    header = bytearray(_LENGTH_BYTES)
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
        if len(parts) >= _PARTS:  # as text a large header would be held several times over
            header += f",{','.join(parts)}".encode()
            parts.clear()
    header += f",{','.join(parts)}".encode() if parts else b""
    header += b"}" if len(header) > _LENGTH_BYTES else b"{}"
    header[_LENGTH_BYTES : _LENGTH_BYTES + 1] = b"{"  # where the first comma was
    header += b" " * (-len(header) % max(align, _ALIGNMENT))
    length = len(header) - _LENGTH_BYTES
    if length > _MAX_HEADER_BYTES:
        raise PolicyError(
            f"the header is too long for safetensors (expected at most {_MAX_HEADER_BYTES} bytes, found {length})",
            hint="--exclude or --rename: fewer tensors, or shorter names",
        )
    header[:_LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES, "little")
    return header, offsets
