"""Helpers for tests of codecs: specs of every codec, and values to encode."""

from __future__ import annotations

import torch
from torch import Tensor

from gossipx.codecs import decode, decode_into
from gossipx.codecs.base import KINDS
from gossipx.codecs.frames import Buffer

SPECS = [
    "none",
    "fp16",
    "bf16",
    "int8",
    "int8:block=64",
    "uint8-minmax",
    "3lc:sparsity=1",
    "3lc:sparsity=1.75",
    "3lc:sparsity=1,residual=0.3",
    "stochastic3",
    "onebit",
    "topk:ratio=0.05",
    "topk:ratio=0.05,sample=0.1",
    "topk2:ratio=0.05,chunk=256",
    "topk2:ratio=0.1,chunk=100,decay=1,small=32+zlib",
    "randomk:ratio=0.1",
    "threshold:value=0.5",
    "qsgd:levels=7",
    "qsgd:levels=4,block=0",
    "natural",
    "signsgd",
    "signsgd:magnitude=1",
    "efsignsgd",
    "powersgd:rank=2",
    "dgc:ratio=0.01",
    "localsteps:k=2",
    "3lc:sparsity=1.5+zlib",
    "3lc:sparsity=1.5+zstd",
    "topk:ratio=0.05,small=32+zstd",
    "none+zlib",
]
NEAR = ["moniqua", "moniqua:bits=3,theta=1.0", "moniqua:bits=16,theta=0.5,small=32+zstd"]
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
