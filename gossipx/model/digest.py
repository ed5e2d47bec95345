"""The checksum of a model, by which peers compare their final models bit by bit."""

from __future__ import annotations

import math

import torch
import xxhash

from gossipx.model import kernels
from gossipx.model.arena import ParameterArena


def digest(arena: ParameterArena) -> str:
    """Return the checksum of the part of the model that peers exchange, as it is now; that is a step boundary then.

    Two peers with the same result hold the same bits: 128 of them are too many for a coincidence. Empty: a trained
    value is NaN or infinite, or a buffer holds NaN, so that no other peer must adopt this model.
    """
    arena.set_boundary(arena.step)  # a parameter server's tables, for one, are written between boundaries
    snapshot = arena.snapshot()
    try:
        found = xxhash.xxh3_128()
        for section, vector in zip(arena.sections, snapshot.buffer.vectors, strict=True):
            trained, buffers = vector[: section.trainable], vector[section.trainable :]
            if not math.isfinite(kernels.squared_norm(trained)) or bool(buffers.isnan().any()):
                return ""
            if vector.numel():
                found.update(vector.view(torch.uint8).numpy().data)
        return found.hexdigest()
    finally:
        snapshot.release()
