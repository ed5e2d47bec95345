"""The sending side of a peer: worker threads that send requests on connections which this peer has opened.

:meth:`RequestClient.request` queues a job and returns. A worker takes the job, picks or opens a connection, waits for
the reply and calls ``done``. A *carrier*, such as gloo or NCCL, transfers payloads between two processes outside the
stream of their connection. :class:`StandBy` keeps connections ready on which others send requests to a peer behind NAT.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from gossipx import errors
from gossipx.comm.listener import ReceivedRequest, RequestListener
from gossipx.comm.member import WAIT, Member, call_back, call_back_in_thread
from gossipx.memory import Source
from gossipx.protocol.messages import NotReadyReply, Reply, Request
from gossipx.transports import Address, handshake, unix
from gossipx.transports.link import Link
from gossipx.wire import DescribeRequest, RelayRequest, ReverseRequest, Sink, SinkFactory, Welcome, frames

log = logging.getLogger("gossipx")

# Seconds. If a reused connection fails this soon, it was dead before, and the request is retried on a new one. If it
# fails later, the peer may already have acted on the request, so it is not sent twice.
_STALE_AFTER = 1.0
# Connections that a peer behind NAT keeps ready per gateway: one for a model, and one for a message meanwhile. Each is
# replaced as soon as it is used.
_READY = 2
# Shares of peer_timeout: the longest pause after a peer behind NAT failed to open a connection, first and at most.
_PAUSE = 1 / 300, 1 / 30
# Seconds that a worker without work stays alive: longer than the pause between two pulls of a fast loop.
_WORKER_IDLE = 30.0


@dataclass(eq=False)
class OutgoingRequest:
    """One outgoing request.

    Attributes:
        payload: receives the bytes that the reply carries; None: they are dropped.
        upload: the bytes that the request carries; None: none.
        cancelled: whether the caller has cancelled the request.
        link: the connection in use now, or the loopback of a request to this peer itself; aborting it ends the request.
    """

    to: int
    request: Request
    deadline: float
    payload: Sink | SinkFactory | None
    done: Callable[[Reply | errors.GossipxError], None]
    upload: Source | None = None
    cancelled: bool = False
    link: Link | ReceivedRequest | None = None


class RequestClient:
    """Sends requests and receives their replies.

    Args:
        member: identity and connections of this peer.
        only_memory: fail requests to peers that cannot share memory, with UsageError.
        own: serves requests that this peer sends to itself.
    """

    def __init__(self, member: Member, only_memory: bool, own: RequestListener):
        self._member = member
        self._own = own
        self._only_memory = only_memory
        self._links = member.links
        self._numbers = itertools.count(1)
        # The lock guards everything below.
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # a job was queued, or all connections have ended
        self._jobs: deque[OutgoingRequest] = deque()
        self._unfinished: set[OutgoingRequest] = set()
        self._idle_workers = 0
        # What is known of each peer's current process, by rank. A new process listens on a new Unix socket, and what
        # was known of the old one is forgotten.
        self._process_names: dict[
            int, str
        ] = {}  # name of the Unix socket of the process that last completed a handshake
        self._unreachable_locally: set[int] = set()  # on this machine, but its Unix socket is unreachable
        self._without_carrier: set[int] = set()  # no carrier can be built with it

    def request(self, job: OutgoingRequest) -> Callable[[], None]:
        """Queue a request; return a function that cancels it. See :meth:`gossipx.comm.CommManager.request`."""
        if not 0 <= job.to < len(self._member.names):
            raise ValueError(f"no peer has rank {job.to}")
        frames.encode(job.request, 0, job.upload)  # validates: raise in the caller, not in the worker
        with self._lock:
            closed = self._links.closed.is_set()
            if not closed:
                lacking = self._idle_workers <= len(self._jobs)
                self._jobs.append(job)
                self._unfinished.add(job)
                self._arrived.notify()
        if closed:
            call_back_in_thread(job.done, self._links.closed_error())
            return lambda: None
        # One worker per pending request, without a limit: with a limit, requests to dead peers would delay a request to
        # a living peer past its deadline.
        if lacking:
            self._spawn_worker(job)
        return functools.partial(self._cancel, job)

    def _spawn_worker(self, job: OutgoingRequest) -> None:
        try:
            self._links.spawn("ask", self._work)
        except RuntimeError:
            with self._lock:
                if job in self._jobs:  # else another worker has taken it
                    self._jobs.remove(job)
                    self._unfinished.remove(job)
                    raise

    def _cancel(self, job: OutgoingRequest) -> None:
        with self._lock:
            if job.cancelled or job not in self._unfinished:
                return
            job.cancelled, link = True, job.link
        if link is not None:
            link.abort()  # wakes the worker, which finishes the job
            return
        # The job uses no connection, so nothing writes to its payload. If no thread can be started, the worker
        # finishes the job.
        with contextlib.suppress(RuntimeError):
            call_back_in_thread(lambda result: self._finish(job, result), self._cancelled_error(job))

    def _cancelled_error(self, job: OutgoingRequest) -> errors.CancelledError:
        return errors.CancelledError(f"{self._member.names[job.to]}: the request was cancelled")

    def wake(self) -> None:
        """Wake idle workers after all connections have ended, so that they exit."""
        with self._lock:
            self._arrived.notify_all()

    def give_up(self) -> None:
        """Finish every pending request with an error."""
        with self._lock:
            left = list(self._unfinished)
        for job in left:
            self._finish(job, self._links.closed_error())

    def _work(self) -> None:
        """Run jobs one after the other; return after :data:`_WORKER_IDLE` without one."""
        while True:
            with self._arrived:
                self._idle_workers += 1
                self._arrived.wait_for(lambda: self._jobs or self._links.closed.is_set(), _WORKER_IDLE)
                self._idle_workers -= 1
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            self._finish(job, self._outcome(job))

    def _outcome(self, job: OutgoingRequest) -> Reply | errors.GossipxError:
        try:
            return self._exchange(job)
        except errors.PeerFaultError as error:
            if job.cancelled:
                return self._cancelled_error(job)
            if self._links.closed.is_set():
                return self._links.closed_error()
            if isinstance(error, errors.NotAuthorisedError | errors.RefusedError):
                self._member.trust.record_rejection(job.to, error)
            return type(error)(f"{self._member.names[job.to]}: {error}")
        except errors.GossipxError as error:
            return error
        except Exception as error:  # a bug in this package; the caller still needs a result
            log.exception("a request to %s failed", self._member.names[job.to])
            return errors.GossipxError(f"{self._member.names[job.to]}: {error!r}")

    def _finish(self, job: OutgoingRequest, result: Reply | errors.GossipxError) -> None:
        with self._lock:
            if job not in self._unfinished:
                return
            self._unfinished.remove(job)
        call_back(job.done, result)

    def _exchange(self, job: OutgoingRequest) -> Reply:
        try:
            return self._attempt(job)
        except errors.NoCarrierError as error:
            with self._lock:
                before = self._process_names.get(job.to)
            reply = self._attempt(job, without_carrier=True)  # raises if the peer is unreachable
            with self._lock:
                # The retry succeeded, so only the carrier fails. Record that, unless another process has answered.
                is_same_process = self._process_names.get(job.to) == before
                is_news = is_same_process and job.to not in self._without_carrier
                if is_news:
                    self._without_carrier.add(job.to)
            if is_news:
                log.warning("models from %s use sockets from now on: %s", self._member.names[job.to], error)
            return reply

    def _attempt(self, job: OutgoingRequest, without_carrier: bool = False) -> Reply:
        """Send the request on an idle connection or a new one, with a carrier unless ``without_carrier``."""
        if job.cancelled:
            raise self._cancelled_error(job)
        if job.to == self._member.me.rank:
            loopback = ReceivedRequest()
            with self._registered(loopback, job):
                return self._own.request_loopback(job.request, job.upload, job.payload, job.deadline, loopback)
        link = self._links.acquire(job.to)
        if link is not None:
            began = time.monotonic()
            try:
                return self._ask_over(link, job, without_carrier)
            except errors.PeerUnreachableError:
                if job.cancelled or link.heard or time.monotonic() - began > _STALE_AFTER:
                    raise
        return self._ask_over(self._open(job.to, job.deadline), job, without_carrier)

    def _ask_over(self, link: Link, job: OutgoingRequest, without_carrier: bool) -> Reply:
        member = self._member
        carriers = None if member.crosses_nat(job.to) else member.carriers
        with self._lock:
            without_carrier = without_carrier or job.to in self._without_carrier
        with self._links.dropped_on_failure(link), self._registered(link, job):
            if carriers is not None and link.carrier is None and not without_carrier and _wants_bytes(job):
                # Half of the time left: if the carrier cannot be built, the other half remains for a transfer without
                # one.
                by = (time.monotonic() + self._setup_deadline(job.deadline)) / 2
                link.request_carrier(carriers, next(self._numbers), by)
            frame = link.request(job.request, next(self._numbers), job.deadline, job.payload, job.upload)
        if member.is_cut_off(job.to) and member.is_cut_off_itself:
            self._links.drop(link)  # an idle one would occupy threads of the gateway
        else:
            self._links.release(job.to, link)
        return cast(Reply, frame.message)

    @contextlib.contextmanager
    def _registered(self, link: Link | ReceivedRequest, job: OutgoingRequest) -> Iterator[None]:
        """Register ``link`` with the job for the block, so that cancelling the job aborts the link.

        Raises:
            CancelledError: the job was cancelled before or during the block.
        """
        with self._lock:
            if job.cancelled:
                raise self._cancelled_error(job)
            job.link = link
        try:
            yield
        finally:
            with self._lock:
                job.link = None
        if job.cancelled:  # _cancel may be about to abort the link, so it must not be reused
            raise self._cancelled_error(job)

    def connect(self, to: int, deadline: float) -> tuple[Link, Welcome]:
        """Open a connection to peer ``to`` and complete the handshake."""
        member = self._member
        link = self._links.add(member.transport.connect(member.addresses[to], deadline))
        return link, self._greet(link, to, deadline)

    def _open(self, to: int, deadline: float) -> Link:
        """Return a new connection to peer ``to``, in shared memory if it is on this machine."""
        member, deadline = self._member, self._setup_deadline(deadline)
        if member.is_cut_off(to):
            if self._only_memory:
                raise self._no_memory(to)
            if member.is_cut_off_itself:
                return self._open_by_gateway(to, deadline)
            return self._own.kept.take(to, deadline)
        link, welcome = self.connect(to, deadline)
        here = self._record_process(welcome, to)
        with self._links.dropped_on_failure(link):
            local = self._open_local(welcome, to, link, deadline) if here else None
        if local is not None:
            self._links.drop(link)
            return local
        if self._only_memory:
            self._links.drop(link)
            raise self._no_memory(to)
        return link

    def _no_memory(self, to: int) -> errors.UsageError:
        name = self._member.names[to]
        return errors.UsageError(f"--transport shm: no memory can be shared with {name}; use --transport auto")

    def _open_by_gateway(self, to: int, deadline: float) -> Link:
        """Open a connection to a peer behind NAT, as this peer is, through the first gateway that reaches it."""
        gateways = self._member.gateways()
        start = (self._member.me.rank + to) % len(gateways)  # so that not all use the same one
        cause: errors.PeerFaultError | None = None
        for number, gateway in enumerate(gateways[start:] + gateways[:start]):
            now = time.monotonic()
            by = now + (deadline - now) / (len(gateways) - number)
            try:
                link, _ = self.connect(gateway, by)
                with self._links.dropped_on_failure(link):
                    reply = link.request(RelayRequest(to), next(self._numbers), by).message
                    if isinstance(reply, NotReadyReply):
                        raise errors.PeerUnreachableError(reply.reason)
                    link = self._links.renew(link)
            except errors.PeerFaultError as error:
                cause = error
            else:
                self._greet(link, to, by)
                return link
        raise errors.PeerUnreachableError(f"it is behind NAT, as this peer is: {cause}")

    def _record_process(self, welcome: Welcome, to: int) -> bool:
        """Record which process of peer ``to`` answered; return whether it seems to be on this machine.

        A new process of the peer clears what was recorded about the one before.
        """
        with self._lock:
            if self._process_names.get(to) != welcome.local:
                self._process_names[to] = welcome.local
                self._unreachable_locally.discard(to)
                self._without_carrier.discard(to)
            machine = self._member.machine
            return machine != "" and welcome.machine == machine and to not in self._unreachable_locally

    def _setup_deadline(self, deadline: float) -> float:
        """Return the deadline for a handshake or for building a carrier."""
        return min(deadline, time.monotonic() + self._member.timeout)

    def _open_local(self, welcome: Welcome, to: int, link: Link, deadline: float) -> Link | None:
        """Replace ``link`` by a Unix socket to the same peer on this machine; None if its socket is unreachable.

        Args:
            link: an open connection to the peer, used to check that the peer is still alive.
        """
        try:
            stream = unix.connect(Address(welcome.local, 0), deadline)
        except errors.OutOfReachError as error:
            link.request(DescribeRequest(), next(self._numbers), deadline)  # raises if the process has just ended
            log.debug("%s is on this machine and cannot share memory: %s", self._member.names[to], error)
            with self._lock:
                self._unreachable_locally.add(to)
            return None
        local = self._links.add(stream)
        self._greet(local, to, deadline)
        return local

    def _greet(self, link: Link, to: int, deadline: float) -> Welcome:
        member = self._member
        with self._links.dropped_on_failure(link):
            if member.secret is not None:
                handshake.prove(link, member.secret, member.me, member.names[to], deadline)
            welcome = handshake.greet(link, member.me, to, member.names[to], member.manifest, deadline)
        member.trust.record_admission()
        return welcome


def _wants_bytes(job: OutgoingRequest) -> bool:
    return job.payload is not None and job.payload.nbytes > 0


class StandBy:
    """Opens connections from a peer behind NAT to all peers that it reaches, and serves requests on them.

    Args:
        member: identity and connections of this peer.
        client: opens the connections.
        serve: serves a connection that was handed over, until it ends. Its last argument is called at the first
            request.
    """

    def __init__(
        self, member: Member, client: RequestClient, serve: Callable[[Link, Welcome, Callable[[], None]], None]
    ):
        self._member = member
        self._links = member.links
        self._client = client
        self._serve = serve

    def start(self) -> None:
        """Begin to connect, if this peer is behind NAT."""
        if self._member.is_cut_off_itself:
            for rank in self._member.gateways() * _READY:
                self._links.spawn("stand-by", self._stand_by, rank)

    def _stand_by(self, rank: int) -> None:
        """Keep one connection to peer ``rank`` ready; return once it was used, as another one takes its place."""
        shortest, longest = (share * self._member.timeout for share in _PAUSE)
        pause, is_replaced = shortest, False

        def replace() -> None:
            nonlocal is_replaced
            self._links.spawn("stand-by", self._stand_by, rank)
            is_replaced = True

        while not is_replaced and not self._links.closed.is_set():
            try:
                deadline = time.monotonic() + WAIT * self._member.timeout
                link, welcome = self._client.connect(rank, deadline)
                with self._links.dropped_on_failure(link):
                    link.request(ReverseRequest(), 0, deadline)
                pause = shortest
                self._serve(link, welcome, replace)
            except errors.GossipxError as error:
                log.debug("no connection is ready for requests of %s: %s", self._member.names[rank], error)
            if not is_replaced:
                self._links.closed.wait(pause)
                pause = min(2 * pause, longest)
