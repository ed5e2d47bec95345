"""Caffe's update rules and learning-rate policies, compared with Caffe itself.

``caffe_steps.json`` has results of BVLC Caffe 1.0.0: the weights and rates of 12 updates in each of 18 cases.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gossipx.solver.optimizers import TYPES
from gossipx.solver.prototxt import solver_from_text
from gossipx.solver.rates import learning_rate
from gossipx.solver.solver import Solver


@pytest.mark.parametrize("type_", TYPES)
def test_an_update_leaves_its_gradient_as_it_is(type_: str):
    """Servers may hold it elsewhere."""
    weights = nn.Parameter(torch.randn(4, 3))
    weights.grad = torch.randn(4, 3)
    before = weights.grad.clone()
    TYPES[type_]([weights], lr=0.1, momentum=0.9, weight_decay=0.01).step()
    assert torch.equal(weights.grad, before)


def test_an_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="nesterov"):
        TYPES["SGD"]([nn.Parameter(torch.ones(1))], nesterov=True)


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
