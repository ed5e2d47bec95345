"""Outer optimizers against references that are written out here: GASLoC's update and DiLoCo's outer optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import Point, bound, ended, maker, models, sgd, world
from transcripts import LoggedWorld

from gossipx.sim import Network

PAIRS: dict[str, Any] = {"mode": "pushpull"}
GAMMA = 0.6


def trained(x: torch.Tensor, rank: int, steps: int) -> torch.Tensor:
    """Return x after training steps of peer ``rank`` without any exchange."""
    module = Point(rank)
    module.x.data.copy_(x)
    for _ in range(steps):
        sgd(module)
    return module.x.detach().clone()


# --- GASLoC (arXiv:2606.11081): θ_{t+1} = y_t − α Λ y_t + γ (y_t − y_{t−1}) --------------------------


def gasloc(exchanges: int, period: int, laplacian: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the models after ``exchanges`` of GASLoC with η = 1: y_t are the models after ``period`` local steps.

    Args:
        laplacian: α Λ, (N, N).
    """
    theta = torch.stack([Point(0).x.detach() for _ in range(len(laplacian))])
    before: torch.Tensor | None = None
    for _ in range(exchanges):
        y = torch.stack([trained(x, rank, period) for rank, x in enumerate(theta)])
        theta = y - laplacian @ y
        if before is not None:  # "the last term is left out at the first exchange"
            theta = theta + gamma * (y - before)
        before = y
    return theta


@pytest.mark.parametrize("gamma", [0.0, GAMMA, 0.9])
def test_pairs_do_gaslocs_update(gamma: float):
    """Two peers average each other: α Λ = ½ (1, −1; −1, 1)."""
    period, exchanges = 5, 4
    options = {"policy": f"tau:{period}", "iterations": period * exchanges, "finish": "none", "blocking": True}
    made = ended(world(2, across=f"momentum:{gamma}", **options, **PAIRS), bound(2, period * exchanges, waits=4))
    expected = gasloc(exchanges, period, torch.tensor([[0.5, -0.5], [-0.5, 0.5]]), gamma)
    torch.testing.assert_close(models(made).float(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gamma", [0.0, GAMMA, 0.9])
def test_pulls_do_gaslocs_update(gamma: float):
    """The other peer does not pull: α Λ = ½ (1, −1; 0, 0). It does not train either, so that its model is known."""
    options = {"finish": "none", "blocking": True, "init": "own", "across": f"momentum:{gamma}"}
    made = LoggedWorld(0)
    made.start(0, maker(0, 2, policy="tau:5", iterations=20, **options))
    made.start(1, maker(1, 2, policy="never", iterations=25, gradient_step=lambda peer: None, **options))
    ended(made, bound(2, 25, waits=4))
    theta, theirs = Point(0).x.detach(), Point(1).x.detach()
    before: torch.Tensor | None = None
    for _ in range(4):
        y = trained(theta, 0, 5)
        theta = y + 0.5 * (theirs - y) + (0 if before is None else gamma * (y - before))
        before = y
    torch.testing.assert_close(models(made)[0].float(), theta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [3, 4])
def test_a_wave_does_gaslocs_update_over_the_complete_graph(size: int):
    period, exchanges = 4, 3
    options = {"policy": f"tau:{period}", "iterations": period * exchanges, "finish": "none", "blocking": True}
    made = ended(world(size, exchange="waves", across=f"momentum:{GAMMA}", **options), bound(size, 12, waits=9))
    averaging = torch.eye(size) - 1 / size
    torch.testing.assert_close(models(made).float(), gasloc(exchanges, period, averaging, GAMMA), rtol=1e-5, atol=1e-5)


def test_steps_during_an_exchange_are_added_to_its_result():
    """y_t is the model as exchange t begins: x ← x̄ + γ (y_t − y_{t−1}) + (x − y_t)."""
    options = {"policy": "tau:6", "iterations": 15, "finish": "none", "gradient_step": one_step}
    made = LoggedWorld(0, Network(bandwidth=30, delay=0.05))  # 64 bytes in 2 s, at 1 s a step
    for rank in range(2):
        made.start(rank, maker(rank, 2, module=still(rank), across=f"momentum:{GAMMA}", init="own", **options, **PAIRS))
    ended(made, bound(2, 15, waits=2))
    # Peer i moves by i + 1 in each step. Both exchanges begin after steps 6 and 12.
    x0, x1 = still(0).weight.detach().flatten(), still(1).weight.detach().flatten()
    first = [x0 + 6, x1 + 12]
    after = [y + 0.5 * (other - y) for y, other in zip(first, first[::-1], strict=True)]
    second = [after[0] + 6, after[1] + 12]
    last = [
        y + 0.5 * (other - y) + GAMMA * (y - before)
        for y, other, before in zip(second, second[::-1], first, strict=True)
    ]
    expected = torch.stack([last[0] + 3, last[1] + 6])
    assert all(retrieval.step > 6 for peer in made.peers.values() for retrieval in made.retrievals(peer.rank)), (
        "it overlapped"
    )
    torch.testing.assert_close(models(made).float(), expected, rtol=1e-5, atol=1e-5)


def still(rank: int) -> torch.nn.Linear:
    module = torch.nn.Linear(16, 1, bias=False)
    module.weight.data.copy_(torch.randn(1, 16, generator=torch.Generator().manual_seed(rank)))
    return module


def one_step(peer: Any) -> None:
    next(peer.module.parameters()).data.add_(float(peer.rank + 1))


# --- DiLoCo (arXiv:2311.08105, Algorithm 1) ------------------------------------------------------------


def diloco(size: int, rounds: int, period: int, lr: float, momentum: float) -> torch.Tensor:
    """Return θ after some rounds, by torch's own SGD with Nesterov momentum as the outer optimizer."""
    theta = torch.nn.Parameter(Point(0).x.detach().clone())
    optimizer = torch.optim.SGD([theta], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for _ in range(rounds):
        workers = [trained(theta.detach(), rank, period) for rank in range(size)]
        theta.grad = theta.detach() - torch.stack(workers).mean(0)  # the outer gradient, line 12
        optimizer.step()
    return theta.detach()


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.5, 0.5)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_waves_with_nesterov_are_diloco(size: int, lr: float, momentum: float):
    """Without a coordinator: every peer computes the same θ, bit for bit."""
    period, rounds = 5, 4
    options = {"policy": f"tau:{period}", "iterations": period * rounds, "finish": "none", "blocking": True}
    across = f"nesterov:lr={lr},momentum={momentum}"
    made = ended(world(size, exchange="waves", across=across, **options), bound(size, period * rounds, waits=8))
    expected = diloco(size, rounds, period, lr, momentum)
    for row in models(made).float():
        assert torch.equal(row, models(made, [0])[0].float())
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-6)
