"""What may happen to what a target cannot hold. Loss is a decision made here, never a warning."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, Self

from convert.dtypes import ONE_BYTE
from convert.errors import UsageError


class Kind(NamedTuple):
    """One row of the policy table; the first action is the default."""

    name: str
    about: str
    actions: Mapping[str, str]


_SKIP = {"skip": "leave the tensor out; the report names it"}
_ERROR = {"error": "refuse"}

KINDS: tuple[Kind, ...] = (
    Kind(
        "V2",
        "<V2 or |V2 in npy and npz: what ml_dtypes, JAX and MLX write for bfloat16",
        {"bfloat16": "take it as bfloat16", "uint16": "the bits as integers", **_ERROR},
    ),
    Kind(
        "V1",
        "<V1 in npy and npz: one of many 8-bit types",
        {**_ERROR, **{name: f"take it as {name}" for name in ONE_BYTE}},
    ),
    Kind("void", "other V<n>: raw bytes", {**_ERROR, "uint8": "the bytes, as a new last axis of n"}),
    Kind(
        "longdouble",
        "x87 80-bit long double, and complex of it",
        {
            "exact": "float64 if every value survives, else refuse",
            "round": "float64, to nearest even",
            "bytes": "the bytes, as a new last axis",
            **_ERROR,
        },
    ),
    Kind(
        "complex128",
        "complex128 where the target has none (safetensors)",
        {
            **_ERROR,
            "pair": "float64 with a new last axis of 2",
            "complex64": "complex64 if every value survives, else refuse",
            "round": "complex64, to nearest even",
        },
    ),
    Kind("datetime64", "dates", {**_ERROR, "int64": "the count of units since 1970; the unit is remembered"}),
    Kind("timedelta64", "durations", {**_ERROR, "int64": "the count of units; the unit is remembered"}),
    Kind(
        "bytes",
        "S<n>: byte strings",
        {**_ERROR, "uint8": "the bytes, as a new last axis of n", "metadata": "0-d only: into the file's metadata"},
    ),
    Kind(
        "str",
        "U<n>: strings",
        {**_ERROR, "uint32": "code points, as a new last axis of n", "metadata": "0-d only: into the file's metadata"},
    ),
    Kind(
        "structured",
        "records with fields",
        {**_ERROR, "split": "one tensor per field, name.field; padding is dropped"},
    ),
    Kind(
        "object",
        "a pickle",
        {
            **_ERROR,
            "unpickle": "numpy arrays, numbers, strings, dicts, lists and tuples, by a reader that calls nothing",
        },
    ),
    Kind(
        "blob",
        "a member of an npz that is no array",
        {"skip": _SKIP["skip"], "uint8": "its bytes", **_ERROR},
    ),
    Kind(
        "bfloat16",
        "bfloat16 where the target has none (npy, npz)",
        {"V2": "the bits as <V2, as ml_dtypes writes them", "uint16": "the bits as integers", "float32": "exact"},
    ),
    Kind(
        "float8",
        "8-bit floats where the target has none (npy, npz)",
        {"V1": "the bits as <V1, as ml_dtypes writes them", "uint8": "the bits as integers", "float32": "exact"},
    ),
    Kind(
        "subbyte",
        "F4 and F6 where the target has none (npy, npz)",
        {
            **_ERROR,
            "packed": "uint8, the bytes as stored",
            "unpack": "uint8, one element a byte",
            "float32": "exact",
        },
    ),
    Kind(
        "metadata",
        "what the target cannot remember: metadata, and how an encoded tensor was before (npy)",
        {"report": "leave it out and say so in the report", **_ERROR, "skip": "leave it out"},
    ),
)
BY_KIND: dict[str, Kind] = {kind.name: kind for kind in KINDS}

PRESETS: dict[str, dict[str, str]] = {
    "strict": {},
    "lossless": {
        "V1": "uint8",
        "void": "uint8",
        "longdouble": "bytes",
        "complex128": "pair",
        "datetime64": "int64",
        "timedelta64": "int64",
        "bytes": "uint8",
        "str": "uint32",
        "blob": "uint8",
        "subbyte": "packed",
        "metadata": "error",
    },
    "lossy": {
        "V1": "uint8",
        "void": "uint8",
        "longdouble": "round",
        "complex128": "round",
        "datetime64": "int64",
        "timedelta64": "int64",
        "bytes": "uint8",
        "str": "uint32",
        "structured": "split",
        "object": "skip",
        "subbyte": "packed",
    },
}


def actions_of(kind: str) -> list[str]:
    """Actions of a kind, the default first; `skip` works for every one."""
    return list({**BY_KIND[kind].actions, **_SKIP})


class Rule(NamedTuple):
    """An action for one kind, for the tensors whose names match a glob ('*' for all)."""

    glob: str
    kind: str
    action: str


@dataclass(frozen=True)
class Policy:
    """Actions by kind, narrowed by globs; what is not said keeps its default. Later rules win over earlier ones.

    `Policy(V2="uint16", object="skip")` sets kinds by name; `Policy.parse` reads the command line's form.

    Raises:
        UsageError: An unknown kind or action; the message lists the right ones.
    """

    rules: tuple[Rule, ...] = ()

    def __init__(self, rules: Iterable[Rule | tuple[str, str, str]] = (), **kinds: str) -> None:
        made = [Rule(*rule) for rule in rules] + [Rule("*", kind, action) for kind, action in kinds.items()]
        for rule in made:
            _check(rule)
        object.__setattr__(self, "rules", tuple(made))

    @classmethod
    def preset(cls, name: str) -> Self:
        """'strict' (the defaults), 'lossless' (everything encoded reversibly) or 'lossy' (round, skip objects)."""
        if name not in PRESETS:
            hint = None
            if name in BY_KIND:  # the action was forgotten
                hint = f"--policy {name}={actions_of(name)[1]} for one; convert policies lists them all"
            raise UsageError(
                f"unknown policy preset {name!r} (expected one of {', '.join(PRESETS)})",
                hint=hint or _near(name, [*PRESETS, *BY_KIND]),
            )
        return cls(Rule("*", kind, action) for kind, action in PRESETS[name].items())

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """From `KIND=ACTION`, `GLOB:KIND=ACTION` and preset names, in order; 'strict' takes back all before it."""
        rules: list[Rule] = []
        for text in texts:
            left, equals, action = text.rpartition("=")
            if not equals:
                if text == "strict":
                    rules.clear()
                rules.extend(cls.preset(text).rules)
                continue
            glob, colon, kind = left.rpartition(":")
            rules.append(Rule(glob if colon else "*", kind, action))
        return cls(rules)

    def action(self, kind: str, name: str) -> str:
        """What to do with tensor `name` of that kind."""
        return self.explicit(kind, name) or next(iter(BY_KIND[kind].actions))

    def explicit(self, kind: str, name: str) -> str | None:
        """What a rule says, or None where only the default speaks."""
        for rule in reversed(self.rules):
            if rule.kind == kind and (rule.glob == "*" or fnmatchcase(name, rule.glob)):
                return rule.action
        return None


def _check(rule: Rule) -> None:
    if rule.kind not in BY_KIND:
        raise UsageError(
            f"unknown policy kind {rule.kind!r} (expected one of {', '.join(BY_KIND)})", hint=_near(rule.kind, BY_KIND)
        )
    if rule.action not in (actions := actions_of(rule.kind)):
        raise UsageError(
            f"unknown action {rule.action!r} for policy kind {rule.kind} (expected one of {', '.join(actions)})",
            hint=_near(rule.action, actions),
        )


def _near(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), 1)
    return f"did you mean {close[0]}? convert policies lists them all" if close else "convert policies lists them all"
