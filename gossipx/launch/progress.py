"""Live progress of the peers on this machine: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

LINES_EVERY = 2.0
"""Seconds between two progress lines."""


@dataclass
class PeerStatus:
    """Latest state of a peer, from its progress events."""

    name: str
    state: str = "starting"
    step: int = 0
    iterations: int = 0
    loss: float | None = None
    accuracy: float | None = None
    retrievals: int = 0
    bytes: int = 0
    test_loss: float | None = None

    def done(self, report: Mapping[str, Any]) -> None:
        """Record the peer's final report."""
        self.state = "done"
        self.step = report.get("iterations", self.step)
        self.accuracy, self.test_loss = report.get("test_accuracy"), report.get("test_loss")
        self.retrievals = report.get("retrievals", self.retrievals)

    @property
    def score(self) -> str:
        """The accuracy on the test set, or else the loss; empty before the first evaluation."""
        if self.accuracy is not None:
            return f"acc {self.accuracy:.3f}"
        return "" if self.test_loss is None else f"loss {self.test_loss:.3f}"


BAR = 10
"""Width of a progress bar in columns; with it the table fits a terminal of 80 columns."""


def _print(stream: TextIO | None, text: str) -> None:
    """Print a line unchanged; rich would expand tabs and drop control characters.

    If the reader has closed the stream or the disk is full, the line and all later ones are dropped: the run continues.
    """
    if stream is None:  # closed when the process started
        return
    try:
        print(text, file=stream, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class Display:
    """Shows the state of the peers during a run.

    Args:
        title: title of the table.
        statuses: states of the peers to show, by rank; read on each refresh.
        plain: print lines on a terminal too, because other processes write to it.
    """

    def __init__(self, title: str, statuses: dict[int, PeerStatus], plain: bool = False):
        self.console = Console(highlight=False)
        self._title = title
        self._plain_lines = plain
        self._statuses = statuses
        self._live: Live | None = None
        self._last = ""
        self._next = 0.0

    def __enter__(self) -> Display:
        if self.console.is_terminal and not self._plain_lines:
            self._live = Live(
                self._table(), console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._drawing() as live:
            if live is not None:
                live.update(self._table(), refresh=True)
        with self._drawing() as live:
            if live is not None:
                live.stop()

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[Live | None]:
        """Return a context in which the table can be drawn. Once the terminal is closed, there is no table any more."""
        try:
            yield self._live
        except OSError:
            self._live = None

    def line(self, text: str) -> None:
        """Print a line, above the table if there is one."""
        with self._drawing() as live:
            if live is None:
                _print(sys.stdout, text)
            else:
                self.console.print(text, markup=False, emoji=False, soft_wrap=True)

    def error(self, text: str) -> None:
        """Print an error to standard error."""
        _print(sys.stderr, text)

    def refresh(self, last: bool = False) -> None:
        """Redraw if enough time has passed, or if ``last``."""
        now = time.monotonic()
        if now < self._next and not last:
            return
        self._next = now + (0.2 if self._live is not None else LINES_EVERY)
        with self._drawing() as live:
            if live is not None:
                live.update(self._table(), refresh=True)
                return
        text = "  ".join(self._plain(status) for status in self._statuses.values())
        if text != self._last:
            self._last = text
            self.line(text)

    def _plain(self, status: PeerStatus) -> str:
        if not status.step:
            served = f" pulls {status.retrievals}" if status.retrievals else ""
            return f"{status.name} {status.state}{served}"
        score = f" {status.score}" if status.score else ""
        steps = f"{status.step}/{status.iterations}" if status.iterations else str(status.step)
        return f"{status.name} {status.state} {steps}{score} pulls {status.retrievals}"

    def _table(self) -> Table:
        table = Table(title=self._title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
        for heading in ("peer", "state", "", "iteration", "loss", "test", "retrievals", "MB"):
            # On a narrow terminal the bar shrinks, not the names: truncated names could be equal.
            fixed = max(len(status.name) for status in self._statuses.values()) if heading == "peer" else None
            left = heading in ("peer", "state", "")
            table.add_column(heading, justify="left" if left else "right", min_width=fixed, no_wrap=heading != "")
        for status in self._statuses.values():
            table.add_row(
                status.name,
                status.state,
                ProgressBar(total=max(status.iterations, 1), completed=status.step, width=BAR),
                f"{status.step}/{status.iterations}" if status.iterations else str(status.step),
                "" if status.loss is None else f"{status.loss:.3f}",
                status.score,
                str(status.retrievals),
                f"{status.bytes / 1e6:.1f}",
            )
        return table
