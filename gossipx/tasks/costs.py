"""Published models as data: their tensors, how the computation of an iteration divides among these, and its duration.

A simulation needs no more than these, so that models that are too large to train have no code.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

from gossipx.specs import known_word

_PARAMETERS = 1_418_649_600
"""Parameters of ``transformer-1b``."""
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
    "transformer-1b": 6 * _PARAMETERS * _TOKENS / _FLOPS,
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


@cache
def published() -> dict[str, list[Cost]]:
    """Return the cost of each parameter tensor of each model with its published sizes, in the order of the model."""
    counted: dict[str, list[tuple[str, int, int]]] = {}
    for line in (files("gossipx.tasks") / "published.tsv").read_text("utf-8").splitlines():
        model, tensor, elements, adds = line.split("\t")
        counted.setdefault(model, []).append((tensor, int(elements), int(adds)))
    totals = {model: sum(adds for *_, adds in rows) for model, rows in counted.items()}
    return {model: [Cost(*row, row[2] / totals[model]) for row in rows] for model, rows in counted.items()}


def multiply_adds(name: str) -> list[Cost]:
    """Return the cost of each parameter tensor of a model at its published input size, in the order of the model.

    Convolutions and linear layers use each weight once per output position. For other layers with parameters, such as
    normalisations, two multiply-adds per output are assumed. A layer's cost is its weight's; a bias costs nothing,
    except if it is the layer's only parameter. Computation without parameters, such as pooling and the products of
    attention, is not counted.

    Args:
        name: that of a built-in model, or ``inception-v4``, ``densenet121`` or ``transformer-1b``.

    Raises:
        UsageError: the name is unknown.
    """
    known_word("model", name, published())
    return published()[name]


def published_sizes(name: str) -> list[tuple[str, int]]:
    """Return the name and the number of elements of each parameter tensor, as :func:`multiply_adds`."""
    return [(cost.name, cost.elements) for cost in multiply_adds(name)]
