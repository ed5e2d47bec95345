"""The reporter of a peer: training curves, progress lines to the parent process, and the figures of the summary."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import nn

from gossipx import codecs
from gossipx.figures import TAGS, Counters
from gossipx.metrics.aggregate import WORST, Record
from gossipx.metrics.recorder import Recorder
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import unshared
from gossipx.peer import PeerRole
from gossipx.peer.server_role import Total
from gossipx.peer.status import status
from gossipx.protocol.messages import Stage
from gossipx.runtime import model_files
from gossipx.runtime.driver import Driver
from gossipx.runtime.driver.captures import Retrieval
from gossipx.runtime.figures.measured import Figures
from gossipx.runtime.figures.scores import Evaluate, scores
from gossipx.runtime.place import Place
from gossipx.settings.modes import Server
from gossipx.settings.sections import RunConfig
from gossipx.sync import consensus_distance

T = TypeVar("T")


class MeasuredPeer(Protocol):
    """A peer as a reporter sees it: its driver; in virtual time also a peer that has no model.

    Attributes:
        arena: the weights; None: it has no model.
        on_retrieval: called with each model mixed during training.
    """

    role: PeerRole
    on_retrieval: Callable[[Retrieval], None]

    @property
    def arena(self) -> ParameterArena | None: ...

    @property
    def step(self) -> int:
        """Iterations done."""

    @property
    def has_tables(self) -> bool:
        """Whether the run has a parameter server."""

    def now(self) -> float:
        """Return the time in seconds; it never goes back."""

    def read(self, look: Callable[[PeerRole], T]) -> T:
        """Return what ``look`` reads from the role, between two events."""

    def received_before(self, stage: Stage) -> int:
        """Return the bytes received before the role reached ``stage``; all so far if it has not."""


class MeasuredTraffic(Protocol):
    """The bytes of models and tables that a peer has received and sent: its CommManager, or its end of a network."""

    @property
    def bytes_received(self) -> int: ...

    @property
    def bytes_sent(self) -> int: ...


class Reporter:
    """The reports of one peer. All public methods are for the training thread.

    Args:
        module: the model that is evaluated.
        recorder: records curves.
        policy: the description of the policy or the sync model.
        evaluate: as for :func:`gossipx.join`; None: the model is not evaluated.

    Attributes:
        figures: the measured seconds and bytes.
        progress: the pipe to the parent process.
        policy: the description of the policy or the sync model.
        state: the peer's state as last reported, such as ``joining`` or ``train``.
    """

    def __init__(
        self,
        module: nn.Module,
        driver: MeasuredPeer,
        comm: MeasuredTraffic,
        recorder: Recorder,
        config: RunConfig,
        place: Place,
        policy: str,
        evaluate: Evaluate | None = None,
    ):
        self.figures = Figures(driver.now)
        self.progress = place.progress
        self.policy = policy
        self.state = "starting"
        self._module = module
        self._driver = driver
        driver.on_retrieval = self._retrieved
        self._role = driver.role
        self._comm = comm
        self._recorder = recorder
        self._config = config
        self._place = place
        self._evaluate = evaluate
        self._last: dict[str, float] = {}
        self._records: list[Record] = []  # records for the parent's aggregate that wait for the next progress line
        self._recorded_at: dict[str, int] = {}  # by tag: the iteration of the last record
        self._accumulated = 0  # number of the last retrieval whose accumulated deltas are recorded
        self._totals: dict[str, Total] = {}  # by tag: the total at the last record

    # --- curves -------------------------------------------------------------------------------------

    def scalar(self, tag: str, value: float) -> None:
        """Record a figure at the current iteration."""
        self._last[tag] = value
        self._record(tag, value, self._driver.step)

    def last(self, tag: str) -> float | None:
        """Return the last value that :meth:`scalar` recorded, or None."""
        return self._last.get(tag)

    def _record(self, tag: str, value: float, step: int) -> None:
        self._recorder.scalar(tag, value, step)
        if tag in WORST and self.progress.has_parent:
            self._records.append((tag, step, value))

    def _retrieved(self, retrieval: Retrieval) -> None:
        """Keep a retrieval until the training thread records it; the driver may call this on any thread."""
        if retrieval.distance is not None:
            self.figures.squared_distances.append(retrieval.distance**2)
        self.figures.retrievals.append(retrieval)

    def step_done(self, delta: float) -> None:
        """Record the figures of an iteration that are due."""
        step, config, figures = self._driver.step, self._config, self.figures
        scalar, sync = self._record, self._role.sync
        self._record_retrievals()
        is_due = step % config.run.log_interval == 0
        if is_due or sync.fired:  # at each decision, else the values that made the policy fire would rarely be recorded
            if sync.observation is not None and sync.observation.step == step:  # else the model has diverged
                scalar("sync/delta_difference", sync.observation.difference, step)
                scalar("sync/travelled", sync.observation.travelled, step)
            scalar("sync/decisions", sync.decisions, step)
        if is_due:
            scalar("sync/delta", delta, step)
            now: dict[str, float] = {"retrievals": sync.retrievals, "skipped": sync.skipped, "failed": sync.failed}
            now |= {"bytes_received": figures.received(self._comm.bytes_received), "train_seconds": figures.elapsed}
            for name, value in now.items():
                scalar(TAGS[name], value, step)
            scalar("time/blocked_fraction", figures.fraction(figures.blocked), step)
            if self._driver.has_tables:
                scalar("time/tables_fraction", figures.fraction(figures.waited), step)
            self.record_server_metrics()
        if step % config.sync.distance_interval == 0 and figures.squared_distances:
            figures.distance = consensus_distance(figures.squared_distances, self._role.members.size)
            figures.squared_distances.clear()
            scalar("sync/consensus_distance", figures.distance, step)
        if self.progress.due:
            self.report_state("train")

    def _record_retrievals(self) -> None:
        scalar, sync, retrievals = self._recorder.scalar, self._role.sync, self.figures.retrievals
        # Figures 3 and 4 have the number of the retrieval on their x axis.
        for number, retrieval in enumerate(retrievals, sync.retrievals - len(retrievals) + 1):
            scalar("comm/pull_seconds", retrieval.seconds, self._driver.step)
            scalar("comm/staleness", retrieval.staleness, self._driver.step)
            if retrieval.of_centre and retrieval.distance is not None:
                scalar("sync/elastic_distance", retrieval.distance, self._driver.step)
            elif retrieval.distance is not None:
                apart = consensus_distance([retrieval.distance**2], self._role.members.size)
                scalar("retrieval/distance", apart, number)
        retrievals.clear()
        number, accumulated = sync.accumulated
        if number > self._accumulated:
            self._accumulated = number
            scalar("retrieval/delta", accumulated, number)

    def record_server_metrics(self, every: int = 0) -> None:
        """Record the figures of the hub or the shards on this peer, at the iterations of the workers they serve.

        Args:
            every: minimum iterations between two records of one figure.
        """
        for tag, (step, value) in self._driver.read(lambda role: role.server.metrics).items():
            if step < self._recorded_at.get(tag, -every) + every:
                continue
            if isinstance(value, Total):
                before, self._totals[tag] = self._totals.get(tag, Total(0, 0)), value
                if value.number <= before.number:  # nothing new
                    continue
                value = (value.sum - before.sum) / (value.number - before.number)
            self._recorded_at[tag] = step
            self._recorder.scalar(tag, value, step)

    def close(self) -> None:
        """Flush and close the recorder."""
        self._recorder.close()

    # --- from the first iteration to the finish -------------------------------------------------------

    def training_begins(self) -> None:
        """Start the clock of the training. Bytes count from the adoption of the initial model."""
        self.figures.start(self._driver.received_before(Stage.START))

    def training_ended(self) -> None:
        """Stop the clock of the training. Bytes count as the finish's from the final averaging on."""
        self.figures.end()

    def finished(self) -> None:
        """Record the final figures, after the finish."""
        self._record_retrievals()  # the last one may have been mixed just now
        if self._role.trains:
            self._record("sync/retrievals", self._role.sync.retrievals, self._driver.step)
        self.record_server_metrics()
        self.figures.bytes_at_end = self._driver.received_before(Stage.AGREE)
        self.figures.finish_bytes = self._comm.bytes_received - self.figures.bytes_at_end

    def state_dict(self) -> dict[str, Any]:
        """Return the figures for a checkpoint, as plain data."""
        return self.figures.state_dict(self._comm.bytes_received, self._comm.bytes_sent, self.counts())

    def counts(self) -> dict[str, int]:
        """Return the counters of this process; for any thread."""
        of_comm = getattr(self._comm, "counts", Counters())  # a script's own CommManager may count nothing
        return {name: number + of_comm[name] for name, number in self._role.counts.items()}

    # --- to the parent process ------------------------------------------------------------------------

    def report_state(self, state: str, **more: Any) -> None:
        """Report the peer's state and its progress to the parent process.

        Args:
            state: ``joining``, ``train``, ``finish``, ``serve``, ``leave`` or ``left``.
            more: further fields of the line.
        """
        self.state = state
        self.progress.tell(
            state=state,
            step=self._driver.step,
            loss=self.last("train/loss"),
            accuracy=self.last("test/accuracy"),
            test_loss=self.last("test/loss"),
            # a server that does not train shows the gradients that it has taken in
            retrievals=self._role.sync.retrievals if self._role.trains else self._role.server.contributions,
            bytes=self._comm.bytes_received,
            restarted=self._role.members.restarted(),
            joined=self._role.newcomers.present(),
            records=self._taken(),
            **more,
        )

    def _taken(self) -> list[Record]:
        """Return the records that have not been sent to the parent process yet."""
        taken, self._records = self._records, []
        return taken

    def report_left(self, framework: str = "", kept: str = "") -> None:
        """Report that the peer has left on request, with its figures until then.

        Args:
            framework: which saves this peer's state; empty: gossipx does.
            kept: the framework's checkpoint from which this peer continues; empty: unknown.
        """
        self.finished()
        figures = {**self.report({}, {}), "seconds_before": self.figures.earlier.seconds}
        self.report_state("left", report={**figures, "framework": framework, "kept": kept})

    def report_result(self, own: Mapping[str, float]) -> None:
        """Report the final figures of this peer and of the others to the parent process.

        Args:
            own: the scores of this model if it was averaged in the finish; else empty.
        """
        missing = self._role.members.without_figures()
        averaged = self._averaged_scores(missing, own)
        reports = {rank: other.report for rank, other in self._role.members.others.items() if rank not in missing}
        self.progress.tell(
            result={
                "report": self._role.report,
                "reports": reports,
                "missing": missing,
                "doubted": self._role.agreement.doubted if self._role.claims_agreement else [],
                "joined": self._role.newcomers.took_part(),
                "consensus_accuracy": averaged.get("accuracy"),
                "consensus_loss": averaged.get("loss"),
                "consensus_distance": self.figures.distance,
                "seconds_before": self.figures.earlier.seconds,
            },
            records=self._taken(),
        )

    # --- figures --------------------------------------------------------------------------------------

    def scores(self) -> dict[str, float]:
        """Evaluate the model. Return its finite figures by name, such as ``accuracy``."""
        if self._evaluate is None:
            return {}
        # evaluate may change the model briefly. A snapshot makes the arena copy it, and other peers get that copy.
        if (arena := self._driver.arena) is not None:
            arena.snapshot().release()
        return scores(self._evaluate(self._module))

    def report(self, before: Mapping[str, float], after: Mapping[str, float], unwritten: int = 0) -> dict[str, Any]:
        """Return this peer's figures for the summary.

        Args:
            before: the scores of the model before the finish.
            after: the scores of the final model.
            unwritten: files that could not be written; the recorder's records are added.
        """
        figures, sync = self.figures, self._role.sync
        return {
            "name": self._place.name,
            "policy": self.policy,
            "codec": codec_of(self._config),
            "iterations": self._driver.step,
            "retrievals": sync.retrievals,
            "merged_by_hub": self._role.server.contributions,
            "delayed_pulls": self._role.server.delayed_pulls if self._driver.has_tables else None,
            "bytes_received": figures.received(figures.bytes_at_end),
            "bytes_sent": figures.earlier.bytes_sent + self._comm.bytes_sent,
            "finish_bytes": figures.finish_bytes,
            "test_accuracy": after.get("accuracy"),
            "test_accuracy_before_finish": before.get("accuracy"),
            "test_loss": after.get("loss"),
            "test_loss_before_finish": before.get("loss"),
            "test_bits_per_character": after.get("bits_per_character"),
            "test_bits_per_character_before_finish": before.get("bits_per_character"),
            "blocked_seconds": figures.blocked if self._role.trains else None,
            "overhead_seconds": figures.overhead,
            "train_seconds": figures.seconds,
            "skipped": sync.skipped,
            "failed": sync.failed,
            **figures.all_counts(self.counts()),
            "finish_rounds_lost": self._role.finish.lost,
            # None: nothing is claimed; empty: it takes no part in the comparison, so its model is another
            "digest": self._role.agreement.digest if self._role.claims_agreement else None,
            "unshared": list(self._unshared().values()) if self._role.trains else None,
            "consensus_distance": figures.distance,
            "unwritten": unwritten + self._recorder.unwritten(),
        }

    def _unshared(self) -> dict[str, int]:
        return {} if self._driver.arena is None else unshared(self._driver.arena, self._module)

    def differing(self) -> list[str]:
        """Return the tensors that exchanges do not move and that differ between peers, for the lowest present rank."""
        members = self._role.members
        reports = {rank: other.report for rank, other in members.others.items() if other.report}
        own = self._role.report.get("unshared")
        if not own or any(rank < self._role.rank for rank in reports):
            return []
        names = self._unshared()
        told = [theirs for report in reports.values() if (theirs := report.get("unshared")) is not None]
        return [name for name, *values in zip(names, own, *told, strict=False) if len(set(values)) > 1]

    def _averaged_scores(self, missing: Sequence[int], own: Mapping[str, float]) -> Mapping[str, float]:
        """Return the scores of the average of all final models.

        The lowest present rank measures them if it can read all model files. Otherwise a peer that took part in the
        finish returns those of its ``own`` model, which is the average then.
        """
        present = sorted({self._role.rank, *self._role.members.others} - {*missing})
        if self._evaluate is None or self._place.directory is None:
            return {}
        if self._role.rank != present[0]:
            return own
        files = [model_files.file_of(self._place.directory, rank) for rank in present]
        if not all(file.is_file() for file in files):
            return own
        with model_files.averaged(self._module, files) as is_averaged:
            return self.scores() if is_averaged else {}


def codec_of(config: RunConfig) -> str:
    """Return the description of a run's codecs for its summary."""
    if not isinstance(config.mode, Server):
        return codecs.describe(codecs.parse(config.values["codec"]))
    push, pull = (codecs.describe(codecs.parse(spec)) for spec in (config.mode.push_codec, config.mode.pull_codec))
    return push if push == pull else f"push {push}, pull {pull}"


def inspect(driver: Driver, reporter: Reporter) -> dict[str, object]:
    """Return the figures of :func:`gossipx.peer.status.status`, and those of the process; for any thread.

    Returns:
        Also ``waiting``: whether the training thread is blocked by gossipx; ``loss`` and ``accuracy``: the last
        ``train/loss`` and ``test/accuracy``, None if it is missing or not finite; ``bytes_received`` and ``bytes_sent``
        of this process; ``seconds`` of training; ``blocked_seconds`` of these that the training thread was blocked; and
        the counters of :data:`gossipx.figures.COUNTED`.
    """
    comm, figures = driver.comm, reporter.figures
    return {
        **driver.read(lambda role: status(role, time.monotonic())),
        "waiting": driver.waiting,
        "loss": _finite(reporter.last("train/loss")),
        "accuracy": _finite(reporter.last("test/accuracy")),
        "bytes_received": 0 if comm is None else comm.bytes_received,
        "bytes_sent": 0 if comm is None else comm.bytes_sent,
        "seconds": figures.elapsed,
        "blocked_seconds": figures.blocked,
        **reporter.counts(),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
