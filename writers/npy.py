"""NumPy's single-array format: one file, or a folder with one file per tensor.

Headers are those `np.save` writes, byte for byte: keys in order, room for one axis to grow, padding to 64.

Source: numpy 2.4 `numpy/lib/_format_impl.py`.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import TYPE_CHECKING

from convert.errors import ConvertError, OutputError, PolicyError
from convert.files import is_url
from convert.output import FileOutput, OutputFile, committed, open_output
from convert.outputfolder import OutputFolder
from convert.transfer import Slot, fill
from convert.writing import Begun

if TYPE_CHECKING:
    from convert.plan import Plan
    from convert.tensor import Tensor
    from convert.writing import Settings

_MAGIC = b"\x93NUMPY"
_ALIGNMENT = 64
_GROWTH_DIGITS = 21
"""Digits of 8 * 2**64 - 1: numpy leaves room for the growing axis to become that long."""
_MAX_NAME_BYTES = 240
"""File systems stop at 255; a temporary name needs a few more."""
_LARGEST_SIZE = (1 << 63) - 1
_MAX_PATH_BYTES = 3000
"""Systems stop at 4096, the path of the target included."""
_OPEN_FILES = 64


def holds(tensor: Tensor) -> bool:
    return (tensor.dtype.descr is not None and tensor.dtype.kind != "object") or tensor.dtype.layout is not None


def remembers(metadata: Mapping[str, str], encoded: bool) -> bool:
    return not metadata and not encoded


def too_large(plan: Plan) -> list[ConvertError]:
    """Sizes that no npy header can have: numpy counts them in 63 bits, safetensors in 64."""
    return [
        PolicyError(
            f"a size of {max(tensor.shape)} is too large for npy (expected at most 2**63 - 1)",
            path=tensor.path,
            tensor=tensor.name,
            hint="it is empty; --exclude leaves it out",
        )
        for tensor in plan.tensors
        if max(tensor.shape, default=0) > _LARGEST_SIZE
    ]


def check(plan: Plan) -> list[ConvertError]:
    """One tensor for a file; names that fit a file system for a folder."""
    if not is_folder(plan.target):
        if len(plan.tensors) == 1:
            return too_large(plan)
        return [
            PolicyError(
                f"a .npy file holds one tensor (found {len(plan.tensors)})",
                path=plan.target,
                hint=f"give a folder, {os.path.splitext(plan.target)[0]}/ for one; --include NAME chooses a tensor",
            )
        ]
    if is_url(plan.target):
        one = plan.target.rstrip("/")
        what = "a remote folder cannot appear at once, so several .npy files cannot be written there"
        return [OutputError(what, path=plan.target, hint=f"give one file: {one}.npz or {one}.safetensors")]
    problems = too_large(plan)
    for tensor, path in zip(plan.tensors, file_names([t.name for t in plan.tensors]), strict=True):
        if not tensor.name:
            problems.append(
                PolicyError(
                    "an empty name makes a hidden file",
                    path=plan.target,
                    tensor="",
                    hint="--rename '^$=NAME' gives it another",
                )
            )
        encoded = path.encode("utf-8", "replace")
        longest = max(map(len, encoded.split(b"/")))
        if longest > _MAX_NAME_BYTES or len(encoded) > _MAX_PATH_BYTES:
            limit, found = (_MAX_NAME_BYTES, longest) if longest > _MAX_NAME_BYTES else (_MAX_PATH_BYTES, len(encoded))
            problems.append(
                PolicyError(
                    f"the name is too long for a file (expected at most {limit} bytes, found {found})",
                    path=plan.target,
                    tensor=tensor.name,
                    hint="--rename REGEX=REPLACEMENT shortens it",
                )
            )
    return problems


def is_folder(target: str) -> bool:
    """Whether a target means a folder of files: it ends in a slash, is a folder, or does not end in .npy."""
    return target.endswith(("/", os.sep)) or os.path.isdir(target) or not target.lower().endswith(".npy")


def write(plan: Plan, settings: Settings) -> FileOutput | OutputFolder:
    """Write the plan's tensors; the result is complete but not yet in its place."""
    if not is_folder(plan.target):
        output = open_output(plan.target, settings)
        with committed(output):
            _fill([(plan.tensors[0], output)], settings)
        return output
    return _write_folder(plan, settings)


def begin(plan: Plan, settings: Settings) -> Begun | None:
    """Write the header, for whoever brings the bytes; None for a folder, which has more files than can be open."""
    if is_folder(plan.target):
        return None
    output = open_output(plan.target, settings)
    with committed(output):
        return Begun(output, [_slot(plan.tensors[0], output)])


def _write_folder(plan: Plan, settings: Settings) -> OutputFolder:
    folder = OutputFolder(plan.target, overwrite=settings.overwrite, suffix=".npy")
    with committed(folder):
        names = file_names([tensor.name for tensor in plan.tensors])
        named = settings.spread is not None
        for name in {os.path.dirname(name) for name in names} - {""}:
            folder.add_folder(name)
        for group in batched_pairs(plan.tensors, names):
            with ExitStack() as discarded:
                files = []
                for tensor, name in group:
                    file = OutputFile(os.path.join(folder.building, name), overwrite=False, named=named)
                    discarded.callback(file.discard)
                    files.append((tensor, file))
                _fill(files, settings)
                for _, file in files:
                    file.commit(fsync=settings.fsync)
    return folder


def batched_pairs(tensors: list[Tensor], names: list[str]) -> list[list[tuple[Tensor, str]]]:
    pairs = list(zip(tensors, names, strict=True))
    return [pairs[at : at + _OPEN_FILES] for at in range(0, len(pairs), _OPEN_FILES)]


def _fill(files: Sequence[tuple[Tensor, FileOutput]], settings: Settings) -> None:
    slots = [_slot(tensor, file) for tensor, file in files]
    fill(slots, settings.jobs, progress=settings.progress, spread=settings.spread)


def _slot(tensor: Tensor, file: FileOutput) -> Slot:
    """The place of a tensor in its file, behind a header that is written now."""
    head = header(tensor)
    file.reserve(len(head) + tensor.nbytes)
    file.write_at(0, head)
    return Slot(tensor, file, len(head))


# --- headers -----------------------------------------------------------------------------------------------------


def header(tensor: Tensor) -> bytes:
    """Magic, version, length and dictionary, as `np.save` would write them for this tensor."""
    dtype = tensor.dtype
    fortran = tensor.fortran and not _is_c_contiguous(tensor.shape)
    if dtype.layout is not None:
        return _header(repr(dtype.layout), fortran, tensor.shape)
    return _cached_header(repr(dtype.npy_descr(tensor.big)), fortran, tensor.shape)


def _is_c_contiguous(shape: tuple[int, ...]) -> bool:
    """Whether numpy calls a Fortran-order array of this shape C-contiguous as well, and then says C."""
    return 0 in shape or sum(size > 1 for size in shape) <= 1


def _header(descr: str, fortran: bool, shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape!r}, }}"
    if shape:
        text += " " * (_GROWTH_DIGITS - len(repr(shape[-1 if fortran else 0])))
    for version, encoding, length_bytes in ((1, "latin-1", 2), (2, "latin-1", 4), (3, "utf-8", 4)):
        try:
            body = text.encode(encoding)
        except UnicodeEncodeError:
            continue
        room = len(_MAGIC) + 2 + length_bytes + len(body) + 1
        padding = _ALIGNMENT - room % _ALIGNMENT  # numpy pads what is aligned already by 64 more
        length = len(body) + padding + 1
        if length < 1 << (8 * length_bytes):
            count = length.to_bytes(length_bytes, "little")
            return _MAGIC + bytes((version, 0)) + count + body + b" " * padding + b"\n"
    raise OutputError(f"a header of {len(text)} characters does not fit into a npy file")


_cached_header = lru_cache(maxsize=4096)(_header)


# --- names of files ----------------------------------------------------------------------------------------------

_UNSAFE = re.compile(r'[<>:"|?*\\%]')
_RESERVED = re.compile(r"(?i)(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9¹²³]) *(?:\..*)?$")
"""Devices of Windows, whatever follows the first dot. Source: "Naming Files, Paths, and Namespaces", Microsoft."""


def file_names(names: list[str]) -> list[str]:
    """Relative paths, `/` between folders, one for each tensor name; percent-encoded where a file system balks.

    No path leaves the folder, whatever the name, nor has characters that cannot be seen. Names that some file systems
    take for the same (case, Unicode normalisation) are told apart by encoding them further. `convert.open` of the
    folder decodes them.
    """
    paths = [_file_name(name, strict=False) for name in names]
    spellings: dict[str, set[str]] = {}
    for path in paths:
        for prefix in _prefixes(path):
            spellings.setdefault(_folded(prefix), set()).add(prefix)
    return [
        path
        if all(len(spellings[_folded(prefix)]) == 1 for prefix in _prefixes(path))
        else _file_name(name, strict=True)
        for name, path in zip(names, paths, strict=True)
    ]


def _prefixes(path: str) -> list[str]:
    """The folders on the way to a file, and the file."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _folded(path: str) -> str:
    """The same for all spellings that any file system takes for one; for a few more it does no harm."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", path).upper().casefold())


def _file_name(name: str, strict: bool) -> str:
    parts = name.split("/")
    encoded = [_encode(part, strict) for part in parts]
    if "" in parts:
        # A path that would collapse becomes one name; dots that would leave the folder are encoded in any case.
        return "%2F".join(encoded) + ".npy"
    folders = [_dotted(part) for part in encoded[:-1]]
    return "/".join((*folders, encoded[-1] + ".npy"))


def _dotted(part: str) -> str:
    return part[:-4] + "%2E" + part[-3:] if part.lower().endswith(".npy") else part


def _encode(part: str, strict: bool) -> str:
    out = _UNSAFE.sub(lambda match: _percent(match[0]), part)
    if not out.isprintable():  # control, format and bidirectional characters, spaces other than U+0020
        out = "".join(c if c.isprintable() else _percent(c) for c in out)
    if strict:
        out = re.sub(r"(%[0-9A-F]{2})|([A-Z]|[^\x00-\x7f])", lambda m: m[1] or _percent(m[2]), out)
    if _RESERVED.match(out) or out[:1] in (".", " "):
        out = _percent(out[0]) + out[1:]
    if out[-1:] in (".", " "):
        out = out[:-1] + _percent(out[-1])
    return out


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
