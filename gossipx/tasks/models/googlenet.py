"""GoogLeNet, Inception version 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Inception(nn.Module):
    """Parallel 1×1, 3×3 and 5×5 convolutions and a pooling, with concatenated maps (the publication's Figure 2b)."""

    def __init__(self, before: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pooled: int):
        super().__init__()
        self.branches = nn.ModuleList(
            [
                _convolution(before, one, 1),
                nn.Sequential(_convolution(before, reduce3, 1), _convolution(reduce3, three, 3)),
                nn.Sequential(_convolution(before, reduce5, 1), _convolution(reduce5, five, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, padding=1), _convolution(before, pooled, 1)),
            ]
        )

    def forward(self, maps: Tensor) -> Tensor:
        return torch.cat([branch(maps) for branch in self.branches], 1)


class GoogLeNet(nn.Module):
    """Szegedy et al., "Going Deeper with Convolutions" (2014), Table 1, with local response normalisation as published.

    It follows Caffe's ``models/bvlc_googlenet/train_val.prototxt``, without the two auxiliary classifiers: these are
    used only in training, and their 6.4 million parameters would be pulled with each model.

    Input (N, C, H, W), H = W of at least 31 (the fourth pooling has no output for smaller ones); output (N, classes).
    """

    def __init__(self, classes: int, channels: int, pixels: int):
        super().__init__()
        self.maps = nn.Sequential(
            _convolution(channels, 64, 7, stride=2),
            _halve(),
            nn.LocalResponseNorm(5),
            _convolution(64, 64, 1),
            _convolution(64, 192, 3),
            nn.LocalResponseNorm(5),
            _halve(),
            Inception(192, 64, 96, 128, 16, 32, 32),
            Inception(256, 128, 128, 192, 32, 96, 64),
            _halve(),
            Inception(480, 192, 96, 208, 16, 48, 64),
            Inception(512, 160, 112, 224, 24, 64, 64),
            Inception(512, 128, 128, 256, 24, 64, 64),
            Inception(512, 112, 144, 288, 32, 64, 64),
            Inception(528, 256, 160, 320, 32, 128, 128),
            _halve(),
            Inception(832, 256, 160, 320, 32, 128, 128),
            Inception(832, 384, 192, 384, 48, 128, 128),
        )
        self.head = nn.Sequential(nn.Dropout(0.4), nn.Linear(1024, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.constant_(module.get_parameter("bias"), 0.2 if isinstance(module, nn.Conv2d) else 0.0)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.maps(images).mean((2, 3)))
        return logits


def _convolution(before: int, maps: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, maps, size, stride, padding=size // 2), nn.ReLU())


def _halve() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, ceil_mode=True)
