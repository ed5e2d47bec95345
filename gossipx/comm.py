"""Requests to other peers and answers to theirs, over real connections.

One request, from end to end::

    request()     here    queues a job, wakes or starts a worker, returns
      _work       here    the worker takes the job
      _exchange   here    on an idle connection to that peer, or one from _open (Hello, Welcome):
      Link.ask    here    the request goes out ...
        _ask      there   ... comes in on the connection's own thread, which tells on_request of it
        answer()  there   and waits until it is answered, then sends the reply
      Link.ask    here    ... the reply comes in, a model straight into the payload buffer
      _finish     here    done(reply), or done(error)

A connection carries one request at a time, of the side that opened it. Callbacks hold no lock.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gossipx.errors import (
    GossipxError,
    NoCarrierError,
    NotAuthorisedError,
    PeerFaultError,
    PeerUnreachableError,
    ProtocolError,
    StrangerError,
    UsageError,
)
from gossipx.messages import ModelReply, Reply, Request
from gossipx.transports import Address, Carriers, Listener, Stream, Transport, tcp, unix
from gossipx.transports.link import Link
from gossipx.transports.links import Links
from gossipx.transports.pace import Pace
from gossipx.transports.trust import Trust
from gossipx.wire import (
    CarrierRequest,
    DescribeRequest,
    Description,
    Hello,
    Sink,
    Source,
    Welcome,
    auth,
    frames,
    manifest_bytes,
)

log = logging.getLogger("gossipx")

# Seconds. How often a thread that waits for an answer looks whether the requester is still there.
_LOOK = 1.0
# Seconds within which a reused connection must fail for the request to be tried on a new one: it
# was dead before. Later, the peer may have been at work on the request.
_AT_ONCE = 1.0
# Seconds that a worker without work stays: longer than between two pulls of a fast loop.
_REST = 30.0
# Seconds to wait before accepting again when the system lacks something: first, and at most.
_PAUSE = (0.05, 1.0)
# Seconds that close() gives its threads: it wakes all but those in a callback or in connect.
_CLOSE = 5.0


@dataclass(eq=False)
class _Job:
    """A request of ours; fields as the arguments of ``request``."""

    to: int
    request: Request
    deadline: float
    payload: Sink | None
    done: Callable[[Reply | GossipxError], None]


@dataclass(eq=False)
class _Slot:
    """A received request that waits for its answer."""

    number: int
    ready: threading.Event = field(default_factory=threading.Event)
    # The answer, its deadline, and whom to tell; None as long as there is no answer.
    answer: tuple[Reply, Source | None, float, Callable[[bool], None]] | None = None


class CommManager:
    """Sends requests to the peers of a run and receives theirs.

    Args:
        rank: this peer's own.
        names: of all peers, by rank.
        addresses: of all peers, by rank; looked up whenever a connection is opened.
        bind: where to listen; port 0 lets the system choose.
        peers_digest: of the list of peers; peers with another are refused.
        manifest: one line a tensor, ``name dtype shape stride``; all peers must have the same.
        on_request: told (sender's rank, key, request) from a connection's thread; each key is to
            be given to :meth:`answer` once, then or later.
        peer_timeout: seconds within which a handshake, and a request once begun, must be whole.
        transport: makes the connections.
        share_memory: give models to peers on this machine in memory that both share, where the system can; connections
            to them are opened by ``transport`` and go on over a Unix socket.
        only_memory: requests to a peer with which that cannot be end in a UsageError.
        carriers: build a way for models beside each connection that one is asked for over. Where they cannot, models
            go over the connections, and a line is logged once a peer. Go not with ``share_memory``.
        max_rate: bytes a second of models that are sent over a network, to all others together; None: no limit.
        secret: that all peers of the run share; connections begin with proving it, and every frame has a MAC.
        max_connections: inbound ones at a time; above it the oldest is closed that has not said who it is. By
            default 32 for strangers and four a peer (two that it keeps, and two that it uses meanwhile).

    Attributes:
        trust: who was turned away.

    Raises:
        UsageError: the manifest is larger than the 16 MiB that can be sent.
    """

    def __init__(
        self,
        *,
        rank: int,
        names: Sequence[str],
        addresses: Sequence[Address],
        bind: Address,
        peers_digest: str,
        manifest: Sequence[str],
        on_request: Callable[[int, Hashable, Request], None],
        peer_timeout: float,
        transport: Transport = tcp,
        share_memory: bool = True,
        only_memory: bool = False,
        carriers: Carriers | None = None,
        max_rate: float | None = None,
        secret: auth.Secret | None = None,
        max_connections: int | None = None,
    ):
        self._names, self._addresses, self._bind = names, addresses, bind
        self._manifest = manifest_bytes(manifest)
        model = hashlib.sha256(self._manifest).hexdigest()
        self._me = Hello(rank, names[rank], len(names), peers_digest, model)
        self._on_request = on_request
        self._timeout = peer_timeout
        self._transport = transport
        self._machine = unix.machine() if share_memory else ""
        self._only_memory = only_memory
        # Unguessable, so that nobody else can have taken it; of processes of this machine alone.
        self._local = Address(f"gossipx-{secrets.token_hex(16)}" if self._machine else "", 0)
        self._apart: set[int] = set()  # ranks that say they are on this machine and cannot be reached as such
        self._carriers = carriers
        self._bare: set[int] = set()  # ranks with which no carrier can be built
        self._secret = secret
        self.trust = Trust(len(names) - 1, peer_timeout)
        self._most = 32 + 4 * len(names) if max_connections is None else max_connections
        self._links = Links(names[rank], len(names), peer_timeout, None if max_rate is None else Pace(max_rate))
        self._numbers = itertools.count(1)
        self._listener: Listener | None = None
        self._local_listener: Listener | None = None
        # Everything below is touched under the lock alone.
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # a job, or the end
        self._jobs: deque[_Job] = deque()
        self._unfinished: set[_Job] = set()
        self._resting = 0  # workers without a job
        self._slots: dict[Hashable, _Slot] = {}
        self._inbound: dict[Stream, bool] = {}  # in order of arrival; whether it has been admitted

    # --- for the driver -------------------------------------------------------------------------

    @property
    def address(self) -> Address:
        """Where it listens; RuntimeError before it is started."""
        if self._listener is None:
            raise RuntimeError("not started")
        return self._listener.address

    @property
    def bytes_sent(self) -> int:
        """Of the whole wire: models, messages, handshakes."""
        return self._links.sent

    @property
    def bytes_received(self) -> int:
        """Of the whole wire, with what was dropped later."""
        return self._links.received

    def start(self) -> None:
        """Listen and answer from now on; GossipxError if the address cannot be had."""
        self._listener = self._transport.listen(self._bind)
        self._links.spawn("accept", self._accept, self._listener)
        if self._local.host:
            self._local_listener = unix.listen(self._local)
            self._links.spawn("accept-local", self._accept, self._local_listener)

    def request(
        self,
        to: int,
        request: Request,
        *,
        deadline: float,
        payload: Sink | None,
        done: Callable[[Reply | GossipxError], None],
    ) -> None:
        """Ask peer ``to``; never blocks.

        Args:
            deadline: absolute, on time.monotonic(), for everything until the last byte.
            payload: takes a ModelReply's bytes in, which must be exactly as many (None: none), until ``done`` is
                called; what it has taken is of worth only if a ModelReply came.
            done: called once, from a thread of the manager's, with the reply or with
                PeerUnreachableError, PeerTimeoutError, ProtocolError or ModelMismatchError.

        Raises:
            ValueError: the request is not one that a peer would accept.
            RuntimeError: the system has no thread left for it; ``done`` is not called.
        """
        if to == self._me.rank or not 0 <= to < self._me.size:
            raise ValueError(f"rank {to} is not another peer's")
        frames.encode(request, 0)  # raises here, where the mistake is
        job = _Job(to, request, deadline, payload, done)
        with self._lock:
            if not self._links.closed.is_set():
                # As many workers as requests, no cap: under one, requests to peers that are gone
                # would keep a request to a living peer waiting past its deadline.
                if self._resting <= len(self._jobs):
                    self._links.spawn("ask", self._work)
                self._jobs.append(job)
                self._unfinished.add(job)
                self._arrived.notify()
                return
        _tell_aside(done, self._links.gone())

    def answer(
        self,
        key: Hashable,
        reply: Reply,
        *,
        payload: Source | None,
        deadline: float,
        done: Callable[[bool], None],
    ) -> None:
        """Answer a received request; never blocks.

        Args:
            key: as told to ``on_request``.
            payload: a ModelReply's bytes; they must not change until ``done`` is called.
            deadline: absolute; the answer is given up if its last byte has not gone out by then, or a model's receiver
                has not told by then that it has it.
            done: called once, from a thread of the manager's: whether it has arrived, as far as is known.

        Raises:
            ValueError: the reply is not one that a peer would accept.
        """
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                frames.encode(reply, slot.number, None if payload is None else payload.view)  # raises here
                slot.answer = reply, payload, deadline, done
                del self._slots[key]
                slot.ready.set()
                return
        _tell_aside(done, False)

    def close(self) -> None:
        """End everything; what is pending is told an error or False. Any number of times."""
        with self._lock:
            self._links.abort()
            for slot in self._slots.values():
                slot.ready.set()
            self._slots.clear()
            self._arrived.notify_all()
        for listener in (self._listener, self._local_listener):
            if listener is not None:
                listener.close()
        self._links.join(_CLOSE)
        with self._lock:
            left = list(self._unfinished)
        for job in left:
            self._finish(job, self._links.gone())

    # --- requests of ours -----------------------------------------------------------------------

    def _work(self) -> None:
        """A worker: one job after the other, until there is none for a while."""
        while True:
            with self._arrived:
                self._resting += 1
                self._arrived.wait_for(lambda: self._jobs or self._links.closed.is_set(), _REST)
                self._resting -= 1
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            self._finish(job, self._outcome(job))

    def _outcome(self, job: _Job) -> Reply | GossipxError:
        try:
            return self._exchange(job)
        except PeerFaultError as error:
            if self._links.closed.is_set():
                return self._links.gone()
            if isinstance(error, NotAuthorisedError):
                self.trust.turned_away(job.to, error)
            return type(error)(f"{self._names[job.to]}: {error}")
        except GossipxError as error:
            return error
        except Exception as error:  # a fault of ours; the driver still has to hear of its request
            log.exception("a request to %s failed", self._names[job.to])
            return GossipxError(f"{self._names[job.to]}: {error!r}")

    def _finish(self, job: _Job, result: Reply | GossipxError) -> None:
        with self._lock:
            if job not in self._unfinished:
                return
            self._unfinished.remove(job)
        _tell(job.done, result)

    def _exchange(self, job: _Job) -> Reply:
        try:
            return self._attempt(job)
        except NoCarrierError as error:
            with self._lock:
                told = job.to in self._bare
                self._bare.add(job.to)
            if not told:
                log.warning("models of %s come over sockets from now on: %s", self._names[job.to], error)
            return self._attempt(job)

    def _attempt(self, job: _Job) -> Reply:
        link = self._links.take(job.to)
        if link is not None:
            began = time.monotonic()
            try:
                return self._ask_over(link, job)
            except PeerUnreachableError:
                if link.heard or time.monotonic() - began > _AT_ONCE:
                    raise
        return self._ask_over(self._open(job.to, job.deadline), job)

    def _ask_over(self, link: Link, job: _Job) -> Reply:
        with self._links.dropped_on_failure(link):
            if self._carriers is not None and link.carrier is None and job.to not in self._bare and _wants_bytes(job):
                # Half the time: if it cannot be built, the other half is for the model to come without.
                by = (time.monotonic() + self._soon(job.deadline)) / 2
                link.ask_for_carrier(self._carriers, next(self._numbers), by)
            frame = link.ask(job.request, next(self._numbers), job.deadline, job.payload)
        self._links.keep(job.to, link)
        return cast(Reply, frame.message)

    def _open(self, to: int, deadline: float) -> Link:
        """A new connection to peer ``to``, both sides having said who they are."""
        deadline = self._soon(deadline)
        link = self._links.add(self._transport.connect(self._addresses[to], deadline))
        they = self._greet(link, to, deadline)
        here = bool(self._machine and they.local) and they.machine == self._machine and to not in self._apart
        local = self._open_local(they, to, deadline) if here else None
        if local is not None:
            self._links.drop(link)
            return local
        if self._only_memory:
            self._links.drop(link)
            raise UsageError(f"no memory can be shared with {self._names[to]}, as --transport shm wants: use auto")
        return link

    def _soon(self, deadline: float) -> float:
        """When a handshake must be over."""
        return min(deadline, time.monotonic() + self._timeout)

    def _open_local(self, they: Welcome, to: int, deadline: float) -> Link | None:
        """The same over a Unix socket, to a peer that says it is on this machine; None if it cannot be reached so."""
        try:
            local = self._links.add(unix.connect(Address(they.local, 0), deadline))
            self._greet(local, to, deadline)
            return local
        except PeerFaultError as error:
            log.debug("%s is on this machine and cannot share memory: %s", self._names[to], error)
            self._apart.add(to)
            return None

    def _greet(self, link: Link, to: int, deadline: float) -> Welcome:
        with self._links.dropped_on_failure(link):
            if self._secret is not None:
                link.prove(self._secret, self._me, self._names[to], deadline)
            they = link.greet(self._me, to, self._names[to], self._manifest, deadline)
        self.trust.taken_in()
        return they

    # --- requests of others ---------------------------------------------------------------------

    def _accept(self, listener: Listener) -> None:
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
            fits = self._serve_beside(stream)
            if not fits and not full:
                log.warning("%d connections are open: closing those that have not said who they are", self._most)
            full = not fits
        listener.close()

    def _serve_beside(self, stream: Stream) -> bool:
        """Give a connection its thread; returns whether there was room, without closing one for it."""
        with self._lock:
            full = len(self._inbound) >= self._most
            # Whoever is a peer says so at once: of those that have not, the first has had the most time.
            goes = next((one for one, admitted in self._inbound.items() if not admitted), stream) if full else None
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
        return not full

    def _serve(self, stream: Stream) -> None:
        """All of an inbound connection."""
        try:
            link = self._links.add(stream)
            try:
                deadline = time.monotonic() + self._timeout
                if self._secret is not None:
                    link.challenge(self._secret, self._me, deadline)
                hosts = [address.host for address in self._addresses]
                welcome = Welcome(self._me.rank, self._me.name, self._me.model, self._machine, self._local.host)
                they = link.admit(self._me, self._names, hosts, welcome, deadline)
                self.trust.taken_in()
                with self._lock:
                    if stream in self._inbound:
                        self._inbound[stream] = True
                while True:
                    self._serve_one(link, they)
            finally:
                self._links.drop(link)
        except (NotAuthorisedError, StrangerError) as error:
            self.trust.stranger(stream.remote, error)
        except GossipxError as error:
            # Peers come and go, and anything may knock: not worth a user's attention.
            log.debug("the connection from %s has ended: %s", stream.remote, error)
        except Exception:
            log.exception("serving %s has failed", stream.remote)
        finally:
            with self._lock:
                self._inbound.pop(stream, None)

    def _serve_one(self, link: Link, they: Hello) -> None:
        frame = link.receive(math.inf)
        deadline = time.monotonic() + self._timeout
        if isinstance(frame.message, DescribeRequest):
            described = Description(len(self._manifest))
            link.send(frames.encode(described, frame.request, memoryview(self._manifest), link.checks), deadline)
        elif they.model != self._me.model:
            raise link.refuse("the models differ", deadline)
        elif isinstance(frame.message, Request):
            self._ask(link, they.rank, frame.request, frame.message)
        elif isinstance(frame.message, CarrierRequest):
            self._build_carrier(link, frame.message.kind, frame.request, deadline)
        else:
            raise ProtocolError(f"it sent {type(frame.message).__name__}, not a request")

    def _build_carrier(self, link: Link, kind: str, number: int, deadline: float) -> None:
        if link.carrier is not None:
            raise ProtocolError("it asked for a second way beside the connection")
        if self._carriers is None or self._carriers.kind != kind:
            link.refuse_carrier("its --transport is another; give every peer the same", number, deadline)
            raise NoCarrierError(f"it asked for {kind}, which is not this peer's --transport")
        link.build_carrier(self._carriers, False, number, deadline)

    def _ask(self, link: Link, sender: int, number: int, request: Request) -> None:
        """Tell of a request, wait until it is answered, send the answer."""
        key, slot, whole = next(self._numbers), _Slot(number), False
        with self._lock:
            if self._links.closed.is_set():
                raise self._links.gone()
            self._slots[key] = slot
        try:
            self._on_request(sender, key, request)
            while not slot.ready.wait(_LOOK) and link.stream.quiet():
                pass
            self._forget(key)
            if slot.answer is None:
                raise PeerUnreachableError("it hung up before its request was answered")
            reply, payload, deadline, _ = slot.answer
            if isinstance(reply, ModelReply) and payload is not None:
                link.send_model(reply, number, payload, deadline)
            else:
                link.send(frames.encode(reply, number, checks=link.checks), deadline)
            whole = True
        finally:
            if not whole:
                # Before the memory that it gives is changed: whoever still reads it must not take it as whole.
                link.abort()
            self._forget(key)
            if slot.answer is not None:
                _tell(slot.answer[3], whole)

    def _forget(self, key: Hashable) -> None:
        """No answer to ``key`` is taken from now on."""
        with self._lock:
            self._slots.pop(key, None)


def _tell(done: Callable[[Any], None], result: object) -> None:
    try:
        done(result)
    except Exception:
        log.exception("a callback has failed")


def _tell_aside(done: Callable[[Any], None], result: object) -> None:
    """Tell from a thread of its own: the caller may hold locks that ``done`` takes."""
    threading.Thread(target=_tell, args=(done, result), name="gossipx-tell", daemon=True).start()


def _wants_bytes(job: _Job) -> bool:
    return job.payload is not None and job.payload.nbytes > 0
