"""Waves that keep what they did not send, with the equations of :mod:`gossipx.compression.wave_coding` written out.

DiLoCo: Douillard et al. (2023, arXiv:2311.08105), Algorithm 1. MuLoCo: Thérien, Huang, Rish, Belilovsky (2025,
arXiv:2505.23725), Algorithm 1: DiLoCo whose inner optimizer is Muon, with error feedback for compressed updates.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from toy import SIZE, Point, bound, ended, models, world

import gossipx

PERIOD, WAVES = 5, 6
Vector = np.ndarray


def sign(values: Vector) -> Vector:
    """EF-signSGD's code: the sign times ‖x‖₁ / n."""
    return np.where(values >= 0, 1.0, -1.0) * np.abs(values).mean()


def by_hand(size: int, lr: float, momentum: float) -> tuple[Vector, Vector]:
    """Return the reference and all models after some waves: c = C(x − r), E += mean c, A = C(E), v = μ v + A, ..."""
    cuts = [SIZE * index // size for index in range(size + 1)]
    shards = [slice(*both) for both in pairwise(cuts)]
    r = Point(0).x.detach().double().numpy()
    v, e_owner = np.zeros(SIZE), np.zeros(SIZE)
    x = np.tile(r, (size, 1))
    for _ in range(WAVES):
        for rank in range(size):
            for _ in range(PERIOD):
                x[rank] -= 0.05 * (x[rank] - Point(rank).target.double().numpy())
        moved = x - r
        for shard in shards:
            codes = np.stack([sign(one[shard]) for one in moved])
            e_owner[shard] += codes.mean(0)
            mean = sign(e_owner[shard])
            e_owner[shard] -= mean
            v[shard] = momentum * v[shard] + mean
            r[shard] += lr * (mean + momentum * v[shard])
            x[:, shard] = r[shard] + moved[:, shard] - codes
    return r, x


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.8, 0.4)])
@pytest.mark.parametrize("size", [2, 3])
def test_the_update_of_a_coded_wave(size: int, lr: float, momentum: float):
    across = "none" if momentum == 0 else f"nesterov:lr={lr},momentum={momentum}"
    options = {"policy": f"tau:{PERIOD}", "iterations": PERIOD * WAVES, "finish": "none", "blocking": True}
    made = world(size, exchange="waves", codec="efsignsgd", across=across, **options)
    ended(made, bound(size, PERIOD * WAVES, waits=8))
    reference, expected = by_hand(size, lr, momentum)
    np.testing.assert_allclose(models(made).numpy(), expected, rtol=1e-4, atol=1e-5)
    for peer in made.peers.values():
        np.testing.assert_allclose(peer.driver.waves.codecs[0]._reference[0].numpy(), reference, rtol=1e-4, atol=1e-5)


def test_the_mean_of_all_models_and_what_owners_hold_is_kept():
    """Σ x_i + N E changes by the peers' own steps alone (η = 1, μ = 0), though codes have one bit per value."""
    options = {"policy": f"tau:{PERIOD}", "iterations": PERIOD * WAVES, "finish": "none", "blocking": True}
    still = {"gradient_step": lambda peer: None, "init": "own"}
    made = world(3, exchange="waves", codec="efsignsgd", **options, **still)
    ended(made, bound(3, PERIOD * WAVES, waits=8))
    left = torch.zeros(SIZE, dtype=torch.float64)
    for peer in made.peers.values():
        (piece,), (values,) = peer.driver.waves.codecs[0]._residual
        left[piece.trained] += values.double()
    begun = torch.stack([Point(rank).x.detach().double() for rank in range(3)])
    torch.testing.assert_close(models(made).sum(0) + 3 * left, begun.sum(0), rtol=1e-5, atol=1e-5)
    assert float((models(made) - models(made)[0]).abs().max()) > 0, "residuals stay"


# --- MuLoCo --------------------------------------------------------------------------------------------


class Matrix(nn.Module):
    """A hidden matrix between an embedding and a head, with the loss ½‖W − target‖²."""

    def __init__(self, rank: int):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.hidden = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 1, bias=False)
        self.hidden.weight.data.copy_(torch.randn(4, 4, generator=generator))
        self.head.weight.data.copy_(torch.randn(1, 4, generator=generator))
        self.target = torch.randn(4, 4, generator=generator)

    def forward(self) -> torch.Tensor:
        return 0.5 * (self.hidden.weight - self.target).square().sum() + 0.5 * self.head.weight.square().sum()


def trained(module: Matrix, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module().backward()
    optimizer.step()


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.8, 0.4)])
def test_muon_in_the_peers_and_nesterov_across_them_is_muloco(lr: float, momentum: float):
    """Whole models: θ ← θ − η (Δ + μ u), u ← μ u + Δ, Δ = θ − mean x; each peer's Muon keeps its momentum."""
    size, optimizers = 2, dict[int, torch.optim.Optimizer]()

    def step(peer) -> None:
        if peer.rank not in optimizers:
            optimizers[peer.rank] = gossipx.optimizers.muon(peer.module, lr=0.02)
        trained(peer.module, optimizers[peer.rank])

    across = f"nesterov:lr={lr},momentum={momentum}"
    each = {rank: {"module": Matrix(rank)} for rank in range(size)}
    options = {"policy": f"tau:{PERIOD}", "iterations": PERIOD * WAVES, "finish": "none", "blocking": True}
    made = world(size, exchange="waves", across=across, by_rank=each, gradient_step=step, **options)
    ended(made, bound(size, PERIOD * WAVES, waits=8))

    workers = [Matrix(rank) for rank in range(size)]
    for worker in workers[1:]:
        worker.load_state_dict(workers[0].state_dict())
    inner = [gossipx.optimizers.muon(worker, lr=0.02) for worker in workers]
    theta = nn.utils.parameters_to_vector(workers[0].parameters()).detach().double()
    u = torch.zeros_like(theta)
    for _ in range(WAVES):
        for worker, optimizer in zip(workers, inner, strict=True):
            for _ in range(PERIOD):
                trained(worker, optimizer)
        mean = torch.stack([nn.utils.parameters_to_vector(one.parameters()).detach().double() for one in workers]).mean(
            0
        )
        delta = theta - mean
        u = momentum * u + delta
        theta = theta - lr * (delta + momentum * u)
        for worker in workers:
            nn.utils.vector_to_parameters(theta.float(), worker.parameters())
    row = nn.utils.parameters_to_vector(made.peers[0].module.parameters()).detach().double()
    torch.testing.assert_close(row, theta, rtol=2e-2, atol=2e-3)  # Muon works in bfloat16
