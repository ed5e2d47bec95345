"""Caffe's update rules and learning-rate policies, compared with their formulas and with Caffe itself.

``caffe_steps.json`` has results of BVLC Caffe 1.0.0: the weights and rates of 12 updates in each of 18 cases.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from gossipx.solver.optimizers import TYPES
from gossipx.solver.prototxt import solver_from_text
from gossipx.solver.rates import learning_rate
from gossipx.solver.solver import Solver

Array = NDArray[np.float64]
MU, BETA2, RHO, DELTA, DECAY = 0.9, 0.995, 0.97, 1e-3, 0.01
RATES = [0.1, 0.1, 0.05, 0.05, 0.2, 0.2]  # a rate that changes tells whether it is inside the buffer


def sgd(w: Array, grads: list[Array]) -> Array:
    v = np.zeros_like(w)
    for a, g in zip(RATES, grads, strict=True):
        v = MU * v + a * (g + DECAY * w)
        w = w - v
    return w


def nesterov(w: Array, grads: list[Array]) -> Array:
    v = np.zeros_like(w)
    for a, g in zip(RATES, grads, strict=True):
        new = MU * v + a * (g + DECAY * w)
        w = w - ((1 + MU) * new - MU * v)
        v = new
    return w


def adagrad(w: Array, grads: list[Array]) -> Array:
    h = np.zeros_like(w)
    for a, g in zip(RATES, grads, strict=True):
        d = g + DECAY * w
        h = h + d**2
        w = w - a * d / (np.sqrt(h) + DELTA)
    return w


def rmsprop(w: Array, grads: list[Array]) -> Array:
    h = np.zeros_like(w)
    for a, g in zip(RATES, grads, strict=True):
        d = g + DECAY * w
        h = RHO * h + (1 - RHO) * d**2
        w = w - a * d / (np.sqrt(h) + DELTA)
    return w


def adadelta(w: Array, grads: list[Array]) -> Array:
    h, u = np.zeros_like(w), np.zeros_like(w)
    for a, g in zip(RATES, grads, strict=True):
        d = g + DECAY * w
        h = MU * h + (1 - MU) * d**2
        step = d * np.sqrt((u + DELTA) / (h + DELTA))
        u = MU * u + (1 - MU) * step**2
        w = w - a * step
    return w


def adam(w: Array, grads: list[Array]) -> Array:
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (a, g) in enumerate(zip(RATES, grads, strict=True), 1):
        d = g + DECAY * w
        m = MU * m + (1 - MU) * d
        v = BETA2 * v + (1 - BETA2) * d**2
        w = w - a * math.sqrt(1 - BETA2**t) / (1 - MU**t) * m / (np.sqrt(v) + DELTA)
    return w


FORMULAS: dict[str, Callable[[Array, list[Array]], Array]] = {
    "SGD": sgd,
    "Nesterov": nesterov,
    "AdaGrad": adagrad,
    "RMSProp": rmsprop,
    "AdaDelta": adadelta,
    "Adam": adam,
}
SETTINGS = {"momentum": MU, "momentum2": BETA2, "rms_decay": RHO, "delta": DELTA, "weight_decay": DECAY}


@pytest.mark.parametrize("type_", FORMULAS)
def test_updates_are_caffes(type_: str):
    rng = np.random.default_rng(5)
    start, grads = rng.normal(size=(4, 3)), [rng.normal(size=(4, 3)) for _ in RATES]
    weights = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = TYPES[type_]([weights], **SETTINGS)
    for t, (rate, gradient) in enumerate(zip(RATES, grads, strict=True)):
        weights.grad = torch.from_numpy(gradient.copy())
        optimizer.param_groups[0].update(lr=rate, iteration=float(t))
        optimizer.step()
        assert np.array_equal(weights.grad.numpy(), gradient)  # servers may hold it elsewhere
    np.testing.assert_allclose(weights.detach().numpy(), FORMULAS[type_](start, grads), rtol=1e-12, atol=1e-14)


def test_an_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="nesterov"):
        TYPES["SGD"]([nn.Parameter(torch.ones(1))], nesterov=True)


BASE, GAMMA, POWER, SIZE, LAST = 0.2, 0.7, 0.75, 10, 40
RATE_FORMULAS: dict[str, Callable[[int], float]] = {
    "fixed": lambda i: BASE,
    "step": lambda i: BASE * GAMMA ** (i // SIZE),
    "exp": lambda i: BASE * GAMMA**i,
    "inv": lambda i: BASE * (1 + GAMMA * i) ** (-POWER),
    "multistep": lambda i: BASE * GAMMA ** ((i >= 7) + (i >= 12) + (i >= 30)),
    "poly": lambda i: BASE * (1 - i / LAST) ** POWER,
    "sigmoid": lambda i: BASE / (1 + math.exp(-GAMMA * (i - SIZE))),
}


@pytest.mark.parametrize("policy", RATE_FORMULAS)
def test_rates_are_caffes(policy: str):
    text = f"""
        base_lr: {BASE} gamma: {GAMMA} power: {POWER} stepsize: {SIZE} max_iter: {LAST}
        stepvalue: 7 stepvalue: 12 stepvalue: 30 lr_policy: "{policy}"
    """
    param = solver_from_text(text, Path("solver.prototxt"))
    for i in range(LAST + 1):
        assert learning_rate(param, i) == pytest.approx(RATE_FORMULAS[policy](i), rel=1e-12)


def test_rates_far_out_are_numbers():
    text = 'base_lr: 0.1 gamma: -1 stepsize: 1000000 power: 0.5 max_iter: 10 lr_policy: "{}"'
    assert learning_rate(solver_from_text(text.format("sigmoid").replace("-1", "1"), Path("s")), 0) == 0.0
    assert learning_rate(solver_from_text(text.format("poly"), Path("s")), 11) == 0.0


# --- Caffe itself -------------------------------------------------------------------------------------

CAFFE: dict[str, Any] = json.loads((Path(__file__).parent.parent / "caffe_steps.json").read_text())


@pytest.mark.parametrize("case", CAFFE["cases"], ids=lambda case: case["name"])
def test_steps_are_those_of_caffe_itself(case: dict[str, Any]) -> None:
    """Sequences of clipping, scaling, decay, multipliers, rates and updates, recorded from pycaffe's apply_update."""
    net = nn.Linear(2, 3)
    solver = Solver(
        solver_from_text(case["solver"] + " solver_mode: CPU"),
        net=net,
        loss=nn.functional.mse_loss,
        train=[],
        lr_mult=dict(zip(("weight", "bias"), case["lr_mult"], strict=True)),
        decay_mult=dict(zip(("weight", "bias"), case["decay_mult"], strict=True)),
        stream=io.StringIO(),
    )
    blobs = solver.net.params["Linear"]
    for blob, start in zip(blobs, CAFFE["start"], strict=True):
        blob.data.reshape(-1)[:] = start
    for gradients, rate, expected in zip(CAFFE["gradients"], case["lr"], case["weights"], strict=True):
        for blob, gradient in zip(blobs, gradients, strict=True):
            blob.diff.reshape(-1)[:] = gradient
        assert solver.lr == pytest.approx(rate, rel=1e-5)  # Caffe's are of 32 bits
        solver.apply_update()
        for blob, weights in zip(blobs, expected, strict=True):
            off = np.abs(blob.data.reshape(-1) - weights) / (np.abs(weights) + 0.01)
            assert off.max() < 1e-4
