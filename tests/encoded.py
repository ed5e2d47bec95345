"""Helpers for tests of codecs: specs of every codec, and values to encode."""

from __future__ import annotations

import torch
from torch import Tensor

from gossipx.codecs import decode, decode_into, parse
from gossipx.codecs.base import KINDS
from gossipx.codecs.frames import Buffer
from gossipx.specs.codecs import CODECS

_EXAMPLES = [spec for row in CODECS.values() for spec in row.examples]
SPECS = [spec for spec in _EXAMPLES if not parse(spec).near]
NEAR = [spec for spec in _EXAMPLES if parse(spec).near]
"""Specs of the codecs that encode models only and need nearby reference values to decode."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoded(frame: Buffer, near: Tensor) -> Tensor:
    """Decode a frame; ``near`` are the reference values for codecs that need them, in its shape and dtype."""
    if not KINDS[frame[3]].near:
        return decode(frame)
    out = torch.full_like(near, 7.0)
    decode_into(frame, out, near=near)
    return out
