"""Commands that look and tell: `ls`, `formats`, `policies`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convert.errors import ConvertError, gather, printable, quoted

if TYPE_CHECKING:
    from rich.console import Console

    from convert.tensor import Checkpoint, Tensor

_UNBOUNDED = 10_000
"""Columns."""


def ls(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Files, or folders of .npy files.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object per file, a line each.")] = False,
    **limits: Any,
) -> int:
    """List names, dtypes, shapes, sizes, order and metadata; data is not read."""
    from convert.api import open as open_checkpoint
    from convert.cli.job import error_object, write_json
    from convert.cli.limits import take_limits

    accepted = take_limits(limits)
    problems: list[ConvertError] = []
    for file in files:
        try:
            with open_checkpoint(file, limits=accepted) as checkpoint:
                if json:
                    _write_json(file, checkpoint)
                else:
                    _write_table(file, checkpoint)
        except ConvertError as err:
            problems.append(err)
            if json:
                write_json({"path": file, **error_object(err)})
    if problems:
        raise gather(problems)
    return 0


def _row(tensor: Tensor) -> dict[str, Any]:
    origin = tensor.origin
    row: dict[str, Any] = {
        "name": tensor.name,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "nbytes": tensor.nbytes or tensor.data.nbytes,
        "order": "F" if tensor.stored_fortran else "C",
        "byteorder": "big" if tensor.stored_big else "little",
    }
    if tensor.dtype.fields:
        row["fields"] = [field.name for field in tensor.dtype.fields]
    if origin is not None:
        row["was"] = {"dtype": origin.dtype, "shape": list(origin.shape)}
    if tensor.problem is not None:
        row["problem"] = tensor.problem.message
    return row


def _write_json(file: str, checkpoint: Checkpoint) -> None:
    from convert.cli.job import write_json

    found = {
        "path": file,
        "format": checkpoint.format,
        "metadata": checkpoint.metadata,
        "notes": checkpoint.notes,
        "tensors": [_row(tensor) for tensor in checkpoint.tensors],
    }
    write_json(found)


def _write_table(file: str, checkpoint: Checkpoint) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from convert.cli.job import human

    console = _console()
    table = Table(box=box.SIMPLE, title_justify="left", title=Text(printable(file)), pad_edge=False)
    for title, justify in (
        ("name", "left"),
        ("dtype", "left"),
        ("shape", "left"),
        ("size", "right"),
        ("stored", "left"),
    ):
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    total = 0
    for tensor in checkpoint.tensors:
        row = _row(tensor)
        total += row["nbytes"]
        stored = [
            word for word, said in (("Fortran", tensor.stored_fortran), ("big-endian", tensor.stored_big)) if said
        ]
        if tensor.origin is not None:
            stored.append(f"was {tensor.origin.dtype}")
        if tensor.problem is not None:
            stored.append(tensor.problem.message)
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        cells = (quoted(tensor.name)[1:-1], row["dtype"], shape, human(row["nbytes"]), ", ".join(stored))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)
    count = len(checkpoint.tensors)
    console.print(Text(f"{checkpoint.format}, {count} tensor{'' if count == 1 else 's'}, {human(total)}"))
    for key, text in checkpoint.metadata.items():
        shown = printable(text) if len(text) <= 200 else printable(text[:200]) + f"... ({len(text)} characters)"
        console.print(Text(f"metadata {printable(key)}: {shown}"))
    for note in checkpoint.notes:
        console.print(Text(f"note: {printable(note)}"))


def show_formats(json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> int:
    """List the formats that can be read and written."""
    from convert.formats import all_formats

    rows: list[dict[str, Any]] = [
        {"name": row.name, "suffixes": list(row.suffixes), "read": bool(row.reader), "write": bool(row.writer),
         "about": row.about}
        for row in all_formats()
    ]  # fmt: skip
    if json:
        return _dump(rows)
    cells = [(row["name"], " ".join(row["suffixes"]), "read" * row["read"] + " write" * row["write"], row["about"])
             for row in rows]  # fmt: skip
    return _print_table(("format", "suffix", "can", ""), cells)


def show_policies(json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> int:
    """List the kinds of things that may not map, and what --policy KIND=ACTION does with each."""
    from convert.policy import KINDS, PRESETS

    if json:
        kinds = [{"kind": kind.name, "about": kind.about, "actions": dict(kind.actions)} for kind in KINDS]
        return _dump({"kinds": kinds, "presets": PRESETS})
    cells = []
    for kind in KINDS:
        for index, (action, about) in enumerate(kind.actions.items()):
            default = " (default)" if index == 0 else ""
            cells.append(
                (kind.name if index == 0 else "", action + default, about if index else f"{about} | {kind.about}")
            )
    _print_table(("kind", "action", ""), cells)
    sys.stdout.write("skip works for every kind: the tensor is left out and named in the report.\n")
    sys.stdout.write("A glob narrows a rule: --policy 'opt/*:object=skip'. Later rules win over earlier ones.\n")
    for name, rules in PRESETS.items():
        said = ", ".join(f"{kind}={action}" for kind, action in rules.items()) or "the defaults"
        sys.stdout.write(f"--policy {name}: {said}\n")
    return 0


def _dump(value: object) -> int:
    from convert.cli.job import write_json

    write_json(value, indent=2)
    return 0


def _print_table(titles: tuple[str, ...], rows: list[tuple[Any, ...]]) -> int:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    _console().print(table)
    return 0


def _console() -> Console:
    """As wide as the terminal; in a pipe or file as wide as it takes, so that every name stays on its line."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNBOUNDED)
