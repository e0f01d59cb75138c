"""Sizes as people write them."""

from __future__ import annotations

import re

from convert.errors import UsageError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{0,20})?)\s*([A-Z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_size(size: int | str, what: str = "the size") -> int:
    """Bytes from a number, or from text such as '5GB' (decimal) or '5GiB' (binary); `what` it is, for the message.

    Raises:
        UsageError: Neither, or nothing.
    """
    count: int | None = None
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        unit = _UNITS.get(match[2].upper())
        if unit is not None:
            count = int(match[1]) * unit if match[1].isdecimal() else int(float(match[1]) * unit)
    if count is None or count < 1:
        raise UsageError(
            f"{what} must be a number of bytes, at least 1, or text such as 5GB (found {size!r})",
            hint="units are KB, MB, GB, TB (decimal) and KiB, MiB, GiB, TiB (binary)",
        )
    return count
