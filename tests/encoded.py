"""Helpers for tests of codecs: specs of every codec, values to encode, and real gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gossipx import codecs
from gossipx.codecs import Tensors
from gossipx.specs.codecs import CODECS

SPECS = [spec for row in CODECS.values() for spec in row.examples]
MODELS = ("resnet20", "convnet")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def framed(spec: str, x: Tensor) -> bytes:
    """Return the first frame of a codec."""
    codec = codecs.parse(spec)
    return bytes(codec.encode(x, codec.init(x))[0])


def recorded(model: str) -> tuple[Tensors, Tensor]:
    """Return some tensors of a model, and their gradients (step, value) in seven consecutive training steps, float32.

    ``bin/bench codecs --record tests/gradients.npz`` wrote the file after 53 steps with each model's preset on the
    embedded data. Each tensor is scaled by a power of two to fit into float16.
    """
    with np.load(Path(__file__).with_name("gradients.npz")) as arrays:
        of_model = [torch.from_numpy(arrays[name]).float() for name in arrays.files if name.startswith(f"{model}/")]
    return Tensors.of(*(steps[0] for steps in of_model)), torch.cat(of_model, dim=1)
