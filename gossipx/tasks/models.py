"""Built-in models in plain torch, with their parameter counts.

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
from gossipx.specs import known_word, suggest


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


_GROWTH = 32
"""Maps that a layer adds to its input: k of the publication's Table 1."""
_DENSE_LAYERS = (6, 12, 24, 16)
"""Layers of the four dense blocks of DenseNet-121."""


class Dense(nn.Module):
    """A layer of a dense block: its ``_GROWTH`` new maps follow its input's maps (DenseNet-B, sections 3 and 4)."""

    def __init__(self, before: int):
        super().__init__()
        self.grow = nn.Sequential(*_preactivated(before, 4 * _GROWTH, 1), *_preactivated(4 * _GROWTH, _GROWTH, 3))

    def forward(self, maps: Tensor) -> Tensor:
        return torch.cat([maps, self.grow(maps)], 1)


class DenseNet(Classifier):
    """Huang et al., "Densely Connected Convolutional Networks" (2016), Table 1: DenseNet-BC for ImageNet, 121 layers.

    Convolutions have no bias. Batch normalisation and ReLU precede each one in and between the blocks. A transition
    between two blocks halves the number of maps, their height and their width.

    Input (N, C, H, W), H = W of at least 29 (the last transition has no output for smaller ones), published at 224;
    output (N, classes).
    """

    averages = True

    def __init__(self, classes: int, channels: int, pixels: int):
        maps = 2 * _GROWTH
        layers: list[nn.Module] = [
            nn.Conv2d(channels, maps, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(maps),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        ]
        for block, count in enumerate(_DENSE_LAYERS):
            if block:
                layers += [*_preactivated(maps, maps // 2, 1), nn.AvgPool2d(2)]
                maps //= 2
            layers += [Dense(maps + _GROWTH * layer) for layer in range(count)]
            maps += _GROWTH * count
        super().__init__(
            maps=[*layers, nn.BatchNorm2d(maps), nn.ReLU()],
            head=nn.Linear(maps, classes),
        )
        self._initialise_as_he()


def _preactivated(before: int, maps: int, size: int) -> list[nn.Module]:
    """Return a convolution that keeps height and width, with the normalisation and the ReLU before it."""
    return [nn.BatchNorm2d(before), nn.ReLU(), nn.Conv2d(before, maps, size, padding=size // 2, bias=False)]


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


class InceptionV4(Classifier):
    """Szegedy et al., "Inception-v4, Inception-ResNet and the Impact of Residual Connections on Learning" (2016).

    Figure 9 with the blocks of Figures 3 to 8. At 1000 classes it has 42,648,232 parameters, the 42.65 million of Table
    1.1 of *Modularized Parameter Server*. The count matches with TF-slim's conventions: no auxiliary classifier (46.0
    million with it), convolutions without a bias, and batch normalisation with a shift and no scale (42,679,816 with
    both). A convolution's weights precede its shift, and branches have TF-slim's order, because some placements depend
    on the order of tensors.

    Input (N, C, H, W), H = W of at least 75 (the last reduction has no output for smaller ones), published at 299;
    output (N, classes).
    """

    averages = True

    def __init__(self, classes: int, channels: int, pixels: int):
        super().__init__(
            maps=[
                *_stem(channels),
                *(_block_a() for _ in range(4)),
                Parallel(
                    _cut(384, 384, 2),
                    nn.Sequential(_chain(384, (192, 1, 1), (224, 3, 3)), _cut(224, 256, 2)),
                    _reduction(),
                ),
                *(_block_b() for _ in range(7)),
                Parallel(
                    nn.Sequential(_chain(1024, (192, 1, 1)), _cut(192, 192, 2)),
                    nn.Sequential(_chain(1024, (256, 1, 1), (256, 1, 7), (320, 7, 1)), _cut(320, 320, 2)),
                    _reduction(),
                ),
                *(_block_c() for _ in range(3)),
            ],
            head=nn.Sequential(nn.Dropout(0.2), nn.Linear(1536, classes)),
        )
        self._initialise_as_he()


def _stem(channels: int) -> list[nn.Module]:
    """Return the stem of Figure 3, from 299×299 images to 35×35 maps."""
    return [
        _cut(channels, 32, 2),
        _cut(32, 32),
        _chain(32, (64, 3, 3)),
        Parallel(_reduction(), _cut(64, 96, 2)),
        Parallel(
            nn.Sequential(_chain(160, (64, 1, 1)), _cut(64, 96)),
            nn.Sequential(_chain(160, (64, 1, 1), (64, 1, 7), (64, 7, 1)), _cut(64, 96)),
        ),
        Parallel(_cut(192, 192, 2), _reduction()),
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


def _reduction() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2)


def _average() -> nn.AvgPool2d:
    return nn.AvgPool2d(3, 1, padding=1, count_include_pad=False)


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
        parameters: number of parameters with the published input and output sizes: the next three attributes.
        classes: number of classes in the publication; of text, the size of the vocabulary (``transformer``: that of the
            embedded text).
        channels: number of channels of its input images; 0: its input is text.
        pixels: height and width of its input images; of text, the context.
        smallest: minimum of ``pixels``.
        paper: approximate number of parameters according to Adaptive Communication (section VI); None: not mentioned.
        source: the publication that defines the model.
    """

    make: Callable[[int, int, int], nn.Module]
    parameters: int
    classes: int
    channels: int
    pixels: int
    smallest: int
    paper: int | None
    source: str


# "Option A" is the shortcut without parameters, see ResidualBlock.
_HE = "He et al. 2015, arXiv:1512.03385, section 4.2, option A"

MODELS: dict[str, Model] = {
    "lenet": Model(LeNet, 102_882, 10, 1, 28, 16, None, "LeCun et al. 1998, with more maps"),
    "convnet": Model(ConvNet, 89_578, 10, 3, 32, 8, 2_000_000, "cuda-convnet; Caffe's cifar10_full"),
    "resnet20": Model(partial(ResNet, 20), 269_722, 10, 3, 32, 8, None, _HE),
    "resnet56": Model(partial(ResNet, 56), 853_018, 10, 3, 32, 8, None, _HE),
    "resnet110": Model(partial(ResNet, 110), 1_727_962, 10, 3, 32, 8, None, _HE),
    "alexnet": Model(AlexNet, 60_965_224, 1000, 3, 227, 39, 60_000_000, "Krizhevsky et al. 2012; bvlc_alexnet"),
    "googlenet": Model(
        GoogLeNet,
        6_998_552,
        1000,
        3,
        224,
        31,
        11_000_000,
        "Szegedy et al. 2014, without auxiliary heads; bvlc_googlenet",
    ),
    "transformer": Model(Transformer, 354_144, 64, 0, 64, 1, None, "Radford et al. 2019, in small"),
}
"""Models that ``gossipx run`` can train; each has a preset of training settings."""

UNTRAINED: dict[str, Model] = {
    "inception-v4": Model(InceptionV4, 42_648_232, 1000, 3, 299, 75, None, "Szegedy et al. 2016; TF-slim"),
    # Modularized Parameter Server, Table 1.1, has a DenseNet of 2.22 million parameters without its form. None of the
    # publication has that count. This one is the smallest for ImageNet; gossipx.tasks.costs compares its time.
    "densenet121": Model(
        DenseNet,
        7_978_856,
        1000,
        3,
        224,
        29,
        None,
        "Huang et al. 2016, arXiv:1608.06993, Table 1, the form for ImageNet",
    ),
    # Table 2.1 gives GPT-3 XL 24 heads of 128 elements, which do not fit its width of 2048; 16 do. The output layer of
    # GPT-2 is its token embedding; with one of its own, this model has 102,926,336 parameters more than the 1.3 billion
    # of the table.
    "transformer-1b": Model(
        partial(Transformer, width=2048, heads=16, blocks=24),
        1_418_649_600,
        50_257,
        0,
        2048,
        1,
        None,
        "Brown et al. 2020, arXiv:2005.14165, Table 2.1, GPT-3 XL",
    ),
}
"""Models that cannot be trained here, without a preset: only the sizes of their tensors are used."""


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


def published_sizes(name: str) -> list[tuple[str, int]]:
    """Return the name and the number of elements of each parameter of a model, without allocating them.

    The sizes are those with the published input size and number of classes.

    Args:
        name: a key of ``MODELS`` or ``UNTRAINED``.

    Raises:
        UsageError: the name is unknown.
    """
    return [(of, parameter.numel()) for of, parameter in published(name)[0].named_parameters()]


def published(name: str) -> tuple[nn.Module, Model]:
    """Return a model with the published input size and number of classes, on torch's meta device, and its properties.

    Args:
        name: a key of ``MODELS`` or ``UNTRAINED``.

    Raises:
        UsageError: the name is unknown.
    """
    known = MODELS | UNTRAINED
    known_word("model", name, known)
    model = known[name]
    with torch.device("meta"):
        return model.make(model.classes, model.channels, model.pixels), model
