"""Single passes over the values of one section (dtype) of the arena; the arena runs them on the training stream.

For a section trained in 16 bits, they first update its float32 masters from the module's tensors, or afterwards write
the masters back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossipx.memory import PIECE
from gossipx.model import kernels, master_weights
from gossipx.model.layout import Kind, Section, Slot
from gossipx.model.outer_state import Update


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


def subtract(section: Section, received: Tensor, host_copy: Tensor | None, base: Tensor | None) -> float:
    """x_j ← x_j − base for trained values; return ‖x_j − base‖₂². ``host_copy`` receives a copy of the result.

    Args:
        base: in host memory; None: x.
    """
    cut = section.trainable
    own = section.values[:cut]
    if base is not None:
        cut = len(base)
        own = base.to(received.device)
    squared = kernels.difference(received[:cut], own, received[:cut])
    if host_copy is not None:
        host_copy[:cut].copy_(received[:cut])
    return squared


def commit(section: Section, change: Tensor, share: float, boundary: Tensor | None) -> None:
    """Add a share of the changes to trained values, and move buffers towards those of another model.

    Args:
        change: as in :meth:`gossipx.model.fragments.Fragment.commit`.
        boundary: receives a copy of the result; None: no copy.
    """
    cut = section.trainable
    kernels.commit(section.values[:cut], change[:cut], share, None if boundary is None else boundary[:cut])
    _commit_buffers(section, change, share, boundary)
    master_weights.write_back(section)


def commit_outer(
    section: Section,
    change: Tensor,
    share: float,
    boundary: Tensor | None,
    own: Tensor,
    kept: Sequence[Tensor],
    update: Update,
) -> None:
    """Like :func:`commit`, with an outer optimizer, which leaves its result for trained values in ``change``.

    Args:
        own, kept, update: as in :func:`gossipx.model.kernels.apply_outer`.
    """
    cut = section.trainable
    kernels.apply_outer(section.values[:cut], own[:cut], change[:cut], kept, update, share)
    if boundary is not None:
        kernels.copy(section.values[:cut], boundary[:cut])
    _commit_buffers(section, change, share, boundary)
    master_weights.write_back(section)


def _commit_buffers(section: Section, received: Tensor, share: float, boundary: Tensor | None) -> None:
    cut, end = section.trainable, section.mixed
    if cut < end:
        own, other = section.values[cut:end], received[cut:end]
        as_is = (own == other) | ~own.isfinite()
        own.copy_(torch.where(as_is, own, own + share * (other - own)))
        if boundary is not None:
            boundary[cut:].copy_(own)


def apply_merged(
    section: Section, mean: Tensor, captured: Tensor, boundary: Tensor | None, kept: Sequence[Tensor], update: Update
) -> None:
    """x ← mean + (x − captured) for trained values; finite buffers become the mean's; ``boundary`` gets a copy.

    Args:
        kept, update: an outer optimizer as in :func:`gossipx.model.kernels.apply_outer`, which changes ``mean``.
    """
    cut, end = section.trainable, section.mixed
    kernels.apply_outer(section.values[:cut], captured[:cut], mean[:cut], kept, update)
    own = section.values[cut:end]
    own.copy_(torch.where(own.isfinite(), mean[cut:end], own))
    master_weights.write_back(section)
    if boundary is not None:
        boundary.copy_(section.values[:end])


def merge(section: Section, received: Tensor, captured: Tensor, a: float, b: float) -> tuple[float, float]:
    """x_j ← a · h + b · x_j; return ‖x_j − h‖₂² as it was, of the trained values and of the buffers.

    Args:
        received: x_j, in host memory.
        captured: h.
    """
    cut = section.trainable
    trained = 0.0
    pieces = (torch.split(vector[:cut], PIECE // vector.itemsize) for vector in (received, captured))
    for x, h in zip(*pieces, strict=True):
        trained += kernels.squared_norm(x - h)
        x.mul_(b).add_(h * a)
    x, h = received[cut : section.mixed], captured[cut : section.mixed]
    as_is = (x == h) | ~h.isfinite()
    others = kernels.squared_norm((x - h).masked_fill(kernels.same(x, h), 0))
    x.copy_(torch.where(as_is, h, b * x + a * h))
    return trained, others


def adopt(section: Section, model: Tensor) -> None:
    """Replace the values by those of a model, whole or only the exchanged part."""
    section.values[: len(model)].copy_(model)
    master_weights.write_back(section, whole=len(model) > section.mixed)


def sampler(section: Section, slots: list[Slot], seed: int) -> kernels.Sampled:
    """Return the sampler for :func:`sampled` of a section that was laid out from ``slots``."""
    small = [slot for slot in slots if slot.kind is Kind.TRAINABLE and 0 < slot.tensor.numel() < kernels.SMALL]
    ranges = [(slot.start, slot.start + slot.tensor.numel()) for slot in small]
    return kernels.Sampled(section.storage[: section.trainable], seed, ranges)


def or_none(vectors: Sequence[Tensor] | None, like: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the vectors of each section, or as many None without any."""
    return [None] * len(like) if vectors is None else vectors
