"""Real gradients: some tensors of ResNet-20 and of the small convnet in seven consecutive training steps.

``bin/bench codecs --record tests/gradients.npz`` wrote ``gradients.npz`` after 53 steps with each model's preset on the
embedded data. Each tensor is scaled by a power of two to fit into float16.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gossipx.codecs import Tensors

MODELS = ("resnet20", "convnet")


def recorded(model: str) -> tuple[Tensors, Tensor]:
    """Return the tensors, and their gradients (step, value), float32."""
    with np.load(Path(__file__).with_suffix(".npz")) as arrays:
        of_model = [torch.from_numpy(arrays[name]).float() for name in arrays.files if name.startswith(f"{model}/")]
    return Tensors.of(*(steps[0] for steps in of_model)), torch.cat(of_model, dim=1)
