"""The checksum of a model, by which peers compare their final models bit by bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor, nn

from gossipx.model import kernels, layout
from gossipx.model.arena import ParameterArena
from gossipx.model.layout import Kind, has_average
from gossipx.model.snapshots import Snapshot


def digest(arena: ParameterArena) -> str:
    """Return the checksum of the part of the model that peers exchange, as it is now; that is a step boundary then.

    Two peers with the same result hold the same bits: 128 of them are too many for a coincidence. Empty: the model has
    a :func:`flaw`, so that no other peer must adopt it.
    """
    snapshot = _snapshot(arena)
    try:
        found = xxhash.xxh3_128()
        if _flaw(arena, snapshot.buffer.vectors):
            return ""
        for vector in snapshot.buffer.vectors:
            if vector.numel():
                found.update(vector.view(torch.uint8).numpy().data)
        return found.hexdigest()
    finally:
        snapshot.release()


def unshared(arena: ParameterArena, module: nn.Module) -> dict[str, int]:
    """Return a checksum of each tensor that no exchange moves and all peers had alike at the start, by name.

    These are frozen parameters, and buffers that have no average. BatchNorm's counts of batches are left out: they are
    of the batches of one peer. So are floating-point buffers that are local by choice.
    """
    own = layout.batch_counters(module)
    return {
        slot.name: xxhash.xxh32_intdigest(
            slot.tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data
        )
        for slot in arena.slots
        if (slot.kind is Kind.FROZEN or (slot.kind is Kind.LOCAL and not has_average(slot.tensor)))
        and slot.name not in own
        and slot.tensor.numel()
    }


def flaw(arena: ParameterArena) -> str:
    """Return what makes a model unfit for other peers, and what to do; empty: it is fit.

    A trained value is NaN or infinite, or a buffer has become NaN. A buffer that was NaN from the start is a constant.
    """
    snapshot = _snapshot(arena)
    try:
        return _flaw(arena, snapshot.buffer.vectors)
    finally:
        snapshot.release()


def _snapshot(arena: ParameterArena) -> Snapshot:
    arena.set_boundary(arena.step)  # a parameter server's tables, for one, are written between boundaries
    return arena.snapshot()


def _flaw(arena: ParameterArena, vectors: Sequence[Tensor]) -> str:
    rows = list(zip(arena.sections, vectors, arena.constant_nans, strict=True))
    if not all(math.isfinite(kernels.squared_norm(vector[: section.trainable])) for section, vector, _ in rows):
        return "NaN or Inf in its model: lower the learning rate"
    spoiled = []
    for section, vector, constant in rows:
        now = torch.zeros(len(vector), dtype=torch.bool)
        buffers = vector[section.trainable :].isnan()
        now[section.trainable :] = buffers if constant is None else buffers & ~constant
        spoiled.append(now)
    if not any(bool(now.any()) for now in spoiled):
        return ""
    mixed = [slot for slot in arena.slots if slot.kind is Kind.MIXED]
    name = next(name for name, now in layout.named(mixed, arena.sections, spoiled).items() if bool(now.any()))
    return f"NaN in its buffer '{name}', while all trained values are finite"
