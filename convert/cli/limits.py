"""The limits as options, for every command that reads files."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from convert.errors import UsageError
from convert.limits import DEFAULT, SETTINGS, Limits

_PANEL = "Limits against hostile files"


def with_limits(command: Callable[..., int]) -> Callable[..., int]:
    """A command whose `**options` are the limits, with each spelled out as typer wants it."""
    own = inspect.signature(command, eval_str=True)
    kept = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    command.__signature__ = own.replace(parameters=[*kept, *_parameters()])  # type: ignore[attr-defined]
    return command


def _parameters() -> list[inspect.Parameter]:
    found = []
    for name, setting in SETTINGS.items():
        default = getattr(DEFAULT, name)
        shown = _short(default) if setting.unit == "SIZE" else str(default)
        option = typer.Option(
            setting.option,
            metavar=setting.unit,
            help=f"{setting.about} Default: {shown}.",
            rich_help_panel=_PANEL,
        )
        found.append(
            inspect.Parameter(
                f"limit_{name}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
            )
        )
    return found


def _short(size: int) -> str:
    """As it could be typed."""
    if size >= DEFAULT.total_bytes:
        return "no limit"
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("MB", 10**6), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def take_limits(options: dict[str, Any]) -> Limits:
    """The limits that were given among a command's options, which are taken out; the others are the defaults.

    Raises:
        UsageError: A value that is none.
    """
    given: dict[str, int] = {}
    for name, setting in SETTINGS.items():
        text = options.pop(f"limit_{name}", None)
        if text is None:
            continue
        if setting.unit == "SIZE":
            from convert.sizes import parse_size

            given[name] = parse_size(text, setting.option)
        elif text.isascii() and text.isdecimal() and len(text) <= 18 and int(text) >= 1:
            given[name] = int(text)
        else:
            raise UsageError(f"{setting.option} must be a whole number from 1 on (found {text!r})")
    return Limits(**given) if given else DEFAULT
