"""Flow control in whole runs: who is turned away asks elsewhere, a slow network is waited for as long as it takes."""

from __future__ import annotations

import pytest
from toy import SIZE, bound, ended, world

from gossipx.peer.serving import GIVING, SAVED
from gossipx.sim import Network


def snapshots(made, rank: int) -> int:
    """Versions of its model that a peer keeps, the last boundary's among them."""
    return 1 + len({id(held.base) for held in made.peers[rank]._held.values()})


@pytest.mark.parametrize("max_served", [1, 3])
def test_the_centre_of_a_star_serves_so_many_at_once_and_keeps_one_older_version(max_served: int):
    """Every model takes longer than two iterations; seven peers have nobody else to ask."""
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
    assert made.peers[0].role.serving.turned_away > 20
    leaves = [made.peers[rank].role.sync for rank in range(1, 8)]
    assert all(sync.retrievals > 0 for sync in leaves), "nobody is always turned away"
    assert all(sync.failed == 0 for sync in leaves)
    assert all(sync.skipped > 0 for sync in leaves)


def test_who_finds_one_busy_asks_another_at_once():
    """Of three, 1 and 2 turn to 0 in the same moment by the schedule: one of them goes on to the other."""
    network = Network(bandwidth=4 * SIZE / 0.5)
    made = world(3, network=network, policy="tau:3", iterations=60, max_served=1, blocking=True)
    ended(made, bound(3, 60, 2.0))
    asked = [peer.role.serving.turned_away for peer in made.peers.values()]
    assert sum(asked) > 5
    for peer in made.peers.values():
        assert (peer.role.sync.retrievals, peer.role.sync.skipped) == (20, 0), "who waits asks until there is one"


def test_a_model_that_takes_longer_than_peer_timeout_is_waited_for_once_that_is_learnt():
    """25 s a model where 10 s are expected: the first pulls are given up and each waits longer, until one comes."""
    network = Network(bandwidth=4 * SIZE / 25)
    made = world(2, network=network, policy="tau:1", iterations=400, finish="none", init="own")
    ended(made, bound(2, 400, waits=4))
    for peer in made.peers.values():
        assert 1 <= peer.role.sync.failed <= 3, "the network is still busy with what was given up"
        assert peer.role.sync.retrievals >= 8
    lost = [entry for entry in made.log if "is lost" in entry.what]
    assert not lost, "a peer that is slow is not gone"


def test_where_the_size_of_the_model_says_so_it_is_waited_for_from_the_start():
    network = Network(bandwidth=4 * SIZE / 25)
    made = world(2, network=network, policy="tau:1", iterations=200, finish="none", init="own", model_timeout=60.0)
    ended(made, bound(2, 200, waits=4))
    assert [peer.role.sync.failed for peer in made.peers.values()] == [0, 0]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("serve_share", [0.03, 1.0])
def test_answers_take_their_share_of_training_and_no_more(serve_share: float, blocking: bool):
    """Steps of 1 ms, a pull after each: models follow one another by 0.8 ms / 0.03, whoever asks more often waits.

    Not where training waits for its own pulls: it has nothing to lose.
    """
    limited, seconds = serve_share < 1 and not blocking, 2000 * 0.001
    settings = {"blocking": blocking, "serve_share": serve_share, "finish": "none"}
    made = world(2, policy="tau:1", iterations=2000, compute=0.001, **settings)
    ended(made, bound(2, 2000, 0.001))
    given = max(peer.role.sync.retrievals for peer in made.peers.values())
    most = (SAVED + seconds) * 0.03 / GIVING
    assert 0.9 * most < given <= most + 1 if limited else given > 5 * most
