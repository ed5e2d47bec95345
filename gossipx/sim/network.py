"""A network as a few numbers: how long a message takes, and whether it comes through."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Delivery:
    """One message's way.

    Attributes:
        left: when its last byte has left the sender, in seconds of virtual time.
        arrives: when its last byte is at the receiver.
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
    """Links between in-memory peers.

    Every peer has one link out and one link in. Models queue: one at a time leaves a peer, and one at a time enters it,
    in the order in which they were sent; a transfer that breaks off keeps its place. A message without a model takes
    the delay alone.

    Attributes:
        bandwidth: of each link in each direction, bytes/s; 125e6 is 1 Gbit/s, the network of section VI.
        delay: from a byte's leaving to its arrival, in seconds.
        loss: probability that a message is lost: nothing of it arrives, and nobody is told.
        repeat: probability that a message arrives twice.
        jitter: up to so many seconds more of delay for each message, so that one overtakes another.
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
        """Let nothing pass from ranks ``one`` to ranks ``other``, nor back unless ``one_way``, from start to end."""
        a, b = frozenset(one), frozenset(other)
        self._cuts.append(_Cut(a, b, start, end))
        if not one_way:
            self._cuts.append(_Cut(b, a, start, end))

    def passable(self, sender: int, receiver: int, start: float, end: float) -> bool:
        """Whether nothing is cut from ``sender`` to ``receiver`` in any moment from ``start`` to ``end``."""
        return not any(
            sender in cut.senders and receiver in cut.receivers and start < cut.end and end >= cut.start
            for cut in self._cuts
        )

    def send(self, sender: int, receiver: int, nbytes: int, now: float, rng: random.Random) -> Delivery:
        """A message sets out now; ``nbytes`` of model are in it."""
        left = now
        if nbytes:
            begins = max(now, self._out_free.get(sender, 0.0), self._in_free.get(receiver, 0.0))
            left = begins + nbytes / self.bandwidth
            self._out_free[sender] = self._in_free[receiver] = left
        late = rng.uniform(0.0, self.jitter) if self.jitter else 0.0
        return Delivery(left, left + self.delay + late, rng.random() < self.loss)

    def repeats(self, journey: Delivery, rng: random.Random) -> list[Delivery]:
        """The journey, and another one if this message arrives twice."""
        if not self.repeat or rng.random() >= self.repeat:
            return [journey]
        return [journey, Delivery(journey.left, journey.arrives + rng.uniform(0.0, self.jitter), lost=False)]
