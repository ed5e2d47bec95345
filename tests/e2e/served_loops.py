"""Torch training loops with a parameter server of one peer, and the same loops without gossipx as their reference.

With one worker under bsp the server makes the same steps as the loop's own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gossipx.runtime.training.peer import Peer

STEPS = 6
EACH_ALONE = {"placement": "range", "bucket": 0}  # one bucket per table, with the same numbers


class Join(Protocol):
    """Joins a run with a single peer."""

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> Peer: ...


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)


def batch(step: int, n: int = 8) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


Step = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, batch(step)).backward()
    optimizer.step()


def with_zeros(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Make a step as servers do: a missing gradient counts as zeros."""
    optimizer.zero_grad()
    loss_of(model, batch(step)).backward()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, steps: int = STEPS) -> nn.Module:
    for number in range(steps):
        step(model, optimizer, number)
    return model


def same(model: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), two.detach(), **(tolerance or {"rtol": 1e-6, "atol": 1e-7}))


def served(join: Join, model: nn.Module, step: Step, steps: int = STEPS, **settings: Any) -> nn.Module:
    """Train ``model`` for a number of steps with a server, and return it."""
    with join(model, optimizer := sgd(model), **settings):
        return loop(model, optimizer, step, steps)
