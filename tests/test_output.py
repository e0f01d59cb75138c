"""Half-written files and folders are never seen: after any failure the target is absent, or is the old one."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.output import OutputFile, committed
from tests.faultfs import listing

POSIX = os.name == "posix"
CALLS = ("link", "replace", "rename", "fsync", "fchmod", "ftruncate", "posix_fallocate", "pwrite")


def nameless_works(folder: Path) -> bool:
    """Whether this file system gives files without a name."""
    try:
        os.close(os.open(folder, os.O_RDWR | os.O_TMPFILE))
    except (AttributeError, OSError):
        return False
    return os.path.isdir("/proc/self/fd")


@pytest.fixture(params=["nameless", "named", "no proc"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The two ways to a temporary file, and the reasons for the second."""
    way: str = request.param
    if way == "nameless" and not nameless_works(tmp_path):
        pytest.skip("no nameless files here")
    if way == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    if way == "no proc":
        there = os.path.isdir
        monkeypatch.setattr(os.path, "isdir", lambda path: path != "/proc/self/fd" and there(path))
    return way


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only files with names, as on most systems."""
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)


def fails(monkeypatch: pytest.MonkeyPatch, call: str, number: int = errno.EIO, at: int = 0) -> None:
    """Let the call `at` (from 0) of a function of `os`, and all after it, fail."""
    real = getattr(os, call)
    calls = 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > at:
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    monkeypatch.setattr(os, call, failing)


# --- one file ----------------------------------------------------------------------------------------------------


def test_nobody_sees_a_file_before_it_is_complete(tmp_path: Path, route: str) -> None:
    """The target appears with the commit, and nothing but the target."""
    target = tmp_path / "out.npy"
    output = OutputFile(target, overwrite=False)
    output.write_at(3, b"def")
    output.write_at(0, b"abc")
    assert not target.exists()
    hidden = listing(tmp_path)
    assert len(hidden) == (0 if route == "nameless" else 1)
    assert all(name.startswith(".out.npy.") and name.endswith(".convert-tmp") for name in hidden)
    assert Path(output.readable()).read_bytes() == b"abcdef"
    assert output.size() == 6
    output.commit()
    assert listing(tmp_path) == ["out.npy"]
    assert target.read_bytes() == b"abcdef"


def test_discarding_leaves_nothing(tmp_path: Path, route: str) -> None:
    """Whatever was written is gone; discarding again, or after a commit, is harmless."""
    target = tmp_path / "out.npy"
    output = OutputFile(target, overwrite=False)
    output.write_at(0, b"abc")
    output.discard()
    output.discard()
    assert listing(tmp_path) == []
    output = OutputFile(target, overwrite=False)
    output.commit()
    output.discard()
    assert listing(tmp_path) == ["out.npy"]


def test_an_existing_target_is_refused(tmp_path: Path, route: str) -> None:
    """Without being asked nothing is overwritten, and the message says how to ask."""
    target = tmp_path / "out.npy"
    target.write_bytes(b"old")
    with pytest.raises(convert.TargetExistsError, match="exists already") as caught:
        OutputFile(target, overwrite=False)
    assert caught.value.hint is not None
    assert "--overwrite" in caught.value.hint
    assert caught.value.path == str(target)
    assert listing(tmp_path) == ["out.npy"]
    assert target.read_bytes() == b"old"


def test_overwriting_replaces_at_the_last_moment(tmp_path: Path, route: str) -> None:
    """The old file is whole until the commit, and keeps its own contents for those who have it open."""
    target = tmp_path / "out.npy"
    target.write_bytes(b"old")
    output = OutputFile(target, overwrite=True)
    output.write_at(0, b"new")
    assert target.read_bytes() == b"old"
    with target.open("rb") as reader:
        output.commit()
        assert reader.read() == b"old"
    assert target.read_bytes() == b"new"
    assert listing(tmp_path) == ["out.npy"]


@pytest.mark.parametrize("appears", ["a file", "a dangling link"])
def test_a_target_that_appears_meanwhile_is_not_overwritten(tmp_path: Path, route: str, appears: str) -> None:
    """Somebody else's file, made between start and commit, stays as it is."""
    target = tmp_path / "out.npy"
    output = OutputFile(target, overwrite=False)
    output.write_at(0, b"ours")
    if appears == "a file":
        target.write_bytes(b"theirs")
    else:
        target.symlink_to("nowhere")
    with pytest.raises(convert.TargetExistsError):
        output.commit()
    assert listing(tmp_path) == ["out.npy"]
    if appears == "a file":
        assert target.read_bytes() == b"theirs"
    else:
        assert os.readlink(target) == "nowhere"


def test_a_target_that_appears_meanwhile_is_overwritten_if_asked(tmp_path: Path, route: str) -> None:
    """With overwrite it makes no difference when the old file came."""
    target = tmp_path / "out.npy"
    output = OutputFile(target, overwrite=True)
    output.write_at(0, b"ours")
    target.write_bytes(b"theirs")
    output.commit()
    assert target.read_bytes() == b"ours"
    assert listing(tmp_path) == ["out.npy"]


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Several umasks."""
    mask: int = request.param
    before = os.umask(mask)
    yield mask
    os.umask(before)


@pytest.mark.skipif(not POSIX, reason="POSIX modes")
def test_the_mode_follows_the_umask(tmp_path: Path, route: str, umask: int) -> None:
    """A new file has the mode that any program would give it, not that of a private temporary."""
    target = tmp_path / "out.npy"
    OutputFile(target, overwrite=False).commit()
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~umask


@pytest.mark.skipif(not POSIX, reason="POSIX modes")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_the_mode_of_a_replaced_file_stays(tmp_path: Path, route: str, mode: int) -> None:
    """Who could read the old file can read the new one, and nobody else."""
    target = tmp_path / "out.npy"
    target.write_bytes(b"old")
    target.chmod(mode)
    OutputFile(target, overwrite=True).commit()
    assert stat.S_IMODE(target.stat().st_mode) == mode


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("chain", [False, True])
def test_a_link_is_written_through(tmp_path: Path, route: str, dangling: bool, chain: bool) -> None:
    """The link stays a link; what it points to, in another folder, gets the data."""
    folder = tmp_path / "real"
    folder.mkdir()
    if not dangling:
        (folder / "data.npy").write_bytes(b"old")
    link = tmp_path / "out.npy"
    link.symlink_to(os.path.join("real", "data.npy"))
    target = link
    if chain:
        target = tmp_path / "second.npy"
        target.symlink_to("out.npy")
    output = OutputFile(target, overwrite=not dangling)
    output.write_at(0, b"new")
    output.commit()
    assert os.readlink(link) == os.path.join("real", "data.npy")
    assert (folder / "data.npy").read_bytes() == b"new"
    assert listing(folder) == ["data.npy"]
    assert listing(tmp_path) == sorted({"out.npy", "real", target.name})


@pytest.mark.skipif(not POSIX, reason="special files")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "link to a device"])
def test_only_regular_files_are_replaced(tmp_path: Path, kind: str, overwrite: bool) -> None:
    """A folder, a pipe or a device is no target, not even with overwrite; and none is opened."""
    target = tmp_path / "out.npy"
    if kind == "folder":
        target.mkdir()
    elif kind == "fifo":
        os.mkfifo(target)
    elif kind == "device":
        target = Path("/dev/null")
    else:
        target.symlink_to("/dev/null")
    before = listing(tmp_path)
    with pytest.raises(convert.OutputError, match="is a folder" if kind == "folder" else "not a regular file"):
        OutputFile(target, overwrite=overwrite)
    assert listing(tmp_path) == before
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127 + "e", "漢" * 85, "🙂" * 63 + "abc"], ids=["1", "2", "3", "4"])
def test_names_may_be_255_bytes_long(tmp_path: Path, route: str, name: str) -> None:
    """A name the file system takes is taken, though a temporary name stands beside it; overwriting too."""
    assert len(name.encode()) == 255
    for content in (b"one", b"two"):
        output = OutputFile(tmp_path / name, overwrite=content == b"two")
        output.write_at(0, content)
        output.commit()
        assert (tmp_path / name).read_bytes() == content
    assert listing(tmp_path) == [name]


@pytest.mark.parametrize(
    ("path", "hint"),
    [("missing/out.npy", "mkdir"), ("n" * 256, "shorter"), ("file/out.npy", None)],
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, route: str, path: str, hint: str | None) -> None:
    """No such folder, too long a name, a file for a folder: one message, with the way out where there is one."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(convert.OutputError, match="cannot be written") as caught:
        OutputFile(tmp_path / path, overwrite=False).commit()
    assert caught.value.exit_code == 5
    assert hint is None or hint in str(caught.value.hint)
    assert listing(tmp_path) == ["file"]


def test_the_bytes_are_on_disk_before_the_name_is(tmp_path: Path, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fsync: the file first, then its name, then the folder; without it: none."""
    events: list[str] = []
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in ("fsync", "link", "replace")}

    def recorded(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            what = name
            if name == "fsync":
                what += " folder" if stat.S_ISDIR(os.fstat(args[0]).st_mode) else " file"
            events.append(what)
            return real[name](*args, **options)

        return call

    for name in real:
        monkeypatch.setattr(os, name, recorded(name))
    OutputFile(tmp_path / "a", overwrite=False).commit(fsync=True)
    assert events == ["fsync file", "link", "fsync folder"]
    events.clear()
    OutputFile(tmp_path / "a", overwrite=True).commit(fsync=True)
    names = ["link", "replace"] if route == "nameless" else ["replace"]
    assert events == ["fsync file", *names, "fsync folder"]
    events.clear()
    OutputFile(tmp_path / "b", overwrite=False).commit()
    assert "fsync file" not in events
    assert "fsync folder" not in events


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("pwrite", errno.ENOSPC),
        ("pwrite", errno.EDQUOT),
        ("pwrite", errno.EIO),
        ("pwrite", errno.EFBIG),
        ("pwrite", errno.EINTR),
        ("posix_fallocate", errno.ENOSPC),
        ("ftruncate", errno.ENOSPC),
        ("fsync", errno.EIO),
        ("fchmod", errno.EPERM),
        ("link", errno.ENOSPC),
        ("replace", errno.EACCES),
        ("open", errno.EROFS),
    ],
)
def test_every_failing_call_leaves_the_target_as_it_was(
    tmp_path: Path, route: str, monkeypatch: pytest.MonkeyPatch, call: str, number: int, old: bool
) -> None:
    """Whatever the system refuses: an OutputError that says so, the old file or none, and nothing beside it."""
    target = tmp_path / "out.npy"
    if old:
        target.write_bytes(b"old")
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    with monkeypatch.context() as patch:
        fails(patch, call, number)
        if call == "link":
            fails(patch, "replace", number)  # where links do not work, a rename is tried
        expected = {"fchmod": old, "replace": old}.get(call, True)
        with pytest.raises(convert.OutputError) if expected else contextlib.nullcontext() as caught:
            output = OutputFile(target, overwrite=old)
            with committed(output):
                output.reserve(100 if call == "ftruncate" else 1 << 20)
                output.write_at(0, b"new")
                output.commit(fsync=True)
    if caught is not None:
        assert os.strerror(number) in caught.value.message
        assert caught.value.path == str(target)
    assert listing(tmp_path) == (["out.npy"] if old or not expected else [])
    if old:
        assert target.read_bytes() == b"old"
    if os.path.exists("/proc/self/fd"):
        assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("old", [False, True])
def test_a_failed_sync_of_the_folder_is_told(
    tmp_path: Path, route: str, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    """The name may be lost in a power cut: a new file goes again; one that replaced an old one stays."""
    if old:
        (tmp_path / "out.npy").write_bytes(b"old")
    fails(monkeypatch, "fsync", at=1)
    output = OutputFile(tmp_path / "out.npy", overwrite=old)
    output.write_at(0, b"new")
    with pytest.raises(convert.OutputError, match="is in place" if old else "cannot be written"):
        output.commit(fsync=True)
    assert listing(tmp_path) == (["out.npy"] if old else [])
    if old:
        assert (tmp_path / "out.npy").read_bytes() == b"new"


def test_writing_goes_on_after_a_short_write(tmp_path: Path, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take fewer bytes than it is given, on a nearly full disk or over the network."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, memoryview(data)[:7], offset))
    output = OutputFile(tmp_path / "out.npy", overwrite=False)
    output.write_at(0, bytes(range(256)))
    output.commit()
    assert (tmp_path / "out.npy").read_bytes() == bytes(range(256))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ZeroDivisionError])
def test_any_exception_discards(tmp_path: Path, route: str, error: type[BaseException]) -> None:
    """`committed` cleans up on the way out, interrupts included."""
    output = OutputFile(tmp_path / "out.npy", overwrite=False)
    output.write_at(0, b"new")
    with pytest.raises(error), committed(output):
        raise error
    assert listing(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The answers of older kernels and network file systems lead to a named temporary."""
    if not nameless_works(tmp_path):
        pytest.skip("no nameless files here")
    real = os.open

    def without(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", without)
    output = OutputFile(tmp_path / "out.npy", overwrite=False)
    assert len(listing(tmp_path)) == 1
    output.commit()
    assert listing(tmp_path) == ["out.npy"]


@pytest.mark.usefixtures("named")
def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAT and some network file systems: a rename takes the place of the link, and never overwrites unasked."""
    fails(monkeypatch, "link", errno.EPERM)
    output = OutputFile(tmp_path / "out.npy", overwrite=False)
    output.write_at(0, b"new")
    output.commit()
    assert (tmp_path / "out.npy").read_bytes() == b"new"
    output = OutputFile(tmp_path / "other.npy", overwrite=False)
    (tmp_path / "other.npy").write_bytes(b"theirs")
    with pytest.raises(convert.TargetExistsError):
        output.commit()
    assert listing(tmp_path) == ["other.npy", "out.npy"]
    assert (tmp_path / "other.npy").read_bytes() == b"theirs"


@pytest.mark.usefixtures("named")
def test_windows_renames_without_overwriting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a rename fails when the target exists, files must be closed first, and folders cannot be synced."""
    renamed: list[str] = []

    def rename(source: str, target: str) -> None:
        renamed.append(target)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "exists", target)
        real(source, target)

    real = os.rename
    target, other = str(tmp_path / "out.npy"), str(tmp_path / "other.npy")
    outputs = [OutputFile(path, overwrite=False) for path in (target, other)]
    with open(other, "wb") as file:
        file.write(b"theirs")
    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        patch.setattr(os, "rename", rename)
        patch.delattr(os, "link")
        outputs[0].commit(fsync=True)
        with contextlib.suppress(convert.TargetExistsError):
            outputs[1].commit()
    assert renamed == [target, other]
    assert listing(tmp_path) == ["other.npy", "out.npy"]
    assert (tmp_path / "other.npy").read_bytes() == b"theirs"


# --- whole conversions -------------------------------------------------------------------------------------------

TARGETS = ["out.npz", "deflated.npz", "out.safetensors", "out.npy", "out/"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small and large, plain and big-endian, C and Fortran order."""
    path = tmp_path_factory.mktemp("source") / "in.npz"
    rng = np.random.default_rng(1)
    arrays: dict[str, Any] = {f"small{index}": np.full(9, index, np.int16) for index in range(5)}
    arrays["large"] = rng.integers(0, 255, 3_000_000, np.uint8)
    arrays["big"] = rng.random((300, 200)).astype(">f8")
    arrays["fortran"] = np.asfortranarray(rng.random((300, 200)))
    np.savez(path, **arrays)
    return path


def run(source: Path, target: Path, jobs: int, **options: Any) -> None:
    """One conversion to one of TARGETS."""
    if target.suffix == ".npy":
        options["include"] = ["large"]
    if target.name == "deflated.npz":
        options["compress"] = 1
    convert.convert_file(source, target if target.suffix else f"{target}/", jobs=jobs, **options)


def make_old(target: Path) -> None:
    """An old target, worth keeping."""
    if target.suffix:
        target.write_bytes(b"old")
    else:
        target.mkdir()
        (target / "old.npy").write_bytes(b"old")


def check_old(target: Path, old: bool) -> None:
    """The folder is as it was before."""
    assert listing(target.parent) == ([target.name] if old else [])
    if old:
        assert (target if target.suffix else target / "old.npy").read_bytes() == b"old"
        assert target.suffix or listing(target) == ["old.npy"]


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_a_write_that_fails_at_any_point_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, name: str, old: bool, jobs: int
) -> None:
    """Full disk, used-up quota, faulty disk: at the first, a middle and the last write, with the reason told."""
    (tmp_path / "count").mkdir()
    calls = 0
    real = os.pwrite

    def counted(*args: Any) -> int:
        nonlocal calls
        calls += 1
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", counted)
        run(source, tmp_path / "count" / name, jobs)
    target = tmp_path / "there" / name
    target.parent.mkdir()
    if old:
        make_old(target)
    points = zip((0, calls // 2, calls - 1), (errno.ENOSPC, errno.EDQUOT, errno.EIO), strict=True)
    for at, number in points:
        with monkeypatch.context() as patch:
            fails(patch, "pwrite", number, at)
            with pytest.raises(convert.OutputError) as caught:
                run(source, target, jobs, overwrite=old)
        assert os.strerror(number) in str(caught.value)
        assert caught.value.exit_code == 5
        check_old(target, old)
    run(source, target, jobs, overwrite=old)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("call", ["posix_fallocate", "fsync", "link", "replace", "rename", "mkdir", "open", "close"])
def test_every_other_call_may_fail_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, name: str, old: bool, call: str
) -> None:
    """Either the call is not needed and all is well, or the target is what it was."""
    target = tmp_path / name
    if old:
        make_old(target)
    with convert.open(source) as checkpoint:
        assert len(checkpoint) == 8
    failed = False
    with monkeypatch.context() as patch:
        if call in ("open", "close"):
            there = os.fspath(tmp_path)
            real: Callable[..., Any] = getattr(os, call)

            def failing(first: Any, *args: Any, **options: Any) -> Any:
                if call == "open":
                    wanted = os.fspath(first) if args[0] & os.O_RDWR else ""
                else:
                    wanted = os.readlink(f"/proc/self/fd/{first}")
                    wanted = "" if os.path.isdir(wanted) else wanted
                    real(first)
                if wanted.startswith(there):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return real(first, *args, **options) if call == "open" else None

            if not os.path.exists("/proc/self/fd"):
                pytest.skip("descriptors have no names here")
            patch.setattr(os, call, failing)
        else:
            fails(patch, call, errno.EIO)
            if call == "link":
                fails(patch, "replace", errno.EIO)
        try:
            run(source, target, 2, overwrite=old, fsync=True)
        except convert.OutputError:
            failed = True
    if failed:
        if call != "close":  # the name may be there already when the last close fails
            check_old(target, old)
        assert not [found for found in listing(tmp_path) if found != target.name]
    else:
        assert listing(tmp_path) == [target.name]
    if call in ("fsync", "open"):
        assert failed


def test_no_temporary_outlives_a_refusal_found_in_the_data(tmp_path: Path, route: str) -> None:
    """A policy that says no in the middle of the data cleans up like any failure."""
    np.savez(tmp_path / "in.npz", first=np.zeros(200_000), w=np.array([1e300]))
    for name in TARGETS[:3]:
        with pytest.raises(convert.PolicyError):
            convert.convert_file(tmp_path / "in.npz", tmp_path / name, cast=[("float64", "float16")])
        assert listing(tmp_path) == ["in.npz"]


@pytest.mark.parametrize("name", TARGETS)
def test_short_writes_do_no_harm(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, name: str
) -> None:
    """Whole conversions come out the same when every write is cut short."""
    for folder in ("whole", "short"):
        (tmp_path / folder).mkdir()
    run(source, tmp_path / "whole" / name, 2)
    real = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: real(fd, memoryview(data)[: max(len(memoryview(data)) * 2 // 3, 1)], at)
    )
    run(source, tmp_path / "short" / name, 2)
    found = [
        {path.relative_to(top): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}
        for top in (tmp_path / "whole", tmp_path / "short")
    ]
    assert found[0] == found[1]


def test_the_input_may_be_the_output(tmp_path: Path, route: str) -> None:
    """A file is rewritten in place without being asked for --overwrite, and keeps its mode."""
    path = tmp_path / "a.npz"
    np.savez(path, w=np.arange(1000, dtype=">i4"))
    path.chmod(0o640)
    convert.convert_file(path, path, compress=6)
    assert listing(tmp_path) == ["a.npz"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert convert.load(path)["w"].tobytes() == np.arange(1000, dtype="<i4").tobytes()
