"""What is wrong with a file, as data: rules, and findings that name the rule, the place, what was expected and found.

A checker is a module named in the table of formats, with `RULES` and `check(file, findings, limits, data)`. It adds
what it finds and goes on, so that one damaged byte does not hide the rest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from convert.errors import ConvertError, CorruptError, LimitError, UnsupportedError, printable, quoted, without_secrets

Severity = Literal["error", "warning"]
MAX_PER_RULE = 20
"""Findings of one rule that are listed for one file; further ones are counted."""


@dataclass(frozen=True)
class Rule:
    """What must hold.

    Attributes:
        id: Format and number; those from 101 are warnings.
        title: The rule itself, a sentence.
        about: Why, and what to do when it is broken.
    """

    id: str
    title: str
    about: str

    @property
    def severity(self) -> Severity:
        """An error makes the file unreadable here; a warning is legal, but other programs may differ."""
        return "warning" if self.id.rpartition("-")[2] > "100" else "error"


LIMITS = Rule(
    "FILE-003",
    "The file stays within the limits.",
    "Limits guard against files that claim what they cannot hold. If you trust the file, raise the limit that the "
    "message names.",
)
"""For whatever is longer, larger or deeper than `convert.limits.Limits` allow, in any format."""


@dataclass(frozen=True)
class Finding:
    """One place where a rule is broken.

    Attributes:
        rule: Its id.
        severity: 'error' or 'warning'.
        path: The file; a shard's, for what is found in a shard of an index.
        message: What is wrong, without place, expected and found.
        tensor: The tensor or archive member, or None for the file as a whole.
        offset: Byte of the file; of the member after inflating if `inside`. None where there is no one place.
        inside: Whether `offset` counts in the inflated member.
        expected: What should be there, where one thing should.
        found: What is.
        hint: What helps.
        more: Further findings of this rule in the file that are not listed; only at the last that is.
    """

    rule: str
    severity: Severity
    path: str
    message: str
    tensor: str | None = None
    offset: int | None = None
    inside: bool = False
    expected: str | None = None
    found: str | None = None
    hint: str | None = None
    more: int = 0

    def text(self) -> str:
        """One line without path and rule: `tensor 'NAME': what is wrong (expected X, found Y at byte N)`."""
        where = "" if self.tensor is None else f"tensor {quoted(self.tensor)}: "
        facts = [f"{word} {value}" for word, value in (("expected", self.expected), ("found", self.found)) if value]
        place = ""
        if self.offset is not None:
            place = f"at byte {self.offset}" + (" of the inflated member" if self.inside else "")
        facts_and_place = " ".join(part for part in (", ".join(facts), place) if part)
        return printable(where + self.message + (f" ({facts_and_place})" if facts_and_place else ""))

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.text()} [{self.rule}]"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Part(NamedTuple):
    """What positions are relative to: a file, a stored member at an offset, or an inflated one."""

    tensor: str | None = None
    base: int = 0
    inside: bool = False

    def at(self, position: int) -> dict[str, Any]:
        """Keywords for `Findings.add`."""
        return {"tensor": self.tensor, "offset": self.base + position, "inside": self.inside}


class Findings:
    """Collects the findings in one file; memory is bounded by `MAX_PER_RULE`.

    Attributes:
        path: The file.
        counts: How many for each rule, listed or not.
        errors: How many of them are errors.
    """

    def __init__(self, path: str) -> None:
        self.path = without_secrets(path)
        self.counts: Counter[str] = Counter()
        self.errors = 0
        self._listed: list[Finding] = []

    def add(self, rule: Rule, message: str, **facts: Any) -> None:
        """Note that a rule is broken; `facts` are attributes of `Finding`."""
        self.counts[rule.id] += 1
        self.errors += rule.severity == "error"
        if self.counts[rule.id] <= MAX_PER_RULE:
            self._listed.append(Finding(rule.id, rule.severity, self.path, message, **facts))

    def refused(self, rule: Rule, err: ConvertError, **facts: Any) -> None:
        """Note what a reader refused; expected, found and place are taken from its message where not given."""
        for problem in err.problems:
            message, said = apart(problem.message)
            known = {"tensor": problem.tensor, "hint": problem.hint, **said}
            known |= {name: value for name, value in facts.items() if value is not None}
            if known["tensor"] is not None:
                message = message.removeprefix(f"member {quoted(known['tensor'])}: ")
            self.add(rule, message, **known)

    @contextmanager
    def catching(
        self, rule: Rule, *, unsupported: Rule | None = None, limit: Rule | None = None, **facts: Any
    ) -> Iterator[None]:
        """Note what is refused inside, under the rule for its kind; that a file cannot be read at all goes through."""
        try:
            yield
        except UnsupportedError as err:
            self.refused(unsupported or rule, err, **facts)
        except LimitError as err:
            self.refused(limit or rule, err, **facts)
        except CorruptError as err:
            self.refused(rule, err, **facts)

    @contextmanager
    def about(self, path: str) -> Iterator[None]:
        """Inside, what is added is about another file, such as a shard."""
        before, self.path = self.path, without_secrets(path)
        try:
            yield
        finally:
            self.path = before

    def without_place(self) -> set[str]:
        """Names of the tensors of this file with a finding that has no place."""
        here = (finding for finding in self._listed if finding.path == self.path and finding.offset is None)
        return {finding.tensor for finding in here if finding.tensor is not None}

    def place(self, places: dict[str, int]) -> None:
        """Give the findings about the tensors of this file that have no place that of their tensor."""
        for index, finding in enumerate(self._listed):
            if finding.path == self.path and finding.offset is None and finding.tensor in places:
                self._listed[index] = replace(finding, offset=places[finding.tensor])

    def listed(self) -> list[Finding]:
        """What was found, in that order; the last of a rule says how many more there are."""
        found = list(self._listed)
        last = {finding.rule: index for index, finding in enumerate(found)}
        for rule, index in last.items():
            if self.counts[rule] > MAX_PER_RULE:
                found[index] = replace(found[index], more=self.counts[rule] - MAX_PER_RULE)
        return found


_FACTS = re.compile(r"\((?=expected |found )")
_TOKENS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[()]""")
"""Texts between quotes, so that no parenthesis in them counts, and parentheses."""
_PLACE = re.compile(r" ?at (?:byte|character) ([0-9]+)$")


def apart(message: str) -> tuple[str, dict[str, Any]]:
    """A refusal's message and the facts in its parenthesis, which all of them have in one form."""
    start = _FACTS.search(message)
    if start is None:
        return message, {}
    depth = 0
    for token in _TOKENS.finditer(message, start.start()):
        depth += (token[0] == "(") - (token[0] == ")")
        if depth == 0:
            break
    else:
        return message, {}
    facts = message[start.end() : token.start()]
    said: dict[str, Any] = {}
    if place := _PLACE.search(facts):
        facts = facts[: place.start()]
        if "byte" in place[0]:
            said["offset"] = int(place[1])
    expected, _, found = facts.partition(", found ")
    if expected.startswith("found "):
        expected, found = "", facts.removeprefix("found ")
    said["expected"] = expected.removeprefix("expected ") or None
    said["found"] = found or None
    return message[: start.start()].rstrip() + message[token.end() :], said
