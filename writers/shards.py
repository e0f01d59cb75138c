"""How a checkpoint is split into several safetensors files, and the index that tells which tensor is in which.

Tensors are taken in order: each goes into the current shard unless it would make it larger than the limit; then the
next one begins. A tensor larger than the limit gets a shard of its own, before the current one. Sizes are those of the
data, without headers. `model.safetensors` becomes `model-00001-of-00002.safetensors` and so on, with
`model.safetensors.index.json` beside them; what fits into one shard stays `model.safetensors`, without an index.

Source: huggingface_hub/serialization/_base.py, version 2.4, for the split and the names; modeling_utils.py of
transformers, version 5.24, for the text of the index (keys sorted, a newline at the end).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convert.errors import UsageError
from convert.files import beside, names_beside

if TYPE_CHECKING:
    from convert.tensor import Tensor

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"


@dataclass(frozen=True)
class Split:
    """Which tensors go where.

    Attributes:
        target: The path that one file would have.
        shards: The tensors of each file, at least one file.
    """

    target: str
    shards: list[list[Tensor]]

    @property
    def paths(self) -> list[str]:
        """Of the files, in their order."""
        count = len(self.shards)
        if count == 1:
            return [self.target]
        stem, suffix = self.target[: -len(SUFFIX)], self.target[-len(SUFFIX) :]
        return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]

    @property
    def index(self) -> tuple[str, bytes] | None:
        """Path and content of the index, or None for a single file."""
        if len(self.shards) == 1:
            return None
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for shard in self.shards for tensor in shard)},
            "weight_map": {
                tensor.name: os.path.basename(path)
                for path, shard in zip(self.paths, self.shards, strict=True)
                for tensor in shard
            },
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        return self.target + INDEX_SUFFIX, text.encode()

    def stale(self) -> list[str]:
        """Files of the same name that would contradict these: another index, the one file, other numbers of shards.

        What programs look at first comes first.
        """
        name = os.path.basename(self.target)
        suffix = name[-len(SUFFIX) :]
        shard = re.compile(re.escape(name[: -len(SUFFIX)]) + r"-[0-9]{5,}-of-[0-9]{5,}" + re.escape(suffix))
        new = set(self.paths)
        old = [beside(self.target, file) for file in names_beside(self.target) if shard.fullmatch(file)]
        found = [self.target] if len(self.shards) > 1 else [self.target + INDEX_SUFFIX]
        return [path for path in (*found, *old) if path not in new and not os.path.isdir(path)]


def one_file(target: str) -> str:
    """The path that one file would have, from that of the index or the file itself.

    Raises:
        UsageError: Neither.
    """
    path = target[: -len(INDEX_SUFFIX)] if target.lower().endswith(SUFFIX + INDEX_SUFFIX) else target
    if not path.lower().endswith(SUFFIX):
        raise UsageError(
            f"shards are named after the target, which must end in {SUFFIX}", path=target, hint=f"try {target}{SUFFIX}"
        )
    return path


def split(target: str, tensors: Iterable[Tensor], max_bytes: int) -> Split:
    """Shards of at most `max_bytes` of data, where no tensor alone is larger."""
    shards: list[list[Tensor]] = []
    current: list[Tensor] = []
    current_bytes = 0
    for tensor in tensors:
        nbytes = tensor.nbytes
        if nbytes > max_bytes:
            shards.append([tensor])
            continue
        if current_bytes + nbytes > max_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(tensor)
        current_bytes += nbytes
    if current or not shards:
        shards.append(current)
    return Split(target, shards)
