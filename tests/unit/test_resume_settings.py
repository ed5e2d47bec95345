"""The settings with which a run resumes, from those that it has recorded and those that are given now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossipx.assembly.presets import effective_config
from gossipx.errors import UsageError
from gossipx.launch.directory import resume
from gossipx.settings import files


def resumed(directory: Path, given: dict[str, Any], **first: Any) -> tuple[str, str]:
    """Return policy and outer optimizer of a run with settings ``first`` that resumes with ``given``."""
    began = effective_config(files.resolve({"name": directory.name, **first}), 2, has_script=False)
    (directory / "config.toml").write_text(files.dump(began))
    (directory / "hosts.txt").write_text("localhost slots=2\n")
    settings, _, _ = resume.settings_of(str(directory), given, [], None)
    made = effective_config(settings, 2, has_script=False)
    return made.decides, made.values["outer"]


@pytest.mark.parametrize("across", ["momentum:0.6", "none"])
def test_another_period_keeps_the_momentum_that_checkpoints_contain(tmp_path: Path, across: str) -> None:
    first = {"policy": "tau:50", "outer": across}
    assert resumed(tmp_path, {"policy": "tau:20"}, **first) == ("tau:20", across)
    assert resumed(tmp_path, {}, **first) == ("tau:50", across)


@pytest.mark.parametrize(
    ("first", "around"), [({"hub": "0"}, "a hub"), ({"servers": "1"}, "servers"), ({"mode": "server"}, "servers")]
)
def test_with_a_hub_or_servers_the_number_of_peers_cannot_change(
    tmp_path: Path, first: dict[str, Any], around: str
) -> None:
    resumed(tmp_path, {}, **first)
    hosts = tmp_path / "three.txt"
    hosts.write_text("localhost slots=3\n")
    told = f"--peers names 3 peers, but the run to resume has 2: with {around} the number cannot change"
    with pytest.raises(UsageError, match=told):
        resume.settings_of(str(tmp_path), {"peers": str(hosts)}, [], None)


@pytest.mark.parametrize("peers", [1, 3])
def test_in_gossip_the_number_of_peers_may_change(tmp_path: Path, peers: int) -> None:
    resumed(tmp_path, {})
    hosts = tmp_path / "others.txt"
    hosts.write_text(f"localhost slots={peers}\n")
    settings, used, _ = resume.settings_of(str(tmp_path), {"peers": str(hosts)}, [], None)
    assert used == hosts and resume.peers_before(settings) == 2
