"""Hybrid Approach to Parallel SGD: each test names the section or the step of Algorithm 1 that it checks."""

from __future__ import annotations

import pytest
from shards import RATE, Run

from gossipx.server.conditions import View
from gossipx.server.shard_clock import BufferDue, Handling, PushDecision, ShardClock, Tick
from gossipx.server.sync_models import Double, Growth, Hybrid, Step, sync_model_from

WORKERS = 4


def seen(gradients: int, workers: int = WORKERS, buffered: int = 0) -> View:
    return View(0, 0, workers, 0, 0, buffered, gradients)


def taken_in_turns(run: Run, rounds: int) -> list[int]:
    """Return the number of gradients in each application, with equally fast workers."""
    for _ in range(rounds):
        for rank in run.able:
            run.iterate(rank)
    return [len(messages) for _, messages in run.steps]


# --- sections 4 and 6: the threshold ------------------------------------------------------------------


def test_the_threshold_grows_by_one_every_step_of_gradients():
    """Step 1: K starts at 1. Step 2 (3): the step function of the number of gradient updates (section 6)."""
    model = Hybrid(Step(500))
    assert [model.threshold(seen(n)) for n in (0, 1, 500)] == [1, 1, 1], "the first 500 are asynchronous"
    assert [model.threshold(seen(n)) for n in (501, 1000, 1001, 1501)] == [2, 2, 3, 4]


@pytest.mark.parametrize("growth", [Step(7), Double(9)])
def test_any_growth_is_monotonic_starts_at_one_and_ends_at_all_workers(growth: Growth):
    """Sections 4, 9: "different monotonically increasing functions can also be used"."""
    model = Hybrid(growth)
    thresholds = [model.threshold(seen(n)) for n in range(1, 200)]
    assert thresholds == sorted(thresholds) and thresholds[0] == 1 and thresholds[-1] == WORKERS
    assert model.threshold(seen(10**12)) == WORKERS


def test_the_threshold_is_never_above_the_living():
    """Section 3: the synchronous approach collects a gradient of each worker. With fewer than K, all would wait."""
    model = Hybrid(Step(1))
    assert [model.threshold(seen(1000, workers)) for workers in (5, 2, 1, 0)] == [5, 2, 1, 1]
    run = Run("hybrid:fixed=3,wait=true", range(3))
    run.iterate(0)
    run.iterate(1)
    assert run.steps == [] and run.able == [2]
    run.lose(2)
    assert [len(messages) for _, messages in run.steps] == [2] and run.able == [0, 1]


# --- Algorithm 1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["false", "true"])
def test_updates_go_smoothly_from_asynchronous_to_synchronous(wait: str):
    """Step 2: a buffer of K gradients is applied; at first each alone, in the end as many as there are workers."""
    taken = taken_in_turns(Run(f"hybrid:step=8,wait={wait}", range(WORKERS)), 20)
    assert taken[:8] == [1] * 8, "the first 8"
    assert taken[8:12] == [2] * 4, "the next 8, two by two"
    assert taken[12:] == sorted(taken[12:])
    assert set(taken[12:14]) == {3} and set(taken[-5:]) == {WORKERS}


def test_workers_continue_with_stale_values_until_at_the_threshold_the_whole_buffer_is_applied():
    """Step 2 (2): "continue with asynchronous updates ... Might cause frequent stale reads"; (1): "synchronize all the
    gradients in the gradient buffer ... (reduction in stale reads)".
    """
    run = Run("hybrid:fixed=3", range(3))
    run.iterate(0)
    run.iterate(0)
    assert run.events == ["answer 0 0", "answer 0 1"] and run.clock.counts.delayed == 0
    assert run.weights == run.workers[0].seen == [1.0], "its own gradients are not applied yet"
    assert run.clock.buffered == 2, "one worker may have several gradients in the buffer"
    run.iterate(2)
    assert [message[:2] for message in run.steps[0][1]] == [(0, 0), (0, 1), (2, 0)] and run.clock.buffered == 0
    assert run.workers[0].seen == [1.0] and run.workers[2].seen == run.weights == [1.0 - RATE * (1 + 1 - 1) / 3]
    run.iterate(1)
    assert run.workers[1].seen == run.weights, "and the next gradient waits in the buffer for two more"


def test_below_the_threshold_gradients_may_be_asynchronous_updates_too():
    """Step 2 (2): "continue with asynchronous updates to the Parameter Server", besides the buffer's step (1)."""
    run = Run("hybrid:fixed=3,at_once=true", range(3))
    run.iterate(0)
    assert run.weights == run.workers[0].seen == [1.0 - RATE * 1.0] and run.clock.buffered == 1
    run.iterate(1)
    run.iterate(2)
    assert [(scale, [one.life for one in messages]) for scale, messages in run.steps] == [
        (1.0, [0]),
        (1.0, [1]),
        (1 / 3, [0, 1, 2]),
    ], "the third completes the buffer, and is not applied alone"
    assert run.weights == [1.0 - RATE * (1 - 0) - RATE * (1 - 1) - RATE * ((1 - 0) + (1 - 1) + (1 - 2)) / 3]
    counts = run.clock.counts
    assert (counts.delayed, counts.steps, run.clock.buffered) == (0, 3, 0)
    assert run.clock.pull_now(0) == [], "nothing of a rest is missing"
    run.iterate(1)
    assert run.clock.pull_now(0) == [] and run.clock.buffered == 1


def test_a_push_of_several_messages_is_applied_at_once_as_a_whole_or_not():
    """As the buffer grows while a push arrives, its later messages are handled as the first."""
    clock = ShardClock(sync_model_from("hybrid:fixed=2,at_once=true"), workers=range(2))
    assert clock.push_part(0, 0) == clock.push_part(1, 0) == PushDecision(Handling.APPLY, buffers=True)
    assert clock.pushed(0, 0) == []
    assert clock.push_part(1, 0) == PushDecision(Handling.APPLY, buffers=True)
    assert clock.pushed(1, 0) == [BufferDue(2), Tick(1)]
    saved = ShardClock(sync_model_from("hybrid:fixed=2,at_once=true"), workers=range(2))
    clock.push_part(0, 1)
    saved.load_state_dict(clock.state_dict())
    clock.pushed(1, 1)
    assert saved.push_part(0, 1) == clock.push_part(0, 1) == PushDecision(Handling.APPLY, buffers=True)


def test_staleness_counts_the_steps_since_a_gradients_values_were_read():
    """Section 3: "faster workers might end up providing too many stale updates"."""
    run = Run("hybrid:fixed=2", range(3))
    for rank in (0, 0, 0, 1, 2):  # steps after the second and the fourth
        run.iterate(rank)
    counts = run.clock.counts
    assert (counts.steps, counts.applied, counts.staleness) == (2, 4, 0 + 0 + 0 + 1)
    run.iterate(0)
    assert (counts.steps, counts.applied, counts.staleness) == (3, 6, 1 + 2 + 1), "0 read after the first step"


def test_a_worker_that_begins_or_ends_takes_what_is_in_the_buffer():
    """The loop of step 2 ends with fewer than K gradients in the buffer: they are in the final values, too."""
    clock = ShardClock(sync_model_from("hybrid:fixed=3"), workers=range(3))
    clock.push_part(0, 0)
    clock.pushed(0, 0)
    assert clock.pull_now(1) == [BufferDue(1)] and clock.pull_now(2) == [] and clock.buffered == 0


# --- section 3: workers that wait for their gradients ---------------------------------------------------


@pytest.mark.parametrize(("reduce", "divisor"), [("mean", 2), ("sum", 1)])
def test_a_buffer_is_applied_by_its_mean_or_its_sum(reduce: str, divisor: int):
    """Section 6: the learning rate does not depend on K. A mean counts as one gradient, a sum as all of them."""
    run = Run(f"hybrid:fixed=2,wait=true,reduce={reduce}", range(3))
    run.iterate(0)
    assert run.weights == [1.0], "one of two"
    run.iterate(1)
    assert run.weights == [1.0 - RATE * ((1 - 0) + (1 - 1)) / divisor]
    assert run.events == ["answer 0 0", "answer 1 0"]


def test_a_pull_is_answered_when_the_workers_own_gradient_is_applied():
    """Not earlier, or it would push a second one into the buffer; not later, however slow the others are."""
    run = Run("hybrid:fixed=2,wait=true", range(3))
    for rank in (0, 1, 0):
        run.iterate(rank)
    assert run.able == [1, 2] and run.events == ["answer 0 0", "answer 1 0"]
    run.iterate(1)
    assert run.events[2:] == ["answer 0 1", "answer 1 1"] and run.clock.clock == 0


def test_growth_begins_at_the_switch():
    """Step 1 is the start of the algorithm: K is 1 then, even if there were gradients before."""
    run = Run("asp", range(3))
    taken_in_turns(run, 10)
    run.switch("hybrid:step=6")
    del run.steps[:]
    assert taken_in_turns(run, 4)[:7] == [1, 1, 1, 1, 1, 1, 2]
    assert run.clock.counts.gradients > 40, "in all epochs"
