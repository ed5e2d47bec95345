"""Models trained in 16 bits, and sampled deltas, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runs import PRELUDE, differences, folder

HALF = (
    PRELUDE
    + """
model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with gossipx.join(model, optimizer) as peer:
    while not all_have(peer, "mixed", peer._role.sync.retrievals > 0, range(3)):
        optimizer.zero_grad()
        (model(batch(peer).bfloat16()).float() - 1).square().mean().backward()
        optimizer.step()
tell(peer, dtype=str(model[0].weight.dtype))
"""
)


@pytest.mark.parametrize(
    "options",
    [
        ("--delta", "sampled", "--policy", "tau:5"),
        pytest.param(("--delta", "exact", "--policy", "tau:20", "--exchange", "waves"), marks=pytest.mark.slow),
        pytest.param(("--delta", "sampled", "--policy", "tau:5", "--mode", "pushpull"), marks=pytest.mark.slow),
    ],
    ids=["pulls", "waves", "pairs"],
)
def test_peers_in_bfloat16_agree(tmp_path: Path, options: tuple[str, ...]) -> None:
    """This includes requests that arrive within a step, at a peer that keeps no copy of the last boundary."""
    with folder(tmp_path, 3) as here:
        run = here.run(*options, "--peer-timeout", "20", here.script(HALF), here.path)
        assert [here.told(rank)["dtype"] for rank in range(3)] == ["torch.bfloat16"] * 3
    summary = run.summary
    assert min(summary["retrievals"]) > 0, summary
    assert (sum(summary["poisoned"]), summary["lost"]) == (0, [])
    assert {tensor.dtype for tensor in run.model(0).values()} == {torch.bfloat16}
    assert all(max(differences(run.model(0), run.model(rank)).values()) == 0 for rank in (1, 2))


def test_the_built_in_task_with_a_sampled_delta(tmp_path: Path) -> None:
    with folder(tmp_path, 3) as here:
        run = here.run("--delta", "sampled", "--policy", "adaptive:threshold=0.005", "--iterations", "60")
    assert sum(run.summary["retrievals"]) > 0 and run.summary["lost"] == []
    assert all(max(differences(run.model(0), run.model(rank)).values()) <= 1e-6 for rank in (1, 2))
