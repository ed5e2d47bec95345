"""Waves in virtual time: a few consecutive rounds that leave all members with the mean of their models."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from seeds import some
from toy import SIZE, before, bound, ended, models, sgd, spread, until, world
from transcripts import trained_bytes
from wave_worlds import EXACT, Tracked, conserved, counts, exact, rounds_lost, start, waves

from gossipx import policies
from gossipx.sim import Network, SimPeer

# --- without faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", some(range(1, 10), 1, 2, 5, 8))
def test_a_blocking_wave_leaves_all_with_the_exact_mean(size: int):
    """As if all models were averaged in one process every five iterations, for any number of peers; bit for bit."""
    tracked = Tracked()
    made = ended(tracked.world(size, policy="tau:5", blocking=True, iterations=15), bound(size, 15))
    replicas = [exact(rank) for rank in range(size)]
    for replica in replicas:
        replica.x.data.copy_(start())
    for _ in range(3):
        for replica in replicas:
            for _ in range(5):
                sgd(replica)
        mean = torch.stack([replica.x.detach() for replica in replicas]).mean(0)
        for replica in replicas:
            replica.x.data.copy_(mean)
    torch.testing.assert_close(models(made), mean.expand(size, -1), **EXACT)
    assert torch.equal(models(made), models(made)[:1].expand(size, -1))
    assert all(waves(made, rank) in ([1, 2, 3], []) for rank in range(size))
    assert rounds_lost(made) == 0
    conserved(made, tracked)


@examples(40, few=6)
@given(
    size=st.integers(2, 9),
    paces=st.lists(st.floats(0.4, 3.0), min_size=9, max_size=9),
    delay=st.floats(0, 0.5),
    policy=st.sampled_from(["tau:1", "tau:3", "random:p=0.3", "travel:0.2"]),
    blocking=st.booleans(),
)
def test_the_sum_of_all_models_is_kept_while_they_train(
    size: int, paces: list[float], delay: float, policy: str, blocking: bool
):
    """At any pace, and no matter which peer starts it: a wave only moves differences between models."""
    tracked, each = Tracked(), {}
    for rank, pace in enumerate(paces[:size]):
        mean = policies.parse(policy)

        def until_20(o: policies.Observation, mean: policies.Policy = mean, pace: float = pace) -> bool:
            return o.step * pace < 20 and mean.decide(mean.init(), o)[0]

        each[rank] = {"policy": until_20, "iterations": math.ceil(40 / pace), "compute": pace}
    network = Network(bandwidth=8 * SIZE / 0.1, delay=delay)
    made = ended(tracked.world(size, 0, network, by_rank=each, blocking=blocking, peer_timeout=1e3), 1e5)
    assert min(counts(made)) > 0
    assert blocking or rounds_lost(made) == 0  # blocked peers are late, and some end before others start a wave
    if rounds_lost(made) == 0:
        conserved(made, tracked)


def test_training_continues_during_a_wave():
    """A model takes as long as two steps, so a wave of two rounds lasts for five; training does not wait for it.

    After the wave each peer has the mean of the captured models plus its own steps since the capture.
    """
    tracked = Tracked()
    made = until(tracked.world(4, 0, Network(bandwidth=8 * SIZE / 2), policy="tau:10", iterations=19), 0, "step 10")
    made.run(limit=made.now + 0.0005)  # less than a message takes
    captured = models(made)
    tracked.own.clear()
    made.run(limit=made.now + 8)
    own = torch.stack([tracked.own[rank] for rank in range(4)])
    assert own.abs().max() > 0.05
    torch.testing.assert_close(models(made), captured.mean(0) + own, **EXACT)
    for peer in made.peers.values():
        life = [line for line in made.lines(peer.rank) if line.startswith(("step", "meets", "takes the mean in"))]
        assert life.count("takes the mean in") == 1
        assert life.index("takes the mean in") - life.index("step 10") > 5
        assert peer.blocked_seconds == 0


@pytest.mark.parametrize("size", some(range(2, 10), 2, 5, 8))
def test_one_starts_and_all_join(size: int):
    """For any starter, including one that only sends in the first round."""
    for starter in range(size):
        tracked = Tracked()
        made = ended(tracked.world(size, starters=[starter], policy="tau:10", iterations=14), bound(size, 14))
        assert all(count > 0 for count in counts(made))
        assert rounds_lost(made) == 0 and made.now < 15
        assert {number for rank in range(size) for number in waves(made, rank)} == {1}
        assert not any(peer.role.sync.failed for peer in made.peers.values())
        conserved(made, tracked)


@pytest.mark.parametrize("starters", [(0, 3), (1, 2), (0, 1, 2, 3), (2, 6), tuple(range(7))])
def test_waves_that_start_together_are_one(starters: tuple[int, ...]):
    """Two starters that do not meet in the first round, or all: one number, one mean, one transfer per direction."""
    size = 7 if len(starters) == 7 or 6 in starters else 4
    tracked = Tracked()
    made = ended(tracked.world(size, starters=starters, policy="tau:10", iterations=14), bound(size, 14))
    assert {number for rank in range(size) for number in waves(made, rank)} == {1}
    assert counts(made) == [3, 3, 3, 2, 1, 1, 1] if size == 7 else counts(made) == [2] * 4
    conserved(made, tracked)


def test_peers_of_similar_pace_do_not_each_start_a_wave():
    """A wave every 20 iterations of the fastest peer; all others count from the last wave, however far behind."""
    slow = {0: 1.0, 1: 1.3, 2: 1.73, 3: 2.2, 4: 1.11}
    made = world(5, slow=slow, policy="tau:20", iterations=300, exchange="waves")
    made.run(299.0)
    assert waves(made, 0) == list(range(1, 300 // 20))
    assert [len(waves(made, rank)) for rank in range(5)] == [14] * 5


def test_a_wave_counts_once_for_the_policy():
    """Δ_r and drift restart for all, no matter which peer started it; a policy that fires meanwhile is skipped."""
    options = {"by_rank": {1: {"policy": "tau:10"}}, "iterations": 9, "model_timeout": 60.0}
    made = until(Tracked().world(2, policy="tau:6", **options), 0, "step 2")
    made.network.bandwidth = 8 * SIZE / 20.0  # the wave outlasts the training
    ended(made, bound(2, 9, waits=5))
    assert waves(made, 0) == waves(made, 1) == [1]
    assert [peer.role.sync.skipped for peer in made.peers.values()] == [0, 0]
    busy = world(2, network=Network(bandwidth=4 * SIZE / 4.5), policy="tau:1", exchange="waves", iterations=11)
    ended(busy, bound(2))
    for peer in busy.peers.values():
        assert peer.role.sync.skipped >= 4 and len(waves(busy, peer.rank)) <= 3


POLICIES = ["adaptive:threshold=0.02", "travel:distance=1", "drift:distance=1", "random:p=0.3"]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("policy", some(POLICIES, *POLICIES[:2]))
def test_any_policy_starts_waves(policy: str, blocking: bool):
    made = ended(world(4, policy=policy, blocking=blocking, exchange="waves", iterations=40), bound(4, 40))
    apart = ended(world(4, policy="never", iterations=40), bound(4, 40))
    assert not any(made.lines(rank, "pulls") for rank in range(4))
    assert min(counts(made)) > 0
    assert spread(before(made)) < spread(before(apart))
    for peer in made.peers.values():
        assert len(made.retrievals(peer.rank)) == peer.role.sync.retrievals
        assert trained_bytes(peer) == peer.role.sync.retrievals * peer.arena.nbytes()


@pytest.mark.parametrize("slow", [{}, {1: 1.7}])
def test_own_steps_alone_are_drift_from_a_wave(slow: dict[int, float]):
    """The change made by a wave is not drift: x_r is the mean that it produced."""
    way, begun = [torch.zeros(SIZE).double() for _ in range(2)], [0, 0]

    def step(peer: SimPeer) -> None:
        rank, retrievals = peer.rank, peer.role.sync.retrievals
        if retrievals > begun[rank]:
            begun[rank], way[rank] = retrievals, torch.zeros(SIZE).double()
        drift = peer.driver.captures.drift(None)
        assert drift is not None and abs(drift - way[rank].norm()) < 1e-5
        was = peer.weights()
        sgd(peer.module)
        way[rank] += peer.weights() - was

    options = {"policy": "drift:distance=0.5", "blocking": True, "exchange": "waves"}
    ended(world(2, slow=slow, iterations=60, gradient_step=step, **options), bound(2, 120))
    assert min(begun) > 5
