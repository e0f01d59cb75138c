"""Servers on loopback for the tests of remote files: a real S3 server, and a web server that can be told to fail."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RCLONE = shutil.which("rclone", path=os.path.dirname(sys.executable)) or shutil.which("rclone")
"""A dependency of the tests; beside Python, whether or not that folder is in PATH."""
KEY, SECRET = "testkey", "testsecret"
_PATIENCE_SECONDS = 60.0
"""Against hanging only."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def rclone_serves(protocol: str, root: Path, *options: str) -> Iterator[int]:
    """`rclone serve PROTOCOL`; its port. A folder of the root is a bucket."""
    assert RCLONE is not None
    port = free_port()
    env = {**os.environ, "RCLONE_CONFIG": os.devnull}
    command = [RCLONE, "serve", protocol, "--addr", f"127.0.0.1:{port}", *options, str(root)]
    log = (root.parent / f"{protocol}.log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    try:
        _wait_for(port, process)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_PATIENCE_SECONDS)
        log.close()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError("the server does not listen")


@dataclass
class Web:
    """A web server for a folder, which counts and can be told to fail.

    Attributes:
        root: The folder.
        url: Its address, with a slash at the end.
        ranges: Whether ranges are served; else every body is the whole file.
        lengths: Whether bodies are announced with their length.
        etags: Whether files have one, of their content's size and time.
        faults: Called with number of the request (from 1), method and path: 'status' to answer with, number of
            bytes of the body after which the connection is 'cut' or to which a well-formed body is 'short', or None.
        requests: Method, path and range of each.
        sent: Bytes of bodies sent.
    """

    root: Path
    url: str = ""
    ranges: bool = True
    lengths: bool = True
    etags: bool = True
    faults: Callable[[int, str, str], tuple[str, int] | None] = lambda number, method, path: None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def web_server(root: Path) -> Iterator[Web]:
    """A `Web` on a free port."""
    web = Web(root)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def _answer(self, with_body: bool) -> None:
            path = urllib.request.url2pathname(self.path.partition("?")[0].lstrip("/"))
            wanted = self.headers.get("Range")
            with web.lock:
                web.requests.append((self.command, path, wanted))
                fault = web.faults(len(web.requests), self.command, path)
            if fault is not None and fault[0] == "status":
                self.send_response(fault[1])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            file = web.root / path
            if not file.is_file():
                self.send_error(404)
                return
            content = file.read_bytes()
            size, begin, end = len(content), 0, len(content)
            is_range = web.ranges and wanted is not None
            if is_range and wanted is not None:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                begin, end = int(first), min(int(last) + 1 if last else size, size)
            body = content[begin:end]
            if fault is not None and fault[0] == "short":
                body, fault = body[: fault[1]], None
            self.send_response(206 if is_range else 200)
            if is_range:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
            if web.etags:
                self.send_header("ETag", f'"{size}-{file.stat().st_mtime_ns}"')
            if web.lengths:
                self.send_header("Content-Length", str(len(body)))
            else:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            if with_body:
                self._send(body, fault[1] if fault is not None else len(body))

        def _send(self, body: bytes, cut: int) -> None:
            whole = cut >= len(body)
            with web.lock:  # before it is sent, for then a client may look at once
                web.sent += min(cut, len(body))
            try:
                if web.lengths:
                    self.wfile.write(body[:cut])
                else:
                    for at in range(0, min(cut, len(body)), 1 << 16):
                        chunk = body[at : min(at + (1 << 16), cut)]
                        self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                    if whole:
                        self.wfile.write(b"0\r\n\r\n")
            except OSError:  # the client has seen enough
                self.close_connection = True
            if not whole:
                self.close_connection = True

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    web.url = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_PATIENCE_SECONDS)
