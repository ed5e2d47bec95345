"""An event file of TensorBoard whose writer survives a full disk.

TensorBoard's own writer ends with the first write that fails, and the program with the next record. Curves are worth
less than training: here a record that cannot be written waits, a limited number of them, and is tried again.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter

log = logging.getLogger("gossipx")

INTERVAL = 10.0
"""Seconds between two writes to the disk: short enough to watch a run of one minute."""
MAX_WAITING = 20_000
"""Records that wait for the disk, about 2 MB; later ones are lost."""
MANY = 1_000
"""Waiting records that are written at once, long before :data:`MAX_WAITING`."""
TIMEOUT = 10.0
"""Seconds that a caller waits for a write; a hung disk must not block it forever."""
VERSION = "brain.Event:2"
"""The format's version; readers expect it in the first record."""
PREFIX = "events.out.tfevents."
"""The start of a file's name; a number of ten digits follows, in whose order the files of a directory are read."""


class EventFile:
    """An event file that is open for writing. A thread of its own writes to the disk.

    Args:
        directory: where it is created.
        resume_step: iteration to resume from; readers hide later records of other files in the directory. None: a new
            run.
        clock: returns the time of a record, in seconds.
        ahead: seconds by which the time of the first record is before the clock's. TensorBoard orders runs by it.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(
        self,
        directory: Path,
        resume_step: int | None = None,
        clock: Callable[[], float] = time.time,
        ahead: float = 0.0,
    ):
        self._path = directory / f"{PREFIX}{_stamp(directory):010d}.{socket.gethostname()}.{os.getpid()}"
        self._clock = clock
        self._size = 0  # bytes of the file; what is behind them is part of a record that could not be written
        self._frames = b""  # encoded records that wait for the disk
        self._framed = 0  # number of them; like what follows the condition, protected by it
        self._has_warned = False
        self._changed = threading.Condition()  # protects what follows
        self._queue: list[bytes] = []  # records that the thread has not encoded yet
        self._lost = 0  # records that found no room in the queue
        self._requested = 0  # writes requested by callers
        self._done = 0  # the last of these that is done
        self._closed = False
        directory.mkdir(parents=True, exist_ok=True)
        step = None if resume_step is None else resume_step + 1
        self._add(Event(step=step, file_version=VERSION), clock() - ahead)
        if resume_step is not None:
            self._add(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        self._write()
        self._thread = threading.Thread(target=self._work, name="gossipx-curves", daemon=True)
        self._thread.start()

    def add(self, summary: Any, step: int | None = None, at: float | None = None) -> None:
        """Append a record: TensorBoard's ``Summary``, at an iteration, and at a time in seconds (None: now)."""
        self._add(Event(step=step, summary=summary), at)

    def _add(self, event: Any, at: float | None = None) -> None:
        event.wall_time = self._clock() if at is None else at
        record = event.SerializeToString()
        with self._changed:
            if len(self._queue) + self._framed >= MAX_WAITING:
                self._lost += 1
                return
            self._queue.append(record)
            if len(self._queue) == MANY:
                self._request()

    def _request(self) -> int:
        self._requested += 1
        self._changed.notify_all()
        return self._requested

    def flush(self) -> int:
        """Try to write all records. Return how many records so far are not written."""
        with self._changed:
            mine = self._request()
            self._changed.wait_for(lambda: self._done >= mine, TIMEOUT)
            return self._lost + len(self._queue) + self._framed

    def close(self) -> None:
        """Write all records, and log how many could not be written. Idempotent."""
        if self._closed:
            return
        self._closed = True
        unwritten = self.flush()
        self._thread.join(TIMEOUT)
        if unwritten:
            log.warning("%s: %d records of curves were not written", self._path, unwritten)

    # --- the thread that writes ---------------------------------------------------------------------

    def _work(self) -> None:
        closed = False
        while not closed:
            with self._changed:
                self._changed.wait_for(lambda: self._requested > self._done, INTERVAL)
                requested, closed = self._requested, self._closed
            try:
                self._write()
            except OSError as error:
                self._warn(error)
            with self._changed:
                self._done = requested
                self._changed.notify_all()

    def _write(self) -> None:
        """Write all records.

        Raises:
            OSError: none of the waiting records could be written; they wait further.
        """
        with self._changed:
            records, self._queue = self._queue, []
            self._framed += len(records)
        encoded = io.BytesIO()
        writer = RecordWriter(encoded)
        for record in records:
            writer.write(record)
        self._frames += encoded.getvalue()
        if not self._frames:
            return
        # Opened anew for each write: the descriptor of a file on a failed disk may stay unusable.
        with self._path.open("ab", buffering=0) as file:
            self._size = min(self._size, file.tell())  # smaller if someone has removed the file
            try:
                file.truncate(self._size)
                view = memoryview(self._frames)
                while view:
                    view = view[file.write(view) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(self._size)
                raise
        self._size += len(self._frames)
        self._frames = b""
        with self._changed:
            self._framed = 0

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            log.warning(
                "%s: curves cannot be written (%s): training continues, and they follow when there is room",
                self._path,
                error.strerror,
            )
        self._has_warned = True


def _stamp(directory: Path) -> int:
    """Return the time in seconds for the name of a new file, or if the clock is behind, the next after all others'."""
    others = (file.name[len(PREFIX) :][:10] for file in directory.glob(f"{PREFIX}*"))
    return max(int(time.time()), *(int(other) + 1 for other in others if other.isdecimal()), 0)
