"""Single passes over the values of one section (dtype) of the arena; the arena runs them on the training stream.

For a section trained in 16 bits, they first update its float32 masters from the module's tensors, or afterwards write
the masters back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossipx.model import kernels, master_weights
from gossipx.model.layout import Kind, Section, Slot


def copy(section: Section, to: Tensor) -> None:
    """Copy the exchanged values as they are now."""
    master_weights.update(section)
    kernels.copy(section.values[: section.mixed], to)


def advance(section: Section, before: Tensor, after: Tensor, on_device: bool) -> float | Tensor:
    """Copy the section's boundary to ``after``; return its Δ_t²."""
    master_weights.update(section)
    cut, end = section.trainable, section.mixed
    past = before[:cut]
    measure = kernels.advance_on_device if on_device else kernels.advance
    squared = measure(section.values[:cut], past, past if after is before else after[:cut])
    after[cut:].copy_(section.values[cut:end])
    return squared


def sampled(sample: kernels.Sampled, section: Section, on_device: bool) -> float | Tensor:
    """Return an estimate of Δ_t² of a section; the module's tensors serve as well as their masters here."""
    x = section.storage[: section.trainable]
    return sample.advance_on_device(x) if on_device else sample.advance(x)


def subtract(section: Section, received: Tensor, host_copy: Tensor | None) -> float:
    """x_j ← x_j − x for trained values; return ‖x_j − x‖₂². ``host_copy`` receives a copy of the result."""
    cut = section.trainable
    squared = kernels.difference(received[:cut], section.values[:cut], received[:cut])
    if host_copy is not None:
        host_copy[:cut].copy_(received[:cut])
    return squared


def commit(section: Section, change: Tensor, share: float, boundary: Tensor | None) -> None:
    """Add a share of the changes to trained values, and move buffers towards those of another model.

    Args:
        change: as in :meth:`gossipx.model.arena.ParameterArena.commit`.
        boundary: receives a copy of the result; None: no copy.
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
    master_weights.write_back(section)


def apply_merged(section: Section, mean: Tensor, captured: Tensor, boundary: Tensor | None) -> None:
    """x ← mean + (x − captured) for trained values; finite buffers become the mean's; ``boundary`` gets a copy."""
    cut, end = section.trainable, section.mixed
    section.values[:cut].sub_(captured[:cut]).add_(mean[:cut])
    own = section.values[cut:end]
    own.copy_(torch.where(own.isfinite(), mean[cut:end], own))
    master_weights.write_back(section)
    if boundary is not None:
        boundary.copy_(section.values[:end])


def adopt(section: Section, model: Tensor) -> None:
    """Replace the values by those of a model, whole or only the exchanged part."""
    section.values[: len(model)].copy_(model)
    master_weights.write_back(section, whole=len(model) > section.mixed)


def sampler(section: Section, slots: list[Slot], seed: int) -> kernels.Sampled:
    """Return the sampler for :func:`sampled` of a section that was laid out from ``slots``."""
    small = [slot for slot in slots if slot.kind is Kind.TRAINABLE and 0 < slot.tensor.numel() < kernels.SMALL]
    ranges = [(slot.start, slot.start + slot.tensor.numel()) for slot in small]
    return kernels.Sampled(section.storage[: section.trainable], seed, ranges)
