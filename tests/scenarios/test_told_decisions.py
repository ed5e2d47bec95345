"""Warnings of a peer about its policy's decisions, in virtual time."""

from __future__ import annotations

import pytest
from modes import MODES
from toy import bound, ended, world

from gossipx.sim import Network


def lines(made, rank: int, words: str) -> list[str]:
    return [line for line in made.lines(rank, "") if words in line]


@pytest.mark.fault(47)
@pytest.mark.parametrize("exchange", ["pulls", "waves"])
def test_a_policy_that_never_fires_is_told_once_by_each_peer(exchange: str) -> None:
    made = ended(world(2, policy="adaptive:threshold=1e9", iterations=150, exchange=exchange), bound(2, 150))
    for rank, peer in made.peers.items():
        (told,) = lines(made, rank, "has not fired")
        assert "adaptive:threshold=1000000000.0 has not fired in 100 iterations: the delta is " in told
        assert told.endswith("the threshold 1e+09; lower its threshold, or give max_silence=N")
        assert peer.role.sync.retrievals == 0


@pytest.mark.fault(50)
@pytest.mark.parametrize("mode", [{}, *MODES], ids=str)
def test_a_loop_that_is_faster_than_its_exchanges_is_told_once(mode) -> None:
    """An exchange takes several steps, and the policy fires at each step."""
    made = ended(world(2, network=Network(delay=2.5), policy="tau:1", iterations=60, **mode), bound(2, 60))
    for rank, peer in made.peers.items():
        (told,) = lines(made, rank, "decisions to exchange were skipped")
        assert "steps are faster than exchanges; let the policy fire less often, or give --blocking" in told
        assert peer.role.sync.skipped >= 30
