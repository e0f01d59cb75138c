"""Memory stays bounded whatever the size of a tensor: 2 GiB go through in less than 128 MiB. So do 100,000 tensors."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak from /proc"),
]

DATA_BYTES = 1 << 31
ROWS, COLUMNS = 1 << 14, 1 << 15
ADDRESS_SPACE = 1 << 30
MIB = 1 << 20
ANY_MIB, COPY_MIB = 128, 96

# The address space is limited too, so that mapping or reserving the whole file is found out as well.
PROGRAM = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({ADDRESS_SPACE}, {ADDRESS_SPACE}))
from convert.cli.main import run
status = run(sys.argv[1:])
for line in open("/proc/self/status"):
    if line.startswith("VmHWM:"):
        print(line.split()[1])
sys.exit(status)
"""


def npy_header(fortran: bool, descr: str, rows: int = ROWS) -> bytes:
    """A .npy header of 128 bytes for one tensor of DATA_BYTES."""
    columns = ROWS * COLUMNS // rows
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': ({rows}, {columns}), }}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + text.ljust(117).encode() + b"\n"


def write_sparse(path: Path, start: bytes, end: bytes = b"") -> None:
    """`start`, DATA_BYTES zeros that take no space on the disk, `end`."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(len(start) + DATA_BYTES)
        file.seek(0, os.SEEK_END)
        file.write(end)


def write_npz(path: Path, header: bytes) -> None:
    """A stored archive with one member `w`, checksum and all."""
    zeros = bytes(MIB)
    crc = zlib.crc32(header)
    for _ in range(DATA_BYTES // MIB):
        crc = zlib.crc32(zeros, crc)
    name, size = b"w.npy", len(header) + DATA_BYTES
    facts = struct.pack("<HHHHHLLLHH", 20, 0, 0, 0, 33, crc, size, size, len(name), 0)
    local = b"PK\x03\x04" + facts + name
    central = b"PK\x01\x02" + struct.pack("<H", 20) + facts + struct.pack("<HHHLL", 0, 0, 0, 0, 0) + name
    end = b"PK\x05\x06" + struct.pack("<HHHHLLH", 0, 0, 1, 1, len(central), len(local) + size, 0)
    write_sparse(path, local + header, central + end)


def peak_mib(*argv: object) -> float:
    """Run the program; the most memory it ever held."""
    options = [] if argv[0] in ("check", "ls") else ["--jobs", "2", "--quiet"]
    command = [sys.executable, "-c", PROGRAM, *options, *map(str, argv)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    peak = int(result.stdout.splitlines()[-1]) / 1024
    sys.stdout.write(f"peak {peak:.1f} MiB: {' '.join(map(str, argv))}\n")
    return peak


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor of zeros in every format and order; a few kilobytes on the disk, 2 MB the deflated ones."""
    folder = tmp_path_factory.mktemp("sources")
    write_sparse(folder / "C.npy", npy_header(False, "<f4"))
    write_sparse(folder / "F.npy", npy_header(True, "<f4"))
    write_sparse(folder / "F-narrow.npy", npy_header(True, "<f4", ROWS * 16))
    write_npz(folder / "C.npz", npy_header(False, "<f4"))
    write_npz(folder / "F-big.npz", npy_header(True, ">f4"))
    entry = {"w": {"dtype": "F32", "shape": [ROWS, COLUMNS], "data_offsets": [0, DATA_BYTES]}}
    header = json.dumps(entry).encode().ljust(128)
    write_sparse(folder / "C.safetensors", struct.pack("<Q", 128) + header)
    return folder


@pytest.mark.parametrize(
    ("source", "target"), [("C.npy", "out.safetensors"), ("C.npz", "out.npz"), ("C.safetensors", "out.npy")]
)
def test_a_plain_copy_takes_less_than_96_mib(sources: Path, tmp_path: Path, source: str, target: str) -> None:
    """Stored to stored: a few buffers, however large the tensor."""
    assert peak_mib(sources / source, tmp_path / target) < COPY_MIB
    assert (tmp_path / target).stat().st_size > DATA_BYTES
    (tmp_path / target).unlink()


@pytest.mark.parametrize(
    ("source", "target", "options"),
    [
        pytest.param("F-big.npz", "out.npz", [], id="turned and swapped"),
        pytest.param("F.npy", "out.npz", ["--compress"], id="turned through a file and deflated"),
        pytest.param("F-narrow.npy", "out.npz", ["--compress", "--jobs", "4"], id="turned and deflated"),
        pytest.param("F.npy", "out.npy", ["--cast", "float32=bfloat16", "--jobs", "8"], id="turned and cast"),
        pytest.param("C.safetensors", "out.safetensors", ["--cast", "float32=bfloat16"], id="cast"),
        pytest.param("C.npz", "out.safetensors", ["--cast", "float32=int8", "--verify"], id="cast and verified"),
    ],
)
def test_everything_else_takes_less_than_128_mib(
    sources: Path, tmp_path: Path, source: str, target: str, options: list[str]
) -> None:
    """Fortran order, byte order, casts and the pass that verifies."""
    assert peak_mib(sources / source, tmp_path / target, *options) < ANY_MIB
    assert (tmp_path / target).exists()
    (tmp_path / target).unlink()


@pytest.mark.parametrize(("source", "order"), [("C.safetensors", "C"), ("F.npy", "keep")])
def test_deflated_archives_take_less_than_128_mib(sources: Path, tmp_path: Path, source: str, order: str) -> None:
    """Deflating, inflating, and inflating what must then be turned, through a temporary file."""
    packed = tmp_path / "packed.npz"
    assert peak_mib(sources / source, packed, "--compress", "1", "--order", order) < ANY_MIB
    assert packed.stat().st_size < DATA_BYTES // 100
    assert peak_mib(packed, tmp_path / "out.safetensors") < ANY_MIB
    assert (tmp_path / "out.safetensors").stat().st_size > DATA_BYTES
    (tmp_path / "out.safetensors").unlink()
    if order == "C":
        assert peak_mib(packed, tmp_path / "again.npz", "--compress", "3") < ANY_MIB
    packed.unlink()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 100,000 tensors with names as long as they mostly are."""
    path = tmp_path_factory.mktemp("many") / "many.safetensors"
    entries = {
        f"model.layers.{index // 10}.block.weight_{index % 10}": {
            "dtype": "F32", "shape": [4, 4], "data_offsets": [64 * index, 64 * index + 64],
        }
        for index in range(100_000)
    }  # fmt: skip
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64 * len(entries)))
    return path


@pytest.mark.parametrize("argv", [["ls"], ["ls", "--json"], ["check"]], ids=" ".join)
def test_looking_at_100000_tensors_takes_less_than_128_mib(many: Path, argv: list[str]) -> None:
    """Their names, shapes and places are held, what is printed is not."""
    assert peak_mib(argv[0], many, *argv[1:]) < ANY_MIB


@pytest.mark.parametrize("target", ["out.safetensors", "out.npz"])
def test_converting_100000_tensors_takes_less_than_128_mib(many: Path, tmp_path: Path, target: str) -> None:
    """And back again."""
    assert peak_mib(many, f"{tmp_path}/{target}") < ANY_MIB
    if target == "out.npz":
        assert peak_mib(tmp_path / target, tmp_path / "again.safetensors") < ANY_MIB
