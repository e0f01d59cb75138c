"""What several commands have in common: options that mean the same everywhere, and the width of what they print."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Annotated, Any

import typer

from convert.cli import complete

EXIT_INTERRUPTED = 130
_TENSORS = "Which tensors"
_UNBOUNDED = 10_000


def _names(flag: str, about: str) -> Any:
    return typer.Option(
        flag, metavar="GLOB", help=about, rich_help_panel=_TENSORS, autocompletion=complete.tensor_names
    )


Include = Annotated[list[str] | None, _names("--include", "Only these tensors; repeatable.")]
Exclude = Annotated[list[str] | None, _names("--exclude", "Not these tensors; repeatable.")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No progress bar.", rich_help_panel="Messages")]


def columns() -> int:
    """Width of the terminal; in a pipe or file as much as it takes, so that every tensor stays on its line."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNBOUNDED
