"""Helpers for exchanges in virtual time: their modes, and what must be true after a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import SIZE, before, models
from transcripts import LoggedWorld

from gossipx.codecs.changes import FULL
from gossipx.compression import ModelCodec
from gossipx.sim import Network
from gossipx.topology import Topology

PUSH = {"mode": "push"}
PUSH_SUM = {"mode": "push", "weights": "push-sum"}
PAIRS = {"mode": "pushpull"}
WAVES = {"exchange": "waves"}
MODES = [PUSH, PUSH_SUM, PAIRS]
every_mode = pytest.mark.parametrize("mode", [{}, *MODES], ids=["pull", "push", "push-sum", "pushpull"])
every_exchange = pytest.mark.parametrize(
    "mode", [{}, *MODES, WAVES], ids=["pull", "push", "push-sum", "pushpull", "waves"]
)
INTO_ONE = Topology("into one", ((2,), (2,), (0,)))
"""Of three peers, 0 and 1 have 2 as their only neighbour."""
both_ways = pytest.mark.parametrize("blocking", [False, True])


Delivered = list[tuple[ModelCodec, int, bool]]


def deliveries(monkeypatch: pytest.MonkeyPatch) -> Delivered:
    """Return a list that records each model that is sent: its codec, its receiver, and whether in full."""
    told: Delivered = []
    give = ModelCodec.give

    def noted(self: Any, receiver: int, *rest: Any) -> Any:
        reply, source = give(self, receiver, *rest)
        told.append((self, receiver, FULL in reply.bases))
        return reply, source

    monkeypatch.setattr(ModelCodec, "give", noted)
    return told


def slow(delay: float = 0.0) -> Network:
    """Return a network in which a model takes a second."""
    return Network(bandwidth=4 * SIZE, delay=delay)


def agree(made: LoggedWorld, ranks: list[int]) -> None:
    """Assert that these peers hold the mean of their models before the finish, weighted by push-sum weights."""
    weights = torch.tensor([[made.peers[rank].role.weight] for rank in ranks], dtype=torch.float64)
    mean = (weights * before(made, ranks)).sum(0) / weights.sum()
    torch.testing.assert_close(models(made, ranks), mean.expand(len(ranks), -1), rtol=1e-5, atol=1e-6)


def equal(made: LoggedWorld, ranks: list[int]) -> bool:
    """Return whether these peers hold the same bits."""
    rows = models(made, ranks)
    return bool((rows == rows[0]).all())


def nothing_left(made: LoggedWorld) -> None:
    """Assert that no peer that ended keeps a model, its own or another's."""
    for peer in (peer for peer in made.peers.values() if made.lines(peer.rank)[-1] != "crashes"):
        kept = peer.driver.models.received, peer.driver.captures._captured
        assert not any(kept), (peer.rank, kept)
