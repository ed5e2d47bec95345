"""A clock under change: workers that join and leave, switches of the sync model, checkpoints."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from shards import Run

from gossipx.errors import UsageError
from gossipx.server.conditions import Apply, Conditions, Pull, SyncModel, View
from gossipx.server.shard_clock import DelayedPulls, Release, ShardClock, Tick
from gossipx.server.sync_models import BSP, DSPS, SSP, sync_model_from

# --- membership --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["bsp", "asp", "drop:2", "hybrid:step=2"])
def test_without_workers_the_clock_does_not_tick(spec: str):
    run = Run(spec, range(2))
    run.iterate(0)
    run.lose(0)
    run.lose(1)
    assert run.clock.clock == 0 and run.clock.holding_up == [] and run.clock.waiting == []
    assert run.clock.view() == View(0, 0, 0, -1, -1, 0, 1)
    run.switch("asp")
    assert len(run.applied) == 1 and run.clock.clock == 0, "a lost worker's push is not lost"
    run.join(5)
    run.iterate(5)
    assert run.clock.clock == 1


def test_a_condition_that_is_always_true_stops_at_the_fastest_worker():
    clock = ShardClock(Conditions(pull=lambda seen, pull: True, push=lambda seen: True), workers=range(3))
    assert clock.pushed(1, 4) == [Tick(tick) for tick in range(1, 6)]
    assert clock.pushed(0, 1) == [] and clock.lost(1) == [] and clock.clock == 5


def test_a_new_worker_starts_at_the_clock():
    run = Run("bsp", range(2))
    for _ in range(3):
        run.iterate(0)
        run.iterate(1)
    run.iterate(0)
    run.join(9)
    assert run.clock.progress == {0: 3, 1: 2, 9: 2}
    assert run.clock.pull(9, 2, "its first") == [Release("its first")]
    run.iterate(1)
    assert run.clock.clock == 3 and run.clock.holding_up == [9], "the clock waits for it from now on"
    run.iterate(9)
    assert run.clock.clock == 4


def test_conditions_are_checked_when_a_worker_joins():
    at_least_two = Conditions(pull=lambda seen, pull: seen.workers >= 2, push=lambda seen: seen.workers >= 2)
    clock = ShardClock(at_least_two, pulls="soft", workers=[0])
    assert clock.pushed(0, 0) == [] and clock.pull(0, 0, "pull") == []
    assert clock.joined(1) == [Tick(1), Release("pull")]


def test_a_lost_worker_is_not_waited_for():
    run = Run("ssp:1", range(3))
    for rank in (0, 0, 1, 1):
        run.iterate(rank)
    assert run.clock.holding_up == [2] and run.able == [2]
    run.lose(2)
    assert run.events[-4:] == ["tick 1", "tick 2", "answer 0 1", "answer 1 1"]


def test_a_lost_workers_push_counts_for_no_other():
    run = Run("drop:2", range(4))
    run.iterate(0)
    run.lose(0)
    run.iterate(1)
    assert run.clock.clock == 0 and run.clock.view().pushed == 1
    run.iterate(2)
    assert run.clock.clock == 1

    run = Run("hybrid:fixed=2", range(4))
    run.iterate(0)
    run.lose(0)
    run.iterate(1)
    assert run.steps == [] and run.clock.buffered == 2 and run.clock.view().buffered == 1
    run.iterate(2)
    assert run.steps[0][0] == 1 / 3

    run.iterate(3)
    run.lose(3)
    run.join(3)
    assert run.clock.pull(3, 0, "first") == [Release("first")], "nor for a new worker with its rank"


def test_a_loss_that_is_reported_twice_changes_nothing():
    clock = ShardClock(BSP(), workers=[0])
    assert clock.lost(1) == [] and clock.lost(0) == [] and clock.lost(0) == []


def test_workers_that_hold_up_the_clock_slowest_first():
    clock = ShardClock(sync_model_from("drop:2"), workers=range(4))
    for worker, progress in ((0, 4), (1, 4), (2, 1)):
        clock.pushed(worker, progress)
    assert clock.clock == 5 and clock.holding_up == [3, 2, 0, 1]
    clock.pushed(1, 5)
    assert clock.holding_up == [3, 2, 0]


# --- switches -----------------------------------------------------------------------------------------


def test_a_switch_answers_by_the_new_condition_under_lazy_execution():
    run = Run("bsp", range(3))
    for rank in (0, 1, 2, 0, 0, 1):
        if rank in run.able:
            run.iterate(rank)
    assert run.clock.waiting == [(0, 1), (1, 1)]
    run.switch("ssp:1")
    assert run.clock.waiting == [] and run.clock.pulls is DelayedPulls.LAZY
    assert [len(messages) for _, messages in run.steps] == [3, 2], "a buffer that is no longer used is applied"
    run.iterate(0)
    assert run.clock.waiting == [(0, 2)]
    run.switch("ssp:0", "push")
    assert run.clock.waiting == [(0, 2)] and run.clock.epoch == 2, "pulls that do not pass stay delayed"
    run.iterate(1)
    run.iterate(2)
    run.switch("bsp", pulls="soft")
    assert run.clock.pulls is DelayedPulls.SOFT and run.clock.waiting == [(0, 2), (1, 2)]
    run.iterate(2)
    assert run.clock.clock == 3 and run.clock.waiting == []


def test_a_buffer_is_kept_if_the_new_mode_uses_it():
    run = Run("bsp", range(3))
    run.iterate(0)
    run.switch("ssp:0", "tick")
    assert run.steps == [] and run.clock.buffered == 1
    run.switch("hybrid:fixed=1")
    assert len(run.steps) == 1 and run.able == [0, 1, 2], "K is reached at once"


def test_a_switch_of_pulls_is_for_later_pulls():
    """FluentPS, Algorithm 1, line 7: a pull is filed under an index when it is delayed."""
    run = Run("bsp", range(2))
    run.switch("ssp:0", pulls="soft")
    run.iterate(0)
    run.switch("asp")
    for _ in range(4):
        run.iterate(0)
    run.switch("bsp", pulls="lazy")
    run.iterate(0)
    run.switch("bsp", pulls="soft")
    run.iterate(1)
    assert run.clock.clock == 1 and run.clock.waiting == [(0, 5)], "lazily, as it was filed"


@pytest.mark.parametrize("model", ["bsp", "ssp:1", "dsps:staleness=1,low=0,high=1,window=1", "drop:2"])
def test_a_worker_that_is_far_ahead_at_a_switch_keeps_its_lead_at_the_soft_barrier(model: str):
    """FluentPS, section III-C: each of its pulls waits for one tick, so the lead does not grow either."""
    run = Run("asp", range(3), pulls="soft")
    for _ in range(5):
        run.iterate(0)
    run.switch(model)
    for tick in range(1, 5):
        run.iterate(0)
        assert run.able == [1, 2] and run.clock.clock == tick - 1
        run.iterate(1)
        run.iterate(2)
        assert run.able == [0, 1, 2] and run.clock.clock == tick


def test_a_switch_that_is_refused_changes_nothing():
    clock = ShardClock(SSP(2), workers=[0])
    before = clock.state_dict()
    for switch in (
        lambda: clock.switch(sync_model_from("hybrid")),
        lambda: clock.switch(BSP(), "threshold"),
        lambda: clock.switch(BSP(), pulls="hard"),
    ):
        with pytest.raises(UsageError):
            switch()
    assert clock.state_dict() == before and clock.model == SSP(2)


def test_dsps_counts_from_the_switch():
    run = Run("ssp:0", range(2), pulls="soft")
    run.iterate(0)
    run.switch("dsps:staleness=2,low=0,high=4,window=1")
    run.iterate(1)
    assert run.clock.state_dict()["model"]["staleness"] == 2, "the one delayed pull arrived before"


# --- checkpoints --------------------------------------------------------------------------------------


def test_workers_repeat_pulls_after_a_restore():
    run = Run("ssp:1", range(2), pulls="soft")
    run.iterate(0)
    run.iterate(0)
    restored = ShardClock(SSP(1), pulls="soft", workers=[5])
    restored.pushed(5, 1)
    restored.lost(5)
    restored.joined(0)
    assert restored.pull(0, 9, "of before") == []
    restored.load_state_dict(run.clock.state_dict())
    assert restored.waiting == [] and restored.progress == {0: 1, 1: -1}
    assert restored.pull(0, 1, "again") == []
    assert restored.pushed(1, 0) == [Tick(1), Release("again")]


def test_a_clock_is_only_restored_into_an_equal_one():
    state = ShardClock(SSP(1), "tick", "soft").state_dict()
    for other in (
        ShardClock(SSP(2), "tick", "soft"),
        ShardClock(SSP(1), "push", "soft"),
        ShardClock(SSP(1), "tick", "lazy"),
    ):
        with pytest.raises(UsageError, match=r"saved with 'ssp:staleness=1 tick soft'.*make it as saved, then switch"):
            other.load_state_dict(state)


def test_a_models_state_is_the_checkpoints_own():
    clock = ShardClock(DSPS(), workers=[0])
    state = clock.state_dict()
    state["model"]["staleness"] = 11
    assert clock.state_dict()["model"]["staleness"] == 3


def test_each_pull_draws_once_from_the_generator():
    """Every model draws once per pull, so that a switch or another model meets the same numbers."""
    drawn = {}
    for spec in ("asp", "bsp", "pssp"):
        rng = random.Random(9)
        clock = ShardClock(sync_model_from(spec), workers=[0], rng=rng)
        for progress in range(5):
            clock.pushed(0, progress)
            clock.pull(0, progress, progress)
        drawn[spec] = rng.random()
    expected = random.Random(9)
    assert set(drawn.values()) == {next(itertools.islice(iter(expected.random, None), 5, None))}


def test_a_custom_model_with_a_state_and_a_threshold():
    """A subclass is called with its state; its own threshold is its apply mode."""

    @dataclass(frozen=True)
    class TwoByTwo(SyncModel):
        @property
        def default_apply(self) -> Apply:
            return Apply.THRESHOLD

        def init(self) -> int:
            return 0

        def may_pull(self, state: int, view: View, pull: Pull) -> bool:
            return pull.progress <= state

        def may_apply(self, state: int, view: View) -> bool:
            return view.buffered >= 2

        def ticked(self, state: int, view: View, pulls: int, delayed: int) -> int:
            return state + 2

    run = Run(TwoByTwo(), [0], pulls="soft")
    for _ in range(4):
        run.iterate(0)
    assert run.clock.state_dict()["model"] == 8
    assert [len(messages) for _, messages in run.steps] == [2, 2]
