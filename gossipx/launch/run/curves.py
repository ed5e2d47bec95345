"""The aggregate curves that ``gossipx run`` writes from the reports of the peers on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gossipx.launch.run.display import PeerStatus
from gossipx.metrics.aggregate import Aggregate, Record
from gossipx.metrics.summary import Summary

log = logging.getLogger("gossipx")

GONE = ("lost", "failed", "restarted", "serve")
"""States of peers whose iterations are not awaited: no records of theirs will come."""


class RunCurves:
    """The aggregate curves of a run.

    Args:
        directory: the run's directory; None: several processes write there, each with one peer, so nothing is written.
        statuses: states of the peers, by rank.
        hparams: returns the run's hyperparameters, when the training begins.
        resumes: whether the run resumes.
    """

    def __init__(
        self,
        directory: Path | None,
        statuses: Mapping[int, PeerStatus],
        hparams: Callable[[], dict[str, str | float]],
        resumes: bool,
    ):
        self._statuses = statuses
        self._serving: set[int] = set()
        self._curves = None if directory is None else Aggregate(directory, hparams, resumes)

    def handle(self, rank: int, records: Sequence[Record]) -> None:
        """Take in the records of a peer whose state has just been updated."""
        if self._statuses[rank].state == "serve":
            self._serving.add(rank)
        if self._statuses[rank].state == "train":
            self._attempt(Aggregate.begin)
        self._attempt(lambda curves: curves.add(rank, records))
        # The figures of the iteration that a peer is at may still follow.
        self._attempt(lambda curves: curves.write(self._slowest() - 1))

    def conclude(self, summary: Summary) -> None:
        """Write the last iterations and the figures of the final models."""
        self._attempt(lambda curves: curves.write(self._slowest()))
        self._attempt(lambda curves: curves.conclude(summary))

    def _slowest(self) -> int:
        """Return the iteration of the slowest peer that trains, or has trained to its end."""
        steps = [
            status.step
            for rank, status in self._statuses.items()
            if status.state not in GONE and rank not in self._serving
        ]
        return min(steps, default=0)

    def close(self) -> None:
        """Flush and close the file."""
        if self._curves is not None:
            self._curves.close()

    def _attempt(self, write: Callable[[Aggregate], None]) -> None:
        try:
            if self._curves is not None:
                write(self._curves)
        except OSError as error:
            log.warning(
                "the aggregate curves cannot be written (%s): the run has only those of its peers", error.strerror
            )
            self._curves = None
