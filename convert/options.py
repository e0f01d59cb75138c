"""The options of a conversion, checked: what is wrong with the call itself is known before any file is looked at."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping

from convert.codec import DEFAULT_LEVEL
from convert.dtypes import BY_NAME
from convert.errors import UsageError
from convert.formats import Format
from convert.limits import DEFAULT, Limits
from convert.plan import Cast, Wishes
from convert.policy import Policy
from convert.threads import MAX_JOBS


def level(compress: int | bool | None, row: Format) -> int | None:
    """The deflate level, or None to store."""
    if compress is None or compress is False:
        return None
    if not row.compresses:
        raise UsageError(f"{row.name} cannot be compressed", hint="leave out --compress, or --to npz")
    chosen = DEFAULT_LEVEL if compress is True else compress
    if not 1 <= chosen <= 9:
        raise UsageError(f"the compression level must be from 1 to 9 (found {chosen})")
    return chosen


def check_jobs(jobs: int | None) -> None:
    """Threads within what `MAX_JOBS` allows."""
    if jobs is not None and not 1 <= jobs <= MAX_JOBS:
        raise UsageError(f"jobs must be from 1 to {MAX_JOBS} (found {jobs})")


def check_align(align: int, row: Format) -> None:
    """A power of two that every format with an alignment can give."""
    largest = 1 << 15  # npz pads in an extra field, whose length takes two bytes
    if align < 1 or align > largest or align & (align - 1):
        raise UsageError(f"the alignment must be a power of two from 1 to {largest} (found {align})")
    if align > 1 and not row.aligns:
        raise UsageError(f"{row.name} has an alignment of its own", hint="leave out --align")


def wishes(
    row: Format,
    *,
    policy: Policy | None = None,
    byteorder: str = "little",
    order: str = "C",
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    rename: Iterable[tuple[str, str]] = (),
    cast: Iterable[tuple[str, str] | Cast] = (),
    cast_overflow: str = "error",
    metadata: Mapping[str, str] | None = None,
    limits: Limits = DEFAULT,
) -> Wishes:
    """What the caller asked for, checked; see `convert.convert_file` for the arguments.

    Raises:
        UsageError: A value that is none, or that the target's format has no use for.
    """
    one_of("byteorder", byteorder, ("little", "big", "native", "keep"))
    one_of("order", order, ("C", "keep"))
    one_of("cast_overflow", cast_overflow, ("error", "inf"))
    byteorder = sys.byteorder if byteorder == "native" else byteorder
    if not row.orders and (byteorder == "big" or order != "C"):
        raise UsageError(
            f"{row.name} is always little-endian and row-major", hint="leave out --byteorder and --order, or --to npz"
        )
    for key, text in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise UsageError(f"metadata must be texts (found {key!r}: {text!r})")
    return Wishes(
        policy or Policy(),
        byteorder if row.orders else "little",
        order,
        tuple(include),
        tuple(exclude),
        tuple(_pattern(*pair) for pair in rename),
        tuple(_cast(item) for item in cast),
        cast_overflow == "inf",
        dict(metadata or {}),
        limits,
    )


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """UsageError, with the nearest of the allowed words, unless the value is one of them."""
    if value not in allowed:
        close = difflib.get_close_matches(str(value).lower(), [word.lower() for word in allowed], 1)
        near = next(word for word in allowed if word.lower() == close[0]) if close else None
        hint = f"did you mean {near}?" if near else None
        raise UsageError(f"{name} must be one of {', '.join(allowed)} (found {value!r})", hint=hint)


def _pattern(pattern: str, replacement: str) -> tuple[re.Pattern[str], str]:
    try:
        compiled = re.compile(pattern)
        compiled.sub(replacement, "")
    except (re.error, IndexError) as err:
        raise UsageError(f"invalid rename {pattern!r}={replacement!r}: {err}") from err
    return compiled, replacement


def _cast(item: tuple[str, str] | Cast) -> Cast:
    cast = item if isinstance(item, Cast) else Cast("*", *item)
    for name in (cast.source, cast.target):
        if name not in BY_NAME:
            close = difflib.get_close_matches(name.lower(), BY_NAME, 1)
            raise UsageError(
                f"unknown dtype {name!r} (expected one of {', '.join(BY_NAME)})",
                hint=f"did you mean {close[0]}?" if close else None,
            )
    if BY_NAME[cast.target].kind == "subbyte":
        raise UsageError(f"there is no cast to {cast.target}")
    return cast
