"""Shards with different sync models, in virtual time: every pull is answered."""

from __future__ import annotations

import pytest
import served

from gossipx.server.mode import ServerMode
from gossipx.sim import Network, World

pytestmark = pytest.mark.fault(45)


def trained(made: World, limit: float) -> None:
    """Run, and check that each worker's pushes of all iterations were counted at each shard."""
    served.ended(made, limit)
    for rank, peer in made.peers.items():
        assert peer.arena.step == served.ITERATIONS, (rank, peer.arena.step)
        assert isinstance(peer.role.exchange, ServerMode)
        for shard in peer.role.exchange.shards.values():
            counts = shard.clock.counts
            assert counts.gradients + counts.late == len(made.peers) * served.ITERATIONS


@pytest.mark.parametrize("other", ["ssp:staleness=3", "dsps", "pssp:staleness=3,p=1", "pssp:staleness=3,alpha=8"])
@pytest.mark.parametrize("servers", ["0,1", "2,3"])
def test_hybrid_beside_another_sync_model_with_a_slow_worker(servers: str, other: str) -> None:
    """Fast workers wait at one shard for the slow one, whose gradient waits at the other shard for theirs."""
    sync = f"hybrid:fixed=2|{other}"
    made = served.world(4, network=Network(delay=0.05), slow={2: 3.0}, servers=servers, sync=sync)
    trained(made, served.ITERATIONS * 3.0 + 12.0)


@pytest.mark.parametrize("seed", range(2))
def test_one_shard_of_a_hybrid_run_is_switched(seed: int) -> None:
    slow = {0: 1.0, 1: 1.1, 2: 3.0}
    made = served.world(3, seed, Network(delay=0.05), slow, servers="0,1", sync="hybrid:fixed=2")
    made.switch_sync(0, 4.0 + seed, "dsps", shard=1)
    trained(made, served.ITERATIONS * 3.0 + 12.0)
    assert made.lines(1, "shard 1 switches from hybrid:fixed=2 to dsps")
