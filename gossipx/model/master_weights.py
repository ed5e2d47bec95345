"""float32 masters of models that are trained in 16 bits.

bfloat16 keeps 8 bits of a value, float16 11. A share of a small difference is less than half of the last of them, and
would be lost in each mix: models would stop to come closer while they are still apart. So a model's values are kept in
float32, where differences and averages are formed and added up, and the module has them rounded. The master of a
tensor that the module has changed by itself (the optimizer's step) is what the tensor holds now and what rounding left
out of the master before, as long as that rounds to what the tensor holds: what the optimizer does is never altered.

Models of other dtypes are their own masters, at no cost.
"""

from __future__ import annotations

import torch

from gossipx.model import kernels
from gossipx.model.layout import Section


def take(section: Section) -> None:
    """Bring the masters of what is exchanged up to what the module's tensors hold now."""
    if section.values is not section.storage:
        cut, end = section.trainable, section.mixed
        kernels.follow(section.storage[:cut], section.values[:cut])
        section.values[cut:end].copy_(section.storage[cut:end])


def give(section: Section, whole: bool = False) -> None:
    """Round the masters to what the module's tensors hold: of what is exchanged, or of all."""
    if section.values is not section.storage:
        end = len(section.storage) if whole else section.mixed
        with torch.no_grad():
            section.storage[:end].copy_(section.values[:end])
