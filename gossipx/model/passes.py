"""What is put into training's lane, for one section each: single passes over its values.

Where a section is trained in 16 bits its masters are brought up to the module's tensors before, or given to them after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossipx.model import kernels, master_weights
from gossipx.model.layout import Section, Slot


def copy(section: Section, to: Tensor) -> None:
    """Copy what is exchanged, as it is now."""
    master_weights.take(section)
    kernels.copy(section.values[: section.mixed], to)


def advance(section: Section, before: Tensor, after: Tensor, on_device: bool) -> float | Tensor:
    """Δ_t² of a section, and the copy of its boundary."""
    master_weights.take(section)
    cut, end = section.trainable, section.mixed
    past = before[:cut]
    measure = kernels.advance_on_device if on_device else kernels.advance
    squared = measure(section.values[:cut], past, past if after is before else after[:cut])
    after[cut:].copy_(section.values[cut:end])
    return squared


def sampled(sample: kernels.Sampled, section: Section, on_device: bool) -> float | Tensor:
    """An estimate of Δ_t² of a section. Of masters, the module's own tensors say as much as these would."""
    x = section.storage[: section.trainable]
    return sample.advance_on_device(x) if on_device else sample.advance(x)


def subtract(section: Section, received: Tensor, kept: Tensor | None) -> float:
    """x_j ← x_j − x for trained values; returns the square of its norm. ``kept`` takes a copy of what comes out."""
    cut = section.trainable
    squared = kernels.difference(received[:cut], section.values[:cut], received[:cut])
    if kept is not None:
        kept[:cut].copy_(received[:cut])
    return squared


def commit(section: Section, change: Tensor, share: float, boundary: Tensor | None) -> None:
    """Add a share of what trained values are to change by, and bring buffers closer to those of another model.

    Args:
        change: as :meth:`gossipx.model.arena.ParameterArena.commit` has it.
        boundary: takes a copy of what comes out; None: none is kept.
    """
    cut, end = section.trainable, section.mixed
    values = section.values
    kernels.commit(values[:cut], change[:cut], share, None if boundary is None else boundary[:cut])
    if cut < end:
        own, other = values[cut:end], change[cut:end]
        as_is = (own == other) | ~own.isfinite()
        own.copy_(torch.where(as_is, own, own + share * (other - own)))
        if boundary is not None:
            boundary[cut:].copy_(own)
    master_weights.give(section)


def take_in(section: Section, mean: Tensor, captured: Tensor, boundary: Tensor | None) -> None:
    """Put a mean in place of what went into it; buffers that are finite become the mean's, ``boundary`` a copy."""
    cut, end = section.trainable, section.mixed
    section.values[:cut].sub_(captured[:cut]).add_(mean[:cut])
    own = section.values[cut:end]
    own.copy_(torch.where(own.isfinite(), mean[cut:end], own))
    master_weights.give(section)
    if boundary is not None:
        boundary.copy_(section.values[:end])


def adopt(section: Section, model: Tensor) -> None:
    """Take all values of a model, whole or as it is exchanged."""
    section.values[: len(model)].copy_(model)
    master_weights.give(section, whole=len(model) > section.mixed)


def sampler(section: Section, slots: list[Slot], seed: int) -> kernels.Sampled:
    """Draws what :func:`sampled` looks at, by ``seed``: of a section laid out from ``slots``."""
    begin, size = section.storage.data_ptr(), section.storage.itemsize
    small = [slot.tensor for slot in slots if slot.kind == 0 and slot.tensor.numel() < kernels.SMALL]
    starts = [(tensor.data_ptr() - begin) // size for tensor in small if tensor.numel()]
    lengths = [tensor.numel() for tensor in small if tensor.numel()]
    ranges = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return kernels.Sampled(section.storage[: section.trainable], seed, ranges)
