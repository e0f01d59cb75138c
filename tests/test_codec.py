"""CRC-32 and deflate are the same with isal, with its public parts alone, and with nothing but zlib."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import convert
from convert import codec

RANDOM = random.Random(2)
PIECES = {
    "empty": b"",
    "one byte": b"a",
    "repeated": b"abcdefgh" * 20_000,
    "noise": RANDOM.randbytes(150_000),
    "floats": np.linspace(0, 1, 40_000, dtype="<f4").tobytes(),
}
WITHOUT_ISAL = (
    "import sys; sys.modules['isal'] = None; from convert import codec; assert codec.isal_zlib is None; "
    "from convert.cli.main import run; sys.exit(run(sys.argv[1:]))"
)


class _PublicIsal:
    """isal_zlib without what is private to it."""

    def __init__(self, library: object) -> None:
        self._library = library

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._library, name)


@pytest.fixture(params=["isal", "public isal", "zlib"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the functions of the module find installed."""
    name: str = request.param
    if name == "public isal":
        monkeypatch.setattr(codec, "isal_zlib", _PublicIsal(codec.isal_zlib))
    if name == "zlib":
        monkeypatch.setattr(codec, "isal_zlib", None)
        monkeypatch.setattr(codec, "igzip_lib", None)
    return name


@pytest.mark.parametrize("level", range(1, 10))
def test_joined_blocks_are_one_stream(library: str, level: int) -> None:
    """zlib inflates blocks that refer back to each other to the data they were made of, and finds the end."""
    data = b"".join(PIECES.values()) * 2
    packed = []
    size = 100_000
    for begin in range(0, len(data), size):
        before = data[max(begin - codec.WINDOW_BYTES, 0) : begin]
        packed.append(codec.deflate_block(memoryview(data)[begin : begin + size], level, before))
    stream = zlib.decompressobj(-15)
    assert stream.decompress(b"".join(packed) + codec.DEFLATE_END) == data
    assert stream.eof
    assert not stream.unused_data


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("step", [1, 7, 1000, 1 << 20])
def test_inflating_in_pieces(library: str, name: str, step: int) -> None:
    """Any sizes of input and output give zlib's data; no call hands out more than it was asked for."""
    data = PIECES[name]
    packed = zlib.compress(data, 6)[2:-4] + b"tail"
    step = max(step, len(packed) // 500)
    stream = codec.inflater()
    out, at = [], 0
    while not stream.eof:
        fed = b""
        if stream.needs_input:
            fed = packed[at : at + step]
            at += len(fed)
            assert fed
        piece = stream.decompress(fed, 10 * step)
        assert len(piece) <= 10 * step
        out.append(piece)
    assert b"".join(out) == data
    assert stream.unused_data + packed[at:] == b"tail"


def test_checksums_combine() -> None:
    """The CRC-32 of a whole from those of its parts, in isal's way and in ours, is zlib's."""
    parts = [RANDOM.randbytes(size) for size in (0, 1, 1000, 65_537, 0, 3)]
    for combine in (codec.crc32_combine, codec._combine):
        whole, joined = b"", 0
        for part in parts:
            joined = combine(joined, codec.crc32(part), len(part))
            whole += part
            assert joined == zlib.crc32(whole)


@pytest.mark.parametrize("options", [[], ["--compress"], ["--compress", "9"]])
def test_a_conversion_without_isal(tmp_path: Path, options: list[str]) -> None:
    """Where there are no wheels of isal everything works the same, only slower."""
    arrays = {"a": np.arange(300_000, dtype="<f4"), "f": np.asfortranarray(np.eye(3)), "s": np.float64(1)}
    np.savez_compressed(tmp_path / "in.npz", **arrays)  # type: ignore[arg-type]
    argv = [sys.executable, "-c", WITHOUT_ISAL, "in.npz", "out.npz", "--quiet", *options]
    subprocess.run(argv, check=True, cwd=tmp_path)
    with np.load(tmp_path / "out.npz") as found:
        assert {name: found[name].tobytes() for name in found.files} == {
            name: array.tobytes("C") for name, array in arrays.items()
        }
    assert convert.load(tmp_path / "out.npz")["a"].tobytes() == arrays["a"].tobytes()


@pytest.mark.parametrize("place", [0, 100, -1])
def test_a_damaged_stream_without_isal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """zlib's errors are ours, too."""
    path = tmp_path / "in.npz"
    np.savez_compressed(path, a=np.random.default_rng(0).standard_normal(1000))
    damaged = bytearray(path.read_bytes())
    begin = damaged.index(b"a.npy") + 25
    end = damaged.index(b"PK\x01\x02")
    damaged[(begin if place >= 0 else end) + place] ^= 0xFF
    path.write_bytes(damaged)
    monkeypatch.setattr(codec, "igzip_lib", None)
    monkeypatch.setattr(codec, "isal_zlib", None)
    with pytest.raises(convert.CorruptError, match=r"damaged|ends early|another size|follow|past its|no npy"):
        convert.load(path)
