"""The requests of a peer: each is sent by a worker, on a connection that this peer has opened."""

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

from gossipx.comm.listener import Listener, LoopbackRequest
from gossipx.comm.member import Member, call_back, call_back_in_thread
from gossipx.errors import (
    CancelledError,
    GossipxError,
    NoCarrierError,
    NotAuthorisedError,
    OutOfReachError,
    PeerFaultError,
    PeerUnreachableError,
    RefusedError,
    UsageError,
)
from gossipx.memory import Source
from gossipx.protocol.messages import Reply, Request
from gossipx.transports import Address, handshake, unix
from gossipx.transports.link import Link
from gossipx.wire import DescribeRequest, Sink, SinkFactory, Welcome, frames

log = logging.getLogger("gossipx")

# Seconds within which a reused connection must fail for the request to be tried on a new one: it
# was dead before. Later, the peer may have been at work on the request.
_AT_ONCE = 1.0
# Seconds that a worker without work stays: longer than between two pulls of a fast loop.
_REST = 30.0


@dataclass(eq=False)
class Job:
    """A request of ours; fields as the arguments of :meth:`gossipx.comm.CommManager.request`.

    Attributes:
        cancelled: nobody wants an answer any more.
        link: over which it is asked now; of a request to oneself, what ends it.
    """

    to: int
    request: Request
    deadline: float
    payload: Sink | SinkFactory | None
    done: Callable[[Reply | GossipxError], None]
    brought: Source | None = None
    cancelled: bool = False
    link: Link | LoopbackRequest | None = None


class Client:
    """Sends requests and takes their answers in.

    Args:
        member: whose requests they are.
        only_memory: requests to a peer with which no memory can be shared end in a UsageError.
        own: answers requests to oneself.
    """

    def __init__(self, member: Member, only_memory: bool, own: Listener):
        self._member = member
        self._own = own
        self._only_memory = only_memory
        self._links = member.links
        self._numbers = itertools.count(1)
        # Everything below is touched under the lock alone.
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # a job, or the end
        self._jobs: deque[Job] = deque()
        self._unfinished: set[Job] = set()
        self._resting = 0  # workers without a job
        self._met: dict[int, str] = {}  # by rank, which process has answered last: its name on its machine
        # Of these processes: they say that they are on this machine, and cannot be reached as such;
        self._apart: set[int] = set()
        self._bare: set[int] = set()  # and no carrier can be built with them.

    def request(self, job: Job) -> Callable[[], None]:
        """Have a request sent; returns what cancels it. See :meth:`gossipx.comm.CommManager.request`."""
        if not 0 <= job.to < self._member.me.size:
            raise ValueError(f"rank {job.to} is no peer's")
        frames.encode(job.request, 0, job.brought)  # raises here, where the mistake is
        with self._lock:
            if not self._links.closed.is_set():
                # As many workers as requests, no cap: under one, requests to peers that are gone
                # would keep a request to a living peer waiting past its deadline.
                if self._resting <= len(self._jobs):
                    self._links.spawn("ask", self._work)
                self._jobs.append(job)
                self._unfinished.add(job)
                self._arrived.notify()
                return functools.partial(self._cancel, job)
        call_back_in_thread(job.done, self._links.gone())
        return lambda: None

    def _cancel(self, job: Job) -> None:
        with self._lock:
            if job.cancelled or job not in self._unfinished:
                return
            job.cancelled, link = True, job.link
        if link is not None:
            link.abort()  # the worker hears of it
            return
        # Nothing writes to its payload, nor will. Where the system has no thread left, the worker tells.
        with contextlib.suppress(RuntimeError):
            call_back_in_thread(lambda result: self._finish(job, result), self._given_up(job))

    def _given_up(self, job: Job) -> CancelledError:
        return CancelledError(f"{self._member.names[job.to]}: the request was cancelled")

    def wake(self) -> None:
        """All links have ended: let the workers see it."""
        with self._lock:
            self._arrived.notify_all()

    def give_up(self) -> None:
        """Tell whoever still waits for an answer that there will be none."""
        with self._lock:
            left = list(self._unfinished)
        for job in left:
            self._finish(job, self._links.gone())

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

    def _outcome(self, job: Job) -> Reply | GossipxError:
        try:
            return self._exchange(job)
        except PeerFaultError as error:
            if job.cancelled:
                return self._given_up(job)
            if self._links.closed.is_set():
                return self._links.gone()
            if isinstance(error, NotAuthorisedError | RefusedError):
                self._member.trust.turned_away(job.to, error)
            return type(error)(f"{self._member.names[job.to]}: {error}")
        except GossipxError as error:
            return error
        except Exception as error:  # a fault of ours; the driver still has to hear of its request
            log.exception("a request to %s failed", self._member.names[job.to])
            return GossipxError(f"{self._member.names[job.to]}: {error!r}")

    def _finish(self, job: Job, result: Reply | GossipxError) -> None:
        with self._lock:
            if job not in self._unfinished:
                return
            self._unfinished.remove(job)
        call_back(job.done, result)

    def _exchange(self, job: Job) -> Reply:
        try:
            return self._attempt(job)
        except NoCarrierError as error:
            with self._lock:
                met = self._met.get(job.to)
            reply = self._attempt(job, bare=True)  # raises if it is the peer that is gone, and not a way to it
            with self._lock:
                new = self._met.get(job.to) == met and job.to not in self._bare
                if new:
                    self._bare.add(job.to)
            if new:
                log.warning("models of %s come over sockets from now on: %s", self._member.names[job.to], error)
            return reply

    def _attempt(self, job: Job, bare: bool = False) -> Reply:
        """Ask on a kept connection, or a new one; ``bare``: without a carrier."""
        if job.cancelled:
            raise self._given_up(job)
        if job.to == self._member.me.rank:
            loopback = LoopbackRequest()
            with self._asking_over(loopback, job):
                return self._own.request_loopback(job.request, job.brought, job.payload, job.deadline, loopback)
        link = self._links.take(job.to)
        if link is not None:
            began = time.monotonic()
            try:
                return self._ask_over(link, job, bare)
            except PeerUnreachableError:
                if job.cancelled or link.heard or time.monotonic() - began > _AT_ONCE:
                    raise
        return self._ask_over(self._open(job.to, job.deadline), job, bare)

    def _ask_over(self, link: Link, job: Job, bare: bool) -> Reply:
        carriers = self._member.carriers
        with self._lock:
            bare = bare or job.to in self._bare
        with self._links.dropped_on_failure(link), self._asking_over(link, job):
            if carriers is not None and link.carrier is None and not bare and _wants_bytes(job):
                # Half the time: if it cannot be built, the other half is for the model to come without.
                by = (time.monotonic() + self._soon(job.deadline)) / 2
                link.ask_for_carrier(carriers, next(self._numbers), by)
            frame = link.ask(job.request, next(self._numbers), job.deadline, job.payload, job.brought)
        self._links.keep(job.to, link)
        return cast(Reply, frame.message)

    @contextlib.contextmanager
    def _asking_over(self, link: Link | LoopbackRequest, job: Job) -> Iterator[None]:
        """While a request is asked over ``link``, which is of no more use if it is cancelled: CancelledError."""
        with self._lock:
            if job.cancelled:
                raise self._given_up(job)
            job.link = link
        try:
            yield
        finally:
            with self._lock:
                job.link = None
        if job.cancelled:  # who has cancelled it may still be about to end the link
            raise self._given_up(job)

    def _open(self, to: int, deadline: float) -> Link:
        """A new connection to peer ``to``, both sides having said who they are."""
        member, deadline = self._member, self._soon(deadline)
        link = self._links.add(member.transport.connect(member.addresses[to], deadline))
        they = self._greet(link, to, deadline)
        here = self._meet(they, to)
        with self._links.dropped_on_failure(link):
            local = self._open_local(they, to, link, deadline) if here else None
        if local is not None:
            self._links.drop(link)
            return local
        if self._only_memory:
            self._links.drop(link)
            raise UsageError(f"no memory can be shared with {member.names[to]}, as --transport shm wants: use auto")
        return link

    def _meet(self, they: Welcome, to: int) -> bool:
        """Peer ``to`` has answered; whether it is on this machine, as far as is known.

        What was found of a process holds no more once another has taken its place.
        """
        with self._lock:
            if self._met.get(to) != they.local:
                self._met[to] = they.local
                self._apart.discard(to)
                self._bare.discard(to)
            machine = self._member.machine
            return machine != "" and they.machine == machine and to not in self._apart

    def _soon(self, deadline: float) -> float:
        """When a handshake must be over."""
        return min(deadline, time.monotonic() + self._member.timeout)

    def _open_local(self, they: Welcome, to: int, link: Link, deadline: float) -> Link | None:
        """The same over a Unix socket, to a peer that says it is on this machine; None if it cannot be reached so.

        Args:
            link: to the same peer, by which it is asked whether it is still there.
        """
        try:
            stream = unix.connect(Address(they.local, 0), deadline)
        except OutOfReachError as error:
            link.ask(DescribeRequest(), next(self._numbers), deadline)  # raises if it has just ended, name and all
            log.debug("%s is on this machine and cannot share memory: %s", self._member.names[to], error)
            with self._lock:
                self._apart.add(to)
            return None
        local = self._links.add(stream)
        self._greet(local, to, deadline)
        return local

    def _greet(self, link: Link, to: int, deadline: float) -> Welcome:
        member = self._member
        with self._links.dropped_on_failure(link):
            if member.secret is not None:
                handshake.prove(link, member.secret, member.me, member.names[to], deadline)
            they = handshake.greet(link, member.me, to, member.names[to], member.manifest, deadline)
        member.trust.taken_in()
        return they


def _wants_bytes(job: Job) -> bool:
    return job.payload is not None and job.payload.nbytes > 0
