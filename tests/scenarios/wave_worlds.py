"""Worlds whose peers exchange models by waves.

The models are float64, so that sums and means can be told from nearly equal ones.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import torch
import toy
from torch import Tensor
from toy import SIZE, Point, models, sgd
from transcripts import LoggedWorld

from gossipx.sim import SimPeer

EXACT = {"rtol": 0.0, "atol": 1e-12}


class Tracked:
    """Worlds of peers with a float64 model.

    Attributes:
        own: by rank, the sum of a peer's own training steps.
    """

    def __init__(self) -> None:
        self.own: dict[int, Tensor] = defaultdict(lambda: torch.zeros(SIZE, dtype=torch.float64))

    def step(self, peer: SimPeer) -> None:
        was = peer.weights()
        sgd(peer.module)
        self.own[peer.rank] += peer.weights() - was

    def world(
        self, size: int, *rest: Any, by_rank: dict[int, dict[str, Any]] | None = None, **options: Any
    ) -> LoggedWorld:
        each = {rank: {"module": exact(rank), **(by_rank or {}).get(rank, {})} for rank in range(size)}
        given = {"exchange": "waves", "finish": "none", **options}
        return toy.world(size, *rest, by_rank=each, gradient_step=self.step, **given)


def exact(rank: int) -> Point:
    """Return a peer's model in float64."""
    module = Point(rank).double()
    module.target = module.target.double()
    return module


def start() -> Tensor:
    """Return the initial weights of all peers, which are peer 0's."""
    return exact(0).x.detach()


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
