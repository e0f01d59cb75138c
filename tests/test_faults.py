"""Whatever fails, and whenever: the target is absent or the old one, nothing else is left, the message says why.

`CONVERT_FAULTS=all` tries each error at each call, not just one of them; docs/reliability.md says how long that takes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert import outputfolder, outputset
from convert.cli.main import run
from tests.faultfs import REMOVING, Fault, descriptors, snapshot, visible, watched

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")

ALL = os.environ.get("CONVERT_FAULTS") == "all"
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT, errno.EINTR, errno.EROFS, errno.ESTALE)

NAMING = ("link", "rename", "replace", "unlink")

# --- every call, every error -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A conversion from `src` to `dst` of a folder.

    Attributes:
        source: Relative path of the source.
        target: Relative path of the target.
        options: For `convert_file`.
        in_place: It needs no --overwrite.
    """

    source: str
    target: str
    options: dict[str, Any] = field(default_factory=dict)
    in_place: bool = False


WORKS = {
    "safetensors": Work("src/in.npz", "dst/out.safetensors"),
    "npz": Work("src/in.safetensors", "dst/out.npz"),
    "deflated": Work("src/in.safetensors", "dst/out.npz", {"compress": 1}),
    "npy": Work("src/in.npz", "dst/out.npy", {"include": ["a"]}),
    "folder": Work("src/in.npz", "dst/out/"),
    "gathered": Work("src/folder", "dst/out.safetensors", {"verify": True}),
    "shards": Work("src/in.npz", "dst/out.safetensors", {"max_shard_size": 24}),
    "many shards": Work("src/in.npz", "dst/out.safetensors", {"max_shard_size": 8}),
    "in place": Work("dst/both.npz", "dst/both.npz", {"compress": 1}, in_place=True),
}


def tensors() -> dict[str, Any]:
    """Small, of several types and orders."""
    return {
        "a": np.arange(3, dtype=">f4"),
        "b": np.asfortranarray(np.arange(6, dtype="<i2").reshape(2, 3)),
        "deep/c": np.arange(5, dtype="u1"),
    }


def prepare(top: Path, name: str, old: bool) -> None:
    """Sources, and an old target with a neighbour that is none of our business."""
    work = WORKS[name]
    (top / "src" / "folder" / "deep").mkdir(parents=True)
    (top / "dst").mkdir()
    (top / "dst" / "neighbour").write_bytes(b"theirs")
    np.savez(top / "src" / "in.npz", **tensors())
    convert.save(tensors(), top / "src" / "in.safetensors")
    for key, value in tensors().items():
        np.save(top / "src" / "folder" / f"{key}.npy", value)
    if work.in_place:
        np.savez(top / work.target, **tensors())
    elif old:
        older = {key: value[::-1] for key, value in tensors().items()}
        convert.save(older, f"{top}/{work.target}", **{k: v for k, v in work.options.items() if k != "verify"})
        if "shards" in name:
            (top / "dst" / "out.safetensors").write_bytes(b"stale: it would contradict the index")


def go(top: Path, name: str, old: bool, fsync: bool) -> None:
    """Convert."""
    work = WORKS[name]
    convert.convert_file(top / work.source, f"{top}/{work.target}", overwrite=old, fsync=fsync, jobs=1, **work.options)


WAYS = [("nameless", False), ("named", True), ("nameless", True), ("named", False)][: 4 if ALL else 2]
"""Files without a name until they are complete, or as where there are none; with --fsync or without."""


def oserror(number: int) -> OSError:
    """As the system makes them."""
    return OSError(number, os.strerror(number))


def faults_at(at: int, shift: int) -> list[Fault]:
    """What is tried at one call: each error once and for good, and interrupts; by default only one of these."""
    number = ERRORS[(at + shift) % len(ERRORS)]
    faults = [
        Fault(at, oserror(number)),
        Fault(at, KeyboardInterrupt()),
        Fault(at, oserror(number), lasting=True),
        Fault(at, KeyboardInterrupt(), after=True),
    ]
    if not ALL:
        return [faults[(at + shift) // 2 % 4]]
    more = [Fault(at, oserror(other), lasting=lasting) for other in ERRORS for lasting in (False, True)]
    return [*faults[1::2], *more]


@pytest.mark.parametrize(("route", "fsync"), WAYS)
@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("name", WORKS)
def test_every_call_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, name: str, old: bool, fsync: bool
) -> None:
    """The n-th call on files, for every n: refused with the reason and everything as before, or done and right."""
    if route == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.setattr(outputset, "MANY_FILES", 2)
    base = tmp_path / "base"
    base.mkdir()
    prepare(base, name, old)
    before = snapshot(base)
    with watched(base) as seen:
        go(base, name, old, fsync)
    wanted = snapshot(base)
    assert wanted == visible(wanted)
    shift = list(WORKS).index(name) + 3 * old
    for at in range(len(seen.calls)):
        for number, fault in enumerate(faults_at(at, shift)):
            top = tmp_path / f"{at}-{number}"
            top.mkdir()
            restore(top, before)
            one_fault(top, fault, before, wanted, partial(go, top, name, old, fsync))
            restore(top, before)
            go(top, name, True, fsync)  # the next run is right, and leaves nothing of the one before
            assert snapshot(top) == wanted, f"{fault}"


def restore(top: Path, files: dict[str, bytes | None]) -> None:
    """Put back what is missing or different; temporaries stay for the next run to find."""
    for path, data in reversed(visible(snapshot(top)).items()):
        if path not in files:
            (top / path).unlink() if data is not None else (top / path).rmdir()
    for path, data in files.items():
        if data is None:
            (top / path).mkdir(exist_ok=True)
        elif not (top / path).exists() or (top / path).read_bytes() != data:
            (top / path).write_bytes(data)


def one_fault(
    top: Path, fault: Fault, before: dict[str, bytes | None], wanted: dict[str, bytes | None], do: Callable[[], None]
) -> None:
    """Convert with a fault, then look at what there is."""
    count = descriptors()
    raised: BaseException | None = None
    with watched(top, fault) as seen:
        try:
            do()
        except (convert.ConvertError, KeyboardInterrupt) as err:
            raised = err
    what = f"{fault} {seen.calls[fault.at :][:3]}: {raised!r} {raised}"
    after = snapshot(top)
    if raised is None:
        assert visible(after) == wanted, what
    elif isinstance(raised, KeyboardInterrupt):
        assert visible(after) in (before, wanted), what
    else:
        assert isinstance(raised, (convert.InputError, convert.OutputError)), what
        reasons = {problem.exit_code for problem in raised.problems}
        assert reasons <= {3, 5}, what
        if "in place" in str(raised):
            assert wanted.items() <= after.items(), what
        elif fault.lasting and fault.happened in NAMING:  # it could not be undone either, but nothing is lost
            assert set(before.values()) <= set(after.values()), what
        else:
            assert visible(after) == before, what
            # `os.path.isdir` and its kind take a failing stat for a no; what follows then has other reasons.
            assert fault.happened == "stat" or os.strerror(getattr(fault.error, "errno", 0)) in str(raised), what
    if fault.happened not in REMOVING and not fault.after and not fault.lasting:
        assert after == visible(after), what
    if not isinstance(raised, KeyboardInterrupt):  # after which a process ends
        raised = None
        assert descriptors() <= count, what


@pytest.mark.parametrize("name", WORKS)
def test_short_reads_and_writes_do_no_harm(tmp_path: Path, name: str) -> None:
    """The system may do less than it was asked for, at every call."""
    for top in (tmp_path / "whole", tmp_path / "short"):
        top.mkdir()
        prepare(top, name, False)
        with watched(top, short=top.name == "short") as seen:
            go(top, name, False, False)
        assert "pwrite" in seen.calls
    assert snapshot(tmp_path / "whole") == snapshot(tmp_path / "short")


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
@pytest.mark.parametrize("name", WORKS)
def test_signals_that_interrupt_system_calls_do_no_harm(tmp_path: Path, name: str) -> None:
    """A program that is profiled, or whose window is resized, gets thousands of signals."""
    for top in (tmp_path / "quiet", tmp_path / "disturbed"):
        top.mkdir()
        prepare(top, name, False)
    go(tmp_path / "quiet", name, False, True)
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        while not seen:
            shutil.rmtree(tmp_path / "disturbed")
            (tmp_path / "disturbed").mkdir()
            prepare(tmp_path / "disturbed", name, False)
            go(tmp_path / "disturbed", name, False, True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert snapshot(tmp_path / "quiet") == snapshot(tmp_path / "disturbed")


# --- signals -----------------------------------------------------------------------------------------------------


def in_child(do: Callable[[], int], errors: Path) -> int:
    """Run in a copy of this process, which then ends at once; returns its status, negative for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside the threads of the test runner
        pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            sys.stderr = open(2, "w", closefd=False)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = do()
            sys.stderr.flush()
        finally:
            os._exit(status)
    _, ended = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(ended)


def argv(top: Path, name: str, old: bool) -> list[str]:
    """The command for a piece of work."""
    work = WORKS[name]
    options: list[str] = ["--overwrite"] if old else []
    for key, value in work.options.items():
        values = value if isinstance(value, list) else [value]
        options += [f"--{key.replace('_', '-')}", *(str(one) for one in values if one is not True)]
    return [str(top / work.source), f"{top}/{work.target}", "--jobs", "1", "--fsync", *options]


@pytest.mark.parametrize("route", ["nameless", "named"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", WORKS)
def test_a_signal_at_any_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: signal.Signals, route: str
) -> None:
    """Killed or interrupted: absent, old or whole; and the next run is right and removes what is left."""
    if route == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.setattr(outputset, "MANY_FILES", 2)
    seed = int(os.environ.get("CONVERT_FAULTS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"CONVERT_FAULTS_SEED={seed}")  # noqa: T201
    base = tmp_path / "base"
    base.mkdir()
    prepare(base, name, True)
    before = snapshot(base)
    with watched(base) as seen:
        go(base, name, True, True)
    wanted = snapshot(base)
    moments = range(len(seen.calls))
    for at in moments if ALL else sorted(random.Random(seed).sample(moments, 4)):
        top = tmp_path / str(at)
        top.mkdir()
        restore(top, before)

        def work(top: Path = top, at: int = at) -> int:
            with watched(top, Fault(at, partial(os.kill, os.getpid(), number))):
                return run(argv(top, name, True))

        status = in_child(work, tmp_path / "errors")
        errors = (tmp_path / "errors").read_text()
        after = snapshot(top)
        if number == signal.SIGKILL:
            assert status == -number, errors
            if "shards" not in name and (name != "folder" or (top / WORKS[name].target).exists()):
                assert visible(after) in (before, wanted), at
        else:
            assert status == 130, errors
            assert errors.startswith("interrupted; "), errors
            assert visible(after) in (before, wanted), at
        (top / "dst" / "neighbour").write_bytes(b"theirs")
        go(top, name, True, True)
        assert snapshot(top) == wanted, at


def test_a_folder_lost_in_a_swap_comes_back(tmp_path: Path) -> None:
    """Killed between the two renames that replace a folder: the next run puts the old one back, whatever it is told."""
    prepare(tmp_path, "folder", True)
    before = snapshot(tmp_path)

    def killed() -> int:
        with watched(tmp_path) as seen:
            rename = seen.real["rename"]

            def once(source: str, target: str) -> None:
                rename(source, target)
                os.kill(os.getpid(), signal.SIGKILL)

            seen.real["rename"] = once
            go(tmp_path, "folder", True, False)
        return 0

    assert in_child(killed, tmp_path / "src" / "errors") == -signal.SIGKILL
    (tmp_path / "src" / "errors").unlink()
    assert not (tmp_path / "dst" / "out").exists()
    with pytest.raises(convert.TargetExistsError):
        go(tmp_path, "folder", False, False)
    assert visible(snapshot(tmp_path)) == before
    go(tmp_path, "folder", True, False)
    assert len(os.listdir(tmp_path / "dst")) == 2


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_temporary_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What a run that lives is writing is not what a dead one left."""
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    name = "safetensors" if kind == "file" else "folder"
    prepare(tmp_path, name, False)

    def meanwhile(done: int, total: int, tensor: str) -> None:
        if not any("other" in path for path in os.listdir(tmp_path)):
            (tmp_path / "other").mkdir()
            go(tmp_path, name, False, False)

    work = WORKS[name]
    with pytest.raises(convert.TargetExistsError):
        convert.convert_file(tmp_path / work.source, f"{tmp_path}/{work.target}", progress=meanwhile)
    assert sorted(os.listdir(tmp_path / "dst")) == sorted(["neighbour", work.target[4:].rstrip("/")])


# --- a source that changes ---------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    """Cut it short."""
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path) -> None:
    """Add to it."""
    with path.open("ab") as file:
        file.write(b"more")


def rewrite(path: Path) -> None:
    """Other bytes in the same place, as many."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data[:-1] + bytes([data[-1] ^ 1]))


def replace(path: Path) -> None:
    """Another file of that name: the one that is open is not touched."""
    path.with_suffix(".new").write_bytes(b"other")
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("change", [truncate, grow, rewrite, replace])
@pytest.mark.parametrize("name", ["safetensors", "npz", "deflated", "npy", "folder", "shards"])
def test_a_source_that_changes_while_it_is_read(tmp_path: Path, name: str, change: Callable[[Path], None]) -> None:
    """Refused, unless it was replaced by another file; at the first and the last read of its data."""
    base = tmp_path / "base"
    base.mkdir()
    prepare(base, name, False)
    before = snapshot(base)
    with watched(base) as seen:
        go(base, name, False, False)
    wanted = snapshot(base / "dst")
    reads = [at for at, call in enumerate(seen.calls) if call in ("pread", "preadv")]
    opened = max(at for at, call in enumerate(seen.calls[: reads[-1]]) if call == "open" or at < reads[1])
    for at in (opened + 2, reads[-1]):
        top = tmp_path / str(at)
        top.mkdir()
        restore(top, before)
        source = top / WORKS[name].source
        os.utime(source, ns=(0, 0))  # else the change may fall into the same tick of the clock
        with watched(top, Fault(at, partial(change, source))):
            if change is replace:
                go(top, name, False, False)
                assert snapshot(top / "dst") == wanted
            else:
                with pytest.raises(convert.InputError) as caught:
                    go(top, name, False, False)
                assert str(source) in str(caught.value)
                assert snapshot(top / "dst") == {"neighbour": b"theirs"}


# --- the real thing ----------------------------------------------------------------------------------------------

KINDS: dict[str, list[str]] = {
    "out.npz": [],
    "deflated.npz": ["--compress", "1"],
    "out.safetensors": [],
    "out/": [],
    "shards.safetensors": ["--max-shard-size", "400KB"],
}


def converted(*args: object, limit_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    """The program, in a process of its own."""
    code = "import sys; from convert.cli.main import main; main(sys.argv[1:])"
    if limit_bytes is not None:
        code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes},) * 2); {code}"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 768 KiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=768k", "none", str(folder)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def make_source(path: Path, nbytes: int) -> Path:
    """Bytes that do not compress, in four tensors."""
    data = np.random.default_rng(7).integers(0, 256, nbytes // 4, np.uint8)
    np.savez(path, **{f"t{number}": data for number in range(4)})  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("target", KINDS)
def test_a_full_disk(tmp_path: Path, disk: Path, target: str, old: bool) -> None:
    """Reserving or writing fails: status 5, the reason, a way out, and the disk as it was."""
    if old:
        first = converted(make_source(tmp_path / "first.npz", 100_000), f"{disk}/{target}", *KINDS[target])
        assert first.returncode == 0, first.stderr
    before = snapshot(disk)
    for nbytes in (3_000_000, 1_000_000):
        source = make_source(tmp_path / f"{nbytes}.npz", nbytes)
        done = converted(source, f"{disk}/{target}", *KINDS[target], *(["--overwrite"] if old else []))
        assert done.returncode == 5, done.stderr
        assert "No space left on device\nhint: free some space" in done.stderr
        assert snapshot(disk) == before
    assert done.stdout == ""


def test_a_batch_on_a_full_disk(tmp_path: Path, disk: Path) -> None:
    """What fits is done; with more room the next run does the rest."""
    (tmp_path / "src").mkdir()
    for number, nbytes in enumerate((100_000, 2_000_000, 150_000, 3_000_000)):
        make_source(tmp_path / "src" / f"{number}.npz", nbytes)
    command = ["batch", tmp_path / "src", disk / "dst", "--to", "safetensors", "--no-space-check", "--jobs", "1"]
    done = converted(*command)
    assert done.returncode == 5, done.stderr
    assert "No space left on device" in done.stderr
    assert [name for name in sorted(os.listdir(disk / "dst")) if name != ".convert"] == [
        "0.safetensors",
        "2.safetensors",
    ]
    subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
    done = converted(*command)
    assert done.returncode == 0, done.stderr
    for number in range(4):
        found = convert.load(disk / "dst" / f"{number}.safetensors")
        with np.load(tmp_path / "src" / f"{number}.npz") as arrays:
            assert {name: value.tobytes() for name, value in found.items()} == {n: arrays[n].tobytes() for n in arrays}


@pytest.mark.skipif(os.name == "nt", reason="POSIX limits")
@pytest.mark.parametrize("target", KINDS)
def test_a_limit_on_the_size_of_files(tmp_path: Path, target: str) -> None:
    """`ulimit -f`: a refusal, and no death by SIGXFSZ."""
    source = make_source(tmp_path / "in.npz", 3_000_000)
    done = converted(source, f"{tmp_path}/{target}", *KINDS[target], limit_bytes=200_000)
    assert done.returncode == 5, done.stderr
    assert "File too large\nhint: that file system, or a limit on this process" in done.stderr
    assert os.listdir(tmp_path) == ["in.npz"]


AS_NOBODY = """
import os, sys
from convert.cli.main import run
target, *options = sys.argv[2:]
folder = os.path.dirname(target.rstrip("/"))
assert run([sys.argv[1], target.replace(folder, sys.argv[1] + "-warm"), *options]) == 0  # imports what it needs
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
sys.exit(run([sys.argv[1], target, *options]))
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
@pytest.mark.parametrize("target", KINDS)
def test_a_folder_that_may_not_be_written(target: str) -> None:
    """Read-only for us: the reason, a way out, status 5."""
    with tempfile.TemporaryDirectory() as name:  # every folder above can be entered by anyone
        top = Path(name)
        top.chmod(0o755)
        source = make_source(top / "in.npz", 1000)
        folder = top / "closed"
        folder.mkdir()
        (top / "in.npz-warm").mkdir()
        folder.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, source, f"{folder}/{target}", *KINDS[target]],
            capture_output=True, text=True, check=False, timeout=120,
            env={key: value for key, value in os.environ.items() if key[:3] != "COV"},  # it may write nowhere
        )  # fmt: skip
        assert done.returncode == 5, done.stderr
        assert done.stderr.endswith("cannot be written: Permission denied\nhint: choose a folder you may write to\n")
        assert os.listdir(folder) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs another user")
def test_a_folder_that_may_not_be_listed_is_no_source(tmp_path: Path) -> None:
    """Tensors in a folder that cannot be read must not be missing without a word."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "src" / "deep").mkdir(parents=True)
        np.save(top / "src" / "a.npy", np.zeros(3))
        np.save(top / "src" / "deep" / "b.npy", np.zeros(3))
        (top / "src" / "deep").chmod(0o700)
        convert.load(top / "src")
        os.seteuid(65534)
        try:
            with pytest.raises(convert.InputError, match="deep: cannot be read: Permission denied"):
                convert.load(top / "src")
        finally:
            os.seteuid(0)


def test_an_interrupt_while_the_lock_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that was made under the lock goes too, at once: nobody else would know of it."""

    @contextlib.contextmanager
    def held(path: str) -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    np.save(tmp_path / "a.npy", np.arange(3))
    monkeypatch.setattr(outputfolder, "held", held)
    with pytest.raises(KeyboardInterrupt):
        convert.convert_file(tmp_path / "a.npy", f"{tmp_path}/out/")
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]
