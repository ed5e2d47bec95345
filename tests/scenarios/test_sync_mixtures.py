"""Shards with different sync models, in virtual time: every pull is answered."""

from __future__ import annotations

import pytest
import served
import toy
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from transcripts import LoggedWorld

from gossipx.server.mode import ServerMode
from gossipx.sim import Network

pytestmark = pytest.mark.fault(45)


def trained(made: LoggedWorld, limit: float) -> None:
    """Run, and check that each worker's pushes of all iterations were counted at each shard."""
    served.ended(made, limit)
    for rank, peer in made.peers.items():
        assert peer.arena.step == served.ITERATIONS, (rank, peer.arena.step)
        assert isinstance(peer.role.exchange, ServerMode)
        for shard in peer.role.exchange.shards.values():
            counts = shard.clock.counts
            assert counts.gradients + counts.late == len(made.peers) * served.ITERATIONS


def test_a_buffer_does_not_wait_for_a_dead_worker_that_was_ahead() -> None:
    """Its pushes are ahead of the clock, and it waits nowhere."""
    slow = {0: 3.0, 2: 0.5}
    made = served.world(3, network=Network(delay=0.05), slow=slow, servers="0", sync="hybrid:step=2,wait=true")
    made.crash(2, 4.0)
    served.ended(made, served.ITERATIONS * 3.5 + 3 * toy.TIMEOUT)
    assert made.fired["crash"] and made.lines(0, "peer 2 is lost")
    assert made.peers[0].arena.step == made.peers[1].arena.step == served.ITERATIONS


WAIT = [
    "hybrid:fixed=2,wait=true",
    "hybrid:fixed=3,wait=true",
    "hybrid:step=4,wait=true",
    "hybrid:double=5,wait=true",
]
"""They are refused with several servers."""
SYNCS = [
    "bsp",
    "asp",
    "ssp:staleness=1",
    "ssp:staleness=3",
    "dsps:staleness=1,high=3,window=2",
    "drop:n=1",
    "drop:n=1,late=add",
    "pssp:staleness=1,p=0.5",
    "pssp:staleness=1,alpha=significance",
    "hybrid:fixed=3",
    "hybrid:step=4,reduce=sum",
]
ITERATIONS = 8
indices = st.integers(0, 4)
others = st.sampled_from([*SYNCS, *WAIT, "drop:n=2"])  # refused where it would wait for all workers
switches = st.tuples(st.floats(1, 40), indices, indices, others, st.sampled_from(["", "lazy", "soft"]))


@examples(80, few=8)
@given(data=st.data())
def test_every_pull_is_answered(data: st.DataObject) -> None:
    """Under any mixture of sync models, also when they are switched and when workers leave or die."""
    count = data.draw(st.integers(1, 4), "shards")
    size = data.draw(st.integers(max(2, count), 5), "peers")
    servers = data.draw(st.permutations(range(size)), "servers")[:count]
    only = count < size - 1 and data.draw(st.booleans(), "servers only")
    syncs = st.sampled_from([*SYNCS, *WAIT] if count == 1 else SYNCS)
    delay, jitter = 0.1, data.draw(st.sampled_from([0.0, 0.3]), "jitter")
    paces = data.draw(st.lists(st.floats(0.5, 4.0), min_size=size, max_size=size), "paces")
    made = served.world(
        size,
        data.draw(st.integers(0, 99), "seed"),
        Network(delay=delay, jitter=jitter),
        dict(enumerate(paces)),
        servers=",".join(map(str, servers)),
        servers_only=only,
        sync="|".join(data.draw(st.lists(syncs, min_size=count, max_size=count), "syncs")),
        pulls=data.draw(st.sampled_from(["lazy", "soft"]), "pulls"),
        overlap=data.draw(st.booleans(), "overlap"),
        bucket=data.draw(st.sampled_from([100, 1000]), "bucket"),
        iterations=ITERATIONS,
    )
    for at, rank, shard, sync, pulls in data.draw(st.lists(switches, max_size=4), "switches"):
        made.switch_sync(servers[rank % count], at, sync, shard if shard < count else None, pulls=pulls)
    workers = sorted(set(range(size)) - set(servers))
    gone = data.draw(st.sets(st.sampled_from(workers)), "gone") if workers else set()
    for rank in gone:
        getattr(made, data.draw(st.sampled_from(["leave", "crash"])))(rank, data.draw(st.floats(1, 40), "at"))
    # A worker waits at most for one more step of each other worker. Only the dead are waited for by time.
    served.ended(made, (ITERATIONS + 1) * (2 * max(paces) + 20 * (delay + jitter)) + 3 * toy.TIMEOUT * len(gone))
    stay = set(range(size)) - gone - (set(servers) if only else set())
    assert {made.peers[rank].arena.step for rank in stay} <= {ITERATIONS}
