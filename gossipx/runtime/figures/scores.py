"""The figures that a script's ``evaluate`` returns for a model."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

log = logging.getLogger("gossipx")

Score = float | Mapping[str, float]
"""An accuracy from 0 to 1, or figures by name, such as ``accuracy`` and ``loss``."""
Evaluate = Callable[[nn.Module], Score]
"""Evaluates a model."""


def as_float(value: Any) -> float:
    """Return a number, or a tensor of one element, as a float; torch warns of one that requires a gradient."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def scores(result: Any) -> dict[str, float]:
    """Return the finite figures of what ``evaluate`` has returned.

    Anything else is left out and logged: an error would lose a completed training.
    """
    named = result if isinstance(result, Mapping) else {"accuracy": result}
    found: dict[str, float] = {}
    for name, value in named.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_]+", name):
            log.warning("evaluate returned a figure named %r: use letters, digits and _, such as 'loss'", name)
            continue
        try:
            number = as_float(value)
        except (TypeError, ValueError):
            log.warning(
                "evaluate returned a %s as %s: it must return an accuracy from 0 to 1, or numbers by name, such as"
                " {'loss': 1.5}",
                type(value).__name__,
                name,
            )
            continue
        if math.isfinite(number):
            found[name] = number
    return found
