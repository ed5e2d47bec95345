"""LeNet: a small and fast model for runs on CPUs and for tests."""

from __future__ import annotations

from torch import Tensor, nn

from gossipx.tasks.models.layout import channels_last_on_cpu


class LeNet(nn.Module):
    """LeNet-5's structure, convolution and pooling twice before fully connected layers, with ReLU.

    LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (1998), section II-B, has 6 and 16 maps.
    Here they are 8 and 32, before one hidden layer of 184 units. Caffe's ``examples/mnist/lenet.prototxt`` also has one
    hidden layer, after 20 and 50 maps, and 431,080 parameters. A quarter of that keeps short runs on CPUs fast. Pooling
    precedes ReLU: the result is the same, with a quarter of the work.

    Input (N, C, H, W), H = W of at least 16; output (N, classes).
    """

    def __init__(self, classes: int, channels: int, pixels: int):
        super().__init__()
        side = ((pixels - 4) // 2 - 4) // 2
        self.maps = nn.Sequential(
            nn.Conv2d(channels, 8, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(8, 32, 5), nn.MaxPool2d(2), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(32 * side**2, 184), nn.ReLU(), nn.Linear(184, classes))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.maps(channels_last_on_cpu(images)).flatten(1))
        return logits
