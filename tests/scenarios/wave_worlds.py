"""Worlds whose peers exchange models by waves.

The models are float64, so that sums and means can be told from nearly equal ones.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from toy import SIZE, Point, make, models, sgd
from transcripts import LoggedWorld

from gossipx.sim import Network, SimPeer

EXACT = {"rtol": 0.0, "atol": 1e-12}
NO_FINISH = {"exchange": "waves", "finish": "none"}


class Tracked:
    """Builds peers with a float64 model, and records the sum of each peer's own training steps."""

    def __init__(self) -> None:
        self.own: dict[int, Tensor] = {}

    def start(self, made: LoggedWorld, rank: int, size: int, at: float = 0.0, **options: Any) -> None:
        def fresh(incarnation: int) -> SimPeer:
            self.own[rank] = torch.zeros(SIZE, dtype=torch.float64)
            module = Point(rank).double()
            module.target = module.target.double()
            return make(rank, size, incarnation, module=module, gradient_step=self.step, **{**NO_FINISH, **options})

        made.start(rank, fresh, at)

    def step(self, peer: SimPeer) -> None:
        was = peer.weights()
        sgd(peer.module)
        self.own[peer.rank] += peer.weights() - was

    def world(
        self, size: int, network: Network | None = None, slow: dict[int, float] | None = None, **options: Any
    ) -> LoggedWorld:
        made = LoggedWorld(0, network)
        for rank in range(size):
            self.start(made, rank, size, **{"compute": (slow or {}).get(rank, 1.0), **options})
        return made


def start() -> Tensor:
    """Return the initial weights of all peers, which are peer 0's."""
    return Point(0).double().x.detach()


def conserved(made: LoggedWorld, tracked: Tracked) -> None:
    """Assert that the sum of all models has changed by the training steps of the peers, and by nothing else."""
    size = len(made.peers)
    expected = size * start() + sum(tracked.own.values())
    torch.testing.assert_close(models(made).sum(0), expected, **EXACT)


def waves(made: LoggedWorld, rank: int) -> list[int]:
    """Return the numbers of the waves in which ``rank`` sent requests, in order."""
    numbers = [int(line.rsplit(" ", 1)[1]) for line in made.lines(rank, "meets") if " of wave " in line]
    return [number for number, _ in itertools.groupby(numbers)]


def counts(made: LoggedWorld) -> list[int]:
    return [made.peers[rank].role.sync.retrievals for rank in sorted(made.peers)]


def rounds_lost(made: LoggedWorld) -> int:
    return sum(peer.role.waves.lost for peer in made.peers.values())
