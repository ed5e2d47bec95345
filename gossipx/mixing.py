"""Mixing: how a received model enters one's own.

``x ← x + share · (x_j − x_request)``: with the model as it was when the request went out as base, progress made
meanwhile is kept; for a blocking pull the base is x itself and this is (1 − β)x + βx_j with β = share (Eq. 4, whose
printed sign is a misprint; Algorithm 2, line 5 is β = ½). The arena carries it out.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import ClassVar, final

from gossipx import specs


@dataclass(frozen=True)
class Mixing(abc.ABC):
    """Decides what share of a received model is taken.

    Attributes:
        public: of its difference to what a codec has others have of one's own model, in place of that itself.
    """

    public: ClassVar[bool] = False

    @abc.abstractmethod
    def share(self, own_step: int, their_step: int) -> float:
        """β, from 0 (ignore the received model) to 1 (take it whole).

        Args:
            own_step: iterations that this peer has done.
            their_step: iterations that the received model has seen.
        """


@final
@dataclass(frozen=True)
class Average(Mixing):
    """The same share always; β = ½ is Algorithm 2, line 5."""

    beta: float = 0.5

    def __post_init__(self) -> None:
        _check_share(self.beta)

    def share(self, own_step: int, their_step: int) -> float:
        return self.beta


@final
@dataclass(frozen=True)
class Aged(Mixing):
    """A smaller share of a model that lags behind: β · 2^(−lag / half_life).

    Attributes:
        beta: the share of a model that does not lag.
        half_life: iterations behind at which the share is halved.
    """

    beta: float = 0.5
    half_life: float = 100.0

    def __post_init__(self) -> None:
        _check_share(self.beta)
        if not 0 < self.half_life < math.inf:
            raise ValueError("half_life counts iterations and is a finite number above 0")

    def share(self, own_step: int, their_step: int) -> float:
        return self.beta * math.exp2(-max(0, own_step - their_step) / self.half_life)


@final
@dataclass(frozen=True)
class Choco(Mixing):
    """x_i ← x_i + γ · (x̂_j − x̂_i) with what codecs make of both models (CHOCO-SGD, Algorithm 2).

    x̂_j lags behind x_j where a codec leaves much out, and x̂_i as far behind x_i, so that their difference does not pull
    back. How large γ may be depends on how much the codec keeps.

    Attributes:
        gamma: the share.
    """

    gamma: float = 0.2
    public: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ValueError("gamma is a share, above 0 and up to 1")

    def share(self, own_step: int, their_step: int) -> float:
        return self.gamma


MIXINGS: dict[str, type[Mixing]] = {"average": Average, "aged": Aged, "choco": Choco}


def parse(spec: str) -> Mixing:
    """The mixing that ``spec`` means: ``average:beta=0.5``, ``aged:beta=0.5,half_life=100`` or ``choco:gamma=0.2``."""
    return specs.build(spec, MIXINGS, "mixing")


def _check_share(beta: float) -> None:
    if not 0 <= beta <= 1:
        raise ValueError("beta is a share, from 0 to 1")
