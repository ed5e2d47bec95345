"""ConvNet: cuda-convnet's CIFAR-10 net, the paper's small model."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from gossipx.tasks.models.layout import channels_last_on_cpu


class LocalResponseNorm(nn.Module):
    """x · (1 + α · mean of x² over the 3×3 pixels around)^(−β) within each map: Caffe's WITHIN_CHANNEL.

    Torch has only normalisation across the maps.
    """

    def forward(self, maps: Tensor) -> Tensor:
        mean = functional.avg_pool2d(maps.square(), 3, stride=1, padding=1)
        return maps * (1.0 + 5e-5 * mean).pow(-0.75)


class ConvNet(nn.Module):
    """Krizhevsky's net for CIFAR-10, after Caffe's ``examples/cifar10/cifar10_full_train_test.prototxt``.

    Three 5×5 convolutions of 32, 32 and 64 maps, each pooled 3×3 with stride 2 (the first by maximum, the others by
    average), and one fully connected layer. Initial weights are torch's: Caffe's example initialises the first layer
    with a deviation of 0.0001, for pixels from 0 to 255; for normalised input, training would not leave its plateau.

    Input (N, C, H, W), H = W of at least 8; output (N, classes).
    """

    def __init__(self, classes: int, channels: int, pixels: int):
        super().__init__()
        side = pixels
        for _ in range(3):
            side //= 2  # as a 3×3 window with stride 2, with the last window clipped at the border as in Caffe
        self.maps = nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=2),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.ReLU(),
            LocalResponseNorm(),
            nn.Conv2d(32, 32, 5, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, ceil_mode=True),
            LocalResponseNorm(),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, ceil_mode=True),
        )
        self.head = nn.Linear(64 * side**2, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.maps(channels_last_on_cpu(images)).flatten(1))
        return logits
