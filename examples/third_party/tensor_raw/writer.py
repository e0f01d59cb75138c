"""Says what the format can hold, and writes it to a file that has no name yet."""

import json

from convert.errors import PolicyError
from convert.output import committed, open_output
from convert.transfer import Slot, fill
from tensor_raw.reader import LONGEST


def holds(tensor):
    """Whether a tensor fits as it is; else the user's policy decides what becomes of it."""
    return tensor.dtype.kind == "plain"


def remembers(metadata, encoded):
    """Whether there is room for metadata, and for how encoded tensors were before."""
    return not metadata and not encoded


def check(plan):
    """All problems that can be known before a byte is written."""
    if len(plan.tensors) != 1:
        hint = "--include NAME chooses one"
        return [PolicyError(f"raw holds one tensor (found {len(plan.tensors)})", path=plan.target, hint=hint)]
    if len(_header(plan.tensors[0])) > LONGEST:
        return [PolicyError("the header would be too long", path=plan.target, hint="--rename gives a shorter name")]
    return []


def write(plan, settings):
    """The output, complete but still without its name: the caller verifies it and commits."""
    tensor = plan.tensors[0]
    head = _header(tensor)
    output = open_output(plan.target, settings)  # a remote one is written from the first to the last byte
    with committed(output):  # discarded on any way out but success
        output.write_at(0, head)
        fill([Slot(tensor, output, len(head))], settings.jobs, progress=settings.progress)
    return output


def _header(tensor):
    fields = {"name": tensor.name, "dtype": tensor.dtype.name, "shape": list(tensor.shape)}
    return b"RAW1" + json.dumps(fields).encode() + b"\n"
