"""LARS against its algorithm (You, Gitman and Ginsburg, 2017, arXiv:1708.03888, Algorithm 1)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gossipx.optimizers import LARS

TRUST, DECAY, MOMENTUM = 0.02, 0.05, 0.9
RATES = [3.0, 3.0, 1.5, 1.5, 0.3, 0.3]


def test_each_tensor_has_a_rate_of_its_own_and_the_rate_is_within_the_momentum() -> None:
    """λ = η ‖w‖ / (‖g‖ + β ‖w‖); v ← m v + γ λ (g + β w); w ← w − v, line by line in numpy, with a changing γ."""
    draw = np.random.RandomState(0)
    shapes = [(4, 3), (7,), (2, 2, 2), ()]
    w = [np.asarray(10.0**power * draw.randn(*shape)) for power, shape in zip((0, 2, -2, 0), shapes, strict=True)]
    v = [np.zeros_like(one) for one in w]
    tensors = [nn.Parameter(torch.tensor(one, dtype=torch.float64)) for one in w]
    optimizer = LARS(tensors, lr=0.0, momentum=MOMENTUM, weight_decay=DECAY, trust=TRUST)
    for rate in RATES:
        optimizer.param_groups[0]["lr"] = rate
        for number, tensor in enumerate(tensors):
            g = np.asarray(draw.randn(*shapes[number]))
            tensor.grad = torch.tensor(g, dtype=torch.float64)
            length = np.linalg.norm(w[number].ravel())
            local = TRUST * length / (np.linalg.norm(g.ravel()) + DECAY * length)
            v[number] = MOMENTUM * v[number] + rate * local * (g + DECAY * w[number])
            w[number] = np.asarray(w[number] - v[number])
        gradients = [tensor.grad.clone() for tensor in tensors if tensor.grad is not None]
        optimizer.step()
        for tensor, gradient in zip(tensors, gradients, strict=True):
            assert tensor.grad is not None and torch.equal(tensor.grad, gradient), "the gradient is the loop's"
    for tensor, expected in zip(tensors, w, strict=True):
        np.testing.assert_allclose(tensor.detach().numpy(), expected, rtol=1e-9, atol=1e-12)


def test_a_tensor_of_zeros_and_a_gradient_of_zeros() -> None:
    """‖w‖ = 0 would give a rate of 0, so that a bias never moves: the ratio of the norms counts as 1 then."""
    bias, unused, idle = (nn.Parameter(torch.full((3,), value)) for value in (0.0, 2.0, 1.0))
    bias.grad, unused.grad = torch.tensor([1.0, -2.0, 0.5]), torch.zeros(3)
    gradient = bias.grad.clone()
    LARS([bias, unused, idle], lr=5.0, weight_decay=0.0).step()
    torch.testing.assert_close(bias.detach(), -5.0 * 0.001 * gradient)
    assert torch.equal(unused.detach(), torch.full((3,), 2.0)) and torch.equal(idle.detach(), torch.ones(3))


def test_it_resumes_and_runs_a_closure() -> None:
    module, again = nn.Linear(3, 2), nn.Linear(3, 2)
    again.load_state_dict(module.state_dict())
    one, other = LARS(module.parameters(), lr=2.0), LARS(again.parameters(), lr=2.0)
    for step in range(4):
        for parameter, copied in zip(module.parameters(), again.parameters(), strict=True):
            parameter.grad = torch.full_like(parameter, 0.1 * step - 0.2)
            copied.grad = parameter.grad.clone()
        assert float(one.step(lambda: torch.tensor(3.0))) == 3.0
        if step == 1:
            other.step()
            state, other = other.state_dict(), LARS(again.parameters(), lr=9.0)
            other.load_state_dict(state)
        else:
            other.step()
    for parameter, copied in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, copied)


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"lr": 1.0, "momentum": 1.0}, {"lr": 1.0, "weight_decay": -0.1}, {"lr": 1.0, "trust": 0.0}]
)
def test_settings_without_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="LARS: "):
        LARS([nn.Parameter(torch.ones(1))], **wrong)


def test_lengths_of_16_bit_tensors_do_not_overflow() -> None:
    """A length above float16's largest value of 65,504."""
    weights = nn.Parameter(torch.full((10_000,), 1000.0, dtype=torch.float16))
    weights.grad = torch.full_like(weights, 4.0)
    LARS([weights], lr=100.0).step()
    torch.testing.assert_close(weights.detach(), torch.full((10_000,), 900.0, dtype=torch.float16))
