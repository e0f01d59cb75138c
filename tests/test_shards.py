"""Checkpoints in several files: split and index as huggingface_hub makes them, read whole or refused, written whole."""

from __future__ import annotations

import errno
import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save as reference_save

import convert
from convert.cli.main import run
from convert.files import SourceFile
from convert.limits import Limits
from convert.output import OutputFile
from convert.outputset import MANY_FILES
from convert.sizes import parse_size
from readers import safetensors as single

from . import oracle

CASES = Path(__file__).resolve().parent / "cases"
INDEX = "m.safetensors.index.json"
SEED = 20261129


@pytest.fixture
def hub() -> Any:
    """The reference; the tests that need it say so where it is absent."""
    return pytest.importorskip("huggingface_hub", reason="huggingface_hub, the reference for shards, is not installed")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def filled(*sizes: int) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors `a`, `b` ... of so many bytes, all different."""
    return {chr(97 + at): np.arange(size).astype(np.uint8) + np.uint8(at) for at, size in enumerate(sizes)}


def contents(folder: str | Path = ".") -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def loaded(source: str) -> dict[str, bytes]:
    """The bytes of every tensor."""
    return {name: array.tobytes() for name, array in convert.load(source).items()}


def raw(tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in tensors.items()}


def write_index(weight_map: object, **others: object) -> None:
    Path(INDEX).write_text(json.dumps({**others, "weight_map": weight_map}), "utf-8")


def refused(source: str | Path = INDEX, kind: type[convert.ConvertError] = convert.CorruptError) -> list[str]:
    """All problems of a source, each as 'file, tensor: message'."""
    with pytest.raises(kind) as caught:
        convert.open(source)
    problems = caught.value.problems
    assert all(problem.path is not None for problem in problems)
    return [f"{Path(problem.path or '').name}, {problem.tensor}: {problem.message}" for problem in problems]


# --- against the reference -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEED, SEED + 40))
def test_split_and_index_are_the_references(hub: Any, seed: int) -> None:
    """Same shards, same names, same index to the byte, and each shard as the reference library writes it."""
    draw = random.Random(seed)
    names = [
        draw.choice(["w", "größe", "a.b", "x/y", '"']) + str(draw.randrange(10**6))
        for _ in range(draw.randrange(1, 30))
    ]
    names = list(dict.fromkeys(names))
    sizes = {name: draw.choice([0, 1, draw.randrange(64), draw.randrange(400)]) for name in names}
    tensors = {name: np.full(size, at, np.uint8) for at, (name, size) in enumerate(sizes.items())}
    limits: list[int | str] = [1, 7, 64, 100, 399, 1000, "0.1KB", "1KB"]
    limit = draw.choice(limits)
    want = hub.split_state_dict_into_shards_factory(
        sizes, get_storage_size=lambda size: size, filename_pattern="m{suffix}.safetensors", max_shard_size=limit
    )
    report = convert.save(tensors, "m.safetensors", max_shard_size=limit, metadata={"format": "pt"}, verify=True)
    expected = {
        file: reference_save({name: tensors[name] for name in inside}, {"format": "pt"})
        for file, inside in want.filename_to_tensors.items()
    }
    if want.is_sharded:
        index = {"metadata": want.metadata, "weight_map": want.tensor_to_filename}
        expected[INDEX] = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    assert contents() == expected
    assert report.target_bytes == sum(map(len, expected.values()))
    assert loaded(INDEX if want.is_sharded else "m.safetensors") == raw(tensors)


@pytest.mark.parametrize(
    "text", ["5GB", "500MB", "10KB", "1TB", "1.5GB", "1.001KB", " 2 gb ", "0.57KB", "4.35MB", "1e"]
)
def test_sizes_in_text_are_the_references(hub: Any, text: str) -> None:
    """Decimal units, fractions rounded as there; what is no size there is none here."""
    theirs = importlib.import_module("huggingface_hub.serialization._base").parse_size_to_int
    try:
        want = theirs(text)
    except ValueError:
        with pytest.raises(convert.UsageError):
            parse_size(text)
    else:
        assert parse_size(text) == want


@pytest.mark.parametrize(
    ("size", "want"),
    [(1, 1), ("77", 77), ("3B", 3), ("1KiB", 1024), ("2mib", 2 << 20), ("1.5GiB", 3 << 29), ("9" * 20, int("9" * 20))],
)
def test_sizes_beyond_the_reference(size: int | str, want: int) -> None:
    """Plain numbers, and binary units."""
    assert parse_size(size) == want


@pytest.mark.parametrize(
    "size", [0, -1, True, 1.5, "", "GB", "-1GB", "0.0001KB", "5G", "5 apples", "1e3KB", "9" * 99, "٣KB"]
)
def test_what_is_no_size_is_a_usage_error(size: Any) -> None:
    """The message says what a size looks like; nothing is written."""
    with pytest.raises(convert.UsageError, match="largest size of a shard") as caught:
        convert.save(filled(1), "m.safetensors", max_shard_size=size)
    assert "GiB" in (caught.value.hint or "")
    assert contents() == {}


def test_the_split_is_as_described() -> None:
    """Without the reference: greedy in order, a large tensor alone and before the shard that is being filled."""
    convert.save(filled(6, 4, 20, 1, 10, 0), "m.safetensors", max_shard_size=10)
    index = json.loads(Path(INDEX).read_text("ascii"))
    numbers = {name: int(file[2:7]) for name, file in index["weight_map"].items()}
    assert numbers == {"a": 2, "b": 2, "c": 1, "d": 3, "e": 4, "f": 4}
    assert index["metadata"] == {"total_size": 41}


# --- there and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["merged", "again", "npz", "folder"])
def test_shards_are_a_source_like_any_other(way: str) -> None:
    """Merged into one file, split otherwise, into another format, or found by their folder."""
    tensors = filled(30, 40, 50, 60)
    convert.save(tensors, "m.safetensors", max_shard_size=80, metadata={"format": "pt"})
    os.mkdir("out")
    source, target, options = {
        "merged": (INDEX, "out/x.safetensors", {}),
        "again": (INDEX, "out/x.safetensors", {"max_shard_size": 110}),
        "npz": (INDEX, "out/x.npz", {}),
        "folder": (".", "out/x.safetensors", {}),
    }[way]
    report = convert.convert_file(source, target, verify=True, **options)  # type: ignore[arg-type]
    assert report.source_formats == ["shards"]
    assert report.metadata == {"format": "pt"}
    assert loaded("out" if way == "again" else target) == raw(tensors)
    if way in ("merged", "folder"):
        assert Path(target).read_bytes() == reference_save(tensors, {"format": "pt"})
    if way == "again":
        assert sorted(os.listdir("out"))[:2] == ["x-00001-of-00002.safetensors", "x-00002-of-00002.safetensors"]


def test_each_shard_has_the_metadata_and_its_own_memory() -> None:
    """What was encoded comes back from the set, and from a shard alone; a string is in one shard only."""
    when, text = np.array(["2026-11-29"], "datetime64[D]"), np.array("hello")
    tensors = {"a": when, "text": text, "b": when + np.timedelta64(1, "D"), "c": np.zeros(3)}
    policy = convert.Policy(datetime64="int64", str="metadata")
    convert.save(tensors, "m.safetensors", max_shard_size=8, policy=policy, metadata={"k": "v"})
    parts = sorted(path.name for path in Path().glob("m-*"))
    assert len(parts) == 3
    for part, name in zip(parts, ("a", "c", "b"), strict=True):
        metadata, entries = oracle.read_safetensors(part)
        assert set(entries) == {name}
        assert (metadata["k"], metadata["text"]) == ("v", "hello")
        own = json.loads(metadata.get("tensor-convert", "{}"))
        assert set(own) == ({name} & {"a", "b"}) | ({"text"} if part == parts[0] else set())
    with convert.open(INDEX) as checkpoint:
        assert checkpoint.metadata == {"k": "v"}
        assert not checkpoint.notes
    convert.convert_file(INDEX, "back.npz")
    back = np.load("back.npz")
    assert {name: back[name].dtype for name in back.files} == {name: array.dtype for name, array in tensors.items()}
    assert all(back[name].tobytes() == array.tobytes() for name, array in tensors.items())


def test_metadata_that_shards_do_not_share_is_named() -> None:
    """What all have is the checkpoint's; the rest is left out with a note."""
    for name, extra in (("a", {"x": "1"}), ("b", {"x": "2", "only": "b"})):
        convert.save({name: np.zeros(1)}, f"{name}.safetensors", metadata={"format": "pt", **extra})
    write_index({"a": "a.safetensors", "b": "b.safetensors"}, metadata={"total_size": 16, "note": "dropped"})
    with convert.open(INDEX) as checkpoint:
        assert checkpoint.metadata == {"format": "pt"}
        assert checkpoint.notes == ["metadata that differs from shard to shard was left out: 'only', 'x'"]


def test_sub_byte_sizes_count_packed() -> None:
    """F4 elements take half a byte in a shard and in the sum."""
    entry = json.dumps({"w": {"dtype": "F4", "shape": [6], "data_offsets": [0, 3]},
                        "v": {"dtype": "F4", "shape": [4], "data_offsets": [3, 5]}}).encode()  # fmt: skip
    Path("in.safetensors").write_bytes(len(entry).to_bytes(8, "little") + entry + b"\x12\x34\x56\x78\x9a")
    convert.convert_file("in.safetensors", "m.safetensors", max_shard_size=3, verify=True)
    assert json.loads(Path(INDEX).read_text("ascii"))["metadata"] == {"total_size": 5}
    assert oracle.read_safetensors("m-00002-of-00002.safetensors")[1]["v"][2] == b"\x78\x9a"


def test_align_holds_for_each_shard() -> None:
    """The data of every shard begins where it was asked to."""
    convert.save(filled(5, 5), "m.safetensors", max_shard_size=5, align=4096)
    lengths = [int.from_bytes(path.read_bytes()[:8], "little") for path in Path().glob("m-*")]
    assert lengths == [4088, 4088]


def test_no_tensors_make_one_plain_file() -> None:
    """An empty checkpoint is one file, not no file."""
    convert.save({}, "m.safetensors", max_shard_size=5)
    assert list(contents()) == ["m.safetensors"]


def test_same_input_gives_the_same_bytes() -> None:
    """Twice the same, whatever the number of threads."""
    tensors = filled(*range(40))
    found = []
    for jobs in (1, 4):
        convert.save(tensors, "m.safetensors", max_shard_size=50, overwrite=True, jobs=jobs)
        found.append(contents())
    assert found[0] == found[1]


@pytest.mark.skipif(os.name == "nt", reason="no limit on descriptors there")
def test_very_many_shards_need_few_descriptors() -> None:
    """Five times as many shards as files may be open: written, verified, read, synchronised."""
    import resource

    count = 5 * MANY_FILES
    tensors = {f"t{at:04}": np.full(3, at, np.int16) for at in range(count)}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * MANY_FILES, hard))
    try:
        convert.save(tensors, "m.safetensors", max_shard_size=6, verify=True, fsync=True)
        assert len(contents()) == count + 1
        report = convert.convert_file(INDEX, "one.safetensors", verify=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(report.tensors) == count
    assert Path("one.safetensors").read_bytes() == reference_save(tensors)


# --- what is refused, and its legal neighbour ----------------------------------------------------------------------


def two_shards() -> None:
    """A good checkpoint of two shards: `a` and `b` in one, `c` in the other."""
    convert.save(filled(3, 4, 5), "m.safetensors", max_shard_size=8)


def test_the_good_neighbour_is_read() -> None:
    """What the refusals below are changes of."""
    two_shards()
    assert loaded(INDEX) == loaded(".") == raw(filled(3, 4, 5))


ONE, TWO = "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"


def test_every_disagreement_is_named_at_once() -> None:
    """Missing and damaged shards, missing, extra, misplaced and duplicate tensors: all in one message."""
    two_shards()
    for name, inside in (("x", "abq"), ("y", "ar")):
        convert.save({letter: np.zeros(1) for letter in inside}, f"{name}.safetensors")
    Path("broken.safetensors").write_bytes(b"\1")
    files = {"a": "x", "b": "x", "n": "x", "r": "x", "y": "y", "g": "gone", "h": "broken"}
    write_index({name: f"{file}.safetensors" for name, file in files.items()})
    found = refused(kind=convert.InputError)
    for want in (
        "gone.safetensors, None: this shard, which the index names, is missing: an incomplete download?",
        "broken.safetensors, None: the file is cut short",
        "x.safetensors, q: this shard holds the tensor, but the index omits it",
        "x.safetensors, n: the index names the tensor, but this shard lacks it",
        "y.safetensors, a: the tensor is in this shard and in 'x.safetensors'",
        "y.safetensors, r: this shard holds the tensor, but the index says it is in 'x.safetensors'",
        "y.safetensors, y: the index names the tensor, but this shard lacks it",
    ):
        assert sum(text.startswith(want) for text in found) == 1, want
    assert len(found) == 7


SAFE = ["a..b.safetensors", "..x", "...", "model (1).safetensors", "模型.safetensors", "C.safetensors", "10:5"]
UNSAFE = [
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "sub/x.safetensors",
    "./x",
    "..\\x",
    "\\x",
    "\\\\host\\x",
    "C:\\x",
    "c:x",
    "x\0y",
]


@pytest.mark.parametrize("name", UNSAFE)
def test_a_path_that_is_no_plain_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the index is opened; every such path is named."""
    write_index({"a": name, "b": name, "c": "m.safetensors"})
    opened: list[str] = []
    monkeypatch.setattr(single, "open", lambda path, limits: opened.append(path))
    found = refused()
    assert [text.split(":")[0] for text in found] == [f"{INDEX}, a", f"{INDEX}, b"]
    assert all("unsafe path in weight_map" in text for text in found)
    assert opened == []


@pytest.mark.skipif(os.name == "nt", reason="names that Windows has not")
@pytest.mark.parametrize("name", SAFE)
def test_a_plain_name_is_accepted(name: str) -> None:
    """However odd."""
    convert.save(filled(3), name, to="safetensors")
    write_index({"a": name})
    assert loaded(INDEX) == raw(filled(3))


GOOD = '{"weight_map": {"a": "a.safetensors"}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a": "a.safetensors"}', "invalid JSON"),
        ('{"weight_map": {"a": "a.safetensors"}} x', "invalid JSON"),
        ('{"weight_map": {"a": "a.safetensors"}, "metadata": NaN}', "NaN is no JSON"),
        ("[" * 100_000, "invalid JSON|nests too deeply"),
        ('{"x": ' + "[" * 100_000, "invalid JSON|nests too deeply"),
        ("[]", "not a JSON object .found an array"),
        ("{}", "must have an object weight_map .found none"),
        ('{"weight_map": null}', "found null"),
        ('{"weight_map": ["a"]}', "found an array"),
        ('{"weight_map": {"a": 1}}', "must name a file .found a number"),
        ('{"weight_map": {"a": {"b": "a.safetensors"}}}', "must name a file .found an object"),
        ('{"weight_map": {"a": "a.safetensors", "a": "a.safetensors"}}', "duplicate key 'a'"),
        ('{"weight_map": {}, "weight_map": {"a": "a.safetensors"}}', "duplicate key 'weight_map'"),
        ('{"weight_map": {"\\ud800": "a.safetensors"}}', "lone surrogate"),
        ('{"weight_map": {"a": "\\udcff"}}', "lone surrogate"),
        ("\ufeff" + GOOD, "invalid JSON"),
    ],
)
def test_a_damaged_index_is_refused(text: str, message: str) -> None:
    """The index is named, and what is wrong with it; the same index without the fault is read."""
    convert.save(filled(3), "a.safetensors")
    Path(INDEX).write_text(text, "utf-8")
    with pytest.raises(convert.CorruptError, match=message) as caught:
        convert.open(INDEX)
    assert {problem.path for problem in caught.value.problems} == {INDEX}
    Path(INDEX).write_text(GOOD.replace("}}", '}, "metadata": {"total_size": "wrong"}, "new": [1]}'), "utf-8")
    assert loaded(INDEX) == raw(filled(3))


@pytest.mark.parametrize(("content", "kind"), [(b"", convert.CorruptError), (b'{"\xff"}', convert.CorruptError),
                                               (b"version https://git-lfs", convert.UnsupportedError)])  # fmt: skip
def test_bytes_that_are_no_index_are_refused(content: bytes, kind: type[convert.ConvertError]) -> None:
    """Empty, not UTF-8, a Git LFS pointer."""
    Path(INDEX).write_bytes(content)
    assert len(refused(kind=kind)) == 1


def test_an_index_over_the_limit_is_refused() -> None:
    """At the limit it is read, one byte over it is not, and nothing of it is parsed."""
    two_shards()
    size = os.path.getsize(INDEX)
    convert.open(INDEX, limits=Limits(json_bytes=size)).close()
    with pytest.raises(convert.LimitError, match=f"expected at most {size - 1} bytes, found {size}"):
        convert.open(INDEX, limits=Limits(json_bytes=size - 1))


def test_any_index_gives_a_checkpoint_or_a_refusal() -> None:
    """Every prefix, and a few thousand damaged bytes."""
    two_shards()
    good = Path(INDEX).read_bytes()
    draw = random.Random(SEED)
    damaged = [good[:end] for end in range(len(good))]
    for _ in range(1500):
        at = draw.randrange(len(good))
        damaged.append(good[:at] + bytes([draw.randrange(256)]) + good[at + 1 :])
    verdicts = set()
    for data in damaged:
        Path(INDEX).write_bytes(data)
        try:
            convert.open(INDEX).close()
            verdicts.add("read")
        except convert.ConvertError as err:
            verdicts.add(type(err).__name__)
    assert {"read", "CorruptError"} <= verdicts


def test_content_decides_over_the_name() -> None:
    """A safetensors file under an index' name is one, with a note; an index with a brace at byte 8 is an index."""
    convert.save(filled(3), "a.safetensors")
    os.link("a.safetensors", INDEX)
    with convert.open(INDEX) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert "as its suffix says" in checkpoint.notes[0]
    os.unlink(INDEX)
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode().ljust(ord("{"))
    Path(INDEX).write_bytes(len(header).to_bytes(8, "little") + header + b"!")
    assert Path(INDEX).read_bytes()[:1] == b"{"
    assert loaded(INDEX) == {"a": b"!"}
    Path(INDEX).write_text('{"x": [ {}], "weight_map": {"a": "a.safetensors"}}', "utf-8")
    assert Path(INDEX).read_bytes()[8:9] == b"{"
    assert loaded(INDEX) == raw(filled(3))


def test_a_folder_with_two_indexes_or_none_is_refused() -> None:
    """One has to be named; with .npy files a folder is what it was before."""
    two_shards()
    Path("other.safetensors.index.json").write_bytes(Path(INDEX).read_bytes())
    assert "nor one index of shards (found 4 other files)" in refused(".", convert.InputError)[0]
    assert loaded("other.safetensors.index.json") == raw(filled(3, 4, 5))
    np.save("x.npy", np.zeros(1))
    assert list(convert.load(".")) == ["x"]


def test_files_are_closed_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the index nor a shard stays open."""
    two_shards()
    os.unlink(TWO)
    opened: list[Any] = []
    real = SourceFile.__init__

    def watched(self: Any, path: Any) -> None:
        real(self, path)
        opened.append(self)

    monkeypatch.setattr(SourceFile, "__init__", watched)
    refused()
    assert len(opened) >= 2
    assert all(file._io is None for file in opened)


# --- cases from the real world -------------------------------------------------------------------------------------

FOLDERS = {case["id"]: case for case in json.loads((CASES / "cases.json").read_text("utf-8")) if case["id"][0] == "H"}


@pytest.mark.parametrize("as_folder", [True, False], ids=["folder", "index"])
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("H01", None),
        ("H02", "model-00002-of-00002.safetensors: .*missing: an incomplete download"),
        ("H04", "tensor 'mtp': .*the index omits it"),
        ("H05", None),
        ("H07", "(?s)tensor 'p': unsafe path in weight_map.*tensor 'q': unsafe path in weight_map"),
    ],
)
def test_case(case: str, message: str | None, as_folder: bool) -> None:
    """The checkpoint as the index says, or refused with the reason; a stray file is no part of it, and is named."""
    row = FOLDERS[case]
    source = CASES / "files" / row["file"]
    if not as_folder:
        source /= "model.safetensors.index.json"
    if message is not None:
        with pytest.raises(convert.CorruptError, match=message):
            convert.convert_file(source, "out.safetensors")
        assert contents() == {}
        return
    report = convert.convert_file(source, "out.safetensors")
    wanted = row["tensors"] if isinstance(row["tensors"], list) else next(iter(row["tensors"].values()))
    tensors = oracle.read_safetensors("out.safetensors")[1]
    found = {name: (code, shape, sha256(data).hexdigest()) for name, (code, shape, data) in tensors.items()}
    assert found == {t["name"]: (t["dtype"], tuple(t["shape"]), t["sha256"]) for t in wanted}
    assert report.notes == (["not in the index, and left out: 'model.safetensors'"] if case == "H05" else [])


# --- targets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["m.npz", "m.npy", "folder/"])
def test_only_safetensors_has_shards(target: str) -> None:
    """Others are a usage error, without a trace; without the option they are written."""
    with pytest.raises(convert.UsageError, match="has no shards"):
        convert.save(filled(3), target, max_shard_size=1)
    assert os.listdir() == []
    convert.save(filled(3), target)


def test_a_target_must_have_a_name_to_split() -> None:
    """`--to safetensors` alone does not tell how shards are to be called."""
    with pytest.raises(convert.UsageError, match=r"must end in \.safetensors"):
        convert.save(filled(3), "m.bin", to="safetensors", max_shard_size=100)
    convert.save(filled(3), "m.bin", to="safetensors")


def test_an_index_as_target_needs_a_size() -> None:
    """With one it is the name of the set."""
    with pytest.raises(convert.UsageError, match="several files only"):
        convert.save(filled(3, 3), INDEX)
    with pytest.raises(convert.UsageError, match="has no shards"):
        convert.save(filled(3, 3), INDEX, to="npz")
    convert.save(filled(3, 3), INDEX, max_shard_size=3)
    assert sorted(contents()) == [ONE, TWO, INDEX]


def test_dry_run_tells_the_shards() -> None:
    """And writes nothing."""
    report = convert.save(filled(3, 3, 3), "m.safetensors", max_shard_size=3, dry_run=True)
    assert report.notes == ["3 shards: m-00001-of-00003.safetensors, m-00002-of-00003.safetensors, ..."]
    assert contents() == {}


@pytest.mark.parametrize("there", [ONE, TWO, INDEX, "m.safetensors", "m-00007-of-00009.safetensors"])
def test_nothing_that_contradicts_may_be_there(there: str) -> None:
    """A target, the plain file, an index, a shard of another set: refused, or replaced and removed when asked."""
    Path(there).write_bytes(b"old")
    with pytest.raises(convert.TargetExistsError) as caught:
        convert.save(filled(3, 3), "m.safetensors", max_shard_size=3)
    assert caught.value.path == there
    assert "--overwrite" in (caught.value.hint or "")
    assert contents() == {there: b"old"}
    convert.save(filled(3, 3), "m.safetensors", max_shard_size=3, overwrite=True)
    assert sorted(contents()) == [ONE, TWO, INDEX]
    assert loaded(INDEX) == raw(filled(3, 3))


def test_all_files_in_the_way_are_named() -> None:
    """One message for all of an older set, when everything fits into one file too."""
    two_shards()
    before = contents()
    with pytest.raises(convert.TargetExistsError) as caught:
        convert.save(filled(3), "m.safetensors", max_shard_size=3)
    assert [problem.path for problem in caught.value.problems] == [INDEX, ONE, TWO]
    assert contents() == before
    convert.save(filled(3), "m.safetensors", max_shard_size=3, overwrite=True)
    assert contents() == {"m.safetensors": reference_save(filled(3))}


@pytest.mark.parametrize(
    "there", ["m-1-of-2.safetensors", "m-1-of-00002.safetensors",
              "xm-00001-of-00009.safetensors", "m-00001-of-00009.safetensors.bak",
              "m-00001-of-00009.bin", "m2.safetensors", "m.npz", "n.safetensors.index.json"]
)  # fmt: skip
def test_other_files_are_left_alone(there: str) -> None:
    """Names that only look alike are nobody's business, with --overwrite too."""
    Path(there).write_bytes(b"other")
    for overwrite in (False, True):
        convert.save(filled(3, 3), "m.safetensors", max_shard_size=3, overwrite=overwrite)
        assert contents()[there] == b"other"


@pytest.mark.parametrize("size", [3, 7, 8, 100])
def test_in_place(size: int) -> None:
    """The index as its own target needs no --overwrite: the old shards go when the new ones are there."""
    two_shards()
    convert.convert_file(INDEX, INDEX, max_shard_size=size, verify=True)
    assert loaded("m.safetensors" if size == 100 else INDEX) == raw(filled(3, 4, 5))
    count = {3: 3, 7: 2, 8: 2, 100: 1}[size]
    assert len(contents()) == (1 if count == 1 else count + 1)


def test_a_plain_file_is_split_in_place() -> None:
    """It is gone when its shards are there: loaders would take it for the checkpoint."""
    convert.save(filled(3, 3), "m.safetensors")
    convert.convert_file("m.safetensors", "m.safetensors", max_shard_size=3)
    assert sorted(contents()) == [ONE, TWO, INDEX]


def test_in_place_takes_no_file_that_is_not_the_source() -> None:
    """A stray plain file beside the shards is neither read nor removed unasked."""
    two_shards()
    Path("m.safetensors").write_bytes(b"mine")
    before = contents()
    with pytest.raises(convert.TargetExistsError) as caught:
        convert.convert_file(INDEX, INDEX, max_shard_size=3)
    assert [problem.path for problem in caught.value.problems] == ["m.safetensors"]
    assert contents() == before


def test_another_target_beside_the_source_is_not_in_place() -> None:
    """The plain name is not the index: the set it would replace is refused unless asked, source or not."""
    two_shards()
    before = contents()
    with pytest.raises(convert.TargetExistsError):
        convert.convert_file(INDEX, "m.safetensors", max_shard_size=3)
    assert contents() == before
    convert.convert_file(INDEX, "m.safetensors", max_shard_size=3, overwrite=True)
    assert len(contents()) == 4
    assert loaded(INDEX) == raw(filled(3, 4, 5))


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_links_are_read_and_written_through() -> None:
    """A cache keeps shards as links elsewhere; modes of replaced files stay."""
    two_shards()
    os.mkdir("blobs")
    for number, name in enumerate([ONE, TWO, INDEX]):
        os.rename(name, f"blobs/{number}")
        os.symlink(f"blobs/{number}", name)
    os.chmod("blobs/0", 0o600)
    convert.convert_file(INDEX, INDEX, max_shard_size=7, cast=[("uint8", "uint8")])
    assert os.readlink(ONE) == "blobs/0"
    assert os.stat("blobs/0").st_mode & 0o777 == 0o600
    assert loaded(INDEX) == raw(filled(3, 4, 5))
    assert sorted(os.listdir("blobs")) == ["0", "1", "2"]


# --- failures ------------------------------------------------------------------------------------------------------


def old_same() -> None:
    convert.save(
        {name: array + np.uint8(50) for name, array in filled(3, 4, 5).items()}, "m.safetensors", max_shard_size=8
    )


def old_other() -> None:
    convert.save(filled(4, 5, 6), "m.safetensors", max_shard_size=1)
    convert.save({"more": np.zeros(1)}, "unrelated.safetensors")


def old_plain() -> None:
    convert.save({"old": np.zeros(4)}, "m.safetensors")


OLD: dict[str, Callable[[], None]] = {"none": lambda: None, "same": old_same, "other": old_other, "plain": old_plain}


@pytest.mark.parametrize("named", [False, True], ids=["nameless", "named"])
@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("when", ["before", "after", "interrupt"])
@pytest.mark.parametrize("old", OLD)
def test_a_failed_commit_brings_everything_back(
    old: str, when: str, at: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file cannot get its name, before or just after it got it: as if nothing had been done."""
    if named:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    OLD[old]()
    before = contents()
    real, calls = OutputFile.commit, 0

    def failing(self: OutputFile, *, fsync: bool = False) -> None:
        nonlocal calls
        calls += 1
        if calls == at + 1 and when == "before":
            raise OSError(errno.EIO, "broken")
        real(self, fsync=fsync)
        if calls == at + 1:
            raise KeyboardInterrupt if when == "interrupt" else convert.OutputError("broken")

    monkeypatch.setattr(OutputFile, "commit", failing)
    with pytest.raises(KeyboardInterrupt if when == "interrupt" else convert.OutputError):
        convert.save(filled(3, 4, 5), "m.safetensors", max_shard_size=8, overwrite=True)
    assert contents() == before
    assert calls == at + 1


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "link", "replace"])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("old", OLD)
def test_a_system_that_fails_leaves_what_was_there(
    old: str, call: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th call and no other fails: either it was not needed and the new set is whole, or the old one is."""
    OLD[old]()
    before = contents()
    real, calls = getattr(os, call), 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **options)

    monkeypatch.setattr(os, call, failing)
    try:
        convert.save(filled(3, 4, 5), "m.safetensors", max_shard_size=8, overwrite=True)
    except convert.OutputError:
        assert contents() == before
    else:
        assert sorted(set(contents()) - {"unrelated.safetensors"}) == [ONE, TWO, INDEX]
        assert loaded(INDEX) == raw(filled(3, 4, 5))


def test_a_file_system_without_hard_links_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old files are renamed out of the way instead, and back when something fails."""
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)

    def no_link(*args: Any, **options: Any) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", no_link)
    old_same()
    before = contents()
    real = OutputFile.commit
    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "commit", lambda self, fsync: real(self) if ONE in self.target else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert.save(filled(3, 4, 5), "m.safetensors", max_shard_size=8, overwrite=True)
    assert contents() == before
    convert.save(filled(3, 4, 5), "m.safetensors", max_shard_size=8, overwrite=True)
    assert sorted(contents()) == [ONE, TWO, INDEX]
    assert loaded(INDEX) == raw(filled(3, 4, 5))


def test_a_file_made_meanwhile_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program's shard, made after the check, stays, and nothing of ours does."""
    real = OutputFile.commit

    def meanwhile(self: OutputFile, *, fsync: bool = False) -> None:
        if TWO in self.target:
            Path(TWO).write_bytes(b"theirs")
        real(self, fsync=fsync)

    monkeypatch.setattr(OutputFile, "commit", meanwhile)
    with pytest.raises(convert.TargetExistsError):
        convert.save(filled(3, 4, 5), "m.safetensors", max_shard_size=8)
    assert contents() == {TWO: b"theirs"}


def test_an_old_file_that_cannot_be_removed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new set is in place, and the message names what may be taken for current."""
    old_plain()
    real = os.unlink

    def failing(path: Any, **options: Any) -> None:
        if path == "m.safetensors":
            raise PermissionError(errno.EPERM, "no")
        real(path, **options)

    monkeypatch.setattr(os, "unlink", failing)
    with pytest.raises(convert.OutputError, match="new files are in place, but this old one") as caught:
        convert.save(filled(3, 4, 5), "m.safetensors", max_shard_size=8, overwrite=True)
    assert caught.value.path == "m.safetensors"
    assert loaded(INDEX) == raw(filled(3, 4, 5))


def test_damaged_tensors_of_several_shards_are_named_together() -> None:
    """And nothing is left of the shards that went well."""
    convert.save({letter: np.full(300, ord(letter), np.uint8) for letter in "abc"}, "in.npz")
    data = Path("in.npz").read_bytes().replace(b"a" * 300, b"x" * 300).replace(b"c" * 300, b"x" * 300)
    Path("in.npz").write_bytes(data)
    with pytest.raises(convert.CorruptError) as caught:
        convert.convert_file("in.npz", "m.safetensors", max_shard_size=300)
    assert {problem.tensor for problem in caught.value.problems} == {"a", "c"}
    assert sorted(contents()) == ["in.npz"]


def test_damage_far_apart_is_named_together() -> None:
    """More shards than are written at a time: the first and the last are both damaged, and nothing is left."""
    count = MANY_FILES + 5
    convert.save({f"t{at}": np.full(99, at, np.uint8) for at in range(count)}, "in.npz")
    data = Path("in.npz").read_bytes()
    for at in (0, count - 1):
        data = data.replace(bytes([at]) * 99, b"x" * 99)
    Path("in.npz").write_bytes(data)
    with pytest.raises(convert.CorruptError) as caught:
        convert.convert_file("in.npz", "m.safetensors", max_shard_size=99)
    assert [problem.tensor for problem in caught.value.problems] == ["t0", f"t{count - 1}"]
    assert list(contents()) == ["in.npz"]


def test_cancelling_leaves_nothing() -> None:
    """An exception of the progress callback, midway."""

    def cancel(done: int, total: int, name: str) -> None:
        if done > total // 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        convert.save(filled(3, 4, 5), "m.safetensors", max_shard_size=4, progress=cancel)
    assert contents() == {}


@pytest.mark.parametrize("damage", ["shard", "index"])
def test_verify_finds_what_the_disk_did(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard or an index that reads back other than it was written is not kept."""
    real = OutputFile.write_at
    hit = TWO if damage == "shard" else INDEX

    def faulty(self: OutputFile, offset: int, data: Any) -> None:
        content = bytearray(data)
        if hit in self.target and (offset or damage == "index"):
            content[-1] ^= 1
        real(self, offset, content)

    monkeypatch.setattr(OutputFile, "write_at", faulty)
    with pytest.raises(convert.ConvertError, match="reads back different"):
        convert.save(filled(3, 4, 5), "m.safetensors", max_shard_size=8, verify=True)
    assert contents() == {}


@pytest.mark.skipif(os.name == "nt", reason="a process ends otherwise there")
@pytest.mark.parametrize("commits", range(4))
@pytest.mark.parametrize("old", ["same", "other"])
def test_a_killed_process_leaves_no_mixed_set(old: str, commits: int) -> None:
    """Killed before the first, between or after the commits: the index leads to one whole set, or is not there."""
    OLD[old]()
    before = loaded(INDEX)
    code = f"""
import os, numpy, convert
from convert.output import OutputFile
real, done = OutputFile.commit, 0
def commit(self, *, fsync=False):
    global done
    if done == {commits}: os._exit(9)
    real(self, fsync=fsync)
    done += 1
OutputFile.commit = commit
tensors = {{name: numpy.frombuffer(data, "u1") for name, data in {raw(filled(3, 4, 5))!r}.items()}}
convert.save(tensors, "m.safetensors", max_shard_size=8, overwrite=True)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == (0 if commits == 3 else 9)
    if os.path.exists(INDEX):
        assert loaded(INDEX) == (raw(filled(3, 4, 5)) if commits == 3 else before)
    else:
        assert old == "same"
        assert commits < 3


# --- the command line ----------------------------------------------------------------------------------------------


def test_the_option_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Split, listed, merged; a size that is none, and a target without shards, are usage errors."""
    convert.save(filled(3, 4, 5), "in.npz")
    assert run(["in.npz", "m.safetensors", "--max-shard-size", "0.008KB", "--verify"]) == 0
    assert f"note: 2 shards: {ONE}, {TWO}\n" in capsys.readouterr().err
    assert run(["ls", INDEX]) == 0
    assert "shards, 3 tensors" in capsys.readouterr().out
    assert run([INDEX, "m.npz"]) == 0
    assert loaded("m.npz") == raw(filled(3, 4, 5))
    capsys.readouterr()
    assert run(["in.npz", "x.safetensors", "--max-shard-size", "big"]) == 2
    assert "found 'big'" in capsys.readouterr().err
    assert run(["in.npz", "x.npz", "--max-shard-size", "1GB"]) == 2
    assert "npz has no shards" in capsys.readouterr().err
    assert run(["formats"]) == 0
    assert "shards" in capsys.readouterr().out
