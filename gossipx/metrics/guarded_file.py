"""A file of curves whose writer survives a full disk.

Curves are worth less than training: a record that cannot be written waits, with a limited number of others, and is
tried again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path

log = logging.getLogger("gossipx")

INTERVAL = 10.0
"""Seconds between two writes to the disk: short enough to watch a run of one minute."""
MAX_WAITING = 20_000
"""Records that wait for the disk, about 2 MB; later ones are lost."""


class GuardedFile:
    """A file to which whole records are appended, every :data:`INTERVAL` seconds.

    Args:
        path: where it is created; another file there is overwritten.
        begin: the bytes with which it begins.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, begin: bytes):
        self._path = path
        self._lock = threading.Lock()
        self._size = 0  # bytes of the file; what is behind them is part of a record that could not be written
        self._waiting: list[bytes] = []
        self._lost = 0  # records that found no room
        self._has_warned = self._closed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._append(begin)
        self._tried = time.monotonic()

    def add(self, record: bytes) -> None:
        """Append a record."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                self._lost += 1
            else:
                self._waiting.append(record)
            if time.monotonic() - self._tried >= INTERVAL:
                self._write()

    def flush(self) -> int:
        """Try to write all records. Return how many so far are not written."""
        with self._lock:
            self._write()
            return self._lost + len(self._waiting)

    def close(self) -> None:
        """Write all records, and log how many could not be written. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if unwritten := self.flush():
            log.warning("%s: %d records of curves were not written", self._path, unwritten)

    def _write(self) -> None:
        self._tried = time.monotonic()
        try:
            self._append(b"".join(self._waiting))
            self._waiting = []
        except OSError as error:
            if not self._has_warned:
                log.warning(
                    "%s: curves cannot be written (%s): training continues, and they follow when there is room",
                    self._path,
                    error.strerror,
                )
            self._has_warned = True

    def _append(self, data: bytes) -> None:
        """Append the data, or nothing."""
        # Opened anew for each write: the descriptor of a file on a failed disk may stay unusable.
        with self._path.open("ab", buffering=0) as file:
            self._size = min(self._size, file.tell())  # smaller if someone has removed the file
            try:
                file.truncate(self._size)
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(self._size)
                raise
        self._size += len(data)
