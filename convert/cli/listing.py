"""Commands that look and tell: `ls`, `formats`, `policies`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convert.cli import complete
from convert.cli.shared import Exclude, Include, NoProgress, columns
from convert.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

_WHAT, _HOW = "What is shown", "How"


def ls(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Files, indexes of shards, folders; each checkpoint in a folder."),
    ],
    sort: Annotated[
        str,
        typer.Option(
            "--sort",
            metavar="file|name|size|dtype",
            help="Order; the largest first by size.",
            autocompletion=lambda: ["file", "name", "size", "dtype"],
            rich_help_panel=_WHAT,
        ),
    ] = "file",
    tree: Annotated[
        bool,
        typer.Option(
            "--tree", help="Fold names at dots and slashes, with subtotals; equal layers once.", rich_help_panel=_WHAT
        ),
    ] = False,
    depth: Annotated[
        int | None,
        typer.Option("--depth", metavar="N", help="Levels of the tree; implies --tree.", rich_help_panel=_WHAT),
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Read all data once: range, mean, deviation, zeros, NaNs, histogram.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="Write a page instead, to look at or print.", rich_help_panel=_HOW),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing page.", rich_help_panel=_HOW)
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object per file, a line each.", rich_help_panel=_HOW)
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", metavar="N", help="Threads for --stats; default: the cores there are.", rich_help_panel=_HOW
        ),
    ] = None,
    no_progress: NoProgress = False,
    **limits: Any,
) -> int:
    """List names, dtypes, shapes, sizes, order, compression and metadata; data is read for --stats only."""
    from convert.cli.limits import take_limits
    from convert.cli.ls import Wanted, list_files

    wanted = Wanted(
        sort, tree, depth, include or (), exclude or (), stats, html, overwrite, json, jobs, no_progress,
        take_limits(limits),
    )  # fmt: skip
    return list_files(files, wanted)


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


def show_policies(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="[GLOB:]KIND=ACTION",
            help="Show what would be in force with this; repeatable.",
            autocompletion=complete.policies,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """List the kinds of things that may not map, what --policy KIND=ACTION does, and what is in force here."""
    from convert.policy import KINDS, PRESETS
    from convert.settings import effective, find_settings

    settings = find_settings()
    rows = effective(settings, policy or ())
    if json:
        kinds = [{"kind": kind.name, "about": kind.about, "actions": dict(kind.actions)} for kind in KINDS]
        in_force = [{"kind": row.kind, "glob": row.glob, "action": row.action, "from": row.origin} for row in rows]
        return _dump({"kinds": kinds, "presets": PRESETS, "settings": settings.path, "effective": in_force})
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
    if all(row.origin == "default" for row in rows):
        sys.stdout.write(
            "In force here: the defaults; no convert.toml, nor [tool.convert] in pyproject.toml, speaks.\n"
        )
        return 0
    sys.stdout.write("In force here, the first that matches a name:\n")
    return _print_table(
        ("kind", "action", "for", "from"),
        [(row.kind, row.action, "all" if row.glob == "*" else row.glob, row.origin) for row in rows],
    )


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
    from rich.console import Console

    return Console(width=columns())
