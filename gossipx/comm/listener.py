"""The requests of others: they come in on connections that this peer has accepted, each with a thread of its own."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from gossipx.comm.member import Member, call_back, call_back_in_thread
from gossipx.errors import (
    GossipxError,
    NoCarrierError,
    NotAuthorisedError,
    PeerTimeoutError,
    PeerUnreachableError,
    ProtocolError,
    StrangerError,
)
from gossipx.memory import Source
from gossipx.protocol.messages import CarryingReply, CarryingRequest, Reply, Request
from gossipx.transports import Address, Stream, handshake, unix
from gossipx.transports import Listener as TransportListener
from gossipx.transports.link import Link
from gossipx.wire import (
    CarrierRequest,
    DescribeRequest,
    Description,
    Hello,
    Message,
    Sink,
    SinkFactory,
    UploadSink,
    Welcome,
    frames,
)

log = logging.getLogger("gossipx")

# Seconds. How often a thread that waits for an answer looks whether the requester is still there.
_LOOK = 1.0
# Seconds to wait before accepting again when the system lacks something: first, and at most.
_PAUSE = (0.05, 1.0)
# Connections at a time that have not said who they are, however few others there are; and how many a peer, where that
# is more: all peers of a run may come at once, with a message and a pull each.
_STRANGERS, _AT_FIRST = 32, 2


def no_room(sender: int, request: CarryingRequest) -> UploadSink:
    """Refuses whatever is brought."""
    raise ProtocolError(f"it brought {type(request).__name__}, for which there is no room here")


@dataclass(frozen=True)
class Response:
    """An answer of ours; fields as the arguments of :meth:`gossipx.comm.CommManager.answer`."""

    reply: Reply
    payload: Source | None
    deadline: float
    done: Callable[[bool], None]
    begins: float


@dataclass(eq=False)
class _Slot:
    """A received request that waits for its answer."""

    number: int
    ready: threading.Event = field(default_factory=threading.Event)
    answer: Response | None = None


class LoopbackRequest:
    """A request to oneself, which goes over no link."""

    def __init__(self) -> None:
        self.slot = _Slot(0)

    def abort(self) -> None:
        """End it: it is not waited for."""
        self.slot.ready.set()


RoomFor: TypeAlias = Callable[[int, CarryingRequest], UploadSink]
"""Given the sender's rank and the request."""
OnRequest: TypeAlias = Callable[[int, Hashable, Request, "UploadSink | None"], None]
"""Told the sender's rank, a key, the request, and what it brought."""


class Listener:
    """Listens, tells of requests that come in, and sends their answers.

    Args:
        member: who is asked.
        bind: where to listen; port 0 lets the system choose.
        on_request: told of requests, from a connection's thread.
        room_for: where what a request brings is taken in; it may wait for that, and raises if there is none.
        most: inbound connections at a time; above it, and above a number of those that have not said who they are, the
            oldest of these is closed.
    """

    def __init__(self, member: Member, bind: Address, on_request: OnRequest, room_for: RoomFor, most: int):
        self._member = member
        self._bind = bind
        self._on_request = on_request
        self._room_for = room_for
        self._most = most
        self._most_strangers = max(_STRANGERS, _AT_FIRST * member.me.size)
        self._links = member.links
        self._keys = itertools.count(1)
        # Unguessable, so that nobody else can have taken it; of processes of this machine alone. A peer that comes back
        # is known by its new one, also where no memory is shared.
        self._local = Address(f"gossipx-{secrets.token_hex(16)}", 0)
        self._listener: TransportListener | None = None
        self._local_listener: TransportListener | None = None
        # Everything below is touched under the lock alone.
        self._lock = threading.Lock()
        self._slots: dict[Hashable, _Slot] = {}
        self._inbound: dict[Stream, bool] = {}  # in order of arrival; whether it has been admitted

    @property
    def address(self) -> Address:
        """Where it listens; RuntimeError before it is started."""
        if self._listener is None:
            raise RuntimeError("not started")
        return self._listener.address

    def start(self) -> None:
        """Listen and answer from now on; GossipxError if the address cannot be had."""
        self._listener = self._member.transport.listen(self._bind)
        if self._member.machine:  # before anybody is told of it
            self._local_listener = unix.listen(self._local)
            self._links.spawn("accept-local", self._accept, self._local_listener)
        self._links.spawn("accept", self._accept, self._listener)

    def answer(self, key: Hashable, outgoing: Response) -> None:
        """Have an answer sent; see :meth:`gossipx.comm.CommManager.answer`."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                frames.encode(outgoing.reply, slot.number, outgoing.payload)  # raises here
                slot.answer = outgoing
                del self._slots[key]
                slot.ready.set()
                return
        call_back_in_thread(outgoing.done, False)

    def end(self) -> None:
        """All links have ended: accept no more, and let those see it that wait for answers."""
        with self._lock:
            for slot in self._slots.values():
                slot.ready.set()
            self._slots.clear()
        for listener in (self._listener, self._local_listener):
            if listener is not None:
                listener.close()

    def _accept(self, listener: TransportListener) -> None:
        pause, full = _PAUSE[0], False
        while not self._links.closed.is_set():
            try:
                stream = listener.accept()
            except GossipxError as error:
                if pause == _PAUSE[0] and not self._links.closed.is_set():
                    log.warning("%s; trying again until it can", error)
                self._links.closed.wait(pause)
                pause = min(2 * pause, _PAUSE[1])
                continue
            pause = _PAUSE[0]
            beside = self._serve_beside(stream)
            if beside and not full:
                log.warning("%d connections are open: closing those that have not said who they are", beside)
            full = beside > 0
        listener.close()

    def _serve_beside(self, stream: Stream) -> int:
        """Give a connection its thread; beside how many there was no room for it, without closing one. 0: there was."""
        with self._lock:
            beside = len(self._inbound)
            strangers = [one for one, admitted in self._inbound.items() if not admitted]
            full = beside >= self._most or len(strangers) >= self._most_strangers
            # Whoever is a peer says so at once: of those that have not, the first has had the most time.
            goes = (strangers or [stream])[0] if full else None
            if goes is not None and goes is not stream:
                del self._inbound[goes]
            if goes is not stream:
                try:
                    self._links.spawn("serve", self._serve, stream)
                    self._inbound[stream] = False
                except RuntimeError:  # the system has no thread left
                    stream.abort()
        if goes is not None:
            goes.abort()
        return beside if full else 0

    def _serve(self, stream: Stream) -> None:
        """All of an inbound connection."""
        member = self._member
        try:
            link = self._links.add(stream)
            try:
                deadline = time.monotonic() + member.timeout
                if member.secret is not None:
                    handshake.challenge(link, member.secret, member.me, deadline)
                hosts = [address.host for address in member.addresses]
                welcome = Welcome(member.me.rank, member.me.name, member.me.model, member.machine, self._local.host)
                they = handshake.admit(link, member.me, member.names, hosts, welcome, deadline)
                if they.model == member.me.model:  # else it is told in what they differ
                    member.trust.taken_in()
                with self._lock:
                    if stream in self._inbound:
                        self._inbound[stream] = True
                while True:
                    self._serve_one(link, they)
            finally:
                self._links.drop(link)
        except (NotAuthorisedError, StrangerError) as error:
            member.trust.stranger(stream.remote, error)
        except GossipxError as error:
            # Peers come and go, and anything may knock: not worth a user's attention.
            log.debug("the connection from %s has ended: %s", stream.remote, error)
        except Exception:
            log.exception("serving %s has failed", stream.remote)
        finally:
            with self._lock:
                self._inbound.pop(stream, None)

    def _receive(self, link: Link, they: Hello) -> tuple[frames.Frame, UploadSink | None]:
        """The next frame, and what it brought, which is the caller's."""
        rooms: list[UploadSink] = []

        def expect(message: Message, request: int) -> Sink | None:
            if not isinstance(message, CarryingRequest):
                return None
            if they.model != self._member.me.model:
                raise ProtocolError("it brings another model")
            rooms.append(self._room_for(they.rank, message))
            undo.callback(rooms[0].release)  # unless all of it comes
            return rooms[0]

        with contextlib.ExitStack() as undo:
            frame = link.receive(math.inf, expect)
            undo.pop_all()
        return frame, rooms[0] if rooms else None

    def _serve_one(self, link: Link, they: Hello) -> None:
        frame, brought = self._receive(link, they)
        deadline = time.monotonic() + self._member.timeout
        if isinstance(frame.message, DescribeRequest):
            manifest = Source(memoryview(self._member.manifest))
            described = Description(manifest.view.nbytes)
            link.send(frames.encode(described, frame.request, manifest, link.checks), deadline)
        elif they.model != self._member.me.model:
            raise handshake.refuse(link, "the models differ", deadline)
        elif isinstance(frame.message, Request):
            self._ask(link, they.rank, frame.request, frame.message, brought)
        elif isinstance(frame.message, CarrierRequest):
            self._build_carrier(link, frame.message.kind, frame.request, deadline)
        else:
            raise ProtocolError(f"it sent {type(frame.message).__name__}, not a request")

    def _build_carrier(self, link: Link, kind: str, number: int, deadline: float) -> None:
        if link.carrier is not None:
            raise ProtocolError("it asked for a second way beside the connection")
        carriers = self._member.carriers
        if carriers is None or carriers.kind != kind:
            link.refuse_carrier("its --transport is another; give every peer the same", number, deadline)
            raise NoCarrierError(f"it asked for {kind}, which is not this peer's --transport")
        link.build_carrier(carriers, False, number, deadline)

    def request_loopback(
        self,
        request: Request,
        brought: Source | None,
        payload: Sink | SinkFactory | None,
        deadline: float,
        loopback: LoopbackRequest,
    ) -> Reply:
        """Answer a request to oneself, as others' are; errors as those of a connection.

        Args:
            brought: what it brings; ``payload`` takes a model in; ``aside`` is aborted to end it.
        """
        room, slot, whole = None, loopback.slot, False
        if isinstance(request, CarryingRequest) and brought is not None:
            room = self._room_for(self._member.me.rank, request)
            room.take(0, brought.view)
        key = self._open(slot, room)
        try:
            self._on_request(self._member.me.rank, key, request, room)
            if not slot.ready.wait(max(0.0, deadline - time.monotonic())):
                raise PeerTimeoutError("it has not answered itself within the deadline")
            self._forget(key)
            answer = slot.answer
            if answer is None:
                raise PeerUnreachableError("it has ended before it answered itself")
            if isinstance(answer.reply, CarryingReply) and answer.payload is not None and payload is not None:
                sink = payload.fit(answer.reply) if isinstance(payload, SinkFactory) else payload
                sink.take(0, answer.payload.view)
            whole = True
            return answer.reply
        finally:
            self._forget(key)
            if slot.answer is not None:
                call_back(slot.answer.done, whole)

    def _open(self, slot: _Slot, brought: UploadSink | None) -> Hashable:
        """The key of a request that is to be told of; nothing is told once all links have ended."""
        key = next(self._keys)
        with self._lock:
            if not self._links.closed.is_set():
                self._slots[key] = slot
                return key
        if brought is not None:
            brought.release()
        raise self._links.gone()

    def _ask(self, link: Link, sender: int, number: int, request: Request, brought: UploadSink | None) -> None:
        """Tell of a request, wait until it is answered, send the answer."""
        slot, whole = _Slot(number), False
        key = self._open(slot, brought)
        try:
            self._on_request(sender, key, request, brought)
            while not slot.ready.wait(_LOOK) and link.stream.quiet():
                pass
            self._forget(key)
            answer = slot.answer
            if answer is None:
                raise PeerUnreachableError("it hung up before its request was answered")
            early = min(answer.begins, answer.deadline) - time.monotonic()
            if early > 0 and self._links.closed.wait(early):
                raise self._links.gone()
            if isinstance(answer.reply, CarryingReply) and answer.payload is not None:
                link.send_model(answer.reply, number, answer.payload, answer.deadline)
            else:
                link.send(frames.encode(answer.reply, number, checks=link.checks), answer.deadline)
            whole = True
        finally:
            if not whole:
                # Before the memory that it gives is changed: whoever still reads it must not take it as whole.
                link.abort()
            self._forget(key)
            if slot.answer is not None:
                call_back(slot.answer.done, whole)

    def _forget(self, key: Hashable) -> None:
        """No answer to ``key`` is taken from now on."""
        with self._lock:
            self._slots.pop(key, None)
