"""The one table of formats. Nothing else in the core names any; readers and writers are imported when needed.

Third parties add rows by the entry point group `convert.formats`: each entry point is a `Format`.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from convert.errors import CorruptError, UnsupportedError, UsageError, printable
from convert.files import name_part


@dataclass(frozen=True)
class Format:
    """One row.

    Attributes:
        name: As in `--to NAME`.
        suffixes: Of its files, lower case.
        magic: Offset and bytes; any of them marks the format. Empty where only the suffix tells.
        reader: Module with `open(path, limits) -> Checkpoint`, or '' if the format is only written.
        writer: Module with `holds`, `remembers`, `check` and `write`, or '' if it is only read. One that can also
            spread a checkpoint over several files has `split` and `write_split`.
        about: A line for people.
        orders: As a target it can be big-endian, and in Fortran order.
        compresses: As a target it has compression levels.
        aligns: As a target its data can be aligned.
        checker: Module with `RULES` and `check(file, findings, limits, data)`, or ''; then the reader's word is taken.
    """

    name: str
    suffixes: tuple[str, ...]
    magic: tuple[tuple[int, bytes], ...]
    reader: str
    writer: str
    about: str
    orders: bool = False
    compresses: bool = False
    aligns: bool = False
    checker: str = ""

    def load_reader(self) -> Any:
        """The reader module.

        Raises:
            UsageError: The format is only written.
        """
        if not self.reader:
            raise UsageError(f"{self.name} can only be written", hint="convert formats shows what can be read")
        return importlib.import_module(self.reader)

    def load_writer(self) -> Any:
        """The writer module.

        Raises:
            UsageError: The format is only read.
        """
        if not self.writer:
            raise UsageError(f"{self.name} can only be read", hint="convert formats shows what can be written")
        return importlib.import_module(self.writer)

    def load_checker(self) -> Any:
        """The checker module, or None."""
        return importlib.import_module(self.checker) if self.checker else None


INDEX_SUFFIX = ".safetensors.index.json"

BUILT_IN: tuple[Format, ...] = (
    Format(
        "npy",
        (".npy",),
        ((0, b"\x93NUMPY"),),
        "readers.npy",
        "writers.npy",
        "NumPy array, one tensor; as a target also a folder of them",
        orders=True,
        checker="readers.check_npy",
    ),
    Format(
        "npz",
        (".npz",),
        ((0, b"PK\x03\x04"), (0, b"PK\x05\x06")),
        "readers.npz",
        "writers.npz",
        "NumPy archive, stored or deflated",
        orders=True,
        compresses=True,
        aligns=True,
        checker="readers.check_npz",
    ),
    Format(
        "safetensors",
        (".safetensors",),
        ((5, b"\0\0\0{"), (8, b"{")),
        "readers.safetensors",
        "writers.safetensors",
        "Hugging Face safetensors",
        aligns=True,
        checker="readers.check_safetensors",
    ),
    Format(
        "shards",
        (INDEX_SUFFIX,),
        (),
        "readers.shards",
        "",
        "index of a safetensors checkpoint in several files; --max-shard-size writes one",
        checker="readers.check_shards",
    ),
)

SNIFF_BYTES = 512
_SURE = 4
"""So many bytes are no accident: the length of a safetensors header may begin like gzip, an array may hold `ustar`."""

_FOREIGN: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"version https://git-lfs", "a Git LFS pointer, not the data itself", "git lfs pull fetches the data"),
    (0, b"\x1f\x8b", "gzip data", "gunzip it first, then convert the result"),
    (0, b"BZh", "bzip2 data", "bunzip2 it first, then convert the result"),
    (0, b"\xfd7zXZ\0", "xz data", "unxz it first, then convert the result"),
    (0, b"\x28\xb5\x2f\xfd", "zstandard data", "unzstd it first, then convert the result"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", "load it with h5py and save the arrays with convert.save"),
    (0, b"GGUF", "a GGUF file", "convert formats lists what can be read"),
    (257, b"ustar", "a tar archive", "unpack it with tar -xf first"),
    (0, b"PK\x07\x08", "a zip archive split over several files", "join its parts first"),
    (0, b"<!DOCTYPE", "a web page", "the download went wrong; check the address and whether it needs a login"),
    (0, b"<html", "a web page", "the download went wrong; check the address and whether it needs a login"),
)
_PICKLES = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
_UNPICKLE_HINT = "if you trust it, load it where it was written and save the arrays with np.savez or save_file"


def all_formats() -> tuple[Format, ...]:
    """Built-in rows and those of installed packages."""
    from importlib.metadata import entry_points

    found = []
    for point in entry_points(group="convert.formats"):
        try:
            row = point.load()
        except Exception as err:  # whatever another package's code does when it is imported
            raise UsageError(
                f"the entry point {point.name!r} ({point.value}) cannot be loaded: {err}",
                hint="update or uninstall the package that brought it",
            ) from err
        if not isinstance(row, Format):
            raise UsageError(f"the entry point {point.name!r} is no convert.formats.Format")
        found.append(row)
    return (*BUILT_IN, *found)


def by_name(name: str) -> Format:
    """The row of that name.

    Raises:
        UsageError: There is none; the message lists those there are.
    """
    for row in BUILT_IN:
        if row.name == name:
            return row
    rows = all_formats()
    for row in rows:
        if row.name == name:
            return row
    names = [row.name for row in rows]
    close = difflib.get_close_matches(name.lower().lstrip("."), names, 1)
    hint = f"did you mean {close[0]}?" if close else "convert formats lists them"
    raise UsageError(f"unknown format {name!r} (expected one of {', '.join(names)})", hint=hint)


def is_index(path: str) -> bool:
    """Whether the name is that of an index of shards."""
    return name_part(path).lower().endswith(INDEX_SUFFIX)


def by_suffix(path: str) -> Format | None:
    """The format that the suffix of a name speaks for, or None."""
    suffix = INDEX_SUFFIX if is_index(path) else os.path.splitext(name_part(path))[1].lower()
    return _by_suffix(suffix, BUILT_IN) or _by_suffix(suffix, all_formats())


def _by_suffix(suffix: str, rows: Iterable[Format]) -> Format | None:
    return next((row for row in rows if suffix in row.suffixes), None)


def for_target(path: str) -> Format:
    """The format a target's name asks for: by suffix, or npy for a folder; an index asks for what it is an index of.

    Raises:
        UsageError: The name does not tell.
    """
    path = name_part(path)
    if path.endswith(("/", os.sep)) or os.path.isdir(path):
        return BUILT_IN[0]
    suffix = os.path.splitext(path[: -len(".index.json")] if is_index(path) else path)[1].lower()
    row = _by_suffix(suffix, BUILT_IN) or (_by_suffix(suffix, all_formats()) if suffix else None)
    if row is not None:
        return row
    rows = all_formats()
    suffixes = [known for row in rows if row.writer for known in row.suffixes]
    close = difflib.get_close_matches(suffix, suffixes, 1) if suffix else []
    hint = f"did you mean {os.path.splitext(path)[0]}{close[0]}?" if close else "--to FORMAT says it outright"
    what = f"unknown suffix {suffix!r}" if suffix else "no suffix"
    raise UsageError(
        f"the name does not tell the format: {what} (expected one of {', '.join(suffixes)}, or a slash at the end for "
        "a folder of .npy files)",
        path=path,
        hint=hint,
    )


def detect(path: str, start: bytes, size: int) -> tuple[Format, str | None]:
    """The format of a file by its content, and a note if its suffix says otherwise.

    Args:
        path: For its suffix, which decides only where the content does not.
        start: The first `SNIFF_BYTES` bytes, or all there are.
        size: Bytes of the file.

    Raises:
        CorruptError: An empty file.
        UnsupportedError: Something else; the message says what, where it can be known.
    """
    suffix = INDEX_SUFFIX if is_index(path) else os.path.splitext(name_part(path))[1].lower()
    if size == 0:
        raise CorruptError("the file is empty (0 bytes)", path=path, hint="save, copy or download it again")
    found = _by_magic(start, BUILT_IN, _SURE)
    if found is None:
        for offset, magic, what, hint in _FOREIGN:
            if start[offset : offset + len(magic)] == magic:
                raise UnsupportedError(f"is {what}", path=path, hint=hint)
        found = _by_magic(start, BUILT_IN)
    named = _by_suffix(suffix, BUILT_IN)
    if named is not None and not named.magic and start[:1] == b"{" and b"\0" not in start[:8]:
        return named, None  # JSON may have a brace at any byte; the length that safetensors begins with has zeros
    if found is None and start[:2] in _PICKLES:
        raise UnsupportedError("is a pickle, which can run code when loaded", path=path, hint=_UNPICKLE_HINT)
    if found is None and named is None:
        found = _by_magic(start, all_formats()) or _by_suffix(suffix, all_formats())
        if found is None:
            raise UnsupportedError(
                f"is no format known here (found {printable(repr(start[:8]))} at byte 0)",
                path=path,
                hint="convert formats lists what can be read",
            )
    row = found or named
    assert row is not None
    if found is None and row.magic and row.magic[0][0] == 0:
        magic = row.magic[0][1]
        raise UnsupportedError(
            f"is no {row.name} file (expected {magic!r} at byte 0, found {start[: len(magic)]!r})",
            path=path,
            hint="convert formats lists what can be read",
        )
    if named is not None and named is not row:
        return row, f"{printable(path)} is {row.name} by its content, not {named.name} as its suffix says"
    return row, None


def _by_magic(start: bytes, rows: Iterable[Format], least: int = 1) -> Format | None:
    for row in rows:
        for offset, magic in row.magic:
            if len(magic) >= least and start[offset : offset + len(magic)] == magic:
                return row
    return None
