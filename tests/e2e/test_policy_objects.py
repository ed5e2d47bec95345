"""Policies that a script passes as an object or a function: what is recorded of them, and what they may look at."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gossipx.settings import files
from gossipx.settings.modes import HasPolicy
from runs import TEN_LINES, Folder, Run

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


# --- Warnings and figures of runs whose policy does not do what the user asked for ---------------------


ADAM = """
torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 150)
"""
"""Steps of at most 0.001: their lengths never differ by 0.02."""


@pytest.mark.fault(47)
def test_adaptive_alone_exchanges_models_of_any_step_length(two: Folder) -> None:
    run = two.run("--policy", "adaptive", "--peer-timeout", "20", two.script(ADAM), two.path)
    assert min(run.summary["retrievals"]) > 0
    ran = "adaptive:threshold=0.75,relative=true,max_silence=100"
    assert run.summary["policy"] == ran
    assert files.resolve(files.load(run.directory / "config.toml")).decides == ran


@pytest.mark.fault(47)
def test_a_threshold_that_only_the_first_step_exceeds_is_told_while_training(two: Folder) -> None:
    """Before the first retrieval, the difference of delta is the whole delta: here 0.001 at first."""
    run = two.run("--policy", "adaptive:threshold=0.0008", "--peer-timeout", "20", two.script(ADAM), two.path)
    told = [
        line for line in run.ended.output.splitlines() if "has not fired in 100 iterations, since iteration" in line
    ]
    assert len(told) == 2 and all("the threshold 0.0008; lower its threshold, or give" in line for line in told)
    assert 0 < max(run.summary["retrievals"]) < 10


# --- The curves of what a policy decided on, and of its decisions --------------------------------------


Curve = list[tuple[int, float]]


def curve(run: Run, rank: int, tag: str) -> Curve:
    events = EventAccumulator(str(run.directory / f"peer-{rank:02d}"), size_guidance={"scalars": 0})
    events.Reload()
    return [(one.step, one.value) for one in events.Scalars(tag)]


def steps_of(lengths: str) -> str:
    """Return a script whose step t is ``lengths`` long, an expression of t."""
    return f"""
model = nn.Linear(1, 1, bias=False)
with gossipx.join(model) as peer:
    while peer.iteration < 40:
        t = peer.iteration + 1
        model.weight.data += {lengths}
        peer.step()
"""


def test_the_difference_of_delta_is_that_on_which_the_policy_decided(two: Folder) -> None:
    """Δ_t = t: |Δ_t − Δ_r| is 10 at each decision of tau:10. After the request it is 0, which nobody has seen."""
    run = two.run("--policy", "tau:10", "--log-interval", "10", "--blocking", two.script(steps_of("t")), two.path)
    for rank in range(2):
        measured = curve(run, rank, "sync/delta_difference")
        assert [step for step, _ in measured] == [10, 20, 30, 40]
        assert all(abs(value - 10) < 0.01 for _, value in measured), measured
        assert curve(run, rank, "sync/decisions") == [(10, 1), (20, 2), (30, 3), (40, 4)]
        # Figure 3: the deltas of each period, added up, against the number of the retrieval
        assert dict(curve(run, rank, "retrieval/delta")) == pytest.approx({1: 55, 2: 155, 3: 255, 4: 355}, abs=0.01)
        assert [number for number, _ in curve(run, rank, "retrieval/distance")] == [1, 2, 3, 4]


def test_a_decision_between_two_records_is_recorded_with_what_made_the_policy_fire(two: Folder) -> None:
    """Section V-B: adaptive fires where |Δ_t − Δ_r| exceeds its threshold: at 1, where Δ_r is 0, and at 13 and 14."""
    options = ("--policy", "adaptive:threshold=2", "--log-interval", "10", "--blocking")
    run = two.run(*options, two.script(steps_of("10 if t == 13 else 4")), two.path)
    for rank in range(2):
        seen = curve(run, rank, "sync/delta_difference")
        assert [step for step, _ in seen] == [1, 10, 13, 14, 20, 30, 40]
        fired = [step for step, value in seen if value > 2]
        assert fired == [1, 13, 14]
        assert curve(run, rank, "sync/decisions") == [(1, 1), (10, 1), (13, 2), (14, 3), (20, 3), (30, 3), (40, 3)]
        travelled = dict(curve(run, rank, "sync/travelled"))
        assert abs(travelled[13] - (11 * 4 + 10)) < 0.01 and abs(travelled[14] - 4) < 0.01
