"""Peers that crash, leave, join late or restart."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from modes import agree, slow
from toy import ITERATIONS, TIMEOUT, alone, bound, ended, maker, until, world

from gossipx import topology
from gossipx.peer.membership import Membership
from gossipx.protocol.effects import Note
from gossipx.protocol.events import Fault
from gossipx.protocol.messages import Stage
from gossipx.topology.schedules import RandomNeighbour


@pytest.mark.parametrize(
    ("size", "rank", "options", "sender"),
    [(4, 2, {}, 0), (3, 0, {}, 1), (3, 1, {"init": "own", "policy": "tau:2"}, 0)],
    ids=["another", "the first", "own weights"],
)
@pytest.mark.fault(36, 37)
def test_restarted_peer_adopts_a_model_before_it_contributes(
    size: int, rank: int, options: dict[str, Any], sender: int
):
    """Also if it was the first, or if all began with their own weights: others are training."""
    made = world(size, **options)
    made.crash(rank, 8.5)
    made.restart(rank, 10.2)
    ended(made, bound(size, waits=1))
    assert (made.fired["crash"], made.fired["restart"]) == (1, 1)
    assert not options or not any(entry.what.startswith("adopts") for entry in made.log if entry.time < 8.5)
    life = [entry.what for entry in made.log if entry.rank == rank and entry.time >= 10.2]
    assert life[0] == "starts" and life.index(f"adopts the model of {sender}") < life.index("is TRAIN")
    assert f"step {ITERATIONS}" in life and "step 1" not in life, "it continues at the sender's iteration"
    agree(made, list(range(size)))


@pytest.mark.parametrize("left", [[1, 2, 3], [2, 3]])
def test_the_lowest_rank_that_is_present_starts_with_its_own_weights(left: list[int]):
    """Rank 0 never appears; and 1, which would start in its place, may crash before it does."""
    made = world(4, absent=[0], iterations=3)
    if 1 not in left:
        made.crash(1, 5.0)
    ended(made, bound(4, 3, waits=2))
    assert made.lines(left[1], f"adopts the model of {left[0]}") and made.lines(3, "adopts the model of")
    agree(made, left)


def test_first_peer_crashes_while_it_sends_the_initial_model():
    made = until(world(4, network=slow(), iterations=3), 1, "asks 0")
    made.crash(0, made.now + 0.5)
    ended(made, bound(4, 3, waits=1))
    assert made.fired["broken"] >= 1
    agree(made, [1, 2, 3])


@pytest.mark.parametrize(("size", "second"), [(2, 0), (4, 1)])
def test_the_initial_model_is_requested_again_from_the_next_peer(size: int, second: int):
    """A peer that did not send it is retried after all others: its training loop may be busy for long."""
    late = size - 1
    made = world(size, network=slow(), absent=[late], iterations=40)
    made.start(late, maker(late, size, iterations=40), at=15.0)
    until(made, late, "asks 0")
    made.network.cut([0], [late], made.now + 0.9, made.now + 1.1)  # only the model is lost
    ended(made, bound(size, 40, waits=1))
    assert made.fired["cut"] == 1
    asked = [line.split()[1] for line in made.lines(late, "asks")]
    assert asked == ["0", str(second)] and made.lines(late, f"adopts the model of {second}")


@pytest.mark.fault(11)
def test_all_others_gone_trains_alone():
    made = world(4, policy="tau:7")
    for rank in (1, 2, 3):
        made.crash(rank, 3.5)
    ended(made, bound(4))
    assert made.fired["crash"] == 3
    peer = made.peers[0]
    assert peer.arena.step == ITERATIONS and peer.reason is None
    assert (peer.role.sync.retrievals, peer.role.members.alive()) == (0, 1)
    assert torch.equal(peer.weights(), alone(0, ITERATIONS))


@pytest.mark.fault(11)
def test_too_few_left_stops():
    """If min_peers says so."""
    made = world(4, policy="tau:2", min_peers=3)
    for rank in (1, 2):
        made.crash(rank, 3.5)
    ended(made, bound(4))
    for rank in (0, 3):
        reason = made.peers[rank].reason
        assert reason is not None and "min_peers = 3" in reason
        assert made.peers[rank].arena.step < ITERATIONS, "it does not train to the end"


def test_a_peer_that_comes_after_the_training_says_that_it_trained_nothing():
    made = world(3, slow={1: 4.0}, absent=[2])
    made.start(2, maker(2, 3), at=ITERATIONS + 10.0)
    ended(made, bound(3, compute=4.0))
    told = f"this peer trained no iteration: the model that it started with had seen {ITERATIONS} already"
    assert [made.lines(rank, "this peer trained") for rank in range(3)] == [[], [], [told]]


def test_no_initial_model_stops():
    made = ended(world(3, absent=[0, 2]), bound(3))
    reason = made.peers[1].reason
    assert reason is not None and "--peer-timeout" in reason and "--init own" in reason
    assert torch.equal(made.peers[1].weights(), alone(1, 0))


@pytest.mark.parametrize("what", ["asks 0", "pulls", "meets"])
@pytest.mark.fault(4)
def test_a_peer_leaves_while_a_model_is_on_its_way(what: str):
    """Nothing is mixed after it has announced that it leaves, and it does not wait long for the others."""
    made = until(world(3, network=slow(), blocking=True, iterations=6), 2, what)
    made.leave(2, made.now + 0.5)
    for rank in (0, 1):
        made.pause(rank, made.now + 0.4, made.now + 3.0)  # so that they receive it late
    ended(made, bound(3, 6, waits=2))
    life = made.lines(2)
    said = life.index("is LEFT")
    assert not [line for line in life[said:] if line.startswith(("mixes", "adopts", "meets", "pulls"))]
    assert life[-1] == "has left"
    assert all(made.lines(rank, "ends") for rank in (0, 1))


def test_the_last_two_leave_at_once():
    made = world(2)
    made.leave(0, 5.5)
    made.leave(1, 5.5)
    ended(made, bound(2))
    assert all(made.lines(rank)[-1] == "has left" for rank in (0, 1))
    assert made.now < 5.5 + TIMEOUT


def test_a_peer_that_has_ended_is_not_lost():
    """A far slower peer fails to pull from peers that are done, and still does not count them as lost."""
    made = ended(world(2, slow={1: 6.0}, policy="tau:1", min_peers=2, finish_timeout=TIMEOUT), bound(2, compute=6.0))
    ends = {entry.rank: entry.time for entry in made.log if entry.what == "ends"}
    assert ends[0] + 3 * TIMEOUT < ends[1], "the first has gone long before"
    assert not any("is lost" in entry.what for entry in made.log)
    assert not [entry for entry in made.log if entry.what == "pulls 0" and entry.time > ends[0]]
    assert made.peers[1].arena.step == ITERATIONS


@pytest.mark.fault(40)
def test_a_local_fault_counts_against_no_other_peer():
    """Without file descriptors all requests fail at once; this is no evidence against the other peers."""
    members = Membership(0, 3, RandomNeighbour(topology.topology_from("full", 3)), TIMEOUT, random.Random(0))
    members.others[1].stage = members.others[2].stage = Stage.TRAIN
    for tenth in range(int(10 * TIMEOUT)):
        assert not members.failed(1, Fault.LOCAL, tenth / 10)
    assert members.failed(1, Fault.LOCAL, TIMEOUT)
    assert [members.failed(2, Fault.UNREACHABLE, 0.1 * count) for count in range(3)] == [False, False, True]


def test_every_peer_that_is_lost_or_leaves_is_told(monkeypatch: pytest.MonkeyPatch):
    """Also if several go within the interval of one topic, in which later lines are only counted."""
    made = world(5)
    made.run(3.0)
    notes: list[Note] = []
    handle = made.peers[0].role.handle

    def noted(event, now):
        effects = handle(event, now)
        notes.extend(effect for effect in effects if isinstance(effect, Note))
        return effects

    monkeypatch.setattr(made.peers[0].role, "handle", noted)
    made.crash(1, 4.0)
    made.crash(2, 4.0)
    made.leave(3, 5.0)
    made.leave(4, 5.0)
    made.run()
    topics = {note.text.split(":")[0]: note.topic for note in notes if "lost" in note.text or "left" in note.text}
    assert {"peer 1 is lost", "peer 2 is lost", "peer 3 has left", "peer 4 has left"} <= topics.keys()
    assert len(set(topics.values())) == len(topics)


@pytest.mark.fault(1)
def test_a_lost_peer_is_told_once():
    """Later requests, which ask whether it is back, fail without a line."""
    made = world(2, policy="tau:1")
    made.crash(1, 4.0)
    ended(made, bound(2))
    life = made.lines(0)
    (lost,) = (place for place, line in enumerate(life) if line.startswith("peer 1 is lost"))
    assert made.peers[0].role.members.others[1].faults > 4, "it was asked again"
    assert any(line.startswith("a request") for line in life[:lost])
    assert not any(line.startswith("a request") for line in life[lost:])
