"""Sizes, shapes and numbers for people."""

from __future__ import annotations

from collections.abc import Sequence


def human(count: int) -> str:
    """Bytes for people."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024 or unit == "TiB":
            break
    return f"{size:.1f} {unit}"


def shape_text(shape: Sequence[int]) -> str:
    """`2 x 3`."""
    return " x ".join(map(str, shape)) or "scalar"


def number(value: float | None) -> str:
    """An integer as it is, a float to four digits, nothing for None."""
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"


def counted(count: int, word: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
