"""Caffe's six solver types as torch optimizers, which update the weights by Caffe's formulas instead of torch's.

The formulas differ: Caffe's momentum buffer includes the rate, V ← μV + α∇, so that a change of rate leaves earlier
steps unchanged; δ is added outside the root; Adam's bias correction applies to the rate. In the formulas g is the
gradient after decay, α the iteration's rate times ``lr_mult``, μ ``momentum``, δ ``delta`` and W the weights. All
operations are elementwise.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEFAULTS: dict[str, float] = {
    "lr": 0.0,
    "momentum": 0.0,
    "momentum2": 0.999,
    "rms_decay": 0.99,
    "delta": 1e-8,
    "weight_decay": 0.0,
    "l1": 0.0,
    "lr_mult": 1.0,
    "decay_mult": 1.0,
    "iteration": 0.0,
}
"""Settings of a parameter group, with Caffe's names and defaults. All are numbers, because a worker sends them to the
parameter server with each gradient. ``lr`` is the iteration's rate; ``l1`` is nonzero for L1 decay."""


@dataclass(frozen=True)
class _ParameterStep:
    """One step of a parameter: its group's settings, weights, gradient after decay, and histories."""

    group: dict[str, float]
    weights: Tensor
    gradient: Tensor
    state: dict[str, Tensor]

    @property
    def rate(self) -> float:
        return self.group["lr"] * self.group["lr_mult"]

    def history(self, name: str) -> Tensor:
        """Return a history, which begins as zeros."""
        if name not in self.state:
            self.state[name] = torch.zeros_like(self.weights, memory_format=torch.preserve_format)
        return self.state[name]


class CaffeOptimizer(torch.optim.Optimizer):
    """One of Caffe's solver types.

    Args:
        params: tensors, or groups of tensors.
        settings: defaults for groups without their own: ``lr``, ``lr_mult``, ``momentum``, ``weight_decay`` and others
            of a solver file; ``l1``: L1 decay; ``iteration``: for Adam, from 0.

    Raises:
        TypeError: unknown settings.
    """

    def __init__(self, params: Iterable[Any], **settings: float):
        if unknown := sorted(settings.keys() - DEFAULTS.keys()):
            raise TypeError(f"unknown settings of Caffe's solvers: {', '.join(unknown)}")
        super().__init__(params, {**DEFAULTS, **settings})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient. Regularization does not change the gradient itself."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = _regularized(group, parameter, parameter.grad)
                    self._update(_ParameterStep(group, parameter, gradient, self.state[parameter]))

    @abstractmethod
    def _update(self, step: _ParameterStep) -> None:
        """Update the weights and the histories of one parameter."""


def _regularized(group: dict[str, float], weights: Tensor, gradient: Tensor) -> Tensor:
    decay = group["weight_decay"] * group["decay_mult"]
    if not decay:
        return gradient
    return gradient.add(torch.sign(weights) if group["l1"] else weights, alpha=decay)


class SGD(CaffeOptimizer):
    """V ← μV + αg; W ← W − V."""

    def _update(self, step: _ParameterStep) -> None:
        step.weights.sub_(step.history("history").mul_(step.group["momentum"]).add_(step.gradient, alpha=step.rate))


class CaffeNesterov(CaffeOptimizer):
    """V' ← μV + αg; W ← W − ((1 + μ)V' − μV)."""

    def _update(self, step: _ParameterStep) -> None:
        momentum, history = step.group["momentum"], step.history("history")
        back = history * -momentum
        history.mul_(momentum).add_(step.gradient, alpha=step.rate)
        step.weights.sub_(back.add_(history, alpha=1 + momentum))


class AdaGrad(CaffeOptimizer):
    """H ← H + g²; W ← W − αg / (√H + δ)."""

    def _update(self, step: _ParameterStep) -> None:
        history = step.history("history").addcmul_(step.gradient, step.gradient)
        step.weights.addcdiv_(step.gradient, history.sqrt().add_(step.group["delta"]), value=-step.rate)


class RMSProp(CaffeOptimizer):
    """H ← ρH + (1 − ρ)g², where ρ is ``rms_decay``; W ← W − αg / (√H + δ)."""

    def _update(self, step: _ParameterStep) -> None:
        decay = step.group["rms_decay"]
        history = step.history("history").mul_(decay).addcmul_(step.gradient, step.gradient, value=1 - decay)
        step.weights.addcdiv_(step.gradient, history.sqrt().add_(step.group["delta"]), value=-step.rate)


class AdaDelta(CaffeOptimizer):
    """H ← μH + (1 − μ)g²; u = g·√((U + δ) / (H + δ)); U ← μU + (1 − μ)u²; W ← W − αu."""

    def _update(self, step: _ParameterStep) -> None:
        momentum, delta = step.group["momentum"], step.group["delta"]
        updates = step.history("updates")
        history = step.history("history")
        history.mul_(momentum).addcmul_(step.gradient, step.gradient, value=1 - momentum)
        change = updates.add(delta).div_(history + delta).sqrt_().mul_(step.gradient)
        updates.mul_(momentum).addcmul_(change, change, value=1 - momentum)
        step.weights.sub_(change, alpha=step.rate)


class Adam(CaffeOptimizer):
    """m ← β₁m + (1 − β₁)g; v ← β₂v + (1 − β₂)g²; W ← W − α·√(1 − β₂ᵗ)/(1 − β₁ᵗ) · m / (√v + δ).

    β₁ is ``momentum``, β₂ is ``momentum2``, and t is the iteration's number, from 1.
    """

    def _update(self, step: _ParameterStep) -> None:
        beta1, beta2, t = step.group["momentum"], step.group["momentum2"], int(step.group["iteration"]) + 1
        mean = step.history("history").mul_(beta1).add_(step.gradient, alpha=1 - beta1)
        square = step.history("squares").mul_(beta2).addcmul_(step.gradient, step.gradient, value=1 - beta2)
        corrected = step.rate * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        step.weights.addcdiv_(mean, square.sqrt().add_(step.group["delta"]), value=-corrected)


TYPES: dict[str, type[CaffeOptimizer]] = {
    "SGD": SGD,
    "Nesterov": CaffeNesterov,
    "AdaGrad": AdaGrad,
    "RMSProp": RMSProp,
    "AdaDelta": AdaDelta,
    "Adam": Adam,
}
"""Optimizers by the ``type`` of a solver file."""


def type_of(optimizer: CaffeOptimizer) -> str:
    """Return the ``type`` that a solver file has for an optimizer."""
    return next(name for name, kind in TYPES.items() if kind is type(optimizer))
