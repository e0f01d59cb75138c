"""Every refusal of the toolkit, as exceptions that say what to do next.

ConvertError
├── UsageError          exit 2: the call itself is wrong
├── InputError          exit 3: bad or unreadable input
│   ├── CorruptError        the bytes break a rule of their format
│   ├── UnsupportedError    valid, but nothing this toolkit carries
│   └── LimitError          larger or deeper than a limit allows
├── PolicyError         exit 4: it does not map, and the policy says no
└── OutputError         exit 5: the target could not be written
    └── TargetExistsError   it is there already
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

_SHOWN_CHARACTERS = 160
_PASSWORD = re.compile(r"(://[^/@\s:]*):[^/@\s]*@")
_TOKEN_FOR_NAME = re.compile(r"(https?://)[^/@\s:]+@", re.IGNORECASE)
_SIGNATURE = re.compile(r"([?&][^=&\s]*(?:sig|token|secret|password|key|credential)[^=&\s]*=)[^&\s'\"]+", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """The text with what gives access left out of its URLs: passwords, tokens, signatures."""
    if "://" not in text:
        return text
    text = _TOKEN_FOR_NAME.sub(r"\1***@", _PASSWORD.sub(r"\1:***@", text))
    return _SIGNATURE.sub(r"\1***", text)


def printable(text: object) -> str:
    """Text made safe for a terminal or a log: control, format and bidi characters are escaped."""
    shown = without_secrets(str(text))
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


def quoted(name: str) -> str:
    """A tensor's name between quotes, escaped, and shortened in the middle when very long."""
    if len(name) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        return f"{name[:half]!r}...{name[-half:]!r} ({len(name)} characters)"
    return repr(name)


class ConvertError(Exception):
    """Something was refused; nothing was written.

    Attributes:
        message: What is wrong, expected and found, without path, tensor or hint.
        path: The file it is about, or None.
        tensor: The tensor (or archive member) it is about, or None.
        hint: An option, command or check that helps, or None.
        problems: All problems when several were found together, else just this one.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        path: object = None,
        tensor: str | None = None,
        hint: str | None = None,
        problems: Iterable[ConvertError] = (),
    ) -> None:
        message = without_secrets(message)
        super().__init__(message)
        self.message = message
        self.path = None if path is None else without_secrets(str(path))
        self.tensor = tensor
        self.hint = None if hint is None else without_secrets(hint)
        self._problems = tuple(problems)

    @property
    def problems(self) -> tuple[ConvertError, ...]:
        return self._problems or (self,)

    def at(self, path: object = None, tensor: str | None = None) -> ConvertError:
        """This error with path and tensor filled in where they were not known."""
        if self.path is None and path is not None:
            self.path = without_secrets(str(path))
        if self.tensor is None:
            self.tensor = tensor
        return self

    def __str__(self) -> str:
        if self._problems:
            return "\n".join(str(problem) for problem in self._problems)
        where = "" if self.path is None else f"{printable(self.path)}: "
        if self.tensor is not None:
            where += f"tensor {quoted(self.tensor)}: "
        text = where + printable(self.message)
        return text if self.hint is None else f"{text}\nhint: {printable(self.hint)}"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments would be lost on the way back from a worker process.
        return (_rebuild, (type(self), self.message, self.path, self.tensor, self.hint, self._problems))


def _rebuild(
    kind: type[ConvertError],
    message: str,
    path: str | None,
    tensor: str | None,
    hint: str | None,
    problems: tuple[ConvertError, ...],
) -> ConvertError:
    return kind(message, path=path, tensor=tensor, hint=hint, problems=problems)


class UsageError(ConvertError):
    """The call itself is wrong: an unknown format, policy or option value."""

    exit_code = 2


class InputError(ConvertError):
    """The source cannot be read."""

    exit_code = 3


class CorruptError(InputError):
    """The bytes break a rule of their format."""


class UnsupportedError(InputError):
    """Valid, but not something this toolkit carries."""


class LimitError(InputError):
    """Larger, longer or deeper than a limit allows."""


class PolicyError(ConvertError):
    """The target cannot hold it exactly, and the policy does not say how to change it."""

    exit_code = 4


class OutputError(ConvertError):
    """The target could not be written; what was there before is untouched."""

    exit_code = 5


class TargetExistsError(OutputError):
    """The target is there already and overwriting was not asked for."""


def gather(problems: list[ConvertError]) -> ConvertError:
    """One error for a list of problems: itself if single, else of the kind found first by gravity.

    Gravity: output, input, usage, policy; an unreadable source outweighs a policy that said no.
    """
    flat = [p for problem in problems for p in problem.problems]
    if len(flat) == 1:
        return flat[0]
    for kind in (OutputError, InputError, UsageError, PolicyError):
        found = {type(p) for p in flat if isinstance(p, kind)}
        if found:  # what one problem would raise, several of its type raise too
            return (found.pop() if len(found) == 1 else kind)(f"{len(flat)} problems", problems=flat)
    return ConvertError(f"{len(flat)} problems", problems=flat)
