"""Files of a batch, wherever they are: what it asks of sources and targets, for paths and URLs alike."""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from convert.errors import ConvertError, InputError, OutputError
from convert.files import is_url, open_source, unreadable

if TYPE_CHECKING:
    from convert.remote import Place

_READ_BYTES = 1 << 20


class Stamp(NamedTuple):
    """What tells whether files changed: bytes and modification times, each summed over all of them.

    A remote file has a number made of its tag instead of a time.
    """

    size: int
    mtime_ns: int


def join(folder: str, relative: str) -> str:
    """A path below a folder, from one with `/`."""
    if is_url(folder):
        return f"{folder.rstrip('/')}/{relative}"
    return os.path.join(folder, *relative.split("/"))


def below(folder: str, path: str) -> str:
    """The other way."""
    if is_url(folder):
        return path[len(folder.rstrip("/")) + 1 :]
    return os.path.relpath(path, folder).replace(os.sep, "/")


def is_there(path: str) -> bool:
    """Whether there is anything of this name; a link that leads nowhere is."""
    return _facts(path) is not None if is_url(path) else os.path.lexists(path)


def is_dir(path: str) -> bool:
    """Whether it is a folder; a store has none that count."""
    return not is_url(path) and os.path.isdir(path)


def make_dirs(folder: str) -> None:
    """The folder and those above it; a store needs none, but a server does."""
    if not is_url(folder):
        os.makedirs(folder, exist_ok=True)
        return
    from convert import remote

    place = remote.locate(folder, OutputError)
    if not remote.is_store(place):
        with remote.explaining(folder, OutputError), place.alone:
            place.fs.makedirs(place.path, exist_ok=True)


def _facts(url: str) -> dict[str, Any] | None:
    from convert import remote

    return remote.facts_if_any(remote.locate(url, OutputError))


def remote_stamp(found: dict[str, Any]) -> Stamp:
    """Of what a store or server says of a file."""
    from convert import remote

    tag = remote.tag_of(found)
    number = int.from_bytes(hashlib.sha256(tag.encode()).digest()[:7], "big") if tag else 0
    return Stamp(int(found.get("size") or 0), number)


def stamps_below(folder: str) -> dict[str, Stamp] | None:
    """Of all files below the URL of a folder, by relative path, hidden ones left out; None for one of this machine."""
    if not is_url(folder):
        return None
    from convert import remote

    return {relative: remote_stamp(found) for relative, _, found in remote.files_below(folder, required=False)}


def added_up(paths: Sequence[str], *, strict: bool = False) -> Stamp:
    """Sizes and times of files, added up; -1 and -1 if one cannot be looked at.

    Raises:
        OSError, ConvertError: With `strict`, instead.
    """
    size = mtime_ns = 0
    for path in paths:
        try:
            one = _stamp(path)
        except (OSError, ConvertError):
            if strict:
                raise
            return Stamp(-1, -1)
        size += one.size
        mtime_ns += one.mtime_ns
    return Stamp(size, mtime_ns)


def _stamp(path: str) -> Stamp:
    if is_url(path):
        from convert import remote

        return remote_stamp(remote.facts(remote.locate(path)))
    found = os.stat(path)
    return Stamp(found.st_size if stat.S_ISREG(found.st_mode) else 0, found.st_mtime_ns)


def stamp_of(paths: Sequence[str]) -> Stamp:
    """Sizes and times of files, added up.

    Raises:
        InputError: One cannot be looked at.
    """
    try:
        return added_up(paths, strict=True)
    except OSError as err:
        raise unreadable(str(err.filename), err) from err


def sha256_of(paths: Sequence[str]) -> str:
    """Digest of a file; of several, of the lines `sha256sum` prints for them in their common folder.

    Raises:
        OutputError: One cannot be read.
    """
    if len(paths) == 1:
        return _sha256(paths[0])
    top = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    lines = [f"{_sha256(path)}  {os.path.relpath(path, top)}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _sha256(path: str) -> str:
    if is_url(path):
        return _remote_sha256(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError("is not a regular file", path=path)
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as err:
        raise OutputError(f"cannot be read: {err.strerror or err}", path=path) from err


def _remote_sha256(url: str) -> str:
    from convert.files import read_ahead

    file = open_source(url)
    try:
        read_ahead(file, 0, file.size)
        digest = hashlib.sha256()
        for offset in range(0, file.size, _READ_BYTES):
            digest.update(file.read(offset, min(_READ_BYTES, file.size - offset)))
        return digest.hexdigest()
    finally:
        file.close()


def read_small(path: str, most_bytes: int) -> bytes | None:
    """All of a file, or None if it is longer.

    Raises:
        InputError: It cannot be read.
    """
    file = open_source(path)
    try:
        return file.read(0, file.size) if file.size <= most_bytes else None
    finally:
        file.close()


def outputs(target: str) -> list[str]:
    """Files that a target consists of: itself, those of a folder, or an index and the shards it names; sorted."""
    if is_dir(target):
        return sorted(os.path.join(folder, name) for folder, _, names in os.walk(target) for name in names)
    if is_there(target):
        return [target]
    index = f"{target}.index.json"
    try:
        names = sorted(set(json.loads(read_small(index, 1 << 30) or b"")["weight_map"].values()))
    except (ConvertError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return [index, *(join(os.path.dirname(target), name) for name in names)]


def share(some: Sequence[str], others: Sequence[str]) -> bool:
    """Whether a file is in both, under whatever name."""
    if any(map(is_url, (*some, *others))):
        from convert.files import real_path

        return bool(set(map(real_path, some)) & set(map(real_path, others)))
    known = {(found.st_dev, found.st_ino) for found in map(os.stat, filter(os.path.exists, some))}
    return any((found.st_dev, found.st_ino) in known for found in map(os.stat, filter(os.path.exists, others)))


def sync(path: str) -> None:
    """Force a file or folder of this machine to the disk."""
    if is_url(path) or (os.name == "nt" and os.path.isdir(path)):
        return
    fd = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: str) -> None:
    """A file.

    Raises:
        OSError, OutputError: It stays.
    """
    if is_url(path):
        from convert.remote import remove as remove_remote

        remove_remote(path)
    else:
        os.unlink(path)


def remove_if_can(path: str) -> None:
    """A file, and folders of this machine that it leaves empty."""
    with contextlib.suppress(OSError, ConvertError):
        remove(path)
    if not is_url(path):
        with contextlib.suppress(OSError):
            os.removedirs(os.path.dirname(path))  # empty ones only


def remove_all_below(folder: str) -> None:
    """A folder with all its files, as far as it can be."""
    if not is_url(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    from convert import remote

    with contextlib.suppress(ConvertError):
        for _, url, _ in remote.files_below(folder, required=False):
            remote.remove(url)


def same_bytes(one: str, other: str) -> bool:
    """Whether two files hold the same."""
    if is_url(one) or is_url(other):
        return sha256_of([one]) == sha256_of([other])
    return filecmp.cmp(one, other, shallow=False)


def put(place: Place, content: bytes) -> None:
    """A small object, whole or not at all where it is a store."""
    from convert import remote

    def send() -> None:
        with place.alone:
            place.fs.pipe_file(place.path, content)

    remote.patiently(send, place.url, OutputError)
