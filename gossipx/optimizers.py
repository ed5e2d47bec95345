"""Optimizers that torch does not have: LARS.

A loop uses them like torch's, and a parameter server runs them on its tables, by the class that the loop has given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose rate follows the length of each tensor, for large batches.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017, arXiv:1708.03888), Algorithm 1::

        λ = η ‖w‖ / (‖g‖ + β ‖w‖);  v ← m v + γ λ (g + β w);  w ← w − v

    A relative step is then about η γ, whatever the gradient's length, so that γ is much larger than SGD's. If w or g is
    zero, λ is η: by the formula a tensor that starts with zeros, such as a bias, would never move.

    Args:
        params: tensors, or groups of tensors.
        lr: γ, at least 0; by default a relative step is a thousandth.
        momentum: m, from 0 to below 1.
        weight_decay: β, at least 0.
        trust: η, above 0; 0.001 in all experiments of the paper.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ):
        if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0 and trust > 0):
            raise ValueError("LARS: lr and weight_decay are at least 0, momentum is below 1, trust is above 0")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter that has a gradient, which stays as it is; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad)
        return loss

    def _update(self, group: dict[str, float], weights: Tensor, gradient: Tensor) -> None:
        decay, state = group["weight_decay"], self.state[weights]
        wide = torch.promote_types(weights.dtype, torch.float32)  # in 16 bits a length is coarse, and may overflow
        length, steepness = (torch.linalg.vector_norm(one, dtype=wide) for one in (weights, gradient))
        ratio = torch.where((length > 0) & (steepness > 0), length / (steepness + decay * length), 1.0)
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(weights, memory_format=torch.preserve_format)
        step = gradient.add(weights, alpha=decay).mul_(ratio * group["trust"])
        weights.sub_(state["velocity"].mul_(group["momentum"]).add_(step, alpha=group["lr"]))
