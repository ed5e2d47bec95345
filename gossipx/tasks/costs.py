"""The computation of a training iteration: how it divides among a model's tensors, and its duration on one worker.

A simulation of a model that is too large to train needs no more than these and the sizes of the tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gossipx.tasks.models import UNTRAINED, published

_TOKENS = 8 * 2048
"""Tokens in a batch of ``transformer-1b`` on one worker: eight sequences; chosen."""
_FLOPS = 137e12
"""Floating-point operations per second that an A100 sustains when it trains a decoder of 1.7 billion parameters:
Narayanan et al. 2021, arXiv:2104.04473, Table 1."""


# The papers used GPUs of the type GTX 1080. Adaptive Communication does not give its batches.
STEP_SECONDS: dict[str, float] = {
    # Adaptive Communication, Figure 6 and Table I: 500 min without communication for 50,000 iterations.
    "alexnet": 0.6,
    # Adaptive Communication, Table II: (450 min − 5000 retrievals of 1.209 s) / 50,000 iterations, where a retrieval
    # takes (450 min − 360 min) / (5000 − 532).
    "googlenet": 0.419,
    # The same for (30 min − 5000 retrievals of 0.0632 s), where a retrieval takes (30 min − 25 min) / (5000 − 250).
    "convnet": 0.0297,
    # Modularized Parameter Server, Table 1.1: 13.5 steps/s with 64 images.
    "resnet110": 1 / 13.5,
    # The same table: 2.92 steps/s with 64 images, of a DenseNet with 2.22 million parameters without its form. The time
    # suits this one: with the multiply-adds per second of inception-v4, its 64 images take 0.32 s.
    "densenet121": 1 / 2.92,
    # The same table: 1.47 steps/s with 32 images.
    "inception-v4": 1 / 1.47,
    # Chosen, about 1 s: 6 operations per parameter and token, forward and backward (Kaplan et al. 2020,
    # arXiv:2001.08361, section 2.1), with the batch and the rate above.
    "transformer-1b": 6 * UNTRAINED["transformer-1b"].parameters * _TOKENS / _FLOPS,
}
"""Seconds of one iteration on one worker without communication, by model: forward and backward pass of a batch."""


class Cost(NamedTuple):
    """The share of one parameter tensor in a model and in its forward pass.

    Attributes:
        name: the tensor, as ``named_parameters`` calls it.
        elements: number of elements.
        multiply_adds: multiplications with an addition in the forward pass of one image or sequence.
        share: of all multiply-adds of the forward pass, 0 to 1.
    """

    name: str
    elements: int
    multiply_adds: int
    share: float


def multiply_adds(name: str) -> list[Cost]:
    """Return the cost of each parameter tensor of a model at its published input size, in the order of the model.

    Convolutions and linear layers use each weight once per output position. For other layers with parameters, such as
    normalisations, two multiply-adds per output are assumed. A layer's cost is its weight's; a bias costs nothing,
    except if it is the layer's only parameter. Computation without parameters, such as pooling and the products of
    attention, is not counted.

    Args:
        name: a key of ``MODELS`` or ``UNTRAINED``.

    Raises:
        UsageError: the name is unknown.
    """
    module, facts = published(name)
    counts: dict[Tensor, int] = dict.fromkeys(module.parameters(), 0)

    def count(layer: nn.Module, given: tuple[Tensor], output: Tensor) -> None:
        first = next(layer.parameters(recurse=False))
        if isinstance(layer, nn.Conv2d | nn.Linear):
            outputs = layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features
            counts[first] += output.numel() // outputs * first.numel()
        else:
            counts[first] += 2 * output.numel()

    for layer in module.modules():
        if next(layer.parameters(recurse=False), None) is not None:
            layer.register_forward_hook(count)
    one = (1, facts.channels, facts.pixels, facts.pixels) if facts.channels else (1, facts.pixels)
    module.eval()(torch.zeros(one, dtype=torch.float32 if facts.channels else torch.int64, device="meta"))
    total = sum(counts.values())
    return [
        Cost(of, parameter.numel(), counts[parameter], counts[parameter] / total)
        for of, parameter in module.named_parameters()
    ]
