"""Live progress of the peers on this machine: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gossipx.errors import printable

LINES_EVERY = 2.0
"""Seconds between two progress lines."""
RATE_OVER = 10.0
"""Seconds over which the iterations per second are measured: long enough for a steady figure, even with evaluations in
between, and short enough to show a peer that has become slow."""
LEAST_SPAN = 0.5
"""Seconds that a rate needs: events that waited while this process was busy arrive together."""


STARTING, LOADING_TORCH, LOADING_DATA = "starting", "loading torch", "loading data"
"""States of a process that has not called ``gossipx.join`` yet: a user's script, and the two of the built-in task."""


@dataclass
class PeerStatus:
    """Latest state of a peer, from its progress events."""

    name: str
    state: str = STARTING
    step: int = 0
    iterations: int = 0
    loss: float | None = None
    accuracy: float | None = None
    retrievals: int = 0
    bytes: int = 0
    test_loss: float | None = None
    _steps: deque[tuple[float, int]] = field(default_factory=deque, repr=False)  # (time, step), newest last

    def update(self, event: Mapping[str, Any], now: float) -> None:
        """Take over the fields of a progress event, received ``now``."""
        for key, value in event.items():
            setattr(self, key, value)
        if self.state != "train":
            self._steps.clear()
            return
        self._steps.append((now, self.step))
        while now - self._steps[0][0] > RATE_OVER and len(self._steps) > 2:
            self._steps.popleft()

    def begins(self, script: Sequence[str]) -> None:
        """Show that the peer's process has been started, for a user's ``script`` or for the built-in task."""
        self.state = STARTING if script else LOADING_TORCH
        self._steps.clear()

    @property
    def joins(self) -> bool:
        """Whether the process has called ``gossipx.join``."""
        return self.state not in (STARTING, LOADING_TORCH, LOADING_DATA)

    @property
    def rate(self) -> float | None:
        """Iterations per second in the last :data:`RATE_OVER` seconds; None: unknown."""
        if len(self._steps) < 2:
            return None
        (began, first), (now, last) = self._steps[0], self._steps[-1]
        return (last - first) / (now - began) if now - began >= LEAST_SPAN else None

    def left(self, now: float) -> float | None:
        """Return the seconds until the peer has trained, at its current rate; None: unknown."""
        rate = self.rate
        if not rate or not self.iterations:
            return None
        return max(0.0, (self.iterations - self.step) / rate - (now - self._steps[-1][0]))

    def done(self, report: Mapping[str, Any]) -> None:
        """Record the peer's final report."""
        self.state = "done"
        self._steps.clear()
        self.step = report.get("iterations", self.step)
        self.accuracy, self.test_loss = report.get("test_accuracy"), report.get("test_loss")
        self.retrievals = report.get("retrievals", self.retrievals)

    @property
    def steps(self) -> str:
        """The iterations done, and of how many if that is known."""
        return f"{self.step}/{self.iterations}" if self.iterations else str(self.step)

    @property
    def score(self) -> str:
        """The accuracy on the test set, or else the loss; empty before the first evaluation."""
        if self.accuracy is not None:
            return f"acc {self.accuracy:.3f}"
        return "" if self.test_loss is None else f"loss {self.test_loss:.3f}"


class _PlainConsole(Console):
    """A console for foreign text: files and other machines may hold what would control a terminal."""

    def render_str(self, text: str, **style: Any) -> Text:
        """Return printable text in place of ``text``."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **style)


def plain_console() -> Console:
    """Return a console that prints text as it is: ``[fd00:100::7]`` is neither markup nor a number to highlight."""
    return _PlainConsole(file=sys.stdout, highlight=False, markup=False, emoji=False)


BAR = 10
"""Width of a progress bar in columns."""


@dataclass(frozen=True)
class _Column:
    """A column of the table. On a narrow terminal whole columns are left out, those with the highest ``rank`` first."""

    heading: str
    rank: int
    cell: Callable[[PeerStatus], RenderableType]
    left: bool = False


_COLUMNS = (
    _Column("peer", 0, lambda status: status.name, left=True),
    _Column("state", 2, lambda status: status.state, left=True),
    _Column("", 8, lambda status: ProgressBar(max(status.iterations, 1), status.step, width=BAR), left=True),
    _Column("iteration", 1, lambda status: status.steps),
    _Column("it/s", 4, lambda status: "" if status.rate is None else f"{status.rate:.3g}"),
    _Column("loss", 3, lambda status: "" if status.loss is None else f"{status.loss:.3f}"),
    _Column("test", 5, lambda status: status.score),
    _Column("retrievals", 6, lambda status: str(status.retrievals)),
    _Column("MB", 7, lambda status: f"{status.bytes / 1e6:.1f}"),
)


def _clock(seconds: float) -> str:
    """Return a duration as ``1:05``, or ``2:01:05``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Display:
    """Shows the state of the peers during a run.

    Args:
        title: title of the table.
        statuses: states of the peers to show, by rank; read on each refresh.
        plain: print lines on a terminal too, because other processes write to it.

    Attributes:
        began: when the first peer began to train, on time.monotonic(); None: none has.
    """

    def __init__(self, title: str, statuses: dict[int, PeerStatus], plain: bool = False):
        self.console = plain_console()
        self._title = title
        self._plain_lines = plain
        self._statuses = statuses
        self._live: Live | None = None
        self._last = ""
        self._next = 0.0
        self.began: float | None = None

    def __enter__(self) -> Display:
        if self.console.is_terminal and not self._plain_lines:
            self._live = Live(
                self._table(), console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def line(self, text: str) -> None:
        """Print a line, above the table if there is one."""
        if self._live is None:
            print(text, flush=True)  # rich would expand tabs and drop control characters
        else:
            self.console.print(text, soft_wrap=True)

    def error(self, text: str) -> None:
        """Print an error to standard error."""
        print(text, file=sys.stderr, flush=True)

    def refresh(self, last: bool = False) -> None:
        """Redraw if enough time has passed, or if ``last``."""
        now = time.monotonic()
        if now < self._next and not last:
            return
        self._next = now + (0.2 if self._live is not None else LINES_EVERY)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        text = "  ".join(self._plain(status) for status in self._statuses.values())
        if text != self._last:
            self._last = text
            self.line(f"{text}  {times}" if (times := self._times()) else text)

    def _times(self) -> str:
        """Return how long the run has trained, and how long it will if all peers keep their rates; empty: it does not
        train."""
        if self.began is None:
            return ""
        now = time.monotonic()
        left = [status.left(now) for status in self._statuses.values() if status.state == "train"]
        known = [one for one in left if one is not None]
        remaining = f", about {_clock(max(known))} left" if known else ""
        return f"{_clock(now - self.began)} elapsed{remaining}"

    def _plain(self, status: PeerStatus) -> str:
        if not status.step:
            served = f" pulls {status.retrievals}" if status.retrievals else ""
            return f"{status.name} {status.state}{served}"
        loss = "" if status.loss is None else f" loss {status.loss:.3f}"
        score = f" test {status.score}" if status.score else ""
        rate = "" if status.rate is None else f" {status.rate:.3g} it/s"
        return f"{status.name} {status.state} {status.steps}{rate}{loss}{score} pulls {status.retrievals}"

    def _table(self) -> Table:
        """Return the table, with as many columns as the terminal has room for."""
        unlimited = self.console.options.update(max_width=sys.maxsize)
        for most in sorted((column.rank for column in _COLUMNS), reverse=True):
            table = self._table_of([column for column in _COLUMNS if column.rank <= most])
            if Measurement.get(self.console, unlimited, table).maximum <= self.console.width:
                break
        return table

    def _table_of(self, columns: Sequence[_Column]) -> Table:
        table = Table(
            title=self._title,
            title_justify="left",
            caption=self._times(),
            caption_justify="left",
            box=box.SIMPLE,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for column in columns:
            table.add_column(column.heading, justify="left" if column.left else "right", no_wrap=True)
        for status in self._statuses.values():
            table.add_row(*(column.cell(status) for column in columns))
        return table
