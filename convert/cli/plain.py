"""Plain words for plain options, so that a start does not wait for a validation library.

Typer (0.29) checks every value with a pydantic adapter of its own; importing and building them takes longer than
converting a small file. Texts, lists of texts, whole numbers and flags need none of that. The place where Typer keeps
its adapter is not public: where it is not found, nothing is changed and Typer does what it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args, get_origin

import typer


class _Plain:
    """What stands in for Typer's adapter of one parameter."""

    def __init__(self, annotation: Any) -> None:
        self._kind = annotation

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if self._kind is int:
            try:
                return int(value)
            except ValueError:
                raise typer.BadParameter(f"{value!r} is not a whole number", ctx=ctx, param=param) from None
        return list(value) if get_origin(self._kind) is list else value


def show_plainly(params: Iterable[Any]) -> None:
    """Leave Python's types out of the help: a flag is no `<bool>`, a path no `<str>`."""
    for param in params:
        if param.metavar is None or param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: ""


def coerce_plainly(params: Iterable[Any]) -> None:
    """Spare the parameters of a command their adapters where their types are plain."""
    for param in params:
        descriptor = getattr(param, "type_descriptor", None)
        if descriptor is None or getattr(param, "_runtime_param", descriptor) is not None:
            continue
        annotation = getattr(descriptor, "annotation", None)
        if annotation in (bool, int, str) or (get_origin(annotation) is list and get_args(annotation) == (str,)):
            param._runtime_param = _Plain(annotation)
