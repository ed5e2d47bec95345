"""Standard output and error of the commands, whose failures end no run, and the tables that are printed there.

A run trains for hours beside a terminal that is closed, a pipe whose reader has ended, a disk that is full, or a
console that cannot show a letter. Whatever prints, :func:`print`, click, rich or logging, writes through these streams:
a letter that cannot be shown is replaced, and what cannot be written is lost.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import RenderableType

from gossipx.launch.run.display import plain_console

PATIENCE = 10.0
"""Seconds that a line waits for the reader of a stream that another process has made non-blocking."""
NOBODY_READS = frozenset((errno.EPIPE, errno.EIO))
"""Errors of a pipe whose reader has ended, as ``head -1`` does, and of a terminal that is gone: nothing to tell."""


class _Unfailing(io.FileIO):
    """A file descriptor to which writing never fails.

    Attributes:
        error: why something was lost, at first; None: nothing was, or nobody reads it.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of ``data``, or lose the rest of it."""
        rest = memoryview(data)
        length = len(rest)
        try:
            while rest:
                written = super().write(rest)
                if written is None and not select.select((), (self,), (), PATIENCE)[1]:
                    break
                rest = rest[written or 0 :]
        except OSError as error:
            if error.errno not in NOBODY_READS:
                self.error = self.error or error
        return length


@contextlib.contextmanager
def unfailing_output() -> Iterator[Callable[[], str]]:
    """Return a context in which writing to standard output and error does not fail.

    Yields:
        A function that returns why standard output lacks something; empty: it does not, or nobody reads it.
    """
    _open_missing()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_unfailing(stream) for stream in before)
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)

    def why_incomplete() -> str:
        sys.stdout.flush()
        error = raw.error if isinstance(raw, _Unfailing) else None
        return "" if error is None else f"standard output: {error.strerror}; what is missing there is lost"

    try:
        yield why_incomplete
    finally:
        if text := why_incomplete():
            print(text, file=sys.stderr)
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _open_missing() -> None:
    """Open the standard streams that were closed when the process started: a file of the run would take their place."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _unfailing(stream: Any) -> Any:
    """Return a stream to the same descriptor; the given one if it has none, as in a test."""
    try:
        raw = _Unfailing(stream.fileno(), "w", closefd=False)
        stream.flush()
    except (AttributeError, OSError, ValueError):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        stream.encoding,
        "replace",
        line_buffering=stream.line_buffering or stream.write_through,
    )


def print_tables(*tables: RenderableType) -> None:
    """Print tables, and the text between them, one below the other."""
    console = plain_console()
    if not console.is_terminal:  # a file or a pipe has no width to fit
        console.width = 200
    for table in tables:
        console.print(table)


def shown(value: float | None, form: str) -> str:
    """Return a figure for a table; a dash for a missing one."""
    return "–" if value is None else format(value, form)
