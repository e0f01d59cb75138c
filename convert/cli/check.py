"""`convert check FILE...`: every rule that files break."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convert.cli import complete
from convert.errors import ConvertError, UsageError, gather, printable, without_secrets

if TYPE_CHECKING:
    from convert.findings import Finding, Rule

_UNCLEAN = 3


def check(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE...", help="Files, indexes of shards, or folders of them."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document with everything.")] = False,
    headers: Annotated[
        bool, typer.Option("--headers", help="Only headers and directories: no checksums, pickles and booleans.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count: any makes the exit status 3.")] = False,
    source_format: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="Format, where the content shall not decide.",
            autocompletion=complete.formats,
        ),
    ] = "",
    rules: Annotated[bool, typer.Option("--rules", help="List all rules.")] = False,
    explain: Annotated[
        str,
        typer.Option(
            "--explain", metavar="RULE", help="Explain one rule, such as NPZ-002.", autocompletion=complete.rules
        ),
    ] = "",
    **options: Any,
) -> int:
    """Tell every rule that files break, by id and byte; damaged files too. Exit status 0 without errors, else 3."""
    if rules or explain:
        return _show_rules(explain, json)
    if not files:
        raise UsageError("no file was given", hint="convert check FILE..., or convert check --rules")
    from convert.cli.limits import take_limits

    settings = {"format": source_format or None, "data": not headers, "limits": take_limits(options)}
    run = _Run(json)
    for given in files:
        run.check(given, **settings)
    return run.finish(strict)


class _Run:
    """What was found so far. As text it is written at once, as JSON at the end."""

    def __init__(self, json: bool) -> None:
        self._json = json
        self._shown: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._problems: list[ConvertError] = []
        self._told: set[Finding] = set()

    def check(self, given: str, **settings: Any) -> None:
        """A file, or those of a folder; one that cannot be opened stops no other."""
        from convert.checking import check_file, files_of
        from convert.cli.job import error_object

        try:
            for path in files_of(given):
                self._add(without_secrets(path), check_file(path, **settings))
        except UsageError:
            raise
        except ConvertError as err:
            self._problems.append(err)
            self._shown.append({"path": without_secrets(given), **error_object(err)})

    def _add(self, path: str, found: list[Finding]) -> None:
        found = [finding for finding in found if finding not in self._told]  # by the index of a shard
        self._told.update(found)
        for finding in found:
            self._counts[finding.severity] += 1 + finding.more
        self._counts["file"] += 1
        if self._json:
            self._shown.append({"path": path, "findings": [_object(finding) for finding in found]})
        else:
            _write(path, found)

    def finish(self, strict: bool) -> int:
        """Write the totals; the exit status.

        Raises:
            ConvertError: What could not be opened.
        """
        from convert.cli.job import write_json

        counts = self._counts
        unclean = bool(counts["error"] or (strict and counts["warning"]))
        if self._json:
            totals = {"files_checked": counts["file"], "errors": counts["error"], "warnings": counts["warning"]}
            write_json({"files": self._shown, **totals, "clean": not (unclean or self._problems)}, indent=2)
        elif counts["file"]:
            _write_totals(counts)
        if self._problems:
            raise gather(self._problems)
        return _UNCLEAN if unclean else 0


def _object(finding: Finding) -> dict[str, Any]:
    return {key: value for key, value in finding.to_dict().items() if key != "more" or value}


def _write(path: str, found: list[Finding]) -> None:
    """A line for each finding; a shard's with its own path."""
    if not found:
        sys.stdout.write(f"{printable(path)}: clean\n")
        return
    sys.stdout.write(f"{printable(path)}\n")
    hints: set[str] = set()
    for finding in found:
        where = "" if finding.path == path else f"{printable(finding.path)}: "
        sys.stdout.write(f"  {finding.severity:7} {finding.rule:8} {where}{finding.text()}\n")
        if finding.more:
            sys.stdout.write(f"  {'':7} {finding.rule:8} ... and {finding.more} more\n")
        if finding.hint is not None and finding.hint not in hints:
            hints.add(finding.hint)
            sys.stdout.write(f"  {'':16} hint: {printable(finding.hint)}\n")


def _write_totals(counts: Counter[str]) -> None:
    said = (f"{counts[what]} {what}{'' if counts[what] == 1 else 's'}" for what in ("file", "error", "warning"))
    sys.stdout.write(", ".join(said) + "\n")
    if counts["error"] or counts["warning"]:
        sys.stdout.write("convert check --explain RULE tells what a rule is about.\n")


def _show_rules(explain: str, json: bool) -> int:
    from convert.checking import all_rules
    from convert.cli.job import write_json

    rules = all_rules()
    if explain:
        prefix, _, number = explain.upper().rpartition("-")
        rules = tuple(rule for rule in rules if rule.id == f"{prefix}-{number:0>3}")
        if not rules:
            raise UsageError(f"there is no rule {explain!r}", hint="convert check --rules lists them")
    if json:
        write_json([_rule(rule) for rule in rules], indent=2)
        return 0
    for rule in rules:
        sys.stdout.write(f"{rule.id:9} {rule.severity:7} {rule.title}\n")
        if explain:
            sys.stdout.write(f"\n{rule.about}\n")
    return 0


def _rule(rule: Rule) -> dict[str, str]:
    return {"id": rule.id, "severity": rule.severity, "title": rule.title, "about": rule.about}
