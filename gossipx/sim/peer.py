"""A simulated peer that trains a real module, with the driver of real processes over a CommManager in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from gossipx.errors import CancelledError, GossipxError, PeerTimeoutError, PeerUnreachableError, ProtocolError
from gossipx.memory import Source
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import Snapshot
from gossipx.model.receive import digest
from gossipx.peer import PeerRole
from gossipx.protocol import events
from gossipx.protocol.effects import Effect, ReportEntry, ReportOutcome
from gossipx.protocol.events import Fault
from gossipx.protocol.messages import Reply, Request
from gossipx.protocol.server_messages import CarryingReply, CarryingRequest
from gossipx.runtime.driver import Driver
from gossipx.runtime.driver.clock import DriverClock
from gossipx.sim.base import BasePeer
from gossipx.sim.clock import VirtualClock
from gossipx.sim.world import Endpoint, Process
from gossipx.tables.store import TableStore
from gossipx.wire import Sink, SinkFactory, UploadSink

PLACES = 2**20
"""Uploads that a peer receives at a time: virtual time cannot wait for a place."""
ERRORS: dict[Fault, Callable[[str], GossipxError]] = {
    Fault.UNREACHABLE: PeerUnreachableError,
    Fault.TIMEOUT: PeerTimeoutError,
    Fault.CANCELLED: CancelledError,
}


class SimDriver(Driver):
    """A driver in virtual time.

    Args:
        role, arena, clock: as for :class:`~gossipx.runtime.driver.Driver`.
        warn: logs a text on a topic.

    Attributes:
        trace: called with each event before the role handles it, and with each effect before it is carried out.
    """

    def __init__(self, role: PeerRole, arena: ParameterArena, clock: DriverClock, warn: Callable[[str, str], None]):
        super().__init__(role, arena, PLACES, clock, warn)
        self.trace: Callable[[events.Event | Effect], None] = lambda what: None

    def handle(self, event: events.Event) -> None:
        self.trace(event)
        super().handle(event)

    def _carry_out(self, effect: Effect, snapshot: Snapshot | None) -> None:
        self.trace(effect)
        if not isinstance(effect, ReportOutcome | ReportEntry):  # answers to events of the world, which waits for none
            super()._carry_out(effect, snapshot)


class _Trust:
    """Nobody is turned away in a simulated run."""

    doubt = None
    is_outcast = False


class SimComm:
    """The interface of :class:`gossipx.comm.CommManager` over an :class:`Endpoint`.

    Args:
        process: the peer, in its world.
        sink_for, on_request: as for :class:`gossipx.comm.CommManager`.
        changed: called with the bytes of each model before they are sent; returns those that are sent.

    Attributes:
        endpoint: sends and receives.
    """

    def __init__(
        self,
        process: Process,
        sink_for: Callable[[int, CarryingRequest], UploadSink],
        on_request: Callable[[Endpoint, Hashable, Request, UploadSink | None], None],
        changed: Callable[[memoryview], memoryview],
    ):
        self.endpoint = Endpoint(process, self._received)
        self.trust = _Trust()
        self._world = process.world
        self._later = process.later
        self._sink_for = sink_for
        self._on_request = on_request
        self._changed = changed

    @property
    def bytes_received(self) -> int:
        """Bytes of models and tables that other peers have sent."""
        return self.endpoint.bytes_received

    def request(
        self,
        to: int,
        request: Request,
        *,
        deadline: float,
        payload: Sink | SinkFactory | None,
        done: Callable[[Reply | GossipxError], None],
        upload: Source | None = None,
    ) -> Callable[[], None]:
        """Send a request; see :meth:`gossipx.comm.CommManager.request`."""

        def ended(result: Reply | Fault, content: memoryview | None) -> None:
            if isinstance(result, Fault):
                error = ERRORS[result](f"peer {to}: {result.name}")
                done(error)
                return
            problem = None if content is None else _store(payload, result, content)
            self._later(self._world.now, lambda: done(result if problem is None else problem))

        content = None if upload is None else memoryview(bytearray(self._changed(upload.view)))
        return self.endpoint.request(to, request, _size(content), content, deadline, ended)

    def answer(
        self,
        key: Hashable,
        reply: Reply,
        *,
        payload: Source | None,
        deadline: float,
        done: Callable[[bool], None],
        begins: float = 0.0,
    ) -> None:
        """Answer a request; see :meth:`gossipx.comm.CommManager.answer`."""
        content = None if payload is None else self._changed(payload.view)

        def send() -> None:
            self.endpoint.answer(key, reply, _size(content), content, deadline, done)

        if begins > self._world.now:
            self._later(begins, send)
        else:
            send()

    def _received(self, sender: Endpoint, key: Hashable, request: Request, content: memoryview | None) -> None:
        upload = None
        if content is not None and isinstance(request, CarryingRequest):
            upload = self._sink_for(sender.rank, request)
            upload.take(0, content)
        self._on_request(sender, key, request, upload)


def _size(content: memoryview | None) -> int:
    return 0 if content is None else content.nbytes


def _store(payload: Sink | SinkFactory | None, reply: Reply, content: memoryview) -> GossipxError | None:
    """Store the payload of a reply. Return the error if it does not fit."""
    if payload is None or not isinstance(reply, CarryingReply):
        return None
    try:
        sink = payload.fit(reply) if isinstance(payload, SinkFactory) else payload
        sink.take(0, content)
    except ProtocolError as error:
        return error
    return None


class SimPeer(BasePeer):
    """A simulated peer that trains a real module.

    Args:
        role, iterations, compute: as for :class:`BasePeer`.
        module: the model.
        gradient_step: makes one real optimizer step on ``peer.module``; called at the end of each step.
        arena: that of the module.
        table_store: the tables of the module in a run with a parameter server; ``gradient_step`` then only computes
            gradients.

    Attributes:
        driver: carries out what the role decides.
        changed: called with the bytes of each model before they are sent; returns those that are sent.
    """

    def __init__(
        self,
        role: PeerRole,
        module: nn.Module,
        gradient_step: Callable[[SimPeer], None],
        iterations: int,
        compute: Callable[[], float],
        arena: ParameterArena,
        table_store: TableStore | None = None,
    ):
        super().__init__(role, iterations, compute)
        self.module = module
        self.arena = arena
        self.table_store = table_store
        clock = VirtualClock(lambda: self.world.now, self.later, lambda: self.paused_seconds)
        self.driver = SimDriver(role, self.arena, clock, self.warn)
        self.driver.tables.store = table_store
        self.changed: Callable[[memoryview], memoryview] = lambda model: model
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

    def weights(self) -> Tensor:
        """Return all trained values as one float64 vector."""
        parts = [section.values[: section.trainable].double() for section in self.arena.sections]
        return torch.cat(parts).clone()

    def begin_codec(self) -> None:
        """Initialize the codec from the current weights: at step 0 they are the same on all peers."""
        self.driver.begin_codec()

    # --- lifecycle ----------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        self.driver.handle(event)

    def connect(self) -> Endpoint:
        comm = SimComm(self, self.driver.sink_for, self._received, lambda model: self.changed(model))
        self.driver.comm = comm  # type: ignore[assignment]  # has the methods that a driver calls
        return comm.endpoint

    def _received(self, sender: Endpoint, key: Hashable, request: Request, upload: UploadSink | None) -> None:
        def receive() -> None:
            for joined in self.world.peers[sender.rank].role.newcomers.listed:
                if joined.rank == sender.rank and joined not in self.role.newcomers.listed:
                    self.handle(events.PeerMet(joined))
            self.driver.received(sender.rank, key, request, upload)

        self.later(self.world.now, receive)

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
