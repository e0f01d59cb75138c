"""Settings of a project: policies for every run in its folder, said once in a file.

`convert.toml`, or the table `[tool.convert]` of `pyproject.toml`, holds what would be typed as `--policy`, in order:

    policy = ["lossless", "opt/*:object=skip"]

The nearest file counts alone, looked for from the current folder upwards; options are read after it and so win over
it. Only the command line asks for settings: a library does what its caller says.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from convert.errors import UsageError
from convert.policy import BY_KIND, Policy, Rule

FILES = ("convert.toml", "pyproject.toml")
_KEYS = ("policy",)
_LONGEST_BYTES = 1 << 20
_FORM = 'policy = ["datetime64=int64", "opt/*:object=skip"], as they are given to --policy'


@dataclass(frozen=True)
class Settings:
    """What a project's file says.

    Attributes:
        path: The file, or None where there is none.
        policies: As they would be given to `--policy`; they are known to be right.
    """

    path: str | None = None
    policies: tuple[str, ...] = field(default=())

    def policy(self, options: Iterable[str]) -> Policy:
        """The settings, then the options, which win over them."""
        return Policy.parse([*self.policies, *options])

    def notes(self) -> list[str]:
        """What a report says of them."""
        return [f"the policies of {self.path} apply"] if self.policies else []


class Effective(NamedTuple):
    """An action in force, and who said so: 'default', a path, or an option."""

    kind: str
    glob: str
    action: str
    origin: str


def find_settings(folder: str | None = None) -> Settings:
    """The settings for a folder, the current one if none is given.

    Folders that everybody may write to and delete from only what is theirs (such as /tmp) are not looked into:
    whatever lies there may be a stranger's.

    Raises:
        UsageError: The file is no TOML, or says what is not known; never ignored.
    """
    for where in _upwards(folder or os.getcwd()):
        for name in FILES:
            path = os.path.join(where, name)
            if os.path.isfile(path):
                found = _read(path, name)
                if found is not None:
                    return found
    return Settings()


def _upwards(folder: str) -> Iterator[str]:
    """The folder and those above it, shared ones left out."""
    where = os.path.abspath(folder)
    while True:
        try:
            mode = os.stat(where).st_mode
        except OSError:
            mode = 0
        if not (mode & stat.S_ISVTX and mode & stat.S_IWOTH):
            yield where
        above = os.path.dirname(where)
        if above == where:
            return
        where = above


def _read(path: str, name: str) -> Settings | None:
    """The file's settings, or None for a pyproject.toml that is not about us."""
    try:
        with open(path, "rb") as file:
            data = file.read(_LONGEST_BYTES + 1)
    except OSError as err:
        raise UsageError(f"the settings cannot be read: {err.strerror}", path=path) from err
    if name == "pyproject.toml" and b"convert" not in data:
        return None  # and no TOML library is loaded for it
    if len(data) > _LONGEST_BYTES:
        raise UsageError(f"the settings are too long (expected at most {_LONGEST_BYTES} bytes)", path=path)
    import tomllib

    try:
        table: Any = tomllib.loads(data.decode("utf-8"))
    except ValueError as err:  # of either of the two
        raise UsageError(f"is no TOML: {err}", path=path, hint="correct it: it may hold settings of convert") from err
    if name == "pyproject.toml":
        tool = table.get("tool", {})
        if not isinstance(tool, dict) or "convert" not in tool:
            return None
        table = tool["convert"]
    return Settings(path, _checked(table, path))


def _checked(table: Any, path: str) -> tuple[str, ...]:
    """The policies of a table that holds nothing else."""
    if not isinstance(table, dict):
        raise UsageError("tool.convert is no table", path=path, hint=_FORM)
    for key in table:
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, 1)
            hint = f"did you mean {close[0]}?" if close else f"what can be said is {_FORM}"
            raise UsageError(f"unknown setting {key!r} (expected one of {', '.join(_KEYS)})", path=path, hint=hint)
    texts = table.get("policy", [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError("policy must be a list of texts", path=path, hint=_FORM)
    try:
        Policy.parse(texts)
    except UsageError as err:
        raise err.at(path) from err
    return tuple(texts)


def effective(settings: Settings, options: Iterable[str] = ()) -> list[Effective]:
    """Every action in force, kind by kind; those narrowed by a glob come first, the one that wins before others."""
    said: list[tuple[Rule, str]] = []
    sources = [(text, settings.path or "") for text in settings.policies]
    sources += [(text, f"--policy {text}") for text in options]
    for text, origin in sources:
        if text == "strict":  # which takes back whatever was said before
            said.clear()
        preset = f" ({text})" if "=" not in text and not origin.startswith("--policy") else ""
        said += [(rule, origin + preset) for rule in Policy.parse([text]).rules]
    found: list[Effective] = []
    for kind in BY_KIND.values():
        for rule, origin in reversed(said):
            if rule.kind == kind.name:
                found.append(Effective(kind.name, rule.glob, rule.action, origin))
                if rule.glob == "*":
                    break
        else:
            found.append(Effective(kind.name, "*", next(iter(kind.actions)), "default"))
    return found
