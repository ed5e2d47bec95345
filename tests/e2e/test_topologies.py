"""Every file in topologies/ from the command line, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossipx.topology import shipped
from runs import differences, folder

SCRIPT = """
torch.manual_seed(int(os.environ["GOSSIPX_RANK"]))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 30)
"""
SIZES = {name: int(name.rpartition("-")[2]) if name[-1].isdigit() else 4 for name in shipped()}
QUICK = {"slow-link-6": ("--weights", "metropolis")}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(shipped())]
)
def test_a_run_over_every_shipped_topology(tmp_path: Path, name: str) -> None:
    """All pull, nobody is lost, and the finish leaves all equal."""
    with folder(tmp_path, SIZES[name]) as here:
        run = here.run(
            *("--topology", shipped()[name].resolve(), "--policy", "tau:3", "--blocking", *QUICK.get(name, ())),
            *(here.script(SCRIPT), tmp_path),
        )
        summary = run.summary
        assert summary["lost"] == [] and min(summary["retrievals"]) >= 5, summary
        for rank in range(1, SIZES[name]):
            assert max(differences(run.model(0), run.model(rank)).values()) < 1e-5


def test_schedules_and_names_from_the_command_line(tmp_path: Path) -> None:
    with folder(tmp_path, 4) as here:
        options = ("--topology", "exponential", "--schedule", "one-peer", "--policy", "tau:3", "--blocking")
        run = here.run(*options, here.script(SCRIPT), tmp_path)
        assert min(run.summary["retrievals"]) > 0
        config = (run.directory / "config.toml").read_text()
        assert 'topology = "exponential"\nschedule = "one-peer"\nweights = "uniform"\n' in config
