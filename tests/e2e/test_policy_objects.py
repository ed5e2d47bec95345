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


@pytest.mark.slow
def test_accuracies_before_and_after_the_finish_are_two_curves(two: Folder) -> None:
    """The first one belongs to the model that the peer has trained, and ends with it."""
    run = two.run("--iterations", "20", "--eval-interval", "10", "--policy", "never")
    for rank in range(2):
        events = EventAccumulator(str(run.directory / f"peer-{rank:02d}"))
        events.Reload()
        trained, after = (events.Scalars(f"test/accuracy{which}") for which in ("", "_after_finish"))
        assert [one.step for one in trained] == [10, 20, 20], "on 2,000 images, and at last on all"
        assert trained[-1].value == pytest.approx(run.summary["test_accuracy_before_finish"][rank])
        assert [one.step for one in after] == [20]
        assert after[0].value == pytest.approx(run.summary["test_accuracy"][rank])


@pytest.mark.slow
def test_a_peer_that_only_serves_has_no_curves_of_training(two: Folder) -> None:
    run = two.run("--iterations", "20", "--servers", "0", "--servers-only", "--sync", "asp")
    events = EventAccumulator(str(run.directory / "peer-00"))
    events.Reload()
    assert all(tag.startswith("server/") for tag in events.Tags()["scalars"]), events.Tags()["scalars"]
