"""Break the code in one place at a time and see a test fail: `python -m tests.mutants`.

Each mutant is a small, plausible slip in a reader, a writer, the moving of bytes or the policies. The tree is copied to
a temporary folder, the slip made there, and the tests that ought to notice are run. A mutant that survives is an error,
unless `EQUIVALENT` says why no test can tell it from the original.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).resolve().parent.parent
_PARTS = ("convert", "readers", "writers", "tests", "samples", "docs", "pyproject.toml", "README.md")
_SECONDS = 600


class Mutant(NamedTuple):
    """`old` stands exactly once in the file; `tests` are those that ought to fail with `new` in its place."""

    path: str
    old: str
    new: str
    tests: str


_NPY = "tests/readers/test_npy.py tests/test_samples.py tests/test_cases.py"
_NPZ = "tests/readers/test_npz.py tests/test_samples.py tests/test_cases.py"
_ST = "tests/readers/test_safetensors.py tests/test_samples.py tests/test_cases.py"
_WRITERS = "tests/test_identity.py tests/test_matrix.py tests/test_reversible.py tests/test_foreign_readers.py"
_MOVING = "tests/test_matrix.py tests/test_identity.py tests/test_steps.py tests/test_library.py tests/test_cases.py"
_VERIFY = "tests/test_verify.py"
_POLICY = "tests/test_policy.py tests/test_plan.py tests/test_matrix.py tests/test_reversible.py"

MUTANTS: tuple[Mutant, ...] = (
    # --- readers: npy
    Mutant("readers/npy.py", 'match[1][:1] == b">" and simple.swap > 1', "False", _NPY),
    Mutant("readers/npy.py", 'match[2] == b"True")', 'match[2] != b"True")', _NPY),
    Mutant("readers/npy.py", "    if found < expected:\n", "    if found < expected - 1:\n", _NPY),
    Mutant("readers/npy.py", "    if found == expected:\n", "    if found >= expected:\n", _NPY),
    Mutant("readers/npy.py", "    if head_bytes > size:\n", "    if head_bytes > size + 4096:\n", _NPY),
    Mutant("readers/npy.py", "    if not 0 <= size <= _LARGEST_SIZE:\n", "    if size > _LARGEST_SIZE:\n", _NPY),
    Mutant("readers/npy.py", "    if set(fields) != keys:\n", "    if not set(fields) >= keys:\n", _NPY),
    Mutant("readers/npy.py", "elif version in ((2, 0), (3, 0)):", "elif version == (2, 0):", _NPY),
    Mutant("readers/npy.py", "utf8=version == (3, 0))", "utf8=True)", _NPY),
    Mutant("readers/npy.py", '    if descr == ">V2":\n', '    if descr == "=V2":\n', _NPY),
    Mutant("readers/npy.py", 'if letter + digits == "f1" and mark != "<":', "if False:", _NPY),
    Mutant(
        "readers/npy.py",
        "        offset += dtype.item_bytes * prod(shape)\n",
        "        offset += dtype.item_bytes\n",
        _NPY + " tests/test_records.py",
    ),
    Mutant(
        "readers/npy.py", "    if len(set(names)) != len(names):\n", "    if False:\n", _NPY + " tests/test_records.py"
    ),
    # --- readers: npz
    Mutant("readers/npz.py", "        or crc != entry.crc\n", "", _NPZ),
    Mutant(
        "readers/npz.py", "        or start[_LOCAL_BYTES : _LOCAL_BYTES + name_bytes] != entry.raw_name\n", "", _NPZ
    ),
    Mutant(
        "readers/npz.py",
        '        if begin < reached:\n            raise CorruptError(\n                f"members overlap',
        '        if begin < reached - 64:\n            raise CorruptError(\n                f"members overlap',
        _NPZ,
    ),
    Mutant("readers/npz.py", "        if tensor.name in taken:\n", "        if False:\n", _NPZ),
    Mutant("readers/npz.py", "    if method != entry.method:\n", "    if False:\n", _NPZ),
    Mutant("readers/npz.py", "    if name != entry.raw_name:\n", "    if len(name) != len(entry.raw_name):\n", _NPZ),
    Mutant("readers/npz.py", "        if entry.packed_size != entry.size:\n", "        if False:\n", _NPZ),
    Mutant("readers/npz.py", "    npy.check_size(header, entry.size - head_bytes)\n", "", _NPZ),
    Mutant("readers/inflate.py", "        if crc != self._crc:\n", "        if False:\n", _NPZ),
    Mutant("readers/inflate.py", "        if produced != self._size:\n", "        if produced > self._size:\n", _NPZ),
    Mutant("readers/inflate.py", "        if left:\n", "        if False:\n", _NPZ),
    Mutant("readers/zipdir.py", "    if end.members not in (count, count & 0xFFFF):\n", "    if False:\n", _NPZ),
    Mutant("readers/zipdir.py", "            if small not in (large, full):\n", "            if False:\n", _NPZ),
    Mutant("readers/zipdir.py", "    if begin + size != end:\n", "    if begin + size > end:\n", _NPZ),
    Mutant(
        "readers/zipdir.py",
        "    if len(found) == 1:\n        return found[0]\n",
        "    if found:\n        return found[0]\n",
        _NPZ,
    ),
    # --- readers: safetensors
    Mutant("readers/safetensors.py", "            if key in seen:\n", "            if False:\n", _ST),
    Mutant("readers/safetensors.py", "        if begin > reached:\n", "        if begin > reached + 8:\n", _ST),
    Mutant(
        "readers/safetensors.py",
        '        if begin < reached:\n            raise CorruptError(\n                f"overlapping',
        '        if begin < 0:\n            raise CorruptError(\n                f"overlapping',
        _ST,
    ),
    Mutant("readers/safetensors.py", "    if data_bytes > reached:\n", "    if False:\n", _ST),
    Mutant(
        "readers/safetensors.py",
        "(end - begin) * 8 != count * dtype.bits",
        "(end - begin) * 8 < count * dtype.bits",
        _ST,
    ),
    Mutant("readers/safetensors.py", '    if text[0] != "{":\n', "    if False:\n", _ST),
    Mutant("readers/safetensors.py", "        if not isinstance(text, str):\n", "        if False:\n", _ST),
    # --- writers
    Mutant("writers/npy.py", "room % _ALIGNMENT  # numpy", "(room - 1) % _ALIGNMENT - 1  # numpy", _WRITERS),
    Mutant("writers/npy.py", "shape[-1 if fortran else 0]", "shape[0]", _WRITERS),
    Mutant(
        "writers/npy.py",
        "    return 0 in shape or sum(size > 1 for size in shape) <= 1\n",
        "    return False\n",
        _WRITERS,
    ),
    Mutant(
        "writers/npy.py",
        '    if "" in parts:\n',
        "    if False:\n",
        "tests/test_names.py",
    ),
    Mutant("writers/npz.py", "(0 if name.isascii() else 0x800)", "0", _WRITERS),
    Mutant(
        "writers/npz.py", "crc32_combine(member.crc, crc, len(block.data)) if member.packed else crc", "crc", _WRITERS
    ),
    Mutant(
        "writers/npz.py",
        "    if count > 0xFFFF or begin > _LARGE or size > _LARGE:\n",
        "    if begin > _LARGE or size > _LARGE:\n",
        _WRITERS,
    ),
    Mutant(
        "writers/npz.py",
        "padding = -(self.offset + self.local_bytes + len(self.head)) % to",
        "padding = -(self.offset + self.local_bytes) % to",
        _WRITERS,
    ),
    Mutant(
        "writers/safetensors.py",
        "key=lambda tensor: (_RANK[tensor.dtype.name], tensor.name)",
        "key=lambda tensor: tensor.name",
        _WRITERS,
    ),
    Mutant("writers/safetensors.py", "for key in sorted(metadata))", "for key in metadata)", _WRITERS),
    Mutant("writers/safetensors.py", "-len(header) % max(align, _ALIGNMENT)", "-len(header) % align", _WRITERS),
    Mutant("writers/safetensors.py", "tensor.count * tensor.dtype.bits % 8", "False", _POLICY),
    # --- moving bytes
    Mutant("convert/transfer.py", "    if crc != data.crc:\n", "    if False:\n", _MOVING),
    Mutant(
        "convert/transfer.py",
        "                content = pipe.apply(content, offset)",
        "                content = pipe.apply(content, 0)",
        _MOVING + " tests/test_longdouble.py",
    ),
    Mutant(
        "convert/transfer.py",
        "slot.offset + pipe.out(begin), slot.seed",
        "slot.offset + begin, slot.seed",
        _MOVING + " tests/test_threads.py",
    ),
    Mutant(
        "convert/transfer.py",
        "    if tensor.stored_fortran == tensor.fortran or len(shape) < 2:\n",
        "    if tensor.stored_fortran == tensor.fortran or len(shape) < 3:\n",
        _MOVING,
    ),
    Mutant(
        "convert/transfer.py",
        "slot.crc = crc32_combine(slot.crc, crc_out, out_bytes)",
        "slot.crc = crc_out",
        _MOVING + " tests/test_property.py tests/test_codec.py",
    ),
    Mutant(
        "convert/transpose.py",
        "    return len(squeezed(shape)) <= 1 or 0 in shape\n",
        "    return len(squeezed(shape)) <= 2\n",
        "tests/test_transpose.py",
    ),
    Mutant(
        "convert/turning.py",
        "                pipe.apply(run_view, offset)\n",
        "                pipe.apply(run_view, 0)\n",
        "tests/test_turning.py",
    ),
    Mutant("convert/turning.py", "        job.left = 2\n", "        job.left = 1\n", "tests/test_turning.py"),
    Mutant("convert/steps.py", "        if tensor.big and tensor.dtype.swap > 1:\n", "        if False:\n", _MOVING),
    Mutant(
        "convert/steps.py",
        "        if tensor.stored_big and tensor.stored.swap > 1:\n",
        "        if False:\n",
        _MOVING + " tests/test_numeric.py",
    ),
    Mutant(
        "convert/numeric.py",
        "np.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=1)",
        "np.stack((packed >> np.uint8(4), packed & np.uint8(15)), axis=1)",
        "tests/test_numeric.py",
    ),
    Mutant(
        "convert/codec.py",
        "    return _multiply(_power_of_x(8 * length2), crc1) ^ crc2\n",
        "    return _multiply(_power_of_x(length2), crc1) ^ crc2\n",
        "tests/test_codec.py",
    ),
    Mutant(
        "convert/output.py",
        "            if not overwrite:\n",
        "            if False:\n",
        "tests/test_output.py tests/test_outputfolder.py tests/test_files.py tests/cli",
    ),
    Mutant(
        "convert/arrays.py",
        "self._flat[offset : offset + content.size] = content",
        "self._flat[: content.size] = content",
        "tests/test_load.py",
    ),
    # --- verification
    Mutant("convert/verify.py", "if expected is None or expected != there:", "if expected is None:", _VERIFY),
    Mutant("convert/verify.py", "self._settings.progress if index else None", "self._settings.progress", _VERIFY),
    Mutant("convert/verify.py", "if len(back) - texts != len(plan.tensors):", "if False:", _VERIFY),
    Mutant("convert/verify.py", "run(work(turned=True), 1)", "run(work(turned=True), settings.jobs)", _VERIFY),
    Mutant("convert/api.py", "plan.nbytes * (2 if verify else 1)", "plan.nbytes", _VERIFY),
    # --- policy and plan
    Mutant(
        "convert/policy.py", "        for rule in reversed(self.rules):\n", "        for rule in self.rules:\n", _POLICY
    ),
    Mutant("convert/policy.py", "            if rule.kind == kind and", "            if", _POLICY),
    Mutant(
        "convert/plan.py", '            if action == "error" or not action:\n', "            if not action:\n", _POLICY
    ),
    Mutant("convert/plan.py", "            if other is not tensor:\n", "            if False:\n", _POLICY),
    Mutant(
        "convert/plan.py",
        "        if name in self.plan.metadata:\n",
        "        if False:\n",
        _POLICY + " tests/test_memory.py",
    ),
    Mutant(
        "convert/plan.py",
        "return bool(included or not wishes.include) and not excluded",
        "return bool(included or not wishes.include)",
        _POLICY + " tests/test_library.py",
    ),
)

EQUIVALENT: dict[str, str] = {}
"""Survivors by `path: old`, and why no test can tell them from the original."""


def main(arguments: Sequence[str]) -> int:
    """Run what the options ask for; 1 if a mutant survived."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="only each N-th mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", help="only mutants whose path or text contains this")
    wanted = parser.parse_args(arguments)
    chosen = [one for one in MUTANTS if not wanted.only or wanted.only in one.path + one.old][:: wanted.every]
    killed = survivors = 0
    with ThreadPoolExecutor(wanted.jobs) as pool:
        for mutant, fate in zip(chosen, pool.map(_fate, chosen), strict=True):
            shown = f"{mutant.path}: {mutant.old.strip().splitlines()[0]}"
            reason = EQUIVALENT.get(shown)
            killed += fate == "killed"
            if fate == "killed" and reason is None:
                continue
            survivors += fate != "survived" or reason is None
            why = f" ({reason})" if reason else ""
            print(f"{fate}: {shown} -> {mutant.new.strip() or '(nothing)'}{why}", flush=True)
    print(f"{len(chosen)} mutants, {killed} killed, {survivors} without an answer")
    return 1 if survivors else 0


def _fate(mutant: Mutant) -> str:
    """'killed', 'survived', or what went wrong."""
    source = (TOP / mutant.path).read_text()
    if source.count(mutant.old) != 1:
        return f"out of date, found {source.count(mutant.old)} times"
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        top = Path(name)
        for part in _PARTS:
            if (TOP / part).is_dir():
                shutil.copytree(TOP / part, top / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(TOP / part, top / part)
        (top / mutant.path).write_text(source.replace(mutant.old, mutant.new))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            *mutant.tests.split(),
        ]
        try:
            run = subprocess.run(command, cwd=top, capture_output=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return "killed"  # a loop without end is noticed too
        return {0: "survived", 1: "killed"}.get(run.returncode, f"no verdict: {run.stdout.decode()[-300:]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
