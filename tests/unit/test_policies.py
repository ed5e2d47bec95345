"""Policies: their specs, and when each pulls. The rules of the papers are tested in tests/papers."""

from __future__ import annotations

import importlib.metadata
import math
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest

from gossipx import policies, specs
from gossipx.errors import GossipxError, UsageError
from gossipx.policies import CREDIT, Adaptive, Drift, FunctionPolicy, Never, Observation, Policy, Random, Tau, Travel
from gossipx.specs import plugins as packages
from gossipx.sync import SyncManager


def observed(step: int = 1, **values: float) -> Observation:
    shown = {
        "delta": 1.0,
        "delta_at_retrieval": 0.0,
        "travelled": 1.0,
        "drift_measured": None,
        "silence": 1,
        "uniform": 0.5,
    }
    return Observation(step=step, **{**shown, **values})


def wants(policy: Policy, **values: float) -> bool:
    return policy.decide(policy.init(), observed(**values))[0]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("tau:10", Tau(10)),
        ("tau:period=10,warmup=5", Tau(10, warmup=5)),
        ("adaptive", Adaptive(0.75, relative=True, max_silence=100)),
        ("adaptive:relative=true,max_silence=0", Adaptive(0.75, relative=True)),
        ("adaptive:warmup=5,max_silence=20", Adaptive(0.75, relative=True, warmup=5, max_silence=20)),
        ("adaptive:threshold=0.02", Adaptive(0.02)),
        ("adaptive:threshold=0.02,max_silence=20", Adaptive(0.02, max_silence=20)),
        ("adaptive:0.5,relative=true", Adaptive(0.5, relative=True)),
        ("adaptive:threshold=0.02,of=delta", Adaptive(0.02, of="delta")),
        ("adaptive:2,relative=true,of=delta", Adaptive(2.0, relative=True, of="delta")),
        ("travel:distance=2,max_silence=500", Travel(2.0, max_silence=500)),
        ("drift:distance=2", Drift(2.0)),
        ("random:p=0.1", Random(0.1)),
        ("never", Never()),
    ],
)
def test_what_a_spec_means(spec: str, expected: Policy):
    assert policies.parse(spec) == expected
    assert policies.parse(specs.text(expected, spec.partition(":")[0])) == expected


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("adaptiv:0.02", "did you mean 'adaptive'?"),
        ("tau", "'tau' takes period=INTEGER"),
        ("tau:0", "at least 1"),
        ("tau:5,warmup=-1", "not negative"),
        ("random:p=1.5", "from 0 to 1"),
        ("auto", "'auto' takes budget=TEXT"),
        ("auto:0", "budget is a share of all iterations, above 0% and up to 100%"),
        ("auto:budget=101%", "budget is a share of all iterations, above 0% and up to 100%"),
        ("adaptive:threshold=-1", "a finite number of at least 0"),
        ("adaptive:of=distance", "of is difference (of delta, section V-B) or delta (section IV)"),
        ("adaptive:of=delta", "delta itself exceeds a threshold: give threshold="),
        ("adaptive:relative=false", "no absolute threshold suits every model: give threshold="),
        ("travel:distance=inf", "a finite number of at least 0"),
        ("nothing-like-it", f"one of {', '.join(sorted(policies.BUILT_IN))}"),
    ],
)
def test_what_a_wrong_spec_is_told(spec: str, told: str):
    with pytest.raises(UsageError) as raised:
        policies.parse(spec)
    assert told in str(raised.value) and raised.value.exit_code == 2


def fired(policy: str | Policy, deltas: list[float], fail: bool = False) -> list[int]:
    """Return the iterations at which a policy begins an exchange, which completes, or fails, at once."""
    manager = SyncManager(policy)
    steps = []
    for step, delta in enumerate(deltas, 1):
        if manager.step(step, delta):
            manager.requested()
            (manager.abandoned if fail else manager.completed)()
            steps.append(step)
    return steps


@pytest.mark.fault(47)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_adaptive_alone_suits_steps_of_any_length(scale: float):
    """The learning rate falls to a twelfth, as by default in the Hugging Face Trainer; then a constant one."""
    falling = [0.012 * (1 - t / 262) for t in range(240)]
    assert fired("adaptive:threshold=0.02", falling) == []
    assert fired("adaptive", [scale * delta for delta in falling]) == [1, 101, 201]
    assert fired("adaptive", [scale] * 320) == [1, 101, 201, 301]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(("budget", "period"), [("2%", 50), ("0.1", 10), ("100%", 1)])
def test_auto_is_a_fixed_period_where_the_model_moves_evenly(budget: str, period: int, scale: float):
    """Whatever the length of the steps is."""
    assert fired(f"auto:{budget}", [scale] * 200) == list(range(period, 201, period))


def test_auto_spends_its_budget_where_the_model_moves():
    """Steps that are four times as long for a while get more exchanges, and few are spent in advance."""
    deltas = [1.0] * 300 + [4.0] * 300 + [1.0] * 400
    taken = fired("auto:budget=2%", deltas)
    calm, busy, after = (sum(low < step <= high for step in taken) for low, high in ((0, 300), (300, 600), (600, 900)))
    assert busy >= calm + 2 and after <= calm
    assert all(number <= 0.02 * step + CREDIT for number, step in enumerate(taken, 1))


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.5])
def test_auto_spends_about_all_of_its_budget(power: float):
    taken = fired("auto:5%", [step**power for step in range(1, 2001)])
    assert 90 <= len(taken) <= 104


def test_a_model_that_stands_still_is_not_worth_an_exchange():
    assert fired("auto:10%", [0.0] * 100) == []


def test_a_spec_is_completed_with_what_its_policy_chooses():
    assert policies.complete("adaptive") == "adaptive:threshold=0.75,relative=true,max_silence=100"
    assert policies.complete("adaptive:0.5") == "adaptive:threshold=0.5"
    for spec in ("adaptive:threshold=0.02", "tau:10", "never"):
        assert policies.complete(spec) == spec
    assert policies.parse(policies.complete("adaptive")) == policies.parse("adaptive")


def test_a_policy_and_a_function_are_taken_as_they_are():
    assert policies.parse(Tau(3)) is not None and policies.parse(Tau(3)) == Tau(3)
    policy = policies.parse(lambda seen: seen.step > 4 and seen.difference > 1)
    assert isinstance(policy, FunctionPolicy)
    assert not wants(policy, step=4, delta=3.0)
    assert wants(policy, step=5, delta=3.0) and not wants(policy, step=5, delta=0.5)


def test_when_each_pulls():
    assert wants(Random(1.0), uniform=0.999) and not wants(Random(0.0), uniform=0.0)
    assert wants(Random(0.3), uniform=0.29) and not wants(Random(0.3), uniform=0.3)
    assert wants(Travel(2.0), travelled=2.1) and not wants(Travel(2.0), travelled=2.0)
    assert wants(Drift(2.0), drift_measured=2.1) and not wants(Drift(2.0), drift_measured=2.0)
    assert wants(Tau(10), step=20, silence=4) and not wants(Tau(10), step=24, silence=10)
    assert wants(Tau(10), step=24, silence=10, shared=True), "after a wave it counts from that wave"
    assert not wants(Tau(10), step=20, silence=6, shared=True)
    assert wants(Adaptive(0.5), delta=1.0, delta_at_retrieval=1.75)
    assert not wants(Adaptive(0.5), delta=math.nan), "a diverged model compares as false"
    # Section IV: the difference of the local model, Δ_t, exceeds the threshold, whatever Δ_r is
    assert wants(Adaptive(0.5, of="delta"), delta=0.6, delta_at_retrieval=0.6)
    assert not wants(Adaptive(0.5, of="delta"), delta=0.5, delta_at_retrieval=1.75)
    assert wants(Adaptive(2.0, relative=True, of="delta"), delta=1.1, delta_at_retrieval=0.5)
    assert not wants(Adaptive(2.0, relative=True, of="delta"), delta=1.0, delta_at_retrieval=0.5)


def test_warmup_holds_pulls_back():
    assert fired(Tau(2, warmup=5), [1.0] * 10) == [6, 8, 10]
    assert fired(Never(warmup=3, max_silence=1), [1.0] * 5) == [4, 5]


def test_max_silence_pulls_at_the_latest_then():
    assert fired(Never(max_silence=4), [1.0] * 13) == [4, 8, 12]
    assert fired(Tau(10, max_silence=4), [1.0] * 20) == [4, 8, 10, 14, 18, 20]
    assert fired(Never(max_silence=4), [1.0] * 6, fail=True) == [4, 5, 6], "a failure does not count as a retrieval"


@dataclass(frozen=True)
class Every(Policy):
    """A policy of some other package."""

    third: int = 3

    def decide(self, state: None, observation: Observation) -> tuple[bool, None]:
        return observation.step % self.third == 0, state


def at_least(length: float):
    return lambda seen: seen.travelled >= length


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install another package with three policies, and a broken one, as importlib.metadata tells of them."""
    module = types.ModuleType("some_package")
    vars(module).update(every=Every, at_least=at_least, wrong=lambda: 7)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    values = {"every": "every", "at-least": "at_least", "wrong": "wrong"}
    values = {name: f"some_package:{value}" for name, value in values.items()}
    values |= {name: f"broken_package:{name}" for name in ("gone", "tau")}
    points = (importlib.metadata.EntryPoint(*named, policies.ENTRY_POINT_GROUP) for named in values.items())
    monkeypatch.setattr(packages, "entry_points", importlib.metadata.EntryPoints(points).select)


def test_installed_policies_have_names_too(installed: None):
    """Only the one that is named is imported, and none for a built-in name."""
    assert policies.parse("every:4,warmup=2") == Every(4, warmup=2)
    policy = policies.parse("at-least:length=2.5")
    assert wants(policy, travelled=2.5) and not wants(policy, travelled=2.4)
    assert policies.parse("tau:3") == Tau(3)


@pytest.mark.fault(66)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (5, "not one of type int"),
        (Tau, "not the class Tau"),
        (SyncManager(policies.parse("never")), "not one of type SyncManager"),
    ],
)
def test_an_object_that_is_no_policy_is_refused(given: Any, told: str):
    with pytest.raises(UsageError, match=f"a spec such as 'tau:10', a policy or a function is required, {told}$"):
        policies.parse(given)


def test_installed_policies_are_named_when_a_spec_is_wrong(installed: None):
    with pytest.raises(UsageError, match="did you mean 'every'"):
        policies.parse("evry")
    with pytest.raises(UsageError, match="returns a int, not a policy or a function"):
        policies.parse("wrong")
    with pytest.raises(UsageError, match=r"'gone'.*No module named 'broken_package'") as raised:
        policies.parse("gone:1")
    assert isinstance(raised.value, GossipxError)
