"""Several sources, and folders of .npy files, as sources and as targets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import convert

from . import oracle
from .faultfs import listing

Array = npt.NDArray[Any]
TARGETS = ["out.npz", "out.safetensors", "out/"]


def test_several_sources_are_gathered(tmp_path: Path) -> None:
    """Of any formats; a .npy file's tensor is named after its stem; metadata is joined."""
    np.save(tmp_path / "a.npy", np.zeros(1))
    np.savez(tmp_path / "b.npz", b=np.zeros(2))
    oracle.save_with_reference(tmp_path / "c.safetensors", {"c": np.zeros(3)}, {"note": "x"})
    sources = [tmp_path / name for name in ("c.safetensors", "a.npy", "b.npz")]
    report = convert.convert_file(sources, tmp_path / "all.safetensors", metadata={"more": "y"})
    assert report.sources == [str(path) for path in sources]
    assert report.source_formats == ["npy", "npz", "safetensors"]
    assert report.source_bytes == sum(path.stat().st_size for path in sources)
    metadata, found = oracle.read_safetensors(tmp_path / "all.safetensors")
    assert set(found) == {"a", "b", "c"}
    assert metadata == {"note": "x", "more": "y"}


def test_sources_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """Two tensors of one name, two texts of one key: named with both files, nothing chosen silently."""
    for name, text in (("a", "x"), ("b", "y")):
        oracle.save_with_reference(tmp_path / f"{name}.safetensors", {name: np.zeros(1)}, {"note": text})
    with pytest.raises(convert.CorruptError, match="differ in metadata 'note'"):
        convert.open([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    np.savez(tmp_path / "c.npz", a=np.zeros(1))
    with pytest.raises(convert.CorruptError, match=r"taken by a tensor of .*a\.safetensors") as caught:
        convert.open([tmp_path / "a.safetensors", tmp_path / "c.npz"])
    assert (caught.value.tensor, caught.value.path) == ("a", str(tmp_path / "c.npz"))


def test_the_same_source_twice_is_refused(tmp_path: Path) -> None:
    """Two tensors of one name, though of the same file."""
    np.save(tmp_path / "a.npy", np.zeros(1))
    with pytest.raises(convert.CorruptError):
        convert.open([tmp_path / "a.npy", tmp_path / "a.npy"])


def test_no_source_is_a_usage_error() -> None:
    """An empty list came from a glob that matched nothing."""
    with pytest.raises(convert.UsageError, match="no source"):
        convert.open([])


def test_a_source_that_cannot_be_read_closes_the_others(tmp_path: Path) -> None:
    """No descriptor is left open behind an error."""
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("counts descriptors in /proc")
    np.savez(tmp_path / "a.npz", a=np.zeros(1))
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 broken")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(convert.InputError):
            convert.open([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_of_npy_files_is_a_source(tmp_path: Path) -> None:
    """Named by relative path; hidden files are left alone, others counted in a note."""
    folder = tmp_path / "in"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name in ("b.npy", "a.NPY", "deep/er/c.npy", ".hidden/d.npy", ".e.npy"):
        with (folder / name).open("wb") as file:
            np.save(file, np.array(name))
    (folder / "README.txt").write_text("hi")
    with convert.open(folder) as checkpoint:
        assert list(checkpoint) == ["a", "b", "deep/er/c"]
        assert str(checkpoint["deep/er/c"].numpy()) == "deep/er/c.npy"
        assert checkpoint.notes == [f"1 files in {folder} are not .npy files and were left out"]
    (tmp_path / "none").mkdir()
    with pytest.raises(convert.InputError, match=r"holds no \.npy files"):
        convert.open(tmp_path / "none")


def test_folders_of_more_files_than_may_be_open(tmp_path: Path) -> None:
    """Descriptors do not grow with the number of files, neither reading nor writing."""
    resource = pytest.importorskip("resource")
    count = 300
    convert.save({f"t{index:03}": np.array(index) for index in range(count)}, f"{tmp_path}/in/")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_before = max(map(int, os.listdir("/proc/self/fd"))) if os.path.isdir("/proc/self/fd") else 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, open_before + 150), hard))
    try:
        convert.convert_file(tmp_path / "in", f"{tmp_path}/out/", verify=True)
        paths = sorted((tmp_path / "in").iterdir())
        convert.convert_file(paths, tmp_path / "out.npz")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(listing(tmp_path / "out")) == count
    assert [int(array) for array in convert.load(tmp_path / "out.npz").values()] == list(range(count))


AWFUL = [
    "..", ".", "../up", "a/../../b", "/absolute", "//server/share", "C:\\Windows\\x", "C:", "c:/x", "~", "~/x",
    "a/", "/", "a//b", "a/./b", "con", "CON", "nul.txt", "aux.npy", "COM1", "lpt9.a.b", "a.", "a ", " a", ".hidden",
    "a.npy", "a.npy/b", "a.npz", "%41", "%", "%2F", "100%", "a%2e", "a\0b", "new\nline", "tab\t", "bell\x07", "del\x7f",
    "a:b", "a*b", 'a"b', "a|b", "a<b>", "a?b", "a\\b", "'", "$HOME", "`id`", "-rf", "größe", "GRÖSSE", "n\u0303",
    "\u00f1", "🙂", "\u202e", "\ufeffa", "İ", "ı", "K", "k", "\u212a", "ß", "SS", "ss", "Model/W", "model.w", "MODEL.W",
    "Model.w", "x" * 230,
]  # fmt: skip


def test_awful_names_survive_a_folder(tmp_path: Path) -> None:
    """Traversal, drives, reserved names, dots and spaces at the ends, percent signs, names that only differ in case or
    normalisation: each has a file of its own inside the folder, and comes back as it was."""
    arrays = {name: np.array([index], np.int16) for index, name in enumerate(AWFUL)}
    oracle.save_with_reference(tmp_path / "in.safetensors", arrays)
    out = tmp_path / "sub" / "out"
    out.parent.mkdir()
    convert.convert_file(tmp_path / "in.safetensors", f"{out}/")
    assert listing(tmp_path) == ["in.safetensors", "sub"]
    assert listing(tmp_path / "sub") == ["out"]
    files = [path.relative_to(out).as_posix() for path in out.rglob("*.npy")]
    files = [file for file in files if (out / file).is_file()]
    assert len(files) == len(AWFUL)
    assert len({file.casefold() for file in files}) == len(AWFUL)
    for part in {part for file in files for part in file.split("/")}:
        assert not set(part) & set('<>:"|?*\\\\\0\n\t\x07\x7f')
        assert not part.startswith((".", " "))
        assert not part.endswith((".", " "))
        assert part.split(".")[0].lower() not in {"con", "nul", "aux", "com1", "lpt9"}
        assert len(part.encode()) <= 255
    convert.convert_file(out, tmp_path / "back.safetensors")
    found = oracle.read_safetensors(tmp_path / "back.safetensors")[1]
    assert {name: entry[2] for name, entry in found.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


@pytest.mark.parametrize("name", ["n" * 4000, "é" * 200, "a/" + "n" * 300])
def test_names_too_long_for_a_file_are_refused(tmp_path: Path, name: str) -> None:
    """Before anything is written, with a way out."""
    with pytest.raises(convert.PolicyError, match="too long for a file") as caught:
        convert.save({"ok": np.zeros(1), name: np.zeros(1)}, f"{tmp_path}/out/")
    assert caught.value.tensor == name
    assert "--rename" in str(caught.value.hint)
    assert listing(tmp_path) == []


def test_paths_too_long_for_a_file_system_are_refused(tmp_path: Path) -> None:
    """Every part is short enough, but not all of them together."""
    with pytest.raises(convert.ConvertError):
        convert.save({"/".join(["d" * 200] * 30): np.zeros(1)}, f"{tmp_path}/out/")


@pytest.mark.parametrize("name", ["../%2F", "../\0"])
def test_percent_and_nul_in_a_name_that_must_not_be_a_path(tmp_path: Path, name: str) -> None:
    """Encoding one thing does not change another."""
    convert.save({name: np.zeros(1)}, tmp_path / "in.safetensors")
    convert.convert_file(tmp_path / "in.safetensors", f"{tmp_path}/out/")
    with convert.open(tmp_path / "out") as checkpoint:
        assert list(checkpoint) == [name]


def test_folders_that_only_differ_in_case_are_told_apart(tmp_path: Path) -> None:
    """Where `A` and `a` are one folder, the files would come back under one name."""
    convert.save({"A/x": np.zeros(1), "a/y": np.zeros(1)}, f"{tmp_path}/out/")
    folders = [path.name for path in (tmp_path / "out").iterdir()]
    assert len({name.casefold() for name in folders}) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_no_tensors_at_all(tmp_path: Path, target: str) -> None:
    """An empty file is a file; an empty folder a folder."""
    convert.save({}, f"{tmp_path}/{target}", verify=target != "out/")
    assert (tmp_path / target).exists()


def test_load_takes_what_is_wanted(tmp_path: Path) -> None:
    """By globs; and the policy decides about what is no array as it stands."""
    np.savez(
        tmp_path / "in.npz",
        a=np.zeros(1),
        b=np.array(["2020"], "M8[D]"),
        c=np.array([None], object),
        v=np.zeros(2, "V2"),
    )
    loaded = convert.load(tmp_path / "in.npz", include=["?"], exclude=["c"])
    assert {name: str(array.dtype) for name, array in loaded.items()} == {
        "a": "float64",
        "b": "datetime64[D]",
        "v": "bfloat16",
    }
    with pytest.raises(convert.PolicyError, match="pickle"):
        convert.load(tmp_path / "in.npz")
    loaded = convert.load(tmp_path / "in.npz", policy=convert.Policy(object="skip", V2="uint16"))
    assert loaded["v"].dtype == np.uint16
    assert "c" not in loaded


def test_arrays_that_are_loaded_are_the_callers(tmp_path: Path) -> None:
    """Writable, aligned, independent of the file, in C order."""
    np.savez(tmp_path / "in.npz", w=np.asfortranarray(np.ones((2, 3), ">f4")))
    array = convert.load(tmp_path / "in.npz")["w"]
    (tmp_path / "in.npz").unlink()
    array[0, 0] = 5
    assert array.flags.c_contiguous
    assert array.flags.aligned
    assert array.dtype == np.dtype("<f4")


CALLS: list[Callable[[Path], object]] = [
    lambda path: convert.open(path),
    lambda path: convert.load(path),
    lambda path: convert.convert_file(path, path.with_name("out.npz")),
]


@pytest.mark.parametrize("call", CALLS)
def test_all_ways_in_refuse_alike(tmp_path: Path, call: Callable[[Path], object]) -> None:
    """A missing file is an InputError everywhere, never an OSError."""
    with pytest.raises(convert.InputError, match="No such file"):
        call(tmp_path / "missing.npz")
