"""Pushes and pairs in virtual time."""

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
from modes import MODES, PAIRS, PUSH, agree, both_ways, every_mode, nothing_left, slow
from property_tests import examples
from seeds import some
from toy import ITERATIONS, SIZE, alone, before, bound, ended, maker, models, spread, until, world
from transcripts import LoggedWorld, trained_bytes

from gossipx.peer.offers import OfferPhase
from gossipx.sim import Network, SimPeer
from gossipx.topology import Topology

POLICIES = ["tau:5", "adaptive:threshold=0.02", "travel:distance=1", "drift:distance=1", "random:p=0.5"]


def still(peer: SimPeer) -> None:
    """Do no training step."""


# --- without faults ---------------------------------------------------------------------------------


@every_mode
@both_ways
@pytest.mark.parametrize("policy", some(POLICIES, POLICIES[0], POLICIES[2]))
def test_four_peers_exchange_and_agree_whatever_the_policy(policy: str, blocking: bool, mode: dict[str, Any]):
    made = ended(world(4, policy=policy, blocking=blocking, **mode), bound(4))
    assert spread(models(made)) < 1e-3 < spread(before(made))
    assert not made.fired
    agree(made, [0, 1, 2, 3])
    nothing_left(made)
    for peer in made.peers.values():
        assert peer.arena.step == ITERATIONS
        assert (
            peer.role.sync.retrievals == len(made.retrievals(peer.rank)) == len(made.lines(peer.rank, "mixes")) - 2 > 0
        )
        assert trained_bytes(peer) >= peer.arena.nbytes() * peer.role.sync.retrievals
        assert peer.role.members.without_figures() == []


@every_mode
def test_never_means_never(mode: dict[str, Any]):
    made = ended(world(4, policy="never", **mode), bound(4))
    assert all((peer.role.sync.retrievals, trained_bytes(peer)) == (0, 0) for peer in made.peers.values())


@pytest.mark.parametrize("policy", ["tau:5", "random:p=0.05"])
def test_a_pair_is_an_exchange_of_both_peers(policy: str):
    """A period counts from the last pair of either, so that a peer exchanges once in it."""
    made = ended(world(4, policy=policy, iterations=400, **PAIRS), bound(4, 400))
    expected = 400 / 5 if policy == "tau:5" else 400 * 2 * 0.05
    mixed = sum(peer.role.sync.retrievals for peer in made.peers.values()) / 4
    assert 0.75 * expected <= mixed <= 1.25 * expected


@examples(40)
@given(
    size=st.integers(1, 8),
    seed=st.integers(0, 1000),
    pace=st.lists(st.floats(0.5, 2.0), min_size=8, max_size=8),
    delay=st.floats(0, 0.5),
    blocking=st.booleans(),
    mode=st.sampled_from(MODES),
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
    made = LoggedWorld(0, Network(bandwidth=4 * SIZE, delay=0.55))
    options = {"iterations": 15, "init": "own", "peer_timeout": 30.0, **PUSH}
    made.start(0, maker(0, 2, policy="tau:8", **options))
    made.start(1, maker(1, 2, policy="never", **options))
    ended(made, bound(2, 15))
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
    made = LoggedWorld(0, slow())
    for rank in range(4):
        policy = "tau:5" if rank < 2 else "never"
        options = {"graph": graph, "policy": policy, "iterations": 8, "init": "own", "compute": 1 + 0.02 * rank}
        made.start(rank, maker(rank, 4, **options, **PUSH))
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
    into_one = Topology("into one", ((2,), (2,), (0,)))
    made = LoggedWorld(0, slow())
    for rank in range(3):
        policy = "tau:5" if rank < 2 else "never"
        made.start(rank, maker(rank, 3, graph=into_one, policy=policy, iterations=8, init="own", **PUSH))
    ended(made, bound(3, 8))
    counts = [made.peers[rank].role.sync for rank in (0, 1)]
    assert sorted((sync.skipped, sync.failed) for sync in counts) == [(0, 0), (1, 0)]
    assert made.peers[2].role.sync.retrievals == 1


@every_mode
@both_ways
def test_a_partner_that_ends_its_training_is_not_a_failure(mode: dict[str, Any], blocking: bool):
    """It declines a model that it is still receiving, unless the pair blocks it too, and no other neighbour is left."""
    made = LoggedWorld(0, slow())
    options = {"blocking": blocking, "init": "own", **mode}
    made.start(0, maker(0, 2, policy="tau:5", iterations=8, **options))
    made.start(1, maker(1, 2, policy="never", iterations=5, compute=1.05, **options))
    ended(made, bound(2, 8))
    sync = made.peers[0].role.sync
    completed = int(blocking and mode is PAIRS)
    assert (sync.retrievals, sync.skipped, sync.failed) == (completed, 1 - completed, 0)


def test_a_settlement_refused_by_a_partner_that_ends_its_training_is_not_a_failure():
    """Peer 1 accepted instead of its own offer, and has the model of peer 0; its decision was skipped."""
    made = LoggedWorld(0, slow())
    for rank, iterations in enumerate((5, 9)):
        made.start(rank, maker(rank, 2, policy="tau:4", iterations=iterations, init="own", **PAIRS))
    ended(made, bound(2, 9))
    sync = made.peers[1].role.sync
    assert made.lines(1, "takes from") and not made.lines(1, "mixes 0")[1:], "only in the finish"
    assert (sync.retrievals, sync.skipped, sync.failed) == (0, 2, 0)


class DeclineLate(Network):
    """A network in which what rank 1 says as its training ends arrives late, after what it says later."""

    def latency(self, sender: int, receiver: int, nbytes: int, now: float, rng: random.Random) -> float:
        late = sender == 1 and not nbytes and 6.0 < now < 6.2
        return super().latency(sender, receiver, nbytes, now, rng) + 0.5 * late


def test_a_fetch_refused_by_a_partner_that_ends_its_training_is_not_a_failure():
    made = LoggedWorld(0, DeclineLate(delay=0.3))
    for rank, options in enumerate(({"policy": "tau:5", "iterations": 9}, {"policy": "never", "iterations": 5})):
        made.start(rank, maker(rank, 2, compute=1 + 0.1 * rank, init="own", **options, **PAIRS))
    ended(made, bound(2, 9))
    sync = made.peers[0].role.sync
    assert (sync.retrievals, sync.skipped, sync.failed) == (0, 1, 0)


def test_a_peer_with_room_for_two_mixes_both_at_one_step():
    """Jin et al.: it mixes all models received since the last step before the next decision."""
    into_one = Topology("into one", ((2,), (2,), (0,)))
    made = LoggedWorld(0, Network(delay=0.3))
    for rank in range(3):
        options = {"policy": "tau:5" if rank < 2 else "never", "iterations": 12, "init": "own", "max_pushes": 2}
        made.start(rank, maker(rank, 3, graph=into_one, **options, **PUSH))
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
    made = LoggedWorld(0, Network(delay=0.3))
    for rank in range(2):
        options = {"policy": "tau:5" if rank == 0 else "never", "iterations": 12, "init": "own", "max_pushes": 2}
        made.start(rank, maker(rank, 2, **options, **PUSH))
    until(made, 1, "takes from 0")
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
    made = LoggedWorld(0, slow())
    for rank in range(2):
        options = {"policy": "tau:1" if rank == 0 else "never", "iterations": 30, "init": "own", "max_pushes": 3}
        made.start(rank, maker(rank, 2, **options, **PUSH))
    for moment in itertools.count():
        if made.run(0.2 * moment):
            break
        assert len(made.peers[1].role.exchange._inbound) <= 1
    assert made.peers[1].role.sync.retrievals > 1


@pytest.mark.parametrize("mode", [PUSH, PAIRS], ids=["push", "pushpull"])
def test_partners_still_change_when_nearly_all_are_busy(mode: dict[str, Any]):
    """The free peer is then the last partner; if it were chosen, the same rings and pairs would repeat for ever."""
    made = LoggedWorld(0, Network(bandwidth=4 * SIZE / 2.3))
    options = {"policy": "tau:1", "init": "own", "gradient_step": still, "iterations": 101, "finish": "none", **mode}
    for rank in range(6):
        made.start(rank, maker(rank, 6, compute=1 + 0.01 * rank, **options))
    made.run(0.5)
    begun = models(made)
    made.run(90.0)
    assert sum(peer.role.sync.skipped for peer in made.peers.values()) > 6 * 50
    apart = [float((rows - rows.mean(0)).norm()) for rows in (begun, models(made))]
    assert apart[1] < 0.01 * apart[0]


@every_mode
def test_decisions_while_an_exchange_is_under_way_are_skipped(mode: dict[str, Any]):
    made = ended(world(2, network=Network(bandwidth=4 * SIZE / 2.5), policy="tau:1", **mode), bound(2))
    for peer in made.peers.values():
        assert peer.blocked_seconds == 0
        assert peer.role.sync.skipped > 5 and peer.role.sync.retrievals >= 3
    agree(made, [0, 1])


@pytest.mark.parametrize("mode", [PUSH, PAIRS], ids=["push", "pushpull"])
def test_drift_counts_from_the_exchange(mode: dict[str, Any]):
    """A policy that uses drift sees the last exchange: our own push, or any averaged pair, no matter which side started
    it."""
    made = LoggedWorld(0)
    made.start(0, maker(0, 2, policy="tau:4", iterations=9, init="own", **mode))
    made.start(1, maker(1, 2, policy="never:max_silence=7", iterations=9, init="own", **mode))
    ended(made, bound(2, 9))
    begins = "pushes" if mode is PUSH else "asks"
    assert len(made.lines(0, begins)) == 2
    assert len(made.lines(1, begins)) == (1 if mode is PUSH else 0), "averaged at 4 and 8, it was never silent for 7"
