"""What a peer says of its training: curves, lines to its parent process, and the figures of its summary."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from gossipx.comm import CommManager
from gossipx.metrics.recorder import Recorder
from gossipx.runtime import models
from gossipx.runtime.captures import Retrieval
from gossipx.runtime.driver import Driver
from gossipx.runtime.figures import Figures
from gossipx.runtime.options import PeerOptions
from gossipx.runtime.progress import Progress
from gossipx.sync import consensus_distance

log = logging.getLogger("gossipx")


class Reporter:
    """One peer's; for the training thread.

    Args:
        module: whose accuracy is measured.
        recorder: of curves.
        progress: to the parent process.
        evaluate: gives a model's accuracy from 0 to 1; None: it is not measured.

    Attributes:
        figures: seconds and bytes.
        progress: to the parent process.
        state: what the peer does, as it was last told.
    """

    def __init__(
        self,
        module: nn.Module,
        driver: Driver,
        comm: CommManager,
        recorder: Recorder,
        progress: Progress,
        options: PeerOptions,
        evaluate: Callable[[nn.Module], float] | None = None,
    ):
        self.figures = Figures()
        self.progress = progress
        self.state = "starting"
        self._module = module
        self._driver = driver
        driver.on_retrieval = self._retrieved
        self._role = driver.role
        self._arena = driver.arena
        self._comm = comm
        self._recorder = recorder
        self._options = options
        self._evaluate = evaluate
        self._last: dict[str, float] = {}
        self._counted: dict[str, int] = {}  # the iteration of the last record, by tag

    # --- curves -------------------------------------------------------------------------------------

    def scalar(self, tag: str, value: float) -> None:
        """Record a figure at this iteration."""
        self._last[tag] = value
        self._recorder.scalar(tag, value, self._arena.step)

    def _retrieved(self, retrieval: Retrieval) -> None:
        if retrieval.distance is not None:
            self.figures.squared_distances.append(retrieval.distance**2)
        self.figures.retrievals.append(retrieval)  # recorded when the model is mixed and training may go on

    def step_done(self, delta: float) -> None:
        """Record what there is to record of an iteration."""
        step, options, figures = self._arena.step, self._options, self.figures
        self._record_retrievals()
        if step % options.log_interval == 0:
            scalar = self._recorder.scalar
            scalar("sync/delta", delta, step)
            scalar("sync/delta_difference", self._role.sync.difference, step)
            scalar("sync/retrievals", self._role.sync.retrievals, step)
            scalar("comm/bytes_received", figures.received(self._comm.bytes_received), step)
            scalar("time/blocked_fraction", figures.fraction(figures.blocked), step)
            if self._driver.tables.transfers.table_store is not None:
                scalar("time/tables_fraction", figures.fraction(figures.waited), step)
            self.record_counted()
        if step % options.distance_interval == 0 and figures.squared_distances:
            figures.distance = consensus_distance(figures.squared_distances, self._role.size)
            figures.squared_distances.clear()
            self._recorder.scalar("sync/consensus_distance", figures.distance, step)
        if self.progress.due:
            self.tell("train")

    def _record_retrievals(self) -> None:
        for retrieval in self.figures.retrievals:
            self._recorder.scalar("comm/pull_seconds", retrieval.seconds, self._arena.step)
            self._recorder.scalar("comm/staleness", retrieval.staleness, self._arena.step)
            if retrieval.of_centre and retrieval.distance is not None:
                self._recorder.scalar("sync/elastic_distance", retrieval.distance, self._arena.step)
        self.figures.retrievals.clear()

    def record_counted(self, every: int = 0) -> None:
        """Record what a hub or the shards here have counted, at the iterations of those whom they serve.

        Args:
            every: iterations between two records.
        """
        for tag, (step, value) in self._driver.counted().items():
            if step >= self._counted.get(tag, -every) + every:
                self._counted[tag] = step
                self._recorder.scalar(tag, value, step)

    def close(self) -> None:
        """Write out what is still held back."""
        self._recorder.close()

    # --- from the first iteration to the finish -------------------------------------------------------

    def training_begins(self) -> None:
        """Training begins, or goes on from a checkpoint."""
        self.figures.start(self._comm.bytes_received)

    def training_ended(self) -> None:
        """Training has ended: what comes is of the finish."""
        self.figures.end(self._comm.bytes_received)

    def finished(self) -> None:
        """The finish is over."""
        self._record_retrievals()  # the last one may have been mixed just now
        self._recorder.scalar("sync/retrievals", self._role.sync.retrievals, self._arena.step)
        self.record_counted()
        self.figures.finish_bytes = self._comm.bytes_received - self.figures.bytes_at_end

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of the figures."""
        return self.figures.kept(self._comm.bytes_received, self._comm.bytes_sent, self._role.poisoned)

    # --- to the parent process ------------------------------------------------------------------------

    def tell(self, state: str) -> None:
        """Tell how far it is.

        Args:
            state: what the peer does.
        """
        self.state = state
        self.progress.tell(
            state=state,
            step=self._arena.step,
            loss=self._last.get("train/loss"),
            accuracy=self._last.get("test/accuracy"),
            retrievals=self._role.sync.retrievals if self._role.trains else self._role.server.taken_in,
            bytes=self._comm.bytes_received,
        )

    def tell_result(self, agreed: bool) -> None:
        """Tell the figures of this peer and of the others.

        Args:
            agreed: this model has been averaged in the finish.
        """
        missing = self._role.missing()
        reports = {rank: other.report for rank, other in self._role.members.others.items() if rank not in missing}
        self.progress.tell(
            result={
                "report": self._role.report,
                "reports": reports,
                "missing": missing,
                "consensus_accuracy": self._averaged_accuracy(missing, agreed),
                "consensus_distance": self.figures.distance,
                "seconds_before": self.figures.before.seconds,
            }
        )

    # --- figures --------------------------------------------------------------------------------------

    def accuracy(self) -> float | None:
        """Measure the model's; None: it cannot be."""
        if self._evaluate is None:
            return None
        self._arena.snapshot().release()  # what others are given meanwhile: evaluating may change the model for a while
        given = self._evaluate(self._module)
        try:
            accuracy = float(given)
        except (TypeError, ValueError):  # at the end of a training that is not to be lost for it
            log.warning("evaluate gave %s, which is no accuracy: a number from 0 to 1", type(given).__name__)
            return None
        return accuracy if math.isfinite(accuracy) else None

    def report(self, before: float | None, after: float | None) -> dict[str, Any]:
        """This peer's figures in the summary.

        Args:
            before, after: the model's accuracy before and after the finish.
        """
        figures, sync = self.figures, self._role.sync
        return {
            "name": self._options.name,
            "policy": self._options.policy,
            "codec": self._options.codec,
            "iterations": self._arena.step,
            "retrievals": sync.retrievals,
            "taken_in": self._role.server.taken_in,
            "delayed_pulls": self._role.server.delayed_pulls,
            "bytes_received": figures.received(figures.bytes_at_end),
            "bytes_sent": figures.before.bytes_sent + self._comm.bytes_sent,
            "finish_bytes": figures.finish_bytes,
            "test_accuracy": after,
            "test_accuracy_before_finish": before,
            "blocked_seconds": figures.blocked if self._role.trains else None,
            "overhead_seconds": figures.overhead,
            "train_seconds": figures.seconds,
            "skipped": sync.skipped,
            "failed": sync.failed,
            "poisoned": figures.before.poisoned + self._role.poisoned,
            "finish_rounds_lost": self._role.rounds_lost,
            "consensus_distance": figures.distance,
        }

    def _averaged_accuracy(self, missing: Sequence[int], agreed: bool) -> float | None:
        """The accuracy of the average of all final models, measured by the lowest rank, where it can read them all."""
        present = [rank for rank in range(self._role.size) if rank not in missing]
        if self._evaluate is None or self._options.directory is None:
            return None
        # Elsewhere one's own is the average, after a last wave; without one, nobody there has it.
        elsewhere = self._last.get("test/accuracy") if agreed else None
        if self._role.rank != present[0]:
            return elsewhere
        files = [models.file_of(self._options.directory, rank) for rank in present]
        if not all(file.is_file() for file in files):
            return elsewhere
        with models.holding_average(self._module, files) as held:
            return self.accuracy() if held else None
