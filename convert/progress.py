"""Counting bytes for whoever watches."""

from __future__ import annotations

import threading
from collections.abc import Callable

Callback = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and the name of the tensor in hand; raise to cancel the conversion."""


class Progress:
    """Adds up the bytes that several threads report and passes the sum on, one call at a time."""

    def __init__(self, callback: Callback, total_bytes: int) -> None:
        self._callback = callback
        self._lock = threading.Lock()
        self.total_bytes = total_bytes
        self.done_bytes = 0

    def add(self, count: int, name: str) -> None:
        with self._lock:
            self.done_bytes += count
            self._callback(self.done_bytes, self.total_bytes, name)
