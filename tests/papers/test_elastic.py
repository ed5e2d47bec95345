"""Elastic averaging, compared with its equations (Adaptive Communication, Algorithm 1, Eq. 1 and 2).

x_i ← x_i − η g − α (x_i − x̃), and x̃ ← x̃ + β/p (x_i − x̃) for each exchange of a worker i (Eq. 2 is their sum).
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
import toy
from torch import Tensor
from transcripts import LoggedWorld, centre_of

from gossipx.hub import rank_of_hub
from gossipx.settings import files
from gossipx.settings.modes import Elastic
from gossipx.sim import Network, SimPeer

HUB = 0


def settings(alpha: float = 0.3, beta: float | None = None, trains: bool = True) -> Elastic:
    return Elastic(hub=str(HUB), alpha=alpha, beta=beta, hub_only=not trains)


class Reference:
    """The equations on plain vectors, carried out in the order of a run's log."""

    def __init__(self, starts: dict[int, Tensor], hub: Elastic):
        self.x = {rank: start.clone() for rank, start in starts.items()}
        self.centre = starts[HUB].clone()
        workers = len(starts) - hub.hub_only
        self.alpha, self.share = hub.worker_share(workers), hub.centre_share(workers)
        self._uploaded: dict[int, Tensor] = {}
        self._difference: dict[int, Tensor] = {}

    def follow(self, rank: int, what: str) -> None:
        """Carry out one line of the log."""
        if what.startswith("step "):
            gradient = self.x[rank] - toy.Point(rank).target.double()
            self.x[rank] = self.x[rank] - 0.05 * gradient
        elif what == f"uploads its model to {HUB}":
            self._uploaded[rank] = self.x[rank]
        elif taken := re.fullmatch(r"takes in (\d+)", what):
            worker = int(taken[1])
            self._difference[worker] = self._uploaded[worker] - self.centre
            self.centre = self.centre + self.share * self._difference[worker]
        elif what == f"mixes {HUB}":
            self.x[rank] = self.x[rank] - self.alpha * self._difference[rank]


def run(hub: Elastic, size: int = 4, seed: int = 0, **options: object) -> tuple[LoggedWorld, Reference]:
    """Run with random uneven steps and delays; return the world and the reference as of before the finish."""
    rng = random.Random(seed)
    slow = {rank: rng.uniform(0.3, 3.0) for rank in range(size)}
    network = Network(bandwidth=toy.SIZE * 4 / rng.uniform(0.1, 2.0), delay=rng.uniform(0.0, 0.5))
    made = toy.world(size, seed, network, slow, hub=hub, finish="none", **options)
    reference = Reference({rank: toy.Point(HUB).x.detach().double() for rank in range(size)}, hub)
    toy.ended(made, 500)
    for entry in made.log:
        reference.follow(entry.rank, entry.what)
    return made, reference


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("size", [2, 4, 9])
def test_the_defaults_of_alpha_and_beta(size: int, only: bool) -> None:
    """Eq. 1 and 2 with the α and β of Zhang et al., β = 0.9 = p·α; p counts the peers that train."""
    p = size - only

    def moves(**given: float) -> tuple[float, float]:
        """Return α, by which a worker moves, and β, by which the centre moves if all p workers exchange at once."""
        mode = files.resolve({"hub": "1", "hub_only": only, **given}).mode
        assert isinstance(mode, Elastic) and rank_of_hub(mode, [*map(str, range(size))]) == 1
        return mode.worker_share(p), p * mode.centre_share(p)

    assert moves() == pytest.approx((0.9 / p, 0.9))
    assert moves(alpha=0.3) == pytest.approx((0.3, 0.3 * p)), "their sum stays as it was"
    assert moves(beta=0.5) == pytest.approx((0.9 / p, 0.5))
    assert moves(alpha=0.3, beta=0.5) == pytest.approx((0.3, 0.5))


CURVES = {1: 0.5, 2: 1.0, 3: 3.0}
"""a of the workers' quadratics ½ a ‖x − target‖²."""
PACES = {1: 1.0, 2: 1.13, 3: 0.81}
"""Seconds per step: no two workers exchange at the same time, so the order at the hub is known."""


def algorithm_1(period: int, steps: int, alpha: float, momentum: float) -> tuple[dict[int, Tensor], Tensor]:
    """Carry out Algorithm 1 line by line, with EAMSGD's momentum in line 8; return the workers' models and x̃."""
    start = toy.Point(HUB).x.detach().double()
    x = {rank: start.clone() for rank in CURVES}
    v = {rank: torch.zeros_like(start) for rank in CURVES}
    centre = start.clone()
    turns = sorted((step * PACES[rank], rank, step) for rank in CURVES for step in range(steps))
    for _, rank, step in turns:
        before = x[rank].clone()  # line 3
        if step % period == 0:
            x[rank] = x[rank] - alpha * (before - centre)  # line 5
            centre = centre + alpha * (before - centre)  # line 6
        v[rank] = momentum * v[rank] + CURVES[rank] * (before - toy.Point(rank).target.double())
        x[rank] = x[rank] - 0.05 * v[rank]  # line 8
    return x, centre


@pytest.mark.parametrize(("momentum", "batches"), [(0.0, 1), (0.0, 3), (0.8, 1)])
@pytest.mark.parametrize("period", [2, 4])
def test_blocking_is_algorithm_1_as_printed(period: int, momentum: float, batches: int) -> None:
    """Lines 3, 5 and 8: the elastic difference and the gradient are of the same x, and then both are applied."""

    def step(peer: SimPeer) -> None:
        module: Any = peer.module
        if not hasattr(module, "optimizer"):
            module.optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=momentum)
        module.optimizer.zero_grad()
        for _ in range(batches):  # the gradient accumulates
            (CURVES[peer.rank] / batches * module()).backward()
        module.optimizer.step()

    hub, made = settings(0.3, trains=False), LoggedWorld(0, Network())
    for rank in range(4):
        pace = PACES.get(rank, 1.0)
        options = {"hub": hub, "policy": f"tau:{period}", "blocking": True, "finish": "none", "iterations": 19}
        made.start(rank, toy.maker(rank, 4, compute=pace, gradient_step=step, **options))
    toy.ended(made, 100)
    models, centre = algorithm_1(period, 19, 0.3, momentum)
    for rank, model in models.items():
        torch.testing.assert_close(made.peers[rank].weights(), model, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(centre_of(made.peers[HUB]), centre, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("blocking", [False, True])
def test_workers_and_hub_do_what_the_equations_say(seed: int, blocking: bool) -> None:
    hub = settings(alpha=0.2, beta=(3 + (seed % 2 == 0)) * (0.1 + 0.1 * (seed % 3)), trains=seed % 2 == 0)
    made, reference = run(hub, seed=seed, policy="random:p=0.4", blocking=blocking)
    assert made.peers[HUB].role.exchange.centre.exchanges >= 10  # type: ignore[union-attr]
    workers = [rank for rank in made.peers if not hub.hub_only or rank != HUB]
    for rank in workers:
        torch.testing.assert_close(made.peers[rank].weights(), reference.x[rank], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(centre_of(made.peers[HUB]), reference.centre, rtol=1e-5, atol=1e-5)


def test_the_adaptive_policy_starts_exchanges() -> None:
    """The policies of gossip apply: a change of delta beyond the threshold starts an exchange with the hub."""
    made, reference = run(settings(), policy="adaptive:threshold=0.05", iterations=40)
    asked = sum(len(made.lines(rank, "uploads")) for rank in made.peers)
    assert 4 <= asked < 160
    for rank in made.peers:
        torch.testing.assert_close(made.peers[rank].weights(), reference.x[rank], rtol=1e-5, atol=1e-5)
