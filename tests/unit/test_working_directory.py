"""A script that changes its working directory: every path was made absolute when it was read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from ports import places
from torch import nn

import gossipx
from gossipx.errors import UsageError
from gossipx.integrations.ddp import PendingJoin
from gossipx.launch.environment import ENV_RESUME
from gossipx.runtime.checkpoints import store_of
from gossipx.settings import files
from gossipx.settings.sections import KEYS
from gossipx.solver.net import snapshot_prefix
from gossipx.topology import topology_from

pytestmark = pytest.mark.fault(73)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a hosts file of one peer and an empty directory ``elsewhere``."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "hosts.txt").write_text(f"{places(1)[0]}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(directory: Path | None, steps: int = 4, **settings: object) -> gossipx.Peer:
    """Join a run of one peer with relative paths, train in another ``directory``, and return the peer."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peer = gossipx.join(model, optimizer, peers="hosts.txt", checkpoint_every=2, peer_timeout=20.0, **settings)
    with peer:
        for step in range(steps):
            if step == 1 and directory is not None:
                os.chdir(directory)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return peer


@pytest.mark.parametrize("config_file", [False, True])
def test_results_of_a_script_stay_together(here: Path, config_file: bool) -> None:
    (here / "settings.toml").write_text('[run]\nlogdir = "runs"\nname = "joined"\n')
    (here / "secret").write_text("an unguessable text")
    (here / "secret").chmod(0o600)
    settings = {"config_file": "settings.toml"} if config_file else {}
    peer = trained(here / "elsewhere", secret_file="secret", **settings)
    assert not any((here / "elsewhere").iterdir())
    assert peer.directory == here / "runs" / "joined" / "peer-00"
    assert store_of(here / "runs" / "joined", 0).find() == 4 and (peer.directory / "model.safetensors").exists()


def test_a_callback_joins_where_it_was_made(here: Path) -> None:
    """Before the training begins, which joins."""
    joining = PendingJoin(peers="hosts.txt", rank=0, settings={"secret_file": "secret"})
    before = joining.directory
    os.chdir("elsewhere")
    assert joining.directory == before == here / "runs" / "joined" / "peer-00"
    assert joining.run.exchange.secret_file == str(here / "secret")


def test_a_resume_that_finds_nothing_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script was started in another directory than before."""
    trained(None)
    monkeypatch.setenv(ENV_RESUME, "1")
    assert trained(None, 0).iteration == 4
    os.chdir("elsewhere")
    os.link(here / "hosts.txt", "hosts.txt")
    where = here / "elsewhere/runs/joined/peer-00/checkpoints"
    with pytest.raises(UsageError, match=f"^{where}: GOSSIPX_RESUME is set, but no complete checkpoint is here: unset"):
        trained(None)


def test_the_settings_of_a_run_name_its_files_from_anywhere(here: Path) -> None:
    """Its peers, and ``gossipx run --resume``, may run in another directory."""
    (here / "ring.edges").touch()
    (here / "topologies").mkdir()
    (here / "topologies" / "mine.edges").write_text("0 1\n")
    given = {key.name: "a/b" for key in KEYS.values() if key.absolute is not None}
    assert given.keys() >= {"peers", "logdir", "data_dir", "secret_file", "tls_cert", "tls_key", "tls_ca"}
    given |= {"topology": "ring.edges"}
    config = files.resolve(given)
    (here / "config.toml").write_text(files.dump(config), encoding="utf-8")
    read = files.load(here / "config.toml")
    assert {name: read[name] for name in given} == {name: str(here / value) for name, value in given.items()}
    for name, value in {"topology": "mine", "data_dir": "../x"}.items():
        (here / "config.toml").write_text(files.dump(files.resolve({name: value})), encoding="utf-8")
        os.chdir("elsewhere")
        found = Path(files.load(here / "config.toml")[name])
        assert found == (here / "topologies/mine.edges" if name == "topology" else here / "../x")
        os.chdir(here)
    assert topology_from(str(here / "topologies" / "mine.edges")).size == 2


@pytest.mark.parametrize("name", ["ring", "full", "two-sites-8", "torus:rows=2", "no-such"])
def test_names_that_are_no_files_stay_names(here: Path, name: str) -> None:
    """``two-sites-8`` comes with gossipx, and each machine has its own."""
    found = files.absolute(files.resolve({"topology": name})).values["topology"]
    assert found == name


def test_snapshots(here: Path) -> None:
    prefixes = [snapshot_prefix(*given) for given in (("", None), ("s", None), ("", Path("a.prototxt")), ("d/", None))]
    os.chdir("elsewhere")
    assert prefixes == [here / "solver", here / "s", here / "a", here / "d" / "solver"]
