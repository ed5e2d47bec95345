"""Averaged pairs, faults in every mode of exchange, and peers that crash, leave, join late or restart."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modes import INTO_ONE, PAIRS, PUSH, agree, both_ways, every_exchange, every_mode, nothing_left, slow
from property_tests import examples
from seeds import seeds
from toy import ITERATIONS, SIZE, TIMEOUT, alone, before, bound, ended, maker, models, sgd, spread, until, within, world
from transcripts import trained_bytes

from gossipx.peer.membership import Membership
from gossipx.protocol.effects import Note
from gossipx.protocol.events import Fault
from gossipx.protocol.messages import Stage
from gossipx.sim import Network, SimPeer
from gossipx.topology import Topology, topology_from
from gossipx.topology.schedules import RandomNeighbour

# --- pairs ------------------------------------------------------------------------------------------


def whole_numbers(rank: int) -> torch.nn.Module:
    """Make a model whose values, and half differences, are exact in float32."""
    module = torch.nn.Linear(SIZE, 1, bias=False)
    generator = torch.Generator().manual_seed(rank)
    module.weight.data.copy_(torch.randint(-(2**18), 2**18, (1, SIZE), generator=generator).float())
    return module


def walking(peer: SimPeer) -> None:
    """Do a training step by a whole number, so that sums are exact."""
    next(peer.module.parameters()).data.add_(1.0)


def counting(size: int) -> dict[str, Any]:
    """Return the options of pairs of such models."""
    by_rank = {rank: {"module": whole_numbers(rank)} for rank in range(size)}
    return {"by_rank": by_rank, "gradient_step": walking, "init": "own", "finish": "none", **PAIRS}


@both_ways
@pytest.mark.parametrize("size", [2, 3, 5, 6])
def test_an_averaged_pair_leaves_its_sum_as_it_was(size: int, blocking: bool):
    """Exactly: one gains what the other loses, so only training steps change the sum of all models."""
    network, paces = Network(bandwidth=4 * SIZE * 4, delay=0.05), {rank: 1 + 0.07 * rank for rank in range(size)}
    options = {"policy": "random:p=0.5", "iterations": 9, "blocking": blocking, **counting(size)}
    made = ended(world(size, network=network, slow=paces, **options), bound(size, 9, 2.0, waits=9))
    start = torch.stack([whole_numbers(rank).weight.double().flatten() for rank in range(size)])
    assert sum(peer.role.sync.retrievals for peer in made.peers.values()) >= 2 * size
    assert not torch.equal(models(made), start + 9)
    assert torch.equal(models(made).sum(0), start.sum(0) + 9 * size)


def test_both_end_equal_where_exchanges_block():
    """The acceptor enters at a step boundary too, and both are blocked until they are equal."""
    options = {"policy": "tau:3", "iterations": 4, "blocking": True, "init": "own", **PAIRS}
    made = world(2, network=slow(0.01), slow={1: 1.3}, starters=[0], **options)
    for rank in (0, 1):
        until(made, rank, "mixes")
    assert [entry.what for entry in made.log if entry.rank == 1][-3:] == ["step 3", "takes from 0", "mixes 0"]
    mean = (alone(0, 3) + alone(1, 3)) / 2
    torch.testing.assert_close(models(made), mean.expand(2, -1), rtol=1e-6, atol=1e-6)
    ended(made, bound(2, 4, 1.3))
    asker, asked = made.peers[0], made.peers[1]
    assert asker.blocked_seconds > 1.9 and 1.0 < asked.blocked_seconds < 1.5, "one waits for the other's step as well"


@pytest.mark.fault(27)
def test_two_peers_that_choose_each_other_share_one_exchange():
    """The exchange of the lower rank counts, and also serves the decision of the higher one."""
    made = world(2, network=Network(bandwidth=4 * SIZE * 8), policy="tau:4", iterations=5, **PAIRS)
    made.run(4.5)
    exchange = ("asks", "takes", "mixes")
    said = [f"{rank} {what}" for _, rank, what in made.log if what.startswith(exchange)][1:]  # 1 asks for the model
    assert sorted(said[:2]) == ["0 asks 1 to pair", "1 asks 0 to pair"]
    assert said[2:] == ["1 takes from 0", "0 takes from 1"]
    ended(made, bound(2, 5))
    assert [(peer.role.sync.retrievals, peer.role.sync.skipped) for peer in made.peers.values()] == [(1, 0)] * 2


@examples(150)
@given(
    size=st.integers(2, 7),
    seed=st.integers(0, 10_000),
    blocking=st.booleans(),
    delay=st.sampled_from([0.0, 0.001, 0.3, 1.5]),
    jitter=st.sampled_from([0.0, 0.7]),
    bandwidth=st.sampled_from([4.0 * SIZE, 1e9]),
    data=st.data(),
)
@pytest.mark.fault(27)
def test_no_choices_lead_to_a_deadlock(size, seed, blocking, delay, jitter, bandwidth, data):
    """For any graph of choices, as a ring in one moment, and any delays: no wait ends by timeout, no request fails."""
    others = [[other for other in range(size) if other != rank] for rank in range(size)]
    choices = tuple(tuple(sorted(data.draw(st.sets(st.sampled_from(some), min_size=1)))) for some in others)
    network = Network(bandwidth=bandwidth, delay=delay, jitter=jitter)
    options = {"policy": "random:p=0.7", "iterations": 5, "blocking": blocking, "peer_timeout": 200.0, **PAIRS}
    made = world(size, seed, network, graph=Topology("any", choices), **options)
    ended(made, 200.0)  # before any deadline: 200 s, or 20 s for non-blocking offers
    assert not any("TIMEOUT" in entry.what or "no longer waiting" in entry.what for entry in made.log)
    assert not any(peer.role.sync.failed for peer in made.peers.values())
    agree(made, list(range(size)))


# --- faults -----------------------------------------------------------------------------------------


@every_mode
@both_ways
@pytest.mark.parametrize("who", [0, 1], ids=["initiator", "partner"])
@pytest.mark.fault(1, 2)
def test_crash_in_mid_exchange(who: int, mode: dict[str, Any], blocking: bool):
    """No model is partly applied: the survivor's equals, bit for bit, that of training alone."""
    options = {"policy": "tau:9", "iterations": 14, "blocking": blocking, "init": "own", **mode}
    begins = (1, "takes from 0") if mode else (0, "pulls 1")
    made = until(world(2, network=slow(), starters=[0], **options), *begins)
    made.crash(who, made.now + 0.5)
    ended(made, bound(2, 14))
    assert made.fired["crash"] == 1
    survivor = made.peers[1 - who]
    assert (survivor.role.sync.retrievals, trained_bytes(survivor)) == (0, 0)
    if who == 1:
        assert survivor.role.sync.failed == 1
        assert mode or (made.fired["broken"] == 1 and made.lines(0, "has no answer of 1: UNREACHABLE"))
    assert torch.equal(made.before_finish[1 - who], alone(1 - who, 14))
    assert survivor.role.weight == 1.0
    assert made.now < 14 + 3 * TIMEOUT
    nothing_left(made)


@pytest.mark.parametrize(("mode", "verb"), [({}, "pulls"), (PUSH, "pushes to")], ids=["pull", "push"])
def test_after_a_crash_in_mid_exchange_another_is_asked(mode: dict[str, Any], verb: str):
    """[1, 10]"""
    made = until(world(4, network=slow(), policy="tau:9", **mode), 0, verb)
    first = int(made.lines(0, verb)[0].split()[-1])
    made.crash(first, made.now + 0.5)
    ended(made, bound(4))
    assert made.fired["broken"] >= 1
    second = int(made.lines(0, verb)[1].split()[-1])
    assert first != second and (made.lines(second, "mixes 0") if mode else made.lines(0, f"mixes {second}"))
    agree(made, [rank for rank in range(4) if rank != first])


@every_exchange
@pytest.mark.fault(22)
def test_model_with_nan_is_not_mixed(mode: dict[str, Any]):
    """It is rejected before the exchange is settled, and counted; its sender rests for a while, no weight is lost."""
    made = world(3, policy="tau:2", iterations=30, **mode)
    made.poison(1, 4.0, 20.0)
    ended(made, bound(3, 30, waits=2))
    hurt = [made.peers[rank] for rank in (0, 2)]
    poisoned = sum(peer.role.counts["poisoned"] for peer in hurt)
    assert 0 < poisoned <= made.fired["poison"] and (poisoned == made.fired["poison"] or mode)
    for peer in hurt:
        mine = [entry for entry in made.log if entry.rank == peer.rank]
        refused = [entry.time for entry in mine if entry.what == "refuses the model of 1"]
        asked = [entry.time for entry in mine if entry.what.startswith(("pulls 1", "sends 1 "))]
        assert not [time for time in asked if any(then < time < then + TIMEOUT for then in refused)]
    assert models(made).isfinite().all()
    assert math.fsum(peer.role.weight for peer in made.peers.values()) == 3.0
    agree(made, [0, 1, 2])
    nothing_left(made)


@every_exchange
@both_ways
@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.fault(22)
def test_peer_whose_own_model_becomes_nan(size: int, mode: dict[str, Any], blocking: bool):
    """It says so, and neither sends nor receives from then on; the others end with their average."""

    def diverges(peer: SimPeer) -> None:
        sgd(peer.module)
        if peer.rank == 1 and peer.arena.step == 7:
            next(peer.module.parameters()).data[3] = math.nan

    made = world(size, policy="tau:2", iterations=30, blocking=blocking, gradient_step=diverges, **mode)
    ended(made, bound(size, 30, waits=2))
    (since,) = (entry.time for entry in made.log if entry.rank == 1 and "own model holds NaN" in entry.what)
    assert made.lines(1, "own model holds NaN") == [
        "own model holds NaN or Inf since iteration 8: it is not sent to others; a lower learning rate may help"
    ]
    assert not [entry for entry in made.log if entry.time > since and entry.what in ("mixes 1", "takes from 1")]
    assert not made.peers[1].weights().isfinite().all() and made.peers[1].arena.step == 30
    others = [rank for rank in range(size) if rank != 1]
    assert models(made, others).isfinite().all()
    agree(made, others)
    if size > 2:
        assert any(entry.what.startswith("mixes") and entry.rank != 1 and entry.time > 15 for entry in made.log)


@every_mode
@both_ways
@pytest.mark.fault(4)
def test_a_peer_leaves(mode: dict[str, Any], blocking: bool):
    """It finishes its step and tells the others, which neither ask nor wait for it any more."""
    made = world(4, network=Network(bandwidth=4 * SIZE * 2), policy="tau:2", blocking=blocking, **mode)
    made.leave(2, 12.5)
    ended(made, bound(4, waits=2))
    assert made.lines(2)[-1] == "has left"
    left = [0, 1, 3]
    went = next(entry.time for entry in made.log if entry.what == "has left")
    trained = max(entry.time for entry in made.log if entry.rank == 2 and entry.what.startswith("step "))
    assert blocking or 12.5 < trained <= went
    late = [entry for entry in made.log if entry.time > went + 0.01]
    assert not [entry for entry in late if entry.what in ("pulls 2", "pushes to 2", "takes from 2", "asks 2 to pair")]
    for rank in left:
        assert made.lines(rank, "peer 2 has left")
        assert made.peers[rank].role.members.others[2].stage is Stage.LEFT
    assert blocking or made.now < ITERATIONS + 4, "nobody waits for it; models take half a second"
    agree(made, left)


@every_exchange
@pytest.mark.fault(37)
def test_late_joiner_adopts_a_model_before_it_contributes(mode: dict[str, Any]):
    made = world(4, absent=[3], policy="tau:2", **mode)
    made.start(3, maker(3, 4, policy="tau:2", **mode), at=12.0)
    ended(made, bound(4, waits=1))
    life = made.lines(3)
    assert life.index("adopts the model of 0") < life.index("is TRAIN")
    taking = "mixes 3", "takes from 3", "averages the codes of (0, 1, 2, 3)"
    taken = [entry.time for entry in made.log if entry.what in taking]
    assert taken and 12 < min(taken) < 25 and all(peer.role.finish.lost == 0 for peer in made.peers.values())
    agree(made, [0, 1, 2, 3])


@every_mode
@both_ways
@pytest.mark.fault(5)
def test_partition_that_heals(mode: dict[str, Any], blocking: bool):
    """Both sides keep training and exchanging; after the partition heals the models converge again."""
    made = world(4, policy="tau:3", iterations=40, blocking=blocking, peer_timeout=4.0, **mode)
    made.network.cut([0, 1], [2, 3], 5.0, 25.0)
    made.run(25.0)
    apart = spread(models(made))
    assert all(made.peers[rank].arena.step > 10 for rank in range(4))
    assert all(made.peers[rank].role.counts["suspicions"] > 0 for rank in range(4)), "others went silent"
    ended(made, bound(4, 40, waits=8))
    assert made.fired["cut"] > 0 and spread(before(made)) < 0.8 * apart
    for rank in made.peers:
        assert {entry.sender for entry in made.retrievals(rank) if entry.time < 25} & ({0, 1} if rank < 2 else {2, 3})
        assert any(entry.time > 28 for entry in made.retrievals(rank))
    if not blocking:
        agree(made, [0, 1, 2, 3])


@both_ways
@pytest.mark.fault(5)
def test_a_partner_that_is_heard_but_cannot_be_reached_is_not_awaited_for_ever(blocking: bool):
    """The acceptor of a pair has the model when all its messages start to be lost, while the initiator's arrive."""
    options = {"policy": "tau:2", "iterations": 200, "blocking": blocking, "peer_timeout": 4.0, "init": "own", **PAIRS}
    made = until(world(2, network=Network(delay=0.1), starters=[0], **options), 1, "takes from 0")
    made.network.cut([1], [0], made.now + 0.15, one_way=True)
    began, done = made.now, made.peers[1].arena.step
    made.run(began + 40.0)
    assert made.fired["cut"] > 0
    assert not made.peers[1].role.members.others[0].lost, "it was heard"
    assert made.lines(1, "mixes 0")
    assert made.peers[1].arena.step > done + 10, "training continued"


@every_exchange
@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.fault(26)
def test_lost_repeated_and_overtaking_messages(seed: int, mode: dict[str, Any]):
    """No exchange takes effect on one side only, or twice: averages stay averages, and the run ends."""
    network = Network(loss=0.02, repeat=0.2, jitter=0.8)
    made = world(4, seed, network, policy="tau:2", iterations=60, peer_timeout=15.0, **mode)
    ended(made, bound(4, 60, waits=8))
    assert made.fired["lost"] > 0 and made.fired["repeated"] > 0
    assert all(peer.role.sync.retrievals > 3 for peer in made.peers.values())
    assert within(models(made), before(made))
    nothing_left(made)


@every_exchange
@both_ways
@pytest.mark.fault(3)
def test_paused_peer_comes_back(mode: dict[str, Any], blocking: bool):
    """Paused for longer than peer_timeout: considered lost meanwhile, then accepted again."""
    made = world(4, policy="tau:2", iterations=80, blocking=blocking, peer_timeout=5.0, **mode)
    made.pause(2, 10.5, 40.5)
    made.run(40.4)
    assert made.fired["pause"] == 1 and made.peers[2].arena.step <= 10
    others = [made.peers[rank] for rank in (0, 1, 3)]
    assert all(peer.arena.step > (15 if blocking else 30) for peer in others)
    assert any(peer.role.members.others[2].lost for peer in others)
    ended(made, bound(4, 80, waits=8))
    assert any(entry.what in ("mixes 2", "takes from 2") for entry in made.log if entry.time > 41)
    assert made.peers[2].arena.step == 80 and len(made.lines(2, "ends")) == 1


def test_peers_of_different_modes_train_on():
    """A configuration mistake: no exchange takes place that only one side knows, and each side logs the cause."""
    made = ended(world(3, by_rank=dict(enumerate([{}, PUSH, PAIRS])), policy="tau:4"), bound(3))
    assert {sender for peer in (made.peers[1], made.peers[2]) for sender in made.retrievals(peer.rank)} == set()
    agree(made, [0, 1, 2])


class SettleLost(Network):
    """A network that loses what 1 sends to 0 in the sixth second, except models: the settlement of the pair."""

    def loses(self, sender: int, receiver: int, nbytes: int, now: float, rng: random.Random) -> bool:
        return sender == 1 and not nbytes and 5.45 < now < 6.0


@pytest.mark.fault(26)
def test_a_pair_that_one_side_abandons_as_training_ends_takes_effect_on_neither():
    """The acceptor does not know: it retries before it mixes, so that the sum is conserved."""
    options = {"policy": "tau:5", "iterations": 6, **counting(2)}
    made = ended(world(2, network=SettleLost(delay=0.1), starters=[0], **options), bound(2, 6))
    assert made.fired["lost"] == 1
    start = torch.stack([whole_numbers(rank).weight.double().flatten() for rank in range(2)])
    assert torch.equal(models(made), start + 6)


@pytest.mark.fault(8)
def test_room_taken_by_a_failed_push_is_released():
    """A transfer that is too slow ends at its deadline on both sides, and the next push finds room."""
    options = {"graph": INTO_ONE, "policy": "tau:5", "iterations": 40, "init": "own", **PUSH}
    made = until(world(3, network=Network(bandwidth=4 * SIZE / 100), starters=[0], **options), 2, "takes from 0")
    made.run(made.now + TIMEOUT + 0.5)
    assert made.lines(2, f"has no answer of 0: {Fault.TIMEOUT.name}")
    assert made.peers[0].role.sync.failed == 1
    made.network = made.network.__class__()
    ended(made, bound(3, 40))
    assert made.peers[2].role.sync.retrievals > 0


# --- peers that join, restart, leave or are lost ------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "rank", "options", "sender"),
    [(4, 2, {}, 0), (3, 0, {}, 1), (3, 1, {"init": "own", "policy": "tau:2"}, 0)],
    ids=["another", "the first", "own weights"],
)
@pytest.mark.fault(36, 37)
def test_restarted_peer_adopts_a_model_before_it_contributes(
    size: int, rank: int, options: dict[str, Any], sender: int
):
    """Also if it was the first, or if all began with their own weights: others are training."""
    made = world(size, **options)
    made.crash(rank, 8.5)
    made.restart(rank, 10.2)
    ended(made, bound(size, waits=1))
    assert (made.fired["crash"], made.fired["restart"]) == (1, 1)
    assert not options or not any(entry.what.startswith("adopts") for entry in made.log if entry.time < 8.5)
    life = [entry.what for entry in made.log if entry.rank == rank and entry.time >= 10.2]
    assert life[0] == "starts" and life.index(f"adopts the model of {sender}") < life.index("is TRAIN")
    assert f"step {ITERATIONS}" in life and "step 1" not in life, "it continues at the sender's iteration"
    agree(made, list(range(size)))


@pytest.mark.parametrize("left", [[1, 2, 3], [2, 3]])
def test_the_lowest_rank_that_is_present_starts_with_its_own_weights(left: list[int]):
    """Rank 0 never appears; and 1, which would start in its place, may crash before it does."""
    made = world(4, absent=[0], iterations=3)
    if 1 not in left:
        made.crash(1, 5.0)
    ended(made, bound(4, 3, waits=2))
    assert made.lines(left[1], f"adopts the model of {left[0]}") and made.lines(3, "adopts the model of")
    agree(made, left)


def test_first_peer_crashes_while_it_sends_the_initial_model():
    made = until(world(4, network=slow(), iterations=3), 1, "asks 0")
    made.crash(0, made.now + 0.5)
    ended(made, bound(4, 3, waits=1))
    assert made.fired["broken"] >= 1
    agree(made, [1, 2, 3])


@pytest.mark.parametrize(("size", "second"), [(2, 0), (4, 1)])
def test_the_initial_model_is_requested_again_from_the_next_peer(size: int, second: int):
    """A peer that did not send it is retried after all others: its training loop may be busy for long."""
    late = size - 1
    made = world(size, network=slow(), absent=[late], iterations=40)
    made.start(late, maker(late, size, iterations=40), at=15.0)
    until(made, late, "asks 0")
    made.network.cut([0], [late], made.now + 0.9, made.now + 1.1)  # only the model is lost
    ended(made, bound(size, 40, waits=1))
    assert made.fired["cut"] == 1
    asked = [line.split()[1] for line in made.lines(late, "asks")]
    assert asked == ["0", str(second)] and made.lines(late, f"adopts the model of {second}")


@pytest.mark.fault(11)
def test_all_others_gone_trains_alone():
    made = world(4, policy="tau:7")
    for rank in (1, 2, 3):
        made.crash(rank, 3.5)
    ended(made, bound(4))
    assert made.fired["crash"] == 3
    peer = made.peers[0]
    assert peer.arena.step == ITERATIONS and peer.reason is None
    assert (peer.role.sync.retrievals, peer.role.members.alive()) == (0, 1)
    assert torch.equal(peer.weights(), alone(0, ITERATIONS))


@pytest.mark.fault(11)
def test_too_few_left_stops():
    """If min_peers says so."""
    made = world(4, policy="tau:2", min_peers=3)
    for rank in (1, 2):
        made.crash(rank, 3.5)
    ended(made, bound(4))
    for rank in (0, 3):
        reason = made.peers[rank].reason
        assert reason is not None and "min_peers = 3" in reason
        assert made.peers[rank].arena.step < ITERATIONS, "it does not train to the end"


def test_a_peer_that_comes_after_the_training_says_that_it_trained_nothing():
    made = world(3, slow={1: 4.0}, absent=[2])
    made.start(2, maker(2, 3), at=ITERATIONS + 10.0)
    ended(made, bound(3, compute=4.0))
    told = f"this peer trained no iteration: the model that it started with had seen {ITERATIONS} already"
    assert [made.lines(rank, "this peer trained") for rank in range(3)] == [[], [], [told]]


def test_no_initial_model_stops():
    made = ended(world(3, absent=[0, 2]), bound(3))
    reason = made.peers[1].reason
    assert reason is not None and "--peer-timeout" in reason and "--init own" in reason
    assert torch.equal(made.peers[1].weights(), alone(1, 0))


@pytest.mark.parametrize("what", ["asks 0", "pulls", "meets"])
@pytest.mark.fault(4)
def test_a_peer_leaves_while_a_model_is_on_its_way(what: str):
    """Nothing is mixed after it has announced that it leaves, and it does not wait long for the others."""
    made = until(world(3, network=slow(), blocking=True, iterations=6), 2, what)
    made.leave(2, made.now + 0.5)
    for rank in (0, 1):
        made.pause(rank, made.now + 0.4, made.now + 3.0)  # so that they receive it late
    ended(made, bound(3, 6, waits=2))
    life = made.lines(2)
    said = life.index("is LEFT")
    assert not [line for line in life[said:] if line.startswith(("mixes", "adopts", "meets", "pulls"))]
    assert life[-1] == "has left"
    assert all(made.lines(rank, "ends") for rank in (0, 1))


def test_the_last_two_leave_at_once():
    made = world(2)
    made.leave(0, 5.5)
    made.leave(1, 5.5)
    ended(made, bound(2))
    assert all(made.lines(rank)[-1] == "has left" for rank in (0, 1))
    assert made.now < 5.5 + TIMEOUT


def test_a_peer_that_has_ended_is_not_lost():
    """A far slower peer fails to pull from peers that are done, and still does not count them as lost."""
    made = ended(world(2, slow={1: 6.0}, policy="tau:1", min_peers=2, finish_timeout=TIMEOUT), bound(2, compute=6.0))
    ends = {entry.rank: entry.time for entry in made.log if entry.what == "ends"}
    assert ends[0] + 3 * TIMEOUT < ends[1], "the first has gone long before"
    assert not any("is lost" in entry.what for entry in made.log)
    assert not [entry for entry in made.log if entry.what == "pulls 0" and entry.time > ends[0]]
    assert made.peers[1].arena.step == ITERATIONS


@pytest.mark.fault(40)
def test_a_local_fault_counts_against_no_other_peer():
    """Without file descriptors all requests fail at once; this is no evidence against the other peers."""
    members = Membership(0, 3, RandomNeighbour(topology_from("full", 3)), TIMEOUT, random.Random(0))
    members.others[1].stage = members.others[2].stage = Stage.TRAIN
    for tenth in range(int(10 * TIMEOUT)):
        assert not members.failed(1, Fault.LOCAL, tenth / 10)
    assert members.failed(1, Fault.LOCAL, TIMEOUT)
    assert [members.failed(2, Fault.UNREACHABLE, 0.1 * count) for count in range(3)] == [False, False, True]


def test_every_peer_that_is_lost_or_leaves_is_told(monkeypatch: pytest.MonkeyPatch):
    """Also if several go within the interval of one topic, in which later lines are only counted."""
    made = world(5)
    made.run(3.0)
    notes: list[Note] = []
    handle = made.peers[0].role.handle

    def noted(event, now):
        effects = handle(event, now)
        notes.extend(effect for effect in effects if isinstance(effect, Note))
        return effects

    monkeypatch.setattr(made.peers[0].role, "handle", noted)
    made.crash(1, 4.0)
    made.crash(2, 4.0)
    made.leave(3, 5.0)
    made.leave(4, 5.0)
    made.run()
    topics = {note.text.split(":")[0]: note.topic for note in notes if "lost" in note.text or "left" in note.text}
    assert {"peer 1 is lost", "peer 2 is lost", "peer 3 has left", "peer 4 has left"} <= topics.keys()
    assert len(set(topics.values())) == len(topics)


@pytest.mark.fault(1)
def test_a_lost_peer_is_told_once():
    """Later requests, which ask whether it is back, fail without a line."""
    made = world(2, policy="tau:1")
    made.crash(1, 4.0)
    ended(made, bound(2))
    life = made.lines(0)
    (lost,) = (place for place, line in enumerate(life) if line.startswith("peer 1 is lost"))
    assert made.peers[0].role.members.others[1].faults > 4, "it was asked again"
    assert any(line.startswith("a request") for line in life[:lost])
    assert not any(line.startswith("a request") for line in life[lost:])
