"""Runs without faults: every peer ends, and the finish leaves all with the mean of all models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from seeds import some
from toy import ITERATIONS, TIMEOUT, before, bound, ended, models, spread, world
from transcripts import finish_bytes, trained_bytes

from gossipx.sim import Network
from gossipx.topology import wave_rounds

POLICIES = ["tau:5", "adaptive:threshold=0.02", "travel:distance=1", "drift:distance=1", "random:p=0.5", "never"]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_four_peers_agree_whatever_the_policy(policy: str, blocking: bool):
    made = ended(world(4, policy=policy, blocking=blocking), bound(4))
    assert spread(models(made)) < 1e-3 < spread(before(made))
    for peer in made.peers.values():
        assert peer.arena.step == ITERATIONS
        assert (peer.role.sync.retrievals == 0) == (policy == "never")
        pulls = len(made.lines(peer.rank, "pulls"))
        assert (
            len(made.retrievals(peer.rank)) == peer.role.sync.retrievals
        )  # the last one may have been abandoned at the end
        assert peer.role.sync.retrievals in ([pulls] if blocking else [pulls - 1, pulls])
        assert peer.role.members.without_figures() == []


def test_no_faults_no_waiting():
    """No wait ends by timeout: the run takes the time of its steps and a few delays."""
    made = ended(world(4), bound(4))
    assert made.now < ITERATIONS + 1
    assert not made.fired


@pytest.mark.parametrize("size", some([1, 2, 3, 5, 7, 16, 40, 100], 1, 2, 3, 5, 7, 16))
def test_any_number_of_peers(size: int):
    made = ended(world(size, iterations=6, policy="tau:2"), bound(size, 6))
    mean = before(made).mean(0)
    torch.testing.assert_close(models(made), mean.expand(size, -1), rtol=1e-5, atol=1e-6)
    assert made.now < 6 + TIMEOUT
    for peer in made.peers.values():
        assert peer.role.sync.retrievals == (2 if size > 1 else 0)
        assert peer.role.waves.lost_at_end == 0
    most = max(len(made.lines(rank, "meets")) for rank in range(size))
    assert most == wave_rounds(size)  # who only sends in a round asks too, and so notices a partner that crashed


def test_the_finish_is_counted_apart():
    made = ended(world(4, policy="never"), bound(4))
    for peer in made.peers.values():
        assert (peer.role.sync.retrievals, trained_bytes(peer)) == (0, 0)
        assert finish_bytes(peer) == wave_rounds(4) * peer.arena.nbytes()


def test_without_a_finish_models_stay_apart():
    made = ended(world(4, policy="never", finish="none"), bound(4))
    assert spread(models(made)) > 0.01
    assert all(peer.role.members.without_figures() == [] for peer in made.peers.values())


def test_all_begin_with_one_peers_weights():
    first = ended(world(4, policy="never", iterations=0, finish="none"), bound(4))
    assert torch.equal(models(first), models(first)[:1].expand(4, -1))
    own = ended(world(4, policy="never", iterations=0, finish="none", init="own"), bound(4))
    assert spread(models(own)) > 0.1


@examples(25)
@given(
    size=st.integers(1, 12),
    seed=st.integers(0, 1000),
    pace=st.lists(st.floats(0.5, 2.0), min_size=12, max_size=12),
    delay=st.floats(0, 0.5),
    blocking=st.booleans(),
)
def test_the_finish_is_the_exact_mean(size: int, seed: int, pace: list[float], delay: float, blocking: bool):
    network = Network(bandwidth=2000, delay=delay)
    slow = dict(enumerate(pace[:size]))
    made = world(size, seed, network, slow, iterations=4, policy="random:p=0.5", blocking=blocking)
    ended(made, bound(size, 4, 2.0, waits=4))
    mean = before(made).mean(0)
    torch.testing.assert_close(models(made), mean.expand(size, -1), rtol=1e-5, atol=1e-6)


@examples(10)
@given(size=st.integers(1, 6), seed=st.integers(0, 1000), loss=st.sampled_from([0.0, 0.1]))
def test_two_runs_of_one_seed_are_equal(size: int, seed: int, loss: float):
    logs = []
    for _ in range(2):
        made = world(size, seed, Network(bandwidth=1000, loss=loss), policy="random:p=0.3", iterations=8)
        made.pause(0, 3.0, 5.0)
        made.run(200.0)
        logs.append((made.log, models(made).tolist()))
    assert logs[0] == logs[1]


def test_figures_reach_everybody():
    """A peer ends only once the others have its figures, since its process may exit at once."""
    made = ended(world(5, network=Network(delay=0.3)), bound(5))
    for peer in made.peers.values():
        reports = [other.report for other in peer.role.members.others.values()]
        assert all(report["iterations"] == ITERATIONS for report in reports)
