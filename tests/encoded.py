"""Helpers for tests of codecs: specs of every codec, and values to encode."""

from __future__ import annotations

import torch
from torch import Tensor

from gossipx import codecs
from gossipx.specs.codecs import CODECS

SPECS = [spec for row in CODECS.values() for spec in row.examples]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def framed(spec: str, x: Tensor) -> bytes:
    """Return the first frame of a codec."""
    codec = codecs.parse(spec)
    return bytes(codec.encode(x, codec.init(x))[0])
