"""When a barrier is complete, event by event, and peers that start without one."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gossipx.peer import PeerRole
from gossipx.peer.barrier import Barrier
from gossipx.peer.membership import Membership, OtherPeer, Requests
from gossipx.protocol.effects import Answer, Mix, Resume, Send, Wait
from gossipx.protocol.events import AllPresent, Answered, JoinRun, Received, Replied, StepDone
from gossipx.protocol.messages import ArriveRequest, HereReply, ModelReply, PullRequest, Stage
from gossipx.settings import files
from gossipx.sync import SyncManager
from gossipx.topology import topology_from
from gossipx.topology.schedules import RandomNeighbour

TIMEOUT = 10.0
OWN = 2


def begun(size: int, stage: Stage) -> tuple[Barrier, Membership, Requests]:
    members = Membership(OWN, size, RandomNeighbour(topology_from("full", size)), TIMEOUT, random.Random(0))
    requests = Requests()
    barrier = Barrier(members, requests, TIMEOUT)
    barrier.begin(ArriveRequest(stage, 0), 0.0)
    return barrier, members, requests


@given(
    stage=st.sampled_from([Stage.START, Stage.FINISH, Stage.DONE]),
    changes=st.lists(
        st.tuples(
            st.sampled_from(["told", "told", "told", "restarted", "lost", "heard", "replied", "announced", "joined"]),
            st.sampled_from([0, 1, 3]),
            st.sampled_from([Stage.START, Stage.FINISH, Stage.DONE, Stage.LEFT]),
        ),
        min_size=15,
        max_size=40,
    ),
)
def test_it_is_complete_when_nobody_is_waited_for(stage: Stage, changes: list[tuple[str, int, Stage]]):
    """Whatever was found before: a peer may restart after its arrival, and a lost peer may be back."""
    barrier, members, requests = begun(4, stage)
    for number, (change, rank, told) in enumerate(changes):
        other = members.others[rank]
        if change == "told":
            other.record(ArriveRequest(told, 0), 0.0)
            other.knows_report = told is Stage.DONE
        elif change == "restarted":
            other.record(ArriveRequest(Stage.JOINING, number), 0.0)
        elif change == "lost":
            other.lost = True
        elif change == "heard":
            members.heard_from(rank)
        elif change == "announced":
            barrier.announce(rank, ArriveRequest(stage, 0), 0.0)
        elif change == "joined":
            members.add(4 + rank, lost=bool(number % 2))
        else:
            for ticket in [ticket for ticket, to in requests.opened(ArriveRequest) if to == rank]:
                requests.close(ticket)
        arrived = all(rank in barrier.arrived_ranks() for rank in members.awaited())
        tried = any(members.others.peek(rank).lost for rank in requests.open_ranks(ArriveRequest))
        assert barrier.complete() == (arrived and not tried)
        assert barrier.absent() == [rank for rank in members.awaited() if rank not in barrier.arrived_ranks()]


def test_each_peer_is_looked_at_few_times_in_all():
    """Whether they arrive in order or not: a barrier of N peers takes N events, each of which asks."""
    size = 500
    for order in (range(size), reversed(range(size)), random.Random(0).sample(range(size), size)):
        barrier, members, _ = begun(size, Stage.START)
        looked, peek = list[int](), members.others.peek

        def counted(rank: int, looked: list[int] = looked, peek=peek) -> OtherPeer:
            looked.append(rank)
            return peek(rank)

        members.others.peek = counted  # type: ignore[method-assign]
        completed = []
        for rank in order:
            if rank != OWN:
                members.others[rank].record(ArriveRequest(Stage.START, 0), 0.0)
                completed.append(barrier.complete())
        assert completed == [False] * (size - 2) + [True]
        assert len(looked) < 10 * size


# --- roles that start without announcing themselves, as in runs of thousands of peers in virtual time


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
