"""Inception-v4, the largest model of the modularized parameter server's evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Shift(nn.BatchNorm2d):
    """Batch normalisation with a learned shift per map and no scale.

    TF-slim omits the scale, because the convolution after the ReLU can learn it.
    """

    def __init__(self, maps: int):
        super().__init__(maps, eps=0.001, affine=False)
        self.bias = nn.Parameter(torch.zeros(maps))


class Parallel(nn.Module):
    """Branches over the same maps, with concatenated outputs."""

    def __init__(self, *branches: nn.Module):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, maps: Tensor) -> Tensor:
        return torch.cat([branch(maps) for branch in self.branches], 1)


class InceptionV4(nn.Module):
    """Szegedy et al., "Inception-v4, Inception-ResNet and the Impact of Residual Connections on Learning" (2016).

    Figure 9 with the blocks of Figures 3 to 8. At 1000 classes it has 42,648,232 parameters, the 42.65 million of Table
    1.1 of *Modularized Parameter Server*. The count matches with TF-slim's conventions: no auxiliary classifier (46.0
    million with it), convolutions without a bias, and batch normalisation with a shift and no scale (42,679,816 with
    both). A convolution's weights precede its shift, and branches have TF-slim's order, because some placements depend
    on the order of tensors.

    Input (N, C, H, W), H = W of at least 75 (the last reduction has no output for smaller ones), published at 299;
    output (N, classes).
    """

    def __init__(self, classes: int, channels: int, pixels: int):
        super().__init__()
        self.maps = nn.Sequential(
            *_stem(channels),
            *(_block_a() for _ in range(4)),
            Parallel(
                _cut(384, 384, 2), nn.Sequential(_chain(384, (192, 1, 1), (224, 3, 3)), _cut(224, 256, 2)), _halve()
            ),
            *(_block_b() for _ in range(7)),
            Parallel(
                nn.Sequential(_chain(1024, (192, 1, 1)), _cut(192, 192, 2)),
                nn.Sequential(_chain(1024, (256, 1, 1), (256, 1, 7), (320, 7, 1)), _cut(320, 320, 2)),
                _halve(),
            ),
            *(_block_c() for _ in range(3)),
        )
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(1536, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.maps(images).mean((2, 3)))
        return logits


def _stem(channels: int) -> list[nn.Module]:
    """Return the stem of Figure 3, from 299×299 images to 35×35 maps."""
    return [
        _cut(channels, 32, 2),
        _cut(32, 32),
        _chain(32, (64, 3, 3)),
        Parallel(_halve(), _cut(64, 96, 2)),
        Parallel(
            nn.Sequential(_chain(160, (64, 1, 1)), _cut(64, 96)),
            nn.Sequential(_chain(160, (64, 1, 1), (64, 1, 7), (64, 7, 1)), _cut(64, 96)),
        ),
        Parallel(_cut(192, 192, 2), _halve()),
    ]


def _block_a() -> nn.Module:
    """Return the block of Figure 4, on 35×35 maps."""
    return Parallel(
        _chain(384, (96, 1, 1)),
        _chain(384, (64, 1, 1), (96, 3, 3)),
        _chain(384, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
        nn.Sequential(_average(), _chain(384, (96, 1, 1))),
    )


def _block_b() -> nn.Module:
    """Return the block of Figure 5, on 17×17 maps."""
    return Parallel(
        _chain(1024, (384, 1, 1)),
        _chain(1024, (192, 1, 1), (224, 1, 7), (256, 7, 1)),
        _chain(1024, (192, 1, 1), (192, 7, 1), (224, 1, 7), (224, 7, 1), (256, 1, 7)),
        nn.Sequential(_average(), _chain(1024, (128, 1, 1))),
    )


def _block_c() -> nn.Module:
    """Return the block of Figure 6, on 8×8 maps."""
    return Parallel(
        _chain(1536, (256, 1, 1)),
        nn.Sequential(_chain(1536, (384, 1, 1)), _both_ways(384)),
        nn.Sequential(_chain(1536, (384, 1, 1), (448, 3, 1), (512, 1, 3)), _both_ways(512)),
        nn.Sequential(_average(), _chain(1536, (256, 1, 1))),
    )


def _both_ways(before: int) -> Parallel:
    return Parallel(_chain(before, (256, 1, 3)), _chain(before, (256, 3, 1)))


def _chain(before: int, *layers: tuple[int, int, int]) -> nn.Sequential:
    """Return padded convolutions, each given as (maps, height, width), that keep the size of the maps."""
    made: list[nn.Module] = []
    for maps, height, width in layers:
        padding = (height // 2, width // 2)
        made += [nn.Conv2d(before, maps, (height, width), padding=padding, bias=False), Shift(maps), nn.ReLU()]
        before = maps
    return nn.Sequential(*made)


def _cut(before: int, maps: int, stride: int = 1) -> nn.Sequential:
    """Return a 3×3 convolution without padding: "V" in the figures."""
    return nn.Sequential(nn.Conv2d(before, maps, 3, stride, bias=False), Shift(maps), nn.ReLU())


def _halve() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2)


def _average() -> nn.AvgPool2d:
    return nn.AvgPool2d(3, 1, padding=1, count_include_pad=False)
