"""The curves of a whole run: mean and worst of its peers, so that TensorBoard shows one line per run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gossipx.figures import FIGURES
from gossipx.metrics.summary import Summary

if TYPE_CHECKING:
    from gossipx.metrics.event_file import EventFile

DIRECTORY = "all"
"""Name of the directory beside those of the peers."""
_WORST: dict[str, Callable[[Collection[float]], float]] = {"lowest": min, "highest": max}
WORST = {figure.where.tag: _WORST.get(figure.where.whole) for figure in FIGURES if figure.where.whole}
"""The tags that are aggregated, and for those where peers may be bad, which value is the worst."""
AHEAD = 1e9
"""Seconds by which these curves begin before those of any peer. TensorBoard has seven colours, which it assigns in the
order in which runs begin: the curves of up to seven runs, which it overlays, then have different ones."""
METRICS = ("mean/test/accuracy", "mean/test/loss", "mean/comm/bytes_received")
"""Tags that TensorBoard's HPARAMS page shows beside the hyperparameters."""
Record = tuple[str, int, float]
"""Tag, iteration and value of one peer's curve."""


class Aggregate:
    """Collects records of peers and writes their mean and worst under ``mean/TAG`` and ``worst/TAG``.

    An iteration is written once all peers have passed it, so that peers of different speed do not distort the mean.

    Args:
        directory: directory of the run.
        hparams: returns the hyperparameters of the run, when the file begins.
        resumes: whether the run resumes: later records in the directory are then hidden.
        clock: returns the time of a record, in seconds.
    """

    def __init__(
        self,
        directory: Path,
        hparams: Callable[[], Mapping[str, str | float]],
        resumes: bool = False,
        clock: Callable[[], float] = time.time,
    ):
        self._directory = directory / DIRECTORY
        self._hparams = hparams
        self._resumes = resumes
        self._clock = clock
        self._file: EventFile | None = None
        self._waiting: dict[tuple[int, str], dict[int, float]] = {}  # by iteration and tag, values by rank
        self._added: dict[tuple[int, str], float] = {}  # when the last of these values was added
        self._passed = 0
        self._last: dict[str, tuple[int, float]] = {}  # by tag: what was written last

    def begin(self) -> None:
        """Begin the file of a new run; that of a resumed run begins with its first record, which says where it resumes.

        Raises:
            OSError: the file cannot be created; the same in :meth:`write` and :meth:`conclude`.
        """
        if self._file is None and not self._resumes:
            self._file = self._opened(None)

    def add(self, rank: int, records: Sequence[Record]) -> None:
        """Add records of a peer; other tags than those of :data:`WORST` are left out.

        The first record of an iteration counts. A later one, or one of an iteration that is already written, is a
        figure of the final model, which :meth:`conclude` writes for all peers at once.
        """
        for tag, step, value in records:
            if tag in WORST and step > self._passed:
                self._waiting.setdefault((step, tag), {}).setdefault(rank, value)
                self._added[step, tag] = self._clock()

    def write(self, passed: int) -> None:
        """Write the iterations that all peers have ``passed``."""
        self._passed = max(self._passed, passed)
        for step, tag in sorted(key for key in self._waiting if key[0] <= passed):
            self._add(tag, list(self._waiting.pop((step, tag)).values()), step, self._added.pop((step, tag)))

    def conclude(self, summary: Summary) -> None:
        """Write the final figures, at which peers need not have made equally many iterations."""
        for figure in FIGURES:
            tag = figure.where.tag
            if not figure.where.summary or tag.removesuffix("_after_finish") not in WORST:
                continue
            values = summary.figures[figure.name]
            present = [value for value in summary.of_training(values) if value is not None]
            if present:
                self._add(tag, present, summary.iterations, self._clock())

    def close(self) -> None:
        """Flush and close the file, if one was begun."""
        if self._file is not None:
            self._file.close()

    def _add(self, tag: str, values: Sequence[float], step: int, at: float) -> None:
        self._scalar(f"mean/{tag}", sum(values) / len(values), step, at)
        worst = WORST.get(tag.removesuffix("_after_finish"))
        if worst is not None:
            self._scalar(f"worst/{tag}", worst(values), step, at)

    def _scalar(self, tag: str, value: float, step: int, at: float) -> None:
        if self._last.get(tag) == (step, value):
            return
        self._last[tag] = step, value
        from gossipx.metrics import records

        if self._file is None:
            self._file = self._opened(step - 1 if self._resumes else None)
        self._file.add(records.scalar(tag, value), step, at)

    def _opened(self, resume_step: int | None) -> EventFile:
        # Imported here: reading summaries and comparing runs needs no TensorBoard.
        from gossipx.metrics import records
        from gossipx.metrics.event_file import EventFile

        file = EventFile(self._directory, resume_step, self._clock, AHEAD)
        for part in records.trial(self._hparams(), METRICS):
            file.add(part)
        return file
