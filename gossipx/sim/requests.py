"""The requests of one simulated peer, sent and received, with the models and tables that they carry."""

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
    FinalRequest,
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
    fragment_of,
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


class WorldView(Protocol):
    """The part of the world that a peer uses; a protocol, since the world imports the peers."""

    now: float
    fired: Counter[str]

    @property
    def peers(self) -> Mapping[int, SimRequests]:
        """The latest started incarnation of each peer, by rank."""

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` at ``time``."""

    def note(self, rank: int, what: str) -> None:
        """Add a line to the log."""

    def carry(self, sender: SimRequests, to: int, nbytes: int, deliver: Callable[[], None]) -> None:
        """Send a message to ``to``."""

    def refuse(self, requester: SimRequests, ticket: int, by: int) -> None:
        """Fail a request as unreachable."""

    def end(self, peer: SimRequests, what: str) -> None:
        """End a peer."""


class SimRequests(abc.ABC):
    """The request handling of one peer; the base class of :class:`~gossipx.sim.peer.SimPeer`."""

    _world: WorldView

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
        self.models = SimModels(role, arena, codec, self._note, self._events.append)
        self.tables = None if table_store is None else SimTables(table_store, self._events.append)
        self._exchanges: dict[int, Exchange] = {}
        self._requests = 0  # number received; the key of the last one
        self._requesters: dict[Hashable, tuple[SimRequests, int]] = {}
        self._uploads: dict[Hashable, Exchange] = {}  # by the request's key, until kept or dropped

    @abc.abstractmethod
    def handle(self, event: events.Event) -> None:
        """Pass an event to the role."""

    def _later(self, time: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` at ``time``, or at the end of a pause; drop it if this peer is down by then."""

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

    # --- sent requests ----------------------------------------------------------------------------------

    def _send(self, send: effects.Send) -> None:
        incoming = model_sink = None
        upload = bytearray()
        if isinstance(send.request, ModelRequest):
            base = self.models.snapshot_base(send)
            if isinstance(send.request, ElasticRequest):
                assert base is not None
                upload += self._poison(bytearray(base.buffer.view))
            is_whole, fragment = isinstance(send.request, InitialRequest), fragment_of(send.request)
            incoming = Incoming(self.arena, base, is_whole, fragment)
            if self.codec is not None:
                model_sink = self.codec.model_sink(send.to, send.request, incoming)
            if self.codec is not None and model_sink is not None:
                request, source = self.codec.prepared(
                    send.to, send.request, [] if base is None else base.buffer.vectors
                )
                send = dataclasses.replace(send, request=request)
                if source is not None:
                    upload[:] = source.view
        if self.tables is not None and isinstance(send.request, ServerRequest | RangesRequest):
            send, upload = self.tables.outgoing(send)
        exchange = Exchange(send, self._world.now, incoming, model_sink=model_sink)
        self._exchanges[send.ticket] = exchange
        if text := _described(send.request, send.to):
            self._note(text)
        self._world.carry(self, send.to, len(upload), lambda: self._arrive(send, upload))
        self._later(send.deadline, lambda: self.fail(send.ticket, Fault.TIMEOUT))

    def _arrive(self, send: effects.Send, upload: bytearray) -> None:
        """Deliver a request of this peer, with its payload, to the receiver."""
        other = self._world.peers.get(send.to)
        if other is None or other.down_since is not None:
            self._world.refuse(self, send.ticket, send.to)
        else:
            other.receive(self, send, upload)

    def waiting_for(self, rank: int) -> list[int]:
        """Return the tickets of open requests to ``rank``."""
        return [ticket for ticket, exchange in self._exchanges.items() if exchange.open and exchange.send.to == rank]

    def fail(self, ticket: int, fault: Fault) -> None:
        """Fail the request ``ticket`` unless it was answered before."""

        def failed() -> None:
            exchange = self._exchanges.get(ticket)
            if exchange is not None and exchange.open:
                exchange.open = False
                self._note(f"has no answer of {exchange.send.to}: {fault.name}")
                self.handle(events.Failed(ticket, fault))
                self._close(exchange)

        self._later(self._world.now, failed)

    def replied(self, ticket: int, reply: Reply, payload: bytearray) -> bool:
        """Handle a reply whose last byte has arrived. Return False if the request is no longer open."""
        exchange = self._exchanges.get(ticket)
        if self.down_since is not None or exchange is None or not exchange.open:
            return False
        exchange.open = False
        decode_error = ""
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
                    decode_error = str(error)
            request = exchange.send.request
            if (isinstance(request, RoundRequest) and request.wave == LAST_WAVE) or isinstance(request, FinalRequest):
                self.finish_bytes += len(payload)
            elif not isinstance(request, InitialRequest):
                self.bytes_received += len(payload)

        def handle() -> None:
            if decode_error:
                self._note(f"cannot decode the model of {exchange.send.to}: {decode_error}")
                self.handle(events.Failed(ticket, Fault.PROTOCOL))
                return
            if isinstance(reply, ModelReply) and isinstance(exchange.send.request, TakeRequest | ElasticRequest):
                assert exchange.incoming is not None
                if math.isnan(exchange.incoming.norm()):  # refuse it before the other side relies on it
                    self._note(f"refuses the model of {exchange.send.to}")
                    self.handle(events.Failed(ticket, Fault.POISONED))
                    return
            self.handle(events.Replied(ticket, reply))
            self._close(exchange)

        self._later(self._world.now, handle)
        return True

    def _close(self, exchange: Exchange) -> None:
        """Drop an answered request, unless it has a model that the role still refers to."""
        if exchange.incoming is None:
            self._exchanges.pop(exchange.send.ticket, None)

    # --- received requests ------------------------------------------------------------------------------

    def receive(self, sender: SimRequests, send: effects.Send, upload: bytearray) -> None:
        """Handle a request of another peer."""
        self._requests += 1
        key = self._requests
        self._requesters[key] = (sender, send.ticket)

        def handle() -> None:
            if isinstance(send.request, GradientRequest | RecordRequest):
                assert self.tables is not None
                self.tables.uploaded(sender.rank, key, send.request, upload)
                self.bytes_received += len(upload) if sender is not self else 0
            elif isinstance(send.request, CarryingRequest):
                incoming = Incoming(self.arena, None)
                self.bytes_received += len(upload) if sender is not self else 0
                reversed_send = dataclasses.replace(send, to=sender.rank)
                assert isinstance(send.request, ElasticRequest)
                upload_sink = (
                    None if self.codec is None else self.codec.upload_sink(sender.rank, send.request, incoming)
                )
                (upload_sink or incoming).take(0, memoryview(upload))
                now, step = self._world.now, send.request.step
                exchange = Exchange(
                    reversed_send, now, incoming, open=False, their_step=step, arrived=now, upload_sink=upload_sink
                )
                try:
                    if upload_sink is not None:
                        upload_sink.decode()
                except ProtocolError as error:
                    self._note(f"ignores the upload of {sender.rank}: {error}")
                    incoming.release()
                    self._answer(effects.Answer(key, BusyReply(), now + send.request.patience))
                    return
                self._uploads[key] = exchange
            for peer in sender.role.newcomers.listed:
                if peer.rank == sender.rank and peer not in self.role.newcomers.listed:
                    self.handle(events.PeerMet(peer))
            self.handle(events.Received(sender.rank, key, send.request))

        self._later(self._world.now, handle)

    def _answer(self, answer: effects.Answer) -> None:
        requester, ticket = self._requesters.pop(answer.key)
        if self.tables is not None:
            self.tables.drop(answer.key)
        if dropped := self._uploads.pop(answer.key, None):
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
            differs = None if answer.difference_from is None else self._exchanges[answer.difference_from].upload_sink
            if differs is not None:
                reply, source = differs.answered(snapshot.buffer.vectors, reply)
                payload += source.view
            elif self.codec is not None and answer.receiver is not None:
                reply, source = self.codec.give(answer, reply, snapshot)
                payload += source.view
            else:
                payload += self._poison(bytearray(snapshot.buffer.view))
            snapshot.release()
        done = False

        def answered(whole: bool) -> None:
            nonlocal done
            if not done:
                done = True
                self._later(self._world.now, lambda: self.handle(events.Answered(answer.key, whole)))

        self._world.carry(
            self, requester.rank, len(payload), lambda: answered(requester.replied(ticket, reply, payload))
        )
        self._later(answer.deadline, lambda: answered(False))

    def _poison(self, model: bytearray) -> bytearray:
        """Put a NaN into a model that is sent, if this fault is switched on."""
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
    """Return the log line of a request for a model or an exchange; empty for other requests."""
    match request:
        case InitialRequest():
            return f"asks {to} for the initial model"
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
            return f"uploads its model to {to}"
        case CentreRequest():
            return f"asks {to} for the centre"
        case FinalRequest():
            return f"asks {to} for the final model"
    return ""
