"""Topologies and schedules from the command line, in real processes."""

from __future__ import annotations

from pathlib import Path

from runs import Folder, Run, differences, folder

SCRIPT = """
torch.manual_seed(int(os.environ["GOSSIPX_RANK"]))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 30)
"""


def agreed(here: Folder, size: int, *options: str | Path) -> Run:
    """Every peer of the run pulls, and the finish leaves all models equal."""
    run = here.run(*options, "--policy", "tau:3", "--blocking", here.script(SCRIPT), here.path)
    summary = run.summary
    assert summary["lost"] == [] and min(summary["retrievals"]) >= 5, summary
    for rank in range(1, size):
        assert max(differences(run.model(0), run.model(rank)).values()) < 1e-5
    return run


def test_a_run_over_a_file_of_ones_own_by_its_path(tmp_path: Path) -> None:
    """And by another schedule than the file's."""
    with folder(tmp_path, 3) as here:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "line.toml").write_text('edges = [[0, 1], [1, 2, 0.5]]\nschedule = "one-peer"\n')
        agreed(here, 3, "--topology", "mine/line.toml", "--schedule", "static")


def test_schedules_and_names_from_the_command_line(tmp_path: Path) -> None:
    with folder(tmp_path, 4) as here:
        run = agreed(here, 4, "--topology", "exponential", "--schedule", "one-peer")
        config = (run.directory / "config.toml").read_text()
        assert 'topology = "exponential"\nschedule = "one-peer"\nweights = "uniform"\n' in config
