"""A simulated peer: the driver of one peer role in virtual time, with a real module and a real parameter arena."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gossipx.compression import Coded
from gossipx.hub import Elastic
from gossipx.model.arena import ParameterArena
from gossipx.model.digest import digest
from gossipx.peer import PeerRole
from gossipx.protocol import effects, events
from gossipx.protocol.events import Fault
from gossipx.protocol.messages import Stage
from gossipx.sim.models import Retrieval
from gossipx.sim.requests import SimRequests, WorldView
from gossipx.tables.client import Client
from gossipx.tables.store import TableStore


class SimPeer(SimRequests):
    """One simulated peer: it joins, trains, takes part in the finish, sends its figures and ends.

    Args:
        role: a new role with this peer's rank.
        module: the model; an arena for it is made here.
        gradient_step: makes one real optimizer step on ``peer.module``; called at the end of each step.
        iterations: the total number of steps, including those of an adopted model.
        compute_seconds: virtual duration of a step.
        mix_buffers: see :class:`~gossipx.model.arena.ParameterArena`.
        table_store_of: makes the tables of the module for a run with a parameter server; ``gradient_step`` then only
            computes gradients. None: there is no parameter server.
        codec_of: makes the codec of models; None: models are sent as raw values.

    Attributes:
        down_since: virtual time at which it ended or crashed; None while it runs.
        resumed: whether it resumed from a checkpoint, as the role is told when it joins; None: the run is new.
        before_finish: the trained values when it entered the finish; None before that.
        reason: why it had to stop; None if it did not.
        entries: the answers to processes that asked it to admit them.
        bytes_received, finish_bytes: bytes of models and tables, while training and in the finish.
        blocked_seconds: how long the role blocked training, from the first step to the last.
    """

    def __init__(
        self,
        role: PeerRole,
        module: nn.Module,
        gradient_step: Callable[[SimPeer], None],
        iterations: int,
        compute_seconds: float = 1.0,
        mix_buffers: bool = True,
        table_store_of: Callable[[nn.Module], TableStore] | None = None,
        codec_of: Callable[[ParameterArena], Coded] | None = None,
    ):
        arena = ParameterArena(module, mix_buffers, fragments=role.settings.fragments)
        table_store, codec = (
            None if table_store_of is None else table_store_of(module),
            None if codec_of is None else codec_of(arena),
        )
        super().__init__(role, arena, table_store, codec)
        self.resumed: bool | None = None
        self.module = module
        self.compute_seconds = compute_seconds
        self.iterations = iterations
        self.reason: str | None = None
        self.entries: list[effects.ReportEntry] = []
        self.before_finish: Tensor | None = None
        self.blocked_seconds = 0.0
        self._gradient_step = gradient_step
        self._handling = False
        self._timers: dict[str, float] = {}
        self._phase = "join"
        self._leaving = False
        self._waits_since: float | None = None
        self._stepping = False
        self._lacks_since: float | None = None  # since when training waits for tables
        self._computed = False  # whether there are gradients that were not pushed yet

    @property
    def retrievals(self) -> list[Retrieval]:
        """Models that were mixed, or merged in a wave, while training."""
        return self.models.retrievals

    def weights(self) -> Tensor:
        """Return all trained values as one float64 vector."""
        parts = [section.values[: section.trainable].double() for section in self.arena.sections]
        return torch.cat(parts).clone()

    def centre(self) -> Tensor:
        """Return the hub's elastic centre as one float64 vector of trained values. For the hub only."""
        assert isinstance(self.role.exchange, Elastic) and self.role.exchange.centre
        centre = self.models.captures[self.role.exchange.centre.ticket].now
        rows = zip(self.arena.sections, centre.vectors, strict=True)
        return torch.cat([vector[: section.trainable].double() for section, vector in rows])

    # --- lifecycle ----------------------------------------------------------------------------------

    def begin(self, world: WorldView) -> None:
        """Join the run; called by the world."""
        self._world = world
        self.handle(events.JoinRun(self.resumed))

    def ask_to_leave(self) -> None:
        """Leave the run after the current step, as after SIGTERM."""
        self._leaving = True
        self._later(self._world.now, self._proceed)

    def _proceed(self) -> None:
        """Start the next action of the training thread, unless it must wait."""
        if self._stepping or self.down_since is not None:
            return
        if self.reason is not None:
            self._world.end(self, "stops")
        elif self._leaving and self._phase != "leave":
            self._phase = "leave"
            self.handle(events.LeaveRun())
        elif self._waits_since is None and (self._phase == "leave" or self._has_tables()):
            self._next_phase()

    def _has_tables(self) -> bool:
        """Write the pulled tables into the model if all have arrived. Return whether they have."""
        if self.tables is None:
            return True
        now = self._world.now
        if not self.tables.table_store.client.ready():
            self._lacks_since = now if self._lacks_since is None else self._lacks_since
            return False
        if self._lacks_since is not None:
            self.blocked_seconds += now - self._lacks_since
            self._lacks_since = None
        self.tables.table_store.client.apply()
        return True

    def _next_phase(self) -> None:
        match self._phase:
            case "join":
                self._phase = "train"
                if self.role.sync.policy.uses_drift:
                    self.models.reference.set()
                self._proceed()
            case "train" if self._computed:
                self._computed = False
                assert self.tables is not None
                self._push(self.tables.table_store.client)
                self._step_done()
            case "train" if self.arena.step < self.iterations:
                self._stepping = True
                self._later(self._world.now + self.compute_seconds, self._step)
            case "train":
                self._phase = "finish"
                self.handle(events.TrainingEnded())
            case "finish" if self.role.trains and self.role.stages.compares and (found := digest(self.arena)):
                self.handle(events.FinalModel(found))
            case "finish":
                self._phase = "figures"
                report: dict[str, object] = {"iterations": self.arena.step, "retrievals": self.role.sync.retrievals}
                report["digest"] = self.role.agreement.digest
                self.handle(events.FiguresReady(report))
            case "figures":
                self._world.end(self, "ends")
            case "leave":
                self._world.end(self, "has left")

    def _step(self) -> None:
        self._stepping = False
        self._gradient_step(self)
        if self.tables is None:
            self._step_done()
        else:  # the role may block training before the first gradient is pushed
            self._computed = True
            self.handle(events.GradientsReady(()))

    def _step_done(self) -> None:
        delta = self.arena.step_done()
        self._note(f"step {self.arena.step}")
        self.handle(events.StepDone(self.arena.step, delta, self.models.drift()))

    def _push(self, client: Client) -> None:
        """Push gradients in the order in which backpropagation computes them: the last tables first."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._stepping = True  # so that no event starts the next action before the step is done
        for number in reversed(range(len(trained))):
            gradient = trained[number].grad
            if gradient is not None and (whole := client.update(number, gradient)):
                self.handle(events.GradientsReady(tuple(whole)))
        if whole := client.flush():
            self.handle(events.GradientsReady(tuple(whole)))
        self._stepping = False

    # --- events and effects ---------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        """Pass an event to the role, carry out its effects, and let training proceed if it may."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        while self._events:
            stage = self.role.stage
            for effect in self.role.handle(self._events.popleft(), self._world.now):
                self._carry_out(effect)
            if self.role.stage is not stage:
                self._note(f"is {self.role.stage.name}")
                if stage < Stage.FINISH <= self.role.stage < Stage.LEFT:
                    self.before_finish = self.weights()
        self._handling = False
        self._proceed()

    def _carry_out(self, effect: effects.Effect) -> None:
        now = self._world.now
        if self.tables is not None and self.tables.carry_out(effect):
            return
        match effect:
            case effects.Send():
                self._send(effect)
            case effects.Cancel(ticket):
                self.fail(ticket, Fault.CANCELLED)
            case effects.Answer(begins=begins) if begins > now:
                self._later(begins, lambda: self._answer(effect))
            case effects.Answer():
                self._answer(effect)
            case effects.Keep(key, ticket):
                self._exchanges[ticket] = self._uploads.pop(key)
            case effects.Capture(ticket, _, fragment):
                self.models.capture(ticket, fragment)
            case effects.Merge():
                self.models.merge(self._exchanges[effect.ticket], effect, now)
                self._forget(effect.ticket)
            case effects.ApplyWave(ticket):
                self.models.apply_merged(ticket)
                self._forget(ticket)
            case effects.Mix(ticket, share):
                self.models.mix(ticket, self._exchanges[ticket], share, now)
                self._forget(ticket)
            case effects.Adopt(ticket, step):
                self.models.adopt(ticket, self._exchanges[ticket], self.arena.step if step is None else step)
                self.begin_codec()
                self._forget(ticket)
            case effects.Forget(ticket):
                self._forget(ticket)
            case effects.MoveReference(ticket):
                self.models.record_delivery(ticket)
                self._forget(ticket)
            case effects.SetTimer(name, at):
                self._timers[name] = at
                self._later(at, lambda: self._fire(name, at))
            case effects.Wait():
                self._waits_since = now if self._waits_since is None else self._waits_since
            case effects.Resume():
                if self._waits_since is not None and self._phase == "train":
                    self.blocked_seconds += now - self._waits_since
                self._waits_since = None
            case effects.ReportSwitch(_, problem):
                self._note(problem or "has switched the sync model")
            case effects.ReportEntry():
                self.entries.append(effect)
            case effects.AddPeer(peer):
                self._note(f"hears of {peer.rank}")
                if self.codec is not None:
                    self.codec.resize(self.role.members.size)
            case effects.Note(_, text):
                self._note(text)
            case effects.Stop(reason):
                self._note(f"must stop: {reason}")
                self.reason = self.reason or reason

    def begin_codec(self) -> None:
        """Initialize the codec from the current weights: at step 0 they are the same on all peers."""
        if self.codec is not None:
            self.codec.begin_from(self.arena)

    def _fire(self, name: str, at: float) -> None:
        if self._timers.get(name) == at:
            del self._timers[name]
            self.handle(events.TimerFired(name))
