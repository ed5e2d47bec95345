"""The curves of what a policy decided on, and of its decisions."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runs import Folder, Run

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
