"""The main job: `convert SOURCE... TARGET`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convert.cli import complete
from convert.cli.shared import Exclude, Include, NoProgress
from convert.errors import ConvertError, InputError, UsageError, printable, quoted
from convert.shown import human

if TYPE_CHECKING:
    from convert.plan import Cast
    from convert.progress import Callback
    from convert.report import Report

_FORMAT, _WHAT, _LOSS, _OUTPUT, _SHOW = "Formats", "Which tensors", "What does not map", "Output", "Messages"
COMMANDS = ("batch", "check", "diff", "formats", "ls", "policies")
"""All the others, for those who misspell one."""


def run(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... TARGET",
            help="One file, several, a folder of .npy files, or an index of shards; last the target.",
        ),
    ],
    source_format: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="Format of the source; default: by content.",
            rich_help_panel=_FORMAT,
            autocompletion=complete.formats,
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="Format of the target; default: by suffix.",
            rich_help_panel=_FORMAT,
            autocompletion=complete.formats,
        ),
    ] = None,
    compress: Annotated[
        int | None,
        typer.Option(
            "--compress",
            metavar="[LEVEL]",
            rich_help_panel=_FORMAT,
            help="Deflate a npz, level 1 to 9; default without a level: 6. 7 to 9 are smaller and much slower.",
        ),
    ] = None,
    byteorder: Annotated[
        str,
        typer.Option(
            "--byteorder",
            metavar="little|big|native|keep",
            help="Of npy and npz targets.",
            rich_help_panel=_FORMAT,
            autocompletion=lambda: ["little", "big", "native", "keep"],
        ),
    ] = "little",
    order: Annotated[
        str,
        typer.Option(
            "--order",
            metavar="C|keep",
            help="keep: Fortran order stays, in npy and npz targets.",
            rich_help_panel=_FORMAT,
            autocompletion=lambda: ["C", "keep"],
        ),
    ] = "C",
    align: Annotated[
        int,
        typer.Option(
            "--align",
            metavar="N",
            rich_help_panel=_FORMAT,
            help="Data of a safetensors file, and of each stored npz member, begins at a multiple of N bytes.",
        ),
    ] = 1,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            rich_help_panel=_FORMAT,
            help="Split a safetensors target into files of at most this size, 5GB or 500MiB for two, with an index.",
        ),
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename", metavar="REGEX=REPLACEMENT", help="Change names; repeatable, in turn.", rich_help_panel=_WHAT
        ),
    ] = None,
    cast: Annotated[
        list[str] | None,
        typer.Option(
            "--cast",
            metavar="[GLOB:]FROM=TO",
            rich_help_panel=_WHAT,
            autocompletion=complete.casts,
            help="Change a dtype, float32=bfloat16 for one; to nearest even. Repeatable.",
        ),
    ] = None,
    cast_overflow: Annotated[
        str,
        typer.Option(
            "--cast-overflow",
            metavar="error|inf",
            rich_help_panel=_WHAT,
            help="What finite values too large for the new dtype become.",
            autocompletion=lambda: ["error", "inf"],
        ),
    ] = "error",
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--metadata", metavar="KEY=VALUE", help="Add to the metadata, format=pt for one.", rich_help_panel=_WHAT
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="[GLOB:]KIND=ACTION",
            rich_help_panel=_LOSS,
            autocompletion=complete.policies,
            help="What becomes of what the target cannot hold; or strict, lossless, lossy. convert policies lists all.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing target.", rich_help_panel=_OUTPUT)
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read the target back and compare all digests.", rich_help_panel=_OUTPUT),
    ] = False,
    fsync: Annotated[
        bool, typer.Option("--fsync", help="Wait until the disk has it.", rich_help_panel=_OUTPUT)
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done.", rich_help_panel=_OUTPUT)
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", help="Threads; default: the cores there are.", rich_help_panel=_OUTPUT),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Report as JSON on stdout.", rich_help_panel=_SHOW)] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only errors.", rich_help_panel=_SHOW)] = False,
    no_progress: NoProgress = False,
    **limits: Any,
) -> int:
    """Convert tensor files: npy, npz and safetensors, each into each; exact or refused."""
    from convert.api import convert_file
    from convert.cli.limits import take_limits
    from convert.settings import find_settings

    try:
        if len(paths) < 2:
            raise UsageError(
                f"a source and a target are needed (found {printable(paths[0])} alone)",
                hint=f"convert {printable(paths[0])} out.safetensors; convert ls {printable(paths[0])} looks inside",
            )
        settings = find_settings()
        with progress_bar(quiet or no_progress or dry_run) as progress:
            report = convert_file(
                paths[:-1],
                paths[-1],
                format=source_format,
                to=to,
                compress=compress,
                byteorder=byteorder,
                order=order,
                align=align,
                max_shard_size=max_shard_size,
                include=include or (),
                exclude=exclude or (),
                rename=[pair("--rename", text, "REGEX=REPLACEMENT") for text in rename or ()],
                cast=[parse_cast(text) for text in cast or ()],
                cast_overflow=cast_overflow,
                metadata=dict(pair("--metadata", text, "KEY=VALUE") for text in metadata or ()),
                policy=settings.policy(policy or ()),
                overwrite=overwrite,
                verify=verify,
                fsync=fsync,
                dry_run=dry_run,
                jobs=jobs,
                progress=progress,
                limits=take_limits(limits),
            )
    except ConvertError as err:
        _meant_a_command(err, paths[0])
        if json:
            write_json(error_object(err))
        raise
    report.notes[:0] = settings.notes()
    if json:
        write_json(report.to_dict())
    elif dry_run:
        _print_plan(report)
    if not quiet:
        _summarise(report)
    return 0


def _meant_a_command(err: ConvertError, first: str) -> None:
    """Where the first word is no file but almost a command, say so."""
    import difflib

    close = difflib.get_close_matches(first, COMMANDS, 1, 0.7) if first.isalpha() else []
    if close and isinstance(err, (InputError, UsageError)) and not os.path.lexists(first):
        err.hint = f"did you mean convert {close[0]}? convert --help lists all commands"


def pair(option: str, text: str, form: str) -> tuple[str, str]:
    """Both sides of the first `=` in an option's value; UsageError names the form it should have."""
    left, equals, right = text.partition("=")
    if not equals or not left:
        raise UsageError(f"{option} takes {form} (found {text!r})")
    return left, right


def parse_cast(text: str) -> Cast:
    """A `--cast` value: `[GLOB:]FROM=TO`."""
    from convert.plan import Cast

    left, target = pair("--cast", text, "FROM=TO")
    glob, colon, source = left.rpartition(":")
    return Cast(glob if colon else "*", source, target)


def error_object(err: ConvertError) -> dict[str, Any]:
    """A refusal for JSON."""
    problems = [
        {"kind": type(problem).__name__, "path": problem.path, "tensor": problem.tensor, "message": problem.message,
         "hint": problem.hint}
        for problem in err.problems
    ]  # fmt: skip
    return {"error": {"exit_status": err.exit_code, "problems": problems}}


def write_json(value: object, indent: int | None = None) -> None:
    """JSON to stdout; what a terminal could take for a command, or its encoding lacks, is escaped.

    A value of a dictionary may be an iterator: it becomes a list, of which only one item is in memory at a time.
    """
    if isinstance(value, dict) and any(isinstance(part, Iterator) for part in value.values()):
        between = "{"
        for key, part in value.items():
            sys.stdout.write(f"{between}{_json(key)}: ")
            between = ", "
            if isinstance(part, Iterator):
                sys.stdout.write("[")
                for index, item in enumerate(part):
                    sys.stdout.write(", " * (index > 0) + _json(item))
                sys.stdout.write("]")
            else:
                sys.stdout.write(_json(part))
        sys.stdout.write("}\n")
    else:
        sys.stdout.write(_json(value, indent) + "\n")


def _json(value: object, indent: int | None = None) -> str:
    import json
    import re

    text = json.dumps(value, ensure_ascii=False, indent=indent)
    if not text.isprintable():
        text = re.sub(r"[^\n -~]", lambda found: found[0] if found[0].isprintable() else _escaped(found[0]), text)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


def _escaped(character: str) -> str:
    code = ord(character)
    if code >= 1 << 16:
        high, low = divmod(code - (1 << 16), 1 << 10)
        return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
    return f"\\u{code:04x}"


def progress_bar(off: bool) -> AbstractContextManager[Callback | None]:
    """A bar on stderr, or nothing where it is no terminal or not wanted."""
    if off or not sys.stderr.isatty():
        return nullcontext(None)
    return _Bar()


class _Bar(AbstractContextManager["Callback | None"]):
    """A progress bar that appears only when the work takes longer than about a second."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar: tqdm[Any] = tqdm(
            unit="B", unit_scale=True, unit_divisor=1024, delay=1.0, leave=False, dynamic_ncols=True, file=sys.stderr
        )

    def __enter__(self) -> Callback:
        return self._show

    def _show(self, done: int, total: int, name: str) -> None:
        bar = self._bar
        bar.total = total
        bar.set_postfix_str(printable(name)[-60:], refresh=False)
        bar.update(done - bar.n)

    def __exit__(self, *_: object) -> None:
        self._bar.close()


_SHOWN = 20


def _print_plan(report: Report) -> None:
    changed = {change.name: f"  ({change.source_dtype}: {change.how})" for change in report.changes}
    for tensor in report.tensors:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        line = f"{quoted(tensor.name)}  {tensor.dtype}  {shape}  {human(tensor.nbytes)}{changed.get(tensor.name, '')}"
        sys.stdout.write(line + "\n")
    for skip in report.skipped:
        sys.stdout.write(f"{quoted(skip.name)}  left out ({skip.reason})\n")


def _summarise(report: Report) -> None:
    lines = []
    for change in report.changes[:_SHOWN]:
        name = (
            quoted(change.source)
            if change.source == change.name
            else f"{quoted(change.source)} -> {quoted(change.name)}"
        )
        lines.append(f"note: {name}: {change.source_dtype} -> {change.dtype} ({change.how})")
    if len(report.changes) > _SHOWN:
        lines.append(f"note: {len(report.changes) - _SHOWN} more tensors changed; --json lists them all")
    for skip in report.skipped[:_SHOWN]:
        lines.append(f"note: {quoted(skip.name)}: left out ({skip.reason})")
    if len(report.skipped) > _SHOWN:
        lines.append(f"note: {len(report.skipped) - _SHOWN} more left out; --json lists them all")
    lines += [f"note: {printable(note)}" for note in report.notes]
    count, nbytes = len(report.tensors), sum(tensor.nbytes for tensor in report.tensors)
    tensors = f"{count} tensor{'' if count == 1 else 's'}, {human(nbytes)}"
    if report.dry_run:
        lines.append(f"would write {printable(report.target)}: {tensors}")
    else:
        verified = ", verified" if report.verified else ""
        lines.append(
            f"{printable(report.target)}: {tensors} in {human(report.target_bytes)}, {report.seconds:.2f} s{verified}"
        )
    sys.stderr.write("\n".join(lines) + "\n")
