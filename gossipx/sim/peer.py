"""A simulated peer: its training and its driver in virtual time, with a real module and a real parameter arena."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gossipx.compression import Coded
from gossipx.hub import Elastic
from gossipx.model.arena import ParameterArena
from gossipx.model.buffers import typed
from gossipx.model.digest import digest
from gossipx.peer import PeerRole
from gossipx.protocol import events
from gossipx.protocol.messages import Request, Stage
from gossipx.sim.clock import VirtualClock
from gossipx.sim.comm import SimComm
from gossipx.sim.driver import Mixing, SimDriver
from gossipx.sim.endpoint import Endpoint
from gossipx.tables.store import TableStore
from gossipx.wire import UploadSink

if TYPE_CHECKING:
    from gossipx.sim.world import World


class BasePeer(abc.ABC):
    """The life of one peer in virtual time: it joins, trains, takes part in the finish, sends its figures and ends.

    Args:
        role: a new role with this peer's rank.
        iterations: the total number of steps, including those of an adopted model.
        compute: returns the virtual seconds of the next step.

    Attributes:
        endpoint: sends and receives; set when the peer begins.
        down_since: virtual time at which it ended or crashed; None while it runs.
        paused_until: virtual time until which it does nothing.
        poisoned: whether the models that it sends hold a NaN.
        resumed: whether it resumed from a checkpoint, as the role is told when it joins; None: the run is new.
        blocked_seconds: how long the role blocked training, from the first step to the last.
    """

    endpoint: Endpoint
    world: World

    def __init__(self, role: PeerRole, iterations: int, compute: Callable[[], float]):
        self.role = role
        self.rank = role.rank
        self.iterations = iterations
        self.down_since: float | None = None
        self.paused_until = 0.0
        self.poisoned = False
        self.resumed: bool | None = None
        self.blocked_seconds = 0.0
        self._has_gradients = False  # that were not pushed yet
        self._compute = compute
        self._phase = "join"
        self._stage = role.stage
        self._leaving = False
        self._stepping = False
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
    def connect(self, world: World) -> Endpoint:
        """Return the endpoint of this peer in the world."""

    @abc.abstractmethod
    def training_begins(self) -> None:
        """Prepare for the first iteration."""

    @abc.abstractmethod
    def may_compute(self) -> bool:
        """Return whether all that the next iteration needs is here."""

    @abc.abstractmethod
    def train(self) -> None:
        """Do one iteration, which takes no more virtual time, and report it or its gradients."""

    @abc.abstractmethod
    def push(self) -> None:
        """Push the gradients of the iteration, and report it."""

    @abc.abstractmethod
    def stage_changed(self, before: Stage, after: Stage) -> None:
        """Follow a change of the role's stage."""

    @abc.abstractmethod
    def digest(self) -> str:
        """Return the checksum of the model; empty: it is not finite."""

    # --- lifecycle ----------------------------------------------------------------------------------

    def begin(self, world: World) -> None:
        """Join the run; called by the world."""
        self.world = world
        self.endpoint = self.connect(world)
        self.act(lambda: self.handle(events.JoinRun(self.resumed)))

    def ask_to_leave(self) -> None:
        """Leave the run after the current step, as after SIGTERM."""
        self._leaving = True
        self.later(self.world.now, lambda: None)

    def later(self, time: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` at ``time``, or at the end of a pause; drop it if this peer is down by then."""

        def act() -> None:
            if self.down_since is not None:
                return
            if self.paused_until > self.world.now:
                self.world.at(self.paused_until, act)
            else:
                self.act(action)

        self.world.at(time, act)

    def act(self, action: Callable[[], None]) -> None:
        """Do something at once, and let training proceed if it may."""
        action()
        now, stage = self.world.now, self.role.stage
        if stage is not self._stage:
            before, self._stage = self._stage, stage
            self.note(f"is {stage.name}")
            self.stage_changed(before, stage)
        if self.waits:
            self._waits_since = now if self._waits_since is None else self._waits_since
        elif self._waits_since is not None:
            if self._phase == "train":
                self.blocked_seconds += now - self._waits_since
            self._waits_since = None
        self._proceed()

    def note(self, what: str) -> None:
        """Add a line to the log."""
        self.world.note(self.rank, what)

    def _proceed(self) -> None:
        """Start the next action of the training thread, unless it must wait."""
        if self._stepping or self.down_since is not None:
            return
        if self.reason is not None:
            self.world.end(self, "stops")
        elif self._leaving and self._phase != "leave":
            self._phase = "leave"
            self.act(lambda: self.handle(events.LeaveRun()))
        elif not self.waits and (self._phase == "leave" or self.may_compute()):
            self._next_phase()

    def _next_phase(self) -> None:
        match self._phase:
            case "join":
                self._phase = "train"
                self.training_begins()
                self._proceed()
            case "train" if self._has_gradients:
                self._has_gradients = False
                self.act(self.push)
            case "train" if self.step < self.iterations:
                self._stepping = True
                self.later(self.world.now + self._compute(), self._computed)
            case "train":
                self._phase = "finish"
                self.act(lambda: self.handle(events.TrainingEnded()))
            case "finish" if self.role.trains and self.role.stages.compares and (found := self.digest()):
                self.act(lambda: self.handle(events.FinalModel(found)))
            case "finish":
                self._phase = "figures"
                report: dict[str, object] = {"iterations": self.step, "retrievals": self.role.sync.retrievals}
                report["digest"] = self.role.agreement.digest
                self.act(lambda: self.handle(events.FiguresReady(report)))
            case "figures":
                self.world.end(self, "ends")
            case "leave":
                self.world.end(self, "has left")

    def _computed(self) -> None:
        self._stepping = False
        self.train()


class SimPeer(BasePeer):
    """A simulated peer that trains a real module.

    Args:
        role, iterations: as for :class:`BasePeer`.
        module: the model; an arena for it is made here.
        gradient_step: makes one real optimizer step on ``peer.module``; called at the end of each step.
        compute_seconds: virtual duration of a step.
        mix_buffers: see :class:`~gossipx.model.arena.ParameterArena`.
        table_store_of: makes the tables of the module for a run with a parameter server; ``gradient_step`` then only
            computes gradients. None: there is no parameter server.
        codec_of: makes the codec of models; None: models are sent as raw values.

    Attributes:
        driver: carries out what the role decides.
        before_finish: the trained values when it entered the finish; None before that.
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
        super().__init__(role, iterations, lambda: self.compute_seconds)
        self.module = module
        self.compute_seconds = compute_seconds
        self.arena = ParameterArena(module, mix_buffers, fragments=role.settings.fragments)
        self.driver = SimDriver(role, self.arena, VirtualClock(lambda: self.world.now, self.later), self.note)
        self.driver.tables.transfers.table_store = None if table_store_of is None else table_store_of(module)
        self.driver.transfers.codec = None if codec_of is None else codec_of(self.arena)
        self.before_finish: Tensor | None = None
        self._gradient_step = gradient_step
        self._lacks_since: float | None = None  # since when training waits for tables

    @property
    def step(self) -> int:
        return self.arena.step

    @property
    def waits(self) -> bool:
        return self.driver.waiting

    @property
    def reason(self) -> str | None:
        return None if self.driver.error is None else str(self.driver.error)

    @property
    def codec(self) -> Coded | None:
        """The codec of models; None: models are sent as raw values."""
        return self.driver.transfers.codec

    @property
    def table_store(self) -> TableStore | None:
        """The tables of this peer; None without a parameter server."""
        return self.driver.tables.transfers.table_store

    @property
    def retrievals(self) -> list[Mixing]:
        """Models that were mixed, or merged in a wave, while training."""
        return self.driver.mixings

    @property
    def bytes_received(self) -> int:
        """Bytes of models and tables received while training."""
        return self.driver.received_before(Stage.AGREE) - self.driver.received_before(Stage.START)

    @property
    def finish_bytes(self) -> int:
        """Bytes of models received in the finish."""
        return self.endpoint.bytes_received - self.driver.received_before(Stage.AGREE)

    def weights(self) -> Tensor:
        """Return all trained values as one float64 vector."""
        parts = [section.values[: section.trainable].double() for section in self.arena.sections]
        return torch.cat(parts).clone()

    def centre(self) -> Tensor:
        """Return the hub's elastic centre as one float64 vector of trained values. For the hub only."""
        assert isinstance(self.role.exchange, Elastic) and self.role.exchange.centre
        centre = self.driver.captures.hold(self.role.exchange.centre.ticket)
        assert centre is not None
        rows = zip(self.arena.sections, centre.vectors, strict=True)
        whole = torch.cat([vector[: section.trainable].double() for section, vector in rows])
        centre.release()
        return whole

    def begin_codec(self) -> None:
        """Initialize the codec from the current weights: at step 0 they are the same on all peers."""
        self.driver.begin_codec()

    # --- lifecycle ----------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        self.driver.handle(event)

    def connect(self, world: World) -> Endpoint:
        comm = SimComm(world, self.rank, self.driver.uploads.sink_for, self._received, self.later, self._sent)
        self.driver.comm = comm  # type: ignore[assignment]  # has the methods that a driver calls
        return comm.endpoint

    def _received(self, sender: Endpoint, key: Hashable, request: Request, upload: UploadSink | None) -> None:
        def receive() -> None:
            for joined in self.world.peers[sender.rank].role.newcomers.listed:
                if joined.rank == sender.rank and joined not in self.role.newcomers.listed:
                    self.handle(events.PeerMet(joined))
            self.driver.requested(sender.rank, key)
            self.driver.received(sender.rank, key, request, upload)

        self.later(self.world.now, receive)

    def _sent(self, model: memoryview) -> memoryview:
        """Return the bytes of a model as they are sent: with a NaN in them if this fault is switched on."""
        if not self.poisoned:
            return model
        self.world.fired["poison"] += 1
        dtype = next(section.values.dtype for section in self.arena.sections if section.mixed)
        changed = memoryview(bytearray(model))
        typed(changed, dtype)[0] = math.nan
        return changed

    def stage_changed(self, before: Stage, after: Stage) -> None:
        if before < Stage.FINISH <= after < Stage.LEFT:
            self.before_finish = self.weights()

    def training_begins(self) -> None:
        if self.role.sync.policy.uses_drift:
            self.driver.captures.reference.set()

    def may_compute(self) -> bool:
        """Write the pulled tables into the model if all have arrived. Return whether they have."""
        if self.table_store is None:
            return True
        now = self.world.now
        if not self.table_store.client.ready():
            self._lacks_since = now if self._lacks_since is None else self._lacks_since
            return False
        if self._lacks_since is not None:
            self.blocked_seconds += now - self._lacks_since
            self._lacks_since = None
        self.table_store.client.apply()
        return True

    def train(self) -> None:
        self._gradient_step(self)
        if self.table_store is None:
            self._step_done()
        else:  # the role may block training before the first gradient is pushed
            self._has_gradients = True
            self.handle(events.GradientsReady(()))

    def _step_done(self) -> None:
        delta = self.arena.step_done()
        self.note(f"step {self.arena.step}")
        drift = self.driver.captures.drift(self.role.pulling) if self.role.sync.policy.uses_drift else None
        self.handle(events.StepDone(self.arena.step, delta, drift))

    def push(self) -> None:
        """Push gradients in the order in which backpropagation computes them, the last tables first."""
        assert self.table_store is not None
        client = self.table_store.client
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for number in reversed(range(len(trained))):
            gradient = trained[number].grad
            if gradient is not None and (whole := client.update(number, gradient)):
                self.handle(events.GradientsReady(tuple(whole)))
        if whole := client.flush():
            self.handle(events.GradientsReady(tuple(whole)))
        self._step_done()

    def digest(self) -> str:
        return digest(self.arena)
