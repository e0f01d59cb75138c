"""`check`: every rule that files break, found by the checkers that the table of formats names.

What a checker finds no error in must be readable. So the reader has the last word: should it refuse a file after all,
that is an error of its own (FILE-004). A format without a checker is opened and read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice

from convert import api, formats
from convert.errors import ConvertError, InputError, LimitError, UsageError
from convert.files import Source, is_folder, local_path, open_source
from convert.findings import LIMITS, MAX_PER_RULE, Finding, Findings, Rule, apart
from convert.formats import Format
from convert.limits import DEFAULT, Limits
from convert.tensor import Tensor
from convert.transfer import stored_chunks

EMPTY = Rule("FILE-001", "The file is not empty.", "It was created and never written, or the disk was full.")
KNOWN = Rule(
    "FILE-002",
    "The content is that of a known format.",
    "Compressed files, Git LFS pointers, web pages and pickles are told by name. `convert formats` lists the others.",
)
READABLE = Rule(
    "FILE-004",
    "The format's reader takes the file.",
    "The rule that is broken has no id of its own, as in formats that other packages add.",
)
SUFFIX = Rule("FILE-101", "The suffix is that of the content's format.", "Other programs may go by the suffix.")
RULES = (EMPTY, KNOWN, LIMITS, READABLE, SUFFIX)


def check(
    path: str | os.PathLike[str], *, format: str | None = None, data: bool = True, limits: Limits = DEFAULT
) -> list[Finding]:
    """Every rule of its format that a file breaks; damage does not end the search.

    Args:
        path: A file or its URL; an index of shards, which are checked with it; or a folder, whose tensor files are.
        format: Name of the format, where the content shall not decide.
        data: Read checksummed data, pickles and booleans too, not only headers.
        limits: Caps against hostile files.

    Returns:
        In the order found, for each rule and file at most `convert.findings.MAX_PER_RULE`. A file without errors can be
        read; what a policy refuses (an object, a long double) is none.

    Raises:
        InputError: A file cannot be opened, or a folder holds no tensor files.
        UsageError: An unknown format.
    """
    found: dict[Finding, None] = {}
    for file in files_of(path):
        found |= dict.fromkeys(check_file(file, format=format, data=data, limits=limits))
    return list(found)


def files_of(path: str | os.PathLike[str]) -> Iterator[str]:
    """A file itself; of a folder, all files below it with the suffix of a readable format, hidden ones left out.

    Raises:
        InputError: There are none.
    """
    path = local_path(path)
    if not is_folder(path):
        yield path
        return
    suffixes = tuple(suffix for row in formats.all_formats() if row.reader for suffix in row.suffixes)
    count = 0
    for relative, file in api._files_below(path):
        if relative.lower().endswith(suffixes):
            count += 1
            yield os.fspath(file)
    if not count:
        raise InputError("the folder holds no tensor files", path=path, hint="convert formats lists their suffixes")


def check_file(path: str, *, format: str | None, data: bool, limits: Limits) -> list[Finding]:
    """What is wrong with one file."""
    file = open_source(path)
    findings = Findings(path)
    try:
        row, refusal = (formats.by_name(format), None) if format is not None else _detected(file, findings)
        if row is not None:
            _check_as(row, file, findings, data, limits)
        if refusal is not None and not findings.errors:
            findings.refused(KNOWN, refusal, offset=0)
    finally:
        file.close()
    return findings.listed()


def _detected(file: Source, findings: Findings) -> tuple[Format | None, InputError | None]:
    """The format by content, or by suffix if the content is damaged rather than another's; and why it is not known."""
    if file.size == 0:
        findings.add(EMPTY, "the file is empty", offset=0, hint="save, copy or download it again")
        return None, None
    start = file.read(0, min(formats.SNIFF_BYTES, file.size))
    try:
        row, note = formats.detect(file.path, start, file.size)
    except InputError as err:
        named = formats.by_suffix(file.path)
        if named is not None and named.checker and err.message.startswith(f"is no {named.name} file"):
            return named, err
        return None, err
    if note:
        named = formats.by_suffix(file.path)
        said = f"not {named.name} as its suffix says" if named is not None else "not by its suffix"
        findings.add(SUFFIX, f"is {row.name} by its content, {said}", offset=0)
    return row, None


def _check_as(row: Format, file: Source, findings: Findings, data: bool, limits: Limits) -> None:
    checker = row.load_checker()
    refusals = list(islice(_refusals(row, file.path, limits, data and checker is None), MAX_PER_RULE))
    if checker is not None:
        # What exceeds a limit is not read any further than its headers.
        checker.check(file, findings, limits, data and not any(isinstance(err, LimitError) for err in refusals))
    said = {finding.message for finding in findings.listed()}
    for err in refusals:
        rule = LIMITS if isinstance(err, LimitError) else READABLE
        if checker is None or not findings.errors or (rule is LIMITS and apart(err.message)[0] not in said):
            findings.refused(rule, err)


def _refusals(row: Format, path: str, limits: Limits, data: bool) -> Iterator[ConvertError]:
    """What the reader of a format says: of the file, of each tensor, and with `data` of each one's bytes."""
    try:
        checkpoint = api.open(path, format=row.name, limits=limits)
    except UsageError:
        raise
    except ConvertError as err:
        yield from [_bare(problem) for problem in err.problems]
        return
    with checkpoint:
        for tensor in checkpoint.tensors:
            try:
                _read(tensor, data)
            except ConvertError as err:
                yield _bare(err.at(path, tensor.name))


def _bare(err: ConvertError) -> ConvertError:
    """Without its traceback, which would keep in memory all that the reader had at hand."""
    err.__cause__ = err.__context__ = None
    return err.with_traceback(None)


def _read(tensor: Tensor, data: bool) -> None:
    if tensor.problem is not None:
        raise tensor.problem
    if data:
        if tensor.unpickle is not None:
            tensor.unpickle()
        for _ in stored_chunks(tensor.data, 1 << 20):
            pass


def all_rules() -> tuple[Rule, ...]:
    """The rules of all formats by id, those for any file first."""
    found = list(RULES)
    for row in formats.all_formats():
        checker = row.load_checker()
        if checker is not None:
            found += sorted(checker.RULES, key=lambda rule: rule.id)
    return tuple(found)
