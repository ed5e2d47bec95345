"""Virtual time: a clock, a heap of what is to happen, and faults as inputs. Nothing is random but by the seed."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gossipx.protocol.events import ChangeServers, Fault, SwitchSync
from gossipx.sim.network import Network
from gossipx.sim.peer import SimPeer
from gossipx.sim.requests import SimRequests

EVENTS = 10_000_000
"""More events than this in one run mean that it goes round in circles: a run of 100 peers has about 100,000."""


class Entry(NamedTuple):
    """One line of the log: at ``time`` (virtual seconds), the peer ``rank`` does or meets ``what``."""

    time: float
    rank: int
    what: str


class World:
    """Peers, a network between them, and a clock that jumps from event to event.

    Args:
        seed: of everything that is random here; two runs of one seed give equal logs.
        network: see :class:`Network`.

    Attributes:
        now: virtual seconds.
        peers: by rank, the latest incarnation of each that has started.
        log: what happened, in order.
        fired: how often each kind of fault struck: ``lost``, ``cut``, ``broken`` (transfers that the sender's end
            broke off), ``repeated``, ``crash``, ``pause``, ``restart``, ``poison``.
    """

    def __init__(self, seed: int, network: Network | None = None):
        self.now = 0.0
        self.network = network or Network()
        self.peers: dict[int, SimPeer] = {}
        self.log: list[Entry] = []
        self.fired: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._makers: dict[int, Callable[[int], SimPeer]] = {}
        self._incarnations: Counter[int] = Counter()
        self._to_start = 0

    # --- a run --------------------------------------------------------------------------------------

    def start(self, rank: int, make: Callable[[int], SimPeer], at: float = 0.0) -> None:
        """Start the peer that ``make(incarnation)`` makes, with a role of this rank, at ``at``; incarnations from 0."""
        self._makers[rank] = make
        self._to_start += 1
        self.at(at, lambda: self._start(rank))

    def run(self, limit: float = math.inf, until: Callable[[], object] = lambda: False) -> bool:
        """Go on until all peers have ended, or ``limit`` virtual seconds, or ``until()`` is true.

        Returns:
            Whether all have ended.

        Raises:
            RuntimeError: the run goes round in circles.
        """
        for _ in range(EVENTS):
            if self.over or until() or not self._heap or self._heap[0][0] > limit:
                return self.over
            self.now, _, action = heapq.heappop(self._heap)
            action()
        raise RuntimeError(f"{EVENTS} events and no end: virtual time stands at {self.now:g} s")

    @property
    def over(self) -> bool:
        """Whether every peer has ended or crashed, and none is still to start."""
        return not self._to_start and all(peer.down_since is not None for peer in self.peers.values())

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do ``action`` at ``time``, or now if that is past; what falls on one moment keeps its order."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._numbers), action))

    def note(self, rank: int, what: str) -> None:
        """Add a line to the log."""
        self.log.append(Entry(self.now, rank, what))

    def lines(self, rank: int, what: str = "") -> list[str]:
        """What the log says of ``rank``, the lines that begin with ``what``."""
        return [entry.what for entry in self.log if entry.rank == rank and entry.what.startswith(what)]

    # --- faults -------------------------------------------------------------------------------------

    def crash(self, rank: int, at: float) -> None:
        """Kill -9 at ``at``: it decides nothing more, and of a model that it was sending nothing arrives."""
        self.at(at, lambda: self._crash(rank))

    def restart(self, rank: int, at: float) -> None:
        """Start it again, with a fresh role and a fresh module; what still ran of it is killed."""
        self._to_start += 1

        def again() -> None:
            self.fired["restart"] += 1
            self._crash(rank)
            self._start(rank)

        self.at(at, again)

    def pause(self, rank: int, start: float, end: float) -> None:
        """SIGSTOP at ``start``, SIGCONT at ``end``: it sees and does nothing between; messages wait for it."""

        def stop() -> None:
            self.fired["pause"] += 1
            self.peers[rank].paused_until = end
            self.note(rank, "is paused")

        self.at(start, stop)

    def poison(self, rank: int, start: float, end: float = math.inf) -> None:
        """Every model that ``rank`` gives from ``start`` to ``end`` holds a NaN; its own weights stay as they are."""

        def change(poisoned: bool) -> Callable[[], None]:
            return lambda: setattr(self.peers[rank], "poisoned", poisoned)

        self.at(start, change(True))
        if end < math.inf:
            self.at(end, change(False))

    def switch_sync(self, rank: int, at: float, sync: str, shard: int | None = None, apply: str = "") -> None:
        """Somebody asks peer ``rank`` at ``at`` that shards go over to another sync model."""
        self.at(at, lambda: self.peers[rank].tell(SwitchSync(0, shard, sync, apply)))

    def change_servers(self, rank: int, at: float, servers: Sequence[int]) -> None:
        """Somebody asks peer ``rank`` at ``at`` that other peers hold the shards."""
        self.at(at, lambda: self.peers[rank].tell(ChangeServers(0, tuple(servers))))

    def leave(self, rank: int, at: float) -> None:
        """SIGTERM at ``at``: it finishes its step and leaves."""
        self.at(at, lambda: self.peers[rank].ask_to_leave())

    # --- for peers ----------------------------------------------------------------------------------

    def carry(self, sender: SimRequests, to: int, nbytes: int, deliver: Callable[[], None]) -> None:
        """Take a message to ``to``: ``deliver`` is called when its last byte is there, if ever."""
        sent = self.now
        if to == sender.rank:
            self.at(sent, deliver)
            return
        journey = self.network.send(sender.rank, to, nbytes, sent, self._rng)
        if journey.lost:
            self.fired["lost"] += 1
            return

        def arrive() -> None:
            if sender.down_since is not None and sender.down_since < journey.left:
                self.fired["broken"] += 1
            elif not self.network.passable(sender.rank, to, sent, self.now):
                self.fired["cut"] += 1
            else:
                deliver()

        times = self.network.repeats(journey, self._rng)
        if len(times) > 1:
            self.fired["repeated"] += 1
        for one in times:
            self.at(one.arrives, arrive)

    def end(self, peer: SimRequests, what: str) -> None:
        """``peer`` is no more: its connections close, and whoever waits for its answer hears of that."""
        if peer.down_since is not None:
            return
        peer.down_since = self.now
        self.note(peer.rank, what)
        for other in self.peers.values():
            for ticket in other.waiting_for(peer.rank):
                self.refuse(other, ticket, peer.rank)

    def refuse(self, requester: SimRequests, ticket: int, by: int) -> None:
        """Tell ``requester``, one delay from now, that nothing answers at the address of ``by``."""

        def hear() -> None:
            if self.network.passable(by, requester.rank, self.now, self.now):
                requester.fail(ticket, Fault.UNREACHABLE)

        self.at(self.now + self.network.delay, hear)

    def _start(self, rank: int) -> None:
        self._to_start -= 1
        self.peers[rank] = self._makers[rank](self._incarnations[rank])
        self._incarnations[rank] += 1
        self.note(rank, "starts")
        self.peers[rank].begin(self)

    def _crash(self, rank: int) -> None:
        if self.peers[rank].down_since is None:
            self.fired["crash"] += 1
            self.end(self.peers[rank], "crashes")
