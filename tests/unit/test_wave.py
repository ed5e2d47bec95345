"""One peer's part in a wave, and its choice of wave, event by event."""

from __future__ import annotations

import random

from gossipx import policies
from gossipx.figures import Counters
from gossipx.peer.exchange import PeerContext
from gossipx.peer.fragment_order import FragmentOrder
from gossipx.peer.membership import Membership, Requests
from gossipx.peer.serving import Outgoing
from gossipx.peer.waves import TIMER, Wave, WaveSequence
from gossipx.protocol.effects import Answer, Capture, Effect, Forget, Merge, Note, Send, SetTimer
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import LAST_WAVE, MAX_WAVE, HereReply, ModelReply, NotReadyReply, RoundRequest, Stage
from gossipx.sync import SyncManager
from gossipx.topology import topology_from
from gossipx.topology.schedules import RandomNeighbour

TIMEOUT = 10.0


def begun(rank: int, size: int, number: int = 7) -> tuple[Wave, list[Effect]]:
    wave = Wave(number, rank, tuple(range(size)), 100, Requests(), TIMEOUT)
    return wave, wave.begin(0.0)


def asks(sender: int, round: int, size: int, number: int = 7, key: str = "k") -> Received:
    return Received(sender, key, RoundRequest(number, round, tuple(range(size))))


def sent(effects: list[Effect]) -> Send:
    return next(effect for effect in effects if isinstance(effect, Send))


def kind(effects: list[Effect]) -> type:
    """Return the kind of the reply, which is the only effect."""
    (answer,) = effects
    assert isinstance(answer, Answer)
    return type(answer.reply)


def given(wave: Wave, to: int, key: str = "k", weight: int = 1, deadline: float = TIMEOUT) -> Answer:
    return Answer(key, ModelReply(100, weight), deadline, captured=wave.ticket, receiver=(to, ()))


def test_both_models_cross_before_either_is_merged():
    wave, effects = begun(0, 2)
    assert effects[0] == Capture(wave.ticket) and effects[2] == SetTimer(TIMER, TIMEOUT)
    assert sent(effects).to == 1
    assert wave.model_received(1, 0.1) == [], "ours is not with the other yet"
    assert wave.requested(asks(1, 0, 2), 0.2) == [given(wave, 1)]
    assert wave.is_answering("k") and not wave.is_answering("other")
    assert wave.answered(Answered("k", True), 0.3) == [Merge(sent(effects).ticket, wave.ticket, 1, 1)]
    assert not wave.over
    assert wave.merge_ended(True, 0.4) == [] and wave.over and (wave.merged, wave.lost) == (1, 0)


def test_an_answer_that_was_not_delivered_may_be_requested_again():
    wave, effects = begun(0, 2)
    wave.model_received(1, 0.1)
    wave.requested(asks(1, 0, 2, key="first"), 0.2)
    assert wave.answered(Answered("first", False), 0.3) == []
    assert wave.requested(asks(1, 0, 2, key="again"), 0.4) == [given(wave, 1, "again")]
    assert wave.answered(Answered("again", True), 0.5) == [Merge(sent(effects).ticket, wave.ticket, 1, 1)]


def test_a_request_for_a_later_round_waits():
    wave, _ = begun(0, 4)
    assert wave.requested(asks(2, 1, 4, key="later"), 0.1) == []
    wave.model_received(1, 0.2)
    wave.requested(asks(1, 0, 4), 0.2)
    wave.answered(Answered("k", True), 0.3)
    entered = wave.merge_ended(True, 0.4)
    assert sent(entered).request == RoundRequest(7, 1, (0, 1, 2, 3)) and sent(entered).to == 2
    assert entered[-1] == given(wave, 2, "later", 2, 1.5 * TIMEOUT)


def test_requests_of_another_round_or_wave_are_refused():
    wave, _ = begun(0, 4)
    other_wave, other_members = asks(1, 0, 4, number=8), Received(1, "k", RoundRequest(7, 0, (0, 1)))
    for event in (asks(3, 0, 4), asks(2, 2, 4), asks(2, 2**40, 4), other_wave, other_members):
        assert kind(wave.requested(event, 0.1)) is NotReadyReply
    assert not wave.has_exchanged
    wave.requested(asks(1, 0, 4), 0.1)
    assert wave.has_exchanged


def test_each_round_may_end_a_little_later_than_the_one_before():
    """A peer that waited in vain for its first partner meets the second in time."""
    wave, _ = begun(0, 4)
    assert wave.timer_fired(TIMEOUT - 0.01) == [], "a timer of an earlier wave"
    lost = wave.timer_fired(TIMEOUT)
    assert lost[0] == Note("round", "peer 1 missed a round of wave 7")
    assert sent(lost).to == 2 and sent(lost).deadline == 1.5 * TIMEOUT
    other, _ = begun(2, 4)
    other.model_received(1, 0.1)
    other.requested(asks(3, 0, 4), 0.1)
    other.answered(Answered("k", True), 0.1)
    assert sent(other.merge_ended(True, 0.2)).deadline == 1.5 * TIMEOUT
    assert wave.lost == 1 and wave.requested(asks(1, 0, 4), TIMEOUT) != [given(wave, 1)]


def test_weights_after_a_lost_round():
    """While training, the partners of a power of two average equally; in the finish each model counts once."""
    for number, shares in ((7, (1, 1)), (LAST_WAVE, (1, 2))):
        wave, _ = begun(0, 4, number)
        ticket = sent(wave.partner_lost(1.0)).ticket
        wave.requested(asks(2, 1, 4, number), 1.1)
        wave.answered(Answered("k", True), 1.2)
        assert wave.model_received(2, 1.3) == [Merge(ticket, wave.ticket, *shares)]


def test_a_received_model_is_merged_even_if_ours_was_not_delivered():
    wave, effects = begun(0, 2)
    wave.model_received(1, 0.1)
    assert wave.timer_fired(TIMEOUT)[1:] == [Merge(sent(effects).ticket, wave.ticket, 1, 1)]
    assert wave.lost == 0


def test_a_peer_beyond_the_power_of_two_sends_first_and_receives_the_mean_last():
    wave, effects = begun(2, 3)
    assert sent(effects).request == RoundRequest(7, 0, (0, 1, 2))
    assert wave.requested(asks(0, 0, 3), 0.1) == [given(wave, 0)]
    last = wave.answered(Answered("k", True), 0.2)
    assert sent(last).request == RoundRequest(7, 2, (0, 1, 2))
    assert wave.model_received(3, 0.3) == [Merge(sent(last).ticket, wave.ticket, 0, 3)]


def test_a_peer_that_only_sends_tells_its_partner_of_the_wave():
    """The answer is the same before and after the round: it asks for no model."""
    starter, effects = begun(2, 3)
    assert sent(effects).to == 0 and sent(effects).request == RoundRequest(7, 0, (0, 1, 2))
    core, _ = begun(0, 3)
    assert kind(core.requested(asks(2, 0, 3), 0.1)) is HereReply
    core.partner_lost(0.1)
    assert kind(core.requested(asks(2, 0, 3), 0.2)) is HereReply
    assert starter.model_received(1, 0.1) == [Forget(sent(effects).ticket)], "it asked for none"
    assert starter.requested(asks(0, 0, 3), 0.2) == [given(starter, 0)]


def test_a_partner_that_tells_of_a_wave_is_not_refused_once_it_is_over():
    """2 has the mean before the request of 0, which sends it, has arrived: a refusal would count as a lost round."""
    waves = peer(2, 3)
    waves.defer(meant(0, (0, 1, 2)))
    waves.join(5, 0.0)
    assert waves.current is not None
    waves.current.partner_lost(0.1)
    waves.current.partner_lost(0.2)
    assert waves.current.over and waves.take_in() and waves.current is None
    assert kind(waves.requested(Received(0, "k", RoundRequest(1, 2, (0, 1, 2))), 5, 0.3)) is HereReply
    assert kind(waves.requested(Received(0, "k", RoundRequest(1, 0, (0, 1, 2))), 5, 0.3)) is NotReadyReply


# --- the choice of wave -------------------------------------------------------------------------------


def peer(rank: int, size: int) -> WaveSequence:
    members = Membership(rank, size, RandomNeighbour(topology_from("full", size)), TIMEOUT, random.Random(0))
    for other in members.others.values():
        other.stage = Stage.START
    return WaveSequence(
        PeerContext(
            *(rank, 0, TIMEOUT, False, members, Outgoing(members), Requests()),
            *(SyncManager(policies.parse("never")), FragmentOrder(), Counters()),
        )
    )


def meant(sender: int, members: tuple[int, ...], wave: int = 1, key: str = "k") -> Received:
    return Received(sender, key, RoundRequest(wave, 0, members))


def test_a_peer_that_sent_a_model_keeps_its_member_list():
    waves = peer(0, 4)
    waves.defer(meant(1, (0, 1), key="one"))
    assert any(isinstance(effect, Answer) for effect in waves.join(5, 0.0))
    first = waves.current
    assert kind(waves.requested(meant(1, (0, 1, 2, 3), key="all"), 5, 0.1)) is NotReadyReply
    assert waves.current is first is not None and first.members == (0, 1)


def test_a_peer_that_sent_none_switches_and_requests_anew():
    waves = peer(0, 4)
    waves.start(5, 0.0)
    first = waves.current
    assert first is not None and first.members == (0, 1, 2, 3)
    assert kind(waves.requested(meant(1, (0, 1), key="worse"), 5, 0.1)) is NotReadyReply and waves.current is first

    waves = peer(0, 4)
    few = Wave(1, 0, (0, 2), 5, Requests(), TIMEOUT)
    waves.current = few
    effects = waves.requested(meant(1, (0, 1, 2, 3)), 5, 0.1)
    assert waves.current is not few and waves.current.members == (0, 1, 2, 3)
    assert effects[0] == Forget(few.ticket) and effects[1] == Capture(waves.current.ticket)
    own = waves.current.ticket
    assert effects[-1] == Answer("k", ModelReply(5, 1), 0.1 + TIMEOUT, captured=own, receiver=(1, ()))


def test_of_several_waiting_waves_the_latest_is_joined():
    waves = peer(0, 4)
    everyone = (0, 1, 2, 3)
    for event in (meant(2, everyone, 4, "old"), meant(1, everyone, 6, "new"), meant(3, (0, 3), 6, "few")):
        waves.defer(event)
    answers = {effect.key: effect.reply for effect in waves.join(5, 0.0) if isinstance(effect, Answer)}
    assert waves.current is not None and (waves.current.number, waves.current.members) == (6, everyone)
    assert isinstance(answers["new"], ModelReply)
    assert isinstance(answers["old"], NotReadyReply) and isinstance(answers["few"], NotReadyReply)
    assert waves.join(5, 0.1) == []


def test_the_round_timeout_follows_transfers_and_doubles_at_most_twice():
    """The slowest member sets the timeout; a member that is late again and again at most quadruples it."""

    def patience(members: tuple[int, ...]) -> float:
        return sent(waves.finish(members, 5, 1.0, 0.0)).deadline

    waves = peer(0, 4)
    known = waves._context.members
    for rank in (1, 3):
        known.record_transfer(rank, 0.1, 0.0)
    assert patience((0, 1, 2, 3)) == TIMEOUT, "where all are fast, all give up at one time"
    known.record_transfer(2, 40.0, 0.0)
    assert patience((0, 1, 2, 3)) == 80.0 and patience((0, 1)) == TIMEOUT
    for _ in range(9):
        known.record_late(2)
    assert patience((0, 1, 2, 3)) == 4 * 80.0 and patience((0, 1)) == TIMEOUT


def test_impossible_member_lists_are_refused():
    waves = peer(0, 4)
    for members in ((1, 2), (0, 2), (0, 1, 9)):
        assert kind(waves.requested(meant(1, members), 5, 0.0)) is NotReadyReply
    assert waves.join(5, 0.1) == []


def test_no_wave_is_started_beyond_the_highest_number():
    """A peer that hears of it or takes part in it starts no wave with a higher number, and not the finish."""
    waves = peer(0, 2)
    waves.record_over(MAX_WAVE)
    assert waves.start(5, 0.0) == [] and waves.current is None
    waves = peer(0, 2)
    assert waves.requested(meant(1, (0, 1), MAX_WAVE), 5, 0.0) == []
    assert waves.join(5, 0.0) and waves.current is not None
    waves.give_up("no more", 0.1)
    assert waves.start(6, 0.2) == [] and waves.current is None
