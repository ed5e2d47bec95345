"""DenseNet-121, a net with much computation per parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

GROWTH = 32
"""Maps that a layer adds to its input: k of the publication's Table 1."""
LAYERS = (6, 12, 24, 16)
"""Layers of the four dense blocks of DenseNet-121."""


class Dense(nn.Module):
    """A layer of a dense block: its ``GROWTH`` new maps follow its input's maps (DenseNet-B, sections 3 and 4)."""

    def __init__(self, before: int):
        super().__init__()
        self.grow = nn.Sequential(*_convolution(before, 4 * GROWTH, 1), *_convolution(4 * GROWTH, GROWTH, 3))

    def forward(self, maps: Tensor) -> Tensor:
        return torch.cat([maps, self.grow(maps)], 1)


class DenseNet(nn.Module):
    """Huang et al., "Densely Connected Convolutional Networks" (2016), Table 1: DenseNet-BC for ImageNet, 121 layers.

    Convolutions have no bias. Batch normalisation and ReLU precede each one in and between the blocks. A transition
    between two blocks halves the number of maps, their height and their width.

    Input (N, C, H, W), H = W of at least 29 (the last transition has no output for smaller ones), published at 224;
    output (N, classes).
    """

    def __init__(self, classes: int, channels: int, pixels: int):
        super().__init__()
        maps = 2 * GROWTH
        layers: list[nn.Module] = [
            nn.Conv2d(channels, maps, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(maps),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        ]
        for block, count in enumerate(LAYERS):
            if block:
                layers += [*_convolution(maps, maps // 2, 1), nn.AvgPool2d(2)]
                maps //= 2
            layers += [Dense(maps + GROWTH * layer) for layer in range(count)]
            maps += GROWTH * count
        self.maps = nn.Sequential(*layers, nn.BatchNorm2d(maps), nn.ReLU())
        self.head = nn.Linear(maps, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.maps(images).mean((2, 3)))
        return logits


def _convolution(before: int, maps: int, size: int) -> list[nn.Module]:
    """Return a convolution that keeps height and width, with the normalisation and the ReLU before it."""
    return [nn.BatchNorm2d(before), nn.ReLU(), nn.Conv2d(before, maps, size, padding=size // 2, bias=False)]
