"""When a barrier is complete, event by event."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gossipx.peer.barrier import Barrier
from gossipx.peer.membership import Membership, OtherPeer, Requests
from gossipx.protocol.messages import ArriveRequest, Stage
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
