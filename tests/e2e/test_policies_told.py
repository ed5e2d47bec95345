"""Warnings and figures of runs whose policy does not do what the user asked for."""

from __future__ import annotations

import pytest

from gossipx.settings import files
from runs import Folder

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
