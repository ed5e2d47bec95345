"""The time of an iteration: how it varies between iterations and between peers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from gossipx import specs

MOST = 3
"""Largest sigma: a straggler in a thousand then takes ten thousand times as long as the median."""


def _constant() -> float:
    return 0.0


def _log_normal(sigma: float = 0.3) -> float:
    if not 0 <= sigma <= MOST:
        raise ValueError(f"sigma must be from 0 to {MOST}")
    return sigma


SPREADS: dict[str, Callable[..., float]] = {"constant": _constant, "log-normal": _log_normal}
"""How the time of an iteration varies: constant, or log-normal with the mean of the peer. Each returns the sigma."""


def sigma_from(spec: str) -> float:
    """Return the sigma of the spread that ``spec`` names; 0: all iterations take equally long.

    Raises:
        UsageError: an unknown name or key, or a bad value.
    """
    return specs.build(spec, SPREADS, "spread")


@dataclass(frozen=True)
class StepTimes:
    """The seconds of the iterations of all peers.

    Attributes:
        seconds: mean of an ordinary peer.
        sigma: of the log-normal variation between iterations; 0: none.
        slower: factors of the peers that are slower, by rank.
        delayed: ranks of the peers whose iterations are delayed.
        deviation: each of their iterations takes |N(0, deviation²)| seconds longer (Hybrid Smooth Switch, section 6).
        seed: of all draws.
    """

    seconds: float
    sigma: float
    slower: dict[int, float]
    delayed: frozenset[int]
    deviation: float
    seed: int

    @classmethod
    def drawn(
        cls,
        peers: int,
        seconds: float,
        sigma: float,
        stragglers: tuple[float, float],
        delays: tuple[float, float],
        seed: int,
    ) -> StepTimes:
        """Draw which peers are slower, and which are delayed.

        Args:
            stragglers: share of the slower peers, and their factor.
            delays: share of the delayed peers, and the deviation in seconds.
        """
        rng = random.Random(f"compute {seed}")
        slower = dict.fromkeys(rng.sample(range(peers), round(peers * stragglers[0])), stragglers[1])
        delayed = frozenset(rng.sample(range(peers), round(peers * delays[0])))
        return cls(seconds, sigma, slower, delayed, delays[1], seed)

    def of(self, rank: int) -> Callable[[], float]:
        """Return a function that returns the seconds of the next iteration of a peer."""
        rng = random.Random(f"compute {self.seed} {rank}")
        mean, sigma = self.seconds * self.slower.get(rank, 1.0), self.sigma
        deviation = self.deviation if rank in self.delayed else 0.0

        def seconds() -> float:
            factor = rng.lognormvariate(-(sigma**2) / 2, sigma) if sigma else 1.0  # its mean is 1
            return mean * factor + (abs(rng.gauss(0.0, deviation)) if deviation else 0.0)

        return seconds
