"""Runs without faults, in virtual time: peers exchange as their mode says, and end with the mean of all models."""

from __future__ import annotations

import itertools
import math
import random
from copy import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modes import INTO_ONE, MODES, PAIRS, PUSH, agree, both_ways, every_mode, nothing_left, slow
from property_tests import examples
from seeds import some
from toy import ITERATIONS, SIZE, TIMEOUT, alone, before, bound, ended, models, spread, until, world
from transcripts import finish_bytes, trained_bytes

from gossipx.peer.offers import OfferPhase
from gossipx.sim import Network, SimPeer
from gossipx.topology import Topology, wave_rounds

POLICIES = ["tau:5", "adaptive:threshold=0.02", "travel:distance=1", "drift:distance=1", "random:p=0.5"]


def still(peer: SimPeer) -> None:
    """Do no training step."""


# --- from the first model to the finish -------------------------------------------------------------


@every_mode
@both_ways
@pytest.mark.parametrize("policy", some(POLICIES, POLICIES[0], POLICIES[2]))
def test_four_peers_exchange_and_agree_whatever_the_policy(policy: str, blocking: bool, mode: dict[str, Any]):
    made = ended(world(4, policy=policy, blocking=blocking, **mode), bound(4))
    assert spread(models(made)) < 1e-3 < spread(before(made))
    assert not made.fired
    assert blocking or made.now < ITERATIONS + 1, "no wait ends by timeout"
    agree(made, [0, 1, 2, 3])
    nothing_left(made)
    for rank, peer in made.peers.items():
        mixed, asked = peer.role.sync.retrievals, len(made.lines(rank, "pulls"))
        assert peer.arena.step == ITERATIONS
        assert mixed == len(made.retrievals(rank)) == len(made.lines(rank, "mixes")) - 2 > 0
        assert mode or mixed in ([asked] if blocking else [asked - 1, asked]), "the last may be abandoned at the end"
        assert trained_bytes(peer) >= peer.arena.nbytes() * mixed
        assert peer.role.members.without_figures() == []


@every_mode
def test_never_means_never(mode: dict[str, Any]):
    """And the bytes of the finish are no bytes of training."""
    made = ended(world(4, policy="never", **mode), bound(4))
    for peer in made.peers.values():
        assert (peer.role.sync.retrievals, trained_bytes(peer)) == (0, 0)
        assert finish_bytes(peer) == wave_rounds(4) * peer.arena.nbytes()


@pytest.mark.parametrize("size", some([1, 2, 3, 5, 7, 16, 40, 100], 1, 2, 3, 5, 7, 16))
def test_any_number_of_peers(size: int):
    made = ended(world(size, iterations=6, policy="tau:2"), bound(size, 6))
    agree(made, list(range(size)))
    assert made.now < 6 + TIMEOUT
    for peer in made.peers.values():
        assert peer.role.sync.retrievals == (2 if size > 1 else 0)
        assert peer.role.finish.lost == 0
    most = max(len(made.lines(rank, "meets")) for rank in range(size))
    assert most == wave_rounds(size)  # who only sends in a round asks too, and so notices a partner that crashed


@pytest.mark.fault(51)
def test_without_a_finish_models_stay_apart_and_are_not_compared():
    made = ended(world(4, policy="never", finish="none"), bound(4))
    assert spread(models(made)) > 0.01
    for peer in made.peers.values():
        assert peer.role.members.without_figures() == []
        assert peer.role.agreement.settled is None and not peer.role.report["digest"]


def test_all_begin_with_one_peers_weights():
    first, own = (
        ended(world(4, policy="never", iterations=0, finish="none", init=init), bound(4)) for init in ("first", "own")
    )
    assert torch.equal(models(first), models(first)[:1].expand(4, -1))
    assert spread(models(own)) > 0.1


def test_figures_reach_everybody():
    """A peer ends only once the others have its figures, since its process may exit at once."""
    made = ended(world(5, network=Network(delay=0.3)), bound(5))
    for peer in made.peers.values():
        reports = [other.report for other in peer.role.members.others.values()]
        assert all(report["iterations"] == ITERATIONS for report in reports)


@examples(65)
@given(
    size=st.integers(1, 12),
    seed=st.integers(0, 1000),
    pace=st.lists(st.floats(0.5, 2.0), min_size=12, max_size=12),
    delay=st.floats(0, 0.5),
    blocking=st.booleans(),
    mode=st.sampled_from([{}, *MODES]),
)
def test_the_finish_is_the_exact_mean(size, seed, pace, delay, blocking, mode):
    """An exchange under way when training ends is settled first, or takes no effect."""
    network = Network(bandwidth=2000, delay=delay)
    options = {"iterations": 5, "policy": "random:p=0.5", "blocking": blocking, "peer_timeout": 30.0, **mode}
    made = world(size, seed, network, dict(enumerate(pace[:size])), **options)
    ended(made, bound(size, 5, 2.0, waits=30))
    agree(made, list(range(size)))
    assert math.fsum(peer.role.weight for peer in made.peers.values()) == size
    nothing_left(made)


# --- a push, line by line ---------------------------------------------------------------------------


def test_a_push_is_fetched_and_mixed_at_the_next_step():
    """Jin et al.: the receiver mixes the models received since its last step; the sender's model is unchanged."""
    options = {"policy": "tau:8", "iterations": 15, "init": "own", "peer_timeout": 30.0, **PUSH}
    made = ended(world(2, network=slow(0.55), starters=[0], **options), bound(2, 15))
    happened = [entry for entry in made.log if entry.what.startswith(("pushes", "takes", "mixes"))][:3]
    assert [f"{rank} {what}" for _, rank, what in happened] == ["0 pushes to 1", "1 takes from 0", "1 mixes 0"]
    pushed, taken, mixed = (entry.time for entry in happened)
    assert taken == pytest.approx(pushed + 0.55)
    # 2.1 s more for the model, 1.1 s to settle, then a step: both peers step every second, in the same moments.
    assert mixed == pytest.approx(pushed + 4) and made.retrievals(1)[0].step == 12
    pushed_model = alone(0, 8)  # as of the decision to push, one step before it is sent
    mean = 0.5 * (alone(1, 12) + pushed_model)
    torch.testing.assert_close(made.before_finish[1], alone(1, 3, begin=mean), rtol=1e-5, atol=1e-5)
    assert torch.equal(made.before_finish[0], alone(0, 15))
    sender, receiver = made.peers[0], made.peers[1]
    assert (sender.role.sync.retrievals, receiver.role.sync.retrievals) == (0, 1)
    assert (trained_bytes(sender), trained_bytes(receiver)) == (0, sender.arena.nbytes())
    assert made.retrievals(receiver.rank)[0].staleness == 4


def test_busy_makes_the_other_choose_again():
    """0 pushes to 2, which has room for one model; 1, a little later, gets Busy and pushes to 3 at once."""
    graph = Topology("two, or three", ((2,), (2, 3), (0,), (0,)))
    paces = {rank: 1 + 0.02 * rank for rank in range(4)}
    options = {"graph": graph, "policy": "tau:5", "iterations": 8, "init": "own", **PUSH}
    made = world(4, network=slow(), slow=paces, starters=[0, 1], **options)
    made.run(5.05)
    made.peers[1].role.rng.seed(1)  # makes it draw 2
    made.run(5.5)
    assert made.lines(2, "takes") == ["takes from 0"] and made.lines(3, "takes") == ["takes from 1"]
    assert made.lines(1, "pushes") == ["pushes to 2", "pushes to 3"]
    asked = [entry.time for entry in made.log if entry.rank == 1 and entry.what.startswith("pushes")]
    assert asked[-1] - asked[0] < 0.01, "at once"
    ended(made, bound(4, 8))
    assert [made.peers[rank].role.sync.retrievals for rank in range(4)] == [0, 0, 1, 1]


def test_a_push_that_finds_all_busy_is_skipped_and_counted():
    options = {"graph": INTO_ONE, "policy": "tau:5", "iterations": 8, "init": "own", **PUSH}
    made = ended(world(3, network=slow(), starters=[0, 1], **options), bound(3, 8))
    counts = [made.peers[rank].role.sync for rank in (0, 1)]
    assert sorted((sync.skipped, sync.failed) for sync in counts) == [(0, 0), (1, 0)]
    assert made.peers[2].role.sync.retrievals == 1


@pytest.mark.parametrize("mode", MODES, ids=["push", "push-sum", "pushpull"])
@both_ways
def test_a_partner_that_ends_its_training_is_not_a_failure(mode: dict[str, Any], blocking: bool):
    """It declines a model that it is still receiving, unless the pair blocks it too, and no other neighbour is left."""
    options = {"policy": "tau:5", "blocking": blocking, "init": "own", "by_rank": {1: {"iterations": 5}}, **mode}
    made = ended(world(2, network=slow(), slow={1: 1.05}, starters=[0], iterations=8, **options), bound(2, 8))
    sync = made.peers[0].role.sync
    completed = int(blocking and mode is PAIRS)
    assert (sync.retrievals, sync.skipped, sync.failed) == (completed, 1 - completed, 0)


def test_a_settlement_refused_by_a_partner_that_ends_its_training_is_not_a_failure():
    """Peer 1 accepted instead of its own offer, and has the model of peer 0; its decision was skipped."""
    by_rank = {0: {"iterations": 5}, 1: {"iterations": 9}}
    made = ended(world(2, network=slow(), by_rank=by_rank, policy="tau:4", init="own", **PAIRS), bound(2, 9))
    sync = made.peers[1].role.sync
    assert made.lines(1, "takes from") and not made.lines(1, "mixes 0")[1:], "only in the finish"
    assert (sync.retrievals, sync.skipped, sync.failed) == (0, 2, 0)


class DeclineLate(Network):
    """A network in which what rank 1 says as its training ends arrives late, after what it says later."""

    def latency(self, sender: int, receiver: int, nbytes: int, now: float, rng: random.Random) -> float:
        late = sender == 1 and not nbytes and 6.0 < now < 6.2
        return super().latency(sender, receiver, nbytes, now, rng) + 0.5 * late


def test_a_fetch_refused_by_a_partner_that_ends_its_training_is_not_a_failure():
    options = {"policy": "tau:5", "init": "own", "by_rank": {0: {"iterations": 9}, 1: {"iterations": 5}}, **PAIRS}
    made = ended(world(2, network=DeclineLate(delay=0.3), slow={1: 1.1}, starters=[0], **options), bound(2, 9))
    sync = made.peers[0].role.sync
    assert (sync.retrievals, sync.skipped, sync.failed) == (0, 1, 0)


def test_a_peer_with_room_for_two_mixes_both_at_one_step():
    """Jin et al.: it mixes all models received since the last step before the next decision."""
    options = {"graph": INTO_ONE, "policy": "tau:5", "iterations": 12, "init": "own", "max_pushes": 2, **PUSH}
    made = world(3, network=Network(delay=0.3), starters=[0, 1], **options)
    made.run(9.5)
    taken, mixed = ([e for e in made.log if e.rank == 2 and e.what.startswith(what)] for what in ("takes", "mixes"))
    assert len(taken) == len(mixed) == 2
    assert mixed[0].time == mixed[1].time
    step = made.retrievals(2)[0].step
    first, second = (alone(retrieval.sender, 5) for retrieval in made.retrievals(2))
    mean = 0.5 * (0.5 * (alone(2, step) + first) + second)
    after = made.peers[2].role.training.step - step
    torch.testing.assert_close(made.peers[2].weights(), alone(2, after, begin=mean), rtol=1e-5, atol=1e-5)
    ended(made, bound(3, 12))
    assert [made.peers[rank].role.sync.skipped for rank in (0, 1)] == [0, 0]


def test_models_that_arrive_during_a_mix_wait_for_the_next_boundary():
    """Otherwise a peer that receives pushes as fast as it mixes them would never do its next step."""
    options = {"policy": "tau:5", "iterations": 12, "init": "own", "max_pushes": 2, **PUSH}
    made = until(world(2, network=Network(delay=0.3), starters=[0], **options), 1, "takes from 0")
    began, pushes = made.now, made.peers[1].role.exchange
    for moment in range(60):
        if any(inbound.phase is OfferPhase.SETTLED for inbound in pushes._inbound):
            break
        made.run(began + 0.05 * moment)
    (first,) = pushes._inbound
    pushes.step_ended(made.now)
    pushes._inbound.append(late := copy(first))
    assert pushes.mix(at_boundary=True) is not None
    pushes.mixed(first.ticket)
    assert pushes.mix(at_boundary=True) is None
    pushes.step_ended(made.now)
    assert pushes.mix(at_boundary=True) is not None and late.phase is OfferPhase.MIXING


def test_one_push_per_sender_at_a_time():
    """The last push of a sender is settled or in doubt; nothing is recorded about earlier ones."""
    options = {"policy": "tau:1", "iterations": 30, "init": "own", "max_pushes": 3, **PUSH}
    made = world(2, network=slow(), starters=[0], **options)
    for moment in itertools.count():
        if made.run(0.2 * moment):
            break
        assert len(made.peers[1].role.exchange._inbound) <= 1
    assert made.peers[1].role.sync.retrievals > 1


@pytest.mark.parametrize("mode", [PUSH, PAIRS], ids=["push", "pushpull"])
def test_partners_still_change_when_nearly_all_are_busy(mode: dict[str, Any]):
    """The free peer is then the last partner; if it were chosen, the same rings and pairs would repeat for ever."""
    paces = {rank: 1 + 0.01 * rank for rank in range(6)}
    options = {"policy": "tau:1", "init": "own", "gradient_step": still, "iterations": 101, "finish": "none", **mode}
    made = world(6, network=Network(bandwidth=4 * SIZE / 2.3), slow=paces, **options)
    made.run(0.5)
    begun = models(made)
    made.run(90.0)
    assert sum(peer.role.sync.skipped for peer in made.peers.values()) > 6 * 50
    apart = [float((rows - rows.mean(0)).norm()) for rows in (begun, models(made))]
    assert apart[1] < 0.01 * apart[0]


@every_mode
def test_decisions_while_an_exchange_is_under_way_are_skipped(mode: dict[str, Any]):
    """Training continues meanwhile."""
    made = ended(world(2, network=Network(bandwidth=4 * SIZE / 2.5), policy="tau:1", **mode), bound(2))
    for peer in made.peers.values():
        assert peer.blocked_seconds == 0
        assert peer.role.sync.skipped > 5 and peer.role.sync.retrievals >= 3
        assert all(retrieval.seconds >= 2.5 for retrieval in made.retrievals(peer.rank))
    agree(made, [0, 1])


@pytest.mark.parametrize("mode", [PUSH, PAIRS], ids=["push", "pushpull"])
def test_drift_counts_from_the_exchange(mode: dict[str, Any]):
    """A policy that uses drift sees the last exchange: our own push, or any averaged pair, no matter which side started
    it."""
    by_rank = {0: {"policy": "tau:4"}, 1: {"policy": "never:max_silence=7"}}
    made = ended(world(2, by_rank=by_rank, iterations=9, init="own", **mode), bound(2, 9))
    begins = "pushes" if mode is PUSH else "asks"
    assert len(made.lines(0, begins)) == 2
    assert len(made.lines(1, begins)) == (1 if mode is PUSH else 0), "averaged at 4 and 8, it was never silent for 7"
