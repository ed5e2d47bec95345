"""Peers that die, stop or are late in the finish: the others still end with one model, or know that they do not."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import served
import torch
from hypothesis import given
from hypothesis import strategies as st
from modes import agree, equal
from modes import slow as slow_network
from property_tests import examples
from seeds import some
from toy import ITERATIONS, SIZE, TIMEOUT, before, bound, ended, models, until, within, world
from transcripts import LoggedWorld

from gossipx.peer.agreement import COMPARISONS
from gossipx.protocol import events
from gossipx.protocol.effects import Note, Stop
from gossipx.protocol.messages import ArriveRequest, HereReply, Stage
from gossipx.settings.modes import Elastic
from gossipx.sim import Network

MODES: list[Any] = [{}, {"exchange": "waves"}, {"mode": "pushpull"}, {"mode": "push", "weights": "push-sum"}]
HUB = Elastic(hub="0", alpha=0.2)
EXCHANGES = [*MODES, {"hub": HUB}]
NAMES = ["pull", "waves", "pushpull", "push-sum", "hub"]
LONG = 50 * TIMEOUT  # until long after the others have ended
slow = functools.partial(slow_network, 0.01)


def agreed(made: LoggedWorld, ranks: list[int]) -> bool:
    """Return what the summary says of these peers, from the figures that they have reported."""
    digests = {made.peers[rank].role.report["digest"] for rank in ranks}
    return len(digests) == 1 and "" not in digests


@pytest.mark.fault(51)
@pytest.mark.parametrize("how", ["crash", "stop", "pause"])
@pytest.mark.parametrize("size", some([3, 4, 5, 8], 3, 5))
@pytest.mark.parametrize("after", [0.1, 0.5, 1.2, 1.7])
def test_a_peer_lost_in_the_finish(how: str, size: int, after: float):
    made = until(world(size, network=slow(), policy="never"), 1, "is AGREE")
    if how == "crash":
        made.crash(1, made.now + after)
    else:
        made.pause(1, made.now + after, made.now + (10_000 if how == "stop" else 1.5 * TIMEOUT))
    left = [rank for rank in range(size) if rank != 1]
    made.run(made.now + bound(size, 0, waits=2), until=lambda: all(made.lines(rank, "ends") for rank in left))
    assert made.fired["crash" if how == "crash" else "pause"] == 1
    assert all(made.lines(rank, "ends") for rank in left)
    assert equal(made, left) and agreed(made, left)
    assert within(models(made, left), before(made)), "no peer applies a partial model"
    assert all(made.peers[rank].role.agreement.comparison <= 2 for rank in left)


@pytest.mark.fault(51)
@pytest.mark.parametrize("holder_dies", [False, True])
def test_the_chosen_model_is_the_mean_of_the_most(holder_dies: bool):
    """Of four, peer 3 dies between the two rounds: 0 and 2 hold the mean of all four, 1 holds that of two.

    It asks 2 for the mean of all, and after the death of 2 takes it from 0.
    """
    made = until(world(4, network=slow(), policy="never"), 3, "meets 1 in round 1")
    made.crash(3, made.now + 0.2)
    if holder_dies:
        until(made, 1, "asks 2 for the final model")
        made.crash(2, made.now + 0.3)
    ended(made, bound(4))
    left = [0, 1] if holder_dies else [0, 1, 2]
    assert made.fired["crash"] == 4 - len(left)
    assert equal(made, left) and agreed(made, left)
    torch.testing.assert_close(models(made, [1])[0], before(made).mean(0), rtol=1e-5, atol=1e-6)
    asked = made.lines(1, "asks")
    assert asked[:2] == ["asks 0 for the initial model", "asks 2 for the final model"]
    assert asked[2:] == ["asks 0 for the final model"] * holder_dies
    assert not made.lines(0, "asks 2") and not made.lines(2, "asks 0 for the final")


@pytest.mark.fault(51)
@pytest.mark.parametrize("one_way", [True, False])
@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (0, 2), (2, 0)])
def test_two_peers_that_cannot_reach_each_other(pair: tuple[int, int], one_way: bool):
    """Each considers the other lost, or only one does; the two that see everybody bring them together."""
    made = until(world(4, network=slow(), policy="never"), 0, "step 19")
    made.network.cut([pair[0]], [pair[1]], made.now, 10_000, one_way=one_way)
    ended(made, bound(4, waits=2 * COMPARISONS))
    assert made.fired["cut"] > 0
    assert equal(made, [0, 1, 2, 3]) and agreed(made, [0, 1, 2, 3])


@pytest.mark.fault(5, 51)
def test_a_partition_in_the_finish_leaves_two_models_and_nobody_claims_more():
    made = until(world(4, network=slow(), policy="never"), 0, "step 20")
    made.network.cut([0, 1], [2, 3], made.now, 10_000)
    ended(made, bound(4, waits=2 * COMPARISONS))
    assert made.fired["cut"] > 0
    assert equal(made, [0, 1]) and equal(made, [2, 3]) and not equal(made, [0, 2])
    assert not agreed(made, [0, 1, 2, 3])


@pytest.mark.fault(51)
def test_a_hub_that_dies_while_it_sends_its_centre():
    """One worker has the centre, two do not: they take it from the first."""
    made = until(world(4, network=slow(), hub=HUB, slow={1: 0.9}), 1, "is AGREE")
    until(made, 1, "adopts the model of 0", made.now + 100)
    made.crash(0, made.now + 0.05)
    ended(made, bound(4, waits=3))
    assert made.fired["crash"] == 1
    assert equal(made, [1, 2, 3]) and agreed(made, [1, 2, 3])


@pytest.mark.fault(51)
def test_comparisons_of_models_that_stay_different_end():
    """A peer whose adopted model never equals the announced one, as with broken memory."""
    made = until(world(3, policy="never"), 2, "is COMPARE")
    made.peers[2].arena.adopt = lambda buffer, step: True
    made.peers[2].role.agreement.digest = "0" * 32
    ended(made, bound(3, waits=2 * COMPARISONS))
    assert max(peer.role.agreement.comparison for peer in made.peers.values()) <= COMPARISONS


TIMES = st.floats(0, 8, allow_nan=False)
FAULTS = st.tuples(st.sampled_from(["crash", "stop", "pause", "leave"]), st.integers(0, 6), TIMES)


@pytest.mark.fault(51)
@examples(150)
@given(
    size=st.integers(2, 7),
    seed=st.integers(0, 100),
    faults=st.lists(FAULTS, min_size=1, max_size=3),
    mode=st.sampled_from(MODES),
    loss=st.sampled_from([0.0, 0.0, 0.05]),
    cut=st.one_of(st.none(), st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans())),
)
def test_survivors_of_the_finish_agree_or_know_that_they_do_not(size, seed, faults, mode, loss, cut):
    network = Network(bandwidth=4.0 * SIZE, delay=0.01, loss=loss)
    made = world(size, seed, network, policy="tau:3", iterations=4, **mode)
    until(made, 0, "step 4")
    begun = made.now
    struck = set()
    for how, rank, at in faults:
        rank %= size
        struck.add(rank)
        if how in ("crash", "leave"):
            getattr(made, how)(rank, begun + at)
        else:
            made.pause(rank, begun + at, begun + at + (1.5 if how == "pause" else 1000) * TIMEOUT)
    if cut is not None:
        network.cut([cut[0] % size], [cut[1] % size], begun, begun + 1000 * TIMEOUT, one_way=cut[2])
    made.run(begun + 500 * TIMEOUT)
    last = [rank for rank in range(size) if made.lines(rank, "ends")]
    alone = {rank for rank in range(size) if made.lines(rank, "must stop: no peer sent an initial model")}
    assert set(range(size)) - struck - alone <= set(last), "who was not struck ends"
    assert not alone or loss, "its requests were lost until those who had a model were struck"
    if last:
        assert agreed(made, last) == equal(made, last)
    whole = [rank for rank in last if rank not in struck]
    if loss == 0 and cut is None and whole:
        assert equal(made, whole)


@pytest.mark.fault(52)
def test_the_finish_waits_for_a_peer_that_still_trains():
    made = ended(world(3, slow={2: 8.0}, policy="tau:5"), bound(3, compute=8.0))
    assert equal(made, [0, 1, 2]) and agreed(made, [0, 1, 2])
    torch.testing.assert_close(models(made), before(made).mean(0).expand(3, -1), rtol=1e-5, atol=1e-6)
    lines = made.lines(0, "waiting for peer 2 (iteration ")
    assert len(lines) >= 5 and "to end its training" in lines[0]
    assert not made.lines(0, "no longer waiting")


@pytest.mark.fault(52)
def test_a_peer_that_only_serves_reports_no_wait_for_the_peers_that_it_serves():
    made = ended(served.world(3, servers="0", servers_only=True, sync="asp", slow={2: 8.0}), 1000)
    assert made.lines(1, "waiting for peer 2 (iteration "), "it trained, and waits"
    assert not made.lines(0, "waiting for peer")


@pytest.mark.fault(52)
def test_a_limit_on_the_wait_for_peers_that_still_train():
    made = ended(world(3, slow={2: 8.0}, policy="tau:5", finish_timeout=25.0), bound(3, compute=8.0))
    assert equal(made, [0, 1]) and agreed(made, [0, 1]) and not agreed(made, [0, 1, 2])
    agree(made, [0, 1])
    assert made.peers[2].arena.step == ITERATIONS, "it ends too"
    assert made.lines(0, "no longer waiting for peer 2 at FINISH: finish_timeout has passed")
    ends = {entry.rank: entry.time for entry in made.log if entry.what == "ends"}
    assert 20 + 25 <= ends[0] <= 20 + 25 + 3 * TIMEOUT < ends[2]


@pytest.mark.fault(52)
def test_a_peer_that_answers_but_hangs_is_left():
    """Its script hangs for ever; its threads still answer."""
    made = until(world(3, policy="tau:5"), 2, "step 10")
    made.peers[2]._compute = lambda: 1e6
    made.run(1000.0, until=lambda: all(made.lines(rank, "ends") for rank in (0, 1)))
    assert equal(made, [0, 1]) and agreed(made, [0, 1])
    assert made.lines(0, "no longer waiting for peer 2 at FINISH: it answers, but has made no progress for 200 s")
    assert made.now < bound(3) + 21 * TIMEOUT


@pytest.mark.fault(4)
def test_a_departure_that_only_a_reply_tells_is_one():
    """Its own message may be lost: then its answer to the announcement of the finish is all that says so."""
    made = world(2, network=slow(), slow={1: 5.0}, policy="tau:3", iterations=4, min_peers=2)
    until(made, 0, "is FINISH")
    role = made.peers[0].role
    ((ticket, _),) = role.requests.opened(ArriveRequest)
    effects = role.handle(events.Replied(ticket, HereReply(Stage.LEFT)), made.now)
    assert any(isinstance(one, Note) and one.text == "peer 1 has left" for one in effects)
    assert any(isinstance(one, Stop) and "fewer than min_peers = 2" in one.reason for one in effects)


# --- peers that sleep (SIGSTOP, a suspended laptop) and wake after the others have ended ----------------

# A sleeper finds nobody that it could compare its model with. It must not claim to agree with peers whose end it has
# not seen.


def claiming(made: LoggedWorld) -> list[int]:
    """Return the ranks that have ended and claim that all peers hold their model."""
    return [rank for rank in made.peers if made.lines(rank, "ends") and made.peers[rank].role.agreement.agreed]


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
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("off", [False, True], ids=["stopped", "suspended"])
def test_sleepers_who_are_most_of_the_peers_claim_nothing(seed: int, off: bool):
    """Peer 2 takes two sleepers for dead and ends alone; they wake, see each other end, and cannot know that."""
    made = world(3, seed, slow(), policy="tau:3", iterations=4)
    until(made, 0, "step 4")
    for rank in (0, 1):
        sleep(made, rank, made.now, made.now + LONG, off and rank == 1)
    assert made.run(made.now + 10 * LONG) and made.fired["pause"] == 2
    assert claiming(made) == [2] or equal(made, range(3))


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
