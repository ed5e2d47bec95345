"""The life of one peer in virtual time: the base of all simulated peers."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from gossipx.peer import PeerRole
from gossipx.protocol import events
from gossipx.protocol.messages import Stage
from gossipx.runtime.ending.lifecycle import trained_none
from gossipx.runtime.figures.reporting import Reporter
from gossipx.sim.world import Endpoint, Process, World


class BasePeer(Process):
    """The life of one peer in virtual time: it joins, trains, takes part in the finish, sends its figures and ends.

    Args:
        role: a new role with this peer's rank.
        iterations: the total number of steps, including those of an adopted model.
        compute: returns the virtual seconds of the next step.

    Attributes:
        seconds: virtual seconds of training, which may end it before its iterations; None: no limit.
        resumed: whether it resumed from a checkpoint, as the role is told when it joins; None: the run is new.
        blocked_seconds: how long the role blocked training, from the first step to the last.
        before_join: called just before the peer joins the run.
        reporter: records curves and the final figures; None: nothing is recorded.
        reporter_of: makes the reporter, once the peer is connected; None: it has none.
        has_left: whether it left the run before its end.
        evaluate: returns the scores of the model.
        evaluation_seconds: virtual seconds of an evaluation at the end of training.
        report_every: iterations between two that the reporter records.
        after_step: called after each iteration that the reporter has recorded.
        report: the final figures; empty before they are known.
        trained: when its training began and ended; None: not yet.
        began: the iteration with which training began.
        delta: Δ_t of the last iteration.
        assembled: whether the peer begins to train at once, since all peers are known to be present.
        announces: whether it announces its end to all others, and waits for theirs.
        scored: whether it evaluates its own final model.
    """

    def __init__(self, role: PeerRole, iterations: int, compute: Callable[[], float]):
        super().__init__(role.rank)
        self.role = role
        self.iterations = iterations
        self.seconds: float | None = None
        self.resumed: bool | None = None
        self.assembled = False
        self.announces = self.scored = True
        self.blocked_seconds = 0.0
        self.before_join: Callable[[], None] = lambda: None
        self.reporter: Reporter | None = None
        self.reporter_of: Callable[[], Reporter] | None = None
        self.has_left = False
        self.evaluation_seconds = 0.0
        self.report_every = 1
        self.after_step: Callable[[], None] = lambda: None
        self.evaluate: Callable[[], dict[str, float]] = dict
        self.report: dict[str, Any] = {}
        self.trained: list[float | None] = [None, None]
        self.began = 0
        self.delta = 0.0
        self._reported = 0  # the iteration that was reported last
        self._scores: dict[str, float] = {}  # before the finish
        self._has_gradients = False  # that were not pushed yet
        self._compute = compute
        self._phase = "join"
        self._stage = role.stage
        self._leaving = False
        self._stepping = False  # whether an iteration or an evaluation is under way, which takes virtual time
        self._waits_since: float | None = None

    # --- implemented by each kind of peer -----------------------------------------------------------

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """Iterations that the model has seen."""

    @property
    @abc.abstractmethod
    def waits(self) -> bool:
        """Whether the role blocks training."""

    @property
    @abc.abstractmethod
    def reason(self) -> str | None:
        """Why it must stop; None if it need not."""

    @abc.abstractmethod
    def handle(self, event: events.Event) -> None:
        """Pass an event to the role, and carry out its effects."""

    @abc.abstractmethod
    def connect(self) -> Endpoint:
        """Return the endpoint of this peer in its world."""

    def training_begins(self) -> None:
        """Prepare for the first iteration."""

    @abc.abstractmethod
    def may_compute(self) -> bool:
        """Return whether all that the next iteration needs is here."""

    @abc.abstractmethod
    def train(self) -> None:
        """Do one iteration, which takes no more virtual time, and report it or its gradients."""

    def push(self) -> None:
        """Push the gradients of the iteration, and report it."""

    @abc.abstractmethod
    def digest(self) -> str:
        """Return the checksum of the model; empty: it is not finite."""

    # --- lifecycle ----------------------------------------------------------------------------------

    def begin(self, world: World[Any]) -> None:
        """Join the run; called by the world."""
        self.world = world
        self.endpoint = self.connect()
        if self.reporter_of is not None:
            self.reporter = self.reporter_of()
        self.before_join()
        self.act(lambda: self.handle(events.AllPresent() if self.assembled else events.JoinRun(self.resumed)))

    def ask_to_leave(self) -> None:
        """Leave the run after the current step, as after SIGTERM."""
        self._leaving = True
        self.later(self.world.now, lambda: None)

    def act(self, action: Callable[[], None]) -> None:
        """Do something at once, and let training proceed if it may."""
        action()
        now, stage = self.world.now, self.role.stage
        if stage is not self._stage:
            self._stage = stage
            self.note(f"is {stage.name}")
        if self.waits:
            self._waits_since = now if self._waits_since is None else self._waits_since
        elif self._waits_since is not None:
            if self._phase == "train":
                self.blocked_seconds += now - self._waits_since
            self._waits_since = None
        self._proceed()

    def _proceed(self) -> None:
        """Start the next action of the training thread, unless it must wait."""
        if self._stepping or self.down_since is not None:
            return
        if self.reason is not None:
            self.world.end(self, "stops")
        elif self._leaving and self._phase != "leave":
            self._phase = "leave"
            self.act(lambda: self.handle(events.LeaveRun()))
        elif not self.waits:
            self._report_step()
            if self._phase in ("join", "leave") or self.may_compute():
                self._next_phase()

    def _report_step(self) -> None:
        step = self.step
        if self.reporter is not None and step > self._reported and self._phase == "train":
            self._reported = step
            if step % self.report_every:
                return
            self.reporter.figures.blocked = self.blocked_seconds
            self.reporter.step_done(self.delta)
            self.after_step()

    def _next_phase(self) -> None:
        match self._phase:
            case "join":
                self._phase = "train"
                self.trained[0] = self.world.now
                self._reported = self.began = self.step
                self.training_begins()
                if self.reporter is not None:
                    self.reporter.training_begins()
                self._proceed()
            case "train" if self._has_gradients:
                self._has_gradients = False
                self.act(self.push)
            case "train" if self.used[0] < self.used[1]:
                self._stepping = True
                self.iterate(self._compute())
            case "train":
                self._phase = "finish"
                self._train_ended()
                self._stepping = True
                self.compute(self.evaluation_seconds, self._evaluated)
            case "finish" if self.role.trains and self.role.stages.compares and (found := self.digest()):
                self.act(lambda: self.handle(events.FinalModel(found)))
            case "finish":
                self._phase = "figures"
                self.sum_up(finished=True)
                if not self.announces:
                    self.world.end(self, "ends")
                else:
                    self.act(lambda: self.handle(events.FiguresReady(self.report)))
            case "figures":
                self.world.end(self, "ends")
            case "leave":
                self.has_left = True
                self.sum_up(finished=False)
                self.world.end(self, "has left")

    def _evaluated(self) -> None:
        self._stepping = False
        self.handle(events.TrainingEnded())

    @property
    def used(self) -> tuple[float, float]:
        """How much of the training is done, and the whole: iterations or seconds, whichever end first."""
        done = self.step, self.iterations
        if self.seconds is None or self.trained[0] is None or not self.iterations:
            return done
        return max(done, (self.world.now - self.trained[0], self.seconds), key=lambda one: one[0] / one[1])

    def _train_ended(self) -> None:
        self.trained[1] = self.world.now
        if self.role.trains and self.step == self.began > 0:
            self.warn("idle", trained_none(self.step))
        if self.reporter is not None:
            self._scores = self.evaluate() if self.role.trains and self.scored else {}
            for name, value in self._scores.items():
                self.reporter.scalar(f"test/{name}", value)
            self.reporter.training_ended()

    def sum_up(self, finished: bool) -> None:
        """Set the final figures; ``finished``: whether the peer has trained to its end."""
        role = self.role
        self.report = {"iterations": self.step, "retrievals": role.sync.retrievals, "digest": role.agreement.digest}
        if self.reporter is not None:
            if self.trained[1] is None:
                self.trained[1] = self.world.now
                self.reporter.training_ended()
            self.reporter.figures.blocked = self.blocked_seconds
            self.reporter.finished()
            averaged = finished and role.stage in (Stage.AGREE, Stage.COMPARE) and role.trains
            after = self.evaluate() if averaged else self._scores
            for name, value in after.items() if averaged else ():
                self.reporter.scalar(f"test/{name}_after_finish", value)
            self.report = self.reporter.report(self._scores, after)

    def iterate(self, seconds: float) -> None:
        """Compute for some seconds, and then :meth:`train`."""
        self.compute(seconds, self._computed)

    def _computed(self) -> None:
        self._stepping = False
        self.train()
