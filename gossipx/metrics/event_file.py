"""An event file of TensorBoard whose writer survives a full disk: its own ends with the first write that fails."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter

from gossipx.metrics.guarded_file import GuardedFile

VERSION = "brain.Event:2"
"""The format's version; readers expect it in the first record."""
PREFIX = "events.out.tfevents."
"""The start of a file's name; a number of ten digits follows, in whose order the files of a directory are read."""


class EventFile:
    """An event file that is open for writing.

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
        self._clock = clock
        step = None if resume_step is None else resume_step + 1
        begin = _framed(Event(step=step, file_version=VERSION, wall_time=clock() - ahead))
        if resume_step is not None:
            begin += _framed(Event(step=step, session_log=SessionLog(status=SessionLog.START), wall_time=clock()))
        name = f"{PREFIX}{_stamp(directory):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = GuardedFile(directory / name, begin)
        self.flush, self.close = self._file.flush, self._file.close

    def add(self, summary: Any, step: int | None = None, at: float | None = None) -> None:
        """Append a record: TensorBoard's ``Summary``, at an iteration, and at a time in seconds (None: now)."""
        self._file.add(_framed(Event(step=step, summary=summary, wall_time=self._clock() if at is None else at)))


def _framed(event: Any) -> bytes:
    """Return a record as it stands in the file, with its length and checksums."""
    framed = io.BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    return framed.getvalue()


def _stamp(directory: Path) -> int:
    """Return the time in seconds for the name of a new file, or if the clock is behind, the next after all others'."""
    others = (file.name[len(PREFIX) :][:10] for file in directory.glob(f"{PREFIX}*"))
    return max(int(time.time()), *(int(other) + 1 for other in others if other.isdecimal()), 0)
