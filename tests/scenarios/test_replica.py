"""A shard with a replica, in virtual time: no acknowledged push is lost if a peer is killed, paused or restarted.

With bsp and servers that do not train, a run in which a server is killed must equal
one process on the joined batches: a lost or duplicated push would show.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import served
import torch
import toy
from seeds import seeds
from torch import Tensor
from transcripts import LoggedWorld

from gossipx.protocol.messages import Stage
from gossipx.server.mode import ServerMode
from gossipx.server.sync_models import spec_of
from gossipx.sim import Network

pytestmark = pytest.mark.fault(39)

WORKERS = [1, 2]


def world(**given: Any) -> LoggedWorld:
    """Peer 0 holds the shard and does not train; peer 1 has the replica."""
    options: dict[str, Any] = {"servers": "0", "servers_only": True, "server_replicas": 1, **given}
    return served.world(3, **options)


def mode(made: LoggedWorld, rank: int) -> ServerMode:
    exchange = made.peers[rank].role.exchange
    assert isinstance(exchange, ServerMode)
    return exchange


def tables(made: LoggedWorld, rank: int, shard: int = 0) -> list[Tensor]:
    """Return a peer's values of a shard."""
    table_store = made.peers[rank].table_store
    assert table_store is not None
    return [values.clone() for values in table_store.state_dict(shard)["store"]["values"]]


def exact(made: LoggedWorld, workers: list[int] = WORKERS, optimizer: served.Optimizer = served.sgd) -> None:
    """Check that the workers equal one process on all their batches."""
    wanted = served.joined(workers, optimizer=optimizer)
    for rank in workers:
        assert made.peers[rank].arena.step == served.ITERATIONS
        assert made.peers[rank].role.stage is Stage.DONE
        torch.testing.assert_close(served.values(made.peers[rank].module), wanted, rtol=1e-9, atol=1e-9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


@pytest.mark.parametrize(
    "sync",
    [
        "bsp",
        "asp",
        "ssp:staleness=2",
        "hybrid:step=5,reduce=sum",
        "hybrid:fixed=2,at_once=true",
        "hybrid:step=5/lr,wait=true",
        "drop:n=1",
        "dsps",
    ],
)
def test_a_replica_is_the_same_bit_for_bit(sync: str) -> None:
    made = world(sync=sync, slow={2: 1.7})
    served.ended(made)
    assert not mode(made, 1).shards and mode(made, 1).replicas[0].has_copy
    for held, followed in zip(tables(made, 0), tables(made, 1), strict=True):
        torch.testing.assert_close(followed, held, rtol=0, atol=0)
    assert mode(made, 1).replicas[0].shard.clock.clock == mode(made, 0).shards[0].clock.clock


@pytest.mark.parametrize("optimizer", [served.sgd, adam])
@pytest.mark.parametrize("seed", seeds(12))
def test_the_holder_is_killed(seed: int, optimizer: served.Optimizer) -> None:
    at = random.Random(seed).uniform(0.5, 14.0)
    made = world(optimizer=optimizer)
    made.crash(0, at)
    served.ended(made)
    assert mode(made, 1).shards[0].clock.clock == served.ITERATIONS
    assert made.lines(1, "this peer now holds shard 0, from clock")
    exact(made, optimizer=optimizer)


@pytest.mark.parametrize("sync", ["asp", "ssp:staleness=1", "pssp:staleness=1,p=0.5", "hybrid:step=5/lr"])
@pytest.mark.parametrize("seed", seeds(6))
def test_each_push_counts_once_under_any_holder(sync: str, seed: int) -> None:
    rng = random.Random(f"{sync} {seed}")
    made = world(sync=sync, slow={2: rng.uniform(1.0, 3.0)}, network=Network(delay=0.05))
    made.crash(0, rng.uniform(0.5, 20.0))
    served.ended(made)
    assert mode(made, 1).contributions == len(WORKERS) * served.ITERATIONS


@pytest.mark.parametrize("seed", seeds(6))
def test_the_server_that_took_over_is_killed_too(seed: int) -> None:
    """A worker has taken the replica, before the first server came back."""
    rng = random.Random(seed)
    first = rng.uniform(0.5, 6.0)
    made = served.world(
        4, servers="0,3", servers_only=True, server_replicas=1, iterations=40, network=Network(delay=0.02)
    )
    made.crash(0, first)
    made.restart(0, first + rng.uniform(4.0, 8.0))
    made.crash(3, first + rng.uniform(15.0, 20.0))
    served.ended(made)
    assert {index: shard.clock.clock for index, shard in mode(made, 1).shards.items()} == {0: 40, 1: 40}
    wanted = served.joined(WORKERS, iterations=40)
    for rank in WORKERS:
        torch.testing.assert_close(served.values(made.peers[rank].module), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", seeds(6))
def test_a_replica_that_is_killed_is_not_waited_for(seed: int) -> None:
    at = random.Random(seed).uniform(0.5, 10.0)
    made = served.world(4, servers="0,3", servers_only=True, server_replicas=1)
    made.crash(3, at)
    served.ended(made)
    assert sorted(mode(made, 0).shards) == [0, 1]
    assert made.lines(0, "peer 1 now has the replica of shard 0")
    exact(made)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("seed", seeds(6))
def test_a_server_that_only_sleeps(rank: int, seed: int) -> None:
    """It sleeps longer than peer_timeout: another peer takes over its shard, and it has the replica when it wakes."""
    rng = random.Random(seed)
    start = rng.uniform(0.5, 8.0)
    made = served.world(4, servers="0,3", servers_only=True, server_replicas=1, iterations=40)
    made.pause(rank, start, start + toy.TIMEOUT * rng.uniform(1.5, 3.0))
    served.ended(made)
    held = [sorted(mode(made, server).shards) for server in (0, 3)]
    assert sorted(held[0] + held[1]) == [0, 1], "each shard has one holder"
    wanted = served.joined(WORKERS, iterations=40)
    for one in WORKERS:
        torch.testing.assert_close(served.values(made.peers[one].module), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", seeds(8))
def test_a_network_that_loses_and_repeats_messages(seed: int) -> None:
    rng = random.Random(seed)
    network = Network(delay=0.02, jitter=0.05, loss=0.03, repeat=0.05)
    made = served.world(4, seed=seed, servers="0,3", servers_only=True, server_replicas=1, network=network)
    made.crash(0, rng.uniform(1.0, 10.0))
    served.ended(made, 5000.0)
    exact(made)


def test_a_server_that_leaves_hands_its_shard_over() -> None:
    made = served.world(4, servers="0,3", servers_only=True, server_replicas=1)
    made.leave(0, 4.5)
    served.ended(made)
    assert sorted(mode(made, 3).shards) == [0, 1]
    exact(made)


def test_the_run_can_stop_when_all_holders_of_a_shard_are_gone() -> None:
    made = served.world(4, servers="0,3", servers_only=True, server_replicas=1, server_lost="stop")
    made.crash(0, 3.5)
    made.crash(3, 3.6)
    served.ended(made)
    for rank in WORKERS:
        assert made.peers[rank].reason is not None and "--server-lost is stop" in made.peers[rank].reason


def test_a_worker_returns_to_a_holder_that_it_considered_lost_by_mistake() -> None:
    """Two lost messages make worker 3 turn to the replica, which does not take over, since it sees the holder alive."""
    made = served.world(
        *(5, 71, Network(delay=0.1, jitter=0.3, loss=0.003)),
        {0: 3.028318275105974, 1: 3.0716572883127213, 2: 0.5, 3: 3.0716572883127213, 4: 0.5961323693169812},
        servers="4,2,0,1",
        server_replicas=1,
        sync="hybrid:double=5|drop:n=1,late=add|pssp:staleness=1,p=0.5|ssp:staleness=1",
        overlap=False,
        iterations=8,
    )
    served.ended(made, 400)
    assert made.fired["lost"]


def test_a_switch_of_the_sync_model_outlives_the_holder() -> None:
    made = world(slow={2: 3.0})
    made.switch_sync(1, 4.2, "asp")
    made.crash(0, 9.3)
    served.ended(made)
    assert spec_of(mode(made, 1).shards[0].clock.model) == "asp"
    assert mode(made, 1).contributions == len(WORKERS) * served.ITERATIONS
