"""Model deadlines derived from recent transfer times, and back-offs after failures."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipx.peer.membership import (
    DEVIATION,
    FIRST_BACKOFF,
    LONGEST_BACKOFF,
    MAX_TRANSFERS,
    PATIENCE_DOUBLINGS,
    Membership,
)
from gossipx.protocol.events import Fault
from gossipx.protocol.messages import ArriveRequest, Stage
from gossipx.topology import load
from gossipx.topology.schedules import BandwidthAware, Random

TIMEOUT = 20.0


def members(model_timeout: float = 0.0, seed: int = 0) -> Membership:
    return Membership(0, 3, Random(load("full", 3)), TIMEOUT, random.Random(seed), model_timeout)


@pytest.mark.parametrize(("model_timeout", "first"), [(0.0, TIMEOUT), (300.0, 300.0)])
def test_before_any_measurement_the_deadline_allows_for_the_slowest_network(model_timeout: float, first: float):
    assert members(model_timeout).patience(1) == first


def test_deadlines_follow_the_median_and_deviation_of_recent_transfers():
    made = members()
    for seconds in (40.0, 41.0, 42.0, 43.0, 400.0):
        made.record_transfer(1, seconds, 0.0)
    assert made.patience(1) == pytest.approx(2 * (42 + 4 * DEVIATION * 1.0)), "one that took long counts for little"
    assert made.patience(2) == made.patience(1), "of another nothing else is known"
    made.record_transfer(2, 100.0, 0.0)
    assert made.patience(2) == pytest.approx(200.0)


def test_a_fast_network_leaves_room_for_an_overloaded_machine():
    made = members()
    made.record_transfer(1, 0.001, 0.0)
    assert made.patience(1) == TIMEOUT / 4


def test_deadlines_adapt_to_a_slower_network():
    made = members()
    for _ in range(MAX_TRANSFERS):
        made.record_transfer(1, 0.1, 0.0)
    for doublings in range(PATIENCE_DOUBLINGS + 3):
        assert made.patience(1) == TIMEOUT / 4 * 2 ** min(doublings, PATIENCE_DOUBLINGS)
        made.record_late(1)
    for _ in range(MAX_TRANSFERS):
        made.record_transfer(1, 60.0, 0.0)
    assert made.patience(1) == pytest.approx(120.0)


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=40))
def test_a_transfer_as_slow_as_before_is_in_time(seconds: list[float]):
    made = members()
    for one in seconds:
        made.record_transfer(1, one, 0.0)
    last = sorted(seconds[-MAX_TRANSFERS:])
    assert made.patience(1) >= 2 * last[(len(last) - 1) // 2]


def test_outgoing_transfers_are_measured_separately_and_allow_at_least_peer_timeout():
    """A link may be faster in one direction than in the other; the receiver gives up before the sender."""
    made = members(300.0)
    made.record_transfer(1, 40.0, 0.0, outgoing=True)
    assert made.patience(1, outgoing=True) == made.patience(2, outgoing=True) == 80.0
    assert made.patience(1) == 300.0, "of what comes nothing is known"
    made.record_late(1, outgoing=True)
    assert (made.patience(1, outgoing=True), made.patience(1)) == (160.0, 300.0)
    made.record_transfer(2, 0.001, 0.0, outgoing=True)
    assert made.patience(2, outgoing=True) == TIMEOUT


def test_the_draw_uses_the_rates_of_the_models_direction():
    made = Membership(0, 3, BandwidthAware(load("full", 3)), TIMEOUT, random.Random(0))
    for rank, comes, goes in ((1, 1.0, 1e6), (2, 1e6, 1.0)):
        made.record_transfer(rank, comes, 0.0)
        made.record_transfer(rank, goes, 0.0, outgoing=True)
    assert {made.draw(0.0) for _ in range(50)} == {1}
    assert {made.draw(0.0, outgoing=True) for _ in range(50)} == {2}


# --- back-offs: a peer that refuses connections is asked less and less often, others meanwhile --------


def refused(made: Membership, rank: int, times: int) -> list[float]:
    """Make ``rank`` refuse ``times`` requests in a row, each as soon as it may be asked; return the back-offs in
    seconds."""
    now, rests = 100.0, []
    for _ in range(times):
        made.failed(rank, Fault.UNREACHABLE, now)
        until = made.others[rank].backoff_until
        rests.append(until - now)
        now = until
    return rests


@pytest.mark.fault(10)
def test_back_offs_double_up_to_the_longest_with_jitter():
    """Over many peers: each back-off is uniform between half and one and a half times its mean."""
    seeds = 400
    drawn = [refused(members(seed=seed), 1, 8) for seed in range(seeds)]
    for number, rests in enumerate(zip(*drawn, strict=True)):
        usual = TIMEOUT * min(FIRST_BACKOFF * 2**number, LONGEST_BACKOFF)
        assert 0.5 * usual <= min(rests) < 0.55 * usual
        assert 1.45 * usual < max(rests) <= 1.5 * usual
        assert sum(rests) / seeds == pytest.approx(usual, rel=0.06)
    assert min(refused(members(), 1, 100)[10:]) >= 0.5 * TIMEOUT * LONGEST_BACKOFF, "a hundred refusals do not end it"


@pytest.mark.fault(10)
def test_back_offs_differ_between_peers_and_over_time():
    """Peers that one peer turned away must not all return in the same moment."""
    asking = [refused(members(seed=seed), 1, 8) for seed in range(20)]
    for rests in zip(*asking, strict=True):
        assert len(set(rests)) == 20
    made = members()
    assert refused(made, 1, 8) != refused(made, 2, 8)
    longest = refused(members(), 1, 30)[10:]
    assert len(set(longest)) == 20, "also when they grow no more"


@pytest.mark.fault(10)
def test_during_a_back_off_another_peer_is_asked():
    made = members()
    made.failed(1, Fault.UNREACHABLE, 100.0)
    until = made.others[1].backoff_until
    assert {made.draw(now) for now in (100.0, until - 1e-6) for _ in range(50)} == {2}
    assert {made.draw(until) for _ in range(50)} == {1, 2}
    made.failed(2, Fault.UNREACHABLE, until - 1e-6)
    made.failed(1, Fault.UNREACHABLE, until - 1e-6)
    assert made.draw(until - 1e-6) is None, "all rest"


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.fault(10)
def test_a_sign_of_life_ends_and_resets_the_back_off(fault: Fault):
    made = members()
    for _ in range(10):
        made.failed(1, fault, 100.0)
    assert not made.others[1].may_be_asked(100.0)
    made.heard_from(1)
    assert made.others[1].may_be_asked(100.0)
    made.failed(1, fault, 100.0)
    assert made.others[1].backoff_until - 100.0 <= 1.5 * TIMEOUT * FIRST_BACKOFF


def test_a_peer_that_has_left_is_never_asked_again():
    made = members()
    made.others[1].record(ArriveRequest(Stage.LEFT, 1), 0.0)
    assert {made.draw(now) for now in (0.0, 1e9) for _ in range(20)} == {2}
