"""Writing remote files, from the first byte to the last, so that they appear whole or not at all.

Two kinds of stores:

- where an object appears when its upload is complete (S3, Google, Azure), parts are uploaded as they come, and the
  upload is completed at the very end, or aborted;
- elsewhere (SFTP, FTP, SMB ...) a hidden sibling is written, and renamed at the end.

With `--verify` the first kind writes a sibling too, for what is not complete cannot be read back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from convert import remote
from convert.errors import ConvertError, OutputError, TargetExistsError, gather
from convert.output import committed, sibling_of, target_exists

if TYPE_CHECKING:
    from typing_extensions import Buffer

_READ_ONLY = ("http", "https", "github", "git", "zip", "tar", "libarchive", "data", "reference", "gist")
PART_BYTES = 6 << 20
"""What is uploaded at once. One part is being filled while another is on its way, of which its library holds two
copies. S3 takes none below 5 MiB."""
_MOST_PARTS = 9_000
"""S3 takes 10,000; a target that would need more has larger parts, and takes more memory."""
_S3_COPY_BYTES = 5 << 30
"""What S3 copies with one request."""
_ZEROS_BYTES = 1 << 20


class RemoteOutput:
    """A remote file being written in order; nobody sees it before `commit`.

    Attributes:
        target: URL as given.
        sequential: It can only be written from the first byte to the last.
    """

    sequential = True

    def __init__(self, target: str, *, overwrite: bool, verify: bool = False) -> None:
        """Look whether the target may be written.

        Args:
            target: Its URL.
            overwrite: Replace what is there.
            verify: It will be read back before `commit`.

        Raises:
            OutputError: It may not be written, or is there already.
        """
        self.target = target
        self._overwrite = overwrite
        if remote.protocol_of(target) in _READ_ONLY or "::" in target.partition("://")[0]:
            hint = "write a file, then upload it; or give a URL of a store, such as s3://BUCKET/NAME"
            raise OutputError(f"{target.partition(':')[0]}:// can only be read", path=target, hint=hint)
        self._place = remote.locate(target, OutputError)
        self._check_old()
        self._is_sibling = verify or not remote.is_store(self._place)
        self._path = self._place.path
        if self._is_sibling:
            folder, _, name = self._place.path.rpartition("/")
            self._path = f"{folder}/{os.path.basename(sibling_of('', name))}"
        self._part_bytes = PART_BYTES
        self._part = bytearray()
        self._at = 0
        self._file: Any = None
        self._uploader: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._is_begun = self._is_sent = self._is_done = False

    def _check_old(self) -> None:
        if self._overwrite and remote.is_store(self._place):
            return  # nothing is lost by not looking, and some may write who may not look
        found = remote.facts_if_any(self._place)
        if found is not None and found.get("type") == "directory":
            raise OutputError("the target is a folder", path=self.target, hint="give the URL of a file")
        if found is not None and not self._overwrite:
            raise target_exists(self.target)

    @property
    def path(self) -> str:
        return self.target

    # --- writing -------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> None:
        """About how many bytes will come: large files are uploaded in larger parts, as their number is limited."""
        least = -(-size * 11 // 10 // _MOST_PARTS)
        self._part_bytes = max(PART_BYTES, -(-least // (1 << 20)) << 20)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write what comes next; a gap is filled with zeros.

        Raises:
            OutputError: The upload failed, or these bytes were written before.
        """
        if offset < self._at:
            raise OutputError(
                f"a remote target is written in order (expected byte {self._at}, found byte {offset})",
                path=self.target,
                hint="this format's writer needs a file of this machine; upload that afterwards",
            )
        while offset > self._at:
            self._add(memoryview(bytes(min(offset - self._at, _ZEROS_BYTES))))
        self._add(memoryview(data).cast("B"))

    def _add(self, view: memoryview) -> None:
        while len(view):
            take = min(len(view), self._part_bytes - len(self._part))
            self._part += view[:take]
            self._at += take
            view = view[take:]
            if len(self._part) >= self._part_bytes:
                self._send()

    def _send(self) -> None:
        """Upload the part that is complete while the next is being filled."""
        self._wait()
        part, self._part = self._part, bytearray()
        if self._uploader is None:
            self._uploader = ThreadPoolExecutor(1, "upload")
        self._pending = self._uploader.submit(self._upload, part)

    def _wait(self) -> None:
        """For the part on its way; what went wrong with it is raised here."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with remote.explaining(self.target, OutputError):
                pending.result()

    def _upload(self, part: bytearray) -> None:
        with self._place.alone:
            if self._file is None:
                self._file = self._open()
            self._file.write(part)

    def _open(self) -> Any:
        fs = self._place.fs
        self._is_begun = True
        if not remote.is_store(self._place):
            return fs.open(self._path, "wb", block_size=self._part_bytes)
        file = fs.open(self._path, "wb", block_size=self._part_bytes, autocommit=False)
        with contextlib.suppress(ValueError):  # fsspec would keep it for the end of a transaction
            fs.transaction.files.remove(file)
        return file

    def park(self) -> None:
        """All has been written: upload the rest, and keep nothing in memory."""
        if self._is_sent:
            return
        self._wait()
        part, self._part = self._part, bytearray()
        with remote.explaining(self.target, OutputError):
            self._upload(part)
            with self._place.alone:
                self._file.close()
        self._is_sent = True
        self._stop()

    def _stop(self) -> None:
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            uploader.shutdown()

    # --- the end -------------------------------------------------------------------------------------------------

    def readable(self) -> str:
        """URL of what was written; for `--verify`, which must have been announced."""
        self._complete()
        return self._place.at(self._path).url

    def size(self) -> int:
        """Bytes written so far."""
        return self._at

    def _complete(self) -> None:
        """The end of the upload. A store of the first kind shows the object from here on."""
        self.park()
        file, self._file = self._file, None
        if file is not None and remote.is_store(self._place):
            try:
                with remote.explaining(self.target, OutputError), self._place.alone:
                    file.commit()
            except BaseException:
                self._file = file  # to be discarded
                raise

    def commit(self, *, fsync: bool = False) -> None:
        """Give it its name; the old target stays until this very moment."""
        try:
            self.park()
            self._check_old()  # once more: much may have happened since
            self._complete()
            if self._is_sibling:
                self._move()
            self._is_done = True
        except OutputError:
            self.discard()
            raise
        self._check_size()

    def _check_size(self) -> None:
        """The store has confirmed the upload; if it can be asked, it must have it as long as it was."""
        try:
            found = remote.facts_if_any(self._place)
        except OutputError:  # some may write who may not look
            return
        if found is None or found.get("size") not in (None, self._at):
            size = "nothing" if found is None else found["size"]
            raise OutputError(f"the upload is incomplete (expected {self._at} bytes, found {size})", path=self.target)

    def _move(self) -> None:
        fs, old, new = self._place.fs, self._path, self._place.path
        from fsspec.spec import AbstractFileSystem

        with remote.explaining(self.target, OutputError), self._place.alone:
            if type(fs).mv is not AbstractFileSystem.mv and not remote.is_store(self._place):
                fs.mv(old, new)
            else:
                self._copy(fs, old, new)
                fs.rm_file(old)
            fs.invalidate_cache()

    def _copy(self, fs: Any, old: str, new: str) -> None:
        """Within the store."""
        if self._place.protocol in ("s3", "s3a") and self._at <= _S3_COPY_BYTES:
            # s3fs would copy in parts from 150 MiB on, which not every S3 server can, and leave them if it fails.
            (bucket, key, _), (old_bucket, old_key, _) = fs.split_path(new), fs.split_path(old)
            fs.call_s3("copy_object", Bucket=bucket, Key=key, CopySource={"Bucket": old_bucket, "Key": old_key})
        else:
            fs.cp_file(old, new)

    def discard(self) -> None:
        """Remove everything written, unfinished uploads too; harmless when already committed."""
        with contextlib.suppress(Exception):
            self._wait()
        self._stop()
        file, self._file = self._file, None
        self._part = bytearray()
        if self._is_done:
            return
        if file is not None:
            with contextlib.suppress(Exception), self._place.alone:
                if remote.is_store(self._place):
                    file.discard()
                else:
                    file.close()
            with contextlib.suppress(AttributeError):
                file.closed = True  # or the end of the program would try to finish it
            leftover = getattr(getattr(file, "temp_file", None), "name", None)
            if isinstance(leftover, str):  # Hugging Face's keeps what it will upload on the disk
                with contextlib.suppress(OSError):
                    os.unlink(leftover)
        if self._is_sibling and self._is_begun:
            with contextlib.suppress(Exception), self._place.alone:
                self._place.fs.rm_file(self._path)


class RemoteSet:
    """Remote shards and their index: all uploaded before the first appears, the index the last.

    Stores cannot exchange several objects at once. An old index goes before the first new shard appears, so that there
    is never one whose shards are of two sets; if a commit fails, what is new is removed, but shards that were replaced
    are gone.
    """

    def __init__(
        self,
        parts: Sequence[str],
        index: tuple[str, bytes] | None,
        stale: Iterable[str],
        *,
        overwrite: bool,
        own: Collection[str] = (),
        verify: bool = False,
    ) -> None:
        """Check all names; see `convert.outputset.OutputSet` for the arguments."""
        self._parts, self._verify = parts, verify
        self._overwrite, self._own = overwrite, own
        names = [*parts, *(() if index is None else index[:1])]
        there = [url for url in names if remote.exists(url)]
        self._stale = [url for url in stale if remote.exists(url)]
        taken = [target_exists(url) for url in there if not self._may_go(url)]
        what = "the file exists already, is of an older set, and would contradict the new one"
        taken += [target_exists(url, what) for url in self._stale if not self._may_go(url)]
        if taken:
            raise gather([*taken])
        self._new = [url for url in names if url not in there]
        self._old_index = index is not None and index[0] in there
        self.files: list[RemoteOutput] = []
        self._index: RemoteOutput | None = None
        if index is not None:
            self._index = RemoteOutput(index[0], overwrite=self._may_go(index[0]))
            with committed(self):
                self._index.write_at(0, index[1])

    def _may_go(self, url: str) -> bool:
        return self._overwrite or (bool(self._own) and remote.normal(url) in self._own)

    def add(self) -> RemoteOutput:
        """Begin the next part."""
        url = self._parts[len(self.files)]
        self.files.append(RemoteOutput(url, overwrite=self._may_go(url), verify=self._verify))
        return self.files[-1]

    def park(self) -> None:
        """All parts begun so far are written."""
        for file in self.files:
            file.park()

    def _all(self) -> list[RemoteOutput]:
        return self.files if self._index is None else [*self.files, self._index]

    def readable(self) -> list[str]:
        """URLs of the parts written so far; for `--verify`."""
        return [file.readable() for file in self.files]

    def size(self) -> int:
        """Bytes written so far."""
        return sum(file.size() for file in self._all())

    def commit(self, *, fsync: bool = False) -> None:
        """Let all appear, the index last, then remove what is stale."""
        done: list[str] = []
        try:
            if self._old_index and self._index is not None:
                remote.remove(self._index.target)
            for file in self._all():
                file.commit(fsync=fsync)
                done.append(file.target)
        except BaseException as err:  # an interrupt too
            for url in done:
                if url in self._new:
                    with contextlib.suppress(ConvertError):
                        remote.remove(url)
            self.discard()
            replaced = [url for url in done if url not in self._new]
            if replaced and isinstance(err, OutputError) and not isinstance(err, TargetExistsError):
                err.hint = "the old set is incomplete now: run again with --overwrite"
            raise
        problems: list[ConvertError] = []
        for url in self._stale:
            try:
                remote.remove(url)
            except ConvertError as err:
                what = f"the new files are in place, but this old one could not be removed: {err.message}"
                problems.append(OutputError(what, path=url, hint="remove it: programs may take it for current"))
        if problems:
            raise gather(problems)

    def discard(self) -> None:
        """Remove everything written; harmless when already committed."""
        for file in self._all():
            file.discard()
