"""The one body: whatever the bytes, tensors or a ConvertError, within bounds of time and memory.

`check` writes bytes into a file, reads them in two ways, and now and then converts them there and back. What it asserts
holds for any bytes at all; a broken promise is an AssertionError, a MemoryError, `Hang`, or whatever escaped.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import convert
from convert.encodings import decode
from convert.errors import ConvertError
from convert.limits import Limits
from convert.tensor import Checkpoint, Tensor

for _library in ("bz2", "lzma", "numpy", "ml_dtypes", "safetensors"):
    importlib.import_module(_library)  # else what they take would count for the file that needs them first

LIMITS = Limits(json_bytes=1 << 20, directory_bytes=1 << 20, pickle_bytes=1 << 20, pickle_leaves=2000)
"""Small, so that what is at a limit is reached by small files."""
SECONDS = 120
"""Against hanging only: a file of a few kilobytes takes milliseconds."""
MAX_BYTES = 128 << 10
"""Of a file."""
MEMORY_BYTES = 128 << 20
"""Address space it may claim beyond what the process has."""
_READ_BYTES = 4 << 20
"""Of each tensor; a few bytes of bzip2 may rightly be gigabytes."""
_ARRAY_BYTES = 64 << 10
_CONVERTED_BYTES = 8 << 20
_LARGE_ITEM_BYTES = 256 << 10
"""Elements beyond this size may be handed out in parts."""
_MESSAGE_CHARACTERS = 2000

_NOT_NUMPYS = (
    "ValueError: descr is not a valid dtype",
    "ValueError: array is too big",
    "ValueError: negative dimensions",  # its product of the sizes overflowed
    "ValueError: maximum supported dimension",
    "ValueError: Failed to read all data",  # of a subarray type
    "ValueError: cannot reshape",
    "shape",
)
"""What numpy says of valid output; docs/strictness.md explains."""


def _shard(name: str) -> bytes:
    header = f'{{"{name}":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}}}'.ljust(64).encode()
    return len(header).to_bytes(8, "little") + header + b"\0\1\2\3"


SHARDS = {"w-00001-of-00001.safetensors": _shard("w"), "x.safetensors": _shard("b")}
"""What lies beside an index, which says where each tensor is."""

_TARGETS = ("out.safetensors", "out.npz", "out.npy", "folder/")
_POLICIES = (
    ("lossless",),
    ("lossless", "object=unpickle", "structured=split", "V2=uint16", "subbyte=unpack"),
    ("strict",),
    ("lossy", "object=unpickle", *(f"{kind}=float32" for kind in ("bfloat16", "float8", "subbyte"))),
    ("lossy", "str=metadata", "bytes=metadata", "metadata=skip", "V1=float8_e4m3fn"),
)  # fmt: skip
CHOICES = len(_TARGETS) * len(_POLICIES) * 2


class Hang(BaseException):
    """A file took longer than `SECONDS`."""


class Read(NamedTuple):
    """What a file gave: tensors by name, as (type, shape, digest or message), or the refusal of the whole file."""

    tensors: dict[str, tuple[str, tuple[int, ...], str]]
    metadata: dict[str, str]
    format: str
    refusal: str | None
    nbytes: int


class Outcome(NamedTuple):
    """What became of some bytes; for statistics."""

    accepted: bool
    converted: bool


@contextlib.contextmanager
def bounded(alarm: bool = True) -> Iterator[None]:
    """`Hang` after `SECONDS`, MemoryError beyond `MEMORY_BYTES`; no bounds where the system has none.

    `alarm` is False where another program owns the alarm clock.
    """
    try:
        import resource
    except ImportError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else None
    if pages is not None:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    if alarm:
        before = signal.signal(signal.SIGALRM, _hang)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _hang(*_: object) -> None:
    raise Hang(f"more than {SECONDS} s")


def check(data: bytes, suffix: str, folder: Path, choice: int | None = None) -> Outcome:
    """Assert all that holds for any bytes.

    Args:
        data: Contents of the file.
        suffix: Its suffix, one of `fuzz.fields.SUFFIXES`.
        folder: Empty, and empty again afterwards unless something is wrong.
        choice: None to read only; else a number below `CHOICES` for a target and a policy.
    """
    source = folder / f"w{suffix}"
    source.write_bytes(data)
    beside = SHARDS if suffix.endswith(".json") else {}
    for name, content in beside.items():
        (folder / name).write_bytes(content)
    named = "shards" if suffix.endswith(".json") else suffix[1:]
    first = read(source, None, 1 << 16)
    second = read(source, named, 1000)
    if first.format == named:
        assert first == second, f"read twice, found {first} and {second}"
    if choice is not None:
        _check_findings(source, named, second)
    converted = choice is not None and first.refusal is None and first.nbytes <= _CONVERTED_BYTES
    if converted:
        assert choice is not None
        converted = _check_conversion(source, first, choice)
    for name, content in {source.name: data, **beside}.items():
        assert (folder / name).read_bytes() == content, f"{name} was changed"
        (folder / name).unlink()
    assert not os.listdir(folder), f"left behind: {os.listdir(folder)}"
    return Outcome(first.refusal is None or second.refusal is None, converted)


def read(source: Path, format: str | None, chunk_bytes: int, decoded: bool = False) -> Read:
    """All a file gives, in chunks; `decoded` as it was before it was encoded, where the file remembers."""
    try:
        with convert.open(source, format=format, limits=LIMITS) as checkpoint:
            nbytes = sum(tensor.nbytes for tensor in checkpoint.values())
            way = decode if decoded else Tensor.changed
            tensors = {name: _content(way(tensor), chunk_bytes) for name, tensor in checkpoint.items()}
            assert len(tensors) == len(checkpoint.tensors), "a name was given twice"
            _check_texts(checkpoint)
            return Read(tensors, checkpoint.metadata, checkpoint.format, None, nbytes)
    except ConvertError as err:
        check_message(err, source)
        return Read({}, {}, format or "", str(err), 0)


def _check_texts(checkpoint: Checkpoint) -> None:
    """What goes into other files and on screens is text."""
    for text in [*checkpoint, *checkpoint.metadata, *checkpoint.metadata.values(), *checkpoint.notes]:
        assert isinstance(text, str), text
        text.encode("utf-8")


def check_message(err: ConvertError, source: Path) -> None:
    """A refusal names the file and fits on a screen, without control characters of the file's."""
    for problem in err.problems:
        assert problem.path is not None, f"names no file: {problem}"
        assert problem.path.startswith(str(source.parent)), f"names another file: {problem}"
        lines = str(problem).split("\n")
        assert len(lines) <= 2, f"more than message and hint: {problem}"
        assert all(line.isprintable() and line for line in lines), f"control characters: {problem}"
        assert len(lines[0]) <= _MESSAGE_CHARACTERS + len(str(source)), f"too long: {problem}"


def _content(tensor: Tensor, chunk_bytes: int) -> tuple[str, tuple[int, ...], str]:
    """Type, shape, and a digest of the bytes or the message that says why there are none."""
    facts = (tensor.dtype.name, tensor.shape)
    assert all(type(size) is int and size >= 0 for size in tensor.shape), tensor
    try:
        if tensor.dtype.kind == "object" and tensor.problem is None:
            return (*facts, _unpickled(tensor))
        total, digest = 0, blake2b(digest_size=16)
        for chunk in tensor.chunks(chunk_bytes):
            item = tensor.dtype.item_bytes or 1
            assert 0 < len(chunk) <= max(chunk_bytes, item), f"a chunk of {len(chunk)} bytes"
            assert len(chunk) % item == 0 or item > _LARGE_ITEM_BYTES, "a chunk of broken elements"
            digest.update(chunk)
            total += len(chunk)
            if total > _READ_BYTES:
                return (*facts, "long")
        assert total == tensor.nbytes == tensor.dtype.nbytes(tensor.count), f"{tensor}: {total} bytes"
        if total <= _ARRAY_BYTES:
            _check_array(tensor, digest.digest())
        return (*facts, digest.hexdigest())
    except ConvertError as err:
        for problem in err.problems:
            problem.at(tensor.path, tensor.name)  # as a plan does
        check_message(err, Path(tensor.path))
        return (*facts, f"refused: {err.message}")  # without the path, which is another on the way back


def _check_array(tensor: Tensor, digest: bytes) -> None:
    """As an array it has the same bytes, where numpy can hold it."""
    with contextlib.suppress(ConvertError):
        array = tensor.numpy()
        assert array.shape == tensor.shape or tensor.dtype.kind == "structured", f"{tensor} became {array.shape}"
        if tensor.dtype.kind != "subbyte":
            assert blake2b(array.tobytes(), digest_size=16).digest() == digest, f"{tensor} as an array"


def _check_findings(source: Path, named: str, found: Read) -> None:
    """`convert.check` finds an error, by a rule with an id of its own, where and only where reading is refused."""
    findings = convert.check(source, format=named, limits=LIMITS)
    errors = [finding for finding in findings if finding.severity == "error"]
    refusals = [content for *_, content in found.tensors.values() if content.startswith("refused")]
    refused = found.refusal or "".join(refusals[:1])
    if "long" not in {content for *_, content in found.tensors.values()}:
        assert bool(errors) == bool(refused), f"found {errors}, and yet {refused or 'read'}"
    assert not any(finding.rule == "FILE-004" for finding in errors), f"broke no rule with an id: {refused}"
    for finding in findings:
        assert finding.path.startswith(str(source.parent)), finding
        assert str(finding).isprintable() or "\n" in str(finding), finding


def _unpickled(tensor: Tensor) -> str:
    assert tensor.unpickle is not None, "an object without a way to read it"
    digest = blake2b(digest_size=16)
    for leaf in tensor.unpickle():
        found = _content(leaf, 1 << 16) if isinstance(leaf, Tensor) else (leaf.text,)
        digest.update(repr((leaf.name, *found)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


# --- there and back ----------------------------------------------------------------------------------------------


def _check_conversion(source: Path, before: Read, choice: int) -> bool:
    """Convert; a refusal leaves nothing, a success gives the tensors and, losslessly encoded, the way back."""
    which, compress = divmod(choice % CHOICES, 2)
    policy, kind = divmod(which, len(_TARGETS))
    target = source.parent / _TARGETS[kind]
    rules = convert.Policy.parse(list(_POLICIES[policy]))
    level = 1 if compress and target.suffix == ".npz" else None
    path = f"{target}/" if _TARGETS[kind].endswith("/") else str(target)
    there = sorted(os.listdir(source.parent))
    report = _convert(source, path, rules, policy == 0, level)
    if report is None:
        assert sorted(os.listdir(source.parent)) == there, f"refused, and left {os.listdir(source.parent)}"
        return False
    if not report.tensors and target.is_dir():
        _remove(target)  # nothing was asked for, and an empty folder is no source
        return True
    after = read(target, None, 1 << 16)
    assert after.refusal is None, f"our own output is refused: {after.refusal}"
    assert not any(found[2].startswith("refused") for found in after.tensors.values()), f"our own output: {after}"
    _check_with_the_reference(target)
    gone = {skipped.name for skipped in report.skipped}
    for name, found in before.tensors.items():
        assert not found[2].startswith("refused") or name in gone, f"{name!r} was refused and yet converted: {found}"
        if name in after.tensors and found[0] == after.tensors[name][0] and found[0] != "object":
            assert after.tensors[name] == found, f"{name!r} was {found}, and is {after.tensors[name]}"
    if policy == 0 and kind != 3 and not gone:
        _check_way_back(source, target, rules)
    _remove(target)
    return True


def _check_with_the_reference(target: Path) -> None:
    """numpy and safetensors read our output as we do, but for what numpy does not know or cannot hold."""
    from fuzz.differ import disagreements

    if not target.is_dir():
        for one in disagreements(target):
            known = one.reference == "numpy" and one.what.startswith(_NOT_NUMPYS)
            assert known, f"our own output: {one}"


def _check_way_back(source: Path, target: Path, rules: convert.Policy) -> None:
    before = read(source, None, 1 << 16, decoded=True)
    kinds = {found[0] for found in before.tensors.values()}
    if kinds & {"object", "V1", "V2"} or before.format not in ("npy", "npz", "safetensors"):
        return  # read as something else on purpose
    back = source.parent / f"back.{before.format}"
    if _convert(target, str(back), rules) is None:
        _remove(back)
        return
    again = read(back, None, 1 << 16, decoded=True)
    if before.format != "npy" and target.suffix != ".npy":
        assert again.tensors == before.tensors, f"there {before.tensors}, back {again.tensors}"
    else:  # which has no room for a name
        assert list(again.tensors.values()) == list(before.tensors.values()), f"there {before}, back {again}"
    _remove(back)


def _convert(
    source: Path, target: str, policy: convert.Policy, verify: bool = False, compress: int | None = None
) -> convert.Report | None:
    try:
        return convert.convert_file(source, target, jobs=1, policy=policy, verify=verify, compress=compress)
    except ConvertError as err:
        check_message(err, source)
        return None


def _remove(path: Path) -> None:
    if path.is_dir():
        for file in sorted(path.rglob("*"), reverse=True):
            _remove(file)
        path.rmdir()
    elif path.exists():
        path.unlink()
