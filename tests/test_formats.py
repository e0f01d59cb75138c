"""What a file is, told by its content."""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import convert
from convert import UnsupportedError, formats


def tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("weights/{0}.npy"))
    return out.getvalue()


FOREIGN = {what: (magic + b"\xff" * 600, hint) for offset, magic, what, hint in formats._FOREIGN if offset == 0}
FOREIGN["a tar archive"] = (tar(), "tar -xf")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".bin"])
@pytest.mark.parametrize("what", sorted(FOREIGN))
def test_other_files_are_named(tmp_path: Path, what: str, suffix: str) -> None:
    """What it is and what to do, whatever the suffix claims."""
    data, hint = FOREIGN[what]
    (tmp_path / f"w{suffix}").write_bytes(data)
    with pytest.raises(UnsupportedError, match=f"is {what}") as caught:
        convert.open(tmp_path / f"w{suffix}")
    assert hint in str(caught.value.hint)


def test_an_array_may_hold_what_marks_a_tar_archive(tmp_path: Path) -> None:
    """At byte 257, where a tar archive has it."""
    array = np.zeros(600, np.uint8)
    array[257 - 128 : 262 - 128] = list(b"ustar")
    np.save(tmp_path / "w.npy", array)
    assert (tmp_path / "w.npy").read_bytes()[257:262] == b"ustar"
    assert np.array_equal(convert.load(tmp_path / "w.npy")["w"], array)


@pytest.mark.parametrize("magic", [b"\x1f\x8b", b"BZh"])
def test_a_safetensors_header_may_be_as_long_as_another_format_is_marked(tmp_path: Path, magic: bytes) -> None:
    """Its length comes first, and may be any number where the header is not padded to 8 bytes, as MLX leaves it."""
    length = int.from_bytes(magic, "little")
    header = b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'.ljust(length)
    data = struct.pack("<Q", length) + header + b"\1\2"
    assert data.startswith(magic)
    assert safetensors.numpy.load(data)["w"].tolist() == [1, 2]
    (tmp_path / "w.safetensors").write_bytes(data)
    assert convert.load(tmp_path / "w.safetensors")["w"].tolist() == [1, 2]
