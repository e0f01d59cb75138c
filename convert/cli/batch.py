"""`convert batch SRC_DIR DST_DIR --to FORMAT`: a tree of files."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from convert.cli import job
from convert.cli.shared import EXIT_INTERRUPTED
from convert.errors import ConvertError, TargetExistsError, UsageError, printable
from convert.shown import human

if TYPE_CHECKING:
    from convert.batchjob import FileReport
    from convert.batchrun import BatchReport
    from convert.progress import Callback
    from convert.settings import Settings

_FILES, _RESUME = "Which files", "Care"
_NOT_SHARED = ("paths", "source_format", "to", "include", "exclude", "fsync")
"""Options of the main job that batch has not, or has with another meaning; it takes all others over."""
_SHOWN = 50


_Src = Annotated[str, typer.Argument(metavar="SRC_DIR", help="Folder of the sources.")]
_Dst = Annotated[str, typer.Argument(metavar="DST_DIR", help="Folder of the targets.")]
_To = Annotated[str, typer.Option("--to", metavar="FORMAT", help="Format of the targets.", rich_help_panel="Formats")]
_Include = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Take only these paths, names or folders.", rich_help_panel=_FILES),
]
_Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="GLOB", help="Leave these out; repeatable.", rich_help_panel=_FILES),
]
_CopyOthers = Annotated[
    bool, typer.Option("--copy-others", help="Copy the other files, config.json ...", rich_help_panel=_FILES)
]
_DeleteSource = Annotated[
    bool,
    typer.Option(
        "--delete-source", help="Remove each source once its target was read back and compared.", rich_help_panel=_FILES
    ),
]
_Checksum = Annotated[
    bool,
    typer.Option(
        "--checksum", help="Tell by SHA-256, not by size and time, what is finished.", rich_help_panel=_RESUME
    ),
]
_FailFast = Annotated[
    bool, typer.Option("--fail-fast", help="Start nothing after the first failure.", rich_help_panel=_RESUME)
]
_NoSpaceCheck = Annotated[
    bool, typer.Option("--no-space-check", help="Do not ask for free space first.", rich_help_panel=_RESUME)
]
_NoFsync = Annotated[
    bool, typer.Option("--no-fsync", help="Do not wait until the disk has it.", rich_help_panel=_RESUME)
]
_Scheduler = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="ADDRESS",
        help="Let the workers of a dask cluster do it: tcp://HOST:8786. All need both folders under the same paths.",
        rich_help_panel="Where",
    ),
]
_Html = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE", help="Write the report as a page too.", rich_help_panel="Messages"),
]


def run(
    src: _Src,
    dst: _Dst,
    to: _To,
    include: _Include = None,
    exclude: _Exclude = None,
    copy_others: _CopyOthers = False,
    delete_source: _DeleteSource = False,
    checksum: _Checksum = False,
    fail_fast: _FailFast = False,
    no_space_check: _NoSpaceCheck = False,
    no_fsync: _NoFsync = False,
    scheduler: _Scheduler = None,
    html: _Html = None,
    **shared: Any,
) -> int:
    """Convert every file below a folder; run it again to resume."""
    own = {
        "to": to, "include": include or (), "exclude": exclude or (), "copy_others": copy_others,
        "delete_source": delete_source, "checksum": checksum, "fail_fast": fail_fast,
        "space_check": not no_space_check, "fsync": not no_fsync, "executor": scheduler,
    }  # fmt: skip
    if html is not None and shared["dry_run"]:
        raise UsageError("--html is the report of a run", hint="leave out --dry-run")
    with _Page(html) as page:
        return _run(src, dst, own, shared, page)


class _Page:
    """The report as a page, if one is wanted. Its file is begun first, so that it is known that it can be written."""

    def __init__(self, target: str | None) -> None:
        self._output = self._page = None
        if target is not None:
            from convert.batchhtml import BatchPage, is_report
            from convert.output import OutputFile

            self._page = BatchPage()
            try:
                self._output = OutputFile(target, overwrite=is_report(target))  # of an earlier run of this command
            except TargetExistsError as err:
                hint = "give another name; only the report of a batch is replaced"
                raise TargetExistsError("the target is no report of a batch", path=err.path, hint=hint) from err

    def file(self, report: FileReport) -> None:
        """A file has ended."""
        if self._page is not None:
            self._page.add(report)

    def finish(self, report: BatchReport) -> None:
        """All files have."""
        if self._page is not None and self._output is not None:
            self._page.write(self._output, report)
            self._output.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._output is not None:
            self._output.discard()  # which does nothing to what is finished


def _run(src: str, dst: str, own: dict[str, Any], shared: dict[str, Any], page: _Page) -> int:
    """Do it, and say what there is to say."""
    from convert.batch import convert_folder
    from convert.settings import find_settings

    shown = {name: shared.pop(name) for name in ("dry_run", "json", "quiet", "no_progress")}
    watcher = _Watcher(page, json=shown["json"])
    if own["executor"] is not None:
        gc.enable()  # a client of a cluster does make cycles
    try:
        settings = find_settings()
        with job.progress_bar(shown["quiet"] or shown["no_progress"] or shown["dry_run"]) as bar:
            report = convert_folder(
                src,
                dst,
                dry_run=shown["dry_run"],
                progress=watcher.on(bar),
                on_file=watcher.file,
                **own,
                **_options(shared, settings),
            )
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; {watcher.done} done, the same command goes on from there\n")
        return EXIT_INTERRUPTED
    except ConvertError as err:
        if shown["json"]:
            job.write_json(job.error_object(err))
        raise
    report.notes[:0] = settings.notes()
    _tell(report, json=shown["json"], quiet=shown["quiet"], shown_before=watcher.told)
    page.finish(report)
    return report.exit_status


def _signature() -> inspect.Signature:
    """Our own options, then those of the main job that mean the same here."""
    own = inspect.signature(run, eval_str=True).parameters
    theirs = inspect.signature(job.run, eval_str=True).parameters
    shared = [parameter for name, parameter in theirs.items() if name not in _NOT_SHARED]
    kept = [parameter for parameter in own.values() if parameter.kind is not parameter.VAR_KEYWORD]
    return inspect.Signature([*kept, *shared], return_annotation=int)


def command() -> Callable[..., int]:
    """`run` with all its options spelled out, as typer wants them."""
    run.__signature__ = _signature()  # type: ignore[attr-defined]
    return run


def _options(shared: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Options of the main job as the library takes them; those that were not given keep its defaults."""
    from convert.cli.limits import take_limits

    given = {name: value for name, value in shared.items() if value is not None}
    given["limits"] = take_limits(given)
    given["policy"] = settings.policy(given.get("policy", ()))
    given["rename"] = [job.pair("--rename", text, "REGEX=REPLACEMENT") for text in given.get("rename", ())]
    given["cast"] = [job.parse_cast(text) for text in given.get("cast", ())]
    given["metadata"] = dict(job.pair("--metadata", text, "KEY=VALUE") for text in given.get("metadata", ()))
    return given


class _Watcher:
    """Says what happens while it happens: lines of JSON, failures, and the figures beside the bar."""

    def __init__(self, page: _Page, *, json: bool) -> None:
        self._page = page
        self.done = self.failed = 0
        self.told = False
        self._json = json

    def on(self, bar: Callback | None) -> Callback | None:
        """The bar of the whole batch, with counts and the files in flight in the place of a tensor's name."""
        if bar is None:
            return None
        return lambda done, total, names: bar(done, total, f"{self.done} done, {self.failed} failed; {names[-40:]}")

    def file(self, report: FileReport) -> None:
        """A file has ended."""
        self._page.file(report)
        if report.status == "failed":
            self.failed += 1
        elif report.status == "done":
            self.done += 1
        if self._json:
            job.write_json(report.to_dict())
            sys.stdout.flush()
        if report.status == "failed" and not sys.stderr.isatty():
            self.told = True
            sys.stderr.write(_failure(report) + "\n")


def _failure(report: FileReport) -> str:
    return "\n".join(problem["text"] for problem in report.problems)


def _tell(report: BatchReport, *, json: bool, quiet: bool, shown_before: bool) -> None:
    """What is said at the end."""
    if json:
        if report.dry_run:
            for item in report.plan:
                job.write_json({"source": item.source, "target": item.target, "copied": item.copy,
                                "source_bytes": item.stamp.size})  # fmt: skip
        job.write_json({"summary": report.to_dict()})
    elif report.dry_run:
        for item in report.plan:
            sys.stdout.write(
                f"{printable(item.source)} -> {printable(item.target)}  {human(item.stamp.size)}"
                f"{'  copy' if item.copy else ''}\n"
            )
    lines = []
    if report.failures and not shown_before:
        lines += [_failure(failed) for failed in report.failures[:_SHOWN]]
    if len(report.failures) > 1 and not report.dry_run:
        lines += _table(report)
    if not quiet:
        lines += [f"note: {note}" for note in report.notes]
        lines.append(_summary(report))
    if lines:
        sys.stderr.write("\n".join(lines) + "\n")


def _table(report: BatchReport) -> list[str]:
    """The files that failed, a line each."""
    rows = [(failed.exit_status, failed.source, failed.problems[0]) for failed in report.failures[:_SHOWN]]
    lines = ["", "failed  exit  file"]
    lines += [f"{problem['kind']}  {status}  {printable(source)}" for status, source, problem in rows]
    if len(report.failures) > _SHOWN:
        lines.append(f"... and {len(report.failures) - _SHOWN} more, in {printable(report.report_path)}")
    return [*lines, ""]


def _summary(report: BatchReport) -> str:
    if report.dry_run:
        free = "" if report.free_bytes is None else f", {human(report.free_bytes)} free"
        room = f"{human(report.plan_bytes)} to read{free}"
        return f"would write {len(report.plan)} files to {printable(report.dst)}: {room}"
    counts = [f"{report.done} done ({human(report.target_bytes)})"]
    counts += [f"{report.skipped} finished before"] if report.skipped else []
    counts += [f"{report.failed} failed"] if report.failed else []
    counts += [f"{report.stopped} not tried"] if report.stopped else []
    counts += [f"{report.deleted} sources removed"] if report.deleted else []
    where = f"; report: {printable(report.report_path)}"
    return f"{printable(report.dst)}: {', '.join(counts)} in {report.seconds:.1f} s{where}"
