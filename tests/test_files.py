"""Reading at offsets: every fault of the source is told, none goes into the output."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convert
from convert import files
from convert.files import MemoryFile, Positioned, SourceFile, Spool
from tests.faultfs import listing

NO_FIFO = not hasattr(os, "mkfifo")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file of a thousand bytes."""
    path = tmp_path / "data"
    path.write_bytes(bytes(index % 251 for index in range(1000)))
    return path


@pytest.fixture(params=[True, False], ids=["positioned", "seek"])
def positioned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With `preadv` and `pwrite`, and without, as on Windows."""
    monkeypatch.setattr(files, "_POSITIONED", request.param)
    there: bool = request.param
    return there


# --- one source --------------------------------------------------------------------------------------------------


def test_reads_at_any_offset(data: Path, positioned: bool) -> None:
    """`read` and `readinto` give exactly the bytes asked for, in any order."""
    whole = data.read_bytes()
    source = SourceFile(data)
    assert source.size == 1000
    for offset, count in ((990, 10), (0, 1000), (500, 1), (1000, 0)):
        assert source.read(offset, count) == whole[offset : offset + count]
        buffer = bytearray(count)
        source.readinto(offset, memoryview(buffer))
        assert buffer == whole[offset : offset + count]
    source.close()
    source.close()


def test_reads_go_on_after_short_ones(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give fewer bytes than asked for: over a network, after a signal."""
    readv, read = os.preadv, os.pread
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: readv(fd, [views[0][:7]], at))
    monkeypatch.setattr(os, "pread", lambda fd, count, at: read(fd, min(count, 7), at))
    source = SourceFile(data)
    assert source.read(0, 1000) == data.read_bytes()
    source.close()


def test_a_read_past_the_end_is_an_error(data: Path, positioned: bool) -> None:
    """Never fewer bytes than asked for, never zeros instead."""
    source = SourceFile(data)
    with pytest.raises(convert.CorruptError, match="ends early") as caught:
        source.read(995, 10)
    assert "byte 1000" in caught.value.message
    assert caught.value.path == str(data)
    source.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_read_that_fails_names_file_and_reason(data: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The system's own words, the path, and what to do where we know."""

    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    source = SourceFile(data)
    for call in ("preadv", "pread"):
        monkeypatch.setattr(os, call, failing)
    for read in (lambda: source.read(0, 10), lambda: source.readinto(0, memoryview(bytearray(10)))):
        with pytest.raises(convert.InputError) as caught:
            read()
        assert os.strerror(number) in str(caught.value)
        assert str(data) in str(caught.value)
        assert (caught.value.hint is None) == (number == errno.ESTALE)
    source.close()


@pytest.mark.parametrize(
    ("path", "reason", "hint"),
    [
        ("missing", "No such file", "spelling"),
        (".", "is a folder", None),
        ("data/below", "Not a directory", None),
        ("n" * 300, "name too long", None),
        pytest.param(
            "fifo", "not a regular file", "save the stream", marks=pytest.mark.skipif(NO_FIFO, reason="POSIX")
        ),
        pytest.param("/dev/null", "not a regular file", "save", marks=pytest.mark.skipif(NO_FIFO, reason="POSIX")),
    ],
)
def test_what_is_no_file_is_refused(data: Path, path: str, reason: str, hint: str | None) -> None:
    """Missing, a folder, a pipe (which must not block), a device: each by its name."""
    if path == "fifo":
        os.mkfifo(data.parent / path)
    with pytest.raises(convert.InputError) as caught:
        SourceFile(data.parent / path)
    assert reason.lower() in caught.value.message.lower()
    assert caught.value.exit_code == 3
    assert hint is None or hint in str(caught.value.hint)


def test_an_unreadable_file_says_how_to_see_its_permissions(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission denied is about this file, not about the program."""

    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(convert.InputError, match="Permission denied") as caught:
        SourceFile(data)
    assert "ls -l" in str(caught.value.hint)


@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("change", ["longer", "shorter", "touched", "gone"])
def test_a_changed_source_is_noticed(data: Path, parked: bool, change: str) -> None:
    """Other size or other time: what was read may be of two files."""
    source = SourceFile(data)
    if parked:
        source.park()
    source.check_unchanged()
    facts = data.stat()
    if change == "longer":
        data.write_bytes(data.read_bytes() + b"x")
    elif change == "shorter":
        os.truncate(data, 999)
    elif change == "touched":
        os.utime(data, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1_000_000_000))
    else:
        data.unlink()
    if change == "gone" and not parked:
        source.check_unchanged()  # deleted, but still there for us
    else:
        with pytest.raises(convert.InputError, match="cannot be read" if change == "gone" else "changed while"):
            source.check_unchanged()
        if parked:
            with pytest.raises(convert.InputError):
                source.read(0, 10)
    source.close()


def test_a_parked_source_holds_no_descriptor(data: Path) -> None:
    """So that folders of very many files can be read."""
    source = SourceFile(data)
    source.park()
    data.rename(data.with_name("moved"))
    with pytest.raises(convert.InputError, match="No such file"):
        source.read(0, 10)
    data.with_name("moved").rename(data)
    assert source.read(5, 10) == data.read_bytes()[5:15]


def test_the_same_file_is_known_under_other_names(data: Path) -> None:
    """Links lead to the same file; another file, or none, is not it."""
    source = SourceFile(data)
    data.with_name("soft").symlink_to(data)
    os.link(data, data.with_name("hard"))
    data.with_name("copy").write_bytes(data.read_bytes())
    found = [name for name in ("data", "soft", "hard", "copy", "missing") if source.is_same(data.with_name(name))]
    assert found == ["data", "soft", "hard"]
    source.close()


def test_threads_share_one_descriptor(data: Path, positioned: bool) -> None:
    """Reads from several threads do not get into each other's way."""
    whole = data.read_bytes()
    source = SourceFile(data)
    barrier = threading.Barrier(8)

    def work(number: int) -> bool:
        barrier.wait()
        return all(source.read(at, 3) == whole[at : at + 3] for at in range(number, 900, 8))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    source.close()


def test_memory_reads_like_a_file() -> None:
    """Bytes in memory behind the same methods."""
    memory = MemoryFile(np.arange(10, dtype=np.uint16).data, "here")
    assert (memory.size, memory.path) == (20, "here")
    assert memory.read(2, 4) == b"\x01\0\x02\0"
    buffer = bytearray(2)
    memory.readinto(18, memoryview(buffer))
    assert buffer == b"\x09\0"


def test_a_spool_has_no_name_and_goes_away(tmp_path: Path, positioned: bool) -> None:
    """What is put in another order lies in a temporary file that nobody sees."""
    with Spool(os.fspath(tmp_path)) as spool:
        spool.write_at(100, b"end")
        spool.write_at(0, b"start")
        assert spool.read(0, 5) == b"start"
        assert spool.read(98, 5) == b"\0\0end"
        assert listing(tmp_path) == []
        with pytest.raises(convert.OutputError, match="shorter"):
            spool.read(100, 10)
    assert listing(tmp_path) == []


def test_faults_of_a_spool_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk under the temporary file, a fault when it is read back, no such folder."""

    def failing(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Spool(os.fspath(tmp_path)) as spool:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", failing)
            with pytest.raises(convert.OutputError, match="No space left"):
                spool.write_at(0, b"x")
        spool.write_at(0, b"x")
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing)
            with pytest.raises(convert.OutputError, match="No space left"):
                spool.read(0, 1)
    with pytest.raises(convert.OutputError, match="No such file"):
        Spool(os.fspath(tmp_path / "missing"))


def test_writes_go_on_after_short_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positioned: bool) -> None:
    """Both ways of writing look at how much was taken."""
    pwrite, write = os.pwrite, os.write
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    out = Positioned(fd)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, view, at: pwrite(fd, view[:5], at))
        patch.setattr(os, "write", lambda fd, view: write(fd, view[:5]))
        out.write_all(3, np.arange(16, dtype=np.uint32).data)
    out.close()
    out.close()
    assert (tmp_path / "out").read_bytes() == b"\0\0\0" + np.arange(16, dtype=np.uint32).tobytes()


def test_files_are_opened_as_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows would else turn every byte 10 that is written into two, and end a file at byte 26."""
    monkeypatch.setattr(os, "O_BINARY", 0x8000, raising=False)
    spec = importlib.util.find_spec("convert.files")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.BINARY & 0x8000


# --- conversions -------------------------------------------------------------------------------------------------


def arrays(large_bytes: int) -> dict[str, Any]:
    """Small and large, each way the bytes take: copied, swapped, turned, grouped."""
    rng = np.random.default_rng(1)
    made: dict[str, Any] = {f"small{index}": np.full(9, index, np.int16) for index in range(20)}
    made["large"] = rng.integers(0, 255, large_bytes, np.uint8)
    made["big"] = rng.random((300, 200)).astype(">f8")
    made["fortran"] = np.asfortranarray(rng.random((900, 700)))
    made["bf16"] = rng.random(70_000).astype(ml_dtypes.bfloat16)
    made["empty"] = np.zeros((0, 3))
    made["scalar"] = np.array(3.5)
    return made


SOURCES = ["in.npz", "deflated.npz", "in.safetensors", "in"]


def make_sources(folder: Path, large_bytes: int) -> Path:
    """The same tensors in every format."""
    made = arrays(large_bytes)
    np.savez(folder / "in.npz", **made)
    convert.save(made, folder / "in.safetensors")
    (folder / "in").mkdir()
    for name, array in made.items():
        np.save(folder / "in" / f"{name}.npy", array)
    with zipfile.ZipFile(folder / "deflated.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in sorted((folder / "in").iterdir()):
            archive.write(path, path.name)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tensor large enough to be shared by several threads."""
    return make_sources(tmp_path_factory.mktemp("sources"), 17_000_000)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tensor of many reads."""
    return make_sources(tmp_path_factory.mktemp("smaller"), 2_000_000)


def contents(target: Path) -> dict[str, bytes]:
    """The bytes of a file, or of all files in a folder."""
    if target.is_file():
        return {"": target.read_bytes()}
    return {path.name: path.read_bytes() for path in sorted(target.iterdir())}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("to", ["out.npz", "deflated.npz", "out.safetensors", "out/"])
def test_without_positioned_io_the_same_bytes_come_out(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, to: str
) -> None:
    """On systems that only seek and read, several threads still write what one thread writes elsewhere."""
    compress = 1 if to == "deflated.npz" else None
    isdir = os.path.isdir
    for folder in ("plain", "seek"):
        (tmp_path / folder).mkdir()
    convert.convert_file(sources / name, f"{tmp_path}/plain/{to}", compress=compress, jobs=1)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_POSITIONED", False)
        patch.setattr(os.path, "isdir", lambda path: path != "/proc/self/fd" and isdir(path))
        for call in ("pread", "preadv", "pwrite", "posix_fallocate"):
            patch.delattr(os, call)
        convert.convert_file(sources / name, f"{tmp_path}/seek/{to}", compress=compress, jobs=8, verify=True)
    assert contents(tmp_path / "plain" / to) == contents(tmp_path / "seek" / to)
    assert listing(tmp_path / "seek") == [to.rstrip("/")]


def interfere(monkeypatch: pytest.MonkeyPatch, source: Path, at: int, then: Callable[[], None]) -> Callable[[], int]:
    """Do something at the read number `at` of a source; gives how many reads there were."""
    calls = 0
    lock = threading.Lock()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            nonlocal calls
            with lock:
                ours = os.path.samestat(os.fstat(fd), source.stat())
                calls += ours
                now = ours and calls == at
            if now:
                then()
            return real(fd, *args)

        return call

    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return lambda: calls


@pytest.mark.parametrize("to", ["out.npz", "deflated.npz", "out.safetensors", "out/"])
@pytest.mark.parametrize("name", ["in.npz", "deflated.npz", "in.safetensors"])
@pytest.mark.parametrize("what", ["fails", "is truncated", "is changed"])
def test_a_source_that_fails_while_it_is_read_gives_no_output(
    smaller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, name: str, to: str
) -> None:
    """A faulty disk, a program that truncates the file or writes to it: a refusal that names it, and no target."""
    source = tmp_path / name
    source.write_bytes((smaller / name).read_bytes())
    compress = 1 if to == "deflated.npz" else None

    def go() -> None:
        convert.convert_file(source, f"{tmp_path}/new/{to}", compress=compress, jobs=2)

    (tmp_path / "new").mkdir()
    with monkeypatch.context() as patch:
        count = interfere(patch, source, 0, lambda: None)
        convert.convert_file(source, f"{tmp_path}/{to}", compress=compress, jobs=2)
        reads = count()

    def then() -> None:
        if what == "fails":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if what == "is truncated":
            os.truncate(source, source.stat().st_size // 3)
        else:
            facts = source.stat()
            os.utime(source, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))

    for at in (reads // 2, reads - 1):
        source.write_bytes((smaller / name).read_bytes())
        with monkeypatch.context() as patch:
            interfere(patch, source, at, then)
            with pytest.raises(convert.InputError) as caught:
                go()
        assert str(source) in str(caught.value)
        assert listing(tmp_path / "new") == []
    assert listing(tmp_path) == sorted({name, "new", to.rstrip("/")})
