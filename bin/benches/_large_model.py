"""A peer of the overlap scenario: a large model whose steps sleep and change few weights instead of computing.

Started by ``gossipx run ... _large_model.py PARAMETERS STEPS SECONDS``.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import gossipx

TENSORS = 16
CHANGED = 1000
"""Number of weights that a step changes: few, so that a step costs its sleep plus gossipx's work."""


class LargeModel(nn.Module):
    """A module of ``parameters`` float32 values in equal tensors."""

    def __init__(self, parameters: int):
        super().__init__()
        self.layers = nn.ParameterList(torch.randn(parameters // TENSORS) for _ in range(TENSORS))


class StandIn(torch.optim.Optimizer):
    """An optimizer whose step sleeps ``seconds``, like a step on a device that uses no CPU."""

    def __init__(self, model: nn.Module, seconds: float):
        super().__init__(model.parameters(), {})
        self._seconds = seconds

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        time.sleep(self._seconds)
        self.param_groups[0]["params"][0][:CHANGED].mul_(0.999)


def main() -> None:
    parameters, steps, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    model = LargeModel(parameters)
    optimizer = StandIn(model, seconds)
    with gossipx.join(model, optimizer) as peer:
        while peer.iteration < steps:
            optimizer.step()


if __name__ == "__main__":
    main()
