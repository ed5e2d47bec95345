"""Peers that sleep through a part of the finish (SIGSTOP, a suspended laptop) and wake after the others have ended.

A sleeper finds nobody that it could compare its model with. It must not claim to agree with peers whose end it has not
seen.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from modes import equal
from modes import slow as slow_network
from property_tests import examples
from seeds import some
from toy import TIMEOUT, until, world
from transcripts import LoggedWorld

from gossipx.peer import PeerRole
from gossipx.settings.modes import Elastic

HUB = Elastic(hub="0", alpha=0.2)
EXCHANGES: list[dict[str, Any]] = [
    {},
    {"exchange": "waves"},
    {"mode": "pushpull"},
    {"mode": "push", "weights": "push-sum"},
    {"hub": HUB},
]
NAMES = ["pull", "waves", "pushpull", "push-sum", "hub"]
slow = functools.partial(slow_network, 0.01)
LONG = 50 * TIMEOUT  # until long after the others have ended


def role(made: LoggedWorld, rank: int) -> PeerRole:
    return made.peers[rank].role


def claiming(made: LoggedWorld) -> list[int]:
    """Return the ranks that have ended and claim that all peers hold their model."""
    return [rank for rank in made.peers if made.lines(rank, "ends") and role(made, rank).agreement.agreed]


def sleep(made: LoggedWorld, rank: int, start: float, end: float, off: bool) -> None:
    """Let a peer sleep; ``off``: its network is off as well, so that nothing waits for it when it wakes."""
    made.pause(rank, start, end)
    if off:
        made.network.cut([rank], [other for other in made.peers if other != rank], start, end)


@pytest.mark.fault(79)
@pytest.mark.parametrize("exchange", EXCHANGES, ids=NAMES)
@pytest.mark.parametrize("size", some([2, 3, 5], 2, 5))
@pytest.mark.parametrize("stage", ["step 4", "is AGREE", "is COMPARE", "is DONE"])
@pytest.mark.parametrize("off", [False, True], ids=["stopped", "suspended"])
def test_a_peer_that_sleeps_until_the_others_have_ended(stage: str, size: int, exchange: dict[str, Any], off: bool):
    made = world(size, network=slow(), policy="tau:3", iterations=4, **exchange)
    until(made, 1, stage)
    sleep(made, 1, made.now, made.now + LONG, off)
    assert made.run(made.now + 3 * LONG) and made.fired["pause"] == 1
    awake, claims = [rank for rank in range(size) if rank != 1], claiming(made)
    assert made.peers[1].down_since > max(made.peers[rank].down_since for rank in awake) + 10 * TIMEOUT
    assert equal(made, awake)
    if size > 2:
        assert set(claims) >= set(awake)
    elif stage in ("is AGREE", "is COMPARE") and 0 not in claims:  # of two, none is most of them
        assert made.lines(0, "peer 1 was not seen to end the finish: it may hold another model, so no agreement")
    assert not claims or equal(made, claims)


@pytest.mark.fault(79)
def test_a_sleeper_known_only_from_the_list_of_the_last_wave_is_not_seen_to_end():
    """Peers 0 and 1 do not hear of each other's finish; peer 2 has heard both, and names them in its round request."""
    made = world(3, network=slow(), policy="tau:3", iterations=4)
    until(made, 1, "step 4")
    made.network.cut([1], [0], made.now, math.inf)
    until(made, 1, "is AGREE")
    made.pause(1, made.now, made.now + LONG)
    assert made.run(made.now + 3 * LONG) and made.fired["pause"] == 1
    for rank in (0, 2):
        assert made.lines(rank, "peer 1 was not seen to end the finish: it may hold another model"), rank
    assert claiming(made) == [0, 2] and equal(made, [0, 2])


@pytest.mark.fault(79)
def test_steps_longer_than_peer_timeout_are_no_sleep():
    """One of two crashes; the other, in which nothing happens for longer than peer_timeout, is no sleeper."""
    made = world(2, compute=3 * TIMEOUT, policy="tau:3", iterations=6)
    made.crash(1, 7 * TIMEOUT)
    assert made.run(100 * TIMEOUT) and made.fired["crash"] == 1
    assert claiming(made) == [0] and not made.lines(0, "peer 1 was not seen to end")


NAPS = st.tuples(st.integers(0, 5), st.floats(-1, 8, allow_nan=False), st.sampled_from([0.5, 1.5, 50.0]), st.booleans())


@pytest.mark.fault(79)
@examples(400, few=60)
@given(
    size=st.integers(2, 6),
    seed=st.integers(0, 100),
    naps=st.lists(NAPS, min_size=1, max_size=4),
    paces=st.lists(st.sampled_from([1.0, 1.0, 1.7]), min_size=6, max_size=6),
    exchange=st.sampled_from(EXCHANGES),
)
def test_peers_that_sleep_in_the_finish_never_claim_more_than_is_true(size, seed, naps, paces, exchange):
    made = world(size, seed, slow(), dict(enumerate(paces)), policy="tau:3", iterations=4, **exchange)
    until(made, 0, "step 4")
    begun, asleep = made.now, set()
    for rank, at, times, off in naps:
        asleep |= {rank % size} if off or times > 0.5 else set()
        sleep(made, rank % size, max(made.now, begun + at), begun + at + times * TIMEOUT, off)
    assert made.run(begun + 10 * LONG)
    claims = claiming(made)
    assert not claims or equal(made, claims), "all that claim to agree hold one model"
    if not asleep:
        assert claims == list(range(size)), "who naps for less than peer_timeout is waited for"
    elif len(asleep) == 1 and size > 2:
        assert set(claims) >= set(range(size)) - asleep, "most were awake, and saw each other end"
