"""What can follow as one types: formats, policies, dtypes, rules, and the names of the source's tensors.

Typer writes the scripts for bash, zsh and fish, and asks here. Two things are not its own:

- A shell evaluates what it is offered (zsh's script does so literally), and names come from files of strangers. So only
  names of letters, digits and `_ . / + -` are offered.
- bash takes `=` and `:` for ends of words: it asks about what follows the last of them, and inserts only that.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from typing import Any

import typer

_HARMLESS = re.compile(r"[A-Za-z0-9_./+-]+", re.ASCII)
_BREAKS = "=:"
WORDS = "convert.words"
"""Where a context keeps what was typed."""
_READ_BYTES, _TENSORS = 16 << 20, 50_000
"""Of a header, and names, that are read while somebody waits for an answer to a key."""


def formats() -> list[str]:
    """What can follow `--from` and `--to`."""
    from convert.formats import all_formats

    return [row.name for row in all_formats()]


def policies(incomplete: str = "") -> list[str]:
    """What can follow `--policy`; a glob that is there already stays."""
    from convert.policy import KINDS, PRESETS, actions_of

    glob, colon, _ = incomplete.rpartition(":")
    rules = [f"{glob}{colon}{kind.name}={action}" for kind in KINDS for action in actions_of(kind.name)]
    return rules if colon else [*PRESETS, *rules]


def casts(incomplete: str) -> list[str]:
    """What can follow `--cast`: first the dtype there is, then the one to come."""
    from convert.dtypes import BY_NAME

    left, equals, _ = incomplete.rpartition("=")
    glob, colon, _ = incomplete.rpartition(":")
    if not equals:
        return [f"{glob}{colon}{name}=" for name in BY_NAME]
    return [f"{left}={name}" for name, dtype in BY_NAME.items() if dtype.kind != "subbyte"]


def rules() -> list[str]:
    """What can follow `check --explain`."""
    from convert.checking import all_rules

    return [rule.id for rule in all_rules()]


def tensor_names(ctx: typer.Context) -> list[str]:
    """Names in the source that was typed before, for globs; none where it cannot be read at once."""
    words: list[str] = ctx.meta.get(WORDS, [])  # parameters are not there yet: the option at the end lacks its value
    source = next((word for word in words if not word.startswith("-") and os.path.exists(word)), None)
    if source is None:
        return []
    import convert

    limits = convert.Limits(
        json_bytes=_READ_BYTES, directory_bytes=_READ_BYTES, header_bytes=_READ_BYTES, tensors=_TENSORS
    )
    try:
        with convert.open(source, limits=limits) as checkpoint:
            return [name for name in checkpoint if _HARMLESS.fullmatch(name)]
    except (convert.ConvertError, OSError):
        return []  # there is no place for a message between two keys


def answered(complete: Callable[[], Any]) -> Any:
    """Run the program, and where it is asked by a shell, make question and answer what they should be."""
    asked = os.environ.get("_CONVERT_COMPLETE")
    if asked is None:
        return complete()
    os.environ["COLUMNS"] = "10000"  # a help text that is folded would be two answers
    if asked == "complete_bash" and "COMP_WORDS" in os.environ:
        return _with_breaks_of_bash(complete)
    return complete()


def _with_breaks_of_bash(complete: Callable[[], Any]) -> Any:
    """Put the words together that bash broke, and take off what it has already."""
    given = os.environ["COMP_WORDS"]
    words = given.split("\n" if "\n" in given else " ")
    kept, current = _joined(words, int(os.environ["COMP_CWORD"]))
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(kept), str(current)
    typed = kept[current] if current < len(kept) else ""
    value = typed.partition("=")[2] if typed.startswith("--") else typed
    there = 1 + max(value.rfind(mark) for mark in _BREAKS)
    answer = io.StringIO()
    try:
        with redirect_stdout(answer):
            return complete()
    finally:
        sys.stdout.write("".join(line[there:] for line in answer.getvalue().splitlines(keepends=True)))


def _joined(words: Iterable[str], current: int) -> tuple[list[str], int]:
    """Words without breaks at `=` and `:`, and where the one at `current` went; later ones do not matter."""
    kept: list[str] = []
    follows = False
    for word in list(words)[: current + 1]:
        is_break = word != "" and not word.strip(_BREAKS)
        if kept and (is_break or (follows and word)):
            kept[-1] += word
        else:
            kept.append(word)
        follows = is_break
    return kept, len(kept) - 1
