"""After the loss of a holder or of a replica another peer takes the replica, so that the next loss is survived.

With bsp and servers that do not train, the workers must equal one process on the joined batches: a lost or duplicated
push would show.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import served
import torch
from seeds import seeds, some
from transcripts import LoggedWorld

from gossipx.server.mode import ServerMode
from gossipx.sim import Network

pytestmark = pytest.mark.fault(56)
ITERATIONS = 60
WORKERS = [1, 2, 4]


def world(**given: Any) -> LoggedWorld:
    """Peers 0 and 3 hold a shard each and a replica of the other's, and do not train."""
    options: dict[str, Any] = {
        "servers": "0,3",
        "servers_only": True,
        "server_replicas": 1,
        "iterations": ITERATIONS,
        "network": Network(delay=0.02),
        **given,
    }
    return served.world(5, **options)


def mode(made: LoggedWorld, rank: int) -> ServerMode:
    exchange = made.peers[rank].role.exchange
    assert isinstance(exchange, ServerMode)
    return exchange


def exact(made: LoggedWorld, workers: list[int] = WORKERS) -> None:
    wanted = served.joined(workers, iterations=ITERATIONS)
    for rank in workers:
        assert made.peers[rank].arena.step == ITERATIONS
        torch.testing.assert_close(served.values(made.peers[rank].module), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("first", some([0, 3], 3))
@pytest.mark.parametrize("seed", seeds(3))
def test_both_servers_are_killed_one_after_the_other(first: int, seed: int) -> None:
    rng = random.Random(f"{first} {seed}")
    at = rng.uniform(1, 15)
    made = world()
    made.crash(first, at)
    made.crash(3 - first, at + rng.uniform(18, 25))
    served.ended(made)
    assert made.fired["crash"] == 2
    assert made.lines(3 - first, "this peer now holds shard")
    chosen = made.lines(3 - first, "peer 4 now has the replica" if first == 0 else "peer 1 now has the replica")
    assert len(chosen) == 2, "of both shards"
    exact(made)


@pytest.mark.parametrize("seed", seeds(4))
def test_a_server_that_returns_to_other_holders_holds_nothing(seed: int) -> None:
    """Its settings name it the first holder; the shard has had two holders since."""
    rng = random.Random(seed)
    at = rng.uniform(1, 10)
    made = world()
    made.crash(0, at)
    made.crash(3, at + 20)
    made.restart(0, at + 24 + rng.uniform(0, 8))
    served.ended(made)
    assert not made.lines(0, "shard 0 was lost")
    exact(made)


def test_the_lack_of_a_replica_is_told_and_ends_when_a_peer_returns() -> None:
    made = served.world(2, servers="0", servers_only=True, server_replicas=1, iterations=ITERATIONS)
    made.crash(0, 8.0)
    made.restart(0, 30.0)
    served.ended(made)
    assert made.lines(1, "shard 0 has no replica any more: no other peer is left")
    assert made.lines(1, "peer 0 now has the replica of shard 0")
    assert mode(made, 0).replicas[0].has_copy
    exact(made, [1])


@pytest.mark.parametrize("servers_only", some([True, False], True))
@pytest.mark.parametrize("sync", some(["bsp", "asp", "ssp:staleness=2", "hybrid:step=5/lr"], "ssp:staleness=2"))
@pytest.mark.parametrize("seed", seeds(2))
def test_servers_and_workers_are_killed_and_return_again_and_again(sync: str, servers_only: bool, seed: int) -> None:
    """Kills are further apart than a copy takes, so no shard is ever lost."""
    rng = random.Random(f"{sync} {servers_only} {seed}")
    made = world(sync=sync, servers_only=servers_only, iterations=100)
    at = rng.uniform(1, 8)
    for _ in range(4):
        rank = rng.randrange(4)
        made.crash(rank, at)
        if rng.random() < 0.7:
            made.restart(rank, at + rng.choice([0.1, 2, 8]))
        at += rng.uniform(16, 24)
    served.ended(made)
    assert not [entry for entry in made.log if "was lost when this server was killed" in entry.what]
    workers = [peer for peer in made.peers.values() if peer.role.trains and peer.arena.step >= 100]
    assert workers
    for peer in workers:
        torch.testing.assert_close(served.values(peer.module), served.values(workers[0].module), rtol=0, atol=0)


@pytest.mark.parametrize("seed", seeds(4))
def test_the_last_peer_continues_alone(seed: int) -> None:
    """All others are killed, one after the other, each when the next has its copy. The last peer is slow, so that it
    learns of the next holder before it has found the former one dead; it asks nothing of that one any more.
    """
    rng = random.Random(seed)
    made = served.world(4, slow={3: 4.0}, servers="0", server_replicas=1, iterations=ITERATIONS)
    for killed in range(3):
        made.crash(killed, 10.0 + 30 * killed + rng.uniform(0, 4))
    served.ended(made)
    assert made.peers[3].arena.step == ITERATIONS
    assert made.lines(3, "this peer now holds shard 0") and made.lines(3, "shard 0 has no replica any more")


@pytest.mark.parametrize("seed", seeds(4))
def test_both_peers_of_a_shard_are_killed_and_return(seed: int) -> None:
    """The shard is lost, so it continues from the workers' model, and every peer tells it."""
    rng = random.Random(seed)
    at = rng.uniform(4, 10)
    made = served.world(3, servers="0,1", servers_only=True, server_replicas=1, iterations=ITERATIONS)
    for rank in (0, 1):
        made.crash(rank, at)
        made.restart(rank, at + rng.uniform(1, 3))
    served.ended(made)
    assert made.fired["restart"] == 2
    for rank in (0, 1):
        (lost,) = made.lines(rank, f"shard {rank} was lost when this server was killed")
        assert int(lost.split("clock ")[1].split()[0]) > 0
        told = f"peer {rank}, a server, was restarted: the state of shard {rank} is lost, its optimizer's too"
        assert made.lines(2, told)
    counts = {index: shard.clock.clock for rank in (0, 1) for index, shard in mode(made, rank).shards.items()}
    assert counts == {0: ITERATIONS, 1: ITERATIONS}
