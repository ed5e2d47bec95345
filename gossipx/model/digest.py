"""The checksum of a model, by which peers compare their final models bit by bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from gossipx.model import kernels, layout
from gossipx.model.arena import ParameterArena
from gossipx.model.layout import Kind
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
