"""Servers that change, leave, or are killed and restarted, in virtual time, with bad networks and slow workers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import served
import torch
import toy
from seeds import seeds, some
from transcripts import LoggedWorld

from gossipx.assembly.server import Parts
from gossipx.protocol.effects import Effect, Note, Send
from gossipx.protocol.messages import AcceptReply, ArriveRequest, Reply, Stage
from gossipx.protocol.server_messages import GradientRequest, PushAgainReply, TablesReply, TablesRequest
from gossipx.protocol.table_effects import KeepShard
from gossipx.server.hosted_shards import HostedShards
from gossipx.server.mode import ServerMode
from gossipx.server.worker import LONGEST_WAIT
from gossipx.sim import Network
from gossipx.tables.parts import Storages, TransmitBuffer


def stand(made: LoggedWorld, ranks: list[int]) -> tuple[int, ...]:
    """Check that these peers use the same layout and host exactly its shards. Return its servers."""
    servers = {served.mode(made, rank).migration.layout.servers for rank in ranks}
    assert len(servers) == 1, servers
    (found,) = servers
    for rank in ranks:
        assert set(served.mode(made, rank).shards) == {index for index, holder in enumerate(found) if holder == rank}
    return found


@pytest.mark.parametrize("sync", some(served.SYNCS, *served.SYNCS[::3]))
@pytest.mark.parametrize("seed", seeds(6))
def test_no_push_is_lost_and_no_pull_stranded(sync: str, seed: int) -> None:
    rng = random.Random(f"{sync} {seed}")
    slow = {rank: rng.uniform(0.5, 4.0) for rank in range(4)}
    pulls = rng.choice(["lazy", "soft"])
    made = served.world(4, seed, Network(delay=0.05), slow, servers="0,3", sync=sync, pulls=pulls)
    for _ in range(4):
        made.change_servers(rng.randrange(4), rng.uniform(2, 30), rng.sample(range(4), rng.randint(1, 4)))
    served.ended(made)
    served.done(made, range(4), alike=False)
    assert [entry for entry in made.log if entry.what.startswith("the servers are")]
    stand(made, [*range(4)])
    assert served.pushes(made) == {4 * served.ITERATIONS}, "each push is counted once"


@pytest.mark.parametrize("changes", [[], [[0, 1, 2], [1], [1, 2]]], ids=["two servers", "changes"])
@pytest.mark.parametrize("seed", some([0, 1, 2, 3, 4, 6, 7, 8], 0, 1))  # with 5, a worker is late without a change
@pytest.mark.fault(26)
def test_a_bad_network_loses_no_push_and_counts_none_twice(seed: int, changes: list[list[int]]) -> None:
    network = Network(delay=0.2, loss=0.05, repeat=0.1, jitter=0.5)
    made = served.world(3, seed, network, {1: 1.4}, servers="0" if changes else "0,1", iterations=8)
    rng = random.Random(seed)
    for servers in changes:
        made.change_servers(rng.randrange(3), rng.uniform(2, 60), servers)
    served.ended(made, 4000)
    assert made.fired["lost"] and made.fired["repeated"]
    served.done(made, range(3), 8)
    stand(made, [*range(3)])
    torch.testing.assert_close(served.values(made.peers[0].module), served.joined(range(3), 8), rtol=1e-9, atol=1e-9)


def test_a_second_change_is_refused_while_one_is_under_way() -> None:
    made = served.world(3, network=Network(delay=0.1), servers="0")
    made.change_servers(1, 4.5, [0, 1])
    made.change_servers(2, 4.6, [0, 2])
    served.ended(made)
    assert made.lines(2, "another change of the servers is under way")
    assert set(stand(made, [0, 1, 2])) == {0, 1}
    torch.testing.assert_close(served.values(made.peers[0].module), served.joined(range(3)), rtol=1e-9, atol=1e-9)


class Whole(torch.optim.Optimizer):
    """Takes steps of one length in each tensor, whatever its gradient's length."""

    def __init__(self, parameters: Any, lr: float = 0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None and one.grad.norm() > 0:
                    one -= group["lr"] * one.grad / one.grad.norm()


class Own(TransmitBuffer):
    """A custom part, which could keep a residual."""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sync": "bsp|asp"}, "shards have different sync models"),
        (
            {"servers": "0", "sync": "hybrid:wait=true"},
            "workers wait for a gradient buffer, and 2 servers have one each",
        ),
        ({"parts": Parts(storages=Storages(transmit=Own))}, "with custom parts the servers cannot be changed"),
        ({"servers_only": True, "checkpoint_every": "5"}, "with --servers-only and --checkpoint-every"),
        ({"placement": "uniform", "servers": "0", "optimizer": Whole}, "needs whole tensors, which this placement"),
    ],
)
def test_tables_that_cannot_be_moved_stay(options: dict[str, Any], told: str) -> None:
    """One line names the reason; the run continues, and ends as it would have without the request."""
    made = served.world(3, **{"servers": "0,1", **options})
    made.change_servers(2, 4.5, [1, 2])
    served.ended(made)
    assert [line for line in made.lines(2) if told in line]
    assert {served.mode(made, rank).migration.epoch for rank in range(3)} == {0}
    assert all(peer.role.stage is Stage.DONE for peer in made.peers.values())


# --- peers that crash ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", some([0.0, 0.05, 0.15, 0.25, 0.35, 0.45, 0.55], 0.05, 0.35))
@pytest.mark.parametrize("wanted", [[0, 1], [0, 3]], ids=["worker", "new server"])
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_peer_that_dies_before_it_holds_tables_is_not_waited_for(after: float, wanted: list[int], sync: str) -> None:
    """Whatever request it received last, the others reach one layout and the end: the old one without a new server."""
    made = served.world(4, network=Network(delay=0.1), servers="0", sync=sync, iterations=20)
    made.change_servers(1, 5.5, wanted)
    made.crash(3, 5.5 + after)
    served.ended(made, 1000)
    assert made.fired["crash"] == 1
    served.done(made, [0, 1, 2], 20, alike=sync == "bsp")
    assert set(stand(made, [0, 1, 2])) == set(wanted) - {3}
    told = made.lines(0, "the servers stay as they were: peer 3 is lost")
    assert bool(told or made.lines(1, "peer 3 is not a member of the")) is (3 in wanted)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("seed", seeds(12))
def test_a_server_that_dies_leaves_no_mixed_state(victim: int, seed: int) -> None:
    """Its shard is lost, and the run stops or waits as without a change; all other peers use one layout."""
    made = served.world(4, seed, Network(delay=0.1), servers="0,1", iterations=20, server_lost="stop", min_peers=1)
    made.change_servers(3, 5.5, [0, 2])
    made.crash(victim, 5.5 + random.Random(seed).uniform(0, 1.2))
    made.run(1000)
    assert made.over and made.fired["crash"] == 1
    stand(made, [rank for rank in range(4) if rank != victim])


def test_a_refusal_that_comes_while_the_leader_repeats_its_request_ends_the_change() -> None:
    """The new server has asked the leader for patience, and is then refused a piece by the peer that holds it."""
    made = served.world(3, network=Network(delay=0.1), servers="0,1", iterations=20)
    made.change_servers(0, 5.5, [2])
    made.run(5.0)
    source, target = (served.mode(made, rank).migration for rank in (1, 2))
    made.run(until=lambda: target._change is not None and target._change.fetching)
    source._change = target._change.preparing = None  # type: ignore[union-attr]
    served.ended(made, 1000)
    assert made.lines(0, "the servers stay as they were: peer 2: it does not take part in this change")
    assert stand(made, [0, 1, 2]) == (0, 1)
    served.done(made, [0, 1, 2], 20)


def test_a_worker_that_was_considered_lost_follows_the_change() -> None:
    """It was paused during the change, and its old servers refuse its requests."""
    made = served.world(3, servers="0", iterations=40)
    made.pause(2, 5.2, 5.2 + 3 * toy.TIMEOUT)
    made.change_servers(1, 6.5 + 2 * toy.TIMEOUT, [1])
    served.ended(made)
    assert made.lines(0, "peer 2 is lost") and made.lines(0, "the servers are now 1")
    assert stand(made, [0, 1, 2]) == (1,)
    assert [made.peers[rank].arena.step for rank in (0, 1)] == [40, 40]
    assert made.peers[2].role.stage is Stage.DONE


@pytest.mark.parametrize("goes", some(["stays", "leaves", "dies"], "stays", "dies"))
@pytest.mark.parametrize("lost", some(["wait", "stop"], "wait"))
def test_a_late_worker_finds_the_current_servers(goes: str, lost: str) -> None:
    """Also if the server that its settings name is gone."""
    options: dict[str, Any] = {"servers": "0", "iterations": 60, "server_lost": lost}
    made = served.world(4, absent=[3], **options)
    made.change_servers(1, 12.5, [1, 2])
    if goes == "leaves":
        made.leave(0, 20.5)
    elif goes == "dies":
        made.crash(0, 20.5)
    made.start(3, served.maker(3, 4, **options), at=40.0)
    served.ended(made)
    assert set(stand(made, [1, 2, 3])) == {1, 2}
    assert made.lines(3, "step ")
    served.done(made, [1, 2, 3], 60)


# --- servers that are killed and started again ----------------------------------------------------------------


@pytest.mark.parametrize("every", some(["0", "100"], "0"))
@pytest.mark.parametrize("seed", seeds(4))
def test_a_former_server_restarts_as_a_worker(every: str, seed: int) -> None:
    """It was the only server when the run began, as its settings still say."""
    network = Network(delay=0.02, jitter=0.1)
    made = served.world(3, seed, network, servers="0", iterations=60, checkpoint_every=every)
    made.change_servers(1, 5.5, [1, 2])
    made.crash(0, 12.0 + seed / 4)
    made.restart(0, 20.0)
    served.ended(made)
    assert set(stand(made, [0, 1, 2])) == {1, 2}
    served.done(made, [0, 1, 2], 60)


@pytest.mark.fault(44)
@pytest.mark.parametrize("every", some(["0", "100"], "100"))
@pytest.mark.parametrize("sync", some(["bsp", "asp", "ssp:staleness=2", "hybrid:step=5"], "hybrid:step=5"))
@pytest.mark.parametrize("victim", [0, 2])
def test_a_server_without_a_checkpoint_of_its_tables_continues_with_a_workers_model(
    victim: int, sync: str, every: str
) -> None:
    """There are no files in virtual time."""
    made = served.world(3, servers="0", sync=sync, iterations=60, checkpoint_every=every)
    made.change_servers(1, 5.5, [0, 2])
    made.crash(victim, 12.2)
    made.restart(victim, 14.0)
    served.ended(made)
    assert sorted(stand(made, [0, 1, 2])) == [0, 2]
    served.done(made, [0, 1, 2], 60, alike=False)
    (shard,) = served.mode(made, victim).shards.values()
    assert shard.restarted_at == 0, "the workers are told that its state is lost"


@pytest.mark.parametrize("answers", [True, False])
def test_a_restarted_server_asks_all_present_peers(answers: bool) -> None:
    """The layout is unchanged: its shard starts when all others have confirmed this, or are known to be gone."""
    made = served.world(3, servers="0", iterations=40)
    made.crash(0, 5.2)
    if not answers:
        made.pause(2, 6.0, 6.0 + 3 * toy.TIMEOUT)
    made.restart(0, 6.5)
    served.ended(made)
    assert set(served.mode(made, 0).shards) == {0} and served.mode(made, 0).hosted.ready
    assert made.peers[1].role.stage is Stage.DONE


# --- servers that leave ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", some(["0", "0 only", "0,1", "1,0", "2,1,0"], "0", "0 only", "2,1,0"))
@pytest.mark.parametrize("at", some([5.2, 5.995, 6.005, 6.5], 5.995, 6.5))
def test_a_server_that_leaves_hands_its_shard_over(servers: str, at: float) -> None:
    """The others continue with all pushes, as if a worker without shards had left, or none if it does not train."""
    made = served.world(3, servers=servers.split()[0], servers_only="only" in servers, iterations=20)
    made.leave(0, at)
    served.ended(made)
    assert made.lines(0, "has left") and made.lines(1, "peer 0 has left")
    served.done(made, [1, 2], 20)
    left = [rank for rank in (2, 1) if str(rank) in servers] or [1]
    assert sorted(stand(made, [1, 2])) == sorted(left)
    steps = len(made.lines(0, "step "))
    expected = served.joined(lambda iteration: range(iteration >= steps, 3), 20)
    torch.testing.assert_close(served.values(made.peers[1].module), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("servers", some(["0,1", "0,1,2", "1,2,3"], "0,1,2"))
@pytest.mark.parametrize("apart", some([0.0, 0.02, 0.3, 1.0], 0.0, 0.3))
@pytest.mark.parametrize("last", [0, 3])
def test_leaving_peers_save_consistent_shards(
    monkeypatch: pytest.MonkeyPatch, servers: str, apart: float, last: int
) -> None:
    """The last holder of a shard has saved it in the latest layout, replacing earlier checkpoints of others."""
    disk: dict[int, tuple[int, tuple[int, ...]]] = {}
    kept = HostedShards.checkpoint

    def checkpoint(self: HostedShards, last: bool = False, leaves: bool = False) -> list[Effect]:
        effects = kept(self, last, leaves)
        for one in effects:
            if isinstance(one, KeepShard) and one.clock >= disk.get(one.shard, (0, ()))[0]:
                (holder,) = [rank for rank in made.peers if served.mode(made, rank).hosted is self]
                disk[one.shard] = one.clock, served.mode(made, holder).migration.layout.servers
        return effects

    monkeypatch.setattr(HostedShards, "checkpoint", checkpoint)
    made = served.world(4, servers=servers, iterations=40)
    for number, rank in enumerate(sorted(range(4), key=lambda rank: (rank == last, rank))):
        made.leave(rank, 5.5 + apart * number)
    made.run(5.5 + 4 * apart + 6 * toy.TIMEOUT)
    assert made.over
    assert any(
        all(index in disk and disk[index][1] == layout for index in range(len(layout))) for _, layout in disk.values()
    ), disk


@pytest.mark.fault(53)
@pytest.mark.parametrize("apart", [0.0, 0.02, 0.3])
def test_servers_that_cannot_hand_over_leave_without_waiting(apart: float) -> None:
    """Shards with different sync models cannot be moved. The second to leave asks a leader that is gone."""
    made = served.world(2, servers="0,1", sync="ssp:staleness=2|asp", iterations=40)
    for rank in (0, 1):
        made.leave(rank, 5.5 + apart * rank)
    made.run(5.5 + apart + toy.TIMEOUT)
    assert made.over
    for rank in (0, 1):
        assert made.lines(rank, "has left")


# --- servers that are killed and restarted without their state ------------------------------------------------

# The killed process may have acknowledged pushes that no other process has. A worker sends an acknowledged push only
# once, so without a word from the new process it would wait for ever for the tables that follow from it.

AGAIN = ["bsp", "asp", "ssp:staleness=1", "dsps", "drop:n=1", "pssp:staleness=1,p=0.5", "hybrid:step=5/lr"]
LONGER = 30


def paced(size: int, rng: random.Random, iterations: int = LONGER, **given: Any) -> LoggedWorld:
    slow = {rank: rng.uniform(0.5, 2.0) for rank in range(size)}
    return served.world(
        size, rng.getrandbits(30), Network(delay=0.05, jitter=0.1), slow, iterations=iterations, **given
    )


def ended_alike(made: LoggedWorld) -> None:
    """Check that every worker trained to the end and holds the servers' model."""
    served.ended(made)
    workers = [peer for peer in made.peers.values() if peer.role.trains]
    assert all(peer.arena.step >= LONGER for peer in workers)
    for peer in workers:
        torch.testing.assert_close(served.values(peer.module), served.values(workers[0].module), rtol=0, atol=0)


@pytest.mark.fault(44)
@pytest.mark.parametrize("servers_only", some([True, False], True))
@pytest.mark.parametrize("sync", some(AGAIN, *AGAIN[::3]))
@pytest.mark.parametrize("seed", seeds(3))
def test_workers_push_again_what_a_restarted_server_lacks(sync: str, servers_only: bool, seed: int) -> None:
    rng = random.Random(f"{sync} {seed}")
    made = paced(3, rng, servers="0", servers_only=servers_only, sync=sync)
    at = rng.uniform(3, 14)
    made.crash(0, at)
    made.restart(0, at + rng.choice([0.01, 0.3, 4, 8]))
    ended_alike(made)
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
    ended_alike(made)
    assert made.fired["restart"] == len(ranks)


@pytest.mark.fault(44)
@pytest.mark.parametrize("seed", seeds(8))
def test_servers_and_workers_are_restarted_again_and_again(seed: int) -> None:
    rng = random.Random(seed)
    sync = AGAIN[seed % len(AGAIN)]
    made = paced(4, rng, servers="0,3", servers_only=seed % 2 == 0, sync=sync, overlap=rng.random() < 0.7)
    restarted(made, rng, rng.uniform(1, 10), rng.choices([0, 1, 3], k=3), [0.01, 0.3, 4, 8], (0.1, 6))


@pytest.mark.fault(44)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [187, *seeds(3)])
def test_servers_that_train_are_restarted_many_times(seed: int) -> None:
    """With seed 187, workers 0 and 3 would wait at shard 1 for a push of worker 2, and it for theirs at shard 0."""
    rng = random.Random(seed)
    made = paced(4, rng, iterations=150, servers="0,1", sync=rng.choice(["ssp:staleness=1", "ssp:staleness=3"]))
    restarted(made, rng, rng.uniform(3, 6), rng.choices([0, 1], k=14), [0.01, 0.3, 2, 4], (0.5, 12))


@pytest.mark.fault(44)
@pytest.mark.parametrize("seed", seeds(4))
def test_a_server_takes_a_model_that_was_trained(seed: int) -> None:
    """Peer 0 only serves: its own model is the initial one, so peer 3 must not take that for its shard."""
    made = paced(4, random.Random(seed), servers="0,3", servers_only=True)
    made.crash(3, 12.0)
    made.restart(3, 13.0)
    ended_alike(made)
    (line,) = made.lines(3, "shard 1 was lost when this server was killed")
    assert int(line.split("clock ")[1].split()[0]) > 0


@pytest.mark.fault(44)
def test_a_switch_that_was_lost_with_its_server_is_told_to_the_workers() -> None:
    made = served.world(3, servers="0", servers_only=True, iterations=LONGER)
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
