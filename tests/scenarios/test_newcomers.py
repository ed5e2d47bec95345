"""Peers that are in nobody's hosts file and join a run under way, in virtual time."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from modes import MODES, nothing_left
from property_tests import examples
from toy import SIZE, TIMEOUT, bound, ended, make, models, world
from transcripts import LoggedWorld

from gossipx.peer.joining.newcomers import MAX_RESERVED
from gossipx.protocol.effects import AddPeer, Note, ReportEntry, Stop
from gossipx.protocol.events import AskEntry, PeerMet, Received
from gossipx.protocol.fields import MAX_JOINED, JoinedPeer
from gossipx.protocol.messages import ArriveRequest, Stage
from gossipx.sim import Network, SimPeer

LENGTH = 60
PORT = 29_400
EXCHANGES: list[dict[str, Any]] = [{}, *MODES, {"exchange": "waves"}, {"blocking": True}]
NAMES = ["pull", "push", "push-sum", "pushpull", "waves", "blocking"]
every_exchange = pytest.mark.parametrize("exchange", EXCHANGES, ids=NAMES)


def joins(made: LoggedWorld, size: int, name: str, at: float, contacts: tuple[int, ...] = (0,), **options: Any) -> None:
    """Let a peer join a run that ``size`` peers have begun."""

    def one(entry: ReportEntry) -> SimPeer:
        assert entry.rank is not None
        return make(entry.rank, size, entry=entry, **{"iterations": LENGTH, **options})

    made.join(name, contacts, one, at)


def agreed(made: LoggedWorld, ranks: list[int]) -> None:
    rows = models(made, ranks)
    torch.testing.assert_close(rows, rows[:1].expand_as(rows), rtol=0, atol=0)
    for rank in ranks:
        assert made.peers[rank].role.agreement.agreed, rank


def begun(size: int, network: Network | None = None, **options: Any) -> LoggedWorld:
    return world(size, network=network, **{"iterations": LENGTH, **options})


@every_exchange
def test_a_newcomer_adopts_a_model_exchanges_and_ends_with_the_others_model(exchange: dict[str, Any]) -> None:
    made = begun(2, **exchange)
    joins(made, 2, "late", 5.3, **exchange)
    ended(made, bound(3, LENGTH, waits=2))
    agreed(made, [0, 1, 2])
    nothing_left(made)
    assert made.lines(0, "admits late as 2") and made.lines(1, "hears of 2")
    late = made.peers[2]
    steps = made.lines(2, "step")
    assert steps[0] in ("step 6", "step 7") and steps[-1] == f"step {LENGTH}", "it starts where the others are"
    assert late.role.sync.retrievals >= 3 or exchange.get("mode") == "push"
    assert all(made.peers[rank].role.members.size == 3 for rank in range(3))
    lists = [made.peers[rank].role.newcomers.listed for rank in range(3)]
    assert lists == [(JoinedPeer(2, "late", "late", PORT, 0),)] * 3
    verb = {"push": "pushes to", "pushpull": "asks"}.get(exchange.get("mode", ""), "pulls")
    verb = "sends" if exchange.get("exchange") == "waves" else verb
    asked = [line for rank in (0, 1) for line in made.lines(rank, f"{verb} 2")]
    assert len(asked) >= 2, "members of waves are all three, and each of the others draws it"


@every_exchange
def test_two_that_ask_at_the_same_time_get_different_ranks_and_meet(exchange: dict[str, Any]) -> None:
    """They ask two peers; the second one names the first, which admits both."""
    made = begun(3, **exchange)
    joins(made, 3, "one", 10.3, (1,), **exchange)
    joins(made, 3, "other", 10.3, (2,), **exchange)
    ended(made, bound(5, LENGTH, waits=3))
    assert made.lines(0, "admits") == ["admits one as 3", "admits other as 4"]
    agreed(made, [0, 1, 2, 3, 4])
    assert [peer.name for peer in made.peers[3].role.newcomers.listed] == ["one", "other"]
    for rank in range(5):
        assert made.peers[rank].role.newcomers.listed == made.peers[3].role.newcomers.listed
        assert not made.lines(rank, "no longer waiting")


@pytest.mark.parametrize("exchange", [{}, {"exchange": "waves"}], ids=["pull", "waves"])
def test_another_peer_admits_if_the_lowest_rank_has_died(exchange: dict[str, Any]) -> None:
    made = begun(3, **exchange)
    made.crash(0, 8.5)
    joins(made, 3, "late", 9.0, (1, 2), **exchange)
    ended(made, bound(4, LENGTH, waits=3))
    assert made.fired["crash"] == 1 and made.lines(1, "admits late as 3")
    agreed(made, [1, 2, 3])
    assert not made.lines(3, "no longer waiting for peer 0"), "it was told that peer 0 is lost"


def test_the_contact_may_die_after_it_has_admitted_a_newcomer() -> None:
    """The model comes from another peer, to which the newcomer has announced itself."""
    made = begun(3, Network(bandwidth=32.0))  # a model takes 2 s
    joins(made, 3, "late", 10.3)
    made.crash(0, 11.0)
    ended(made, bound(4, LENGTH, waits=8) + 200)
    assert made.lines(3, "asks 0 for the initial model") and made.lines(3, "asks 1 for the initial model")
    assert made.lines(3, "step")
    agreed(made, [1, 2, 3])


def test_a_newcomer_that_dies_after_its_admission_holds_nobody_up() -> None:
    """Its rank stays its own: started again, it gets it back."""
    made = begun(2)
    joins(made, 2, "late", 10.3)
    made.crash(2, 10.3)
    joins(made, 2, "late", 30.3)
    ended(made, bound(3, LENGTH, waits=1))
    assert made.lines(0, "admits") == ["admits late as 2"] * 2
    agreed(made, [0, 1, 2])


@pytest.mark.parametrize("exchange", [{}, {"exchange": "waves"}], ids=["pull", "waves"])
def test_a_partition_while_one_joins_heals(exchange: dict[str, Any]) -> None:
    """Peer 1 cannot be reached from the newcomer for a while, and learns of it by others or later from itself."""
    network = Network()
    network.cut([1], [3], 0.0, 30.0)
    made = begun(3, network, **exchange)
    joins(made, 3, "late", 10.3, **exchange)
    ended(made, bound(4, LENGTH, waits=4))
    assert made.fired["cut"] > 0
    agreed(made, [0, 1, 2, 3])
    assert made.lines(1, "hears of 3")


@pytest.mark.parametrize("codec", ["3lc", "topk2:ratio=0.25"])
def test_coded_waves_take_a_newcomer(codec: str) -> None:
    """The shards, and with them the sizes of codes, change with the members."""
    made = begun(2, exchange="waves", codec=codec)
    for number, at in enumerate((8.3, 15.3, 22.3)):
        joins(made, 2, f"late-{number}", at, exchange="waves", codec=codec)
    ended(made, bound(5, LENGTH, waits=2))
    agreed(made, list(range(5)))
    assert not [entry for entry in made.log if "cannot decode" in entry.what]
    assert [made.retrievals(rank) != [] for rank in range(5)] == [True] * 5


# --- admission, event by event ------------------------------------------------------------------------


def training(size: int = 3, **settings: Any) -> LoggedWorld:
    """Return a run in which all peers train."""
    made = begun(size, **settings)
    made.run(5.5)
    assert all(peer.role.stage is Stage.TRAIN for peer in made.peers.values())
    return made


def ask(
    made: LoggedWorld, rank: int, name: str = "late", port: int = PORT, host: str = "host", opener: str = "host"
) -> ReportEntry:
    effects = made.peers[rank].role.handle(AskEntry(7, name, host, port, opener), made.now)
    (entry,) = [one for one in effects if isinstance(one, ReportEntry)]
    assert entry.number == 7
    return entry


def test_only_the_lowest_rank_that_trains_admits() -> None:
    made = training()
    assert [ask(made, rank).elsewhere for rank in (1, 2)] == [0, 0]
    assert ask(made, 0).rank == 3
    assert ask(made, 0).rank == 3, "the same address is the same peer"
    assert ask(made, 0, "later", PORT + 1).rank == 4
    made.peers[1].role.members.others[0].lost = True
    assert ask(made, 1).rank == 3, "a peer that has not heard of the first newcomers"
    made.peers[2].role.members.others[0].stage = Stage.FINISH
    assert ask(made, 2).elsewhere == 1


def test_a_run_that_is_over_admits_nobody_and_one_that_has_no_model_says_later() -> None:
    made = begun(2)
    made.run(0.0)
    assert ask(made, 0).later == "it has no model yet"
    ended(made, bound(2, LENGTH))
    assert ask(made, 0).refusal == "its training is over"


def test_a_run_without_a_place_for_newcomers_says_so() -> None:
    made = training(why_closed="peers in a ring have fixed neighbours")
    assert ask(made, 0).refusal == "peers in a ring have fixed neighbours"
    assert made.peers[0].role.handle(PeerMet(JoinedPeer(3, "late", "host", PORT, 0)), made.now) == []


def test_of_two_with_one_rank_the_one_that_the_lower_rank_admitted_keeps_it_everywhere() -> None:
    """A partition: peer 0 and peer 1 each admit one as peer 3; then the lists meet, in either order."""
    by_zero, by_one = JoinedPeer(3, "zeros", "host", PORT, 0), JoinedPeer(3, "ones", "other", PORT, 1)
    made = training()
    role = made.peers[2].role
    assert AddPeer(by_one) in role.handle(PeerMet(by_one), made.now)
    role.members.heard_from(3)
    told = ArriveRequest(Stage.TRAIN, 5, joined=(by_zero,))
    effects = role.handle(Received(0, "key", told), made.now)
    assert AddPeer(by_zero) in effects
    (note,) = [effect for effect in effects if isinstance(effect, Note)]
    assert note.text == "ones and zeros were both admitted as peer 3: ones must join again"
    assert role.members.others[3].lost, "the one that keeps the rank was not met yet"
    assert role.handle(PeerMet(by_one), made.now) == [] and role.newcomers.listed == (by_zero,)

    loser = make(3, 3, entry=ReportEntry(0, 3, (by_one,))).role
    (stop,) = [one for one in loser.handle(Received(0, "key", told), 0.0) if isinstance(one, Stop)]
    assert stop.reason == "rank 3 of this run belongs to zeros, which another peer admitted meanwhile: join again"
    winner = make(3, 3, entry=ReportEntry(0, 3, (by_zero,))).role
    effects = winner.handle(Received(0, "key", ArriveRequest(Stage.TRAIN, 5, joined=(by_one,))), 0.0)
    assert not [one for one in effects if isinstance(one, Stop | AddPeer)]


def test_a_newcomer_that_reaches_nobody_stops_and_says_why() -> None:
    entry = ReportEntry(0, 2, (JoinedPeer(2, "late", "late", PORT, 0),))
    made = LoggedWorld(0)
    made.start(2, lambda incarnation: make(2, 2, entry=entry))
    ended(made, 3 * TIMEOUT)
    told = "no peer of the run sent its model within peer_timeout = 10 s"
    assert made.lines(2, f"must stop: {told}") and not made.lines(2, "step")


# --- newcomers that never come, and impossible ones ---------------------------------------------------


@every_exchange
@pytest.mark.fault(80)
def test_a_thousand_that_never_come_leave_the_run_and_its_finish_undisturbed(exchange: dict[str, Any]) -> None:
    """They ask peer 0, 100 a second, while a real one joins; each of them was a member of the run, and for good."""
    made = begun(2, **exchange)

    def flood(number: int) -> None:
        made._tell(0, AskEntry(7, f"ghost-{number}", f"ghost-{number}", PORT, "evil"))
        assert made.transcripts[0].entries.pop().rank is not None

    for number in range(1_000):
        made.at(10.0 + number / 100, lambda number=number: flood(number))
    joins(made, 2, "late", 15.3, **exchange)
    alone = begun(2, **exchange)
    joins(alone, 2, "late", 15.3, **exchange)
    for one in (made, alone):
        ended(one, bound(3, LENGTH, waits=2))
    (late,) = [rank for rank in made.peers if rank > 1]
    agreed(made, [0, 1, late])
    for peer in made.peers.values():
        assert [one.name for one in peer.role.newcomers.listed] == ["late"]
        assert set(peer.role.members.others) | {peer.rank} == {0, 1, late}
        assert not peer.role.members.others[0 if peer.rank else 1].restarted
    assert late < 2 + MAX_RESERVED + 1, "a place that was not taken is given again"
    assert made.now == pytest.approx(alone.now, abs=TIMEOUT / 10)


def test_a_place_is_kept_until_peer_timeout_and_for_one_that_comes_late_while_it_is_free() -> None:
    made = training()
    role = made.peers[0].role
    assert (ask(made, 0).rank, ask(made, 0, "second", host="second").rank) == (3, 4)
    assert role.newcomers.listed == () and role.members.size == 3, "nobody hears of one that has not come"
    made.now += TIMEOUT
    assert ask(made, 0, "third", host="third").rank == 3
    late = JoinedPeer(3, "late", "host", PORT, 0)
    third = late._replace(name="third", host="third")
    assert AddPeer(third) in role.handle(PeerMet(third), made.now)
    assert role.handle(PeerMet(late), made.now) == [], "its place is taken by now"
    second = late._replace(rank=4, name="second", host="second")
    assert AddPeer(second) in role.handle(PeerMet(second), made.now)


def test_one_host_may_ask_for_many_places_without_taking_those_of_others() -> None:
    made = training()
    assert ask(made, 0).rank == 3
    ranks = [ask(made, 0, f"ghost-{n}", host=f"ghost-{n}", opener="evil").rank for n in range(2 * MAX_RESERVED)]
    assert set(ranks) == set(range(4, 4 + MAX_RESERVED)), "its oldest place is given to its next one"
    assert ask(made, 0).rank == 3
    assert ask(made, 0, "fourth", host="fourth").rank == 4 + MAX_RESERVED


@pytest.mark.fault(80)
def test_a_flood_from_many_addresses_closes_no_door() -> None:
    """Any process has all of 127.0.0.0/8; the hosts that have asked for most places lose their oldest."""
    made = training()
    assert ask(made, 0).rank == 3
    for number in range(2 * MAX_JOINED):
        assert ask(made, 0, f"n{number}", host=f"h{number}", opener=f"127.0.0.{number // 20}").rank is not None
    assert ask(made, 0).rank == 3
    assert ask(made, 0, "real", host="real", opener="real").rank is not None
    role = made.peers[0].role
    assert len(role.newcomers._reserved) <= MAX_JOINED


@pytest.mark.fault(80)
@pytest.mark.parametrize("second", [{"host": "other"}, {"name": "other"}], ids=["one name", "one address"])
def test_of_two_that_ask_under_one_name_or_address_the_one_that_comes_first_is_a_member(second: dict[str, str]) -> None:
    """Both ask before either connects, so that none of them is a peer that the other could be compared with."""
    made = training()
    role = made.peers[0].role
    first = JoinedPeer(3, "late", "host", PORT, 0)
    other = JoinedPeer(3, **{"name": "late", "host": "host", **second}, port=PORT, by=0)
    assert (ask(made, 0).rank, ask(made, 0, **second).rank) == (3, 3)
    assert AddPeer(first) in role.handle(PeerMet(first), made.now)
    assert role.handle(PeerMet(other), made.now) == [] and role.newcomers.listed == (first,)
    assert ask(made, 0, **second).refusal == "late is peer 3 of the run: choose another name or --port"
    assert ask(made, 0).rank == 3, "it is started again"


IMPOSSIBLE = {
    "long label": ("h" * 64, PORT, "x", "'hhhh.*…' is not a host name: its parts between dots need 1 to 63"),
    "empty": ("", PORT, "x", "'' is not a host name or an address"),
    "unspecified": ("0.0.0.0", PORT, "x", "'0.0.0.0' is every address of a machine"),
    "short address": ("10.1", PORT, "x", "'10.1' is not a whole IPv4 address"),
    "option": ("-oX=y z", PORT, "x", "'-oX=y z' is not a host name or an address"),
    "system port": ("host", 22, "x", "port 22 is not from 1024 to 65535"),
    "no name": ("host", PORT, "", "the name is not one printable word"),
    "long name": ("host", PORT, "n" * 980, "host and name have 984 bytes, more than 350"),
}


@pytest.mark.fault(80)
@pytest.mark.parametrize(("host", "port", "name", "told"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_newcomer_is_refused_by_all_who_hear_of_it(host: str, port: int, name: str, told: str) -> None:
    """At admission, on its connection, and in the announcement of another peer."""
    made = training()
    role, peer = made.peers[0].role, JoinedPeer(3, name, host, port, 1)
    assert re.match(told, ask(made, 0, name, port, host).refusal)
    for event in (PeerMet(peer), Received(1, "key", ArriveRequest(Stage.TRAIN, 5, joined=(peer,)))):
        effects = role.handle(event, made.now)
        (note,) = [one for one in effects if isinstance(one, Note)]
        assert note.text.startswith("peer 3 cannot join the run: ") and re.search(told, note.text)
        assert not [one for one in effects if isinstance(one, AddPeer)]
    assert role.newcomers.listed == () and role.members.size == 3


def test_lists_of_newcomers_that_meet_stay_short_enough_to_send() -> None:
    """In a partition both sides may admit as many as there can be; a list that is too long ended the finish."""
    made = training()
    role = made.peers[0].role
    joined = [JoinedPeer(rank, f"n{rank}", f"h{rank}", PORT, 0) for rank in range(3, 3 + MAX_JOINED + 1)]
    for start in (0, 1):
        told = ArriveRequest(Stage.TRAIN, 5, joined=tuple(joined[start : start + MAX_JOINED]))
        role.handle(Received(1, "key", told), made.now)
    assert len(role.newcomers.listed) == MAX_JOINED
    assert ask(made, 0).refusal == f"{MAX_JOINED} peers have joined already"


@pytest.mark.fault(51, 79)
@examples(60, few=8)
@given(
    how=st.sampled_from(["crash", "pause", "restart", "leave"]),
    after=st.floats(0, 45),
    begins=st.floats(5, 29),
    exchange=st.sampled_from(EXCHANGES),
    slow=st.booleans(),
    seed=st.integers(0, 100),
)
def test_a_newcomer_struck_while_it_joins_trains_or_ends(how, after, begins, exchange, slow, seed):
    """Those who began the run end with one model and say so; a newcomer that sleeps claims no more than is true."""
    network = Network(bandwidth=4 * SIZE, delay=0.01) if slow else None
    made = world(3, seed, network, iterations=30, **exchange)
    joins(made, 3, "late", begins, iterations=30, **exchange)
    assume(made.run(begins + 2, until=lambda: 3 in made.peers) or 3 in made.peers)
    at = made.now + after
    if how == "pause":
        made.pause(3, at, at + 30 * TIMEOUT)
    elif how == "restart":
        made.restart(3, at, unless=lambda: made.peers[3].down_since is not None)
    else:
        getattr(made, how)(3, at)
    assert made.run(at + 100 * TIMEOUT)
    agreed(made, [0, 1, 2])
    if made.lines(3, "ends") and made.peers[3].role.agreement.agreed:
        agreed(made, [0, 1, 2, 3])
