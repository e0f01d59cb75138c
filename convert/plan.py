"""What will be written, decided from headers alone: all problems at once, before any byte moves.

Order: include and exclude, casts and policy by the names of the source, then renames, then the target's own rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from convert.dtypes import BY_NAME
from convert.encodings import cast_to, decode, encode
from convert.errors import ConvertError, PolicyError, UsageError, gather, quoted
from convert.limits import DEFAULT, Limits
from convert.policy import BY_KIND, Policy, actions_of
from convert.records import ordered_fields
from convert.tensor import Checkpoint, Origin, Tensor, Text

_LOSSLESS_FIRST = {"str": "uint32", "complex128": "pair", "V1": "uint8", "subbyte": "packed"}


class Writer(Protocol):
    """What the plan asks of a writer module."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether the format has this tensor's type."""
        ...

    def remembers(self, metadata: Mapping[str, str], encoded: bool) -> bool:
        """Whether the format has room for this metadata, and for how tensors were before they were encoded."""
        ...

    def check(self, plan: Plan) -> list[ConvertError]:
        """Everything else the format cannot hold: names, number of tensors, metadata."""
        ...


class Cast(NamedTuple):
    """A change of type for the tensors whose names match a glob."""

    glob: str
    source: str
    target: str


@dataclass(frozen=True)
class Wishes:
    """What the caller asked for beyond source and target.

    Attributes:
        policy: What may happen to what the target cannot hold.
        byteorder: 'little', 'big' or 'keep'; npy and npz only.
        order: 'C', or 'keep' for Fortran order where the source has it; npy and npz only.
        include: Globs; a tensor is taken if one matches, or if there are none.
        exclude: Globs; a tensor is left out if one matches.
        rename: Pairs of regular expression and replacement, applied in turn.
        cast: Changes of type.
        cast_overflow_inf: Let finite values become infinite in casts.
        metadata: Added to the source's, or replacing it key by key.
        limits: Of what the plan reads, strings that go into the metadata.
    """

    policy: Policy = field(default_factory=Policy)
    byteorder: str = "little"
    order: str = "C"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[re.Pattern[str], str], ...] = ()
    cast: tuple[Cast, ...] = ()
    cast_overflow_inf: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = DEFAULT


class Change(NamedTuple):
    """A tensor that comes out other than it went in."""

    source: str
    name: str
    source_dtype: str
    dtype: str
    shape: tuple[int, ...]
    how: str


class Skipped(NamedTuple):
    """A tensor that was left out, and why."""

    name: str
    dtype: str
    reason: str


@dataclass
class Plan:
    """Pure data: which tensors will be written, in the source's order, and what becomes of the others."""

    target: str
    format: str
    tensors: list[Tensor] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    text_origins: dict[str, Origin] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def make_plan(checkpoint: Checkpoint, target: str, format: str, writer: Writer, wishes: Wishes) -> Plan:
    """Decide what becomes of every tensor.

    Raises:
        ConvertError: With every problem there is, each naming its tensor.
    """
    plan = Plan(target, format, metadata={**checkpoint.metadata, **wishes.metadata}, notes=list(checkpoint.notes))
    planner = _Planner(plan, writer, wishes)
    for tensor in checkpoint.tensors:
        planner.add(tensor)
    planner.finish(checkpoint)
    if planner.problems:
        raise gather(planner.problems)
    return plan


class _Planner:
    def __init__(self, plan: Plan, writer: Writer, wishes: Wishes) -> None:
        self.plan = plan
        self.problems: list[ConvertError] = []
        self._writer = writer
        self._wishes = wishes
        self._simple = not (wishes.include or wishes.exclude or wishes.rename or wishes.cast)
        self._used: set[object] = set()
        self._texts = False

    def add(self, tensor: Tensor) -> None:
        if self._simple and tensor.origin is None and tensor.problem is None and self._writer.holds(tensor):
            self.plan.tensors.append(self._laid_out(tensor))
            return
        if not self._wanted(tensor.name):
            self.plan.skipped.append(Skipped(tensor.name, str(tensor.dtype), "not included, or excluded"))
            return
        if tensor.problem is not None:
            self.problems.append(tensor.problem)
            return
        try:
            self._map(tensor, self._restored(tensor), "", frozenset())
        except ConvertError as err:
            self.problems += [problem.at(tensor.path, tensor.name) for problem in err.problems]

    def _wanted(self, name: str) -> bool:
        wishes = self._wishes
        included = [glob for glob in wishes.include if fnmatchcase(name, glob)]
        excluded = [glob for glob in wishes.exclude if fnmatchcase(name, glob)]
        self._used.update(("--include", glob) for glob in included)
        self._used.update(("--exclude", glob) for glob in excluded)
        return bool(included or not wishes.include) and not excluded

    def _restored(self, tensor: Tensor) -> Tensor:
        """As it was before it was encoded, where the target can hold that or a wish is about it."""
        original = decode(tensor)
        widened = tensor.origin is not None and tensor.origin.encoding == "float32"
        if widened and not self._cast_for(tensor.name, original.dtype.name) and self._cast_for(tensor.name, "float32"):
            return tensor  # its values as they are now, whatever they were
        if original is tensor or self._writer.holds(original):
            return original
        kind, name = original.dtype.kind, tensor.name
        if self._wishes.policy.explicit(kind, name) or self._cast_for(name, original.dtype.name):
            return original
        return tensor

    def _cast_for(self, name: str, dtype: str) -> str | None:
        for cast in self._wishes.cast:
            if cast.source == dtype and fnmatchcase(name, cast.glob):
                self._used.add(cast)
                return cast.target
        return None

    def _map(self, source: Tensor, tensor: Tensor, how: str, done: frozenset[str]) -> None:
        """Cast and encode until the target holds it; `done` are the types already cast from."""
        policy, inf = self._wishes.policy, self._wishes.cast_overflow_inf
        while True:
            name, kind = tensor.dtype.name, tensor.dtype.kind
            if name not in done and (target := self._cast_for(tensor.name, name)):
                tensor = cast_to(tensor, BY_NAME[target], inf)
                how, done = _joined(how, f"cast to {target}"), done | {name}
                continue
            action = policy.action(kind, tensor.name) if kind in BY_KIND else ""
            as_bfloat16 = kind == "V2" and action == "bfloat16" and self._cast_for(tensor.name, "bfloat16") is not None
            if self._writer.holds(tensor) and not as_bfloat16:
                self._take(source, tensor, how)
                return
            if action == "skip":
                self.plan.skipped.append(Skipped(tensor.name, name, f"policy {kind}=skip"))
                return
            if action == "error" or not action:
                raise self._refused(tensor)
            encoded = encode(tensor, action, inf, self._wishes.limits)
            how = _joined(how, f"policy {kind}={action}")
            if isinstance(encoded, Text):
                self._take_text(encoded, how)
                return
            if isinstance(encoded, list):
                for part in encoded:
                    if isinstance(part, Text):
                        self._take_text(part, how)
                    else:
                        self._map(source, part, how, done)
                if not encoded:
                    self.plan.skipped.append(Skipped(tensor.name, name, "it holds no tensors"))
                return
            if encoded.dtype == tensor.dtype:
                raise self._refused(tensor)
            tensor = encoded

    def _refused(self, tensor: Tensor) -> PolicyError:
        kind = tensor.dtype.kind
        row = BY_KIND.get(kind)
        if row is None:
            return PolicyError(f"{tensor.dtype} does not fit into {self.plan.format}", tensor=tensor.name)
        held = [action for action in actions_of(kind) if action not in ("error", "skip")]
        first = _LOSSLESS_FIRST.get(kind)
        if first in held:
            held.remove(first)
            held.insert(0, first)
        shown = f"--policy {kind}={held[0]} ({row.actions[held[0]]})" if held else ""
        if len(held) > 1:
            shown += f"; {kind}={', '.join(held[1:6])}{' ...' if len(held) > 6 else ''} also work"
        what = f"{tensor.dtype} is {row.about}; " if kind in ("V1", "object", "blob") else f"{tensor.dtype} "
        verb = "it needs a policy" if what.endswith("; ") else "cannot be held exactly"
        return PolicyError(
            f"{what}{verb} in {self.plan.format}",
            path=tensor.path,
            tensor=tensor.name,
            hint=f"{shown}; --policy {kind}=skip leaves it out",
        )

    def _take_text(self, text: Text, how: str) -> None:
        name = self._renamed(text.name)
        if name in self.plan.metadata:
            raise PolicyError("the metadata has a text of that name already", hint="--rename gives it another name")
        self.plan.metadata[name] = text.text
        if text.origin is not None:
            self.plan.text_origins[name] = text.origin
        self._texts = True
        self.plan.changes.append(Change(text.name, name, text.dtype, "metadata", (), how))

    def _take(self, source: Tensor, tensor: Tensor, how: str) -> None:
        name = self._renamed(tensor.name)
        if name != tensor.name:
            how = _joined(how, "renamed")
            tensor = tensor.changed(name=name)
        if tensor.dtype != source.dtype and not how:
            how = "restored"
        if how:
            before = str(source.dtype)
            self.plan.changes.append(Change(source.name, name, before, str(tensor.dtype), tensor.shape, how))
        self.plan.tensors.append(self._laid_out(tensor))

    def _renamed(self, name: str) -> str:
        for pattern, replacement in self._wishes.rename:
            new = pattern.sub(replacement, name)
            if new != name:
                self._used.add(pattern)
            name = new
        return name

    def _laid_out(self, tensor: Tensor) -> Tensor:
        """Byte order and element order as wished."""
        byteorder = self._wishes.byteorder
        if byteorder != "little":
            if tensor.stored.fields and tensor.dtype.fields:
                keep = byteorder == "keep"
                tensor = tensor.changed(dtype=tensor.stored, steps=()) if keep else ordered_fields(tensor, True)
            elif tensor.dtype.swap > 1 and (byteorder == "big" or tensor.stored_big) and tensor.dtype.swap <= 8:
                tensor = tensor.changed(big=True)
        keep = self._wishes.order == "keep" and tensor.stored_fortran
        return tensor.changed(fortran=True) if keep and tensor.shape == tensor.stored_shape else tensor

    def finish(self, checkpoint: Checkpoint) -> None:
        """What concerns all tensors together."""
        plan, policy = self.plan, self._wishes.policy
        self._check_used(checkpoint)
        self._check_names()
        self._check_metadata()
        encoded = bool(plan.text_origins) or any(tensor.origin is not None for tensor in plan.tensors)
        if not self._writer.remembers(plan.metadata, encoded):
            lost = [f"metadata {', '.join(map(quoted, list(plan.metadata)[:5]))}"] if plan.metadata else []
            lost += ["how encoded tensors were before"] if encoded else []
            action = policy.action("metadata", "*")
            has_place = self._writer.remembers({"": ""}, True)  # some, just not enough for this
            if action != "skip" and (action == "error" or self._texts or has_place):
                self.problems.append(
                    PolicyError(
                        f"{plan.format} has no room for {' and '.join(lost)}",
                        path=plan.target,
                        hint="--policy metadata=skip leaves it out, or choose another format",
                    )
                )
            elif action == "report":
                plan.notes.append(f"{plan.format} cannot remember {' and '.join(lost)}")
            plan.metadata = {}
        if plan.tensors or not self.problems:  # else what the target misses is a consequence
            self.problems += self._writer.check(plan)

    def _check_used(self, checkpoint: Checkpoint) -> None:
        """A wish that nothing matched is most likely a slip."""
        wishes = self._wishes
        unused: Iterable[tuple[str, str, object]] = [
            *(("--include", glob, ("--include", glob)) for glob in wishes.include),
            *(("--exclude", glob, ("--exclude", glob)) for glob in wishes.exclude),
            *(("--rename", pattern.pattern, pattern) for pattern, _ in wishes.rename),
            *(("--cast", f"{cast.source}={cast.target}", cast) for cast in wishes.cast),
        ]
        for option, text, key in unused:
            if key in self._used:
                continue
            if option == "--include":
                names = ", ".join(quoted(tensor.name) for tensor in checkpoint.tensors[:5])
                self.problems.append(
                    UsageError(
                        f"no tensor matches {option} {text!r}",
                        path=checkpoint.path,
                        hint=f"names are matched whole, * matches anything; the file has {names or 'no tensors'}",
                    )
                )
            else:
                self.plan.notes.append(f"{option} {text} matched nothing")

    def _check_names(self) -> None:
        names: dict[str, Tensor] = {}
        for tensor in self.plan.tensors:
            other = names.setdefault(tensor.name, tensor)
            if other is not tensor:
                self.problems.append(
                    PolicyError(
                        "two tensors would have this name",
                        path=tensor.path,
                        tensor=tensor.name,
                        hint="change --rename, or leave one out with --exclude",
                    )
                )
        if all(name.isascii() for name in names):
            return
        for name, tensor in names.items():
            try:
                name.encode("utf-8")
            except UnicodeEncodeError:
                self.problems.append(
                    PolicyError(
                        "the name is not valid Unicode", path=tensor.path, tensor=name, hint="--rename changes it"
                    )
                )

    def _check_metadata(self) -> None:
        for key, text in self.plan.metadata.items():
            try:
                f"{key}{text}".encode()
            except UnicodeEncodeError:
                self.problems.append(
                    PolicyError(
                        f"the metadata {quoted(key)} is not valid Unicode",
                        path=self.plan.target,
                        hint="a lone surrogate is no text; give it another value",
                    )
                )
                self.plan.metadata = {}
                return


def _joined(how: str, more: str) -> str:
    return f"{how}, {more}" if how else more
