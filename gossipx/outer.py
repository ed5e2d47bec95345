"""Outer optimizers: what happens across exchanges, such as momentum.

Between two exchanges the optimizer of a peer moves its model far. An outer optimizer takes that whole move as one step
of a slower optimization, and accelerates it. In the formulas y_t is the peer's own model as exchange t begins, and x̄
what the exchange alone would make of it: y_t + β (y_j − y_t) for a pull or a pair, the mean of all models for a wave.
The peer's new model is what the outer optimizer makes of x̄, plus the steps that the peer has made during the exchange.

A rule is pure: it depends on y_t, x̄ and the vectors that it kept, and it is called only when an exchange completes. An
exchange that fails, or is skipped, or brings NaN, leaves no trace in it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from gossipx import specs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Outer(abc.ABC):
    """A rule that is applied to the result of each exchange of one peer.

    Attributes:
        vectors: number of vectors of the model's size that it keeps between exchanges.
        needs_common_start: whether it begins with the model that all peers start from, rather than with its first
            exchange.
        waves_only: whether it needs the mean of all models.
    """

    vectors: ClassVar[int]
    needs_common_start: ClassVar[bool] = False
    waves_only: ClassVar[bool] = False

    @abc.abstractmethod
    def begin(self, own: Tensor, mixed: Tensor, kept: Sequence[Tensor]) -> None:
        """Set the kept vectors, which hold no values yet, at the first exchange after a start; ``mixed`` stays.

        Args:
            own: y_t, or the common initial model.
            mixed: x̄, or the common initial model.
            kept: :attr:`vectors` vectors of the same length.
        """

    @abc.abstractmethod
    def step(self, own: Tensor, mixed: Tensor, kept: Sequence[Tensor]) -> None:
        """Replace x̄ in ``mixed`` by the result of this exchange, and update the kept vectors, all in place.

        Rules work element by element: they are called with pieces of the vectors.
        """


@final
@dataclass(frozen=True)
class Momentum(Outer):
    """Momentum across exchanges: x ← x̄ + γ (y_t − y_{t−1}).

    This is GASLoC's update (Cagnasso, Belilovsky, Oyallon: Unifying Local Communications and Local Updates for LLM
    Pretraining, arXiv:2606.11081, 2026), θ_{t+1} = y_t − α Λ y_t + γ (y_t − y_{t−1}), where Λ is the Laplacian of the
    graph of exchanges and y_t − α Λ y_t is x̄. It accelerates both training and agreement, and needs no coordinator.

    Attributes:
        gamma: γ, from 0 to below 1.
    """

    gamma: float
    vectors: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_momentum("gamma", self.gamma)

    def begin(self, own: Tensor, mixed: Tensor, kept: Sequence[Tensor]) -> None:
        kept[0].copy_(own)

    def step(self, own: Tensor, mixed: Tensor, kept: Sequence[Tensor]) -> None:
        (before,) = kept
        mixed.add_(own - before, alpha=self.gamma)
        before.copy_(own)


@final
@dataclass(frozen=True)
class Nesterov(Outer):
    """DiLoCo's outer optimizer (Douillard et al., arXiv:2311.08105, Algorithm 1), without a coordinator.

    The outer gradient is Δ = θ − x̄, with θ the result of the wave before, and θ moves by SGD with Nesterov momentum:
    v ← μ v + Δ, θ ← θ − η (Δ + μ v). All peers compute the same, since a wave gives all of them the same x̄. A peer
    that was restarted or joins late begins with θ = x̄ and v = 0; its θ approaches that of the others with each wave.

    Attributes:
        lr: η, the outer learning rate, above 0.
        momentum: μ, from 0 to below 1.
    """

    lr: float = 0.7
    momentum: float = 0.9
    vectors: ClassVar[int] = 2
    needs_common_start: ClassVar[bool] = True
    waves_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.lr <= 10:
            raise ValueError("lr is the outer learning rate, above 0 and up to 10")
        _check_momentum("momentum", self.momentum)

    def begin(self, own: Tensor, mixed: Tensor, kept: Sequence[Tensor]) -> None:
        theta, velocity = kept
        theta.copy_(mixed)
        velocity.zero_()

    def step(self, own: Tensor, mixed: Tensor, kept: Sequence[Tensor]) -> None:
        theta, velocity = kept
        gradient = theta - mixed
        velocity.mul_(self.momentum).add_(gradient)
        theta.add_(gradient.add_(velocity, alpha=self.momentum), alpha=-self.lr)
        mixed.copy_(theta)


def _no_outer() -> None:
    """Return no outer optimizer: the result of an exchange is the peer's new model, as in the papers."""


OUTERS: dict[str, Callable[..., Outer | None]] = {"none": _no_outer, "momentum": Momentum, "nesterov": Nesterov}


def outer_from(spec: str) -> Outer | None:
    """Return the outer optimizer of a spec: ``momentum:0.6``, ``nesterov:lr=0.7,momentum=0.9``; None for ``none``."""
    return specs.build(spec, OUTERS, "outer optimizer")


def _check_momentum(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} is a momentum, from 0 to below 1")
