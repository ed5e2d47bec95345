"""Built-in models in plain torch.

Initial weights are drawn from torch's global generator, so that ``torch.manual_seed`` determines them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossipx.errors import UsageError
from gossipx.specs import suggest


class Classifier(nn.Module):
    """A classifier of images: a head over feature maps, flattened or (with ``averages``) averaged over the pixels.

    Attributes:
        maps: layers from images (N, C, H, W) to feature maps.
        head: layers from features to logits (N, classes).
    """

    averages: ClassVar[bool] = False
    channels_last: ClassVar[bool] = False
    """Whether images on a CPU are converted to the channels-last layout, for which torch's pooling is vectorised. The
    layers keep the layout, which makes a step of pooling-heavy nets 1.3 to 1.8 times as fast."""

    def __init__(self, maps: Iterable[nn.Module], head: nn.Module):
        super().__init__()
        self.maps = nn.Sequential(*maps)
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        if self.channels_last and images.device.type == "cpu":
            images = images.to(memory_format=torch.channels_last)
        maps = self.maps(images)
        logits: Tensor = self.head(maps.mean((2, 3)) if self.averages else maps.flatten(1))
        return logits

    def _initialise_as_he(self) -> None:
        """Initialise the convolutions as He et al., "Delving Deep into Rectifiers" (2015), for ReLU."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")


class LeNet(Classifier):
    """LeNet-5's structure, convolution and pooling twice before fully connected layers, with ReLU.

    LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (1998), section II-B, has 6 and 16 maps.
    Here they are 8 and 32, before one hidden layer of 184 units. Caffe's ``examples/mnist/lenet.prototxt`` also has one
    hidden layer, after 20 and 50 maps, and 431,080 parameters. A quarter of that keeps short runs on CPUs fast. Pooling
    precedes ReLU: the result is the same, with a quarter of the work.

    Input (N, C, H, W), H = W of at least 16; output (N, classes).
    """

    channels_last = True

    def __init__(self, classes: int, channels: int, pixels: int):
        side = ((pixels - 4) // 2 - 4) // 2
        super().__init__(
            maps=[
                nn.Conv2d(channels, 8, 5),
                nn.MaxPool2d(2),
                nn.ReLU(),
                nn.Conv2d(8, 32, 5),
                nn.MaxPool2d(2),
                nn.ReLU(),
            ],
            head=nn.Sequential(nn.Linear(32 * side**2, 184), nn.ReLU(), nn.Linear(184, classes)),
        )


class LocalResponseNorm(nn.Module):
    """x · (1 + α · mean of x² over the 3×3 pixels around)^(−β) within each map: Caffe's WITHIN_CHANNEL.

    Torch has only normalisation across the maps.
    """

    def forward(self, maps: Tensor) -> Tensor:
        mean = functional.avg_pool2d(maps.square(), 3, stride=1, padding=1)
        return maps * (1.0 + 5e-5 * mean).pow(-0.75)


class ConvNet(Classifier):
    """Krizhevsky's net for CIFAR-10, after Caffe's ``examples/cifar10/cifar10_full_train_test.prototxt``.

    Three 5×5 convolutions of 32, 32 and 64 maps, each pooled 3×3 with stride 2 (the first by maximum, the others by
    average), and one fully connected layer. Initial weights are torch's: Caffe's example initialises the first layer
    with a deviation of 0.0001, for pixels from 0 to 255; for normalised input, training would not leave its plateau.

    Input (N, C, H, W), H = W of at least 8; output (N, classes).
    """

    channels_last = True

    def __init__(self, classes: int, channels: int, pixels: int):
        side = pixels
        for _ in range(3):
            side //= 2  # as a 3×3 window with stride 2, with the last window clipped at the border as in Caffe
        super().__init__(
            maps=[
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
            ],
            head=nn.Linear(64 * side**2, classes),
        )


class AlexNet(Classifier):
    """Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks" (2012), section 3.

    It follows Caffe's ``models/bvlc_alexnet/train_val.prototxt``, which the paper's system trained: two groups where
    the publication splits the maps between two GPUs, normalisation before pooling, and Caffe's initial weights.
    Adaptive pooling before the first linear layer allows other sizes than the published 227 pixels, where it has no
    effect.

    Input (N, C, H, W), H = W of at least 39 (the third pooling has no output for smaller ones); output (N, classes).
    """

    def __init__(self, classes: int, channels: int, pixels: int):
        super().__init__(
            maps=[
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
            ],
            head=nn.Sequential(
                nn.Linear(256 * 6 * 6, 4096),
                nn.ReLU(),
                nn.Dropout(0.5),
                nn.Linear(4096, 4096),
                nn.ReLU(),
                nn.Dropout(0.5),
                nn.Linear(4096, classes),
            ),
        )
        layers = [module for module in self.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
        spreads = (0.01,) * 5 + (0.005, 0.005, 0.01)
        biases = (0.0, 0.1, 0.0, 0.1, 0.1, 0.1, 0.1, 0.0)
        for layer, spread, bias in zip(layers, spreads, biases, strict=True):
            nn.init.normal_(layer.get_parameter("weight"), std=spread)
            nn.init.constant_(layer.get_parameter("bias"), bias)


class ResidualBlock(nn.Module):
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


class ResNet(Classifier):
    """A residual net for CIFAR-10 (He et al., "Deep Residual Learning for Image Recognition", 2015, section 4.2).

    It has 6n + 2 layers: a convolution; three stages of n blocks with 16, 32 and 64 feature maps; a linear layer.

    Input (N, C, H, W), output (N, classes). H = W must be at least 8. The last stage then has at least 2×2 pixels, so
    batch normalisation sees more than one value per map even if the batch has one image.

    Args:
        depth: the number of layers, 6n + 2.
        classes: number of classes.
        channels: C.
        pixels: H = W; unused, since the net works at any size.
    """

    averages = True

    def __init__(self, depth: int, classes: int, channels: int, pixels: int):
        blocks = (depth - 2) // 6
        layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        before = 16
        for maps in (16, 32, 64):
            for _ in range(blocks):
                layers.append(ResidualBlock(before, maps))
                before = maps
        super().__init__(
            maps=[*layers],
            head=nn.Linear(64, classes),
        )
        self._initialise_as_he()  # the paper's initialisation, its reference [13]


class Inception(nn.Module):
    """Parallel 1×1, 3×3 and 5×5 convolutions and a pooling, with concatenated maps (the publication's Figure 2b)."""

    def __init__(self, before: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pooled: int):
        super().__init__()
        self.branches = nn.ModuleList(
            [
                _rectified(before, one, 1),
                nn.Sequential(_rectified(before, reduce3, 1), _rectified(reduce3, three, 3)),
                nn.Sequential(_rectified(before, reduce5, 1), _rectified(reduce5, five, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, padding=1), _rectified(before, pooled, 1)),
            ]
        )

    def forward(self, maps: Tensor) -> Tensor:
        return torch.cat([branch(maps) for branch in self.branches], 1)


class GoogLeNet(Classifier):
    """Szegedy et al., "Going Deeper with Convolutions" (2014), Table 1, with local response normalisation as published.

    It follows Caffe's ``models/bvlc_googlenet/train_val.prototxt``, without the two auxiliary classifiers: these are
    used only in training, and their 6.4 million parameters would be pulled with each model.

    Input (N, C, H, W), H = W of at least 31 (the fourth pooling has no output for smaller ones); output (N, classes).
    """

    averages = True

    def __init__(self, classes: int, channels: int, pixels: int):
        super().__init__(
            maps=[
                _rectified(channels, 64, 7, stride=2),
                _pool_halving(),
                nn.LocalResponseNorm(5),
                _rectified(64, 64, 1),
                _rectified(64, 192, 3),
                nn.LocalResponseNorm(5),
                _pool_halving(),
                Inception(192, 64, 96, 128, 16, 32, 32),
                Inception(256, 128, 128, 192, 32, 96, 64),
                _pool_halving(),
                Inception(480, 192, 96, 208, 16, 48, 64),
                Inception(512, 160, 112, 224, 24, 64, 64),
                Inception(512, 128, 128, 256, 24, 64, 64),
                Inception(512, 112, 144, 288, 32, 64, 64),
                Inception(528, 256, 160, 320, 32, 128, 128),
                _pool_halving(),
                Inception(832, 256, 160, 320, 32, 128, 128),
                Inception(832, 384, 192, 384, 48, 128, 128),
            ],
            head=nn.Sequential(nn.Dropout(0.4), nn.Linear(1024, classes)),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.constant_(module.get_parameter("bias"), 0.2 if isinstance(module, nn.Conv2d) else 0.0)


def _rectified(before: int, maps: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, maps, size, stride, padding=size // 2), nn.ReLU())


def _pool_halving() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


_DEVIATION = 0.02
"""Standard deviation of the initial weights, as GPT-2's."""


class AttentionBlock(nn.Module):
    """Causal self-attention and two dense layers, each added to its input and with layer normalisation before it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.dense_norm = nn.LayerNorm(width)
        self.dense = nn.Linear(width, 4 * width)
        self.dense_out = nn.Linear(4 * width, width)

    def forward(self, states: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.queries_keys_values(self.attention_norm(states)).chunk(3, 2)
        )
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        states = states + self.attention_out(seen.transpose(1, 2).flatten(2))
        dense: Tensor = self.dense_out(functional.gelu(self.dense(self.dense_norm(states))))
        return states + dense


class Transformer(nn.Module):
    """A decoder like GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

    It has learned positions and an output layer of its own. It has no dropout: it sees little of a text more than once.
    Three blocks of width 96 are the built-in model, small enough to train on a CPU.

    Input (N, T) int64, T up to the context; output (N, classes, T): logits of the character that follows each one.

    Args:
        classes: size of the vocabulary.
        channels: unused, since text has none.
        context: the largest T.
        width: number of elements of a state.
        heads: number of attention heads in a block, a divisor of ``width``.
        blocks: number of blocks.
    """

    def __init__(self, classes: int, channels: int, context: int, *, width: int = 96, heads: int = 4, blocks: int = 3):
        super().__init__()
        self.characters = nn.Embedding(classes, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(AttentionBlock(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # the sum of all blocks must not grow with their number (the paper's section 2.3)
                scale = math.sqrt(2 * blocks) if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=_DEVIATION / scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        states = self.blocks(self.characters(text) + self.positions(positions))
        logits: Tensor = self.head(self.norm(states))
        return logits.transpose(1, 2)


# --- by name ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A built-in model.

    Attributes:
        make: a constructor: ``make(classes, channels, pixels)``.
        classes: number of classes in its publication; of text, the size of the vocabulary (``transformer``: that of the
            embedded text).
        channels: number of channels of its input images there; 0: its input is text.
        pixels: height and width of its input images there; of text, the context.
        smallest: minimum of ``pixels``.
    """

    make: Callable[[int, int, int], nn.Module]
    classes: int
    channels: int
    pixels: int
    smallest: int


MODELS: dict[str, Model] = {
    "lenet": Model(LeNet, 10, 1, 28, 16),
    "convnet": Model(ConvNet, 10, 3, 32, 8),
    "resnet20": Model(partial(ResNet, 20), 10, 3, 32, 8),
    "resnet56": Model(partial(ResNet, 56), 10, 3, 32, 8),
    "resnet110": Model(partial(ResNet, 110), 10, 3, 32, 8),
    "alexnet": Model(AlexNet, 1000, 3, 227, 39),
    "googlenet": Model(GoogLeNet, 1000, 3, 224, 31),
    "transformer": Model(Transformer, 64, 0, 64, 1),
}
"""Models that ``gossipx run`` can train; each has a preset of training settings."""


def build_model(name: str, *, classes: int, channels: int, pixels: int) -> nn.Module:
    """Return a new model that maps images (N, ``channels``, ``pixels``, ``pixels``) to logits (N, ``classes``).

    Images below the model's minimum size are scaled up to it. A model of text maps (N, T), with T up to ``pixels``, to
    logits (N, ``classes``, T).

    Raises:
        UsageError: the name is unknown.
    """
    if name not in MODELS:
        raise UsageError(f"unknown model '{name}'{suggest(name, MODELS)}: one of {', '.join(sorted(MODELS))}")
    model = MODELS[name]
    smallest = model.smallest
    module = model.make(classes, channels, max(pixels, smallest))
    if pixels < smallest:
        module.register_forward_pre_hook(partial(_scale, smallest))  # unlike a wrapper, keeps the tensors' names
    return module


def _scale(pixels: int, module: nn.Module, given: tuple[Tensor]) -> Tensor:
    """Scale a module's input images to ``pixels`` × ``pixels``, as a forward pre-hook."""
    return functional.interpolate(given[0], size=(pixels, pixels), mode="bilinear")
