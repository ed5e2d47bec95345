"""Muon against its equations (Jordan, 2024; Liu et al., 2025, arXiv:2502.16982), beside torch's AdamW for the rest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from gossipx.optimizers import muon

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
MOMENTUM, DECAY = 0.95, 0.1
RATES = [0.01, 0.02, 0.02, 0.01]
COEFFICIENTS = 3.4445, -4.7750, 2.0315
HIDDEN = "wide", "square", "tall", "kernel"


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """Five iterations X ← a X + (b X Xᵀ + c (X Xᵀ)²) X of Newton and Schulz, from X = M / ‖M‖ (Jordan)."""
    a, b, c = COEFFICIENTS
    x = matrix / np.linalg.norm(matrix)
    x = x.T if len(matrix) > matrix.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if len(matrix) > matrix.shape[1] else x


class Net(nn.Module):
    """Hidden matrices of three forms and a kernel, between an embedding and a head, with biases and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 6)
        self.wide, self.square, self.tall = nn.Linear(6, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 9)
        self.kernel = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.norm, self.head = nn.LayerNorm(9), nn.Linear(9, 3)


def stepped(nesterov: bool) -> tuple[Net, dict[str, np.ndarray]]:
    """Return a trained net, and the hidden matrices by the equations.

    B ← μ B + G; W ← W − γ λ W − 0.2 γ √max(A, B) NS(G + μ B), where γ changes (Liu et al., Eqs. 2 to 4). A kernel is a
    matrix with a row per output channel (Jordan).
    """
    torch.manual_seed(0)
    net, draw = Net(), np.random.RandomState(0)
    hidden = {name: net.get_submodule(name).get_parameter("weight") for name in HIDDEN}
    w = {name: matrix.detach().double().flatten(1).numpy() for name, matrix in hidden.items()}
    b = {name: np.zeros_like(matrix) for name, matrix in w.items()}
    others = [one for one in net.parameters() if all(one is not matrix for matrix in hidden.values())]
    beside = [nn.Parameter(one.detach().clone()) for one in others]
    optimizer, adamw = muon(net, RATES[0]), torch.optim.AdamW(beside, lr=RATES[0], weight_decay=DECAY)
    for rate in RATES:
        for group in (*optimizer.param_groups, *adamw.param_groups):
            group["lr"] = rate
        for one in net.parameters():
            one.grad = torch.tensor(draw.randn(*one.shape), dtype=torch.float32)
        for one, other in zip(others, beside, strict=True):
            other.grad = one.grad
        for name, matrix in hidden.items():
            assert matrix.grad is not None
            g = matrix.grad.double().flatten(1).numpy()
            b[name] = MOMENTUM * b[name] + g
            update = orthogonalised(g + MOMENTUM * b[name] if nesterov else b[name])
            w[name] = w[name] - rate * DECAY * w[name] - rate * 0.2 * math.sqrt(max(g.shape)) * update
        optimizer.step()
        adamw.step()
    for one, other in zip(others, beside, strict=True):
        assert torch.equal(one, other), "all but the hidden matrices is AdamW's, bit for bit"
    return net, w


def test_hidden_matrices_follow_the_equations_and_the_rest_is_adamw() -> None:
    """Newton-Schulz runs in bfloat16, whose rounding is 1/256: a step is within a fortieth of the exact one."""
    net, exact = stepped(nesterov=True)
    _, without = stepped(nesterov=False)
    for name, matrix in exact.items():
        steps = sum(RATES) * 0.2 * math.sqrt(max(matrix.shape))
        found = net.get_submodule(name).get_parameter("weight").detach().flatten(1).numpy()
        assert np.abs(found - matrix).max() < steps / 40, name
        assert np.abs(found - without[name]).max() > steps / 20, "Nesterov's form can be told from the plain one"
