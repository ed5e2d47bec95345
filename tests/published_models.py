"""Models of publications that gossipx does not train, and the rows of ``gossipx/tasks/published.tsv``.

``python tests/published_models.py`` writes the file anew; ``tests/unit/test_tasks_costs.py`` compares the two.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from gossipx.tasks.models import MODELS, Classifier, Model, Transformer

FILE = Path(__file__).parents[1] / "gossipx" / "tasks" / "published.tsv"
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


UNTRAINED: dict[str, Model] = {
    "inception-v4": Model(InceptionV4, 1000, 3, 299, 75),
    # Modularized Parameter Server, Table 1.1, has a DenseNet of 2.22 million parameters without its form. None of the
    # publication has that count. This one is the smallest for ImageNet; gossipx.tasks.costs compares its time.
    "densenet121": Model(DenseNet, 1000, 3, 224, 29),
    # Brown et al. 2020, arXiv:2005.14165. Table 2.1 gives GPT-3 XL 24 heads of 128 elements, which do not fit its width
    # of 2048; 16 do. The output layer of GPT-2 is its token embedding; with one of its own, this model has 102,926,336
    # parameters more than the 1.3 billion of the table.
    "transformer-1b": Model(partial(Transformer, width=2048, heads=16, blocks=24), 50_257, 0, 2048, 1),
}


def published(name: str) -> nn.Module:
    """Return a model with the published input size and number of classes, on torch's meta device."""
    facts = (MODELS | UNTRAINED)[name]
    with torch.device("meta"):
        return facts.make(facts.classes, facts.channels, facts.pixels)


def rows(name: str) -> list[str]:
    """Return the rows of a model: its name, and the name, the elements and the multiply-adds of each tensor."""
    module, facts = published(name), (MODELS | UNTRAINED)[name]
    counts: dict[Tensor, int] = dict.fromkeys(module.parameters(), 0)

    def count(layer: nn.Module, given: tuple[Tensor], output: Tensor) -> None:
        first = next(layer.parameters(recurse=False))
        if isinstance(layer, nn.Conv2d | nn.Linear):
            outputs = layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features
            counts[first] += output.numel() // outputs * first.numel()
        else:
            counts[first] += 2 * output.numel()

    for layer in module.modules():
        if next(layer.parameters(recurse=False), None) is not None:
            layer.register_forward_hook(count)
    one = (1, facts.channels, facts.pixels, facts.pixels) if facts.channels else (1, facts.pixels)
    module.eval()(torch.zeros(one, dtype=torch.float32 if facts.channels else torch.int64, device="meta"))
    return [f"{name}\t{of}\t{one.numel()}\t{counts[one]}" for of, one in module.named_parameters()]


if __name__ == "__main__":
    FILE.write_text("".join(f"{row}\n" for name in MODELS | UNTRAINED for row in rows(name)), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")
