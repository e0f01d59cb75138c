"""A tree of files: which are sources, where each goes, and what may not run. Nothing is written here."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from convert import formats
from convert.batchfiles import Stamp, join, read_small, remote_stamp
from convert.errors import ConvertError, OutputError, UsageError, gather, quoted
from convert.files import is_url, real_path, unreadable, unwritable
from convert.jsontext import parse_json
from convert.limits import DEFAULT

STATE = ".convert"
"""Folder in the target for the journal, the reports and the locks."""
_INDEX_BYTES = 100_000_000
_TEMPORARY = ("*.tmp", "*.tmp*", "*.part", "*~", "*.convert-tmp")
FOLDER_FORMAT = formats.BUILT_IN[0].name
"""The format whose target is a folder where one file cannot hold all tensors."""


class Item(NamedTuple):
    """One source, or one other file to copy.

    Attributes:
        source: Relative path, with `/`.
        target: Relative path, with `/`.
        copy: Copied as it is.
        stamp: Of the source and its parts when the tree was read.
        parts: Relative paths of the files that an index names.
        may_be_folder: The target may become a folder, `target` without its suffix.
    """

    source: str
    target: str
    copy: bool
    stamp: Stamp
    parts: tuple[str, ...] = ()
    may_be_folder: bool = False


@dataclass
class Tree:
    """What was found: items in sorted order, and sources that cannot even be looked at."""

    items: list[Item] = field(default_factory=list)
    failures: list[tuple[str, ConvertError]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rules:
    """Which files are taken: globs on relative paths, on names, and on the folders above."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def excluded(self, path: str) -> bool:
        return _matches(path, self.exclude)

    def takes(self, path: str) -> bool:
        return not self.excluded(path) and (not self.include or _matches(path, self.include))


def _matches(path: str, globs: Iterable[str]) -> bool:
    parts = path.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(
        fnmatchcase(place, glob.rstrip("/")) or ("/" not in glob.rstrip("/") and fnmatchcase(part, glob.rstrip("/")))
        for glob in globs
        for place, part in zip(above, parts, strict=True)
    )


def _ignored(name: str) -> bool:
    return name.startswith(".") or any(fnmatchcase(name.lower(), glob) for glob in _TEMPORARY)


def read_tree(src: str, row: formats.Format, rules: Rules, *, copy_others: bool) -> Tree:
    """Everything below `src` that is taken, and where it goes."""
    tree = Tree()
    found = _Found(tree, rules)
    if is_url(src):
        found.walk_remote(src)
    else:
        found.walk(src, "")
    suffixes = {suffix for each in formats.all_formats() if each.reader for suffix in each.suffixes}
    indexes = {path: _index_of(src, path) for path in found.files if formats.is_index(path)}
    owned = {part for parts in indexes.values() for part in parts}
    for path, stamp in found.files.items():
        if path in indexes:
            parts = tuple(sorted(part for part in set(indexes[path]) if part in found.files))
            stamps = [stamp, *(found.files[part] for part in parts)]
            stamp = Stamp(sum(one.size for one in stamps), sum(one.mtime_ns for one in stamps))
            target = path[: -len(formats.INDEX_SUFFIX)] + row.suffixes[0]
            tree.items.append(Item(path, target, False, stamp, parts, row.name == FOLDER_FORMAT))
        elif path in owned:
            continue
        elif (stem := _stem(path, suffixes)) is not None:
            folder = row.name == FOLDER_FORMAT
            tree.items.append(Item(path, f"{stem}{row.suffixes[0]}", False, stamp, (), folder))
        elif copy_others:
            tree.items.append(Item(path, path, True, stamp))
    for path, err in found.broken:
        if copy_others or _stem(path, suffixes) is not None or os.path.isdir(os.path.join(src, path)):
            tree.failures.append((path, err))
    if found.linked:
        tree.notes.append(f"{found.linked} links to folders were not followed")
    tree.items.sort()
    return tree


def _stem(path: str, suffixes: set[str]) -> str | None:
    """The path without the suffix of a known format; None if it has none."""
    stem, suffix = os.path.splitext(path)
    return stem if suffix.lower() in suffixes and os.path.basename(stem) else None


class _Found:
    """Regular files by relative path, and links that lead nowhere."""

    def __init__(self, tree: Tree, rules: Rules) -> None:
        self.files: dict[str, Stamp] = {}
        self.broken: list[tuple[str, ConvertError]] = []
        self.linked = 0
        self._rules = rules

    def walk_remote(self, folder: str) -> None:
        """The same for the URL of a folder; there are no links."""
        from convert import remote

        for path, _, found in remote.files_below(folder):
            parts = path.split("/")
            above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
            if not any(map(_ignored, parts)) and not any(map(self._rules.excluded, above)) and self._rules.takes(path):
                self.files[path] = remote_stamp(found)

    def walk(self, folder: str, relative: str) -> None:
        try:
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as err:
            self.broken.append((relative or ".", unreadable(folder, err)))
            return
        for entry in found:
            path = f"{relative}/{entry.name}" if relative else entry.name
            if _ignored(entry.name) or self._rules.excluded(path):
                continue
            if entry.is_dir(follow_symlinks=False):
                self.walk(entry.path, path)
            elif entry.is_symlink() and os.path.isdir(entry.path):
                self.linked += 1
            elif self._rules.takes(path):
                self._add(entry, path)

    def _add(self, entry: os.DirEntry[str], path: str) -> None:
        try:
            found = entry.stat()
        except OSError as err:
            self.broken.append((path, unreadable(entry.path, err)))
            return
        self.files[path] = Stamp(found.st_size if stat.S_ISREG(found.st_mode) else 0, found.st_mtime_ns)


def _index_of(src: str, path: str) -> list[str]:
    """Relative paths of the files that an index names; none if it cannot be understood, which its reader will say."""
    try:
        text = (read_small(join(src, path), _INDEX_BYTES) or b"").decode("utf-8")
        names = set(parse_json(text, "the index", DEFAULT)["weight_map"].values())
    except (ConvertError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
    folder = os.path.dirname(path)
    safe = [name for name in names if isinstance(name, str) and name and ".." not in name.split("/")]
    return [os.path.normpath(os.path.join(folder, name)).replace(os.sep, "/") for name in safe if name[0] != "/"]


# --- what may not run --------------------------------------------------------------------------------------------


def check_places(src: str, dst: str, rules: Rules) -> None:
    """Neither folder may lie in the other, nor be the other.

    Raises:
        UsageError: They do.
        OutputError: The target is a file.
    """
    if is_url(src) or is_url(dst):
        _check_urls(src, dst, rules)
        return
    if not os.path.isdir(src):
        raise UsageError("is no folder", path=src, hint="convert SOURCE TARGET converts a file")
    if os.path.lexists(dst) and not os.path.isdir(dst):
        raise OutputError("the target is a file (expected a folder)", path=dst, hint="give another path")
    one, other = os.path.realpath(src), os.path.realpath(dst)
    if one == other or (os.path.isdir(dst) and os.path.samefile(src, dst)):
        raise UsageError("source and target are the same folder", path=dst, hint="give another folder as the target")
    common = os.path.commonpath([one, other]) if os.path.splitdrive(one)[0] == os.path.splitdrive(other)[0] else ""
    if common == other:
        raise UsageError(f"the source {quoted(src)} lies in the target", path=dst, hint="give another folder")
    if common == one:
        inside = os.path.relpath(other, one).replace(os.sep, "/")
        if not rules.excluded(f"{inside}/\0"):
            raise UsageError(
                f"the target lies in the source {quoted(src)}",
                path=dst,
                hint=f"--exclude {inside!r} leaves it out, or give another folder",
            )


def _check_urls(src: str, dst: str, rules: Rules) -> None:
    """The same where one of the folders is remote; what is no folder turns out when it is listed or written to."""
    if not is_url(src) and not os.path.isdir(src):
        raise UsageError("is no folder", path=src, hint="convert SOURCE TARGET converts a file")
    if is_url(dst) and dst.partition(":")[0].lower() in ("http", "https"):
        raise OutputError(
            "https:// can only be read", path=dst, hint="give the URL of a store, such as s3://BUCKET/NAME"
        )
    one, other = (f"{real_path(path.rstrip('/'))}/" for path in (src, dst))
    if one == other:
        raise UsageError("source and target are the same folder", path=dst, hint="give another folder as the target")
    if one.startswith(other):
        raise UsageError(f"the source {quoted(src)} lies in the target", path=dst, hint="give another folder")
    inside = other[len(one) :].rstrip("/")
    if other.startswith(one) and not rules.excluded(f"{inside}/\0"):
        hint = f"--exclude {inside!r} leaves it out, or give another folder"
        raise UsageError(f"the target lies in the source {quoted(src)}", path=dst, hint=hint)


def check_collisions(items: list[Item], dst: str, *, folds: bool) -> list[Item]:
    """Two sources may not have one target, nor a target be a folder of another.

    Returns:
        The items, of which some may no longer become a folder.

    Args:
        items: What will be written.
        dst: For messages.
        folds: The target's file system does not tell apart names that differ in case or normalisation only.

    Raises:
        UsageError: With all collisions.
    """
    places: dict[str, Item] = {}
    problems: list[ConvertError] = []
    tied: set[str] = set()
    for item in items:
        first = places.setdefault(folded(item.target) if folds else item.target, item)
        if first is not item:
            problems.append(_collision(item, first, dst))
    above: dict[str, Item] = {}
    for item in items:
        place = folded(item.target) if folds else item.target
        while place := os.path.dirname(place):
            above.setdefault(place, item)
    for place, item in places.items():
        folder = os.path.splitext(place)[0] if item.may_be_folder else None
        for wanted in (place,) if folder is None else (place, folder):
            other = above.get(wanted) or (None if wanted == place else places.get(wanted))
            if other is not None and wanted == folder and _is_single(item):
                tied.add(item.source)
            elif other is not None:
                problems.append(_collision(item, other, dst))
    if problems:
        raise gather(problems)
    return [item._replace(may_be_folder=False) if item.source in tied else item for item in items]


def _is_single(item: Item) -> bool:
    """By its suffix it holds one tensor, and stays a file; what it holds indeed will be seen."""
    return item.source.lower().endswith(formats.BUILT_IN[0].suffixes)


def _collision(item: Item, other: Item, dst: str) -> UsageError:
    what = (
        "two inputs map to one output"
        if item.target == other.target
        else f"two inputs map to outputs that cannot both be, {quoted(other.target)} and {quoted(item.target)}"
    )
    return UsageError(
        f"{what}: {quoted(other.source)} and {quoted(item.source)}; neither may overwrite the other",
        path=join(dst, item.target),
        hint="--exclude one of them, or convert it by itself",
    )


def folded(name: str) -> str:
    """What a file system that ignores case and normalisation takes a name for."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def folds_names(dst: str, *, probe: bool) -> bool:
    """Whether the file system of a folder takes names for the same that differ in case or normalisation only.

    Args:
        dst: The folder, or where it will be.
        probe: Find out with a file of our own in `STATE`; else, without writing, from names that are there.

    Raises:
        OutputError: Nothing can be written there.
    """
    if is_url(dst):
        return False  # stores tell all names apart; a server that does not is not asked
    if not probe:
        there = existing(dst)
        other = there.swapcase()
        return sys.platform in ("darwin", "win32") or (other != there and os.path.exists(other))
    name = f"probe-{secrets.token_hex(4)}-"
    path = os.path.join(dst, STATE, name + "\u00e9")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        others = (name + "\u00c9", name + "e\u0301", name.upper() + "\u00e9")
        return any(os.path.lexists(os.path.join(dst, STATE, other)) for other in others)
    except OSError as err:
        raise unwritable(dst, err) from err
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def existing(path: str) -> str:
    """The path itself, or the nearest folder above that is there."""
    path = os.path.abspath(path)
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path
