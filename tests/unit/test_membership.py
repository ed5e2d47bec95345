"""Model deadlines derived from recent transfer times, and back-offs after failures."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipx.assembly.graph import build_schedule
from gossipx.errors import ProtocolError
from gossipx.peer.joining.admission import Admission, settings_of_run, why_closed
from gossipx.peer.membership import (
    DEVIATION,
    FIRST_BACKOFF,
    LONGEST_BACKOFF,
    MAX_TRANSFERS,
    PATIENCE_DOUBLINGS,
    Membership,
)
from gossipx.protocol.events import Fault
from gossipx.protocol.fields import JoinedPeer
from gossipx.protocol.messages import ArriveRequest, Stage
from gossipx.runtime.driver import clock
from gossipx.settings import files
from gossipx.topology import topology_from
from gossipx.topology.schedules import SCHEDULES, BandwidthAware, RandomNeighbour, schedule_from
from gossipx.wire import Hello, Open, auth
from gossipx.wire.agreement import objection

TIMEOUT = 20.0


def members(model_timeout: float = 0.0, seed: int = 0) -> Membership:
    return Membership(0, 3, RandomNeighbour(topology_from("full", 3)), TIMEOUT, random.Random(seed), model_timeout)


def test_deadlines_follow_the_median_and_deviation_of_recent_transfers():
    made = members(300.0)
    assert (members().patience(1), made.patience(1)) == (TIMEOUT, 300.0), "before any, of the slowest network"
    for seconds in (40.0, 41.0, 42.0, 43.0, 400.0):
        made.record_transfer(1, seconds, 0.0)
    assert made.patience(1) == pytest.approx(2 * (42 + 4 * DEVIATION * 1.0)), "one that took long counts for little"
    assert made.patience(2) == made.patience(1), "of another nothing else is known"
    made.record_transfer(2, 100.0, 0.0)
    assert made.patience(2) == pytest.approx(200.0)


def test_deadlines_leave_a_fast_network_room_and_adapt_to_a_slower_one():
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
    made = Membership(0, 3, BandwidthAware(topology_from("full", 3)), TIMEOUT, random.Random(0))
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
    made = members()
    assert refused(made, 1, 8) != refused(made, 2, 8)
    assert min(refused(members(), 1, 100)[10:]) >= 0.5 * TIMEOUT * LONGEST_BACKOFF, "a hundred refusals do not end it"


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


# --- many peers -------------------------------------------------------------------------------------

NUMBER = 12
CHANGES = ["failed", "heard", "suspended", "told", "left", "transferred", "joined", "looked up"]
changes = st.lists(
    st.tuples(st.sampled_from(CHANGES), st.integers(1, NUMBER - 1), st.sampled_from(list(Stage)), st.booleans()),
    min_size=20,
    max_size=40,
)


def plain_draw(made: Membership, now: float, exclude: set[int], outgoing: bool, last: Stage) -> int | None:
    """Draw as the docstring of :meth:`Membership.draw` says, from a list of all neighbours."""
    found = {rank: made.others.peek(rank) for rank in made._neighbours if rank not in exclude}
    free = [rank for rank, other in found.items() if other.may_be_asked(now) and (other.stage or Stage.JOINING) <= last]
    rates = {rank: rate for rank in free if (rate := found[rank].transfers(outgoing).rate) is not None}
    return made._schedule.partner(made._rank, made._round + 1, free, made._rng, rates)


@given(
    graph=st.sampled_from(["full", "ring", "star", "erdos-renyi:p=0.5", "hierarchical"]),
    spec=st.sampled_from(list(SCHEDULES)),
    some=changes,
    exclude=st.sets(st.integers(0, NUMBER), max_size=4),
)
def test_a_draw_is_that_from_the_list_of_all_available_neighbours(
    graph: str, spec: str, some: list[tuple[str, int, Stage, bool]], exclude: set[int]
):
    """After any change, from the same random stream."""
    made = Membership(0, NUMBER, schedule_from(spec, topology_from(graph, NUMBER)), TIMEOUT, random.Random(0))
    if spec not in ("random", "bandwidth-aware"):  # the others have no place for ranks that join
        some = [one for one in some if one[0] != "joined"]
    for number, (change, rank, stage, outgoing) in enumerate(some):
        now = 0.3 * number
        if change == "joined":
            made.add(rank + NUMBER, lost=True)
            made.others[rank + NUMBER].backoff_until = now + 1.0
        elif change == "failed":
            made.failed(rank, Fault.TIMEOUT, now)
        elif change == "heard":
            made.heard_from(rank)
        elif change == "suspended":
            made.others[rank].suspended_until = now + 1.0
        elif change == "told":
            made.others[rank].record(ArriveRequest(stage, number // 10), now)
        elif change == "left":
            made.others[rank].stage = Stage.LEFT
        elif change == "looked up":
            assert made.others[rank] is made.others.get(rank)
        else:
            made.record_transfer(rank, float(number), now, outgoing)
        before = made._rng.getstate()
        expected = plain_draw(made, now, exclude, outgoing, Stage.TRAIN if outgoing else Stage.COMPARE)
        after = made._rng.getstate()
        made._rng.setstate(before)
        assert made.draw(now, exclude, outgoing=outgoing, in_training=outgoing) == expected
        assert made._rng.getstate() == after


def test_questions_about_all_peers_store_no_entries():
    size = 1000
    made = Membership(3, size, RandomNeighbour(topology_from("full", size)), TIMEOUT, random.Random(0))
    assert len(made.others) == size - 1 and list(made.others) == [rank for rank in range(size) if rank != 3]
    assert 3 not in made.others and size not in made.others and made.others.get(3) is made.others.get(size) is None
    with pytest.raises(KeyError):
        made.others[size]
    assert made.alive() == size and made.awaited() == list(made.others) == made.without_figures()
    assert not made.unavailable(0.0) and not made.restarted() and not made.has_joined_late and not made.in_training(0.0)
    assert not made.in_finish() and not made.is_gone(5) and made.draw_state()["members"]["others"] == {}
    assert len(made.to_probe(0.0)) == 1 and made.patience(9) == made.longest_patience(made.others.ranks, 2) == TIMEOUT
    made.heard_from(7)
    assert made.draw(0.0) is not None and not made.others.known
    made.count_as_lost([5])
    made.record_transfer(8, 1.0, 0.0)
    assert set(made.others.known) == {5, 8} and made.alive() == size - 1 and 5 not in made.awaited()


def test_all_that_train_need_no_entries():
    """Entries that are stored later say so too; a peer that then announces an earlier stage was restarted."""
    made = members()
    assert made.others[1].stage is None
    made.others.all_train()
    assert made.in_training(0.0) == [1, 2] and set(made.others.known) == {1} and not made.has_joined_late
    made.others[2].record(ArriveRequest(Stage.JOINING, 7), 0.0)
    made.others[1].record(ArriveRequest(Stage.FINISH, 7), 0.0)
    assert made.in_training(0.0) == [] and made.in_finish() == [1] and made.restarted() == [2]


def test_without_a_transfer_with_that_peer_the_last_ones_with_any_peer_count():
    made = members()
    for number in range(3 * MAX_TRANSFERS):
        made.record_transfer(1, 1000.0 if number < 2 * MAX_TRANSFERS else 40.0, 0.0)
    assert made.patience(2) == 80.0


def test_transfers_are_restored():
    made, again = members(), members()
    for seconds in (40.0, 41.0, 45.0):
        made.record_transfer(1, seconds, 0.0)
    made.record_late(2, outgoing=True)
    again.load_draw_state(made.draw_state())
    assert again.draw_state() == made.draw_state()
    for rank in (1, 2):
        for outgoing in (False, True):
            assert again.patience(rank, outgoing) == made.patience(rank, outgoing)


# --- Timers, and how they tell a sleep of this process from a long step --------------------------------


@pytest.mark.fault(79)
def test_a_gap_is_a_time_in_which_the_thread_could_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP or a suspend. Not a step of a minute, in which nothing happens and the thread still runs."""
    passed, ran = 0.0, threading.Event()

    def look() -> float:
        if threading.current_thread() is not threading.main_thread():
            ran.set()
        return passed

    monkeypatch.setattr(clock, "_passed", look)
    made = clock.Timers(lambda name: None, "0")
    try:
        for _ in range(6):
            passed += 10.0
            ran.clear()
            assert ran.wait(10)
        assert 10 <= made.gap() <= 20
        assert made.gap() <= 10
        passed += 60.0
        assert made.gap() == 60
    finally:
        made.close()


# --- the admission of newcomers between two processes ---------------------------------------------


OWN = JoinedPeer(2, "late", "10.0.0.3", 29400, 0)
GRANTED = Admission(2, "[run]\n", (("a", "10.0.0.1", 29400), ("b", "10.0.0.2", 29400)), (OWN,), (1,))


def test_an_admission_is_read_as_it_was_written() -> None:
    read = Admission.decoded(GRANTED.encoded())
    assert read == GRANTED and read.own == OWN
    assert [name for name, _, _ in read.peers()] == ["a", "b", "late"]


def test_a_rank_that_nobody_has_told_of_has_a_place_in_the_list() -> None:
    later = Admission(3, "", GRANTED.begun, (OWN._replace(rank=3),))
    assert [name for name, _, _ in later.peers()] == ["a", "b", "peer 2", "late"]


@pytest.mark.parametrize(
    "change",
    [
        {"joined": []},
        {"joined": [[1]]},
        {"rank": "x"},
        {"begun": [["a"]]},
        {"lost": 7},
        {"joined": [[10**9, "late", "host", 29_400, 0]], "rank": 10**9},  # all ranks up to it have a place in a list
        {"joined": [[-1, "late", "host", 29_400, 0]], "rank": -1},
        {"settings": None, "rank": None},
    ],
)
def test_a_malformed_admission_is_refused(change: dict[str, Any]) -> None:
    content = json.loads(GRANTED.encoded()) | change
    with pytest.raises(ProtocolError, match="malformed"):
        Admission.decoded(json.dumps(content).encode())
    with pytest.raises(ProtocolError, match="malformed"):
        Admission.decoded(b"[")


def test_settings_of_a_machine_are_not_told() -> None:
    given = {
        "policy": "tau:7",
        "name": "x",
        "peers": "hosts.txt",
        "secret_file": "s",
        "data_dir": "d",
        "bind": "0.0.0.0",
    }
    told = settings_of_run(files.resolve(given))
    assert "tau:7" in told and 'name = "x"' in told
    assert not [word for word in ("hosts.txt", "secret_file", "data_dir", "0.0.0.0") if word in told]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, ""),
        ({"exchange": "waves"}, ""),
        ({"mode": "push", "weights": "push-sum"}, ""),
        ({"schedule": "bandwidth-aware"}, ""),
        ({"hub": "0"}, "the run has a hub"),
        ({"servers": "0"}, "the run has servers"),
        ({"topology": "ring"}, "--topology ring has no place for a new peer"),
        ({"topology": "exponential"}, "--topology exponential has no place for a new peer"),
        ({"schedule": "static"}, "--schedule static is an order of the peers that began the run"),
        ({"schedule": "inner-outer"}, "--schedule inner-outer is an order"),
    ],
)
def test_which_runs_take_newcomers(given: dict[str, Any], told: str) -> None:
    config = files.resolve(given)
    reason = why_closed(config, build_schedule(config, 4))
    assert reason.startswith(told) and bool(reason) is bool(told)


def hello(rank: int, name: str, *joined: JoinedPeer, peers: str = "list", size: int = 2) -> Hello:
    return Hello(rank, name, size, peers, "model", {}, joined)


def test_the_digest_of_the_hosts_file_protects_runs_that_were_joined_too() -> None:
    """A newcomer names the peers that began the run; a process with another hosts file is no newcomer."""
    own, names = hello(0, "a"), ["a", "b"]
    assert objection(own, hello(2, "late", OWN), names) is None
    assert "hosts files" in str(objection(own, hello(2, "late", OWN, peers="another list"), names))
    assert "hosts files" in str(objection(own, hello(2, "c", size=3, peers="another list"), names))
    assert "late is not rank 2" in str(objection(own, hello(2, "late"), names))
    assert objection(own, hello(3, "late", OWN), names) == "late is not rank 3, as which it joined"
    claims = OWN._replace(rank=1, name="late")
    assert objection(own, hello(1, "late", claims), names) == "late is not rank 1, as which it joined"


def test_a_process_that_asks_names_no_peer_and_others_must() -> None:
    nonce = "0" * 64
    assert auth.misdirected(Open(nonce, auth.ANY, "late", auth.ANY), "a") is None
    assert auth.misdirected(Open(nonce, "list", "late", "b"), "a") is not None
