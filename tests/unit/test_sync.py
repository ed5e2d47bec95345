"""The SyncManager's own state. The decisions of policies are tested in tests/papers and test_policies."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipx import policies
from gossipx.assembly.managers import ATTRIBUTES
from gossipx.policies import Observation, Policy
from gossipx.sync import SyncManager


@dataclass(frozen=True)
class Growing(Policy):
    """A policy that pulls at 1, 3, 6, 10, ...; its state is a list that it updates in place."""

    def init(self) -> list[int]:
        return [1, 2]

    def decide(self, state: list[int], observation: Observation) -> tuple[bool, list[int]]:
        if observation.step < state[0]:
            return False, state
        state[0] += state[1]
        state[1] += 1
        return True, state


SPECS = ["tau:3", "random:p=0.3", "adaptive:threshold=0.3", "travel:distance=2,max_silence=5", Growing()]


def play(manager: SyncManager, deltas: list[float], first: int) -> list[bool]:
    """Return the decisions if each pull takes two iterations, every third fails and every other is a wave."""
    decisions = []
    for step, delta in enumerate(deltas, first):
        if manager.in_flight and step % 2:
            if step % 3:
                manager.completed()
            else:
                manager.abandoned()
        decisions.append(manager.step(step, delta))
        if decisions[-1]:
            manager.requested(shared=bool(step % 4))
    return decisions


@pytest.mark.parametrize("spec", SPECS, ids=str)
@given(deltas=st.lists(st.floats(0, 2), min_size=2, max_size=40), data=st.data())
def test_from_its_state_it_decides_the_same(spec, deltas: list[float], data: st.DataObject):
    """A state survives JSON, as in a checkpoint; a pull in flight at that time counts as not begun."""
    cut = data.draw(st.integers(0, len(deltas)))
    manager = SyncManager(policies.parse(spec), seed=4)
    play(manager, deltas[:cut], 1)
    state = json.dumps(manager.state_dict())
    manager.abandoned(failed=False)

    again = SyncManager(policies.parse(spec), seed=99)
    again.load_state_dict(json.loads(state))
    assert play(again, deltas[cut:], cut + 1) == play(manager, deltas[cut:], cut + 1)
    assert (again.retrievals, again.skipped, again.failed) == (manager.retrievals, manager.skipped, manager.failed)
    assert again.decisions == manager.decisions
    assert again.state_dict() == manager.state_dict()


def test_a_state_once_taken_does_not_change():
    manager = SyncManager(Growing())
    manager.step(1, 1.0)
    state = manager.state_dict()
    before = json.dumps(state)
    manager.step(3, 1.0)
    assert json.dumps(state) == before
    again = SyncManager(Growing())
    again.load_state_dict(state)
    again.step(3, 1.0)
    assert json.dumps(state) == before


def test_counts():
    manager = SyncManager(policies.parse("tau:1"))
    assert manager.step(1, 1.0) and not manager.in_flight
    manager.requested()
    assert manager.in_flight
    assert not manager.step(2, 1.0) and not manager.step(3, 1.0)
    manager.completed()
    assert (manager.retrievals, manager.skipped, manager.failed) == (1, 2, 0)
    assert manager.step(4, 1.0)
    manager.requested()
    manager.abandoned()
    assert manager.step(5, 1.0)
    manager.requested()
    manager.abandoned(failed=False)
    manager.abandoned()
    assert (manager.retrievals, manager.skipped, manager.failed) == (1, 2, 1)


def test_a_decision_that_is_not_followed_resets_nothing():
    """Without an available peer the caller does not call requested(), and the counters continue."""
    manager = SyncManager(policies.parse("travel:distance=2.5"))
    assert [manager.step(step, 1.0) for step in (1, 2, 3, 4)] == [False, False, True, True]


def test_two_seeds_toss_two_coins():
    runs = [
        [manager.step(step, 1.0) for step in range(1, 65)]
        for manager in (SyncManager(policies.parse("random:p=0.5"), seed) for seed in (1, 1, 2))
    ]
    assert runs[0] == runs[1] != runs[2]
    assert 16 < sum(runs[0]) < 48


def test_a_wave_counts_once_and_each_of_its_models_as_one():
    manager = SyncManager(policies.parse("tau:2"))
    assert [manager.step(step, 1.0) for step in (1, 2)] == [False, True]
    manager.requested(shared=True)
    assert not manager.step(3, 1.0)
    assert not manager.step(4, 1.0) and manager.skipped == 1, "it is still in flight after two iterations"
    manager.completed(models=3)
    assert (manager.retrievals, manager.in_flight) == (3, False)
    assert [manager.step(step, 1.0) for step in (5, 6)] == [False, True]
    manager.requested(shared=True)
    manager.abandoned()
    assert manager.failed == 1 and manager.step(7, 1.0) is False and manager.step(8, 1.0), "4 and 6 after the last"


def difference_seen(manager: SyncManager, step: int, delta: float) -> float:
    """Return the difference of delta on which the policy decides after a step."""
    manager.step(step, delta)
    assert manager.observation is not None and manager.observation.step == step
    return manager.observation.difference


def test_what_a_policy_decided_on_is_kept_until_its_next_decision():
    """Section V-B: |Δ_t − Δ_r| with the Δ_r of the decision, although the request sets Δ_r to Δ_t."""
    manager = SyncManager(policies.parse("adaptive:threshold=0.3"))
    assert difference_seen(manager, 1, delta=0.5) == 0.5 and manager.fired
    manager.requested()
    assert manager.observation is not None
    assert (manager.observation.difference, manager.observation.travelled) == (0.5, 0.5)
    assert difference_seen(manager, 2, delta=1.0) == 0.5 and not manager.fired, "one is in flight"
    assert (manager.decisions, manager.skipped) == (2, 1)
    manager.completed()
    assert difference_seen(manager, 3, delta=0.5) == 0.0 and not manager.fired
    assert manager.decisions == 2


def test_what_others_push_is_a_retrieval_and_no_exchange_of_ours():
    """Policies count from the last exchange that this peer began, also from a push, which brings no model."""
    manager = SyncManager(policies.parse("never"))
    for step in (1, 2, 3):
        manager.step(step, 0.5)
    manager.retrieved()
    assert (manager.retrievals, manager.in_flight) == (1, False)
    manager.requested()
    manager.completed(models=0)
    assert (manager.retrievals, manager.in_flight) == (1, False)
    assert difference_seen(manager, 4, delta=0.75) == 0.25, "Δ_r is that of our push"


def test_a_decision_that_finds_nobody_is_skipped_as_if_it_had_not_been_taken():
    manager = SyncManager(policies.parse("never"))
    manager.step(1, 0.5)
    manager.requested()
    manager.found_nobody()
    assert (manager.skipped, manager.failed, manager.in_flight) == (1, 0, False)
    assert difference_seen(manager, 2, delta=0.75) == 0.75, "Δ_r is still that of no retrieval"


def warned(policy: str | Policy, deltas: Iterable[float], wave: int = 0) -> list[tuple[int, str, str]]:
    """Return the warnings of a run whose exchanges complete at once, with their iterations and topics.

    Args:
        wave: the number of iterations between two waves that other peers start.
    """
    manager = SyncManager(policy)
    found = []
    for step, delta in enumerate(deltas, 1):
        if wave and step % wave == 0:
            manager.requested(shared=True)
            manager.completed()
        if manager.step(step, delta):
            manager.requested()
            manager.completed()
        found += [(step, topic, text) for topic, text in manager.warnings().items()]
    return found


@pytest.mark.fault(47)
@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("adaptive:threshold=0.02", "the delta is 0.01 and its difference 0.01, the threshold 0.02"),
        ("travel:distance=1e3", "the delta is 0.01 and the deltas add up to 1 of 1000"),
        (lambda seen: seen.delta > 1, "the delta is 0.01"),
        ("adaptive:threshold=0.02,max_silence=50", None),
        ("never", None),
        ("tau:1000", None),
        ("random:p=0", None),
    ],
    ids=lambda given: "function" if callable(given) else str(given),
)
def test_a_policy_that_does_not_fire_is_told_once(spec, told: str | None):
    found = warned(spec, [0.01] * 400)
    assert [(step, topic) for step, topic, _ in found] == ([] if told is None else [(100, "quiet")])
    if told is not None:
        text = found[0][2]
        assert text.startswith(f"{policies.describe(policies.parse(spec))} has not fired in 100 iterations: {told}; ")


def firing(until: int, every: int, steps: int = 600) -> list[float]:
    """Return the deltas with which ``travel:distance=1`` fires every N iterations, but not after ``until``."""
    return [2.0 if step <= until and step % every == 0 else 0.0 for step in range(1, steps + 1)]


@pytest.mark.fault(47)
def test_a_policy_that_fires_only_at_the_start_is_told_once():
    """So it is with the paper's rule: before the first retrieval Δ_r is 0, so its difference of delta is Δ itself."""
    ((step, _, text),) = warned("travel:distance=1", firing(until=2, every=1))
    assert step == 102
    assert "has not fired in 100 iterations, since iteration 2: the delta is 0 and the deltas add up to 0 of 1" in text
    ((step, _, text),) = warned("adaptive:threshold=0.063", [0.1] * 600)
    assert "since iteration 1: the delta is 0.1 and its difference 0, the threshold 0.063; lower its" in text


@pytest.mark.fault(47)
@pytest.mark.parametrize(
    ("until", "every", "options", "wave"),
    [
        (600, 90, "", 0),
        (270, 90, "", 0),  # silent for less than three times as long as before
        (2, 1, ",max_silence=500", 0),
        (2, 1, "", 50),
    ],
)
def test_silence_that_the_policy_or_others_mean_is_not_told(until: int, every: int, options: str, wave: int):
    assert warned(f"travel:distance=1{options}", firing(until, every, steps=500), wave) == []


def test_a_warm_up_is_not_silence():
    ((step, _, text),) = warned("adaptive:threshold=0.02,warmup=50", [0.01] * 400)
    assert step == 150 and "in 100 iterations" in text


def test_a_policy_that_fired_before_a_checkpoint_is_not_told():
    manager = SyncManager(policies.parse("adaptive:threshold=0.02"))
    assert manager.step(1, 1.0)
    manager.requested()
    manager.completed()
    again = SyncManager(policies.parse("adaptive:threshold=0.02"))
    again.load_state_dict(manager.state_dict())
    assert not any(again.step(step, 1.0) or again.warnings() for step in range(2, 300))


@pytest.mark.fault(50)
@pytest.mark.parametrize(("in_flight", "of"), [(10, None), (12, 20), (25, 15)])
def test_skipped_decisions_are_told_once(in_flight: int, of: int | None):
    """Each exchange takes a number of iterations; tau:10 skips those decisions that fall into one."""
    manager = SyncManager(policies.parse("tau:10"))
    found, until = [], 0
    for step in range(1, 1001):
        if manager.in_flight and step >= until:
            manager.completed()
        if manager.step(step, 1.0):
            manager.requested()
            until = step + in_flight
        found += [(manager.skipped, *one) for one in manager.warnings().items()]
    if of is None:
        assert manager.skipped == 0 and found == []
        return
    ((skipped, topic, text),) = found
    assert topic == "skipped" and skipped == 10 < manager.skipped
    assert text.startswith(f"10 of {of} ") and "10 during an exchange and 0 with all other peers busy" in text


@pytest.mark.fault(50)
def test_a_few_skipped_decisions_are_normal():
    """Every sixth decision is lost: tau:10 exchanges as often as tau:12."""
    manager = SyncManager(policies.parse("tau:1"))
    for step in range(1, 601):
        assert manager.step(step, 1.0)
        manager.requested()
        manager.found_nobody() if step % 6 == 0 else manager.completed()
        assert not manager.warnings()
    assert (manager.retrievals, manager.skipped) == (500, 100)


def test_an_object_in_place_of_the_manager_is_asked_for_all_public_attributes():
    assert {name for name in vars(SyncManager("never")) if name[0] != "_"} == {*ATTRIBUTES[SyncManager]}


def test_the_deltas_of_each_period_are_added_up():
    """Figure 3, by number of the retrieval; a failed pull, and one that nobody answers, add to the next period."""
    manager = SyncManager("tau:2")
    found = []
    for step in range(1, 9):
        if manager.step(step, float(step)):
            manager.requested()
            (manager.completed, manager.abandoned, manager.found_nobody, manager.completed)[step // 2 - 1]()
            found.append(manager.accumulated)
    assert found == [(1, 3.0), (1, 3.0), (1, 3.0), (2, 33.0)]
