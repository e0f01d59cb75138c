"""How to write, apart from what."""

from __future__ import annotations

from dataclasses import dataclass

from convert.progress import Progress


@dataclass(frozen=True)
class Settings:
    """For writers.

    Attributes:
        overwrite: Replace an existing target.
        level: Deflate level 1 to 9 for npz, or None to store.
        align: Data begins at a multiple of this many bytes; 1 for the format's own choice.
        jobs: Threads.
        fsync: Force the bytes to the disk before the target gets its name.
        progress: Counts bytes written.
    """

    overwrite: bool = False
    level: int | None = None
    align: int = 1
    jobs: int = 1
    fsync: bool = False
    progress: Progress | None = None
