"""Presets: the settings that each built-in model is trained with unless others are given.

The paper is Adaptive Communication; its Table I has the base rate, gamma, momentum and weight decay of three models and
their thresholds. The step sizes that it leaves out are those of Caffe's examples, as fractions of the run: Caffe's last
for other numbers of iterations than the paper's 50,000, and the shape of the schedule is what carries over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class Schedule(Protocol):
    """What :func:`learning_rate` looks at."""

    @property
    def base_lr(self) -> float:
        """The rate at the start."""

    @property
    def gamma(self) -> float:
        """What the rate is multiplied with at each step."""

    @property
    def lr_steps(self) -> tuple[float, ...]:
        """Where the steps are, as fractions of the run, ascending."""


@dataclass(frozen=True)
class Preset:
    """SGD's settings and the policies' arguments for one model.

    Attributes:
        base_lr: learning rate at the start.
        gamma: the learning rate is multiplied with it at each step.
        momentum: of SGD, 0 to 1.
        weight_decay: L2 penalty.
        lr_steps: where the learning rate steps, as fractions of the run, ascending.
        batch_size: images a batch and peer.
        policies: a policy's name to its spec with this model's arguments.
    """

    base_lr: float
    gamma: float
    momentum: float
    weight_decay: float
    lr_steps: tuple[float, ...]
    batch_size: int
    policies: Mapping[str, str] = field(hash=False)


def learning_rate(schedule: Schedule, step: int, iterations: int) -> float:
    """The rate of one iteration: base_lr · gamma^(number of steps passed), Caffe's "step" and "multistep".

    Args:
        schedule: a preset, or settings with the same fields.
        step: iterations done before this one, from 0.
        iterations: the run's length.
    """
    # The slack is for fractions such as 2/9 that have no exact product: it must not move a step by an iteration.
    passed = sum(step >= fraction * iterations - 1e-6 for fraction in schedule.lr_steps)
    return schedule.base_lr * schedule.gamma**passed


def _policies(threshold: float) -> Mapping[str, str]:
    """The specs for a model whose threshold for the difference of delta is ``threshold``.

    Only ``adaptive`` and ``tau`` are the paper's (section VI). ``random`` pulls as often as ``tau`` on average.
    ``travel`` and ``drift`` get 100 and 50 thresholds: steps of ``lenet`` are about two thresholds long, so that
    ``travel`` pulls about every 50 steps of its run.
    """
    return {
        "never": "never",
        "tau": "tau:period=10",
        "random": "random:p=0.1",
        "adaptive": f"adaptive:threshold={threshold:g}",
        "travel": f"travel:distance={100 * threshold:g}",
        "drift": f"drift:distance={50 * threshold:g}",
    }


def _every(fraction: float) -> tuple[float, ...]:
    """Steps at each multiple of ``fraction`` below 1: Caffe's policy "step"."""
    count = int(1 / fraction - 1e-9)
    return tuple(number * fraction for number in range(1, count + 1))


def _resnet() -> Preset:
    """He et al. 2015, section 4.2: 64,000 iterations with steps at 32,000 and 48,000, batches of 128."""
    return Preset(0.1, 0.1, 0.9, 1e-4, (0.5, 0.75), 128, _policies(0.02))


PRESETS: dict[str, Preset] = {
    # Caffe's examples/mnist base rate, momentum and weight decay. One step, late: enough to settle a short run. The
    # batch is half of Caffe's 64, so that a run of a few thousand iterations takes seconds.
    # 0.025: the smallest threshold that needs 90 % fewer retrievals than tau:10 (bin/bench policies).
    "lenet": Preset(0.01, 0.1, 0.9, 5e-4, (0.7,), 32, _policies(0.025)),
    # Table I; Caffe's examples/cifar10 (cifar10_full): steps at 60,000 and 65,000 of 70,000, batches of 100.
    "convnet": Preset(0.001, 0.1, 0.9, 0.004, (60 / 70, 65 / 70), 100, _policies(0.01)),
    "resnet20": _resnet(),
    "resnet56": _resnet(),
    "resnet110": _resnet(),
    # Table I; Caffe's models/bvlc_alexnet: a step every 100,000 of 450,000, batches of 256.
    "alexnet": Preset(0.01, 0.1, 0.9, 5e-4, _every(100 / 450), 256, _policies(0.025)),
    # Table I; Caffe's models/bvlc_googlenet: a step every 320,000 of 10,000,000, batches of 32.
    "googlenet": Preset(0.01, 0.96, 0.9, 2e-4, _every(0.032), 32, _policies(0.02)),
}
"""Keyed like ``gossipx.tasks.models.MODELS``."""
