"""Outliers: a model that is suddenly far from all others is counted and named; nothing is told of a healthy run."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from seeds import some
from toy import bound, ended, sgd, world
from transcripts import LoggedWorld

from gossipx.settings.modes import Elastic
from gossipx.sim import SimPeer

EXCHANGES: list[dict[str, Any]] = [
    {},
    {"blocking": True},
    {"exchange": "waves"},
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
CODED_WAVES = {"codec": "int8", "exchange": "waves"}  # whose distances are not known
LENGTH = 40


def counts(made: LoggedWorld) -> list[int]:
    return [made.peers[rank].role.counts["outliers"] for rank in sorted(made.peers)]


@pytest.mark.fault(82)
@pytest.mark.parametrize("exchange", some(EXCHANGES, *EXCHANGES[:6:2]), ids=str)
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
    exchange=st.sampled_from([*EXCHANGES, CODED_WAVES]),
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
