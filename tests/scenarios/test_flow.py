"""Flow control in whole runs: a peer that is turned away tries another, and deadlines adapt to a slow network."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
from seeds import some
from toy import SIZE, TIMEOUT, bound, ended, maker, until, world

from gossipx.peer.serving import INITIAL_MODELS, SAVED, SECONDS_PER_MODEL
from gossipx.protocol.messages import PullRequest
from gossipx.sim import Network


def snapshots(made, rank: int) -> int:
    """Return the number of versions of its model that a peer keeps, including the latest."""
    return 1 + len({id(held.base) for held in made.peers[rank].driver.captures._captured.values()})


@pytest.mark.parametrize("max_served", [1, 3])
def test_the_centre_of_a_star_limits_concurrent_pulls_and_keeps_one_older_version(max_served: int):
    """Every model takes longer than two iterations; seven peers have no other neighbour."""
    network = Network(bandwidth=4 * SIZE / 2.5)
    settings = {"iterations": 40, "max_served": max_served, "finish": "none", "init": "own"}
    made = world(8, network=network, graph="star", policy="tau:1", **settings)
    most = 0
    for tick in range(1, 400):
        made.run(tick / 10)
        serving = made.peers[0].role.serving
        most = max(most, len(serving._served))
        assert snapshots(made, 0) <= 2
    assert most == max_served
    ended(made, bound(8, 40, waits=2))
    assert made.peers[0].role.counts["busy_answers"] > 20
    leaves = [made.peers[rank].role.sync for rank in range(1, 8)]
    assert all(sync.retrievals > 0 for sync in leaves), "nobody is always turned away"
    assert all(sync.failed == 0 for sync in leaves)
    assert all(sync.skipped > 0 for sync in leaves)


def test_peers_that_have_the_initial_model_send_it_on():
    """A model takes 1 s. One peer alone would need 39 s for all, longer than a requester waits."""
    made = world(40, network=Network(bandwidth=4 * SIZE), policy="never", iterations=3)
    most = 0
    for tick in range(1, 200):
        made.run(tick / 10)
        most = max(most, *(len(peer.role.outgoing._initial) for peer in made.peers.values()))
    assert most == INITIAL_MODELS
    ended(made, bound(40, 3))
    senders = Counter(line.split()[-1] for rank in range(1, 40) for line in made.lines(rank, "adopts the model of"))
    assert senders.total() == 39 and len(senders) > 12
    assert not made.warnings, "no request fails, and none is repeated after its timeout"
    begun = [entry.time for entry in made.log if entry.what == "is TRAIN"]
    assert len(begun) == 40 and max(begun) < TIMEOUT


@pytest.mark.parametrize("joining", [0, 1])
def test_a_peer_that_finds_all_busy_waits_for_its_turn(joining: int):
    """A model takes 25 s or more. Meanwhile, peer_timeout passes: the peer does not start with its own model, whatever
    its rank."""
    source = 1 - joining
    settings = {"policy": "never", "iterations": 120, "model_timeout": 60.0, "finish": "none"}
    made = world(4, network=Network(bandwidth=4 * SIZE / 25), absent=[2, 3], **settings)
    for rank in (2, 3):
        made.start(rank, maker(rank, 4, **settings), at=41.0)
    made.crash(joining, 40.0)
    made.restart(joining, 42.0)
    ended(made, bound(4, 120, waits=12))
    assert made.lines(2, f"adopts the model of {source}") and made.lines(3, f"adopts the model of {source}")
    assert made.lines(joining, f"waiting for the initial model: peer {source} has it, and sends it to others first")
    adopted = [entry.time for entry in made.log if entry.rank == joining and entry.what.startswith("adopts")]
    assert adopted[-1] > 42.0 + 4 * TIMEOUT


def test_a_peer_that_finds_one_busy_tries_another_at_once():
    """Of three peers, 1 and 2 pull from 0 in the same moment by the schedule; one of them then tries the other."""
    network = Network(bandwidth=4 * SIZE / 0.5)
    made = world(3, network=network, policy="tau:3", iterations=60, max_served=1, blocking=True)
    ended(made, bound(3, 60, 2.0))
    asked = [peer.role.counts["busy_answers"] for peer in made.peers.values()]
    assert sum(asked) > 5
    for peer in made.peers.values():
        assert (peer.role.sync.retrievals, peer.role.sync.skipped) == (20, 0), "who waits asks until there is one"


@pytest.mark.parametrize("model_timeout", [0.0, 60.0])
def test_deadlines_grow_until_a_model_slower_than_peer_timeout_arrives(model_timeout: float):
    """Models take 25 s where 10 s are expected: the first pulls time out, each with a longer deadline, until one
    succeeds. Where the model's size says so, it is waited for from the start."""
    settings = {"iterations": 400, "finish": "none", "init": "own", "model_timeout": model_timeout}
    made = world(2, network=Network(bandwidth=4 * SIZE / 25), policy="tau:1", **settings)
    ended(made, bound(2, 400, waits=4))
    for peer in made.peers.values():
        failed = peer.role.sync.failed
        assert failed == 0 if model_timeout else 1 <= failed <= 3, "the network is still busy with what was given up"
        assert peer.role.sync.retrievals >= 8
    lost = [entry for entry in made.log if "is lost" in entry.what]
    assert not lost, "a peer that is slow is not gone"


@pytest.mark.parametrize("blocking", some([False, True], False))
@pytest.mark.parametrize("serve_share", [0.03, 1.0])
def test_serving_is_limited_to_its_share_of_training_time(serve_share: float, blocking: bool):
    """Steps of 1 ms with a pull after each: models are served every 0.8 ms / 0.03, and a peer that pulls more often
    waits.

    Blocking mode has no limit, as training waits for its own pulls anyway.
    """
    limited, seconds = serve_share < 1 and not blocking, 1000 * 0.001
    settings = {"blocking": blocking, "serve_share": serve_share, "finish": "none"}
    made = world(2, policy="tau:1", iterations=1000, compute=0.001, **settings)
    ended(made, bound(2, 1000, 0.001))
    given = max(peer.role.sync.retrievals for peer in made.peers.values())
    most = (SAVED + seconds) * 0.03 / SECONDS_PER_MODEL
    assert 0.9 * most < given <= most + 1 if limited else given > 5 * most


@pytest.mark.fault(9)
def test_a_requester_that_does_not_read_loses_its_slot():
    """The requester claims to wait for a week and reads nothing; its slot is free again after peer_timeout."""
    made = until(world(3, policy="never", iterations=60, max_served=1), 0, "step 5")
    made.network.cut([0], [1], made.now, one_way=True)
    asked = made.now
    week = PullRequest(5, 7 * 86_400.0)
    made.peers[1].endpoint.request(0, week, 0, None, asked + week.patience, lambda reply, content: None)
    serving = made.peers[0].role.serving
    made.run(asked + 0.9 * TIMEOUT)
    assert list(serving._served.values()) == [1] and snapshots(made, 0) == 2
    made.run(asked + 1.1 * TIMEOUT)
    assert made.fired["cut"] > 0 and not serving._served and snapshots(made, 0) == 1


def test_what_a_request_has_carried_is_not_kept_until_its_deadline():
    """A run with a long ``peer_timeout`` would keep all that it has ever sent."""
    made = until(world(2, policy="never", iterations=60), 0, "step 5")
    carried, replies = memoryview(bytearray(8)), list[object]()
    kept = weakref.ref(carried)
    endpoint, pull = made.peers[1].endpoint, PullRequest(5, 30.0)
    endpoint.request(0, pull, 8, carried, made.now + 1e6, lambda reply, content: replies.append(reply))
    del carried
    made.run(made.now + 1.0)
    assert replies and kept() is None


LARGE = {"model_timeout": 40 * TIMEOUT, "iterations": 120, "finish": "none", "blocking": True}
"""Options of a large model, whose first deadline allows for a slow network."""


@pytest.mark.parametrize("mode", ["pull", "push", "pushpull"])
@pytest.mark.fault(3)
def test_a_silent_partner_is_waited_for_as_long_as_the_last_models_took(mode: str):
    """Once transfers were measured, the model's size no longer sets the deadline: at most peer_timeout is lost."""
    began = {"pull": "pulls 1", "push": "pushes to 1", "pushpull": "asks 1"}[mode]
    made = until(world(2, slow={1: 1.001}, starters=[0], policy="tau:5", mode=mode, **LARGE), 0, "step 23")
    assert len(made.lines(0, began)) == 4
    peer, other = made.peers[0], made.peers[1]
    blocked = peer.blocked_seconds
    made.run(200.0, until=lambda: len(made.lines(0, began)) == 5)
    made.network.cut([1], [0], made.now + 0.0015, made.now + 300.0, one_way=True)  # let its first reply through
    at = made.now
    made.run(at + 40.0)
    assert made.fired["cut"] > 0 and other.down_since is None
    assert peer.role.sync.failed >= 1
    assert peer.arena.step > 25, "it has waited, and continues"
    assert peer.blocked_seconds - blocked < 1.1 * TIMEOUT * peer.role.sync.failed


def test_a_silent_partner_of_a_wave_is_waited_for_peer_timeout_where_models_are_fast():
    made = world(4, policy="tau:10", exchange="waves", **LARGE)
    made.pause(1, 15.5, 400.0)
    made.run(60.0)
    assert made.fired["pause"] == 1
    for rank in (0, 2, 3):
        peer = made.peers[rank]
        assert peer.role.waves.lost >= 1 and peer.arena.step >= 30
        assert peer.blocked_seconds < 1.6 * TIMEOUT, "its code, and half of that for the mean that it owns"
