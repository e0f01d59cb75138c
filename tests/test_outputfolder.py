"""Folders of files that appear as a whole, or not at all; what is in the way is kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import convert
from convert.output import committed
from convert.outputfolder import OutputFolder
from tests.faultfs import listing


def folder_output(target: Path, overwrite: bool = False) -> OutputFolder:
    """A folder being built with one new file in it."""
    output = OutputFolder(target, overwrite=overwrite, suffix=".npy")
    Path(output.building, "new.npy").write_bytes(b"new")
    return output


def swap_begun(folder: Path) -> tuple[Path, OutputFolder]:
    """A folder with one old file, and the one that is to take its place."""
    out = folder / "out"
    out.mkdir()
    (out / "old.npy").write_bytes(b"old")
    return out, folder_output(out, overwrite=True)


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder_appears_as_a_whole(tmp_path: Path, slash: str) -> None:
    """It is built under a hidden name, and there only after the commit."""
    output = OutputFolder(f"{tmp_path / 'out'}{slash}", overwrite=False, suffix=".npy")
    Path(output.building, "new.npy").write_bytes(b"new")
    assert not (tmp_path / "out").exists()
    assert all(name.startswith(".out.") and name.endswith(".convert-tmp") for name in listing(tmp_path))
    assert output.size() == 3
    output.commit(fsync=True)
    assert listing(tmp_path) == ["out"]
    assert listing(tmp_path / "out") == ["new.npy"]
    output.discard()
    assert listing(tmp_path / "out") == ["new.npy"]


def test_an_empty_folder_is_accepted_as_target(tmp_path: Path) -> None:
    """Made beforehand, perhaps with folders in it; there is nothing in it to lose."""
    (tmp_path / "out" / "deep").mkdir(parents=True)
    folder_output(tmp_path / "out").commit()
    assert listing(tmp_path) == ["out"]
    assert listing(tmp_path / "out") == ["new.npy"]


def test_a_folder_with_files_is_not_overwritten_unasked(tmp_path: Path) -> None:
    """The same promise as for a file."""
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "deep" / "old.npy").write_bytes(b"old")
    with pytest.raises(convert.TargetExistsError):
        folder_output(tmp_path / "out")
    assert listing(tmp_path) == ["out"]


def test_overwriting_swaps_the_folder(tmp_path: Path) -> None:
    """Old files do not linger between the new ones; the mode of the folder stays."""
    out = tmp_path / "out"
    out.mkdir(mode=0o750)
    (out / "old.npy").write_bytes(b"old")
    mode = out.stat().st_mode
    output = folder_output(out, overwrite=True)
    assert listing(out) == ["old.npy"]
    output.commit(fsync=True)
    assert listing(tmp_path) == ["out"]
    assert listing(out) == ["new.npy"]
    assert out.stat().st_mode == mode


@pytest.mark.parametrize("stray", ["notes.txt", "deep/model.bin", ".hidden", "linked"])
def test_other_files_protect_a_folder(tmp_path: Path, stray: str) -> None:
    """A home folder given by mistake is not replaced, even with overwrite."""
    out = tmp_path / "out"
    (out / "deep").mkdir(parents=True)
    (out / "old.npy").write_bytes(b"old")
    if stray == "linked":
        (out / stray).symlink_to(tmp_path, target_is_directory=True)
    else:
        (out / stray).write_bytes(b"precious")
    with pytest.raises(convert.OutputError, match=r"holds more than \.npy files") as caught:
        folder_output(out, overwrite=True)
    assert stray.rpartition("/")[2] in caught.value.message
    assert listing(tmp_path) == ["out"]
    assert (out / stray).exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("file", ["theirs.npy", "theirs.txt"])
def test_what_appears_in_the_folder_meanwhile_is_not_lost(tmp_path: Path, overwrite: bool, file: str) -> None:
    """The folder is looked at again before it is swapped."""
    out = tmp_path / "out"
    out.mkdir()
    output = folder_output(out, overwrite=overwrite)
    (out / file).write_bytes(b"theirs")
    if overwrite and file.endswith(".npy"):
        output.commit()
        assert listing(out) == ["new.npy"]
    else:
        with pytest.raises(convert.OutputError):
            output.commit()
        assert listing(out) == [file]
    assert listing(tmp_path) == ["out"]


@pytest.mark.parametrize("appears", ["folder", "file", "link"])
def test_a_folder_target_that_appears_meanwhile_is_kept(tmp_path: Path, appears: str) -> None:
    """Somebody else's folder or file of that name, made between start and commit, stays."""
    out = tmp_path / "out"
    output = folder_output(out)
    if appears == "folder":
        out.mkdir()
        (out / "theirs.npy").write_bytes(b"theirs")
    elif appears == "file":
        out.write_bytes(b"theirs")
    else:
        out.symlink_to("nowhere")
    with pytest.raises(convert.OutputError):
        output.commit()
    assert listing(tmp_path) == ["out"]
    assert not (out / "new.npy").exists()
    assert out.is_symlink() == (appears == "link")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_no_folder(tmp_path: Path, overwrite: bool) -> None:
    """A file where a folder shall be is refused, never removed."""
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(convert.OutputError, match="expected a folder"):
        folder_output(tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out").read_bytes() == b"old"
    assert listing(tmp_path) == ["out"]


def test_a_link_to_a_folder_is_written_through(tmp_path: Path) -> None:
    """The link stays; the folder behind it is swapped where it is."""
    real = tmp_path / "disk"
    (real / "data").mkdir(parents=True)
    (real / "data" / "old.npy").write_bytes(b"old")
    (tmp_path / "out").symlink_to(os.path.join("disk", "data"), target_is_directory=True)
    folder_output(tmp_path / "out", overwrite=True).commit()
    assert (tmp_path / "out").is_symlink()
    assert listing(real) == ["data"]
    assert listing(real / "data") == ["new.npy"]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_of_a_swap_restores_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException
) -> None:
    """Between the two renames there is no folder of that name; if the second fails, the first is undone."""
    out, output = swap_begun(tmp_path)
    real = os.rename
    calls = 0

    def rename(source: str, target: str) -> None:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise error
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises((convert.OutputError, KeyboardInterrupt)), committed(output):
        output.commit()
    assert listing(tmp_path) == ["out"]
    assert (out / "old.npy").read_bytes() == b"old"


def test_an_interrupt_right_after_the_first_rename_restores_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C can come after the system did its work and before Python goes on."""
    out, output = swap_begun(tmp_path)
    real = os.rename

    def rename(source: str, target: str) -> None:
        monkeypatch.undo()
        real(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt), committed(output):
        output.commit()
    assert listing(tmp_path) == ["out"]
    assert (out / "old.npy").read_bytes() == b"old"


def test_folders_are_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fsync every folder of the output, and the one it stands in; without it none."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    output = folder_output(tmp_path / "out")
    (Path(output.building) / "deep").mkdir()
    output.commit(fsync=True)
    folders = (tmp_path / "out", tmp_path / "out" / "deep", tmp_path)
    assert sorted(synced) == sorted(folder.stat().st_ino for folder in folders)
    synced.clear()
    folder_output(tmp_path / "other").commit()
    assert synced == []


@pytest.mark.parametrize("name", ["n" * 255, "🙂" * 63], ids=["1", "4"])
def test_names_of_folders_may_be_255_bytes_long(tmp_path: Path, name: str) -> None:
    """For a folder too, both when it is new and when it is swapped."""
    folder_output(tmp_path / name).commit()
    folder_output(tmp_path / name, overwrite=True).commit()
    assert listing(tmp_path) == [name]


def test_a_missing_parent_is_told(tmp_path: Path) -> None:
    """Folders above the target are not made up."""
    with pytest.raises(convert.OutputError) as caught:
        folder_output(tmp_path / "missing" / "out")
    assert "mkdir -p" in str(caught.value.hint)
