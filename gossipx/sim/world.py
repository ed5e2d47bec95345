"""The simulated world: a virtual clock, a heap of scheduled actions, and methods that inject faults.

All randomness comes from one seed.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from gossipx.protocol.effects import ReportEntry
from gossipx.protocol.events import AskEntry, ChangeServers, Event, Fault, SwitchSync
from gossipx.sim.base import BasePeer
from gossipx.sim.endpoint import Endpoint, Open
from gossipx.sim.network import Network, Transfer

Peer = TypeVar("Peer", bound=BasePeer)
ASK_AGAIN = 1.0
"""Virtual seconds after which a process that was not admitted asks again."""
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
            transfer), ``repeated``, ``crash``, ``pause``, ``restart``, ``poison``.
    """

    def __init__(self, seed: int, network: Network | None = None):
        self.now = 0.0
        self.network = network or Network()
        self.peers: dict[int, Peer] = {}
        self.log: list[Entry] = []
        self.warnings: dict[str, Warned] = {}
        self.fired: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None], BasePeer | None]] = []
        self._numbers = itertools.count()
        self._makers: dict[int, Callable[[int], Peer]] = {}
        self._incarnations: Counter[int] = Counter()
        self._to_start = 0
        self._running = 0
        self._awaiting: defaultdict[int, dict[Open, None]] = defaultdict(dict)

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

    def at(self, time: float, action: Callable[[], None], peer: BasePeer | None = None) -> None:
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

    def lines(self, rank: int, what: str = "") -> list[str]:
        """Return the log lines of ``rank`` that begin with ``what``."""
        return [entry.what for entry in self.log if entry.rank == rank and entry.what.startswith(what)]

    def join(self, name: str, contacts: Sequence[int], make: Callable[[ReportEntry], Peer], at: float) -> None:
        """From ``at`` on a process asks peers in turn to admit it, and then starts as a peer; ``make`` returns it.

        Args:
            contacts: ranks to ask; a peer that another one names is asked next.
        """
        self._to_start += 1

        def ask() -> None:
            asked = list(contacts)
            for rank in asked:
                peer = self.peers.get(rank)
                if peer is None or peer.down_since is not None:
                    continue
                self._tell(rank, AskEntry(0, name, name, 29_400, name))
                entry = peer.entries.pop()
                if entry.refusal:
                    self._to_start -= 1
                    self.note(rank, f"does not admit {name}: {entry.refusal}")
                    return
                if entry.rank is not None:
                    self.note(rank, f"admits {name} as {entry.rank}")
                    self._makers[entry.rank] = functools.partial(lambda granted, incarnation: make(granted), entry)
                    self._start(entry.rank)
                    return
                if entry.elsewhere is not None and entry.elsewhere not in asked:
                    asked.append(entry.elsewhere)
            self.at(self.now + ASK_AGAIN, ask)

        self.at(at, ask)

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

    def poison(self, rank: int, start: float, end: float = math.inf) -> None:
        """Put a NaN into every model that ``rank`` sends from ``start`` to ``end``; its own weights are unchanged."""

        def change(poisoned: bool) -> Callable[[], None]:
            return lambda: setattr(self.peers[rank], "poisoned", poisoned)

        self.at(start, change(True))
        if end < math.inf:
            self.at(end, change(False))

    def switch_sync(
        self, rank: int, at: float, sync: str, shard: int | None = None, apply: str = "", pulls: str = ""
    ) -> None:
        """At ``at``, request on peer ``rank`` that a shard, or all (None), switch to another sync model."""
        self.at(at, lambda: self._tell(rank, SwitchSync(0, shard, sync, apply, pulls)))

    def change_servers(self, rank: int, at: float, servers: Sequence[int]) -> None:
        """At ``at``, request on peer ``rank`` that the shards move to other servers."""
        self.at(at, lambda: self._tell(rank, ChangeServers(0, tuple(servers))))

    def _tell(self, rank: int, event: Event) -> None:
        peer = self.peers[rank]
        peer.act(lambda: peer.handle(event))

    def leave(self, rank: int, at: float) -> None:
        """Ask the peer to leave at ``at``, as by SIGTERM: it completes its step and leaves."""
        self.at(at, lambda: self.peers[rank].ask_to_leave())

    # --- for peers ----------------------------------------------------------------------------------

    def endpoint(self, rank: int) -> Endpoint | None:
        """Return the endpoint of a peer; None: it does not run."""
        peer = self.peers.get(rank)
        return None if peer is None or peer.down_since is not None else peer.endpoint

    def awaiting(self, rank: int) -> dict[Open, None]:
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

    def end(self, peer: BasePeer, what: str) -> None:
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

    def refuse(self, asked: Open) -> None:
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
