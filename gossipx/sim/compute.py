"""The time of an iteration: how it varies between iterations and between peers."""

from __future__ import annotations

import abc
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gossipx import specs
from gossipx.errors import UsageError
from gossipx.specs import texts

LEAST = 1e-2
"""An iteration takes at least this share of the mean: a normal distribution also has negative values."""
MOST = 3
"""Largest sigma: a straggler in a thousand then takes ten thousand times as long as the median."""


@dataclass(frozen=True)
class Spread(abc.ABC):
    """How the time of an iteration varies, as a factor on its mean."""

    @abc.abstractmethod
    def factors(self, rng: random.Random) -> Callable[[], float]:
        """Return a function that returns the factor of the next iteration of a peer."""


@final
@dataclass(frozen=True)
class Constant(Spread):
    """``constant``: all iterations take equally long."""

    def factors(self, rng: random.Random) -> Callable[[], float]:
        return lambda: 1.0


@final
@dataclass(frozen=True)
class Normal(Spread):
    """``normal:deviation``: normally distributed, with a standard deviation as a share of the mean."""

    deviation: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.deviation <= 1:
            raise ValueError("deviation is a share of the mean, from 0 to 1")

    def factors(self, rng: random.Random) -> Callable[[], float]:
        return lambda: max(LEAST, rng.gauss(1.0, self.deviation))


@final
@dataclass(frozen=True)
class LogNormal(Spread):
    """``log-normal:sigma``: log-normally distributed with mean 1."""

    sigma: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.sigma <= MOST:
            raise ValueError(f"sigma must be from 0 to {MOST}")

    def factors(self, rng: random.Random) -> Callable[[], float]:
        return lambda: rng.lognormvariate(-(self.sigma**2) / 2, self.sigma)


@final
@dataclass(frozen=True)
class TraceSpread(Spread):
    """``trace:file``: the seconds of measured iterations, a number per line, in turn; each peer begins elsewhere."""

    file: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "file", str(Path(self.file).absolute()))  # it is read later

    @property
    def mean(self) -> float:
        """Mean of the measured seconds."""
        seconds = _read(Path(self.file))
        return math.fsum(seconds) / len(seconds)

    def factors(self, rng: random.Random) -> Callable[[], float]:
        seconds, mean = _read(Path(self.file)), self.mean
        at = rng.randrange(len(seconds))

        def factor() -> float:
            nonlocal at
            at = (at + 1) % len(seconds)
            return seconds[at] / mean

        return factor


SPREADS: dict[str, type[Spread]] = {
    "constant": Constant,
    "normal": Normal,
    "log-normal": LogNormal,
    "trace": TraceSpread,
}


def parse(spec: str) -> Spread:
    """Return the spread that ``spec`` names.

    Raises:
        UsageError: an unknown name or key, or a bad value.
    """
    return specs.build(spec, SPREADS, "spread")


@dataclass(frozen=True)
class StepTimes:
    """The seconds of the iterations of all peers.

    Attributes:
        seconds: mean of an ordinary peer.
        spread: variation between iterations.
        slower: factors of the peers that are slower, by rank.
        delayed: ranks of the peers whose iterations are delayed.
        deviation: each of their iterations takes |N(0, deviation²)| seconds longer (Hybrid Smooth Switch, section 6).
        seed: of all draws.
    """

    seconds: float
    spread: Spread
    slower: dict[int, float]
    delayed: frozenset[int]
    deviation: float
    seed: int

    @classmethod
    def drawn(
        cls,
        peers: int,
        seconds: float,
        spread: Spread,
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
        return cls(seconds, spread, slower, delayed, delays[1], seed)

    def of(self, rank: int) -> Callable[[], float]:
        """Return a function that returns the seconds of the next iteration of a peer."""
        rng = random.Random(f"compute {self.seed} {rank}")
        mean, factor = self.seconds * self.slower.get(rank, 1.0), self.spread.factors(rng)
        if rank in self.delayed:
            return lambda: mean * factor() + abs(rng.gauss(0.0, self.deviation))
        return (lambda: mean) if isinstance(self.spread, Constant) else lambda: mean * factor()


@functools.cache
def _read(path: Path) -> list[float]:
    seconds = []
    for number, line in enumerate(texts.read(path, "trace of iterations", 2**19).splitlines(), 1):
        try:
            value = float(line)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise UsageError(f"'{line[:20]}' is not the seconds of an iteration", path, number)
        seconds.append(value)
    if not seconds:
        raise UsageError("the trace of iterations is empty: give seconds, one per line", path)
    return seconds
