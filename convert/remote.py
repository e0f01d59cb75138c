"""Remote places through fsspec: how a URL becomes a file system and a path, what its errors mean, when to try again.

Everything that imports fsspec is imported here, and only where a URL was given. fsspec keeps connections and
credentials: environment variables, configuration files and `~/.config/fsspec` work as everywhere.

Source: fsspec 2026.9 (`core.url_to_fs`, `spec.AbstractFileSystem`), s3fs 2026.9 (`errors.py`).
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from convert.errors import ConvertError, InputError, OutputError

WAIT_SECONDS = (0.2, 0.8, 2.0)
"""Before the second, third and fourth try."""
_PATIENT = ("s3", "s3a", "gs", "gcs")
"""Their libraries try five times on their own; here they get one more."""
_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses that say: not now."""
_PASSING_ERRORS = (
    "ClientConnectionError", "ClientPayloadError", "ConnectError", "ConnectTimeout", "ConnectionClosedError",
    "ConnectionError", "ConnectTimeoutError", "ContentLengthError", "EOFError", "EndpointConnectionError",
    "HTTPClientError", "IncompleteReadError", "ReadError", "ReadTimeout", "ReadTimeoutError", "RemoteProtocolError",
    "ResponseParserError", "SSHException", "ShortBodyError", "TimeoutError",
)  # fmt: skip
"""Names of classes, for most are of packages that are not installed."""
_PASSING_NUMBERS = (errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.EBUSY, errno.EAGAIN)
STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "hf")
"""Where an object appears when its upload is complete."""
_MANY_AT_ONCE = ("hf",)
"""File systems that several threads may use at once although they are not asynchronous."""
_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "http": "aiohttp", "https": "aiohttp", "gs": "gcsfs", "gcs": "gcsfs",
    "hf": "huggingface_hub", "sftp": "paramiko", "ssh": "paramiko",
    "abfs": "adlfs", "az": "adlfs", "smb": "smbprotocol", "oci": "ocifs",
}  # fmt: skip
"""What brings a protocol to fsspec."""
_KEYS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; FSSPEC_S3_ANON=true for a public bucket",
    "gs": "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS; FSSPEC_GS_TOKEN=anon for "
    "a public bucket",
    "hf": "run hf auth login, or set HF_TOKEN",
    "sftp": "put the key into ~/.ssh, or the name and password into the URL, NAME:PASSWORD@ before the host",
}
_KEYS |= {"s3a": _KEYS["s3"], "gcs": _KEYS["gs"], "ssh": _KEYS["sftp"]}

_Result = TypeVar("_Result")


class ShortBodyError(OSError):
    """A server sent fewer bytes than it promised."""


class Place(NamedTuple):
    """Where something is, or will be: a file system, the path in it, the URL it came from.

    Attributes:
        alone: Held while the file system works, if only one thread may use it at a time.
    """

    fs: Any
    path: str
    url: str
    alone: contextlib.AbstractContextManager[Any]

    @property
    def protocol(self) -> str:
        return protocol_of(self.url)

    @property
    def is_web(self) -> bool:
        return self.protocol in ("http", "https")

    def at(self, path: str) -> Place:
        """Another place in the same file system."""
        start, end = self.url.rstrip("/"), self.path.rstrip("/")
        if start.endswith(end):  # not all file systems remember their host
            return self._replace(path=path, url=start[: len(start) - len(end)] + path)
        return self._replace(path=path, url=str(self.fs.unstrip_protocol(path)))

    @property
    def key(self) -> str:
        """The same for the same place, however its URL is spelled."""
        return f"{type(self.fs).__name__} {self.fs.storage_options} {self.path}"


def protocol_of(url: str) -> str:
    return url.partition(":")[0].lower()


def locate(url: str, kind: type[ConvertError] = InputError) -> Place:
    """The file system a URL leads to; nothing is asked of it yet, or no more than its library does by itself.

    Raises:
        InputError, OutputError: As `kind` says: a package is missing, or nobody knows the protocol.
    """
    protocol = protocol_of(url)
    try:
        from fsspec.core import url_to_fs
    except ImportError as err:
        hint = f"pip install fsspec {_PACKAGES.get(protocol, '')}".rstrip()
        raise kind("URLs need the package fsspec, which is not installed", path=url, hint=hint) from err
    # A compressed body would have other lengths than its ranges.
    options = {"headers": {"Accept-Encoding": "identity"}} if protocol in ("http", "https") else {}
    try:
        fs, path = url_to_fs(url, **options)
    except ImportError as err:
        package = _PACKAGES.get(protocol)
        hint = f"pip install {package}" if package else "install the package that the message names"
        raise kind(f"{protocol}:// needs a package that is not installed: {err}", path=url, hint=hint) from err
    except ValueError as err:
        if "not known" not in str(err):
            raise explained(err, url, kind) from err
        hint = "s3://, gs://, hf://, https:// and sftp:// are known, and whatever else fsspec has"
        raise kind(f"nobody here knows the protocol {protocol}://", path=url, hint=hint) from err
    except Exception as err:  # whatever a library raises that connects at once
        raise explained(err, url, kind) from err
    if protocol in ("sftp", "ssh"):
        _hurry(fs)
    free = bool(getattr(fs, "async_impl", False)) or protocol in (*_MANY_AT_ONCE, "memory")
    return Place(fs, path, url, contextlib.nullcontext() if free else _lock_of(fs))


def _hurry(fs: Any) -> None:
    """Send SFTP's packets at once: each waits for its answer, and by default for more to send, 40 ms."""
    import socket

    with contextlib.suppress(AttributeError, OSError):
        fs.client.get_transport().sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_locks_lock = threading.Lock()


def _lock_of(fs: Any) -> threading.RLock:
    """The one lock of a file system object, which fsspec gives to all who ask for the same."""
    with _locks_lock:
        lock: threading.RLock | None = getattr(fs, "_convert_lock", None)
        if lock is None:
            lock = fs._convert_lock = threading.RLock()
        return lock


# --- errors ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explaining(url: str, kind: type[ConvertError]) -> Iterator[None]:
    """Whatever a library raises in the block becomes a refusal."""
    try:
        yield
    except ConvertError:
        raise
    except Exception as err:
        raise explained(err, url, kind) from err


def patiently(call: Callable[[], _Result], url: str, kind: type[ConvertError]) -> _Result:
    """What the call returns; where an error may pass it is tried again, a few times.

    Raises:
        InputError, OutputError: As `kind` says: it did not pass, or never will.
    """
    waits = WAIT_SECONDS[:1] if protocol_of(url) in _PATIENT else WAIT_SECONDS
    for wait in waits:
        try:
            return call()
        except ConvertError:
            raise
        except Exception as err:
            if not may_pass(err):
                raise explained(err, url, kind) from err
            time.sleep(wait)
    with explaining(url, kind):
        return call()


def _chain(err: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from, and from."""
    for _ in range(8):
        if err is None:
            return
        yield err
        err = err.__cause__ or err.__context__


def status_of(err: BaseException) -> int | None:
    """The HTTP status behind an error, if there is one."""
    for each in _chain(err):
        response = getattr(each, "response", None)
        # aiohttp says 400 of a body that was cut short.
        is_other = not hasattr(each, "status") and not type(each).__module__.startswith("aiohttp")
        found = getattr(each, "code" if is_other else "status", None)
        if isinstance(response, dict):
            found = response.get("ResponseMetadata", {}).get("HTTPStatusCode", found)
        elif response is not None:
            found = getattr(response, "status_code", found)
        if isinstance(found, int) and 100 <= found < 600:
            return found
    return None


def may_pass(err: BaseException) -> bool:
    """Whether it makes sense to try again."""
    status = status_of(err)
    if status is not None and status not in (200, 206):
        return status in _PASSING
    for each in _chain(err):
        if isinstance(each, FileNotFoundError | PermissionError | IsADirectoryError):
            continue
        if isinstance(each, OSError) and each.errno in _PASSING_NUMBERS:
            return True
        if any(parent.__name__ in _PASSING_ERRORS for parent in type(each).__mro__):
            return True
    return False


def is_missing(err: BaseException) -> bool:
    """Whether it says that there is nothing of this name."""
    return isinstance(err, FileNotFoundError) and status_of(err) in (None, 404) and not may_pass(err)


def explained(err: BaseException, url: str, kind: type[ConvertError]) -> ConvertError:
    """The refusal that an error of a library amounts to."""
    status = status_of(err)
    text = " ".join(str(err).split()) or type(err).__name__
    names = {type(each).__name__ for each in _chain(err)}
    keys = _KEYS.get(protocol_of(url), "check the credentials")
    what, hint = f"cannot be {'read' if issubclass(kind, InputError) else 'written'}: {text}", None
    if names & {"NoCredentialsError", "PartialCredentialsError", "NoAuthTokenError"}:
        what, hint = "there are no credentials for it", keys
    elif status == 401 or names & {"AuthenticationException"}:
        what, hint = f"the server wants other credentials: {text}", keys
    elif status == 403 or isinstance(err, PermissionError):
        what = f"the server says no: {text}"
        hint = f"is the name right, and may you use it? {keys}"
    elif "bucket does not exist" in text or "NoSuchBucket" in text:
        what, hint = "there is no such bucket", "check the spelling, or create the bucket first"
    elif is_missing(err) or status == 404:
        what, hint = "there is nothing of this name", "check the spelling: upper and lower case differ"
    elif names & {"FileExpired"}:
        what, hint = "it changed while it was read", "run again when nobody writes to it"
    elif status is not None and status in _PASSING:
        what, hint = f"the server is not able to answer (status {status})", "run again later"
    elif may_pass(err):
        text = " ".join(str([*_chain(err)][-1]).split()) or text  # what a library raised first says most
        what, hint = f"the connection failed: {text}", "check the address and the network, and run again"
        if protocol_of(url) in _PATIENT[:2]:
            hint += "; AWS_ENDPOINT_URL holds the address of an S3 server that is not Amazon's"
    return kind(what, path=url, hint=hint)


# --- what is there -----------------------------------------------------------------------------------------------


def facts(place: Place, kind: type[ConvertError] = InputError) -> dict[str, Any]:
    """What the store knows about a file or folder now.

    Raises:
        InputError, OutputError: As `kind` says: there is nothing of this name, or it cannot be asked.
    """

    def ask() -> dict[str, Any]:
        with place.alone:
            place.fs.invalidate_cache()
            found: dict[str, Any] = place.fs.info(place.path)
        return found

    return patiently(ask, place.url, kind)


def facts_if_any(place: Place, kind: type[ConvertError] = OutputError) -> dict[str, Any] | None:
    """The same, or None where there is nothing of this name."""
    try:
        return facts(place, kind)
    except ConvertError as err:
        if err.__cause__ is not None and is_missing(err.__cause__):
            return None
        raise


_TAGS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "checksum")
_TIMES = ("Last-Modified", "LastModified", "last_modified", "mtime", "modified", "created")


def is_changed(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a file is another one by its size, its tag, or, where there is no tag, its times.

    Not every call of a store tells everything in the same way: only what was told twice is compared.
    """
    known = [key for key in ("size", *_TAGS, *_TIMES) if then.get(key) and type(then[key]) is type(now.get(key))]
    tags = [key for key in known if key not in _TIMES]
    return any(then[key] != now[key] for key in (tags if len(tags) > 1 else known))


def tag_of(found: dict[str, Any]) -> str:
    """Text that is another one when the file is: its tag, or its time where there is none; empty where neither is."""
    for key in (*_TAGS, *_TIMES):
        if found.get(key):
            value = found[key]
            return value.isoformat() if hasattr(value, "isoformat") else str(value)
    return ""


def files_below(folder: str, *, required: bool = True) -> list[tuple[str, str, dict[str, Any]]]:
    """Every file below a folder, hidden ones left out: path in the folder, URL, what the store knows; sorted.

    Raises:
        InputError: It cannot be listed, or there is nothing and something is `required`.
    """
    place = locate(folder)
    if place.is_web:
        hint = "give the address of a file, or of the index of shards"
        raise InputError("web servers have no folders that could be listed", path=folder, hint=hint)
    root = place.path.rstrip("/") or place.path

    def ask() -> dict[str, dict[str, Any]]:
        with place.alone:
            place.fs.invalidate_cache()
            try:
                found: dict[str, dict[str, Any]] = place.fs.find(root, detail=True)
            except FileNotFoundError as err:
                if required or not is_missing(err):
                    raise
                return {}
        return found

    rows = []
    for path, found in patiently(ask, folder, InputError).items():
        relative = path[len(root) :].lstrip("/")
        if found.get("type") == "file" and relative and not any(part[:1] == "." for part in relative.split("/")):
            rows.append((relative, place.at(path).url, found))
    if required and not rows:
        raise InputError("the folder is empty, or there is none", path=folder, hint="check the spelling")
    return sorted(rows, key=lambda row: row[0])


def names_in_folder_of(url: str) -> list[str]:
    """Names of the files beside one, sorted; none where they cannot be listed."""
    try:
        place = locate(url)
        if place.is_web:
            return []
        with place.alone:
            place.fs.invalidate_cache()
            rows = place.fs.ls(place.fs._parent(place.path), detail=True)
    except Exception:  # objects can be read in a bucket that may not be listed
        return []
    return sorted(row["name"].rstrip("/").rpartition("/")[2] for row in rows if row.get("type") == "file")


def normal(url: str) -> str:
    """The same text for each URL of a place."""
    return locate(url).key


def exists(url: str, kind: type[ConvertError] = OutputError) -> bool:
    """Whether there is something of this name."""
    return facts_if_any(locate(url, kind), kind) is not None


def is_store(place: Place) -> bool:
    """Whether nobody sees a file there before its upload is complete, and folders are only in names."""
    return place.protocol in STORES


def remove(url: str) -> None:
    """Delete a file.

    Raises:
        OutputError: It stays.
    """
    place = locate(url, OutputError)

    def ask() -> None:
        with place.alone:
            place.fs.rm_file(place.path)
            place.fs.invalidate_cache()

    patiently(ask, url, OutputError)
