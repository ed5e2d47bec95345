"""The residual nets for CIFAR-10 of He et al., "Deep Residual Learning for Image Recognition" (2015), section 4.2."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A residual block: two 3×3 convolutions with batch normalisation, whose result is added to the block's input.

    If the block has more feature maps than its input, its first convolution halves height and width. The shortcut then
    takes every second pixel of the input and adds maps of zeros. This is option A of the paper, which has no
    parameters.

    Args:
        before: number of feature maps of the input.
        maps: number of feature maps of the output.
    """

    def __init__(self, before: int, maps: int):
        super().__init__()
        self.grown = maps - before
        self.first = nn.Conv2d(before, maps, 3, stride=2 if self.grown else 1, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(maps)
        self.second = nn.Conv2d(maps, maps, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(maps)

    def forward(self, maps: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(maps)))
        inner = self.second_norm(self.second(inner))
        if self.grown:
            maps = functional.pad(maps[:, :, ::2, ::2], (0, 0, 0, 0, self.grown // 2, self.grown // 2))
        return functional.relu(inner + maps)


class ResNet(nn.Module):
    """A net of 6n + 2 layers: a convolution; three stages of n blocks with 16, 32 and 64 feature maps; a linear layer.

    Input (N, C, H, W), output (N, classes). H = W must be at least 8. The last stage then has at least 2×2 pixels, so
    batch normalisation sees more than one value per map even if the batch has one image.

    Args:
        depth: the number of layers, 6n + 2.
        classes: number of classes.
        channels: C.
        pixels: H = W; unused, since the net works at any size.
    """

    def __init__(self, depth: int, classes: int, channels: int, pixels: int):
        super().__init__()
        blocks = (depth - 2) // 6
        layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        before = 16
        for maps in (16, 32, 64):
            for _ in range(blocks):
                layers.append(Block(before, maps))
                before = maps
        self.maps = nn.Sequential(*layers)
        self.head = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # the paper's initialisation, its reference [13]
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.maps(images).mean((2, 3)))
        return logits
