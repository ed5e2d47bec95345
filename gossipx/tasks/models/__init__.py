"""Built-in models in plain torch, with their parameter counts.

Initial weights are drawn from torch's global generator, so that ``torch.manual_seed`` determines them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossipx.errors import UsageError
from gossipx.specs import known_word, suggest
from gossipx.tasks.models.alexnet import AlexNet
from gossipx.tasks.models.convnet import ConvNet
from gossipx.tasks.models.densenet import DenseNet
from gossipx.tasks.models.googlenet import GoogLeNet
from gossipx.tasks.models.inception import InceptionV4
from gossipx.tasks.models.lenet import LeNet
from gossipx.tasks.models.resnet import ResNet
from gossipx.tasks.models.transformer import Transformer


@dataclass(frozen=True)
class Facts:
    """Properties of a built-in model.

    Attributes:
        parameters: number of parameters with the published input and output sizes: the next three attributes.
        classes: number of classes in the publication; of text, the size of the vocabulary (``transformer``: that of the
            embedded text).
        channels: number of channels of its input images; 0: its input is text.
        pixels: height and width of its input images; of text, the context.
        smallest: minimum of ``pixels``.
        paper: approximate number of parameters according to Adaptive Communication (section VI); None: not mentioned.
        source: the publication that defines the model.
    """

    parameters: int
    classes: int
    channels: int
    pixels: int
    smallest: int
    paper: int | None
    source: str


@dataclass(frozen=True)
class Model:
    """An entry of ``MODELS``: a constructor ``make(classes, channels, pixels)`` and the model's properties."""

    make: Callable[[int, int, int], nn.Module]
    facts: Facts


# "Option A" is the shortcut without parameters, see gossipx.tasks.models.resnet.
_HE = "He et al. 2015, arXiv:1512.03385, section 4.2, option A"

MODELS: dict[str, Model] = {
    "lenet": Model(LeNet, Facts(102_882, 10, 1, 28, 16, None, "LeCun et al. 1998, with more maps")),
    "convnet": Model(ConvNet, Facts(89_578, 10, 3, 32, 8, 2_000_000, "cuda-convnet; Caffe's cifar10_full")),
    "resnet20": Model(partial(ResNet, 20), Facts(269_722, 10, 3, 32, 8, None, _HE)),
    "resnet56": Model(partial(ResNet, 56), Facts(853_018, 10, 3, 32, 8, None, _HE)),
    "resnet110": Model(partial(ResNet, 110), Facts(1_727_962, 10, 3, 32, 8, None, _HE)),
    "alexnet": Model(AlexNet, Facts(60_965_224, 1000, 3, 227, 39, 60_000_000, "Krizhevsky et al. 2012; bvlc_alexnet")),
    "googlenet": Model(
        GoogLeNet,
        Facts(6_998_552, 1000, 3, 224, 31, 11_000_000, "Szegedy et al. 2014, without auxiliary heads; bvlc_googlenet"),
    ),
    "transformer": Model(Transformer, Facts(354_144, 64, 0, 64, 1, None, "Radford et al. 2019, in small")),
}
"""Models that ``gossipx run`` can train; each has a preset of training settings."""

UNTRAINED: dict[str, Model] = {
    "inception-v4": Model(InceptionV4, Facts(42_648_232, 1000, 3, 299, 75, None, "Szegedy et al. 2016; TF-slim")),
    # Modularized Parameter Server, Table 1.1, has a DenseNet of 2.22 million parameters without its form. None of the
    # publication has that count. This one is the smallest for ImageNet; gossipx.tasks.models.costs compares its time.
    "densenet121": Model(
        DenseNet,
        Facts(7_978_856, 1000, 3, 224, 29, None, "Huang et al. 2016, arXiv:1608.06993, Table 1, the form for ImageNet"),
    ),
    # Table 2.1 gives GPT-3 XL 24 heads of 128 elements, which do not fit its width of 2048; 16 do. The output layer of
    # GPT-2 is its token embedding; with one of its own, this model has 102,926,336 parameters more than the 1.3 billion
    # of the table.
    "transformer-1b": Model(
        partial(Transformer, width=2048, heads=16, blocks=24),
        Facts(1_418_649_600, 50_257, 0, 2048, 1, None, "Brown et al. 2020, arXiv:2005.14165, Table 2.1, GPT-3 XL"),
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
    smallest = model.facts.smallest
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


def published(name: str) -> tuple[nn.Module, Facts]:
    """Return a model with the published input size and number of classes, on torch's meta device, and its properties.

    Args:
        name: a key of ``MODELS`` or ``UNTRAINED``.

    Raises:
        UsageError: the name is unknown.
    """
    known = MODELS | UNTRAINED
    known_word("model", name, known)
    facts = known[name].facts
    with torch.device("meta"):
        return known[name].make(facts.classes, facts.channels, facts.pixels), facts
