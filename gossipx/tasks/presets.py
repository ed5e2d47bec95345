"""Presets: the default training settings of each built-in model, and the tasks that it can train.

The paper is Adaptive Communication. Its Table I has the base rate, gamma, momentum, weight decay and thresholds of
three models. It omits the step sizes, which are taken from Caffe's examples as fractions of the run, because those have
other lengths than the paper's 50,000 iterations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TASKS = ("fashion-mnist", "mnist", "cifar10", "cifar100", "text")
"""The keys of ``gossipx.tasks.data.TASKS``."""
TEXT_TASK, TEXT_MODEL = "text", "transformer"
"""The task with text, and its model. All other models train all other tasks."""
WARM_UP = 0.05
"""Fraction of a run in which a cosine schedule raises the rate to its base: Adam's first steps have poor estimates."""


@dataclass(frozen=True)
class Preset:
    """The settings of the optimizer and of the policies for one model.

    Attributes:
        lr: learning rate at the start, or after the warm-up.
        gamma: factor of the learning rate at each step; None: it follows a cosine.
        momentum: SGD's momentum, 0 to 1; None: AdamW has none.
        weight_decay: L2 penalty; of AdamW, the decay in one step divided by the learning rate.
        lr_steps: steps of the learning rate as fractions of the run, ascending; None: it follows a cosine.
        batch_size: images, or windows of text, per batch on each peer.
        threshold: of the paper's rule, for the difference of delta.
        optimizer: SGD, or AdamW with torch's betas.
        schedule: of the learning rate, :func:`step_rate` or :func:`cosine_rate`.
        muon_lr: ``lr`` for Muon with AdamW; None: not measured.
    """

    lr: float
    gamma: float | None
    momentum: float | None
    weight_decay: float
    lr_steps: tuple[float, ...] | None
    batch_size: int
    threshold: float
    optimizer: Literal["sgd", "adamw"] = "sgd"
    schedule: Literal["steps", "cosine"] = "steps"
    muon_lr: float | None = None

    @property
    def policies(self) -> Mapping[str, str]:
        """A spec with this model's arguments by policy name.

        The period of ``tau`` is the paper's (section VI). ``random`` pulls as often on average. ``adaptive`` compares
        the lengths of steps with each other; with :attr:`threshold` it is the paper's rule, which ``--preset paper``
        selects. The distances of ``travel`` and ``drift`` are 100 and 50 thresholds: a step of ``lenet`` is about two
        thresholds long, so that ``travel`` pulls about every 50 steps.
        """
        return {
            "never": "never",
            "tau": "tau:period=10",
            "random": "random:p=0.1",
            "adaptive": "adaptive",
            "travel": f"travel:distance={100 * self.threshold:g}",
            "drift": f"drift:distance={50 * self.threshold:g}",
            "auto": "auto:budget=2%",
        }


def step_rate(lr: float, gamma: float, lr_steps: Sequence[float], step: float, iterations: float) -> float:
    """Return the rate of one iteration: lr · gamma^(number of steps passed), as Caffe's "step" and "multistep".

    Args:
        lr, gamma, lr_steps: as in a preset.
        step: number of iterations before this one, or milliseconds.
        iterations: length of the run in the same unit.
    """
    # The tolerance absorbs rounding of fractions such as 2/9, which would delay a step by an iteration.
    passed = sum(step >= fraction * iterations - 1e-6 for fraction in lr_steps)
    return lr * gamma**passed


def cosine_rate(lr: float, step: float, iterations: float) -> float:
    """Return the rate of one iteration: a linear warm-up, then half a cosine from ``lr`` to 0.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts" (2017), Eq. 5, with one period.

    Args:
        lr: the highest rate.
        step: number of iterations before this one, or milliseconds: the warm-up is a whole number of them.
        iterations: length of the run in the same unit.
    """
    warm_up = round(WARM_UP * iterations)
    if step < warm_up:
        return lr * min(step + 1, warm_up) / warm_up
    return lr * (1 + math.cos(math.pi * (step - warm_up) / (iterations - warm_up))) / 2


def _every(fraction: float) -> tuple[float, ...]:
    """Return the steps of Caffe's policy "step": each multiple of ``fraction`` below 1."""
    count = int(1 / fraction - 1e-9)
    return tuple(number * fraction for number in range(1, count + 1))


def _resnet() -> Preset:
    """Return the settings of He et al. 2015, section 4.2: 64,000 iterations, steps at 32,000 and 48,000, batch 128."""
    return Preset(0.1, 0.1, 0.9, 1e-4, (0.5, 0.75), 128, 0.02)


PRESETS: dict[str, Preset] = {
    # The base rate, momentum and weight decay are those of Caffe's examples/mnist. A single late step suffices for a
    # short run. The batch is half of Caffe's 64, so that a run of a few thousand iterations takes seconds. 0.025 is the
    # smallest threshold that needs 90 % fewer retrievals than tau:10 (bin/bench policies). Of 0.001, 0.002, 0.003,
    # 0.004 and 0.008, 0.003 is Muon's best rate for one process, in 1,000 iterations.
    "lenet": Preset(0.01, 0.1, 0.9, 5e-4, (0.7,), 32, 0.025, muon_lr=0.003),
    # Table I; Caffe's examples/cifar10 (cifar10_full): steps at 60,000 and 65,000 of 70,000, batches of 100. Of 0.002,
    # 0.004 and 0.008 the middle one is Muon's best rate for one process, in 500 iterations on Fashion-MNIST.
    "convnet": Preset(0.001, 0.1, 0.9, 0.004, (60 / 70, 65 / 70), 100, 0.01, muon_lr=0.004),
    "resnet20": _resnet(),
    "resnet56": _resnet(),
    "resnet110": _resnet(),
    # Table I; Caffe's models/bvlc_alexnet: steps every 100,000 of 450,000 iterations, batches of 256.
    "alexnet": Preset(0.01, 0.1, 0.9, 5e-4, _every(100 / 450), 256, 0.025),
    # Table I; Caffe's models/bvlc_googlenet: steps every 320,000 of 10,000,000 iterations, batches of 32.
    "googlenet": Preset(0.01, 0.96, 0.9, 2e-4, _every(0.032), 32, 0.02),
    # Of 0.002, 0.004 and 0.008 the last is best for one process and for DDP with four, in 800 iterations. The threshold
    # is a fifth of the longest step. Muon's 0.008 is for exchanges in each iteration; for one every 10 to 32, and
    # by 0.01 for one process, 0.016 is better.
    "transformer": Preset(0.008, None, None, 0.1, None, 16, 0.2, "adamw", "cosine", muon_lr=0.008),
}
"""Presets by model name, with the keys of ``gossipx.tasks.models.MODELS``."""
