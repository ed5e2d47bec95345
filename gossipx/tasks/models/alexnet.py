"""AlexNet, the paper's largest model."""

from __future__ import annotations

from torch import Tensor, nn


class AlexNet(nn.Module):
    """Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks" (2012), section 3.

    It follows Caffe's ``models/bvlc_alexnet/train_val.prototxt``, which the paper's system trained: two groups where
    the publication splits the maps between two GPUs, normalisation before pooling, and Caffe's initial weights.
    Adaptive pooling before the first linear layer allows other sizes than the published 227 pixels, where it has no
    effect.

    Input (N, C, H, W), H = W of at least 39 (the third pooling has no output for smaller ones); output (N, classes).
    """

    def __init__(self, classes: int, channels: int, pixels: int):
        super().__init__()
        self.maps = nn.Sequential(
            nn.Conv2d(channels, 96, 11, stride=4),
            nn.ReLU(),
            nn.LocalResponseNorm(5),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(96, 256, 5, padding=2, groups=2),
            nn.ReLU(),
            nn.LocalResponseNorm(5),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(256, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 384, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.AdaptiveAvgPool2d(6),
        )
        self.head = nn.Sequential(
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )
        layers = [module for module in self.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
        spreads = (0.01,) * 5 + (0.005, 0.005, 0.01)
        biases = (0.0, 0.1, 0.0, 0.1, 0.1, 0.1, 0.1, 0.0)
        for layer, spread, bias in zip(layers, spreads, biases, strict=True):
            nn.init.normal_(layer.get_parameter("weight"), std=spread)
            nn.init.constant_(layer.get_parameter("bias"), bias)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.maps(images).flatten(1))
        return logits
