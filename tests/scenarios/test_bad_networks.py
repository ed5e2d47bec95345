"""Partitions, lost messages, stragglers, pauses, NaN models. Numbers in brackets are rows of the fault list."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modes import agree
from property_tests import examples
from seeds import some
from toy import ITERATIONS, SIZE, TIMEOUT, alone, before, bound, ended, maker, models, sgd, until, within, world
from transcripts import LoggedWorld, trained_bytes

from gossipx.peer.agreement import COMPARISONS
from gossipx.settings.modes import Elastic
from gossipx.sim import Network, SimPeer


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.fault(6)
def test_one_way_partition(blocking: bool):
    """Nothing passes from 0 to 1 for a while: both keep training and exchanging with the others."""
    made = world(4, policy="tau:2", iterations=50, blocking=blocking, peer_timeout=3.0)
    made.network.cut([0], [1], 5.0, 15.0, one_way=True)
    ended(made, bound(4, 50, waits=6))
    assert made.fired["cut"] > 0
    assert made.peers[2].role.sync.failed == made.peers[3].role.sync.failed == 0
    for rank in made.peers:
        assert {r.sender for r in made.retrievals(rank) if r.time > 18} == {0, 1, 2, 3} - {rank}, "nobody is buried"
    if blocking:  # 0 and 1 arrive after the others' timeout
        assert within(models(made), before(made))
    else:
        agree(made, [0, 1, 2, 3])


@pytest.mark.parametrize("blocking", [False, True])
def test_straggler_in_time(blocking: bool):
    """Three times slower: the others train at their own pace and wait for it only at the finish."""
    made = world(4, slow={3: 3.0}, iterations=20, peer_timeout=50.0, blocking=blocking)
    ended(made, 20 * 3.0 + 50.0)
    fast, straggler = [made.peers[rank] for rank in (0, 1, 2)], made.peers[3]
    for peer in fast:
        trained = next(entry.time for entry in made.log if entry.rank == peer.rank and entry.what == "step 20")
        assert trained < 21
        assert peer.blocked_seconds < 0.1 if blocking else peer.blocked_seconds == 0
    assert straggler.role.sync.retrievals >= 3
    stale = [retrieval.staleness for peer in fast for retrieval in made.retrievals(peer.rank) if retrieval.sender == 3]
    assert stale and max(stale) > 5
    agree(made, [0, 1, 2, 3])
    assert made.now < 61


def test_straggler_counts_less_when_mixing_by_age():
    made = world(2, slow={1: 4.0}, policy="tau:8", mix="aged:half_life=1", iterations=17, peer_timeout=60.0)
    ended(made, 200.0)
    peer = made.peers[0]
    assert [retrieval.staleness for retrieval in made.retrievals(peer.rank)] == [8 - 1, 16 - 3]
    plain = world(2, slow={1: 4.0}, policy="tau:8", iterations=17, peer_timeout=60.0)
    ended(plain, 200.0)
    own = alone(0, 17)
    moved = (made.before_finish[0] - own).norm()
    assert 0 < moved < 0.1 * (plain.before_finish[0] - own).norm()


@pytest.mark.parametrize("pace", [1.501, 1.52, 1.53, 1.55])
def test_straggler_that_arrives_as_the_others_time_out(pace: float):
    """The others time out at 30.0, 30.4 and 30.8 s; a peer that is still waiting follows those that are not."""
    slow = {1: 1.02, 2: 1.04, 3: pace}
    made = ended(world(4, slow=slow, policy="never", finish_timeout=TIMEOUT), bound(4))
    agree(made, [0, 1, 2])


@pytest.mark.parametrize("size", some([20, 40, 100], 20))
def test_many_peers_on_a_ring_of_bad_links(size: int):
    made = world(size, 1, Network(loss=0.01), graph="ring", policy="tau:2", iterations=6, peer_timeout=3.0)
    ended(made, bound(size, 6))
    assert made.fired["lost"] > 0
    assert sum(peer.role.sync.retrievals for peer in made.peers.values()) > 1.5 * size
    assert within(models(made), before(made))


@pytest.mark.fault(22)
def test_initial_model_with_nan_is_not_adopted():
    """Another peer's model is adopted instead."""
    made = world(3, absent=[2], policy="tau:2", iterations=30)
    made.poison(0, 0.5, 14.0)
    made.start(2, maker(2, 3, policy="tau:2", iterations=30), at=12.0)
    ended(made, bound(3, 30, waits=1))
    assert made.lines(2, "refuses the model of 0") and made.lines(2, "adopts the model of 1")
    assert models(made).isfinite().all()
    agree(made, [0, 1, 2])


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.fault(22)
def test_models_with_nan_in_the_finish(size: int):
    """A round with that peer changes nothing, and all others end with finite averages."""
    made = world(size, policy="never", iterations=5)
    made.poison(1, 4.0)
    ended(made, bound(size, 5))
    assert made.fired["poison"] > 0
    assert sum(peer.role.counts["poisoned"] for peer in made.peers.values()) == made.fired["poison"]
    assert within(models(made), before(made))


@pytest.mark.parametrize(("size", "graph"), [(2, "full"), (5, "ring"), (6, "full")])
@pytest.mark.fault(27)
def test_mutual_blocking_pulls(size: int, graph: str):
    """A pulls from B while B pulls from A, and longer cycles: a blocked peer still serves others."""
    network = Network(bandwidth=4 * SIZE * 10)  # a model takes 0.1 s
    made = world(size, network=network, graph=graph, policy="tau:1", blocking=True)
    ended(made, bound(size, waits=2))
    for peer in made.peers.values():
        assert peer.role.sync.retrievals == ITERATIONS and peer.role.sync.failed == 0
        assert peer.blocked_seconds >= ITERATIONS * 0.1
    agree(made, list(range(size)))


def test_a_pull_still_under_way_as_training_ends_is_cancelled():
    """It would compete with the finish for bandwidth. It counts as a failure of no peer."""
    network = Network(bandwidth=4 * SIZE / 4.5)
    made = ended(world(2, network=network, policy="tau:8", iterations=10, peer_timeout=30.0), bound(2, 10, waits=30))
    for rank, peer in made.peers.items():
        assert made.lines(rank, "pulls") and made.lines(rank, f"has no answer of {1 - rank}: CANCELLED")
        assert not made.lines(rank, "a request to peer") and peer.role.sync.failed == 0
        assert peer.role.sync.retrievals == 0 and trained_bytes(peer) == 0
    agree(made, [0, 1])


@pytest.mark.fault(8)
def test_too_slow_a_transfer_ends_at_its_deadline():
    """The deadline covers the whole transfer. Weights are as if nothing had been requested."""
    made = until(world(2, policy="tau:8", init="own"), 0, "pulls 1")
    made.network.bandwidth = SIZE * 4 / (2 * TIMEOUT)
    made.run(made.now + TIMEOUT + 1)
    assert made.lines(0, "has no answer of 1: TIMEOUT")
    assert torch.equal(made.peers[0].weights(), alone(0, made.peers[0].arena.step))
    ended(made, bound(2, waits=COMPARISONS))
    for peer in made.peers.values():
        assert peer.role.sync.retrievals == 0 and trained_bytes(peer) == 0


@pytest.mark.fault(22)
def test_peer_whose_model_is_finite_again_takes_part_again():
    """A peer that restores a checkpoint takes part again."""
    kept: dict[str, torch.Tensor] = {}

    def goes_back(peer: SimPeer) -> None:
        x = next(peer.module.parameters()).data
        if peer.rank == 1 and peer.arena.step == 7:
            kept["x"] = x.clone()
            x[3] = math.nan
        elif peer.rank == 1 and peer.arena.step == 12:
            x.copy_(kept["x"])
        sgd(peer.module)

    made = ended(world(3, policy="tau:2", iterations=30, gradient_step=goes_back), bound(3, 30))
    assert made.lines(1, "own model holds NaN")
    assert any(entry.what == "mixes 1" and entry.time > 15 for entry in made.log)
    assert made.lines(1, "mixes")[-1] and made.peers[1].role.sync.retrievals > 5
    agree(made, [0, 1, 2])


# --- outliers: counted and named, and nothing is told of a healthy run ----------------------------


EXCHANGES: list[dict[str, Any]] = [
    {},
    {"blocking": True},
    {"mode": "push"},
    {"mode": "push", "weights": "push-sum"},
    {"mode": "pushpull"},
    {"hub": Elastic(hub="0", alpha=0.2)},
    {"codec": "int8"},
    {"codec": "3lc:sparsity=1.5"},
    {"codec": "topk:ratio=0.2"},
    {"codec": "int8", "mode": "pushpull"},
    {"fragments": 4},
]
WAVES = [{"exchange": "waves"}, {"codec": "int8", "exchange": "waves"}]  # which bring no other peer's model
LENGTH = 40


def counts(made: LoggedWorld) -> list[int]:
    return [made.peers[rank].role.counts["outliers"] for rank in sorted(made.peers)]


@pytest.mark.fault(82)
@pytest.mark.parametrize("exchange", some(EXCHANGES, *EXCHANGES[:5:2]), ids=str)
def test_a_model_that_is_suddenly_far_away_is_counted_and_told_once(exchange: dict[str, Any]) -> None:
    """The weights of peer 1 are multiplied by a million at its 25th step."""

    def step(peer: SimPeer) -> None:
        sgd(peer.module)
        if peer.rank == 1 and peer.arena.step == 25:
            peer.module.x.data.mul_(1e6)

    options = {"policy": "tau:3", "iterations": LENGTH, "gradient_step": step, **exchange}
    made = ended(world(4, **options), bound(4, LENGTH, waits=10))
    assert sum(counts(made)) >= 1 and max(counts(made)) == 1 and counts(made)[1] == 0
    told = [made.lines(rank, "the model of peer ") for rank in range(4)]
    assert [len(lines) for lines in told] == counts(made)
    first = next(entry.what for entry in made.log if "times as far from ours" in entry.what)
    assert first.startswith("the model of peer 1 is") or "hub" in exchange, "of a hub it is the centre that has moved"


RATES = st.sampled_from([(0.05, 0.05), (0.001, 0.3), (0.3, 0.001), (1e-6, 0.5)])


@pytest.mark.fault(82)
@examples(300, few=25)
@given(
    seed=st.integers(0, 100),
    size=st.integers(2, 6),
    period=st.integers(1, 6),
    rates=RATES,
    warm=st.booleans(),
    paces=st.lists(st.sampled_from([1.0, 1.3, 5.0]), min_size=6, max_size=6),
    init=st.sampled_from(["first", "own"]),
    exchange=st.sampled_from([*EXCHANGES, *WAVES]),
)
def test_nothing_is_told_of_a_healthy_run(seed, size, period, rates, warm, paces, init, exchange):
    """Learning rates that start again or fall, warm-up, first retrievals, codecs, and peers five times as slow."""

    def step(peer: SimPeer) -> None:
        done = peer.arena.step
        sgd(peer.module, rates[done > LENGTH // 2] * (min(1.0, math.exp(done - 10)) if warm else 1.0))

    options = {"policy": f"tau:{period}", "iterations": LENGTH, "gradient_step": step, **exchange}
    options |= {} if "codec" in exchange else {"init": init}
    made = world(size, seed, slow=dict(enumerate(paces)), draws=seed, **options)
    ended(made, bound(size, LENGTH, 5.0, waits=200))
    assert counts(made) == [0] * size
