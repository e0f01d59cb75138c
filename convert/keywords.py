"""The keyword arguments of `convert_file` and `save`, for type checkers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

from convert.limits import Limits
from convert.plan import Cast
from convert.policy import Policy
from convert.progress import Callback
from convert.writing import Spreading


class Options(TypedDict, total=False):
    """See `convert_file` for what each means; for programs that pass them on: `**options: Unpack[convert.Options]`.

    `spread` is for `convert_folder`, which shares large files among machines.
    """

    to: str | None
    policy: Policy | None
    byteorder: str
    order: str
    include: Iterable[str]
    exclude: Iterable[str]
    rename: Iterable[tuple[str, str]]
    cast: Iterable[tuple[str, str] | Cast]
    cast_overflow: str
    metadata: Mapping[str, str] | None
    compress: int | bool | None
    align: int
    max_shard_size: int | str | None
    overwrite: bool
    verify: bool
    dry_run: bool
    fsync: bool
    jobs: int | None
    progress: Callback | None
    limits: Limits
    spread: Spreading | None
