"""The simulated world: a virtual clock, a heap of scheduled actions, the requests of its peers, and faults.

All randomness comes from one seed.
"""

from __future__ import annotations

import abc
import functools
import heapq
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from gossipx.protocol.events import Fault
from gossipx.protocol.fields import kind_of
from gossipx.protocol.messages import Reply, Request
from gossipx.sim.network import Network, Transfer

Peer = TypeVar("Peer", bound="Process")
MAX_EVENTS = 10_000_000
"""A run with more events is assumed to loop forever: a run of 100 peers has about 100,000."""


class Entry(NamedTuple):
    """One line of the log: the event ``what`` of the peer ``rank``, at ``time`` in virtual seconds."""

    time: float
    rank: int
    what: str


@dataclass
class Warned:
    """Warnings of peers on one topic.

    Attributes:
        first: the first warning.
        count: number of all.
    """

    first: Entry
    count: int = 0


OnReply = Callable[[Reply | Fault, Any], None]
"""Called once with the reply and its content, or with the fault."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that awaits its reply.

    Attributes:
        sender: the endpoint that sent it.
        to: rank of the receiver.
        done: called with the outcome.
        transfer: its bytes, or those of its reply, while they are under way.
        given_up: called if it ends before its reply is complete; the receiver sets it.
    """

    sender: Endpoint
    to: int
    request: Request
    done: OnReply | None
    transfer: Transfer | None = None
    given_up: Callable[[], None] = lambda: None


@dataclass(slots=True, eq=False)
class _Answer:
    """An answer under way; ``done`` is called once with whether it was delivered."""

    by: Endpoint
    asked: OpenRequest
    reply: Reply
    nbytes: int
    content: Any
    done: Callable[[bool], None] | None
    transfer: Transfer | None = None

    def arrive(self) -> None:
        """Deliver the answer: its last byte is there."""
        self.transfer = None
        self._end(self.asked.sender.replied(self.asked, self.reply, self.nbytes, self.content))

    def abandon(self) -> None:
        """Abandon the answer, unless it has arrived."""
        if self.done is not None:
            if self.transfer is not None:
                self.by.world.stop(self.transfer)
            self._end(False)

    def _end(self, whole: bool) -> None:
        self.content = None  # the deadline's action keeps this object
        done, self.done = self.done, None
        if done is not None:
            self.by.later(self.by.world.now, lambda: done(whole))


class Endpoint:
    """One peer's requests and answers.

    It does in virtual time what :class:`gossipx.comm.CommManager` does over connections: each request ends exactly
    once, by its reply or by a fault, at its deadline at the latest.

    Args:
        process: the peer, in its world.
        received: called with (its sender's endpoint, key, request, content) for each request.

    Attributes:
        bytes_received, bytes_sent: bytes of models and tables, from and to other peers.
    """

    def __init__(self, process: Process, received: Callable[[Endpoint, Hashable, Request, Any], None]):
        self.rank = process.rank
        self.bytes_received = self.bytes_sent = 0
        self.world = process.world
        self.later = process.later
        self._process = process
        self._received = received
        self._open: dict[OpenRequest, None] = {}
        self._keys = itertools.count(1)
        self._requests: dict[Hashable, OpenRequest] = {}  # received, and not answered yet

    # --- requests -----------------------------------------------------------------------------------

    def request(
        self, to: int, request: Request, nbytes: int, content: Any, deadline: float, done: OnReply
    ) -> Callable[[], None]:
        """Send a request; return a function that cancels it.

        Args:
            nbytes: size of what it carries; 0: nothing.
            content: passed to the receiver.
            deadline: in seconds of virtual time.
        """
        asked = OpenRequest(self, to, request, done)
        self._open[asked] = None
        self.world.awaiting(to)[asked] = None
        self.bytes_sent += nbytes if to != self.rank else 0
        asked.transfer = self.world.carry(self, to, nbytes, lambda: self._arrive(asked, nbytes, content))
        self.world.at(deadline, lambda: self.fail(asked, Fault.TIMEOUT))
        return lambda: self.fail(asked, Fault.CANCELLED)

    def _arrive(self, asked: OpenRequest, nbytes: int, content: Any) -> None:
        asked.transfer = None
        other = self.world.endpoint(asked.to)
        if other is None:
            self.world.refuse(asked)
        else:
            other.receive(asked, nbytes, content)

    def fail(self, asked: OpenRequest, fault: Fault) -> None:
        """End a request by a fault, unless it has ended before."""
        if asked.done is not None:
            done = self._close(asked)
            if asked.transfer is not None:
                self.world.stop(asked.transfer)
            asked.given_up()
            self.later(self.world.now, lambda: done(fault, None))

    def replied(self, asked: OpenRequest, reply: Reply, nbytes: int, content: Any) -> bool:
        """Handle a reply whose last byte has arrived. Return False if the request has ended before."""
        if self._process.down_since is not None or asked.done is None:
            return False
        done = self._close(asked)
        self.bytes_received += nbytes if asked.to != self.rank else 0
        done(reply, content)
        return True

    def _close(self, asked: OpenRequest) -> OnReply:
        done, asked.done = asked.done, None
        assert done is not None
        del self._open[asked]
        del self.world.awaiting(asked.to)[asked]
        return done

    @property
    def idle(self) -> bool:
        """Whether no request awaits a reply, and no received one its answer."""
        return not self._open and not self._requests

    # --- answers ------------------------------------------------------------------------------------

    def receive(self, asked: OpenRequest, nbytes: int, content: Any) -> None:
        """Pass a request of another peer on; called when its last byte has arrived."""
        key = next(self._keys)
        self._requests[key] = asked
        self.bytes_received += nbytes if asked.sender is not self else 0
        self._received(asked.sender, key, asked.request, content)

    def answer(
        self, key: Hashable, reply: Reply, nbytes: int, content: Any, deadline: float, done: Callable[[bool], None]
    ) -> None:
        """Answer a received request.

        Args:
            nbytes: size of what the reply carries.
            deadline: time after which an incomplete answer is abandoned.
            done: called once with whether it was delivered.
        """
        asked = self._requests.pop(key)
        # Over a connection another reply is a fault, after which the request is repeated.
        assert isinstance(reply, kind_of(type(asked.request)).answers), f"{reply} does not answer {asked.request}"
        if asked.done is None:  # the requester has given up
            self.later(self.world.now, lambda: done(False))
            return
        answer = _Answer(self, asked, reply, nbytes, content, done)
        self.bytes_sent += nbytes if asked.sender is not self else 0
        answer.transfer = self.world.carry(self, asked.sender.rank, nbytes, answer.arrive)
        asked.given_up = answer.abandon
        self.world.at(deadline, answer.abandon)

    def close(self) -> None:
        """Drop everything: the peer is down."""
        for asked in list(self._open):
            self._close(asked)
            asked.given_up()
        self._requests.clear()


class Process(abc.ABC):
    """A process in the world, which may be paused and may end: a simulated peer.

    Attributes:
        rank: of the peer.
        world: set when it begins.
        endpoint: sends and receives; set when it begins.
        down_since: virtual time at which it ended or crashed; None while it runs.
        paused_until: virtual time until which it does nothing.
        paused_seconds: length of all its pauses so far, with the rest of one in progress.
    """

    world: World[Any]
    endpoint: Endpoint

    def __init__(self, rank: int):
        self.rank = rank
        self.down_since: float | None = None
        self.paused_until = self.paused_seconds = 0.0

    @abc.abstractmethod
    def begin(self, world: World[Any]) -> None:
        """Join the run; called by the world."""

    @abc.abstractmethod
    def act(self, action: Callable[[], None]) -> None:
        """Do something at once, and let training proceed if it may."""

    @abc.abstractmethod
    def ask_to_leave(self) -> None:
        """Leave the run after the current step, as after SIGTERM."""

    def later(self, time: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` at ``time``, or at the end of a pause; drop it if this peer is down by then."""
        self.world.at(time, action, self)

    def due(self, action: Callable[[], None]) -> None:
        """Do a scheduled action, unless this peer is down or paused; called by the world."""
        if self.down_since is not None:
            return
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until, action, self)
        else:
            self.act(action)

    def compute(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after some seconds of computation, which a pause interrupts."""
        ends = self.world.now + seconds
        self.later(ends, functools.partial(self._computed_at, ends, self.paused_seconds, action))

    def _computed_at(self, ends: float, paused: float, action: Callable[[], None]) -> None:
        """Do something if no pause since then interrupted the computation that ends now, or else later."""
        later = ends + (self.paused_seconds - paused)
        if later > self.world.now:
            self.later(later, functools.partial(self._computed_at, later, self.paused_seconds, action))
        else:
            action()

    def note(self, what: str) -> None:
        """Add a line to the log."""
        self.world.note(self.rank, what)

    def warn(self, topic: str, text: str) -> None:
        """Add a line to the log, and to the warnings of the run."""
        self.world.warn(self.rank, topic, text)


class World(Generic[Peer]):
    """Peers, the network between them, and a clock that jumps from event to event.

    Args:
        seed: seed of all randomness; two runs with the same seed have the same log.
        network: the model of the network; None: one with the default settings.

    Attributes:
        now: virtual time in seconds.
        peers: by rank, the latest started incarnation of each peer.
        log: all events so far, in order.
        warnings: what peers have warned of, by topic.
        fired: number of faults that took effect, by kind: ``lost``, ``cut``, ``broken`` (a peer ended during its
            transfer), ``repeated``, ``crash``, ``pause``, ``restart``.
    """

    def __init__(self, seed: int, network: Network | None = None):
        self.now = 0.0
        self.network = network or Network()
        self.peers: dict[int, Peer] = {}
        self.log: list[Entry] = []
        self.warnings: dict[str, Warned] = {}
        self.fired: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None], Process | None]] = []
        self._numbers = itertools.count()
        self._makers: dict[int, Callable[[int], Peer]] = {}
        self._incarnations: Counter[int] = Counter()
        self._to_start = 0
        self._running = 0
        self._awaiting: defaultdict[int, dict[OpenRequest, None]] = defaultdict(dict)

    # --- a run --------------------------------------------------------------------------------------

    def start(self, rank: int, make: Callable[[int], Peer], at: float = 0.0) -> None:
        """Start the peer of this rank at ``at``. ``make`` returns it, given its incarnation, which counts from 0."""
        self._makers[rank] = make
        self._to_start += 1
        self.at(at, lambda: self._start(rank))

    def run(self, limit: float = math.inf, until: Callable[[], object] = lambda: False) -> bool:
        """Run until all peers have ended, the virtual time exceeds ``limit``, or ``until()`` is true.

        Returns:
            Whether all peers have ended.

        Raises:
            RuntimeError: the run had more than :data:`MAX_EVENTS` events.
        """
        for _ in range(MAX_EVENTS):
            if self.over or until() or not self._heap or self._heap[0][0] > limit:
                return self.over
            self._next()
        raise RuntimeError(f"the run has not ended after {MAX_EVENTS} events, at {self.now:g} s of virtual time")

    def advance(self, events: int) -> bool:
        """Handle some events. Return whether any follow; none do if all peers have ended, or wait for nothing."""
        heap = self._heap
        for _ in range(events):
            if not heap or self.over:
                return False
            self._next()
        return True

    def _next(self) -> None:
        self.now, _, action, peer = heapq.heappop(self._heap)
        if peer is None:
            action()
        else:
            peer.due(action)

    @property
    def over(self) -> bool:
        """Whether every peer has ended or crashed, and no start is scheduled."""
        return not self._to_start and not self._running

    def at(self, time: float, action: Callable[[], None], peer: Process | None = None) -> None:
        """Schedule ``action`` at ``time``, or now if that is past. Actions at the same time keep their order.

        Args:
            peer: whose action it is; it is dropped if the peer is down by then, and waits for the end of a pause.
        """
        heapq.heappush(self._heap, (time if time > self.now else self.now, next(self._numbers), action, peer))

    def note(self, rank: int, what: str) -> None:
        """Add a line to the log."""
        self.log.append(Entry(self.now, rank, what))

    def warn(self, rank: int, topic: str, text: str) -> None:
        """Add a line to the log, and a warning on a topic, such as "lost 3", whose number does not count."""
        self.note(rank, text)
        self.warnings.setdefault(topic.rstrip(" 0123456789"), Warned(self.log[-1])).count += 1

    # --- faults -------------------------------------------------------------------------------------

    def crash(self, rank: int, at: float) -> None:
        """Kill the peer at ``at``, as by SIGKILL: it handles no more events, and the models it is sending are lost."""
        self.at(at, lambda: self._crash(rank))

    def restart(self, rank: int, at: float, unless: Callable[[], bool] = lambda: False) -> None:
        """Start the peer again at ``at``, with a new role and module. If it still runs, it is killed first.

        Args:
            unless: called then; it is not started if this returns true.
        """
        self._to_start += 1

        def again() -> None:
            if unless():
                self._to_start -= 1
                return
            self.fired["restart"] += 1
            self._crash(rank)
            self._start(rank)

        self.at(at, again)

    def pause(self, rank: int, start: float, end: float) -> None:
        """Suspend the peer from ``start`` to ``end``, as by SIGSTOP and SIGCONT; messages to it are queued."""

        def stop() -> None:
            self.fired["pause"] += 1
            peer = self.peers[rank]
            peer.paused_seconds += max(0.0, end - max(self.now, peer.paused_until))
            peer.paused_until = max(end, peer.paused_until)
            self.note(rank, "is paused")

        self.at(start, stop)

    def leave(self, rank: int, at: float) -> None:
        """Ask the peer to leave at ``at``, as by SIGTERM: it completes its step and leaves."""
        self.at(at, lambda: self.peers[rank].ask_to_leave())

    # --- for peers ----------------------------------------------------------------------------------

    def endpoint(self, rank: int) -> Endpoint | None:
        """Return the endpoint of a peer; None: it does not run."""
        peer = self.peers.get(rank)
        return None if peer is None or peer.down_since is not None else peer.endpoint

    def awaiting(self, rank: int) -> dict[OpenRequest, None]:
        """Return the requests to a peer that await a reply."""
        return self._awaiting[rank]

    def carry(self, sender: Endpoint, to: int, nbytes: int, deliver: Callable[[], None]) -> Transfer | None:
        """Send a message to ``to``; ``deliver`` is called when its last byte has arrived, unless it is lost.

        Returns:
            The transfer of its bytes, which can be stopped; None: it has none.
        """
        sent, network = self.now, self.network
        if to == sender.rank:
            self.at(sent, deliver)
            return None

        def arrive() -> None:
            if network.passable(sender.rank, to, sent, self.now):
                deliver()
            else:
                self.fired["cut"] += 1

        def leave() -> None:
            if network.loses(sender.rank, to, nbytes, self.now, self._rng):
                self.fired["lost"] += 1
                return
            self.at(self.now + network.latency(sender.rank, to, nbytes, self.now, self._rng), arrive)
            if network.repeats(self._rng):
                self.fired["repeated"] += 1
                self.at(self.now + network.latency(sender.rank, to, nbytes, self.now, self._rng), arrive)

        if nbytes:
            return network.carry(sender.rank, to, nbytes, self, self._rng, leave)
        leave()
        return None

    def stop(self, transfer: Transfer) -> None:
        """Stop a transfer: its connection was closed."""
        self.network.end(transfer, self)

    def end(self, peer: Process, what: str) -> None:
        """End ``peer``: its connections close, and open requests to it fail."""
        if peer.down_since is not None:
            return
        peer.down_since = self.now
        self._running -= 1
        self.note(peer.rank, what)
        peer.endpoint.close()
        for transfer in self.network.under_way(peer.rank):
            self.fired["broken"] += 1
            self.stop(transfer)
        for asked in list(self.awaiting(peer.rank)):
            self.refuse(asked)

    def refuse(self, asked: OpenRequest) -> None:
        """Fail a request as unreachable after one network delay: nothing listens at the receiver's address."""

        def hear() -> None:
            if self.network.passable(asked.to, asked.sender.rank, self.now, self.now):
                asked.sender.fail(asked, Fault.UNREACHABLE)

        self.at(self.now + self.network.delay, hear)

    def _start(self, rank: int) -> None:
        self._to_start -= 1
        self.peers[rank] = self._makers[rank](self._incarnations[rank])
        self._incarnations[rank] += 1
        self._running += 1
        self.note(rank, "starts")
        self.peers[rank].begin(self)

    def _crash(self, rank: int) -> None:
        if self.peers[rank].down_since is None:
            self.fired["crash"] += 1
            self.end(self.peers[rank], "crashes")
