"""`convert diff A B`: the same tensors? Which differ, and by how much."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convert.cli import complete, job
from convert.cli.shared import Exclude, Include, NoProgress, columns
from convert.errors import ConvertError, UsageError, printable, quoted
from convert.shown import human

if TYPE_CHECKING:
    from convert.cli.table import Entry
    from convert.comparison import Comparison, Difference, Facts

EXIT_DIFFERENT = 6
_WHAT, _ALIKE, _SHOW = "Which tensors", "What counts as the same", "Messages"
_SHOWN = 50
_SHOWN_CHARACTERS = 60


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A file, a folder or an index of shards.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, of any format; relative errors are relative to it.")],
    rtol: Annotated[
        str | None,
        typer.Option(
            "--rtol",
            metavar="X",
            rich_help_panel=_ALIKE,
            help="Numbers may differ by X times that in B; 0: values count, not bits.",
        ),
    ] = None,
    atol: Annotated[
        str | None,
        typer.Option("--atol", metavar="X", help="Numbers may differ by X; adds to --rtol.", rich_help_panel=_ALIKE),
    ] = None,
    ignore_dtype: Annotated[
        bool,
        typer.Option("--ignore-dtype", help="Numbers of different types may be the same.", rich_help_panel=_ALIKE),
    ] = False,
    metadata: Annotated[
        bool,
        typer.Option("--metadata", help="Metadata counts too; else it is only reported.", rich_help_panel=_ALIKE),
    ] = False,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="[GLOB:]KIND=ACTION",
            rich_help_panel=_ALIKE,
            autocompletion=complete.policies,
            help="Do this to both sides first: what was given to the conversion that made B.",
        ),
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename", metavar="REGEX=REPLACEMENT", help="Rename in A before comparing.", rich_help_panel=_WHAT
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", help="Threads; default: the cores there are.", rich_help_panel=_SHOW),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Everything as JSON.", rich_help_panel=_SHOW)] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the exit status.", rich_help_panel=_SHOW)] = False,
    no_progress: NoProgress = False,
    **limits: Any,
) -> int:
    """Compare two checkpoints tensor by tensor. Exit status 0 if they are the same, 6 if not."""
    from convert.cli.limits import take_limits
    from convert.compare import diff as compare
    from convert.settings import find_settings

    try:
        settings = find_settings()
        with job.progress_bar(quiet or no_progress) as progress:
            found = compare(
                a,
                b,
                rtol=_number("--rtol", rtol),
                atol=_number("--atol", atol),
                ignore_dtype=ignore_dtype,
                metadata=metadata,
                include=include or (),
                exclude=exclude or (),
                rename=[job.pair("--rename", text, "REGEX=REPLACEMENT") for text in rename or ()],
                policy=settings.policy(policy or ()),
                limits=take_limits(limits),
                jobs=jobs,
                progress=progress,
            )
    except ConvertError as err:
        if json:
            job.write_json(job.error_object(err))
        raise
    found.notes[:0] = settings.notes()
    if json:
        job.write_json(found.to_dict())
    elif not quiet:
        _tell(found)
    return 0 if found.same else EXIT_DIFFERENT


def _number(option: str, text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise UsageError(f"{option} takes a number, 1e-5 for one (found {text!r})") from None


def _tell(found: Comparison) -> None:
    """Differences and a summary on stdout, notes on stderr."""
    lines: list[str] = []
    if found.differences:
        lines += [f"A: {printable(found.a)}", f"B: {printable(found.b)}", *_table(found.differences[:_SHOWN])]
        if len(found.differences) > _SHOWN:
            lines.append(f"... and {len(found.differences) - _SHOWN} more; --json lists them all")
    for row in found.metadata[:_SHOWN]:
        text = f"metadata {quoted(row.key)}: {_said(row.a)} in A, {_said(row.b)} in B"
        lines.append(text + ("" if row.counts else " (does not count without --metadata)"))
    if len(found.metadata) > _SHOWN:
        lines.append(f"... and {len(found.metadata) - _SHOWN} more keys of metadata; --json lists them all")
    lines.append(_summary(found))
    sys.stderr.write("".join(f"note: {printable(note)}\n" for note in found.notes))
    sys.stdout.write("\n".join(lines) + "\n")


def _said(text: str | None) -> str:
    if text is None:
        return "none"
    return quoted(_cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _table(differences: list[Difference]) -> list[str]:
    from convert.cli.table import Column, laid_out

    shown = [Column("tensor"), Column("differs in"), Column("elements", right=True)]
    return list(laid_out(shown, lambda: map(_entry, differences), columns()))


def _entry(difference: Difference) -> Entry:
    from convert.cli.table import Entry

    tally = difference.tally
    name = quoted(difference.name)[1:-1]
    if tally is None:
        return Entry((name, _what(difference), ""))
    count = f"{tally.beyond or tally.values or tally.bits or 0} of {difference.count}"
    numbers = (("max abs", tally.max_abs_error), ("max rel", tally.max_rel_error), ("ULPs", tally.max_ulps))
    details = [f"{title} {_short(value)}" for title, value in numbers if value is not None]
    if tally.nans:
        details.append(f"NaN on one side {tally.nans}")
    first = difference.first()
    if first is not None:
        at = f" at {list(first)}" if first else ""
        details.append(printable(f"first{at}: {tally.first_a} | {tally.first_b}"))
    return Entry((name, _what(difference), count), [details] if details else [])


def _what(difference: Difference) -> str:
    """In words, with both types and shapes where they differ."""
    a, b = difference.a, difference.b
    if a is None or b is None:
        return printable(f"{difference.what[0]}: {_facts(a or b)}")
    words = {
        "dtype": f"dtype {_cut(a.dtype)} | {_cut(b.dtype)}",
        "shape": f"shape {_shape(a)} | {_shape(b)}",
        "renamed": f"name, {quoted(difference.other_name or '')} in B",
        "bits": "bits, not values",
    }
    return printable(", ".join(words.get(word, word) for word in difference.what))


def _facts(facts: Facts | None) -> str:
    return "" if facts is None else f"{_cut(facts.dtype)} {_shape(facts)}"


def _shape(facts: Facts) -> str:
    return "x".join(map(str, facts.shape)) or "scalar"


def _short(value: float | int) -> str:
    """Four digits, or a small integer as it is."""
    return str(value) if isinstance(value, int) and value < 10**9 else f"{value:.4g}"


def _summary(found: Comparison) -> str:
    paired = found.identical + len(found.tolerated)
    size = human(found.nbytes)
    if found.same:
        tolerated = f", {len(found.tolerated)} of them not bit for bit{_worst(found)}" if found.tolerated else ""
        return f"same: {paired} tensor{'' if paired == 1 else 's'}, {size}{tolerated}"
    counts: dict[str, int] = {}
    for difference in found.differences:
        key = difference.what[0] if difference.what[0] in ("only in A", "only in B", "renamed") else "not equal"
        counts[key] = counts.get(key, 0) + 1
    said = [f"{counts[key]} {key}" for key in ("not equal", "only in A", "only in B", "renamed") if key in counts]
    said += ["metadata"] if any(row.counts for row in found.metadata) else []
    said += [f"{found.identical} identical"]
    said += [f"{len(found.tolerated)} tolerated{_worst(found)}"] if found.tolerated else []
    return f"different: {', '.join(said)}"


def _worst(found: Comparison) -> str:
    """The largest errors among what is tolerated."""
    tallies = [difference.tally for difference in found.tolerated if difference.tally is not None]
    errors = [tally.max_abs_error for tally in tallies if tally.max_abs_error is not None]
    relative = [tally.max_rel_error for tally in tallies if tally.max_rel_error is not None]
    if not errors or not relative:
        return ""
    return f" (max abs {_short(max(errors))}, max rel {_short(max(relative))})"
