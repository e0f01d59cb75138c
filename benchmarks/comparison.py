"""What becomes of awkward arrays on the way from npz to safetensors: the table of the README, made by running it.

    python -m benchmarks.comparison             prints the table; needs mlx

Each cell is a process of its own that converts one file. What it wrote is read back by the safetensors library, which
is laxer than the format's rules, and compared with the bytes that numpy has.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize

Expected = dict[str, tuple[str, tuple[int, ...], bytes]]
Make = Callable[[Path], Expected]

TOOLS = {
    "numpy + safetensors": (
        "import sys, numpy as np\n"
        "from safetensors.numpy import save_file\n"
        "save_file(dict(np.load(sys.argv[1])), sys.argv[2])\n"
    ),
    "MLX": (
        "import os, sys, mlx.core as mx\n"
        "mx.set_default_device(mx.cpu)\n"
        "mx.save_safetensors(sys.argv[2], dict(mx.load(sys.argv[1])))\n"
        "os._exit(0)\n"  # its threads now and then abort the process at its end, when the file is complete
    ),
    "convert": "import sys\nfrom convert.cli.main import main\nsys.exit(main(sys.argv[1:3]))\n",
}


def _npy(array: Any) -> bytes:
    data = io.BytesIO()
    np.lib.format.write_array(data, array)
    return data.getvalue()


def _zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _entry(code: str, array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return code, array.shape, np.ascontiguousarray(array).tobytes()


_W = np.arange(12, dtype="<f4").reshape(3, 4)


def _fortran(path: Path) -> Expected:
    np.savez(path, w=np.asfortranarray(_W))
    return {"w": _entry("F32", _W)}


def _big(path: Path) -> Expected:
    np.savez(path, w=_W.astype(">f4"))
    return {"w": _entry("F32", _W)}


def _bfloat16(path: Path) -> Expected:
    array = _W.astype(ml_dtypes.bfloat16)
    np.savez(path, w=array.view("V2"))
    return {"w": _entry("BF16", array)}


def _float8(path: Path) -> Expected:
    array = _W.astype(ml_dtypes.float8_e5m2)
    _zip(path, {"w.npy": _npy(_W.astype("u1")).replace(b"|u1", b"<f1")[: -_W.size] + array.tobytes()})
    return {"w": _entry("F8_E5M2", array)}


def _double(path: Path) -> Expected:
    np.savez(path, w=_W.astype("<f8"))
    return {"w": _entry("F64", _W.astype("<f8"))}


def _twins(path: Path) -> Expected:
    _zip(path, {"w.npy": _npy(_W), "w.npy.npy": _npy(_W + 1)})
    return {"w": _entry("F32", _W), "w.npy": _entry("F32", _W + 1)}


def _empty(path: Path) -> Expected:
    np.savez(path, w=_W[:, :0], s=_W[0, 0])
    return {"w": _entry("F32", _W[:, :0]), "s": _entry("F32", _W[0, 0])}


def _refused(write: Callable[[Path], object]) -> Make:
    """Nothing right can come of it."""

    def make(path: Path) -> Expected:
        write(path)
        return {}

    return make


def _damaged(path: Path) -> None:
    np.savez(path, w=_W)
    data = bytearray(path.read_bytes())
    at = data.index(_W.tobytes())
    data[at + 5] ^= 1
    path.write_bytes(data)


CASES: dict[str, Make] = {
    "Fortran-order array": _fortran,
    "big-endian array": _big,
    "bfloat16 (`<V2`)": _bfloat16,
    "float8_e5m2 (`<f1`)": _float8,
    "float64": _double,
    "empty and 0-d arrays": _empty,
    "a key `w` beside a key `w.npy`": _twins,
    "an array called `__metadata__`": _refused(lambda path: np.savez(path, __metadata__=_W)),
    "a flipped bit in the data": _refused(_damaged),
    "bytes behind the array in its member": _refused(lambda path: _zip(path, {"w.npy": _npy(_W) + b"more"})),
    "transferred in text mode (CRLF)": _refused(
        lambda path: _zip(path, {"w.npy": _npy(_W + 0.1).replace(b"\n", b"\r\n", 1)})
    ),
    "complex128, which safetensors lacks": _refused(lambda path: np.savez(path, w=_W.astype("c16") + 0.1)),
    "datetime64": _refused(lambda path: np.savez(path, w=np.zeros(3, "M8[s]"))),
    "records": _refused(lambda path: np.savez(path, w=np.zeros(3, "f4,i2"))),
    "strings": _refused(lambda path: np.savez(path, w=np.array(["a", "bc"]))),
    "a pickle": _refused(lambda path: np.savez(path, w=np.array([None], object))),
}


def outcome(program: str, make: Make) -> str:
    """What a tool makes of a case, in a few words."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.npz"), Path(folder, "out.safetensors")
        expected = make(source)
        command = [sys.executable, "-c", program, str(source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            return ("refused" if "hint:" in done.stderr else "an error") + (
                ", a broken file" if target.exists() else ""
            )
        try:
            found = {
                name: (facts["dtype"], tuple(facts["shape"]), bytes(facts["data"]))
                for name, facts in deserialize(target.read_bytes())  # type: ignore[no-untyped-call]
            }
        except SafetensorError:
            return "**a file that nothing can open, no error**"
        if found == expected:
            return "exact"
        if not expected:
            return "**written, no error**"
        if found.keys() != expected.keys():
            return f"**{len(expected)} tensors became {len(found)} others, no error**"
        code = next(iter(found.values()))[0]
        same = all(found[name][0] == expected[name][0] for name in expected)
        return "**wrong values, no error**" if same else f"**became {code}, no error**"


def table() -> str:
    """The table as Markdown."""
    rows = [f"| in the file | {' | '.join(TOOLS)} |", f"|---{'|---' * len(TOOLS)}|"]
    for case, make in CASES.items():
        rows.append(f"| {case} | {' | '.join(outcome(program, make) for program in TOOLS.values())} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
