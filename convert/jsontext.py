"""JSON from files, in memory that the limits bound.

A hundred megabytes of `[],[],...` are thirty million lists, which take gigabytes. So the characters that begin or
part values are counted first, at the speed of memory; those inside of texts are counted too, which the limit leaves
room for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from convert.limits import Limits, exceeded

_PER_TENSOR = 20
"""An entry of a safetensors header has 12, and two for each dimension beyond the second."""
_SLACK = 1_000_000


def parse_json(text: str, what: str, limits: Limits, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value that a JSON text is; `hook` makes its objects from their pairs.

    Raises:
        ValueError: Not JSON, or nested too deeply, or with NaN or Infinity, which JSON has not.
        LimitError: More values than `20 * limits.tensors` and a million.
    """
    allowed = _PER_TENSOR * limits.tensors + _SLACK
    if len(text) > allowed:
        found = sum(map(text.count, ",:[{"))
        if found > allowed:
            needed = -(-(found - _SLACK) // _PER_TENSOR)
            raise exceeded("tensors", f"{what} holds too many values", allowed, found, needed=needed)
    try:
        return json.loads(text, object_pairs_hook=hook, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    except ValueError as err:
        if "set_int_max_str_digits" in str(err):
            raise ValueError("an integer of thousands of digits") from None
        raise


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def kind_of(value: object) -> str:
    """What JSON calls a value that was parsed."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold it; JSON may spell half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
