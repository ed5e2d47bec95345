"""Sync models: the meaning of specs, how gradients are applied, and a clock under change.

Changes are workers that join and leave, switches of the sync model, and checkpoints.

The papers' own rules are in tests/papers, random schedules in test_sync_schedules.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest
from shards import Run

from gossipx.errors import UsageError
from gossipx.peer.server_role import Total
from gossipx.server.conditions import Apply, Conditions, Pull, SyncModel, View
from gossipx.server.hosted_shards import figures
from gossipx.server.shard_clock import BufferDue, DelayedPulls, Handling, PushDecision, Release, ShardClock, Tick
from gossipx.server.sync_models import (
    ASP,
    BSP,
    DSPS,
    SSP,
    ConstantPSSP,
    Double,
    Drop,
    DynamicPSSP,
    Fixed,
    Growth,
    Hybrid,
    Step,
    application,
    spec_of,
    sync_model_from,
)


@dataclass(frozen=True)
class Squares(Growth):
    """A custom growth function."""

    def threshold(self, gradients: int) -> int:
        return 1 + math.isqrt(gradients)


# --- specs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("bsp", BSP()),
        ("asp", ASP()),
        ("ssp", SSP(3)),
        ("ssp:2", SSP(2)),
        ("ssp:staleness=inf", SSP(math.inf)),
        ("dsps", DSPS(3, 0, 12, 10)),
        ("dsps:staleness=2,low=1,high=5,window=20", DSPS(2, 1, 5, 20)),
        ("drop:3", Drop(3)),
        ("drop:n=3,late=add", Drop(3, "add")),
        ("pssp", ConstantPSSP(3, 0.5)),
        ("pssp:staleness=2,p=0.25", ConstantPSSP(2, 0.25)),
        ("pssp:staleness=2,p=0", ConstantPSSP(2, 0.0)),
        ("pssp:staleness=2,alpha=0.8", DynamicPSSP(2, 0.8)),
        ("pssp:alpha=significance", DynamicPSSP(3, "significance")),
        ("hybrid", Hybrid(Step("5/lr"))),
        ("hybrid:500", Hybrid(Step(500))),
        ("hybrid:step=2.50/lr", Hybrid(Step("2.5/lr"))),
        ("hybrid:double=300", Hybrid(Double(300))),
        ("hybrid:fixed=4", Hybrid(Fixed(4))),
        ("hybrid:wait=true", Hybrid(wait=True)),
        ("hybrid:at_once=true", Hybrid(at_once=True)),
        ("hybrid:9,wait=true,reduce=sum", Hybrid(Step(9), wait=True, reduce="sum")),
    ],
)
def test_specs(spec: str, expected: SyncModel):
    assert sync_model_from(spec) == expected
    assert sync_model_from(spec_of(expected)) == expected
    assert sync_model_from(expected) is expected


def test_a_description_is_short():
    described = [
        spec_of(sync_model_from(spec)) for spec in ("ssp:3.0", "ssp:2", "pssp:p=0.25", "drop:3,late=drop", "hybrid:9")
    ]
    assert described == ["ssp", "ssp:staleness=2", "pssp:p=0.25", "drop:n=3", "hybrid:step=9"]
    assert spec_of(sync_model_from("hybrid:reduce=sum,wait=true,double=5")) == "hybrid:double=5,wait=true,reduce=sum"
    assert spec_of(sync_model_from("hybrid:at_once=true,fixed=2")) == "hybrid:fixed=2,at_once=true"
    own = Conditions(pull=lambda seen, pull: True, push=lambda seen: True)
    assert "conditions" in spec_of(own) and "Squares" in spec_of(Hybrid(Squares()))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("spp", "unknown sync model 'spp' (did you mean 'ssp'?): one of asp, bsp, drop, dsps, hybrid, pssp, ssp"),
        ("ssp:1.5", "a whole number from 0, or inf"),
        ("ssp:-1", "a whole number from 0, or inf"),
        ("bsp:3", "'bsp' takes no keys"),
        ("dsps:staleness=20", "0 ≤ low ≤ staleness ≤ high"),
        ("dsps:window=0", "window must be at least 1 tick"),
        ("drop", "'drop' takes n=INTEGER"),
        ("drop:0", "n must be at least 1 worker"),
        ("drop:2,late=maybe", "neither drop nor add"),
        ("pssp:p=1.5", "p must be a probability"),
        ("pssp:p=half", "p='half' is not a number"),
        ("pssp:p=0.5,alpha=1", "give one of them"),
        ("pssp:alpha=-1", "alpha is a finite number from 0, or significance"),
        ("pssp:alpha=significanse", "alpha='significanse' is neither a number nor significance"),
        ("hybrid:step=0", "step must be at least 1 gradient"),
        ("hybrid:step=lr/5", "neither a number of gradients (500) nor a multiple of 1/lr (5/lr)"),
        ("hybrid:double=x/lr", "double='x/lr' is neither"),
        ("hybrid:fixed=0", "at least 1"),
        ("hybrid:fixed=all", "is not a number of gradients"),
        ("hybrid:step=5,fixed=2", "give one of them"),
        ("hybrid:reduce=max", "reduce='max' is neither mean nor sum"),
        ("hybrid:wait=1", "wait='1' is not true|false"),
        ("hybrid:wait=true,at_once=true", "give wait or at_once"),
    ],
)
def test_wrong_specs(spec: str, told: str):
    with pytest.raises(UsageError) as raised:
        sync_model_from(spec)
    assert told in str(raised.value) and raised.value.exit_code == 2


def test_a_step_in_terms_of_the_learning_rate_is_resolved_before_use():
    model = sync_model_from("hybrid:double=5/lr")
    assert model.needs_rate and model.resolved(0.01) == Hybrid(Double(500)) and not model.resolved(0.01).needs_rate
    assert model.resolved(0.003) == Hybrid(Double(1667))
    with pytest.raises(UsageError, match=r"'hybrid:double=5/lr' needs the learning rate"):
        ShardClock(model)
    assert sync_model_from("hybrid:step=5/lr").resolved(10.0) == Hybrid(Step(1)), "a step of half a gradient is one"
    assert sync_model_from("hybrid:step=7").resolved(0.01) == Hybrid(Step(7))
    assert sync_model_from("ssp:2").resolved(0.01) == SSP(2)
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="learning rate above 0"):
            model.resolved(rate)
    with pytest.raises(ValueError, match="is not resolved"):
        Step("5/lr").threshold(3)


@pytest.mark.parametrize(("size", "far"), [(Step(3), 5), (Double(3), 16), (Fixed(2), 2)])
def test_growth(size: Growth, far: int):
    assert size.threshold(0) == size.threshold(1) == size.threshold(3), "before the first, too"
    assert size.threshold(13) == far and size.threshold(10**15) >= far


# --- how gradients are applied ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "default"),
    [("bsp", "tick"), ("drop:2", "tick"), *((spec, "push") for spec in ("asp", "ssp", "dsps", "pssp", "pssp:alpha=1"))],
)
def test_all_but_hybrid_take_any_apply_mode_without_a_threshold(spec: str, default: str):
    ways = [None, "push", "each", "tick"]
    assert [application(sync_model_from(spec), way).value for way in ways] == [default, *ways[1:]]
    with pytest.raises(UsageError, match="has no threshold: apply is one of push, each, tick"):
        application(sync_model_from(spec), "threshold")


def test_apply_modes_of_hybrid_and_of_conditions():
    assert application(sync_model_from("hybrid:9")).value == "threshold"
    own = Conditions(pull=lambda seen, pull: True, push=lambda seen: True)
    assert [application(own), application(own, "tick")] == [Apply.PUSH, Apply.TICK]
    assert application(replace(own, apply=Apply.EACH)) is Apply.EACH


def test_wrong_apply_modes():
    with pytest.raises(UsageError, match="'hybrid:fixed=2' applies gradients by its threshold, not 'tick'"):
        application(sync_model_from("hybrid:fixed=2"), Apply.TICK)
    with pytest.raises(UsageError, match=r"unknown way to apply gradients 'tik' \(did you mean 'tick'\?\)"):
        ShardClock(BSP(), "tik")
    with pytest.raises(UsageError, match=r"unknown way to answer pulls 'lasy' \(did you mean 'lazy'\?\)"):
        ShardClock(BSP(), pulls="lasy")


def test_what_fast_workers_push_ahead_is_in_the_mean_of_the_next_tick():
    run = Run("ssp:2", range(2), "tick")
    for rank in (0, 0, 1):
        run.iterate(rank)
    ((scale, messages),) = run.steps
    assert scale == 1 / 3 and [message[:2] for message in messages] == [(0, 0), (0, 1), (1, 0)]
    run.iterate(1)
    assert len(run.steps) == 2 and run.steps[1][1] == ((1, 1, 0),), "W0's push of iteration 1 is not in it again"
    run.iterate(0)
    run.iterate(0)
    assert run.clock.buffered == 2 and run.clock.view().buffered == 2


# --- pushes of several messages -----------------------------------------------------------------------


def test_a_push_that_began_late_is_dropped_whole_though_the_model_is_switched():
    run = Run("drop:1", range(2), tables=2)
    run.iterate(0)
    run.send(1)
    run.switch("bsp")
    run.send(1)
    assert len(run.dropped) == 2 and run.clock.counts.late == 1
    assert run.events == ["tick 1", "answer 0 0", "answer 1 0"] and run.workers[1].iteration == 1


def test_a_switch_in_the_middle_of_a_push():
    run = Run("bsp", range(2), tables=2)
    run.send(0)
    run.switch("asp")
    assert len(run.steps) == 1 and run.buffer == [], "the partial push is applied"
    run.send(0)
    assert len(run.applied) == 2 and run.clock.buffered == 0
    run.send(1)
    run.switch("bsp")
    run.send(1)
    assert run.clock.buffered == 0 and run.clock.clock == 1, "the half in the buffer was in the tick's mean"


def test_a_push_without_a_message_is_not_in_the_buffer():
    """A worker may have no gradient for this shard, as with a frozen layer."""
    clock = ShardClock(SSP(5), "tick", workers=[0, 1])
    clock.push_part(0, 0)
    for progress in (0, 1):
        assert clock.pushed(0, progress) == []
    assert clock.buffered == 1 and clock.counts.gradients == 2
    assert clock.pushed(1, 0) == [BufferDue(1), Tick(1)]


def test_a_repeated_or_an_older_push_changes_nothing():
    clock = ShardClock(ASP(), workers=[0, 1])
    for progress in (4, 4, 2):
        clock.push_part(0, progress)
        clock.pushed(0, progress)
    assert clock.push_part(0, 4) == clock.push_part(0, 3) == PushDecision(Handling.DROP)
    assert clock.progress == {0: 4, 1: -1} and clock.counts.gradients == 1 and clock.counts.late == 0


# --- figures ------------------------------------------------------------------------------------------


def test_figures_of_a_shard_by_the_clock():
    clock = ShardClock(sync_model_from("hybrid:step=2"), workers=range(2))
    for rank, progress in ((0, 0), (0, 1), (0, 2)):
        clock.push_part(rank, progress)
        clock.pushed(rank, progress)
    assert figures(clock) == {
        "clock": (3, 0),
        "delayed_pulls": (3, 0),
        "gradients": (3, 3),
        "staleness": (3, Total(0 + 1, 2)),
        "buffered": (3, 1),
        "threshold": (3, 2),
    }
    clock.switch(sync_model_from("bsp"))
    assert figures(clock).keys() == {"clock", "delayed_pulls", "gradients", "staleness", "buffered"}
    clock.switch(sync_model_from("asp"))
    assert figures(clock).keys() == {"clock", "delayed_pulls", "gradients", "staleness"}


# --- dsps ---------------------------------------------------------------------------------------------


def staleness_after(model: DSPS, windows: list[tuple[int, int]]) -> list[int]:
    """Return s after each window of ``(pulls, delayed)``, both in its last tick."""
    state, found = model.init(), []
    for pulls, delayed in windows:
        for tick in range(model.window):
            counted = (pulls, delayed) if tick == model.window - 1 else (0, 0)
            state = model.ticked(state, View(0, 0, 2, 0, 0, 0, 0), *counted)
        found.append(state["staleness"])
    return found


def test_staleness_follows_how_many_wait():
    model = DSPS(staleness=2, low=1, high=4, window=3)
    assert staleness_after(model, [(10, 2), (10, 10), (10, 10)]) == [3, 4, 4], "up to high"
    assert staleness_after(model, [(10, 0), (10, 0)]) == [1, 1], "down to low"
    assert staleness_after(model, [(10, 1), (20, 2), (0, 0)]) == [2, 2, 2], "a tenth, or no pulls: unchanged"
    assert staleness_after(model, [(19, 2)]) == [3]


def test_a_window_counts_all_its_ticks():
    model = DSPS(staleness=2, low=0, high=4, window=4)
    state = model.init()
    for _ in range(4):
        assert state["staleness"] == 2
        state = model.ticked(state, View(0, 0, 2, 0, 0, 0, 0), 5, 1)
    assert state["staleness"] == 3, "4 of 20 in all"
    for _ in range(4):
        state = model.ticked(state, View(0, 0, 2, 0, 0, 0, 0), 1, 0)
    assert state["staleness"] == 2, "the count starts again"


def test_pulls_count_once_at_the_next_tick():
    @dataclass(frozen=True)
    class Telling(SyncModel):
        def init(self) -> list[list[int]]:
            return []

        def may_pull(self, state: list[list[int]], view: View, pull: Pull) -> bool:
            return pull.progress < view.clock

        def ticked(self, state: list[list[int]], view: View, pulls: int, delayed: int) -> list[list[int]]:
            return [*state, [view.clock, pulls, delayed]]

    run = Run(Telling(), range(2))
    for rank in (0, 1) * 3:
        run.iterate(rank)
    assert run.clock.state_dict()["model"] == [[1, 1, 1], [2, 2, 1], [3, 2, 1]], (
        "the last one's pull comes after a tick"
    )


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
    """FluentPS, section III-B: SetcondPull and SetcondPush."""
    at_least_two = Conditions(pull=lambda seen, pull: seen.workers >= 2, push=lambda seen: seen.workers >= 2)
    clock = ShardClock(at_least_two, pulls="soft", workers=[0])
    assert clock.pushed(0, 0) == [] and clock.pull(0, 0, "pull") == []
    assert clock.joined(1) == [Tick(1), Release("pull")]


def test_a_lost_workers_push_counts_for_no_other():
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
    """FluentPS, section I: "at runtime, our condition-aware methodology can adjust synchronization models"."""
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
