"""Schedules, edge weights and directed graphs in whole runs, in virtual time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from toy import Point, before, bound, ended, models, spread, world
from transcripts import LoggedWorld

from gossipx.sim import Network
from gossipx.topology import Topology, topology_from

STILL: dict[str, Any] = {
    "policy": "tau:1",
    "blocking": True,
    "init": "own",
    "finish": "none",
    "gradient_step": lambda peer: None,
}
"""Options without training, so that only exchanges change models; all peers pull in the same moments."""


def began(size: int) -> torch.Tensor:
    return torch.stack([Point(rank).x.detach().double() for rank in range(size)])


def ran(size: int, rounds: int, **options: Any) -> LoggedWorld:
    return ended(world(size, iterations=rounds, **{**STILL, **options}), bound(size, rounds, waits=rounds))


def asked(made: LoggedWorld, rank: int) -> list[int]:
    """Return the ranks that it pulled from, in order."""
    return [int(line.split()[1]) for line in made.lines(rank, "pulls")]


@pytest.mark.parametrize(("graph", "size", "rounds"), [("exponential", 8, 3), ("hypercube", 8, 3), ("full", 2, 1)])
def test_one_peer_rounds_average_exactly(graph: str, size: int, rounds: int) -> None:
    """Ying et al. 2021, Lemma 1: for a power of two, log2 n rounds leave all models equal to the mean of all."""
    made = ran(size, rounds, graph=graph, schedule="one-peer")
    torch.testing.assert_close(models(made), began(size).mean(0).expand(size, -1), rtol=1e-5, atol=1e-6)
    assert spread(models(ran(size, rounds, graph=graph, schedule="random"))) > 1e-2 or size == 2


def test_static_pulls_in_turn() -> None:
    made = ran(4, 5, schedule="static")
    assert asked(made, 0) == [1, 2, 3, 1, 2] and asked(made, 2) == [3, 0, 1, 3, 0]


def test_a_peer_without_a_partner_rests_for_that_round_alone() -> None:
    """In a star of three, each leaf has its turn every other round; a round without a partner counts."""
    made = ran(3, 6, graph="star", schedule="one-peer")
    assert [asked(made, rank)[:5] for rank in range(3)] == [[1, 2, 1, 2, 1], [0, 0, 0], [0, 0, 0]]
    assert [made.peers[rank].role.sync.skipped for rank in (1, 2)] == [3, 3]


@pytest.mark.parametrize("schedule", ["static", "one-peer", "inner-outer", "bandwidth-aware"])
def test_a_crashed_peer_is_skipped(schedule: str) -> None:
    made = world(4, schedule=schedule, policy="tau:2")
    made.crash(3, 4.5)
    ended(made, bound(4, waits=1))
    assert made.fired["crash"] == 1
    left = [0, 1, 2]
    for rank in left:
        assert made.peers[rank].role.sync.retrievals >= 8, "nearly all ten of its pulls"
    torch.testing.assert_close(models(made, left), before(made, left).mean(0).expand(3, -1), rtol=1e-5, atol=1e-6)


def test_inner_outer_stays_inside_mostly() -> None:
    made = ran(8, 60, graph="hierarchical:sites=2", schedule="inner-outer:outer=0.1")
    outside = [(rank < 4) != (other < 4) for rank in range(8) for other in asked(made, rank)]
    assert len(outside) == 480 and 0.05 < sum(outside) / 480 < 0.15
    assert spread(models(made)) < 1e-2 * spread(began(8)), "and still all agree"


def one_slow(outgoing: bool) -> Network:
    """Return a network in which what rank 3 sends, or else what it receives, takes ten times as long."""
    fast, slow = 6400.0, 640.0
    return Network(fast, delay=0.01, links={3: (slow, fast) if outgoing else (fast, slow)})


@pytest.mark.parametrize(("mode", "begins"), [("pull", "pulls"), ("push", "pushes to"), ("pushpull", "asks")])
def test_bandwidth_aware_exchanges_with_the_fast_ones(mode: str, begins: str) -> None:
    """Pushes are measured towards the partner, pulls and pairs by the model that arrives."""

    def to_slow(schedule: str) -> float:
        """Return the share of exchanges with the slow one, a third by chance."""
        network = one_slow(outgoing=mode != "push")
        made = ran(4, 300, schedule=schedule, network=network, mode=mode, policy="random:p=0.2")
        said = [line.removeprefix(begins).split()[0] for rank in range(3) for line in made.lines(rank, begins)]
        chosen = Counter(said)
        return chosen["3"] / chosen.total()

    assert to_slow("bandwidth-aware") < 0.6 * to_slow("random")


def test_metropolis_weights_keep_the_mean_where_uniform_ones_lose_it() -> None:
    """On a star, uniform weights give the hub half of the total. Averaged over runs: the mean holds in expectation."""

    def away(weights: str) -> float:
        offsets = []
        for shift in range(8):
            options = {"graph": "star", "weights": weights, "draws": 100 * shift}
            offsets.append(models(ran(5, 30, **options)).mean(0) - began(5).mean(0))
        return float(torch.stack(offsets).mean(0).norm())

    hub = float((began(5)[0] - began(5).mean(0)).norm())
    uniform, metropolis = away("uniform"), away("metropolis")
    # They agree on 4/8 of the hub's model and 1/8 of each leaf's: off the mean by 3/8 of (hub − mean of all).
    assert uniform == pytest.approx(0.375 * hub, rel=0.25)
    assert metropolis < uniform / 3


def test_pulls_follow_the_edges_of_a_directed_graph() -> None:
    graph = topology_from("kautz-12")
    made = ended(world(12, graph="kautz-12", policy="tau:1"), bound(12))
    assert graph.directed
    for rank in range(12):
        assert set(asked(made, rank)) == set(graph.neighbours[rank])
    torch.testing.assert_close(models(made), before(made).mean(0).expand(12, -1), rtol=1e-5, atol=1e-6)


def test_an_edges_weight_is_a_factor_on_the_share() -> None:
    """slow-link-6: over the link between the two racks, half of β = ½ is mixed."""
    made = ran(6, 1, graph="slow-link-6", schedule="static", weights="uniform")
    start = began(6)
    assert asked(made, 2) == [3] and asked(made, 0) == [1]
    torch.testing.assert_close(models(made, [2])[0], 0.75 * start[2] + 0.25 * start[3], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(models(made, [0])[0], 0.5 * start[0] + 0.5 * start[1], rtol=1e-5, atol=1e-6)


def test_an_edges_weight_is_a_factor_on_the_share_of_a_push() -> None:
    ring = Topology("own", ((1,), (2,), (0,)), edge_shares={(0, 1): 0.5, (2, 0): 0.2})
    made = ran(3, 1, graph=ring, mode="push")
    start = began(3)
    for sender, receiver, share in ((0, 1, 0.25), (1, 2, 0.5), (2, 0, 0.1)):
        mixed = (1 - share) * start[receiver] + share * start[sender]
        torch.testing.assert_close(models(made, [receiver])[0], mixed, rtol=1e-5, atol=1e-6)
