"""The requests of one peer in virtual time: its own and those of others, with the models and tables that they carry."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

from gossipx.compression import Coded
from gossipx.errors import ProtocolError
from gossipx.model.arena import ParameterArena
from gossipx.model.buffers import typed
from gossipx.model.receive import Incoming
from gossipx.peer import PeerRole
from gossipx.protocol import effects, events
from gossipx.protocol.events import Fault
from gossipx.protocol.messages import (
    LAST_WAVE,
    BusyReply,
    CarryingRequest,
    CentreRequest,
    ElasticRequest,
    InitialRequest,
    ModelReply,
    ModelRequest,
    PairRequest,
    PullRequest,
    PushRequest,
    Reply,
    Request,
    RoundRequest,
    TakeRequest,
)
from gossipx.protocol.server_messages import (
    CopyReply,
    GradientRequest,
    RangesRequest,
    RecordRequest,
    ServerRequest,
    TablesReply,
)
from gossipx.sim.models import Exchange, SimModels
from gossipx.sim.tables import SimTables
from gossipx.tables.store import TableStore


class Surroundings(Protocol):
    """What a peer uses of its world, which knows the peers in turn."""

    now: float
    fired: Counter[str]

    @property
    def peers(self) -> Mapping[int, SimRequests]:
        """The latest incarnation of each peer, by rank."""

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do ``action`` at ``time``."""

    def note(self, rank: int, what: str) -> None:
        """Add a line to the log."""

    def carry(self, sender: SimRequests, to: int, nbytes: int, deliver: Callable[[], None]) -> None:
        """Take a message to ``to``."""

    def refuse(self, requester: SimRequests, ticket: int, by: int) -> None:
        """Tell ``requester`` that nothing answers."""

    def end(self, peer: SimRequests, what: str) -> None:
        """End a peer."""


class SimRequests(abc.ABC):
    """The requests of one peer; see :class:`~gossipx.sim.peer.SimPeer`."""

    _world: Surroundings

    def __init__(self, role: PeerRole, arena: ParameterArena, table_store: TableStore | None, codec: Coded | None):
        self.role = role
        self.rank = role.rank
        self.arena = arena
        self.codec = codec
        self.down_since: float | None = None
        self.paused_until = 0.0
        self.poisoned = False
        self.bytes_received = self.finish_bytes = 0
        self._events: deque[events.Event] = deque()
        self.models = SimModels(role, arena, self._note, self._events.append)
        self.tables = None if table_store is None else SimTables(table_store, self._events.append)
        self._exchanges: dict[int, Exchange] = {}
        self._requests = 0  # received so far: the keys of requests
        self._requesters: dict[Hashable, tuple[SimRequests, int]] = {}
        self._brought: dict[Hashable, Exchange] = {}  # by the key of the request

    @abc.abstractmethod
    def _tell(self, event: events.Event) -> None:
        """Tell the role of an event."""

    def _later(self, time: float, action: Callable[[], None]) -> None:
        """Do ``action`` at ``time`` if this process then lives, or when it is no longer paused."""

        def act() -> None:
            if self.down_since is not None:
                return
            if self.paused_until > self._world.now:
                self._world.at(self.paused_until, act)
            else:
                action()

        self._world.at(time, act)

    def _note(self, what: str) -> None:
        self._world.note(self.rank, what)

    # --- requests of its own ----------------------------------------------------------------------------

    def _send(self, send: effects.Send) -> None:
        incoming = model_sink = None
        brought = bytearray()
        if isinstance(send.request, ModelRequest):
            base = self.models.base(send)
            if isinstance(send.request, ElasticRequest):
                assert base is not None
                brought += self._poison(bytearray(base.buffer.view))
            incoming = Incoming(self.arena, base, whole=isinstance(send.request, InitialRequest))
            if self.codec is not None:
                model_sink = self.codec.model_sink(send.to, send.request, incoming)
            if self.codec is not None and model_sink is not None:
                told, source = self.codec.prepared(send.to, send.request, [] if base is None else base.buffer.vectors)
                send = dataclasses.replace(send, request=told)
                if source is not None:
                    brought[:] = source.view
        if self.tables is not None and isinstance(send.request, ServerRequest | RangesRequest):
            send, brought = self.tables.outgoing(send)
        exchange = Exchange(send, self._world.now, incoming, model_sink=model_sink)
        self._exchanges[send.ticket] = exchange
        if what := _described(send.request, send.to):
            self._note(what)
        self._world.carry(self, send.to, len(brought), lambda: self._arrive(send, brought))
        self._later(send.deadline, lambda: self.fail(send.ticket, Fault.TIMEOUT))

    def _arrive(self, send: effects.Send, brought: bytearray) -> None:
        """Our request is at the other's address, with what it brings."""
        other = self._world.peers.get(send.to)
        if other is None or other.down_since is not None:
            self._world.refuse(self, send.ticket, send.to)
        else:
            other.receive(self, send, brought)

    def waiting_for(self, rank: int) -> list[int]:
        """Tickets of open requests to ``rank``."""
        return [ticket for ticket, exchange in self._exchanges.items() if exchange.open and exchange.send.to == rank]

    def fail(self, ticket: int, fault: Fault) -> None:
        """Our request ``ticket`` gets no answer; nothing if it had one before."""

        def failed() -> None:
            exchange = self._exchanges.get(ticket)
            if exchange is not None and exchange.open:
                exchange.open = False
                self._note(f"has no answer of {exchange.send.to}: {fault.name}")
                self._tell(events.Failed(ticket, fault))
                self._close(exchange)

        self._later(self._world.now, failed)

    def replied(self, ticket: int, reply: Reply, payload: bytearray) -> bool:
        """The last byte of an answer is here; returns whether it was still wanted."""
        exchange = self._exchanges.get(ticket)
        if self.down_since is not None or exchange is None or not exchange.open:
            return False
        exchange.open = False
        unread = ""
        if isinstance(reply, TablesReply | CopyReply):
            assert self.tables is not None
            self.tables.arrived(ticket, reply, payload)
            self.bytes_received += len(payload) if exchange.send.to != self.rank else 0
        if isinstance(reply, ModelReply):
            assert exchange.incoming is not None
            exchange.their_step = reply.step
            exchange.arrived = self._world.now
            if exchange.model_sink is None:
                exchange.incoming.take(0, memoryview(payload))
            else:
                exchange.model_sink.fit(reply).take(0, memoryview(payload))
                try:
                    exchange.model_sink.decode()
                except ProtocolError as error:
                    unread = str(error)
            request = exchange.send.request
            if isinstance(request, RoundRequest) and request.wave == LAST_WAVE:
                self.finish_bytes += len(payload)
            elif not isinstance(request, InitialRequest):
                self.bytes_received += len(payload)

        def told() -> None:
            if unread:
                self._note(f"cannot decode the model of {exchange.send.to}: {unread}")
                self._tell(events.Failed(ticket, Fault.PROTOCOL))
                return
            if isinstance(reply, ModelReply) and isinstance(exchange.send.request, TakeRequest | ElasticRequest):
                assert exchange.incoming is not None
                if math.isnan(exchange.incoming.norm()):  # known before the other side counts on it
                    self._note(f"refuses the model of {exchange.send.to}")
                    self._tell(events.Failed(ticket, Fault.POISONED))
                    return
            self._tell(events.Replied(ticket, reply))
            self._close(exchange)

        self._later(self._world.now, told)
        return True

    def _close(self, exchange: Exchange) -> None:
        """It has its answer: unless it holds a model, nobody refers to it any more."""
        if exchange.incoming is None:
            self._exchanges.pop(exchange.send.ticket, None)

    # --- requests of others -----------------------------------------------------------------------------

    def receive(self, sender: SimRequests, send: effects.Send, brought: bytearray) -> None:
        """A request is here."""
        self._requests += 1
        key = self._requests
        self._requesters[key] = (sender, send.ticket)

        def told() -> None:
            if isinstance(send.request, GradientRequest | RecordRequest):
                assert self.tables is not None
                self.tables.brought(sender.rank, key, send.request, brought)
                self.bytes_received += len(brought) if sender is not self else 0
            elif isinstance(send.request, CarryingRequest):
                incoming = Incoming(self.arena, None)
                self.bytes_received += len(brought) if sender is not self else 0
                came = dataclasses.replace(send, to=sender.rank)
                assert isinstance(send.request, ElasticRequest)
                upload_sink = (
                    None if self.codec is None else self.codec.upload_sink(sender.rank, send.request, incoming)
                )
                (upload_sink or incoming).take(0, memoryview(brought))
                now, step = self._world.now, send.request.step
                exchange = Exchange(
                    came, now, incoming, open=False, their_step=step, arrived=now, upload_sink=upload_sink
                )
                try:
                    if upload_sink is not None:
                        upload_sink.decode()
                except ProtocolError as error:
                    self._note(f"leaves out what {sender.rank} brings: {error}")
                    incoming.release()
                    self._answer(effects.Answer(key, BusyReply(), now + send.request.patience))
                    return
                self._brought[key] = exchange
            self._tell(events.Received(sender.rank, key, send.request))

        self._later(self._world.now, told)

    def _answer(self, answer: effects.Answer) -> None:
        requester, ticket = self._requesters.pop(answer.key)
        if self.tables is not None:
            self.tables.drop(answer.key)
        if dropped := self._brought.pop(answer.key, None):
            assert dropped.incoming is not None
            dropped.incoming.release()
        reply = answer.reply
        payload = bytearray()
        if isinstance(reply, TablesReply | CopyReply):
            assert self.tables is not None
            reply, payload = self.tables.answer(answer, reply)
        if isinstance(reply, ModelReply):
            if answer.captured is None:
                snapshot = self.arena.snapshot(answer.whole_model)
            else:
                snapshot = self.models.captures[answer.captured].now.hold()
            reply = dataclasses.replace(reply, step=snapshot.step)
            differs = None if answer.differs is None else self._exchanges[answer.differs].upload_sink
            if differs is not None:
                reply, source = differs.answered(snapshot.buffer.vectors, reply)
                payload += source.view
            elif self.codec is not None and answer.taker is not None:
                reply, source = self.codec.models.give(*answer.taker, snapshot.buffer.vectors, reply)
                payload += source.view
            else:
                payload += self._poison(bytearray(snapshot.buffer.view))
            snapshot.release()
        told = False

        def answered(whole: bool) -> None:
            nonlocal told
            if not told:
                told = True
                self._later(self._world.now, lambda: self._tell(events.Answered(answer.key, whole)))

        self._world.carry(
            self, requester.rank, len(payload), lambda: answered(requester.replied(ticket, reply, payload))
        )
        self._later(answer.deadline, lambda: answered(False))

    def _poison(self, model: bytearray) -> bytearray:
        """A model that goes out, with a NaN if this peer's do."""
        if self.poisoned:
            self._world.fired["poison"] += 1
            dtype = next(section.values.dtype for section in self.arena.sections if section.mixed)
            typed(memoryview(model), dtype)[0] = math.nan
        return model

    def _forget(self, ticket: int) -> None:
        if self.tables is not None:
            self.tables.forget(ticket)
        self.models.forget(ticket)
        exchange = self._exchanges.pop(ticket, None)
        if exchange is None:
            return
        if exchange.incoming is not None:
            exchange.incoming.release()


def _described(request: Request, to: int) -> str:
    """Return what the log says of a request for a model or an exchange; nothing of others."""
    match request:
        case InitialRequest():
            return f"asks {to} for a model to begin with"
        case PullRequest():
            return f"pulls {to}"
        case PushRequest():
            return f"pushes to {to}"
        case PairRequest():
            return f"asks {to} to pair"
        case TakeRequest():
            return f"takes from {to}"
        case RoundRequest(wave, number):
            return f"meets {to} in round {number}" + ("" if wave == LAST_WAVE else f" of wave {wave}")
        case ElasticRequest():
            return f"brings its model to {to}"
        case CentreRequest():
            return f"asks {to} for the centre"
    return ""
