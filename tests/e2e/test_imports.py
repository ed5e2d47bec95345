"""The imports of a run's processes, in new interpreters: each import slows down every run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE
from gossipx.settings import files
from gossipx.settings.sections import RunConfig
from runs import folder

LARGE = ("torch", "numba", "networkx", "tensorboard")
SCRIPT = f"""
model = nn.Linear(4, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 10)
tell(peer, modules=[name for name in {LARGE} if name in sys.modules])
"""


@pytest.mark.parametrize(
    "options",
    [
        ("--policy", "tau:5", "--topology", "ring"),
        pytest.param(("--servers", "0"), marks=pytest.mark.slow),
        pytest.param(("--hub", "1", "--policy", "tau:5"), marks=pytest.mark.slow),
    ],
    ids=["gossip", "servers", "hub"],
)
def test_a_plain_run_imports_torch_in_its_peers_only(tmp_path: Path, options: tuple[str, ...]) -> None:
    """And TensorBoard also in the parent, which writes the curves of the whole run."""
    with folder(tmp_path, 2) as here:
        start = ("-m", "gossipx", "run", "--peers", here.hosts, "--logdir", tmp_path, *options)
        ended = here.start("-X", "importtime", *start, here.script(SCRIPT), tmp_path, fresh=True).end()
        assert here.told(0)["modules"] == here.told(1)["modules"] == ["torch", "tensorboard"]
        imported = {line.rpartition("|")[2].strip() for line in ended.errors.splitlines()}
        assert ended.code == 0 and "gossipx.launch.run.children" in imported, ended.shown
        assert not imported & {"torch", "numba", "networkx"}


@pytest.mark.slow
def test_a_star_needs_networkx_and_a_codec_needs_numba(tmp_path: Path) -> None:
    with folder(tmp_path, 2) as here:
        here.run("--topology", "star", "--codec", "int8", here.script(SCRIPT), tmp_path, fresh=True)
        assert here.told(0)["modules"] == here.told(1)["modules"] == list(LARGE)


@pytest.mark.parametrize("command", ["runs", "status"])
def test_the_settings_of_a_run_are_read_without_torch(tmp_path: Path, command: str) -> None:
    """A run writes every setting into its file, so each of them is checked."""
    with folder(tmp_path, 2) as here:
        run = tmp_path / "x"
        run.mkdir()
        (run / CONFIG_FILE).write_text(files.dump(RunConfig()))
        (run / HOSTS_FILE).write_text(here.hosts.read_text())
        where = (tmp_path,) if command == "runs" else ("x", "--logdir", tmp_path)
        ended = here.start("-X", "importtime", "-m", "gossipx", command, *where, fresh=True).end()
        imported = {line.rpartition("|")[2].strip() for line in ended.errors.splitlines()}
        assert "killed" in ended.output or "not running" in ended.output, ended.shown
        assert "gossipx.settings.sections" in imported
        assert not imported & {"torch", "numba", "networkx"}
