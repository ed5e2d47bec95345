"""One peer's part in the last wave, event by event."""

from __future__ import annotations

import random

from gossipx import policies
from gossipx.figures import Counters
from gossipx.peer.exchange import PeerContext
from gossipx.peer.fragment_order import FragmentOrder
from gossipx.peer.last_wave import TIMER, Finish, LastWave
from gossipx.peer.membership import Membership, Requests
from gossipx.peer.serving import Outgoing
from gossipx.protocol.effects import Answer, Capture, Effect, Forget, Merge, Note, Send, SetTimer
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import HereReply, ModelReply, NotReadyReply, RoundRequest
from gossipx.sync import SyncManager
from gossipx.topology import topology_from
from gossipx.topology.schedules import RandomNeighbour

TIMEOUT = 10.0


def begun(rank: int, size: int) -> tuple[LastWave, list[Effect]]:
    wave = LastWave(rank, tuple(range(size)), 100, Requests(), TIMEOUT)
    return wave, wave.begin(0.0)


def asks(sender: int, round: int, size: int, key: str = "k") -> Received:
    return Received(sender, key, RoundRequest(round, tuple(range(size))))


def sent(effects: list[Effect]) -> Send:
    return next(effect for effect in effects if isinstance(effect, Send))


def kind(effects: list[Effect]) -> type:
    """Return the kind of the reply, which is the only effect."""
    (answer,) = effects
    assert isinstance(answer, Answer)
    return type(answer.reply)


def given(wave: LastWave, key: str = "k", weight: int = 1, deadline: float = TIMEOUT) -> Answer:
    return Answer(key, ModelReply(100, weight), deadline, captured=wave.ticket)


def test_both_models_cross_before_either_is_merged():
    wave, effects = begun(0, 2)
    assert effects[0] == Capture(wave.ticket) and effects[2] == SetTimer(TIMER, TIMEOUT)
    assert sent(effects).to == 1
    assert wave.model_received(1, 0.1) == [], "ours is not with the other yet"
    assert wave.requested(asks(1, 0, 2), 0.2) == [given(wave)]
    assert wave.is_answering("k") and not wave.is_answering("other")
    assert wave.answered(Answered("k", True), 0.3) == [Merge(sent(effects).ticket, wave.ticket, 1, 1)]
    assert not wave.over
    assert wave.merge_ended(True, 0.4) == [] and wave.over and (wave.merged, wave.lost) == (1, 0)


def test_an_answer_that_was_not_delivered_may_be_requested_again():
    wave, effects = begun(0, 2)
    wave.model_received(1, 0.1)
    wave.requested(asks(1, 0, 2, key="first"), 0.2)
    assert wave.answered(Answered("first", False), 0.3) == []
    assert wave.requested(asks(1, 0, 2, key="again"), 0.4) == [given(wave, "again")]
    assert wave.answered(Answered("again", True), 0.5) == [Merge(sent(effects).ticket, wave.ticket, 1, 1)]


def test_a_request_for_a_later_round_waits():
    wave, _ = begun(0, 4)
    assert wave.requested(asks(2, 1, 4, key="later"), 0.1) == []
    wave.model_received(1, 0.2)
    wave.requested(asks(1, 0, 4), 0.2)
    wave.answered(Answered("k", True), 0.3)
    entered = wave.merge_ended(True, 0.4)
    assert sent(entered).request == RoundRequest(1, (0, 1, 2, 3)) and sent(entered).to == 2
    assert entered[-1] == given(wave, "later", 2, 1.5 * TIMEOUT)


def test_requests_of_another_round_or_other_members_are_refused():
    wave, _ = begun(0, 4)
    other_members = Received(1, "k", RoundRequest(0, (0, 1)))
    for event in (asks(3, 0, 4), asks(2, 2, 4), asks(2, 2**40, 4), other_members):
        assert kind(wave.requested(event, 0.1)) is NotReadyReply


def test_each_round_may_end_a_little_later_than_the_one_before():
    """A peer that waited in vain for its first partner meets the second in time."""
    wave, _ = begun(0, 4)
    assert wave.timer_fired(TIMEOUT - 0.01) == [], "a timer of an earlier round"
    lost = wave.timer_fired(TIMEOUT)
    assert lost[0] == Note("round", "peer 1 missed a round of the finish")
    assert sent(lost).to == 2 and sent(lost).deadline == 1.5 * TIMEOUT
    other, _ = begun(2, 4)
    other.model_received(1, 0.1)
    other.requested(asks(3, 0, 4), 0.1)
    other.answered(Answered("k", True), 0.1)
    assert sent(other.merge_ended(True, 0.2)).deadline == 1.5 * TIMEOUT
    assert wave.lost == 1 and wave.requested(asks(1, 0, 4), TIMEOUT) != [given(wave)]


def test_each_model_counts_once_after_a_lost_round():
    wave, _ = begun(0, 4)
    ticket = sent(wave.partner_lost(1.0)).ticket
    wave.requested(asks(2, 1, 4), 1.1)
    wave.answered(Answered("k", True), 1.2)
    assert wave.model_received(2, 1.3) == [Merge(ticket, wave.ticket, 1, 2)]


def test_a_received_model_is_merged_even_if_ours_was_not_delivered():
    wave, effects = begun(0, 2)
    wave.model_received(1, 0.1)
    assert wave.timer_fired(TIMEOUT)[1:] == [Merge(sent(effects).ticket, wave.ticket, 1, 1)]
    assert wave.lost == 0


def test_a_peer_beyond_the_power_of_two_sends_first_and_receives_the_mean_last():
    wave, effects = begun(2, 3)
    assert sent(effects).request == RoundRequest(0, (0, 1, 2))
    assert wave.requested(asks(0, 0, 3), 0.1) == [given(wave)]
    last = wave.answered(Answered("k", True), 0.2)
    assert sent(last).request == RoundRequest(2, (0, 1, 2))
    assert wave.model_received(3, 0.3) == [Merge(sent(last).ticket, wave.ticket, 0, 3)]


def test_a_peer_that_only_sends_tells_its_partner_of_the_wave():
    """The answer is the same before and after the round: it asks for no model."""
    starter, effects = begun(2, 3)
    assert sent(effects).to == 0 and sent(effects).request == RoundRequest(0, (0, 1, 2))
    core, _ = begun(0, 3)
    assert kind(core.requested(asks(2, 0, 3), 0.1)) is HereReply
    core.partner_lost(0.1)
    assert kind(core.requested(asks(2, 0, 3), 0.2)) is HereReply
    assert starter.model_received(1, 0.1) == [Forget(sent(effects).ticket)], "it asked for none"
    assert starter.requested(asks(0, 0, 3), 0.2) == [given(starter)]


def test_the_round_timeout_follows_transfers_and_doubles_at_most_twice():
    """The slowest member sets the timeout; a member that is late again and again at most quadruples it."""
    known = Membership(0, 4, RandomNeighbour(topology_from("full", 4)), TIMEOUT, random.Random(0))
    finish = Finish(
        PeerContext(
            *(0, 0, TIMEOUT, False, known, Outgoing(known), Requests()),
            *(SyncManager(policies.parse("never")), FragmentOrder(), Counters()),
        ),
        after_waves=False,
    )

    def patience(members: tuple[int, ...]) -> float:
        return sent(finish.begin(members, 5, 1.0, 0.0)).deadline

    for rank in (1, 3):
        known.record_transfer(rank, 0.1, 0.0)
    assert patience((0, 1, 2, 3)) == TIMEOUT, "where all are fast, all give up at one time"
    known.record_transfer(2, 40.0, 0.0)
    assert patience((0, 1, 2, 3)) == 80.0 and patience((0, 1)) == TIMEOUT
    for _ in range(9):
        known.record_late(2)
    assert patience((0, 1, 2, 3)) == 4 * 80.0 and patience((0, 1)) == TIMEOUT
