"""A server is killed and restarted without its state, in virtual time: its workers push again what it lacks.

The killed process may have acknowledged pushes that no other process has. A worker sends an acknowledged push only
once, so without a word from the new process it would wait for ever for the tables that follow from it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import served
import torch
from seeds import seeds, some
from transcripts import LoggedWorld

from gossipx.protocol.effects import Effect, Note, Send
from gossipx.protocol.messages import AcceptReply, ArriveRequest, Reply, Stage
from gossipx.protocol.server_messages import GradientRequest, PushAgainReply, TablesReply, TablesRequest
from gossipx.server.mode import ServerMode
from gossipx.server.worker import LONGEST_WAIT
from gossipx.sim import Network

SYNCS = ["bsp", "asp", "ssp:staleness=1", "dsps", "drop:n=1", "pssp:staleness=1,p=0.5", "hybrid:step=5/lr"]
ITERATIONS = 30


def world(size: int, rng: random.Random, iterations: int = ITERATIONS, **given: Any) -> LoggedWorld:
    slow = {rank: rng.uniform(0.5, 2.0) for rank in range(size)}
    return served.world(
        size, rng.getrandbits(30), Network(delay=0.05, jitter=0.1), slow, iterations=iterations, **given
    )


def ended(made: LoggedWorld) -> None:
    """Check that every worker trained to the end and holds the servers' model."""
    served.ended(made)
    workers = [peer for peer in made.peers.values() if peer.role.trains]
    assert all(peer.arena.step >= ITERATIONS for peer in workers)
    for peer in workers:
        torch.testing.assert_close(served.values(peer.module), served.values(workers[0].module), rtol=0, atol=0)


@pytest.mark.fault(44)
@pytest.mark.parametrize("servers_only", some([True, False], True))
@pytest.mark.parametrize("sync", some(SYNCS, *SYNCS[::3]))
@pytest.mark.parametrize("seed", seeds(3))
def test_workers_push_again_what_a_restarted_server_lacks(sync: str, servers_only: bool, seed: int) -> None:
    rng = random.Random(f"{sync} {seed}")
    made = world(3, rng, servers="0", servers_only=servers_only, sync=sync)
    at = rng.uniform(3, 14)
    made.crash(0, at)
    made.restart(0, at + rng.choice([0.01, 0.3, 4, 8]))
    ended(made)
    assert made.fired["restart"] == 1
    assert made.lines(0, "shard 0 was lost when this server was killed: it continues from clock")
    told = "peer 0, a server, was restarted: the state of shard 0 is lost, its optimizer's too"
    assert all(made.lines(rank, told) for rank in (1, 2)), made.log
    assert all(made.peers[rank].role.counts["shard_rollbacks"] == 1 for rank in (1, 2)), "and it is counted"


@pytest.mark.fault(44)
def test_the_lost_push_is_named_and_sent_again() -> None:
    """With bsp, one iteration's push of each worker was acknowledged and is lost with its server."""
    made = served.world(3, servers="0", servers_only=True, slow={2: 3.0}, network=Network(delay=0.01))
    made.crash(0, 8.0)  # worker 1 has pushed the iteration that worker 2 computes
    made.restart(0, 8.5)
    assert served.clocks(served.ended(made)) == {0: served.ITERATIONS}
    (again,) = made.lines(1, "another process, of peer 0, serves shard 0 now: iteration")
    assert again.endswith(" is pushed again")
    assert not made.lines(2, "another process"), "worker 2 had not pushed"


def restarted(
    made: LoggedWorld, rng: random.Random, at: float, ranks: list[int], down: list[float], up: tuple[float, float]
) -> None:
    """Kill these peers one after the other from ``at`` on, and start each again; ``up``: seconds until the next."""
    for rank in ranks:
        made.crash(rank, at)
        at += rng.choice(down)
        made.restart(rank, at)
        at += rng.uniform(*up)
    ended(made)
    assert made.fired["restart"] == len(ranks)


@pytest.mark.fault(44)
@pytest.mark.parametrize("seed", seeds(8))
def test_servers_and_workers_are_restarted_again_and_again(seed: int) -> None:
    rng = random.Random(seed)
    sync = SYNCS[seed % len(SYNCS)]
    made = world(4, rng, servers="0,3", servers_only=seed % 2 == 0, sync=sync, overlap=rng.random() < 0.7)
    restarted(made, rng, rng.uniform(1, 10), rng.choices([0, 1, 3], k=3), [0.01, 0.3, 4, 8], (0.1, 6))


@pytest.mark.fault(44)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [187, *seeds(3)])
def test_servers_that_train_are_restarted_many_times(seed: int) -> None:
    """With seed 187, workers 0 and 3 would wait at shard 1 for a push of worker 2, and it for theirs at shard 0."""
    rng = random.Random(seed)
    made = world(4, rng, iterations=150, servers="0,1", sync=rng.choice(["ssp:staleness=1", "ssp:staleness=3"]))
    restarted(made, rng, rng.uniform(3, 6), rng.choices([0, 1], k=14), [0.01, 0.3, 2, 4], (0.5, 12))


@pytest.mark.fault(44)
@pytest.mark.parametrize("seed", seeds(4))
def test_a_server_takes_a_model_that_was_trained(seed: int) -> None:
    """Peer 0 only serves: its own model is the initial one, so peer 3 must not take that for its shard."""
    made = world(4, random.Random(seed), servers="0,3", servers_only=True)
    made.crash(3, 12.0)
    made.restart(3, 13.0)
    ended(made)
    (line,) = made.lines(3, "shard 1 was lost when this server was killed")
    assert int(line.split("clock ")[1].split()[0]) > 0


@pytest.mark.fault(44)
def test_a_switch_that_was_lost_with_its_server_is_told_to_the_workers() -> None:
    made = served.world(3, servers="0", servers_only=True, iterations=ITERATIONS)
    made.switch_sync(1, 3.0, "ssp:staleness=2")
    made.crash(0, 9.0)
    made.restart(0, 9.5)
    served.ended(made)
    for rank in (1, 2):
        (line,) = made.lines(rank, "peer 0, a server, was restarted")
        assert line.endswith("; its sync model is now the initial one")


def sent(effects: list[Effect], kind: type) -> list[Send]:
    """Return the requests of a kind."""
    return [one for one in effects if isinstance(one, Send) and isinstance(one.request, kind)]


@pytest.mark.fault(44)
def test_a_gradient_that_is_gone_is_not_waited_for() -> None:
    """The next iteration has begun, and its gradients have replaced those that the shard lacks."""
    exchange = served.make(1, 2).role.exchange
    assert isinstance(exchange, ServerMode)
    worker, places = exchange.worker, [(0, bucket) for bucket in range(2)]

    def pulled(effects: list[Effect]) -> list[TablesRequest]:
        return [one.request for one in sent(effects, TablesRequest) if isinstance(one.request, TablesRequest)]

    for ask in sent(worker.gradients_ready(places, 0.0), GradientRequest):
        worker.answered(ask.ticket, AcceptReply(), 0.0)
    first, second = sent(worker.iteration_done(0.0), TablesRequest)
    assert all(one.pushed and one.progress == 0 for one in pulled([first, second]))
    worker.gradients_ready([places[0]], 0.0)
    worker._progress = 1  # as once the first table of the pull has arrived and its layer has been used
    effects = worker.answered(first.ticket, PushAgainReply(), 0.0)
    assert not [one for one in effects if isinstance(one, Note)]
    current = pulled([*effects, *worker.answered(second.ticket, PushAgainReply(), 0.0)])
    assert {one.progress for one in current} == {-1}, "it takes the current values"


@pytest.mark.fault(44)
@pytest.mark.parametrize("has_tables_of_lost", [True, False])
@pytest.mark.parametrize("changes_servers", [True, False])
def test_a_worker_that_waits_at_one_shard_pushes_again_to_the_restarted_server_of_another(
    has_tables_of_lost: bool, changes_servers: bool
) -> None:
    """Others may wait at that shard for a push which only the killed server had, and this worker for theirs."""
    exchange = served.make(2, 3, servers="0,1", servers_only=True).role.exchange
    assert isinstance(exchange, ServerMode)
    worker, members = exchange.worker, exchange._context.members.others
    buckets = exchange.migration.layout.buckets
    places = [(shard, bucket) for shard in range(2) for bucket in range(buckets[shard])]

    def answer(requests: list[Send], reply: Reply) -> None:
        """Answer these requests, and those to the same server that follow."""
        while requests:
            one = requests.pop(0)
            effects = worker.answered(one.ticket, reply, 0.0)
            requests += [ask for ask in sent(effects, type(one.request)) if ask.to == one.to]

    for rank in (0, 1):
        members[rank].record(ArriveRequest(Stage.TRAIN, 1), 0.0)
    pushes = sent(worker.gradients_ready(places, 0.0), GradientRequest)
    answer(pushes, AcceptReply())
    pulls = sent(worker.iteration_done(0.0), TablesRequest)
    if changes_servers:
        pulls = sent(worker.switch_layout((0, 1), buckets, 1, 0.0), TablesRequest)
    if has_tables_of_lost:
        answer([one for one in pulls if one.to == 1], TablesReply(0, ()))
    assert not sent(exchange.members_changed(0.0), GradientRequest), "no server was restarted"
    members[1].record(ArriveRequest(Stage.TRAIN, 2), 0.0)
    effects = exchange.members_changed(0.0)
    pushes = sent(effects, GradientRequest)
    assert {one.to for one in pushes} == {1}
    assert any("another process, of peer 1, serves shard 1 now" in one.text for one in effects if isinstance(one, Note))
    answer(pushes, AcceptReply())
    assert not sent(exchange.members_changed(0.0), GradientRequest), "once"


def test_a_worker_that_waits_long_names_the_shard_and_its_server() -> None:
    made = served.world(3, servers="0", servers_only=True, slow={2: 25.0}, iterations=3)
    made.crash(0, 60.0)
    made.restart(0, 85.0)
    served.ended(made)
    assert made.lines(0, "pulls from shard 0 wait for iteration 0 of peer 2")
    waits = made.lines(1, "has waited for")
    assert any(one.endswith("s for shard 0 at peer 0: other workers' pushes are missing there") for one in waits)
    advice = "s for shard 0 at peer 0: it does not answer; restart it, or use --server-lost stop"
    assert any(one.endswith(advice) for one in waits)
    assert not made.lines(2, "has waited for"), "nobody else is slow"


def test_a_server_that_does_not_come_back_is_not_waited_for_without_end() -> None:
    made = served.world(3, servers="0", servers_only=True)
    made.crash(0, 5.0)
    served.ended(made, 2 * LONGEST_WAIT)
    for rank in (1, 2):
        reason = made.peers[rank].reason
        assert reason is not None and "s for shard 0 at peer 0: it does not answer" in reason
        assert LONGEST_WAIT < made.now < 1.1 * LONGEST_WAIT
