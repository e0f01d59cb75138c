"""Reads headers only, and gives tensors that know where their bytes are."""

import json
import math

from convert.dtypes import BY_NAME
from convert.errors import CorruptError, UnsupportedError
from convert.files import open_source
from convert.tensor import Checkpoint, Extent, Tensor

LONGEST = 4096


def open(path, limits):
    """The checkpoint that a file is; it is closed by whoever asked for it.

    Raises:
        CorruptError: The bytes break a rule of the format.
        UnsupportedError: A dtype that convert does not carry.
    """
    file = open_source(path)  # a file of this machine or a URL
    try:
        return Checkpoint(str(path), "raw", [_tensor(file)], files=[file])
    except BaseException:
        file.close()
        raise


def _tensor(file):
    start = file.read(0, min(file.size, LONGEST))
    end = start.find(b"\n")
    if end < 0:
        raise CorruptError(f"the header does not end (expected a line feed within {LONGEST} bytes)", path=file.path)
    try:
        head = json.loads(start[4:end])
        name, dtype, shape = head["name"], head["dtype"], tuple(head["shape"])
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise CorruptError("the header is no object with name, dtype and shape", path=file.path) from err
    sizes_are_good = all(type(size) is int and size >= 0 for size in shape)
    if not isinstance(name, str) or not isinstance(dtype, str) or len(shape) > 64 or not sizes_are_good:
        raise CorruptError("the header has a name, a dtype or a shape that is none", path=file.path)
    if dtype not in BY_NAME or BY_NAME[dtype].kind != "plain":
        raise UnsupportedError(f"dtype {dtype!r}", path=file.path, tensor=name)
    found, expected = file.size - end - 1, BY_NAME[dtype].nbytes(math.prod(shape))
    if expected != found:  # a header is not believed about sizes
        raise CorruptError(f"wrong size (expected {expected} bytes, found {found})", path=file.path, tensor=name)
    return Tensor(name, BY_NAME[dtype], shape, Extent(file, end + 1, found))
