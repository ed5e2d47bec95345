"""A network model: how long a message takes, and whether it arrives."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Delivery:
    """The delivery of one message.

    Attributes:
        left: when its last byte leaves the sender, in seconds of virtual time.
        arrives: when its last byte arrives.
        lost: whether it never arrives.
    """

    left: float
    arrives: float
    lost: bool


@dataclass(frozen=True)
class _Cut:
    senders: frozenset[int]
    receivers: frozenset[int]
    start: float
    end: float


@dataclass
class Network:
    """The links between simulated peers.

    Every peer has one outgoing and one incoming link. Models are queued: each link carries one at a time, in the order
    in which they were sent; an aborted transfer keeps its time slot. A message without a model takes only the delay.

    Attributes:
        bandwidth: of each link in bytes/s; 125e6 is 1 Gbit/s, as in section VI of Adaptive Gossip.
        delay: propagation delay in seconds.
        loss: probability that a message is lost without notice.
        repeat: probability that a message arrives twice.
        jitter: maximum additional delay per message in seconds; messages may overtake each other.
    """

    bandwidth: float = 125e6
    delay: float = 0.001
    loss: float = 0.0
    repeat: float = 0.0
    jitter: float = 0.0
    _cuts: list[_Cut] = field(default_factory=list, init=False)
    _out_free: dict[int, float] = field(default_factory=dict, init=False)
    _in_free: dict[int, float] = field(default_factory=dict, init=False)

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

    def send(self, sender: int, receiver: int, nbytes: int, now: float, rng: random.Random) -> Delivery:
        """Send a message now and return its delivery.

        Args:
            nbytes: size of the model in it; 0: no model.
        """
        left = now
        if nbytes:
            begins = max(now, self._out_free.get(sender, 0.0), self._in_free.get(receiver, 0.0))
            left = begins + nbytes / self.bandwidth
            self._out_free[sender] = self._in_free[receiver] = left
        late = rng.uniform(0.0, self.jitter) if self.jitter else 0.0
        return Delivery(left, left + self.delay + late, rng.random() < self.loss)

    def repeats(self, delivery: Delivery, rng: random.Random) -> list[Delivery]:
        """Return the delivery, and a second one if the message arrives twice."""
        if not self.repeat or rng.random() >= self.repeat:
            return [delivery]
        return [delivery, Delivery(delivery.left, delivery.arrives + rng.uniform(0.0, self.jitter), lost=False)]
