"""A network model: how long a message takes, and whether it arrives.

Every peer has an outgoing and an incoming link, and every site may have a shared uplink in each direction. The
transfers on a link share it, and a transfer moves at the least of its shares::

    rate(f) = min(limit(f), min over links l of f: bandwidth(l) · weight(f, l) / sum of the weights on l)

With equal weights this is exact where all transfers of a link are limited by it, as at a server or at a peer that
serves several pulls; a share that a transfer cannot use is not given to the others. So a change costs O(k) for the k
transfers on the links that it touches, whereas max-min fairness would have to look at all transfers.

TCP shares a link evenly only in the long run. Among transfers of a second one is soon ahead, and a worker that has its
values early sends while others still receive. So a weight is log-normal. Its spread, ``uneven``, was fitted to a
parameter server with three remote workers. With k > 3 transfers on a link a weight is raised to the power of 3/k: we
assume that many transfers are as even as one expects.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

FULL_PACKET = 1448, 1538
"""Bytes of data in a full TCP segment with time stamps, and bytes that it takes on Ethernet: preamble, headers and gap.
A link of 1 Gbit/s therefore carries 117.7 MB/s of models."""

FEW = 3
"""Transfers on a link that share it as unevenly as their weights say; more are more even."""


class Agenda(Protocol):
    """The part of the world that the network uses."""

    now: float

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` at ``time``."""


class NetworkLink:
    """One direction of a network interface or of a site's uplink.

    Args:
        bandwidth: bytes/s.

    Attributes:
        transfers: those under way, in the order of their start.
        carried: bytes that transfers have moved over it until their last change of rate.
        changes: number of transfers that have begun or ended.
    """

    __slots__ = ("_evenness", "_per_weight", "bandwidth", "carried", "changes", "transfers")

    def __init__(self, bandwidth: float):
        self.bandwidth = bandwidth
        self.carried = 0.0
        self.transfers: dict[Transfer, None] = {}
        self.changes = 0
        self._evenness = 1.0
        self._per_weight = bandwidth

    def divide(self) -> None:
        """Divide the bandwidth among the transfers, of which one has begun or ended."""
        self.changes += 1
        if self.transfers:
            self._evenness = min(1.0, FEW / len(self.transfers))
            self._per_weight = self.bandwidth / math.fsum(one.weight**self._evenness for one in self.transfers)

    def share(self, weight: float) -> float:
        """Return the bytes/s of a transfer of this weight, had it no other link."""
        return float(self._per_weight * weight**self._evenness)


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes under way from one peer to another.

    Attributes:
        left: bytes that had not arrived when its rate last changed.
        limit: bytes/s that it has at most.
        since: when its rate last changed.
        arrived: called when its last byte has left the links.
        due: when that is, at this rate.
    """

    left: float
    links: tuple[NetworkLink, ...]
    limit: float
    weight: float
    since: float
    arrived: Callable[[], None]
    rate: float = 0.0
    due: float = math.inf


@dataclass(frozen=True)
class _Cut:
    senders: frozenset[int]
    receivers: frozenset[int]
    start: float
    end: float


@dataclass
class Network:
    """The links between simulated peers. A message without a model takes only the latency.

    Attributes:
        bandwidth: of each link in bytes/s; 125e6 is 1 Gbit/s, as in section VI of Adaptive Gossip.
        delay: latency in one direction, in seconds.
        loss: probability that a message is lost without notice.
        repeat: probability that a message arrives twice.
        jitter: maximum additional delay per message in seconds; messages may overtake each other.
        links: bandwidth of the outgoing and of the incoming link of peers that differ, by rank.
        sites: number of each peer's site, by rank; empty: all are at one.
        far: additional latency between sites, in seconds.
        uplink: bandwidth of each site's connection to the others, in each direction; None: it is no limit.
        uneven: standard deviation of the logarithm of a transfer's weight; 0: transfers share links equally.
        per_message: seconds for which a transfer occupies its slowest link besides its bytes, as the work on each
            message does in some systems.
        lossy: share of lost packets, which limits the rate of each transfer; see :func:`limit_of_loss`.
    """

    bandwidth: float = 125e6
    delay: float = 0.001
    loss: float = 0.0
    repeat: float = 0.0
    jitter: float = 0.0
    links: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    sites: Sequence[int] = ()
    far: float = 0.0
    uplink: float | None = None
    uneven: float = 0.0
    per_message: float = 0.0
    lossy: float = 0.0
    _cuts: list[_Cut] = field(default_factory=list, init=False)
    _links: dict[tuple[str, int], NetworkLink] = field(default_factory=dict, init=False)

    # --- partitions -------------------------------------------------------------------------------

    def cut(
        self, one: Iterable[int], other: Iterable[int], start: float, end: float = float("inf"), one_way: bool = False
    ) -> None:
        """Partition the network from ``start`` to ``end``: nothing passes between the ranks ``one`` and ``other``.

        With ``one_way``, messages from ``other`` to ``one`` still pass.
        """
        a, b = frozenset(one), frozenset(other)
        self._cuts.append(_Cut(a, b, start, end))
        if not one_way:
            self._cuts.append(_Cut(b, a, start, end))

    def passable(self, sender: int, receiver: int, start: float, end: float) -> bool:
        """Whether the path from ``sender`` to ``receiver`` is intact for the whole time from ``start`` to ``end``."""
        return not any(
            sender in cut.senders and receiver in cut.receivers and start < cut.end and end >= cut.start
            for cut in self._cuts
        )

    # --- latency ----------------------------------------------------------------------------------

    def latency(self, sender: int, receiver: int, nbytes: int, now: float, rng: random.Random) -> float:
        """Return the seconds from when the last byte of a message leaves its sender, now, until it arrives."""
        delay = self.delay + self.far if self.far and self._crosses(sender, receiver) else self.delay
        return delay + rng.uniform(0.0, self.jitter) if self.jitter else delay

    def _crosses(self, sender: int, receiver: int) -> bool:
        """Whether two peers are at different sites."""
        return bool(self.sites) and self.sites[sender] != self.sites[receiver]

    def loses(self, sender: int, receiver: int, nbytes: int, now: float, rng: random.Random) -> bool:
        """Return whether a message, whose last byte leaves its sender now, is lost."""
        return self.loss > 0.0 and rng.random() < self.loss

    def repeats(self, rng: random.Random) -> bool:
        """Return whether a message arrives twice."""
        return self.repeat > 0.0 and rng.random() < self.repeat

    # --- transfers --------------------------------------------------------------------------------

    def link(self, kind: str, number: int) -> NetworkLink:
        """Return a link: ``up`` or ``down`` of a rank, ``out`` or ``in`` of a site."""
        found = self._links.get((kind, number))
        if found is None:
            if kind in ("out", "in"):
                assert self.uplink is not None
                bandwidth = self.uplink
            else:
                bandwidth = self.links.get(number, (self.bandwidth, self.bandwidth))[kind == "down"]
            found = self._links[kind, number] = NetworkLink(bandwidth)
        return found

    def carry(
        self,
        sender: int,
        receiver: int,
        nbytes: float,
        agenda: Agenda,
        rng: random.Random,
        arrived: Callable[[], None],
    ) -> Transfer:
        """Start a transfer; ``arrived`` is called when its last byte has left the links."""
        links = [self.link("up", sender), self.link("down", receiver)]
        if self.uplink is not None and self._crosses(sender, receiver):
            links += [self.link("out", self.sites[sender]), self.link("in", self.sites[receiver])]
        far = self.far if self.far and self._crosses(sender, receiver) else 0.0
        limit = limit_of_loss(self.lossy, self.delay + far + self.jitter / 2)
        weight = rng.lognormvariate(0.0, self.uneven) if self.uneven else 1.0
        nbytes += self.per_message * min(link.bandwidth for link in links)
        transfer = Transfer(nbytes, tuple(links), limit, weight, agenda.now, arrived)
        for link in links:
            link.transfers[transfer] = None
        self._share(transfer, agenda)
        return transfer

    def end(self, transfer: Transfer, agenda: Agenda) -> None:
        """End a transfer, complete or not; the others on its links become faster."""
        for link in transfer.links:
            link.transfers.pop(transfer, None)
            link.carried += transfer.rate * (agenda.now - transfer.since)
        self._share(transfer, agenda)

    def under_way(self, rank: int) -> list[Transfer]:
        """Return the transfers from and to a peer."""
        return [transfer for kind in ("up", "down") for transfer in self.link(kind, rank).transfers]

    def _share(self, changed: Transfer, agenda: Agenda) -> None:
        """Set the rates of all transfers on the links of one that began or ended."""
        now = agenda.now
        for link in changed.links:
            link.divide()
        for transfer in {transfer: None for link in changed.links for transfer in link.transfers}:
            rate = min(transfer.limit, *[link.share(transfer.weight) for link in transfer.links])
            if rate == transfer.rate:
                continue
            moved = transfer.rate * (now - transfer.since)
            transfer.left -= moved
            for link in transfer.links:
                link.carried += moved
            transfer.rate, transfer.since = rate, now
            transfer.due = now + max(0.0, transfer.left) / rate
        shared = [link for link in changed.links if len(link.transfers) > (changed in link.transfers)]
        for link in shared or changed.links[:1]:  # a transfer that begins alone on a link is watched on another
            self._watch(link, agenda)

    def _watch(self, link: NetworkLink, agenda: Agenda) -> None:
        """Schedule the first completion on a link, so that a change of rates costs one event for all transfers."""
        if not link.transfers:
            return
        first, changes = min(link.transfers, key=_due), link.changes

        def complete() -> None:
            if link.changes != changes:
                return  # watched anew since then
            if first.due > agenda.now:  # a change of another link has slowed it
                self._watch(link, agenda)
                return
            self.end(first, agenda)
            first.arrived()

        agenda.at(first.due, complete)


_due = operator.attrgetter("due")

PRESETS: dict[str, dict[str, float]] = {
    "10mbit": {"bandwidth": 10e6 / 8, "delay": 1e-3},
    "100mbit": {"bandwidth": 100e6 / 8, "delay": 5e-4},
    "1gbit": {"bandwidth": 1e9 / 8, "delay": 1e-4},
    "10gbit": {"bandwidth": 10e9 / 8, "delay": 5e-5},
    "wan": {"bandwidth": 100e6 / 8, "delay": 2e-2, "jitter": 2e-3, "loss": 1e-4},
}
"""Bandwidth in bytes/s, latency and jitter in seconds, and share of lost packets: switched Ethernet, and a line through
the internet."""


def limit_of_loss(loss: float, delay: float) -> float:
    """Return the bytes/s of one TCP connection on a path that loses packets (Mathis et al. 1997, Eq. 3: C = √(3/2)).

    Args:
        loss: share of the packets that are lost.
        delay: latency in one direction, in seconds.
    """
    if not loss or not delay:
        return math.inf
    return FULL_PACKET[0] / (2 * delay) * math.sqrt(1.5 / loss)
