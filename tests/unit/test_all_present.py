"""Roles that start without announcing themselves, as in runs of thousands of peers in virtual time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gossipx.peer import PeerRole
from gossipx.protocol.effects import Answer, Mix, Resume, Send, Wait
from gossipx.protocol.events import AllPresent, Answered, JoinRun, Received, Replied, StepDone
from gossipx.protocol.messages import ArriveRequest, HereReply, ModelReply, PullRequest, RoundRequest, Stage
from gossipx.settings import files
from gossipx.sync import SyncManager
from gossipx.topology import topology_from

SIZE = 1000


def roles(size: int = SIZE, policy: str = "tau:1", **settings: Any) -> list[PeerRole]:
    graph, config = topology_from("full", size), files.resolve(settings)
    return [
        PeerRole(rank, size, SyncManager(policy), graph, random.Random(rank), 1, settings=config)
        for rank in range(size)
    ]


def test_all_train_at_once_and_pull_from_each_other():
    """Nobody sends an announcement, and each peer stores an entry of those it exchanged a model with only."""
    made = roles()
    for role in made:
        assert role.handle(AllPresent(), 0.0) == [Wait(), Resume()] and role.stage is Stage.TRAIN
    partners: dict[int, set[int]] = {role.rank: set() for role in made}
    for role in made:
        (pull,) = role.handle(StepDone(1, 0.1), 1.0)
        assert isinstance(pull, Send) and isinstance(pull.request, PullRequest)
        *_, answer = made[pull.to].handle(Received(role.rank, role.rank, pull.request), 1.1)
        assert isinstance(answer, Answer)
        role.handle(Replied(pull.ticket, answer.reply), 1.2)
        made[pull.to].handle(Answered(role.rank, whole=True), 1.2)
        if isinstance(answer.reply, ModelReply):
            (mix,) = role.handle(StepDone(2, 0.1), 2.0)
            assert mix == Mix(pull.ticket, 0.5)
            partners[role.rank].add(pull.to)
            partners[pull.to].add(role.rank)
    assert sum(map(len, partners.values())) > 1.9 * SIZE, "the others found a busy peer"
    assert all(partners[role.rank] <= set(role.members.others.known) for role in made)
    assert sum(len(role.members.others.known) for role in made) < 2.1 * SIZE


def test_a_wave_has_all_as_members():
    made = roles(exchange="waves")
    for role in made:
        role.handle(AllPresent(), 0.0)
    _, sent, *_ = made[5].handle(StepDone(1, 0.1), 1.0)
    assert isinstance(sent, Send) and isinstance(sent.request, RoundRequest)
    assert sent.request.members == tuple(range(SIZE))
    partner = made[sent.to]
    joined = partner.handle(Received(5, "k", sent.request), 1.1)
    assert partner.waves.current is not None and partner.waves.current.members == tuple(range(SIZE))
    assert any(isinstance(effect, Answer) and isinstance(effect.reply, ModelReply) for effect in joined)
    assert len(made[5].members.others.known) <= 2 and not partner.members.others.known


def test_a_peer_that_announces_itself_later_was_restarted():
    """It adopts a model, as any restarted peer does, and takes part in waves again once it trains."""
    role, again = roles(3, exchange="waves")[:2]
    role.handle(AllPresent(), 0.0)
    joining = next(effect for effect in again.handle(JoinRun(), 5.0) if isinstance(effect, Send) and effect.to == 0)
    assert isinstance(joining.request, ArriveRequest)
    (answer,) = role.handle(Received(1, "k", joining.request), 5.1)
    assert isinstance(answer, Answer) and isinstance(answer.reply, HereReply) and answer.reply.stage is Stage.TRAIN
    assert role.members.restarted() == [1] and role.members.in_training(5.2) == [2]
    asks = again.handle(Replied(joining.ticket, answer.reply), 5.2)
    assert [effect.to for effect in asks if isinstance(effect, Send)] == [0], "it fetches a model of a peer that trains"
    role.handle(Received(1, "j", ArriveRequest(Stage.START, 1)), 5.3)
    assert role.members.in_training(5.4) == [1, 2]


def test_it_replaces_the_barrier():
    role = roles(2)[0]
    role.handle(JoinRun(), 0.0)
    with pytest.raises(AssertionError):
        role.handle(AllPresent(), 0.0)
