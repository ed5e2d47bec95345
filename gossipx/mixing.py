"""Mixing: how a received model enters the peer's own model.

``x ← x + share · (x_j − x_request)``, where x_request is the peer's model when it sent the request, so that steps since
then are kept. For a blocking pull x_request is x, which gives (1 − β)x + βx_j with β = share (Eq. 4 of the paper, where
the sign is a misprint; Algorithm 2, line 5 has β = ½). This module only computes the share; the parameter arena updates
the weights.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import ClassVar, final

from gossipx import specs


@dataclass(frozen=True)
class Mixing(abc.ABC):
    """A rule for the share β of a received model.

    Attributes:
        uses_public_copies: whether x_request is replaced by the copy of the own model that other peers have after
            decoding, its *public* copy.
    """

    uses_public_copies: ClassVar[bool] = False

    @abc.abstractmethod
    def share(self, own_step: int, their_step: int) -> float:
        """Return β, from 0 (ignore the received model) to 1 (replace the own model).

        Args:
            own_step: iterations that this peer has finished.
            their_step: iterations of the received model.
        """


@final
@dataclass(frozen=True)
class Average(Mixing):
    """A constant share; β = ½ is Algorithm 2, line 5."""

    beta: float = 0.5

    def __post_init__(self) -> None:
        _check_share(self.beta)

    def share(self, own_step: int, their_step: int) -> float:
        return self.beta


@final
@dataclass(frozen=True)
class Aged(Mixing):
    """A smaller share for a model that lags behind: β · 2^(−lag / half_life).

    Attributes:
        beta: the share of a model that does not lag.
        half_life: lag in iterations at which the share is halved.
    """

    beta: float = 0.5
    half_life: float = 100.0

    def __post_init__(self) -> None:
        _check_share(self.beta)
        if not 0 < self.half_life < math.inf:
            raise ValueError("half_life must be a finite number of iterations above 0")

    def share(self, own_step: int, their_step: int) -> float:
        return self.beta * math.exp2(-max(0, own_step - their_step) / self.half_life)


@final
@dataclass(frozen=True)
class Choco(Mixing):
    """x_i ← x_i + γ · (x̂_j − x̂_i), with the decoded copies x̂ of both models (CHOCO-SGD, Algorithm 2).

    With a lossy codec x̂_j lags behind x_j. Since x̂_i lags as far behind x_i, their difference does not pull x_i back.
    A coarser codec needs a smaller γ.

    Attributes:
        gamma: the share γ.
    """

    gamma: float = 0.2
    uses_public_copies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ValueError("gamma is a share, above 0 and up to 1")

    def share(self, own_step: int, their_step: int) -> float:
        return self.gamma


MIXINGS: dict[str, type[Mixing]] = {"average": Average, "aged": Aged, "choco": Choco}


def mixing_from(spec: str) -> Mixing:
    """Return the mixing of a spec: ``average:beta=0.5``, ``aged:beta=0.5,half_life=100`` or ``choco:gamma=0.2``."""
    return specs.build(spec, MIXINGS, "mixing")


def _check_share(beta: float) -> None:
    if not 0 <= beta <= 1:
        raise ValueError("beta is a share, from 0 to 1")
