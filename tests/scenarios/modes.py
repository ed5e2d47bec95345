"""Helpers for exchanges in virtual time: their modes, and what must be true after a run."""

from __future__ import annotations

import pytest
import torch
from toy import SIZE, before, models
from transcripts import LoggedWorld

from gossipx.sim import Network

PUSH = {"mode": "push"}
PUSH_SUM = {"mode": "push", "weights": "push-sum"}
PAIRS = {"mode": "pushpull"}
WAVES = {"exchange": "waves"}
MODES = [PUSH, PUSH_SUM, PAIRS]
every_mode = pytest.mark.parametrize("mode", MODES, ids=["push", "push-sum", "pushpull"])
every_exchange = pytest.mark.parametrize(
    "mode", [{}, *MODES, WAVES], ids=["pull", "push", "push-sum", "pushpull", "waves"]
)
both_ways = pytest.mark.parametrize("blocking", [False, True])


def slow() -> Network:
    """Return a network in which a model takes a second."""
    return Network(bandwidth=4 * SIZE)


def agree(made: LoggedWorld, ranks: list[int]) -> None:
    """Assert that these peers hold the mean of their models before the finish, weighted by push-sum weights."""
    weights = torch.tensor([[made.peers[rank].role.weight] for rank in ranks], dtype=torch.float64)
    mean = (weights * before(made, ranks)).sum(0) / weights.sum()
    torch.testing.assert_close(models(made, ranks), mean.expand(len(ranks), -1), rtol=1e-5, atol=1e-6)


def nothing_left(made: LoggedWorld) -> None:
    """Assert that no peer that ended keeps a model, its own or another's."""
    for peer in (peer for peer in made.peers.values() if made.lines(peer.rank)[-1] != "crashes"):
        kept = peer.driver.models.received, peer.driver.captures._captured
        assert not any(kept), (peer.rank, kept)
