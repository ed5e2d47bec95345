"""One peer's part in the waves while it trains, event by event."""

from __future__ import annotations

import random

from gossipx import policies
from gossipx.figures import Counters
from gossipx.peer.exchange import PeerContext
from gossipx.peer.fragment_order import FragmentOrder
from gossipx.peer.membership import Membership, Requests
from gossipx.peer.serving import Outgoing
from gossipx.peer.waves import TIMER, Repair, Wave, WaveSequence
from gossipx.protocol.effects import (
    Answer,
    ApplyWave,
    AverageShard,
    Capture,
    Effect,
    EncodeWave,
    EndWave,
    Forget,
    Keep,
    Note,
    Send,
    SetTimer,
)
from gossipx.protocol.events import Answered, Received, ShardAveraged, WaveEncoded, WaveEnded
from gossipx.protocol.messages import (
    MAX_WAVE,
    NO_REFERENCE,
    HereReply,
    NotReadyReply,
    OutdatedReply,
    ReferenceReply,
    ReferenceRequest,
    ShardRequest,
    ShareReply,
    ShareRequest,
    Stage,
)
from gossipx.sync import SyncManager
from gossipx.topology import topology_from
from gossipx.topology.schedules import RandomNeighbour

TIMEOUT = 10.0
LATEST = 1.5 * TIMEOUT  # when a member stops waiting for a mean
OURS = (5, 77)
LATER = (6, 3)
ALL = (0, 1, 2)
MEAN = ShareReply((0, 1, 2), (4,))


def peer(rank: int = 0, size: int = 3) -> WaveSequence:
    members = Membership(rank, size, RandomNeighbour(topology_from("full", size)), TIMEOUT, random.Random(0))
    for other in members.others.values():
        other.stage = Stage.TRAIN
    return WaveSequence(
        PeerContext(
            *(rank, 0, TIMEOUT, False, members, Outgoing(members), Requests()),
            *(SyncManager(policies.parse("never")), FragmentOrder(), Counters()),
        )
    )


def begun(rank: int = 0, size: int = 3) -> tuple[WaveSequence, list[int]]:
    """Return a peer whose codes are on their way, and the tickets of its requests."""
    waves = peer(rank, size)
    waves.start(0.0)
    return waves, [send.ticket for send in sends(waves.progressed(WaveEncoded(own(waves), OURS), 0.0))]


def own(waves: WaveSequence) -> int:
    assert waves.current is not None
    return waves.current.ticket


def sends(effects: list[Effect]) -> list[Send]:
    return [effect for effect in effects if isinstance(effect, Send)]


def code(
    sender: int,
    key: str = "k",
    wave: int = 1,
    members: tuple[int, ...] = ALL,
    reference: tuple[int, int] = OURS,
) -> Received:
    return Received(sender, key, ShardRequest(wave, members, 0, reference, (4,), LATEST))


def asks(sender: int, owner: int, key: str = "k") -> Received:
    return Received(sender, key, ShareRequest(1, ALL, 0, owner))


def share(waves: WaveSequence, owner: int, key: str = "k", now: float = 0.0) -> Answer:
    return Answer(key, ShareReply((), ()), now + TIMEOUT, share=(own(waves), owner), fragment=0)


def averaged(waves: WaveSequence, counted: tuple[int, ...] = ALL, now: float = 0.0) -> list[Effect]:
    return waves.progressed(ShardAveraged(own(waves), counted), now)


def refused(effects: list[Effect]) -> list[object]:
    """Return the keys of the requests that were refused."""
    return [one.key for one in effects if isinstance(one, Answer) and isinstance(one.reply, NotReadyReply)]


def test_a_wave_from_its_start_to_the_weights():
    waves = peer()
    assert waves.start(0.0) == [
        Capture(own(waves)),
        EncodeWave(own(waves), 1, ALL, founds=True),
        SetTimer(TIMER, TIMEOUT),
    ]
    first, second = sends(waves.progressed(WaveEncoded(own(waves), OURS), 2.0))
    assert [send.to for send in (first, second)] == [1, 2]
    assert first.request == ShardRequest(1, ALL, 0, OURS, (), LATEST - 2) and first.deadline == LATEST
    (kept,) = waves.requested(code(2, "two"), 3.0)
    assert isinstance(kept, Keep) and kept.key == "two"
    other, average = waves.requested(code(1, "one"), 3.0)
    assert isinstance(other, Keep)
    assert average == AverageShard(own(waves), ((1, other.ticket), (2, kept.ticket)))
    assert averaged(waves, now=4.0) == [share(waves, 0, "two", 4.0), share(waves, 0, "one", 4.0)]
    assert waves.answered(Answered("one", True), 4.5) == waves.replied(second.ticket, MEAN, 5.0) == []
    end = EndWave(own(waves), ((1, first.ticket), (2, second.ticket)), with_own=True)
    assert waves.replied(first.ticket, MEAN, 5.0) == [end] and not waves.over
    assert waves.progressed(WaveEnded(own(waves), ()), 6.0) == [] and waves.over
    ticket = own(waves)
    assert waves.latest == 0 and waves.take_in(7.0) == [ApplyWave(ticket)] and not waves.over
    assert waves.taken_in(ticket + 1, 7.0) is None
    assert waves.taken_in(ticket, 7.0) == [Forget(ticket)]
    assert (waves.current, waves.latest, waves.lost) == (None, 1, 0)


def test_an_owner_waits_for_codes_until_the_timeout_and_tells_late_ones_that_they_do_not_count():
    waves, _ = begun()
    (kept,) = waves.requested(code(1), 1.0)
    assert isinstance(kept, Keep)
    assert waves.timer_fired(TIMEOUT - 0.01) == [], "a timer of an earlier wave"
    assert waves.timer_fired(TIMEOUT) == [AverageShard(own(waves), ((1, kept.ticket),))]
    assert waves.requested(code(2, "while it averages"), TIMEOUT) == []
    counted = averaged(waves, (0, 1), TIMEOUT)
    assert counted == [share(waves, 0, "k", TIMEOUT), share(waves, 0, "while it averages", TIMEOUT)]
    assert waves.requested(code(2, "later"), 11.0) == [share(waves, 0, "later", 11.0)]


def test_an_owner_without_any_code_leaves_its_shard_out_and_refuses_late_ones():
    waves, (one, two) = begun()
    assert waves.timer_fired(TIMEOUT) == []
    assert refused(waves.requested(code(1), TIMEOUT)) == ["k"]
    waves.replied(one, MEAN, 11.0)
    assert waves.replied(two, MEAN, 11.0) == [EndWave(own(waves), ((1, one), (2, two)))]


def test_the_mean_of_our_shard_counts_once_another_member_has_it():
    for delivered in (True, False):
        waves, tickets = begun()
        for sender, ticket in zip((1, 2), tickets, strict=True):
            waves.requested(code(sender, f"of {sender}"), 1.0)
            waves.replied(ticket, MEAN, 1.0)
        assert len(averaged(waves)) == 2
        assert waves.answered(Answered("of 1", False), 2.0) == [], "one is still under way"
        end = EndWave(own(waves), ((1, tickets[0]), (2, tickets[1])), with_own=delivered)
        assert waves.answered(Answered("of 2", delivered), 3.0) == [end]
        waves.progressed(WaveEnded(own(waves), ()), 3.0)
        assert isinstance(waves.current, Wave) and waves.current.lost == (not delivered)


def test_codes_that_arrive_before_ours_is_encoded_wait():
    """Even past the timeout, when those that have arrived are all that count."""
    for now, count in ((1.0, 0), (TIMEOUT, 1)):
        waves = peer()
        waves.start(0.0)
        assert waves.requested(code(1), 0.5) == waves.timer_fired(now) == []
        effects = waves.progressed(WaveEncoded(own(waves), OURS), now)
        assert [type(effect) for effect in effects] == [Send, Send, Keep] + [AverageShard] * count


def test_a_repeated_code_counts_once_and_is_answered_twice():
    waves, _ = begun(0, 2)
    pair = (0, 1)
    kept, average = waves.requested(code(1, "first", members=pair), 1.0)
    assert isinstance(kept, Keep) and average == AverageShard(own(waves), ((1, kept.ticket),))
    assert waves.requested(code(1, "again", members=pair), 1.1) == []
    assert averaged(waves, pair) == [share(waves, 0, "first"), share(waves, 0, "again")]


def test_a_code_that_is_not_finite_suspends_its_peer_and_counts_as_lost():
    waves, _ = begun()
    waves.requested(code(1, "one"), 1.0)
    waves.requested(code(2, "two"), 1.0)
    note, *answers = averaged(waves, (0, 1))
    assert note == Note("poisoned", "the code of peer 2 holds NaN or Inf: it is not in wave 1")
    assert answers == [share(waves, 0, "one"), share(waves, 0, "two")]
    known = waves._context
    assert known.members.others[2].suspended_until == TIMEOUT and known.counts["poisoned"] == 1


# --- references ---------------------------------------------------------------------------------------


def test_a_peer_whose_reference_is_outdated_fetches_the_later_one():
    waves, (one, two) = begun()
    assert waves.replied(one, OutdatedReply(LATER), 1.0) == [Forget(one)]
    assert waves.replied(two, OutdatedReply(LATER), 1.0) == [Forget(two)] and waves.over
    ticket = own(waves)
    forget, capture, send = waves.take_in(1.0)
    assert isinstance(waves.current, Repair) and forget == Forget(ticket) and capture == Capture(own(waves))
    assert isinstance(send, Send) and (send.to, send.request) == (2, ReferenceRequest(0))
    assert waves._context.sync.failed == 0, "that is no fault of this wave"
    reply = ReferenceReply(LATER, True, 1, (1,))
    assert waves.replied(send.ticket + 1, reply, 2.0) == [Forget(send.ticket + 1)]
    assert waves.replied(send.ticket, reply, 2.0) == [EndWave(own(waves), reference=send.ticket)]
    (note,) = waves.progressed(WaveEnded(own(waves), ()), 2.0)
    assert isinstance(note, Note) and waves.over and waves._context.counts["references"] == 1
    repaired = own(waves)
    assert waves.take_in(2.0) == [ApplyWave(repaired)]
    assert waves.taken_in(repaired, 2.0) == [Forget(repaired)] and waves.current is None


def test_a_peer_without_a_reference_uploads_nothing_and_fetches_that_of_the_first_member():
    waves = peer(1)
    waves.start(0.0)
    waves.requested(code(2, "early"), 0.1)
    assert refused(waves.progressed(WaveEncoded(own(waves), NO_REFERENCE), 0.2)) == ["early"] and waves.over
    assert [(send.to, send.request) for send in sends(waves.take_in(0.3))] == [(2, ReferenceRequest(0))]


def test_a_repair_that_fails_is_left_to_the_next_wave():
    waves, tickets = begun(0, 2)
    waves.replied(tickets[0], OutdatedReply(LATER), 1.0)
    (send,) = sends(waves.take_in(1.0))
    assert waves.replied(send.ticket, NotReadyReply("it has none"), 2.0) == [Forget(send.ticket)] and waves.over
    ticket = own(waves)
    assert waves.take_in(2.0) == [Forget(ticket)] and waves.current is None


def test_a_reference_that_is_not_finite_is_not_taken():
    waves, tickets = begun(0, 2)
    waves.replied(tickets[0], OutdatedReply(LATER), 1.0)
    (send,) = sends(waves.take_in(1.0))
    waves.replied(send.ticket, ReferenceReply(LATER, True, 1, (1,)), 2.0)
    ticket = own(waves)
    (note,) = waves.progressed(WaveEnded(ticket, (1,)), 2.0)
    assert note == Note("poisoned", "the reference of peer 1 holds NaN or Inf: it is not taken")
    assert waves.take_in(2.0) == [Forget(ticket)] and waves._context.members.others[1].suspended_until == 2 + TIMEOUT


def test_codes_of_other_references_are_left_out_at_once():
    """An earlier one is told so; a later one is refused, and fetched from its peer."""
    waves, (one, two) = begun()
    outdated = waves.requested(code(1, reference=(4, 9)), 1.0)
    assert outdated == [Answer("k", OutdatedReply(OURS), 1.0 + TIMEOUT)]
    assert refused(waves.requested(code(2, reference=LATER), 1.0)) == ["k"]
    waves.failed(one, 1.0)
    waves.failed(two, 1.0)
    assert waves.over
    assert [(send.to, send.request) for send in sends(waves.take_in(1.0))] == [(2, ReferenceRequest(0))]


def test_any_peer_gives_its_reference():
    request = ReferenceRequest(0)
    (answer,) = peer().requested(Received(1, "k", request), 0.0)
    assert isinstance(answer, Answer) and isinstance(answer.reply, ReferenceReply)
    assert answer.fragment == 0


def test_who_asks_for_a_reference_in_a_wave_gets_the_one_after_it():
    waves, tickets = begun(0, 2)
    assert waves.requested(Received(1, "ask", ReferenceRequest(0)), 0.5) == []
    assert waves.replied(tickets[0], MEAN, 1.0) == waves.timer_fired(TIMEOUT - 1) == []
    assert waves.timer_fired(TIMEOUT) == [EndWave(own(waves), ((1, tickets[0]),))]
    (answer,) = waves.progressed(WaveEnded(own(waves), ()), 11.0)
    assert isinstance(answer, Answer) and (answer.key, answer.fragment) == ("ask", 0)


# --- owners that do not answer ------------------------------------------------------------------------


def test_two_members_are_asked_for_the_mean_of_an_owner_that_fails():
    waves, (one, two, *_) = begun(0, 5)
    forget, ask = waves.failed(one, 1.0)
    assert forget == Forget(one) and isinstance(ask, Send) and ask.deadline == 1.0 + TIMEOUT / 2
    assert (ask.to, ask.request) == (2, ShareRequest(1, (0, 1, 2, 3, 4), 0, 1))
    _, again = waves.replied(ask.ticket, NotReadyReply("it has no mean of that shard"), 2.0)
    assert isinstance(again, Send) and again.to == 3
    assert waves.failed(again.ticket, 3.0) == [
        Forget(again.ticket),
        Note("wave", "peer 1 missed wave 1: its shard of the model is left out"),
    ]
    _, ask = waves.failed(two, 3.0)
    assert isinstance(ask, Send) and ask.to == 3, "1 is not asked: it did not answer either"
    assert waves.replied(ask.ticket, MEAN, 4.0) == []
    assert waves.replied(two, MEAN, 4.0) == [Forget(two)], "its mean is here already"
    assert not waves.over


def test_a_member_without_the_mean_of_a_shard_waits_with_others_or_refuses_them():
    waves, (one, two) = begun()
    assert waves.requested(asks(2, 1, "open"), 0.1) == []
    assert waves.replied(one, MEAN, 0.2) == [share(waves, 1, "open", 0.2)]
    assert waves.requested(asks(2, 1, "here"), 0.3) == [share(waves, 1, "here", 0.3)]
    waves.requested(asks(1, 2, "waits"), 0.3)
    assert refused(waves.failed(two, 0.4)) == ["waits"]
    assert refused(waves.requested(asks(1, 2, "absent"), 0.5)) == ["absent"]
    assert refused(waves.requested(asks(1, 7, "no member"), 0.5)) == ["no member"]
    other = Received(1, "other", ShareRequest(2, ALL, 0, 2))
    assert refused(waves.requested(other, 0.5)) == ["other"], "nobody joins a wave for that"


def test_a_wave_that_is_over_still_answers():
    waves, tickets = begun(0, 2)
    waves.requested(code(1, members=(0, 1)), 0.1)
    averaged(waves, (0, 1))
    waves.replied(tickets[0], MEAN, 0.2)
    waves.answered(Answered("k", True), 0.2)
    waves.progressed(WaveEnded(own(waves), ()), 0.3)
    answer = share(waves, 0, "again", 0.5)
    waves.take_in(0.4)
    waves.taken_in(own(waves), 0.4)
    assert waves.requested(code(1, "again", members=(0, 1)), 0.5) == [answer]
    assert refused(waves.requested(code(1, "other", members=(0, 1, 2)), 0.5)) == ["other"]


def test_a_peer_that_leaves_is_not_waited_for():
    waves, (_, two) = begun()
    (kept,) = waves.requested(code(2), 0.5)
    assert isinstance(kept, Keep)
    ask, average = waves.peer_left(1, 1.0)
    assert isinstance(ask, Send) and (ask.to, ask.request) == (2, ShareRequest(1, ALL, 0, 1))
    assert average == AverageShard(own(waves), ((2, kept.ticket),))
    assert waves.peer_left(9, 1.0) == []
    averaged(waves, (0, 2))
    waves.answered(Answered("k", True), 1.0)
    waves.replied(two, MEAN, 1.0)
    assert waves.replied(ask.ticket, MEAN, 1.0) == [EndWave(own(waves), ((1, ask.ticket), (2, two)), True)]


def test_with_nobody_else_to_ask_its_reply_is_waited_for():
    waves, (one,) = begun(0, 2)
    assert waves.peer_left(1, 1.0) == [] and not waves.over
    forget, note = waves.failed(one, 2.0)
    assert forget == Forget(one) and isinstance(note, Note) and waves.over
    assert (waves.take_in(2.0), waves.lost) == ([Forget(1)], 1)


def test_training_that_has_ended_elsewhere_is_no_fault():
    waves, tickets = begun(0, 2)
    assert waves.replied(tickets[0], HereReply(Stage.FINISH), 1.0) == [Forget(tickets[0])]
    assert waves.over
    waves.take_in(1.0)
    assert (waves.lost, waves._context.sync.failed, waves.current) == (0, 0, None)


# --- which wave ---------------------------------------------------------------------------------------


def test_of_several_waiting_waves_the_latest_is_joined():
    waves = peer(0, 4)
    everyone = (0, 1, 2, 3)
    for event in (code(2, "old", 4, everyone), code(1, "new", 6, everyone), code(3, "few", 6, (0, 3))):
        assert waves.requested(event, 0.0) == []
    joined = waves.join(0.1)
    assert EncodeWave(own(waves), 6, everyone, True) in joined and refused(joined) == ["old", "few"]
    assert waves.join(0.2) == []
    assert waves.requested(code(2, "next", 7, everyone), 0.3) == [], "it waits until this wave is in the weights"


def test_a_peer_that_has_exchanged_nothing_takes_the_better_list_of_members():
    waves = peer(0, 4)
    waves.requested(code(2, "few", members=(0, 2)), 0.0)
    waves.join(0.0)
    few = own(waves)
    effects = waves.requested(code(1, "all", members=(0, 1, 2, 3)), 0.2)
    assert EncodeWave(own(waves), 1, (0, 1, 2, 3), True) in effects and own(waves) != few
    assert refused(effects) == ["few"]
    assert [effect.ticket for effect in effects if isinstance(effect, Forget)][-1] == few
    assert refused(waves.requested(code(3, "worse", members=(0, 3)), 0.3)) == ["worse"]


def test_a_peer_that_has_averaged_keeps_its_list_of_members():
    waves = peer(0, 4)
    waves.requested(code(2, members=(0, 2)), 0.0)
    waves.join(0.0)
    assert isinstance(waves.progressed(WaveEncoded(own(waves), OURS), 0.1)[-1], AverageShard)
    assert refused(waves.requested(code(1, "all", members=(0, 1, 2, 3)), 0.2)) == ["all"]


def test_giving_up_releases_everything():
    waves, (one, _) = begun()
    (kept,) = waves.requested(code(1, "code"), 0.1)
    waves.replied(one, MEAN, 0.1)
    waves.requested(asks(1, 2, "open"), 0.1)
    waves.requested(code(2, "next", 2), 0.1)
    ticket, reply = own(waves), NotReadyReply("it leaves")
    assert isinstance(kept, Keep)
    answers = [Answer(key, reply, 1.0 + TIMEOUT) for key in ("next", "code", "open")]
    assert waves.give_up(reply, 1.0) == [Forget(kept.ticket), Forget(one), Forget(ticket), *answers]
    assert waves.current is None and waves.progressed(ShardAveraged(ticket, ALL), 1.0) == []


def test_impossible_member_lists_are_refused():
    waves = peer(0, 4)
    for members in ((1, 2), (0, 2), (0, 1, 9)):
        assert refused(waves.requested(code(1, members=members), 0.0)) == ["k"]
    assert waves.join(0.1) == []


def test_no_wave_is_started_beyond_the_highest_number():
    """A peer that hears of it or takes part in it starts no wave with a higher number."""
    waves = peer(0, 2)
    waves.record_over(MAX_WAVE)
    assert waves.start(0.0) == [] and waves.current is None
    waves = peer(0, 2)
    assert waves.requested(code(1, wave=MAX_WAVE, members=(0, 1)), 0.0) == []
    assert waves.join(0.0) and waves.current is not None
    waves.give_up(NotReadyReply("no more"), 0.1)
    assert waves.start(0.2) == [] and waves.current is None


def test_the_timeout_follows_transfers_up_to_four_times_that_of_a_model():
    waves = peer(0, 3)
    waves._context.members.record_transfer(2, 15.0, 0.0)
    for late, timeout in ((0, 30.0), (9, 4 * TIMEOUT)):
        for _ in range(late):
            waves._context.members.record_late(2)
        assert waves.start(0.0)[-1] == SetTimer(TIMER, timeout)
        waves.give_up(NotReadyReply("no more"), 0.0)
