"""Outer optimizers: what happens across exchanges, such as momentum.

Between two exchanges the optimizer of a peer moves its model far. An outer optimizer takes that whole move as one step
of a slower optimization, and accelerates it. A rule is called only when an exchange completes. An exchange that fails,
or is skipped, or brings NaN, leaves no trace in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from gossipx import specs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Momentum:
    """Momentum across exchanges: x ← x̄ + γ (y_t − y_{t−1}).

    Here y_t is the peer's own model as exchange t begins, and x̄ what the exchange alone would make of it:
    y_t + β (y_j − y_t) for a pull or a pair, the mean of all models for a wave. Steps that the peer makes during the
    exchange are added. This is GASLoC's update (Cagnasso, Belilovsky, Oyallon: Unifying Local Communications and Local
    Updates for LLM Pretraining, arXiv:2606.11081, 2026), θ_{t+1} = y_t − α Λ y_t + γ (y_t − y_{t−1}), where Λ is the
    Laplacian of the graph of exchanges and y_t − α Λ y_t is x̄. It accelerates both training and agreement, and needs no
    coordinator.

    Attributes:
        gamma: γ, from 0 to below 1.
    """

    gamma: float

    def __post_init__(self) -> None:
        _check_momentum("gamma", self.gamma)

    def begin(self, own: Tensor, mixed: Tensor, kept: Sequence[Tensor]) -> None:
        """Set the kept vector, which holds no values yet, at the first exchange after a start.

        Args:
            own: y_t.
            mixed: x̄, which stays.
            kept: one vector of the same length.
        """
        kept[0].copy_(own)

    def step(self, own: Tensor, mixed: Tensor, kept: Sequence[Tensor]) -> None:
        """Replace x̄ in ``mixed`` by the result of this exchange, and update the kept vector, all in place.

        It works element by element: it is called with pieces of the vectors.
        """
        (before,) = kept
        mixed.add_(own - before, alpha=self.gamma)
        before.copy_(own)


@dataclass(frozen=True)
class Nesterov:
    """DiLoCo's outer optimizer for waves (Douillard et al., arXiv:2311.08105, Algorithm 1), without a coordinator.

    The reference of the waves moves by SGD with Nesterov momentum; see :mod:`gossipx.compression.wave_coding`. With
    Muon as the optimizer of the peers it is MuLoCo (Thérien et al., arXiv:2505.23725).

    Attributes:
        lr: η, the outer learning rate, above 0.
        momentum: μ, from 0 to below 1.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.lr <= 10:
            raise ValueError("lr is the outer learning rate, above 0 and up to 10")
        _check_momentum("momentum", self.momentum)


Outer: TypeAlias = Momentum | Nesterov


def _no_outer() -> None:
    """Return no outer optimizer: the result of an exchange is the peer's new model, as in the papers."""


OUTERS: dict[str, Callable[..., Outer | None]] = {"none": _no_outer, "momentum": Momentum, "nesterov": Nesterov}


def outer_from(spec: str) -> Outer | None:
    """Return the outer optimizer of a spec: ``momentum:0.6``, ``nesterov:lr=0.7,momentum=0.9``; None for ``none``."""
    return specs.build(spec, OUTERS, "outer optimizer")


def _check_momentum(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} is a momentum, from 0 to below 1")
