"""A hub in virtual time: its end, its loss, its return."""

from __future__ import annotations

import pytest
import torch
import toy
from seeds import seeds
from transcripts import centre_of

from gossipx.protocol.messages import Stage
from gossipx.settings.modes import Elastic
from gossipx.sim import Network

HUB = 0


def settings(lost: str = "gossip", trains: bool = True) -> Elastic:
    return Elastic(hub=str(HUB), alpha=0.25, hub_only=not trains, hub_lost=lost)  # type: ignore[arg-type]


@pytest.mark.parametrize("trains", [True, False])
def test_all_end_with_the_centre(trains: bool) -> None:
    made = toy.world(4, 0, Network(delay=0.1), {2: 1.5}, hub=settings(trains=trains), policy="tau:3")
    toy.ended(made, toy.bound(4, compute=1.5))
    centre = centre_of(made.peers[HUB])
    for peer in made.peers.values():
        torch.testing.assert_close(peer.weights(), centre, rtol=0, atol=0)
        assert peer.role.members.without_figures() == []
    assert made.peers[HUB].arena.step >= toy.ITERATIONS - (0 if trains else 3), "it counts as what it has taken in"
    assert all(made.peers[rank].arena.step == toy.ITERATIONS for rank in (1, 2, 3))


def test_the_hub_stays_until_the_slowest_worker_ends() -> None:
    """However long that takes, far beyond peer_timeout."""
    slow = 3 * toy.TIMEOUT / toy.ITERATIONS + 1
    made = toy.world(3, 0, Network(delay=0.1), {2: slow}, hub=settings(trains=False), policy="tau:2")
    toy.ended(made, toy.bound(3, compute=slow))
    assert len(made.lines(2, f"mixes {HUB}")) >= toy.ITERATIONS // 2 - 1
    assert not made.lines(2, "peer 0 is lost")


def test_a_worker_that_dies_without_a_word_is_not_waited_for_beyond_peer_timeout() -> None:
    made = toy.world(3, 0, Network(delay=0.1), hub=settings(trains=False), policy="tau:2")
    made.crash(2, 5.0)
    toy.ended(made, toy.ITERATIONS + 4 * toy.TIMEOUT)
    assert made.fired["crash"] == 1
    torch.testing.assert_close(made.peers[1].weights(), centre_of(made.peers[HUB]), rtol=0, atol=0)


@pytest.mark.parametrize(("lost", "blocking"), [("gossip", False), ("gossip", True), ("wait", True)])
@pytest.mark.fault(38)
def test_the_hub_dies_and_nothing_blocks(lost: str, blocking: bool) -> None:
    made = toy.world(4, 0, Network(delay=0.1), hub=settings(lost), policy="tau:2", blocking=blocking)
    made.crash(HUB, 6.5)
    toy.ended(made, toy.bound(4, waits=4))
    assert made.fired["crash"] == 1
    workers = (1, 2, 3)
    assert all(made.peers[rank].arena.step == toy.ITERATIONS for rank in workers)
    others = {rank: [line for line in made.lines(rank, "pulls") if line != "pulls 0"] for rank in workers}
    assert all(bool(pulls) == (lost == "gossip") for pulls in others.values())
    rows = toy.models(made, workers)
    assert toy.spread(rows) < 1e-6, "without a hub, they end with the mean of all"


@pytest.mark.fault(38)
def test_a_worker_moves_by_the_difference_that_a_hub_lost_since_has_moved_by() -> None:
    """With blocking the worker moves only at its next step, and needs the hub no more for that."""
    made = toy.world(2, 0, Network(delay=0.1), hub=settings("wait", trains=False), policy="tau:6", blocking=True)
    toy.until(made, HUB, "takes in 1")
    made.crash(HUB, made.now + 0.5)
    toy.ended(made, toy.bound(2, waits=4))
    mixed = [entry.time for entry in made.log if entry.rank == 1 and entry.what == f"mixes {HUB}"]
    assert made.fired["crash"] == 1 and len(mixed) == 1
    lost = next(entry.time for entry in made.log if entry.rank == HUB and entry.what == "crashes")
    assert mixed[0] > lost


@pytest.mark.parametrize("after", [0.1, 5.0, 8.2])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.fault(38)
def test_the_hub_dies_after_some_workers_have_ended(trains: bool, after: float) -> None:
    """They know that it was alive, and notice its loss only when they request its centre."""
    made = toy.world(4, 0, Network(delay=0.1), {3: 1.4}, hub=settings("wait", trains), policy="tau:2")
    made.crash(HUB, toy.ITERATIONS + after)
    toy.ended(made, toy.bound(4, compute=1.4, waits=4))
    assert made.fired["crash"] == 1
    assert toy.spread(toy.models(made, (1, 2, 3))) < 1e-6, "without a centre, they end with the mean of all"


@pytest.mark.fault(38)
def test_the_hub_dies_and_they_stop() -> None:
    made = toy.world(3, 0, Network(delay=0.1), hub=settings("stop"), policy="tau:2")
    made.crash(HUB, 6.5)
    toy.ended(made, toy.bound(3, waits=4))
    for rank in (1, 2):
        assert made.peers[rank].reason == "the hub, peer 0, is gone, and --hub-lost is stop"
        assert made.peers[rank].arena.step < toy.ITERATIONS


@pytest.mark.parametrize("lost", ["gossip", "wait"])
@pytest.mark.fault(36, 38)
def test_workers_return_to_a_restarted_hub(lost: str) -> None:
    made = toy.world(4, 0, Network(delay=0.1), hub=settings(lost), policy="tau:2", iterations=60)
    made.crash(HUB, 6.5)
    made.restart(HUB, 20.0)
    toy.ended(made, toy.bound(4, 60, waits=6))
    assert made.fired["restart"] == 1
    for rank in (1, 2, 3):
        back = [entry for entry in made.log if entry.rank == rank and entry.what == f"mixes {HUB}" and entry.time > 20]
        assert back, f"peer {rank} never came back"
    centre = centre_of(made.peers[HUB])
    assert all(torch.equal(peer.weights(), centre) for peer in made.peers.values())


def test_a_hub_asked_to_leave_exits_at_once() -> None:
    made = toy.world(3, 0, Network(delay=0.1), hub=settings(), policy="tau:2")
    made.leave(HUB, 6.5)
    toy.ended(made, toy.bound(3))
    assert all(made.lines(rank, "pulls") for rank in (1, 2))


@pytest.mark.fault(37)
def test_a_late_peer_starts_with_the_centre_of_a_hub_that_does_not_train() -> None:
    made = toy.world(3, 0, Network(delay=0.1), hub=settings(trains=False), policy="tau:2", absent=[2], iterations=60)
    made.start(2, toy.maker(2, 3, hub=settings(trains=False), policy="tau:2", iterations=60), at=30.0)
    toy.until(made, 2, "is TRAIN")
    assert made.lines(HUB, "adopts the model of 0")
    assert not torch.equal(made.peers[2].weights(), toy.Point(HUB).x.detach().double())
    assert made.peers[2].arena.step >= 18, "it counts on from where the others are"
    toy.ended(made, 300)


@pytest.mark.parametrize("sender", [HUB, 1], ids=["the centre", "a model"])
@pytest.mark.fault(22)
def test_what_holds_nan_on_its_way_is_not_mixed(sender: int) -> None:
    made = toy.world(3, 0, Network(delay=0.1), hub=settings(trains=False), policy="tau:2")
    made.poison(sender, 5.0, 12.0)
    toy.ended(made, toy.bound(3, waits=2))
    assert made.fired["poison"] >= 1
    for rank in (HUB,) if sender else (1, 2):
        assert made.lines(rank, f"refuses the model of {sender}") and made.peers[rank].role.counts["poisoned"] >= 1
    assert bool(centre_of(made.peers[HUB]).isfinite().all()) and bool(toy.models(made, [1, 2]).isfinite().all())


@pytest.mark.parametrize("seed", seeds(5))
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.fault(26)
def test_a_bad_network_stops_nobody(seed: int, blocking: bool) -> None:
    network = Network(delay=0.3, loss=0.1, repeat=0.2)
    made = toy.world(
        4, seed, network, {1: 0.7}, hub=settings(), policy="random:p=0.5", iterations=40, blocking=blocking
    )
    toy.ended(made, toy.bound(4, 40, waits=20))
    assert made.fired["lost"] and made.fired["repeated"]
    for peer in made.peers.values():
        assert peer.role.stage is Stage.DONE
        assert peer.arena.step == 40
