"""Tasks that models train in several benchmarks: images, and random clouds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossipx.tasks.data import load
from gossipx.tasks.models import build_model

Samples = tuple[Tensor, Tensor]
"""Inputs and labels."""


@dataclass(frozen=True)
class Task:
    """A model of ten classes, which ``model`` makes, and its training and test set."""

    model: Callable[[], nn.Module]
    train: Samples
    test: Samples

    @torch.no_grad()
    def scores(self, model: nn.Module, most: int) -> dict[str, float]:
        """Return test ``accuracy``, test ``loss`` and ``train`` loss, on at most ``most`` samples each."""
        inputs, labels = (each[:most] for each in self.test)
        outputs = model(inputs)
        return {
            "accuracy": float((outputs.argmax(1) == labels).float().mean()),
            "loss": float(functional.cross_entropy(outputs, labels)),
            "train": float(functional.cross_entropy(model(self.train[0][:most]), self.train[1][:most])),
        }


def images(name: str = "fashion-mnist", data_dir: str | None = None) -> Task:
    """Return a task of images for LeNet; CIFAR-10 needs the folder that has it."""
    data, test = load(name, None if data_dir is None else Path(data_dir))
    channels, pixels = data.images.shape[1], data.images.shape[-1]
    model = lambda: build_model("lenet", classes=10, channels=channels, pixels=pixels)  # noqa: E731
    return Task(model, (data.images, data.labels), (test.images, test.labels))


def clouds(seed: int, samples: int = 10_000, dimensions: int = 20, classes: int = 10) -> Task:
    """Return a random task for an MLP, in which each class is two clouds of unit variance (Hybrid Approach, 6)."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes * 2, dimensions, generator=generator)
    own = torch.randint(0, classes * 2, (samples,), generator=generator)
    inputs, labels = centres[own] + torch.randn(samples, dimensions, generator=generator), own % classes
    cut = samples * 4 // 5
    model = lambda: nn.Sequential(nn.Linear(dimensions, 64), nn.ReLU(), nn.Linear(64, classes))  # noqa: E731
    return Task(model, (inputs[:cut], labels[:cut]), (inputs[cut:], labels[cut:]))
