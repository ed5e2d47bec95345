"""Learning-rate schedules by the formulas of Caffe's ``lr_policy``."""

from __future__ import annotations

import math
from collections.abc import Callable

from gossipx.solver.prototxt import SolverParameter

Rate = Callable[[SolverParameter, int], float]
"""Returns the rate of an iteration, counted from 0, for a solver's parameters."""


def steps_passed(param: SolverParameter, iteration: int) -> int:
    """Return the number of rate steps up to an iteration, for ``step`` (every stepsize) and ``multistep``."""
    if param.lr_policy == "step":
        return iteration // param.stepsize
    return sum(iteration >= value for value in param.stepvalue)


def _stepped(param: SolverParameter, iteration: int) -> float:
    return param.base_lr * math.pow(param.gamma, steps_passed(param, iteration))


def _poly(param: SolverParameter, iteration: int) -> float:
    # After max_iter, where the formula is undefined, the rate stays as at max_iter.
    return param.base_lr * math.pow(max(0.0, 1 - iteration / param.max_iter), param.power)


def _sigmoid(param: SolverParameter, iteration: int) -> float:
    exponent = -param.gamma * (iteration - param.stepsize)
    return param.base_lr / (1 + math.exp(exponent)) if exponent < 700 else 0.0  # exp would overflow


POLICIES: dict[str, tuple[tuple[str, ...], Rate]] = {
    "fixed": ((), lambda param, iteration: param.base_lr),
    "step": (("gamma", "stepsize"), _stepped),
    "exp": (("gamma",), lambda param, iteration: param.base_lr * math.pow(param.gamma, iteration)),
    "inv": (
        ("gamma", "power"),
        lambda param, iteration: param.base_lr * math.pow(1 + param.gamma * iteration, -param.power),
    ),
    "multistep": (("gamma", "stepvalue"), _stepped),
    "poly": (("power", "max_iter"), _poly),
    "sigmoid": (("gamma", "stepsize"), _sigmoid),
}
"""The fields that each ``lr_policy`` needs, and its rate."""


def learning_rate(param: SolverParameter, iteration: int) -> float:
    """Return the rate of one iteration.

    With the iteration i, base = base_lr and γ = gamma: ``fixed`` is base, ``step`` base·γ^⌊i/stepsize⌋, ``exp``
    base·γ^i, ``inv`` base·(1+γi)^−power, ``multistep`` base·γ^(stepvalues reached), ``poly`` base·(1−i/max_iter)^power,
    ``sigmoid`` base/(1+e^(−γ(i−stepsize))).

    Args:
        param: checked parameters.
        iteration: number of updates before this one.
    """
    try:
        return POLICIES[param.lr_policy][1](param, iteration)
    except OverflowError:  # gamma is above 1, and there are many iterations
        return math.inf
