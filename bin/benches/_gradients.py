"""Gradients of consecutive training steps, recorded for the codecs benchmark, and a sample of them for tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gossipx.codecs import Tensors
from gossipx.tasks.data import TASKS, Batches, load
from gossipx.tasks.models import build_model
from gossipx.tasks.presets import PRESETS

TASK = "fashion-mnist"
BEFORE, KEPT = 20, 40
"""Steps to skip, because the first gradients are not typical, and steps to record."""
SAMPLED = {
    "resnet20": (
        "maps.0.weight",
        "maps.3.first.weight",
        "maps.7.first_norm.weight",
        "maps.7.first.weight",
        "head.weight",
    ),
    "convnet": ("maps.0.weight", "maps.4.bias", "head.weight"),
}
"""Tensors of the sample: a small one of each kind."""
SAMPLED_STEPS = 7


@dataclass(frozen=True)
class Recorded:
    """A model's gradients.

    Attributes:
        names: names of the parameters.
        tensors: positions of the parameters in a step; those of normalisation layers are not encoded.
        steps: (step, value), float32.
    """

    names: tuple[str, ...]
    tensors: Tensors
    steps: Tensor


def record(model: str, kept: int = KEPT) -> Recorded:
    """Train a built-in model by its preset on the embedded data, and record its gradients of ``kept`` steps."""
    task, preset = TASKS[TASK], PRESETS[model]
    torch.manual_seed(0)
    module = build_model(model, classes=task.classes, channels=task.channels, pixels=task.pixels)
    optimizer = torch.optim.SGD(
        module.parameters(), lr=preset.base_lr, momentum=preset.momentum, weight_decay=preset.weight_decay
    )
    batches = Batches(load(TASK)[0], preset.batch_size, 0)
    steps = []
    for step in range(BEFORE + kept):
        images, labels = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(images), labels).backward()
        if step >= BEFORE:
            steps.append(torch.cat([_gradient(one).view(-1) for one in module.parameters()]))
        optimizer.step()
    named = dict(module.named_parameters())
    modules = dict(module.named_modules())
    norms = [isinstance(modules[name.rpartition(".")[0]], nn.BatchNorm2d) for name in named]
    return Recorded(tuple(named), Tensors.of(*named.values(), plain=norms), torch.stack(steps))


def save_sample(file: Path) -> None:
    """Write the sampled gradients of both models as float16, scaled by a power of two to values below 1.

    Each array has one row per step, and the name ``model/parameter``.
    """
    arrays = {}
    for model, names in SAMPLED.items():
        recorded = record(model)
        for name in names:
            number = recorded.names.index(name)
            start, count = recorded.tensors.starts[number], recorded.tensors.counts[number]
            steps = recorded.steps[-SAMPLED_STEPS:, start : start + count].numpy()
            _, exponent = np.frexp(np.abs(steps).max())
            arrays[f"{model}/{name}"] = np.ldexp(steps, -exponent).astype(np.float16)
    np.savez_compressed(file, **arrays)


def tiled(tensors: Tensors, values: int) -> tuple[Tensors, int]:
    """Repeat tensors up to about ``values`` values, and return them with the number of repetitions."""
    times = max(1, values // tensors.length)
    starts = tuple(tile * tensors.length + start for tile in range(times) for start in tensors.starts)
    return Tensors(tensors.shapes * times, tensors.dtype, starts), times


def drawn(values: int, part: float) -> Recorded:
    """Return random tensors of ``values`` values. 3LC at sparsity 1 encodes a fraction ``part`` as ±1, others as 0."""
    draws = torch.Generator().manual_seed(0)
    shape = (4, values)
    large = torch.rand(shape, generator=draws) < part
    signs = torch.rand(shape, generator=draws).sub_(0.5).sign_()
    steps = torch.where(large, signs, torch.rand(shape, generator=draws).sub_(0.5).mul_(0.1))
    return Recorded(("drawn",), Tensors(((values,),), torch.float32, (0,)), steps)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()
