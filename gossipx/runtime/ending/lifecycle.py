"""The lifecycle of a peer: it joins, trains or serves, takes part in the finish, and leaves.

The finish is the last wave of a run, after which all peers hold the average of their models.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from gossipx.comm import CommManager
from gossipx.errors import DIFFERENT_MODELS, GossipxError, NotEnoughPeersError, UsageError
from gossipx.metrics.prometheus import Exporter, own_address
from gossipx.model.receive import digest, flaw
from gossipx.protocol.events import FiguresReady, FinalModel, JoinRun, LeaveRun, TrainingEnded
from gossipx.protocol.messages import Stage
from gossipx.runtime import model_files
from gossipx.runtime.checkpoints import Checkpoints
from gossipx.runtime.driver import Driver
from gossipx.runtime.ending import exit_hooks
from gossipx.runtime.ending.control import Control
from gossipx.runtime.ending.stop_signals import StopSignals, children_may_die, continue_by
from gossipx.runtime.figures.reporting import Reporter, inspect
from gossipx.runtime.place import Place
from gossipx.runtime.training.hooks import Hooks
from gossipx.settings.sections import RunConfig

log = logging.getLogger("gossipx")


def trained_none(step: int) -> str:
    """Return the warning of a peer that ends with the model that it started with, of ``step`` iterations."""
    if step:
        return f"this peer trained no iteration: the model that it started with had seen {step} already"
    return "no iteration was counted: pass the optimizer to gossipx.join, or call peer.step() in the loop"


class Phase(enum.Enum):
    """Where a peer is in its life."""

    JOINING = "joining"
    TRAINING = "training"
    SAVING = "saving"  # asked to leave; the framework that trains saves its state first
    FINISHING = "finishing"
    LEAVING = "leaving"  # in order: by a signal or a lack of peers, with a checkpoint
    LEFT = "left"  # has left in order: a script that trains on is ended again
    CLOSED = "closed"


NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.JOINING: frozenset({Phase.TRAINING, Phase.LEAVING, Phase.CLOSED}),
    Phase.TRAINING: frozenset({Phase.SAVING, Phase.FINISHING, Phase.LEAVING, Phase.CLOSED}),
    Phase.SAVING: frozenset({Phase.FINISHING, Phase.LEAVING, Phase.CLOSED}),
    Phase.FINISHING: frozenset({Phase.LEAVING, Phase.CLOSED}),
    Phase.LEAVING: frozenset({Phase.LEFT}),
    Phase.LEFT: frozenset(),
    Phase.CLOSED: frozenset(),
}
"""The phases that may follow each."""


class Lifecycle:
    """Joining, waiting and ending of one peer. The training loop in between is the caller's.

    Args:
        loop: the hooks in the training loop.

    Attributes:
        phase: see :class:`Phase`.
        steps: iterations done in this process.
        finishes_at_exit: whether a script that ends normally without closing the peer has completed its training.
        signals: requests to leave the run.
    """

    def __init__(
        self,
        module: nn.Module,
        driver: Driver,
        comm: CommManager,
        reporter: Reporter,
        checkpoints: Checkpoints,
        config: RunConfig,
        place: Place,
        loop: Hooks,
    ):
        self.phase = Phase.JOINING
        self.finishes_at_exit = True
        self.steps = 0
        self._framework, self._defers = "", False  # see saved_by()
        self.signals = StopSignals(None if place.under_run else self._tell_stopping)
        self._module = module
        self._driver = driver
        self._role = driver.role
        self._arena = driver.arena
        self._comm = comm
        self._reporter = reporter
        self._checkpoints = checkpoints
        self._config = config
        self._place = place
        port = config.run.metrics_port
        self._metrics = None if port is None else own_address(port, place.rank)
        self._problem: GossipxError | None = None  # with which it has left in order
        self._control: Control | None = None
        self._exporter: Exporter | None = None
        self._loop = loop

    @property
    def open(self) -> bool:
        """Whether the peer is not closed yet."""
        return self.phase not in (Phase.LEFT, Phase.CLOSED)

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], f"a peer cannot be {phase.value} when it is {self.phase.value}"
        self.phase = phase

    def saved_by(self, framework: str, defers: bool) -> None:
        """Leave it to a framework to save the state, so that no checkpoint is written when a signal asks to stop.

        Args:
            defers: whether it calls :meth:`leave_on_request` once it has saved; else :meth:`wait` leaves.
        """
        self._framework, self._defers = framework, defers

    # --- joining ------------------------------------------------------------------------------------

    def start(self, command: Callable[[Mapping[str, Any]], str]) -> None:
        """Listen, get the initial model, and wait for the other peers.

        Args:
            command: carries out a command to the running run; returns why that failed, empty on success.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if figures := self._checkpoints.restore():
                self._reporter.figures.load_state_dict(figures)
            exit_hooks.register(self, self._place.under_run)
            self.signals.install()
            self._reporter.progress.watch_parent(self._config.exchange.peer_timeout, self._orphaned)
            self._answer_queries()
            self._comm.start()
            self._reporter.report_state("joining")
            self._driver.handle(JoinRun(self._checkpoints.resumed))
            self.wait()
            if self._driver.rejection is not None:  # do not train alone because all other peers refused this one
                raise self._driver.rejection
            if self._role.trains:
                self._loop.begin()
            undo.pop_all()
        self._enter(Phase.TRAINING)
        if self._role.sync.policy.uses_drift and not self._checkpoints.resumed:
            self._driver.captures.reference.set()
        self._checkpoints.start()
        if self._loop.backward is not None and self._place.directory is not None:
            self._control = Control(self._place.directory, command)
        self._reporter.training_begins()
        self._reporter.report_state("train", policy=self._reporter.policy)
        self._arena.leave_boundary()

    def _answer_queries(self) -> None:
        """Answer ``gossipx status``, ``gossipx peer drain`` and Prometheus."""

        def drain() -> dict[str, object]:
            self.signals.request(signal.SIGTERM)
            return {"iteration": self._arena.step}

        status, place = functools.partial(inspect, self._driver, self._reporter), self._place
        if isinstance(self._comm, CommManager):  # a script's own may answer no queries
            self._comm.queries.update(status=status, drain=drain)
        if self._metrics is not None:
            run = "" if place.directory is None else place.directory.name
            self._exporter = Exporter(*self._metrics, run, place.name, status)

    # --- ending -------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Take part in the finish, write the model and the figures, and leave."""
        if not self.open:
            return
        if not self.steps and self._role.trains:
            log.warning("%s", trained_none(self._arena.step))
        self._enter(Phase.FINISHING)
        self._loop.ended()
        reporter = self._reporter
        reporter.training_ended()
        agrees = self._takes_part()
        reporter.report_state("finish" if self._role.trains else "serve")
        if agrees:
            self._checkpoints.training_ended(reporter.state_dict)
        before = reporter.scores() if self._role.trains else {}
        for name, value in before.items():
            reporter.scalar(f"test/{name}", value)
        self._driver.handle(TrainingEnded(agrees))
        self.wait()
        self.wait_for_tables()
        self._compare()
        if not self._role.trains:  # serving counts as its training time
            reporter.training_ended()
        reporter.finished()
        averaged = self._role.stage in (Stage.AGREE, Stage.COMPARE)
        after = reporter.scores() if averaged else before
        for name, value in after.items() if averaged and self._role.trains else ():
            reporter.scalar(f"test/{name}_after_finish", value)
        unsaved = self._save() or self._checkpoints.flush()
        self._driver.handle(FiguresReady(reporter.report(before, after, self._unwritten(unsaved))))
        self.wait()
        unfit = flaw(self._arena) if self._role.trains else ""
        reporter.report_result(after if averaged else {})
        if differing := reporter.differing():
            named = ", ".join(f"'{name}'" for name in differing[:3]) + (", ..." if len(differing) > 3 else "")
            log.warning("%d tensors that have no average differ between the peers: %s", len(differing), named)
        self._comm.linger(lambda: self.asked_to_leave)
        self.close()
        if unsaved is not None:
            raise unsaved
        if unfit:
            raise GossipxError(f"this peer ended with {unfit}")
        if not self._place.under_run and self._role.claims_agreement and not self._role.agreement.agreed:
            log.warning("peers hold different models: exit code %d", DIFFERENT_MODELS)
            exit_hooks.exit_with(DIFFERENT_MODELS)

    def _takes_part(self) -> bool:
        """Return whether this peer's model is fit for the finish; if not, log that it is saved without the finish."""
        try:
            self._arena.places.check()
        except UsageError as error:
            log.warning("%s; this peer takes no part in the finish", error)
            return False
        # This includes changes since the last step, such as averaged weights.
        return digest(self._arena) != "" or not self._role.trains

    def _compare(self) -> None:
        """Compare the final model with those of the other peers, which may replace it by theirs."""
        while self._role.trains and self._role.stages.compares and (own := digest(self._arena)):
            self._driver.handle(FinalModel(own))
            self.wait()

    def _save(self) -> GossipxError | None:
        """Write the model. Return the error if that fails, to be raised after the figures are reported."""
        if self._place.directory is None or not self._config.run.save_model:
            return None
        return model_files.save(
            self._module, self._arena.step, model_files.file_of(self._place.directory, self._role.rank)
        )

    def _unwritten(self, unsaved: GossipxError | None) -> int:
        """Return how many files of this peer could not be written, besides its curves; ``unsaved``: the last error."""
        keeper = self._driver.tables.keeper
        failed = self._checkpoints.failed + (0 if keeper is None else keeper.unwritten)
        return failed + (unsaved is not None and not self._checkpoints.failed)

    def leave(self, reports: bool = False) -> None:
        """Leave the run without a finish, and notify the other peers; in order if a signal has asked for it.

        Args:
            reports: report the figures until now: the script has ended well.

        Raises:
            GossipxError: a signal has asked for it, and checkpoint or model cannot be written.
        """
        if self.leaves_in_order:
            self._leave_in_order()
        elif self.open:
            self._arena.end_training()
            self._tell_leaving()
            if reports:
                self._reporter.training_ended()
                self._reporter.report_left()
        self.close()

    def end_failed(self, error: BaseException) -> None:
        """Leave as the script raises ``error``.

        If a signal has asked this peer to stop, it does so in order, and ends the script as the signal asks. The error
        may be a consequence: the signal may have ended other processes of the script, too.

        Raises:
            KeyboardInterrupt, SystemExit: see :meth:`gossipx.runtime.ending.stop_signals.StopSignals.end`.
            GossipxError: as :meth:`leave`.
        """
        if isinstance(error, SystemExit):  # the script chooses its exit code
            self.leave(reports=not error.code)
        elif self.leaves_in_order:
            if not isinstance(error, KeyboardInterrupt):
                what = f"{type(error).__name__}: {error}".partition("\n")[0]
                log.warning("the script has failed since it was asked to stop: %s", what)
            self.leave()
            self.signals.end()
        elif isinstance(error, KeyboardInterrupt):
            self.close()
        else:
            self.leave()

    def close(self) -> None:
        """Leave the run without a finish or a notice. The weights stay as they are. Idempotent."""
        if not self.open:
            return
        self._enter(Phase.LEFT if self.phase is Phase.LEAVING else Phase.CLOSED)
        if self._control is not None:
            self._control.close()
            self._control = None  # break the reference cycle with the peer
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None  # likewise
        self._arena.end_training()
        exit_hooks.unregister(self)
        self._reporter.progress.peer_closed()
        self._loop.close(again=self.phase is Phase.LEFT)
        self._driver.close()
        self._comm.close()
        self._driver.comm = None  # break the reference cycle: otherwise both stay until the next gc run
        self._reporter.close()
        self._checkpoints.close(at_once=self.signals.at_once)
        self._arena.detach()
        self.signals.restore()

    # --- waiting, and leaving early -----------------------------------------------------------------

    @property
    def asked_to_leave(self) -> bool:
        """Whether a signal asked this peer to stop: the next :meth:`wait` leaves the run."""
        return self.signals.number is not None and self.phase not in (Phase.LEAVING, Phase.LEFT)

    def _tell_stopping(self, number: int) -> None:
        name, again = self._place.name, "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        log.warning("stopping %s at the end of its step, with a checkpoint: %s again stops at once", name, again)

    @property
    def leaves_in_order(self) -> bool:
        """Whether this peer, if it ends now, leaves in order: a signal asked for it, and nothing prevents it."""
        return self.open and self.asked_to_leave and not self.signals.at_once and self._driver.error is None

    def _orphaned(self, late: bool) -> bool:
        """Ask to leave, as the parent process has died. Return whether to wait: leaving has limits of its own."""
        self.signals.request(signal.SIGHUP)
        return self.phase is Phase.LEAVING or (self.open and not late)

    def wait(self) -> None:
        """Wait until the role lets training continue; leave the run if a signal asked for it.

        Raises:
            GossipxError: it cannot continue. If too few peers are left, this peer has left in order, as on request.
        """
        try:
            self._driver.wait(self._poll)
        except NotEnoughPeersError:
            if not self.steps:
                raise
            self.leave_on_request()
        if self.asked_to_leave and self._defers and self.phase is Phase.TRAINING:
            self._enter(Phase.SAVING)
        elif self.asked_to_leave:
            self.leave_on_request()

    def leave_on_request(self, kept: str = "") -> NoReturn:
        """Take a checkpoint, notify the other peers, save the model, report the figures, and end the script.

        Args:
            kept: the framework's checkpoint from which this peer continues; empty: unknown.

        Raises:
            GossipxError: checkpoint or model cannot be written, or why the run cannot continue.
            KeyboardInterrupt, SystemExit: see :meth:`gossipx.runtime.ending.stop_signals.StopSignals.end`.
        """
        self.signals.request(signal.SIGTERM)  # if only another process of its group was asked
        self._leave_in_order(kept)
        self.signals.end()

    def _leave_in_order(self, kept: str = "") -> None:
        """Do all that :meth:`leave_on_request` does, but do not end the script.

        The checkpoint is that of a step boundary. If the script has failed within an iteration, it is that of the last
        boundary where boundaries are kept; else the model as it is now, which is better than none. Other peers are told
        while it is being written.
        """
        with children_may_die():
            try:
                self._take_leave(kept)
            finally:
                self.close()

    def _take_leave(self, kept: str) -> None:
        self._enter(Phase.LEAVING)
        reporter, checkpoints = self._reporter, self._checkpoints
        reporter.training_ended()
        reporter.report_state("leave")
        self._loop.leaving()
        if self.steps or not self._role.trains:
            if not self._framework:
                checkpoints.leaving(reporter.state_dict)
            self._arena.fill_pending()  # no step boundary follows if a worker leaves while it waits for tables
        self._tell_leaving()
        with self._driver.committing:
            unsaved = self._save() or checkpoints.flush()
        reporter.report_left(self._framework, kept)
        self._tell_how_to_continue(kept)
        self._problem = unsaved or self._driver.error
        if self._problem is not None:
            raise self._problem

    def end_again(self) -> None:
        """End a script that trains on after this peer has left in order: a bare ``except`` has caught what ended it.

        Raises:
            KeyboardInterrupt, SystemExit, GossipxError: as :meth:`leave_on_request` did.
        """
        if self._problem is not None:
            raise self._problem
        if self.phase is Phase.LEFT:
            self.signals.end()

    def _tell_how_to_continue(self, kept: str) -> None:
        """Log a line for a peer without a parent process, which would print it."""
        if not self._place.under_run:
            written = self._checkpoints.newest >= 0
            how = "; continue with GOSSIPX_RESUME=1 in the environment" if written else ", without a checkpoint"
            if self._framework:
                how = f"; {continue_by(self._framework, kept)}"
            log.warning("%s stopped at %d%s", self._place.name, self._arena.step, how)

    def wait_for_tables(self, tables: Sequence[int] | None = None) -> None:
        """In server mode, wait until the model holds the current values of tables.

        Args:
            tables: numbers of the tables; None: all.
        """
        self._loop.settle(tables)
        self.add_wait_time()

    def add_wait_time(self) -> None:
        """Add the seconds that the training thread waited for tables since the last call to the figures."""
        seconds = self._loop.take_wait_seconds()
        self._reporter.figures.blocked += seconds
        self._reporter.figures.waited += seconds

    def poll_while_waiting(self) -> None:
        """Raise the driver's error, or leave on request; called periodically while tables are awaited."""
        self._arena.fill_pending()
        if self._poll() or self._driver.error is not None:
            self.wait()

    def _poll(self) -> bool:
        """Report progress, and take due checkpoints of a serving peer. Return whether to leave."""
        reporter = self._reporter
        if reporter.progress.due:
            reporter.report_state(reporter.state)
        if reporter.state == "serve":  # it has no steps of its own at which this would happen
            self._checkpoints.step_done(reporter.state_dict)
            reporter.record_server_metrics(self._config.run.log_interval)
        return self.asked_to_leave

    def _tell_leaving(self) -> None:
        if self._driver.error is None:
            limit = self._config.exchange.peer_timeout
            self._driver.handle(LeaveRun())
            self._driver.wait(lambda: self._driver.outbox.busy_for > limit)
            if self._driver.waiting:
                log.warning("left without telling the others: no request could be sent for %g s", limit)
