"""The serving side of a peer: inbound connections, each with its own thread, and the responses to their requests.

A connection's thread passes a request to ``on_request`` and waits until :meth:`RequestListener.answer` provides the
response.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gossipx import errors, wire
from gossipx.comm.member import HandedOverLinks, Member, call_back, call_back_in_thread
from gossipx.memory import Source
from gossipx.protocol.messages import AcceptReply, NotReadyReply, Reply, Request
from gossipx.protocol.server_messages import CarryingReply, CarryingRequest
from gossipx.transports import Address, Listener, Stream, handshake, unix
from gossipx.transports.link import Link
from gossipx.wire import frames

log = logging.getLogger("gossipx")

# Seconds. How often a thread that waits for a response checks that the requester is still connected.
_POLL = 1.0
# Seconds to wait before accepting again after the system ran out of a resource: first, and at most.
_PAUSE = (0.05, 1.0)
# Limits on connections without a finished handshake: in total, or per peer where that is more. All peers of a run may
# connect at once, with a message and a pull each.
_STRANGERS, _STRANGERS_PER_PEER = 32, 2
# Seconds between two log lines about damaged frames; those in between are only counted.
_TELL_EVERY = 60.0


def no_sink(sender: int, request: CarryingRequest) -> wire.UploadSink:
    """Refuse every payload."""
    raise errors.ProtocolError(f"it sent {type(request).__name__} with a payload, which this peer does not accept")


@dataclass(frozen=True)
class Response:
    """One response; fields as the arguments of :meth:`gossipx.comm.CommManager.answer`."""

    reply: Reply
    payload: Source | None
    deadline: float
    done: Callable[[bool], None]
    begins: float


@dataclass(eq=False)
class ReceivedRequest:
    """A received request that waits for its response; one of this peer to itself has the number 0."""

    number: int = 0
    ready: threading.Event = field(default_factory=threading.Event)
    answer: Response | None = None

    def abort(self) -> None:
        """Stop waiting for the response."""
        self.ready.set()


SinkFor: TypeAlias = Callable[[int, CarryingRequest], wire.UploadSink]
"""Called with the sender's rank and the request; returns the buffer for the request's payload."""
OnRequest: TypeAlias = Callable[[int, Hashable, Request, "wire.UploadSink | None"], None]
"""Called with the sender's rank, a key, the request and its payload."""


class RequestListener:
    """Accepts connections, passes requests on, and sends the responses.

    Args:
        member: identity and connections of this peer; its names may grow.
        bind: address to listen at; port 0 lets the system choose a port.
        on_request: called with each request, on a connection's thread.
        sink_for: returns the buffer for a request's payload; may block, and raises if there is no memory.
        most: limit on inbound connections. Above it, and above a limit on connections without a finished handshake, the
            oldest one without a finished handshake is closed.

    Attributes:
        queries: as :attr:`gossipx.comm.CommManager.queries`.
        kept: connections that peers behind NAT have handed over to this one.
    """

    def __init__(self, member: Member, bind: Address, on_request: OnRequest, sink_for: SinkFor, most: int):
        self.kept = HandedOverLinks(member.links)
        self._member = member
        self._bind = bind
        self._on_request = on_request
        self._sink_for = sink_for
        self._most = most
        self._most_strangers = max(_STRANGERS, _STRANGERS_PER_PEER * member.me.size)
        self._links = member.links
        self._keys = itertools.count(1)
        # A random name that no other process can have taken. It also tells a restarted process from the one before,
        # even where no memory is shared.
        self._local = Address(f"gossipx-{secrets.token_hex(16)}", 0)
        self._listener: Listener | None = None
        self._local_listener: Listener | None = None
        # The lock guards everything below.
        self.queries: dict[str, Callable[[], dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._requests: dict[Hashable, ReceivedRequest] = {}
        self._tell_corrupted_at = 0.0
        self._inbound: dict[Stream, bool] = {}  # in order of arrival; value: handshake finished

    @property
    def address(self) -> Address:
        """The address listened at; RuntimeError before :meth:`start`."""
        if self._listener is None:
            raise RuntimeError("not started")
        return self._listener.address

    def start(self) -> None:
        """Listen and serve requests; GossipxError if the address is not available."""
        self._listener = self._member.transport.listen(self._bind)
        if self._member.machine:  # first, as handshakes on the main address announce this socket
            self._local_listener = unix.listen(self._local)
            self._links.spawn("accept-local", self._accept, self._local_listener)
        self._links.spawn("accept", self._accept, self._listener)

    def answer(self, key: Hashable, outgoing: Response) -> None:
        """Provide the response to a request; see :meth:`gossipx.comm.CommManager.answer`."""
        with self._lock:
            waiting = self._requests.get(key)
            if waiting is not None:
                frames.encode(outgoing.reply, waiting.number, outgoing.payload)  # validates: raise in the caller
                waiting.answer = outgoing
                del self._requests[key]
                waiting.ready.set()
                return
        call_back_in_thread(outgoing.done, False)

    def end(self) -> None:
        """Stop accepting, and wake threads that wait for a response."""
        with self._lock:
            for waiting in self._requests.values():
                waiting.abort()
            self._requests.clear()
        for listener in (self._listener, self._local_listener):
            if listener is not None:
                listener.close()

    def _accept(self, listener: Listener) -> None:
        pause, full = _PAUSE[0], False
        while not self._links.closed.is_set():
            try:
                stream = listener.accept()
            except errors.GossipxError as error:
                if pause == _PAUSE[0] and not self._links.closed.is_set():
                    log.warning("%s; retrying until it succeeds", error)
                self._links.closed.wait(pause)
                pause = min(2 * pause, _PAUSE[1])
                continue
            pause = _PAUSE[0]
            over = self._admit_stream(stream)
            if over and not full:
                log.warning("%d connections are open: closing those without a finished handshake", over)
            full = over > 0
        listener.close()

    def _admit_stream(self, stream: Stream) -> int:
        """Start a thread for a connection, closing another one, or this one, at the limit.

        Returns:
            The number of open connections if the limit was reached, else 0.
        """
        with self._lock:
            count = len(self._inbound)
            strangers = [inbound for inbound, admitted in self._inbound.items() if not admitted]
            full = count >= self._most or len(strangers) >= self._most_strangers
            # Peers finish their handshake at once; the oldest stranger has had the most time for it.
            victim = (strangers or [stream])[0] if full else None
            if victim is not None and victim is not stream:
                del self._inbound[victim]
            if victim is not stream:
                self._inbound[stream] = False
        if victim is not None:
            victim.abort()
        if victim is not stream:
            try:
                self._links.spawn("serve", self._serve, stream)
            except RuntimeError:  # the system cannot start another thread
                stream.abort()
                with self._lock:
                    self._inbound.pop(stream, None)
        return count if full else 0

    def _serve(self, stream: Stream, hosts: Sequence[str] = ()) -> None:
        """Serve an inbound connection from its handshake to its end, or until it is handed over to this side.

        Args:
            hosts: for which its certificate may be, by rank; empty: the hosts of the peers.
        """
        member = self._member
        with self._told(stream):
            link = self._links.add(stream)
            with self._links.dropped_on_failure(link):
                deadline = time.monotonic() + member.timeout
                if member.secret is not None:
                    handshake.challenge(link, member.secret, member.me, deadline)
                hosts = hosts or [address.host for address in member.addresses]
                welcome = wire.Welcome(
                    member.me.rank, member.me.name, member.me.model, member.machine, self._local.host
                )
                they = handshake.admit(
                    link, member.me, member.names, hosts, welcome, self.queries, deadline, member.join_handler
                )
                if they.model == member.me.model:  # else it may only ask for the manifest
                    member.trust.record_admission()
                with self._lock:
                    if stream in self._inbound:
                        self._inbound[stream] = True
                while not isinstance(self._serve_one(link, they), wire.ReverseRequest):
                    pass
            self.kept.put(they.rank, link)

    def serve_reversed(self, link: Link, they: wire.Welcome, used: Callable[[], None]) -> None:
        """Serve a connection that this peer has opened and handed over to peer ``they``, until it ends.

        Args:
            used: called when the first request has arrived.
        """
        with self._told(link.stream), self._links.dropped_on_failure(link):
            frame, upload = self._receive(link, they)
            used()
            if isinstance(frame.message, wire.RelayedRequest):
                self._serve_relayed(link, they.rank, frame.message.sender, frame.request)
                return
            self._serve_frame(link, they, frame, upload)
            while True:
                self._serve_one(link, they)

    def _serve_relayed(self, link: Link, gateway: int, sender: int, number: int) -> None:
        """Serve peer ``sender``, which speaks on this connection with peer ``gateway`` from now on."""
        link.send(frames.encode(AcceptReply(), number, checks=link.checks), time.monotonic() + self._member.timeout)
        hosts = [""] * len(self._member.addresses)
        if sender >= len(hosts):
            raise errors.ProtocolError(f"it passes on a connection of rank {sender}, which no peer has")
        hosts[sender] = self._member.addresses[gateway].host  # whose certificate it is: the gateway vouches
        self._serve(link.stream, hosts)
        self._links.drop(link)

    def _relay(self, link: Link, they: wire.Hello, to: int, number: int) -> None:
        """Connect a peer behind NAT to another one, and pass on what they send until one of them ends."""
        member = self._member
        if to >= len(member.addresses) or not member.addresses[to].behind_nat:
            raise errors.ProtocolError(f"it asked for a connection to rank {to}, which is not behind NAT")
        deadline = time.monotonic() + member.timeout
        try:
            other = self.kept.take(to, deadline)
            with self._links.dropped_on_failure(other):
                other.request(wire.RelayedRequest(they.rank), number, deadline)
        except errors.GossipxError as error:
            reason = NotReadyReply(f"{member.names[member.me.rank]} does not reach it: {error}")
            link.send(frames.encode(reason, number, checks=link.checks), deadline)
            return
        try:
            link.send(frames.encode(AcceptReply(), number, checks=link.checks), deadline)
            self.kept.pass_on(link.stream, other.stream)
        finally:
            self._links.drop(other)

    @contextlib.contextmanager
    def _told(self, stream: Stream) -> Iterator[None]:
        """Return a context that ends the errors of a connection: it counts and logs those that matter."""
        member = self._member
        try:
            yield
        except (errors.NotAuthorisedError, errors.StrangerError) as error:
            member.trust.record_stranger(stream.remote, error)
        except errors.CorruptedError as error:
            self._tell_corrupted(stream.remote, error)
        except errors.GossipxError as error:
            # Peers end and strangers probe ports all the time: not worth a user's attention.
            log.debug("the connection from %s has ended: %s", stream.remote, error)
        except Exception:
            log.exception("serving %s has failed", stream.remote)
        finally:
            with self._lock:
                self._inbound.pop(stream, None)

    def _tell_corrupted(self, remote: str, error: errors.CorruptedError) -> None:
        """Log a damaged request or payload, at a limited rate; the link has counted it."""
        with self._lock:
            if (now := time.monotonic()) < self._tell_corrupted_at:
                return
            self._tell_corrupted_at = now + _TELL_EVERY
        log.warning("%s sent %s: it is refused (%d refused so far)", remote, error, self._links.counts["corrupted"])

    def _receive(self, link: Link, they: wire.Hello | wire.Welcome) -> tuple[frames.Frame, wire.UploadSink | None]:
        """Return the next frame and its payload, which the caller must release."""
        sinks: list[wire.UploadSink] = []

        def expect(message: wire.Message, request: int) -> wire.Sink | None:
            if not isinstance(message, CarryingRequest):
                return None
            if they.model != self._member.me.model:
                raise errors.ProtocolError("its request carries a payload of another model")
            sinks.append(self._sink_for(they.rank, message))
            undo.callback(sinks[0].release)  # if the payload does not arrive whole
            return sinks[0]

        with contextlib.ExitStack() as undo:
            frame = link.receive(math.inf, expect)
            undo.pop_all()
        return frame, sinks[0] if sinks else None

    def _serve_one(self, link: Link, they: wire.Hello | wire.Welcome) -> wire.Message:
        """Receive a message, and serve it if it is a request; return it."""
        frame, upload = self._receive(link, they)
        self._serve_frame(link, they, frame, upload)
        return frame.message

    def _serve_frame(
        self, link: Link, they: wire.Hello | wire.Welcome, frame: frames.Frame, upload: wire.UploadSink | None
    ) -> None:
        deadline = time.monotonic() + self._member.timeout
        if isinstance(frame.message, wire.DescribeRequest):
            manifest = Source(memoryview(self._member.manifest))
            described = wire.Description(manifest.view.nbytes)
            link.send(frames.encode(described, frame.request, manifest, link.checks), deadline)
        elif they.model != self._member.me.model or they.name != self._member.names[they.rank]:
            raise handshake.refuse(link, "the models differ, or its rank belongs to another peer by now", deadline)
        elif isinstance(frame.message, Request):
            self._respond(link, they.rank, frame.request, frame.message, upload)
        elif isinstance(frame.message, wire.CarrierRequest):
            self._build_carrier(link, frame.message.kind, frame.request, deadline)
        elif isinstance(frame.message, wire.RelayRequest) and isinstance(they, wire.Hello):
            self._relay(link, they, frame.message.to, frame.request)
        elif isinstance(frame.message, wire.ReverseRequest) and self._member.is_cut_off(they.rank):
            link.send(frames.encode(AcceptReply(), frame.request, checks=link.checks), deadline)
        else:
            raise errors.ProtocolError(f"it sent {type(frame.message).__name__}, not a request")

    def _build_carrier(self, link: Link, kind: str, number: int, deadline: float) -> None:
        if link.carrier is not None:
            raise errors.ProtocolError("it asked for a second carrier on one connection")
        carriers = self._member.carriers
        if carriers is None or carriers.kind != kind:
            link.refuse_carrier("its --transport differs; give every peer the same", number, deadline)
            raise errors.NoCarrierError(f"it asked for {kind}, but this peer has another --transport")
        link.build_carrier(carriers, False, number, deadline)

    def request_loopback(
        self,
        request: Request,
        upload: Source | None,
        payload: wire.Sink | wire.SinkFactory | None,
        deadline: float,
        waiting: ReceivedRequest,
    ) -> Reply:
        """Serve a request of this peer to itself, with the same errors as a connection.

        Args:
            upload: payload of the request.
            payload: receives the reply's payload.
            waiting: its ``abort`` ends the call.
        """
        received = None
        if isinstance(request, CarryingRequest) and upload is not None:
            received = self._sink_for(self._member.me.rank, request)
            received.take(0, upload.view)
        with self._passed_on(waiting, self._member.me.rank, request, received):
            if not waiting.ready.wait(max(0.0, deadline - time.monotonic())):
                raise errors.PeerTimeoutError("this peer did not answer its own request within the deadline")
            answer = waiting.answer
            if answer is None:
                raise errors.PeerUnreachableError("this peer ended before it answered its own request")
            if isinstance(answer.reply, CarryingReply) and answer.payload is not None and payload is not None:
                sink = payload.fit(answer.reply) if isinstance(payload, wire.SinkFactory) else payload
                sink.take(0, answer.payload.view)
        return answer.reply

    def _respond(self, link: Link, sender: int, number: int, request: Request, upload: wire.UploadSink | None) -> None:
        """Pass a request on, wait for its response, and send it."""
        waiting = ReceivedRequest(number)
        # If it fails, the link ends before ``done`` allows the payload to change: the receiver must not take a mixture
        # for a whole model.
        with self._passed_on(waiting, sender, request, upload, link.abort):
            while not waiting.ready.wait(_POLL) and link.stream.quiet():
                pass
            answer = waiting.answer
            if answer is None:
                raise errors.PeerUnreachableError("it closed the connection before its request was answered")
            early = min(answer.begins, answer.deadline) - time.monotonic()
            if early > 0 and self._links.closed.wait(early):
                raise self._links.closed_error()
            if isinstance(answer.reply, CarryingReply) and answer.payload is not None:
                link.send_model(answer.reply, number, answer.payload, answer.deadline)
            else:
                link.send(frames.encode(answer.reply, number, checks=link.checks), answer.deadline)

    @contextlib.contextmanager
    def _passed_on(
        self,
        waiting: ReceivedRequest,
        sender: int,
        request: Request,
        upload: wire.UploadSink | None,
        abort: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Pass a request on for a block that sends the response; then tell who gave it whether it has arrived whole.

        Args:
            abort: called first if the block fails.

        Raises:
            PeerUnreachableError: all connections have ended.
        """
        key = next(self._keys)
        with self._lock:
            is_closed = self._links.closed.is_set()
            if not is_closed:
                self._requests[key] = waiting
        if is_closed:
            if upload is not None:
                upload.release()
            raise self._links.closed_error()
        whole = False
        try:
            self._on_request(sender, key, request, upload)
            yield
            whole = True
        finally:
            if not whole:
                abort()
            with self._lock:
                self._requests.pop(key, None)  # a later response is dropped
            if waiting.answer is not None:
                call_back(waiting.answer.done, whole)
