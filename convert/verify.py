"""`--verify`: what was written is read back before it gets its name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from convert.errors import ConvertError, CorruptError, gather
from convert.formats import Format
from convert.output import Output
from convert.outputfolder import OutputFolder
from convert.plan import Plan
from convert.records import ordered_fields
from convert.report import Written
from convert.tensor import Checkpoint, Tensor


def verified(plan: Plan, output: Output, row: Format, open_checkpoint: Callable[..., Checkpoint]) -> list[Written]:
    """Read the output back through its reader; every digest must be that of the planned bytes.

    Raises:
        CorruptError: Something reads back different; it must not be kept.
    """
    with open_checkpoint(output.readable(), format=None if isinstance(output, OutputFolder) else row.name) as back:
        alone = len(plan.tensors) == 1 and len(back) == 1  # a .npy file has its name from its path
        found: list[Written] = []
        problems: list[ConvertError] = []
        for tensor in plan.tensors:
            other = back.tensors[0] if alone else back.get(tensor.name)
            plain = tensor.changed(big=False, fortran=False)
            if plain.stored.fields and plain.dtype.fields:
                plain = ordered_fields(plain)
            facts = (tensor.dtype.name, tensor.shape, _digest(plain))
            there = None if other is None else (other.dtype.name, other.shape, _digest(other))
            if facts != there:
                problems.append(
                    CorruptError(
                        f"the target reads back different (expected {facts}, found {there})",
                        path=plan.target,
                        tensor=tensor.name,
                        hint="the disk or memory may be faulty; this was not kept",
                    )
                )
            found.append(Written(tensor.name, tensor.dtype.name, tensor.shape, tensor.nbytes, facts[2]))
        # A string that went into the metadata reads back as the tensor it was.
        texts = sum(name in plan.text_origins for name in back)
        if len(back) - texts != len(plan.tensors) and not problems:
            problems.append(CorruptError("the target reads back with other tensors", path=plan.target))
        if problems:
            raise gather(problems)
        return found


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for chunk in tensor.chunks():
        digest.update(chunk)
    return digest.hexdigest()
