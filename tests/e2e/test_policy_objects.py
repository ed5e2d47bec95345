"""Policies that a script passes as an object or a function: what is recorded of them, and what they may look at."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gossipx.settings import files
from gossipx.settings.modes import HasPolicy
from runs import TEN_LINES, Folder

LATE = """
from dataclasses import dataclass
from gossipx.policies import Policy

@dataclass(frozen=True)
class Late(Policy):
    period: int

    def decide(self, state, observation):
        return observation.step > 5 and observation.step % self.period == 0, state
"""


def training(policy: str, before: str = "") -> str:
    loop = "with peer:\n    train(peer, model, optimizer, 20)\n"
    return before + TEN_LINES.replace("(model, optimizer)", f"(model, optimizer, policy={policy})") + loop


@pytest.mark.fault(66)
@pytest.mark.parametrize(
    ("script", "recorded"),
    [
        (training("Late(4)", LATE), "object Late:period=4"),
        (training("lambda seen: seen.step % 5 == 0"), "function <lambda>"),
        (training("gossipx.policies.Tau(4)"), "tau:period=4"),
    ],
    ids=["object", "function", "built-in"],
)
def test_a_policy_object_is_recorded_as_that(two: Folder, script: str, recorded: str) -> None:
    """And a run by the settings file needs the object again, or another policy, unless a spec can name it."""
    run = two.run("--blocking", two.script(script), two.path)
    assert min(run.summary["retrievals"]) > 0
    assert run.summary["policy"] == recorded
    events = EventAccumulator(str(run.directory / "all"))
    events.Reload()
    began = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert HParamsPluginData.FromString(began).session_start_info.hparams["policy"].string_value == recorded
    config = run.directory / "config.toml"
    mode = files.resolve(files.load(config)).mode
    assert isinstance(mode, HasPolicy) and mode.policy == recorded

    again = two.run("--config", config, two.script(script), two.path, name="again")
    assert again.summary["retrievals"] == run.summary["retrievals"]
    if recorded.startswith("tau"):
        return
    asked = f"the policy is the {recorded} of a script, which no setting can name: pass it as gossipx.join(policy=...)"
    assert asked in two.refused("--config", config, name="built-in")
    other = two.script(TEN_LINES + "with peer:\n    train(peer, model, optimizer, 20)\n", "other.py")
    assert asked in two.refused("--config", config, other, two.path, name="other")
    assert two.run("--config", config, "--policy", "tau:5", other, two.path, name="tau").summary["policy"] == "tau:5"


def test_a_function_may_look_at_the_drift_if_it_says_so(two: Folder) -> None:
    """Without saying so, one line tells how."""
    far = "\ndef far(seen):\n    return seen.drift > 0.01\n"
    told = two.refused(two.script(training("far", far)), two.path)
    assert "reads observation.drift, which is not measured for it" in told
    assert told.endswith("set uses_drift = True on the function or class")
    script = two.script(training("far", f"{far}far.uses_drift = True\n"))
    run = two.run("--blocking", script, two.path, name="measured")
    assert run.summary["policy"] == "function far" and min(run.summary["retrievals"]) > 0


# --- Figures of runs --------------------------------------------------------------------------------


SMALL_STEPS = """
torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 150)
"""
"""Steps of at most 0.001: their lengths never differ by 0.02."""


@pytest.mark.fault(47)
def test_adaptive_alone_exchanges_models_of_any_step_length(two: Folder) -> None:
    run = two.run("--policy", "adaptive", "--peer-timeout", "20", two.script(SMALL_STEPS), two.path)
    assert min(run.summary["retrievals"]) > 0
    ran = "adaptive:threshold=0.75,relative=true,max_silence=100"
    assert run.summary["policy"] == ran
    assert files.resolve(files.load(run.directory / "config.toml")).decides == ran


STEPS = """
model = nn.Linear(1, 1, bias=False)
with gossipx.join(model) as peer:
    while peer.iteration < 40:
        model.weight.data += 10 if peer.iteration + 1 == 13 else 4
        peer.step()
"""


def test_a_decision_between_two_records_is_recorded_with_what_made_the_policy_fire(two: Folder) -> None:
    """Section V-B: adaptive fires where |Δ_t − Δ_r| exceeds its threshold: at 1, where Δ_r is 0, and at 13 and 14.

    After the request the difference is 0, which nobody has seen. Figure 3 is the deltas of each period, added up,
    against the number of the retrieval.
    """
    run = two.run("--policy", "adaptive:threshold=2", "--log-interval", "10", "--blocking", two.script(STEPS), two.path)
    for rank in range(2):
        events = EventAccumulator(str(run.directory / f"peer-{rank:02d}"), size_guidance={"scalars": 0}).Reload()
        names = ("sync/delta_difference", "sync/decisions", "sync/travelled", "retrieval/delta", "retrieval/distance")
        seen = {name: {one.step: one.value for one in events.Scalars(name)} for name in names}
        assert list(seen["sync/delta_difference"]) == [1, 10, 13, 14, 20, 30, 40]
        assert [step for step, value in seen["sync/delta_difference"].items() if value > 2] == [1, 13, 14]
        assert seen["sync/decisions"] == {1: 1, 10: 1, 13: 2, 14: 3, 20: 3, 30: 3, 40: 3}
        way = 11 * 4 + 10
        assert [seen["sync/travelled"][step] for step in (13, 14)] == pytest.approx([way, 4], abs=0.01)
        assert seen["retrieval/delta"] == pytest.approx({1: 4, 2: way, 3: 4}, abs=0.01)
        assert list(seen["retrieval/distance"]) == [1, 2, 3]
