"""`convert.diff`: whether two checkpoints hold the same tensors, which differ, and by how much.

Identity first: what has one type and shape is compared as little-endian row-major bytes, chunk by chunk, by several
threads; only chunks whose bytes differ are looked at as numbers. Memory is a few chunks per thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from convert import api, dtypes, formats, options
from convert.comparepairs import Pair, digest, is_known
from convert.comparison import Comparison, Difference, Facts, MetadataDifference, Tolerance
from convert.dtypes import DType
from convert.errors import ConvertError, InputError, PolicyError, UsageError, gather, quoted
from convert.limits import DEFAULT, Limits
from convert.plan import Plan, Wishes, make_plan
from convert.policy import Policy
from convert.progress import Callback, Progress
from convert.tensor import Checkpoint, Tensor
from convert.threads import Work, default_jobs, run
from convert.transfer import needs_turn

Source = Checkpoint | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_NUMBERS = ("plain", "complex128", "bfloat16", "float8", "subbyte", "longdouble")
_REMOTE_JOBS = 4
_UNCHANGED = (("bfloat16", "V2"), ("float8", "V1"), ("bytes", "metadata"), ("str", "metadata"))
"""Policies whose outcome a file remembers to be what it was; and what they make would be taken for it again."""
_ROW = formats.Format("diff", (), (), "", "", "what a comparison takes its tensors as", orders=True)


def diff(
    a: Source,
    b: Source,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    ignore_dtype: bool = False,
    metadata: bool = False,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    rename: Iterable[tuple[str, str]] = (),
    policy: Policy | None = None,
    limits: Limits = DEFAULT,
    jobs: int | None = None,
    progress: Callback | None = None,
) -> Comparison:
    """Compare two checkpoints of any formats tensor by tensor; nothing is written, and nothing is printed.

    Without a tolerance every bit counts: 0.0 and -0.0 differ, and so do NaNs with other bits. With one, values count:
    0.0 equals -0.0, NaN equals NaN, and numbers may differ by `atol + rtol * abs(b)`; what is no number must be
    equal. Byte order, element order, padding and compression never count, nor does the form in which a file
    remembers a tensor that its format lacks. A lone .npy file is compared whatever its tensor is called.

    Args:
        a: A path, several, or an open checkpoint (which stays open); see `open`.
        b: The other side, the reference that relative errors refer to.
        rtol: Relative tolerance. 0.0 asks for equal values; one of `rtol` and `atol` implies the other as 0.0.
        atol: Absolute tolerance.
        ignore_dtype: Compare numbers of different types by their values alone.
        metadata: Whether differences of the metadata count; they are reported in any case.
        include: Globs of tensors to compare.
        exclude: Globs of tensor names; names in A are those after `rename`.
        rename: Pairs of regular expression and replacement, applied to the names in A.
        policy: As given to the conversion that made B from A: what it says is done to both sides first.
        limits: What is accepted before a file is refused.
        jobs: Threads; default the cores this process may use.
        progress: Called with bytes done, bytes in all and a tensor's name; raise in it to cancel.

    Raises:
        InputError: A side cannot be read, or is damaged; all damage is reported together.
        PolicyError: The policy refuses a tensor.
        UsageError: A tolerance that is negative or no number, a glob that nothing matches.
    """
    began = time.perf_counter()
    tolerance = _tolerance(rtol, atol)
    options.check_jobs(jobs)
    wishes = options.wishes(_ROW, policy=policy, rename=rename, limits=limits)
    with contextlib.ExitStack() as opened:
        sides = [
            source if isinstance(source, Checkpoint) else opened.enter_context(api.open(source, limits=limits))
            for source in (a, b)
        ]
        files = [file for side in sides for file in side.files]
        chosen, notes = _chosen(sides, wishes, tuple(include), tuple(exclude))
        job = _Job(_planned(chosen, wishes), tolerance, ignore_dtype)
        job.match(unnamed=any(_is_unnamed(side) for side in chosen))
        job.compare(jobs or _threads(files), progress)
        found = Comparison(sides[0].path, sides[1].path, tolerance=tolerance)
        job.report(found)
        found.metadata = _metadata(sides, job.plans, metadata)
        found.notes = notes + _notes(job.plans)
        for file in files:
            file.check_unchanged()
            found.notes += getattr(file, "notes", ())
    found.seconds = time.perf_counter() - began
    return found


def _threads(files: list[Any]) -> int:
    """The cores there are; more where threads mostly wait for a network."""
    far = any(getattr(file, "is_remote", False) for file in files)
    return max(default_jobs(), _REMOTE_JOBS if far else 1)


def _tolerance(rtol: float | None, atol: float | None) -> Tolerance | None:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"{name} must be a number from 0 up (found {value})")
    return None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)


class _AsTheyAre:
    """Stands where a plan has its writer: holds everything that the policy does not ask to be changed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def holds(self, tensor: Tensor) -> bool:
        kind = tensor.dtype.kind
        action = self._policy.explicit(kind, tensor.name)
        if kind == "V2" and action is None:
            return False  # bfloat16, as everywhere
        return action in (None, "error") or (kind, action) in _UNCHANGED

    def remembers(self, metadata: Mapping[str, str], encoded: bool) -> bool:
        return True

    def check(self, plan: Plan) -> list[ConvertError]:
        return []


def _chosen(
    sides: list[Checkpoint], wishes: Wishes, include: tuple[str, ...], exclude: tuple[str, ...]
) -> tuple[list[Checkpoint], list[str]]:
    """Both sides without the tensors that were not asked for, and notes about globs without effect."""
    used: set[str] = set()
    chosen = []
    for side, rename in zip(sides, (wishes.rename, ()), strict=True):
        tensors = []
        for tensor in side.tensors:
            name = tensor.name
            for pattern, replacement in rename:
                name = pattern.sub(replacement, name)
            hits = [glob for glob in (*include, *exclude) if fnmatchcase(name, glob)]
            used.update(hits)
            if not any(glob in exclude for glob in hits) and (hits or not include):
                tensors.append(tensor)
        chosen.append(dataclasses.replace(side, tensors=tensors))
    for glob in include:
        if glob not in used:
            names = ", ".join(quoted(tensor.name) for tensor in sides[0].tensors[:5])
            raise UsageError(
                f"no tensor matches --include {glob!r}",
                path=sides[0].path,
                hint=f"names are matched whole, * matches anything; the file has {names or 'no tensors'}",
            )
    return chosen, [f"--exclude {glob} matched nothing" for glob in exclude if glob not in used]


def _planned(sides: list[Checkpoint], wishes: Wishes) -> list[Plan]:
    """Both sides as their tensors were before they were encoded, and then as the policy wants them."""
    writer = _AsTheyAre(wishes.policy)
    plans: list[Plan] = []
    problems: list[ConvertError] = []
    for side, wish in zip(sides, (wishes, dataclasses.replace(wishes, rename=())), strict=True):
        try:
            plans.append(make_plan(side, side.path, "a comparison", writer, wish))
        except ConvertError as err:
            problems += err.problems
    if problems:
        raise gather(problems)
    return plans


def _is_unnamed(side: Checkpoint) -> bool:
    """A .npy file, whose tensor has no name but that of the file."""
    return side.format == formats.BUILT_IN[0].name and len(side) == 1 and not os.path.isdir(side.path)


def _metadata(sides: list[Checkpoint], plans: list[Plan], counts: bool) -> list[MetadataDifference]:
    """What differs; strings that the policy moved out of a pickle were values, and always count."""
    a, b = (plan.metadata for plan in plans)
    moved = {key for side, plan in zip(sides, plans, strict=True) for key in plan.metadata if key not in side.metadata}
    return [
        MetadataDifference(key, a.get(key), b.get(key), counts or key in moved)
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key)
    ]


def _notes(plans: list[Plan]) -> list[str]:
    notes: dict[str, None] = {}  # without repetition, in order
    for plan in plans:
        notes.update(dict.fromkeys(plan.notes))
        notes.update(
            dict.fromkeys(f"{plan.target}: {quoted(skip.name)}: left out ({skip.reason})" for skip in plan.skipped)
        )
    return list(notes)


def _facts(tensor: Tensor) -> Facts:
    return Facts(_type_name(tensor.dtype), tensor.shape)


def _type_name(dtype: DType) -> str:
    """A record's type spelled out, as two of them differ in their fields."""
    if not dtype.fields:
        return dtype.name
    fields = (
        f"{field.name}: {_type_name(field.dtype)}{list(field.shape) if field.shape else ''} at {field.offset}"
        for field in dtype.fields
    )
    return f"structured({', '.join(fields)}; {dtype.item_bytes} bytes)"


class _Job:
    """One comparison: who goes with whom, what must be read, and what came of it."""

    def __init__(self, plans: list[Plan], tolerance: Tolerance | None, ignore_dtype: bool) -> None:
        self.plans = plans
        self._tolerance = tolerance
        self._ignore_dtype = ignore_dtype
        self._found: list[Difference | Pair] = []
        self._only_a: list[Tensor] = []
        self._only_b: list[Tensor] = []
        self._renamed: dict[str, Tensor] = {}
        self._progress: Progress | None = None

    def match(self, *, unnamed: bool) -> None:
        """Tensors of one name go together; where a side has no names and each has one tensor, these do."""
        a, b = (plan.tensors for plan in self.plans)
        by_name = {tensor.name: tensor for tensor in b}
        if unnamed and len(a) == len(b) == 1:
            by_name = {a[0].name: b[0]}
        for tensor in a:
            other = by_name.pop(tensor.name, None)
            if other is None:
                self._only_a.append(tensor)
            self._found.append(self._matched(tensor, other))
        self._only_b = list(by_name.values())

    def _matched(self, a: Tensor, b: Tensor | None) -> Difference | Pair:
        if b is None:
            return Difference(a.name, ("only in A",), _facts(a), None)
        what: tuple[str, ...] = ("dtype",) if a.dtype != b.dtype else ()
        if a.shape != b.shape:
            what += ("shape",)
        elif a.dtype is b.dtype is dtypes.OBJECT and a.data.nbytes != b.data.nbytes:
            what = ("values",)
        elif not what or self._comparable(a, b):
            return Pair(a, b, self._tolerance)
        return Difference(a.name, what, _facts(a), _facts(b), _other_name(a, b))

    @staticmethod
    def _comparable(a: Tensor, b: Tensor) -> bool:
        """Whether elements of two types can be compared: both are numbers."""
        return all(tensor.dtype.kind in _NUMBERS and is_known(tensor) for tensor in (a, b))

    def compare(self, jobs: int, progress: Callback | None) -> None:
        """Read what must be read."""
        pairs = [pair for pair in self._found if isinstance(pair, Pair)]
        digests: dict[int, bytes] = {}
        candidates = self._candidates()
        if progress is not None:
            total = sum(pair.a.nbytes for pair in pairs) + sum(tensor.nbytes for tensor in candidates)
            self._progress = Progress(progress, total)

        def take(tensor: Tensor, _: memoryview) -> None:
            digests[id(tensor)] = digest(tensor, self._progress)

        def parallel() -> Iterator[Work]:
            for pair in pairs:
                yield from pair.work(self._progress)
            yield from (partial(take, tensor) for tensor in candidates if not needs_turn(tensor))

        def rest() -> Iterator[Work]:
            for pair in pairs:
                yield from pair.rest()
            yield from (partial(take, tensor) for tensor in candidates if needs_turn(tensor))

        problems: dict[tuple[str | None, str | None], ConvertError] = {}
        for work, threads in ((parallel(), jobs), (rest(), 1)):
            try:
                run(work, threads)
            except (InputError, PolicyError) as err:
                for problem in err.problems:
                    problems.setdefault((problem.path, problem.tensor), problem)
        if problems:
            raise gather(list(problems.values()))
        self._match_renamed(digests)

    def _candidates(self) -> list[Tensor]:
        """Tensors that only one side has, and whose type and shape one of the other side has too."""
        kinds_a, kinds_b = ({_kind(tensor) for tensor in only} for only in (self._only_a, self._only_b))
        both = kinds_a & kinds_b
        return [tensor for tensor in (*self._only_a, *self._only_b) if _kind(tensor) in both]

    def _match_renamed(self, digests: dict[int, bytes]) -> None:
        """Equal tensors under other names; of several equal ones, the first goes with the first."""
        waiting: dict[object, list[Tensor]] = {}
        for tensor in reversed(self._only_b):
            if id(tensor) in digests:
                waiting.setdefault((_kind(tensor), digests[id(tensor)]), []).append(tensor)
        for tensor in self._only_a:
            others = waiting.get((_kind(tensor), digests.get(id(tensor))))
            if others:
                self._renamed[tensor.name] = others.pop()

    def report(self, found: Comparison) -> None:
        """Write down what differs."""
        taken = {other.name for other in self._renamed.values()}
        for item in self._found:
            if isinstance(item, Pair):
                self._judge(item, found)
                found.nbytes += item.a.nbytes
            elif (other := self._renamed.get(item.name)) is not None:
                found.differences.append(Difference(item.name, ("renamed",), item.a, _facts(other), other.name))
            else:
                found.differences.append(item)
        for tensor in self._only_b:
            if tensor.name not in taken:
                found.differences.append(Difference(tensor.name, ("only in B",), None, _facts(tensor)))

    def _judge(self, pair: Pair, found: Comparison) -> None:
        a, b, tally = pair.a, pair.b, pair.tally
        same_type = a.dtype == b.dtype
        if same_type and not tally.bits:
            found.identical += 1
            return
        values = ("values",) if tally.values else ("bits",) if same_type else ()
        what = ("dtype",) * (not same_type) + values
        difference = Difference(a.name, what, _facts(a), _facts(b), _other_name(a, b))
        if a.dtype is not dtypes.OBJECT:  # of a pickle the bytes were compared, which are no elements
            difference.count, difference.tally = a.count, tally
        exact = self._tolerance is None and same_type
        if exact or tally.beyond or not (same_type or self._ignore_dtype):
            found.differences.append(difference)
        else:
            found.tolerated.append(difference)


def _kind(tensor: Tensor) -> tuple[object, ...]:
    """What renamed tensors have in common, but for their bytes."""
    return tensor.dtype, tensor.shape, tensor.nbytes


def _other_name(a: Tensor, b: Tensor) -> str | None:
    return b.name if b.name != a.name else None
