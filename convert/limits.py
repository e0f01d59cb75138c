"""Caps that guard against hostile or damaged files, all in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader accepts before it refuses with `LimitError`.

    Attributes:
        header_bytes: Longest header of one array, and of a structured dtype in it.
        json_bytes: Longest safetensors header; 100 MB as the reference library has it.
        directory_bytes: Longest central directory of an archive.
        pickle_bytes: Longest pickle that `object=unpickle` reads; it is held in memory.
        pickle_leaves: Most arrays, numbers and strings in one pickle.
        text_bytes: Longest 0-d string that `str=metadata` moves into the metadata.
    """

    header_bytes: int = 4 << 20
    json_bytes: int = 100_000_000
    directory_bytes: int = 1 << 30
    pickle_bytes: int = 1 << 30
    pickle_leaves: int = 200_000
    text_bytes: int = 1 << 20


DEFAULT = Limits()
