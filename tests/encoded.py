"""What tests of codecs share: codecs of every kind, and values for them."""

from __future__ import annotations

import torch
from torch import Tensor

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


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
