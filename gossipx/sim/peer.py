"""A simulated peer that trains a real module, with the driver of real processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gossipx.compression import Coded
from gossipx.hub import ElasticExchange
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import typed
from gossipx.model.receive import digest
from gossipx.peer import PeerRole
from gossipx.protocol import events
from gossipx.protocol.messages import Request, Stage
from gossipx.sim.base import BasePeer
from gossipx.sim.clock import VirtualClock
from gossipx.sim.comm import SimComm
from gossipx.sim.driver import Mixing, SimDriver
from gossipx.sim.endpoint import Endpoint
from gossipx.tables.store import TableStore
from gossipx.wire import UploadSink

if TYPE_CHECKING:
    from gossipx.sim.world import World


class SimPeer(BasePeer):
    """A simulated peer that trains a real module.

    Args:
        role, iterations: as for :class:`BasePeer`.
        module: the model.
        gradient_step: makes one real optimizer step on ``peer.module``; called at the end of each step.
        compute_seconds: virtual duration of a step, or a function that returns that of the next one.
        arena: that of the module; None: a new one.
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
        compute_seconds: float | Callable[[], float] = 1.0,
        arena: ParameterArena | None = None,
        table_store_of: Callable[[nn.Module], TableStore] | None = None,
        codec_of: Callable[[ParameterArena], Coded | None] | None = None,
    ):
        super().__init__(
            role, iterations, lambda: self.compute_seconds() if callable(self.compute_seconds) else self.compute_seconds
        )
        self.module = module
        self.compute_seconds = compute_seconds
        self.arena = arena or ParameterArena(module, fragments=role.settings.values["fragments"])
        clock = VirtualClock(lambda: self.world.now, self.later, lambda: self.paused_seconds)
        self.driver = SimDriver(role, self.arena, clock, self.note, self.warn, self.entries)
        self.driver.tables.store = None if table_store_of is None else table_store_of(module)
        self.driver.models.codec = None if codec_of is None else codec_of(self.arena)
        self.before_finish: Tensor | None = None
        self._gradient_step = gradient_step
        self._lacks_since: float | None = None  # since when training waits for tables

    def _next_seconds(self) -> float:
        return self.compute_seconds() if callable(self.compute_seconds) else self.compute_seconds

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
        return self.driver.models.codec

    @property
    def table_store(self) -> TableStore | None:
        """The tables of this peer; None without a parameter server."""
        return self.driver.tables.store

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
        assert isinstance(self.role.exchange, ElasticExchange) and self.role.exchange.centre
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

    def connect(self, world: World[Any]) -> Endpoint:
        comm = SimComm(world, self.rank, self.driver.models.sink_for, self._received, self.later, self._sent)
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
        self.delta = self.arena.step_done()
        self.note(f"step {self.arena.step}")
        drift = self.driver.captures.drift(self.role.pulling) if self.role.sync.policy.uses_drift else None
        self.handle(events.StepDone(self.arena.step, self.delta, drift))

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
