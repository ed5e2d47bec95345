"""float32 master weights of models that are trained in 16 bits.

bfloat16 keeps 8 significant bits, float16 11. The share of a small difference is less than half of the last bit and
would be lost in each mix, so models would stop converging to each other while still apart. Therefore a model's values
are also kept in float32, where differences and averages are computed, and the module gets them rounded.

The optimizer changes the module's tensors, not the masters. The new master is then the tensor's value plus what
rounding had left out of the old master, provided that it rounds to the tensor's value: the optimizer's result is never
altered.

Models of other dtypes need no masters and have no such cost.
"""

from __future__ import annotations

import torch

from gossipx.model import kernels
from gossipx.model.layout import Section


def update(section: Section) -> None:
    """Update the masters of exchanged values from the module's tensors."""
    if section.values is not section.storage:
        cut, end = section.trainable, section.mixed
        kernels.follow(section.storage[:cut], section.values[:cut])
        section.values[cut:end].copy_(section.storage[cut:end])


def write_back(section: Section, whole: bool = False) -> None:
    """Round the masters into the module's tensors: the exchanged values, or all."""
    if section.values is not section.storage:
        end = len(section.storage) if whole else section.mixed
        with torch.no_grad():
            section.storage[:end].copy_(section.values[:end])
