"""Which pulls are answered, and with which version of the model; and a hub that has not started."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipx.figures import Counters
from gossipx.hub import Centre
from gossipx.peer.membership import Membership, Requests
from gossipx.peer.serving import SAVED, SECONDS_PER_MODEL, Outgoing, Serving
from gossipx.protocol.effects import Answer, Capture, Effect, Forget
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import BusyReply, CentreRequest, ElasticRequest, ModelReply, PullRequest, Request
from gossipx.topology import topology_from
from gossipx.topology.schedules import RandomNeighbour

TIMEOUT = 20.0


def serving_at_most(most: int, members: Membership | None = None, share: float = 1.0) -> Serving:
    members = members or Membership(10, 11, RandomNeighbour(topology_from("full", 11)), TIMEOUT, random.Random(0))
    return Serving(most, share, Requests(), Outgoing(members), Counters())


def asks(serving: Serving, sender: int, step: int = 1, key: str = "") -> list[Effect]:
    request = Received(sender, key or f"of {sender}", PullRequest(1, 7.0))
    return serving.requested(request, step, now=100.0, trains=False)


def is_served(effects: list[Effect]) -> bool:
    (answer,) = (effect for effect in effects if isinstance(effect, Answer))
    assert isinstance(answer.reply, ModelReply | BusyReply)
    return isinstance(answer.reply, ModelReply)


def test_a_pull_gets_the_current_model_within_the_requesters_patience():
    serving = serving_at_most(2)
    capture, answer = asks(serving, 3, step=5)
    assert isinstance(capture, Capture)
    assert answer == Answer("of 3", ModelReply(5), 107.0, captured=capture.ticket, receiver=(3, ()))
    assert serving.answered(Answered("of 3", whole=True)) == [Forget(capture.ticket)]
    assert serving.answered(Answered("of 3", whole=True)) == []


def test_one_version_is_served_until_the_first_receiver_has_it():
    serving = serving_at_most(4)
    capture = asks(serving, 1, step=10)[0]
    assert asks(serving, 2, step=14)[0] == Answer(
        "of 2", ModelReply(14), 107.0, captured=capture.ticket, receiver=(2, ())
    )
    serving.answered(Answered("of 1", whole=True))
    assert not is_served(asks(serving, 3, step=15)), "10 is still given to 2, and a third in memory is one too many"
    assert serving.answered(Answered("of 2", whole=True)) == [Forget(capture.ticket)]
    later = asks(serving, 3, step=15)[0]
    assert isinstance(later, Capture)
    assert later.ticket != capture.ticket


@given(
    most=st.integers(1, 4),
    events=st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=60),
)
def test_at_most_one_version_is_kept_for_at_most_the_limit_of_pulls(most: int, events: list[tuple[int, bool, bool]]):
    serving, kept, under_way = serving_at_most(most), set[int](), dict[str, int]()
    for number, (sender, finishes, whole) in enumerate(events):
        effects: list[Effect]
        if finishes and under_way:
            key = sorted(under_way)[sender % len(under_way)]
            del under_way[key]
            effects = serving.answered(Answered(key, whole))
        else:
            effects = asks(serving, sender, step=number // 3, key=str(number))
            if is_served(effects):
                under_way[str(number)] = sender
        kept |= {effect.ticket for effect in effects if isinstance(effect, Capture)}
        kept -= {effect.ticket for effect in effects if isinstance(effect, Forget)}
        given = {effect.captured for effect in effects if isinstance(effect, Answer)} - {None}
        assert given <= kept and len(kept) <= 1
        assert bool(kept) == bool(under_way)
        assert len(under_way) == len(set(under_way.values())) <= most


def test_while_training_served_models_are_spaced_after_the_saved_time():
    """The saved time is spent at once, then one model every SECONDS_PER_MODEL / share; a reserved time never moves."""
    serving, begins = serving_at_most(1, share=0.1), list[float]()
    for number in range(40):
        *_, answer = serving.requested(Received(1, number, PullRequest(1, 7.0)), 1, now=100.0, trains=True)
        assert isinstance(answer, Answer)
        begins.append(answer.begins - 100.0)
        serving.answered(Answered(number, whole=True))
    at_once = round(SAVED * 0.1 / SECONDS_PER_MODEL) + 1
    assert begins == pytest.approx(
        [0.0] * at_once + [SECONDS_PER_MODEL / 0.1 * turn for turn in range(1, 41 - at_once)]
    )


class PlainPrecedence:
    """For each peer that was turned away, the set of those that made way for it: as the rule is told."""

    def __init__(self) -> None:
        self.turns = dict[int, int]()
        self.waiting = dict[int, set[int]]()

    def answered(self, sender: int) -> None:
        self.turns[sender] = 1 + max(self.turns.values(), default=0)
        self.waiting.pop(sender, None)

    def turned_away(self, sender: int) -> None:
        self.waiting[sender] = set()

    def makes_way(self, sender: int) -> bool:
        own = self.turns.get(sender, 0)
        before = [yielded for rank, yielded in self.waiting.items() if self.turns.get(rank, 0) < own]
        makes_way = any(sender not in yielded for yielded in before)
        for yielded in before:
            yielded.add(sender)
        return makes_way


@given(
    most=st.integers(1, 2),
    pulls=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=30, max_size=80),
)
def test_each_peer_makes_way_once_for_each_that_was_turned_away(most: int, pulls: list[tuple[int, bool]]):
    """A pull beyond the limit, or of a peer that is served, gets busy; an answer that failed closes no version."""
    serving, plain, under_way = serving_at_most(most), PlainPrecedence(), list[tuple[int, int]]()
    busy = 0
    for number, (sender, finishes) in enumerate(pulls):
        has_room = len(under_way) < most and all(sender != other for other, _ in under_way)
        expected = has_room and not plain.makes_way(sender)
        assert is_served(asks(serving, sender, step=number, key=str(number))) == expected
        if expected:
            plain.answered(sender)
            under_way.append((sender, number))
        else:
            plain.turned_away(sender)
            busy += 1
        assert serving._counts["busy_answers"] == busy
        if finishes and under_way:
            _, key = under_way.pop(0)
            serving.answered(Answered(str(key), whole=False))


# --- a hub -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [ElasticRequest(1, 1, 10, 30.0), CentreRequest(30.0)], ids=["exchange", "centre"])
def test_a_hub_that_has_not_started_is_busy(request_: Request) -> None:
    """A worker may train before the last message of the START barrier reaches the hub. Nothing has failed then."""
    centre = Centre(Requests(), 0.25)
    (answer,) = centre.requested(Received(1, "key", request_), 5.0)
    assert isinstance(answer, Answer) and answer.reply == BusyReply() and answer.deadline == 35.0
    centre.begin()
    assert len(centre.requested(Received(1, "key", request_), 6.0)) >= 1 and centre.exchanges == 0
