"""Learning-rate policies: the rate of an iteration, by the formulas of Caffe's ``lr_policy``."""

from __future__ import annotations

import math
from collections.abc import Callable

from gossipx.solver.prototxt import SolverParameter

Policy = Callable[[SolverParameter, int], float]
"""The rate of an iteration, from 0, by a solver's parameters."""


def steps_passed(param: SolverParameter, iteration: int) -> int:
    """How often the rate has stepped before an iteration: ``step`` every stepsize, ``multistep`` at each stepvalue."""
    if param.lr_policy == "step":
        return iteration // param.stepsize
    return sum(iteration >= value for value in param.stepvalue)


def _stepped(param: SolverParameter, iteration: int) -> float:
    return param.base_lr * math.pow(param.gamma, steps_passed(param, iteration))


def _poly(param: SolverParameter, iteration: int) -> float:
    # Past its end, where the formula has no value, training goes on as at the end.
    return param.base_lr * math.pow(max(0.0, 1 - iteration / param.max_iter), param.power)


def _sigmoid(param: SolverParameter, iteration: int) -> float:
    exponent = -param.gamma * (iteration - param.stepsize)
    return param.base_lr / (1 + math.exp(exponent)) if exponent < 700 else 0.0  # where exp overflows


POLICIES: dict[str, Policy] = {
    "fixed": lambda param, iteration: param.base_lr,
    "step": _stepped,
    "exp": lambda param, iteration: param.base_lr * math.pow(param.gamma, iteration),
    "inv": lambda param, iteration: param.base_lr * math.pow(1 + param.gamma * iteration, -param.power),
    "multistep": _stepped,
    "poly": _poly,
    "sigmoid": _sigmoid,
}
"""By ``lr_policy``."""
NEEDS: dict[str, tuple[str, ...]] = {
    "fixed": (),
    "step": ("gamma", "stepsize"),
    "exp": ("gamma",),
    "inv": ("gamma", "power"),
    "multistep": ("gamma", "stepvalue"),
    "poly": ("power",),
    "sigmoid": ("gamma", "stepsize"),
}
"""Fields that a policy cannot do without; ``poly`` also needs a length, which may be the run's."""


def learning_rate(param: SolverParameter, iteration: int) -> float:
    """The rate of one iteration.

    Args:
        param: checked parameters; with i the iteration, base the base_lr and γ gamma, ``fixed`` is base, ``step``
            base·γ^⌊i/stepsize⌋, ``exp`` base·γ^i, ``inv`` base·(1+γi)^−power, ``multistep`` base·γ^(stepvalues
            reached), ``poly`` base·(1−i/max_iter)^power, ``sigmoid`` base/(1+e^(−γ(i−stepsize))).
        iteration: updates made before this one, from 0.
    """
    try:
        return POLICIES[param.lr_policy](param, iteration)
    except OverflowError:  # a gamma above 1, and many iterations
        return math.inf
