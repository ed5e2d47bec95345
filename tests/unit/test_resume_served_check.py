"""The checkpoints from which ``gossipx run --resume`` restores workers and shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gossipx.assembly.presets import effective_config
from gossipx.checkpoint import pack
from gossipx.errors import UsageError
from gossipx.launch.directory import resume
from gossipx.runtime.checkpoints import store_of
from gossipx.runtime.driver.shards import CLOCK, SERVERS, store_of_shard
from gossipx.settings import files

NAMES = ["a", "b", "c"]
Shards = Mapping[int, Sequence[tuple[int, tuple[int, ...]]]]


def check(
    path: Path,
    workers: Mapping[int, Sequence[int]],
    shards: Shards,
    servers: str = "0,1",
    here: Sequence[int] = (0, 1, 2),
) -> tuple[int | None, str | None]:
    """Return the iteration that all resume from, and the servers. ``shards`` has clocks by the servers at that time."""
    (path / "x").mkdir()
    (path / "x" / "hosts.txt").write_text("".join(f"{name}\n" for name in NAMES))
    for rank, iterations in workers.items():
        for iteration in iterations:
            store_of(path / "x", rank, keep=9).save(iteration, {"model": pack({}, "model")})
    for index, clocks in shards.items():
        for clock, then in clocks:
            store_of_shard(path / "x", index, keep=9).save(clock, {CLOCK: pack({SERVERS: list(then)}, CLOCK)})
    settings = files.resolve({"name": "x", "logdir": str(path), "servers": servers, "iterations": 1000})
    at, settings = resume.check(settings, NAMES, [0, 1, 2], has_script=False, before=len(NAMES))
    return at, settings.values["servers"]


def test_the_newest_iteration_that_all_have(tmp_path: Path) -> None:
    then = (0, 1)
    shards = {0: [(20, then), (40, then), (60, then)], 1: [(20, then), (40, then)]}
    assert check(tmp_path, {0: [20, 40], 1: [40, 60], 2: [20, 40, 60]}, shards) == (40, "0,1")


def test_that_of_clock_0_is_none(tmp_path: Path) -> None:
    then = (0, 1)
    with pytest.raises(UsageError, match="no peer has a complete checkpoint"):
        check(tmp_path, {}, {0: [(0, then)], 1: [(0, then)]})


def test_where_no_iteration_is_common_each_resumes_from_its_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With asp fast workers are far ahead; by the clock on the wall no two take theirs at one iteration."""
    then = (0, 1)
    found = check(tmp_path, {0: [842, 955], 1: [845, 959], 2: [841]}, {0: [(836, then), (950, then)], 1: [(949, then)]})
    assert found == (None, "0,1")
    assert "(worker 0: 955, worker 1: 959, worker 2: 841, shard 0: 950, shard 1: 949)" in caplog.text


def test_shards_of_other_servers_go_on_by_these(tmp_path: Path) -> None:
    """As SIGTERM came, peer 2 was handed what lay with the others; one of these had taken a checkpoint before."""
    shards: Shards = {0: [(90, (0, 1)), (97, (2,))], 1: [(95, (0, 1))]}
    assert check(tmp_path, {0: [90], 1: [96], 2: [98]}, shards) == (None, "2")


def test_workers_that_agree_do_not_outweigh_the_shards_of_other_servers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As SIGTERM came, peer 2 was handed both shards; all workers happened to be at the same iteration."""
    assert check(tmp_path, {0: [28], 1: [28], 2: [28]}, {0: [(27, (2,))]}) == (None, "2")
    assert "has no checkpoint" not in caplog.text


def test_servers_of_which_all_shards_are_there_come_first(tmp_path: Path) -> None:
    shards: Shards = {0: [(50, (1,))], 1: [(50, (0, 1))]}
    assert check(tmp_path, {0: [50], 1: [50], 2: [50]}, shards) == (50, "1")


def test_shards_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    shards: Shards = {0: [(97, (2, 1))], 1: [(95, (0, 1))]}
    with pytest.raises(UsageError, match=r"different servers \(shard 0 at 97: 2,1; shard 1 at 95: 0,1\)"):
        check(tmp_path, {0: [90], 1: [96], 2: [98]}, shards)


def test_a_shard_without_any_begins_anew_beside_one_that_is_uneven_with_the_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert check(tmp_path, {0: [51], 1: [51], 2: [51]}, {0: [(50, (0, 1))]}) == (None, "0,1")
    assert "(worker 0: 51, worker 1: 51, worker 2: 51, shard 0: 50)" in caplog.text
    assert "shard 1 has no checkpoint: it starts from its server's model" in caplog.text


@pytest.mark.parametrize(("newest", "at"), [(90, 90), (91, None)])
def test_a_shard_that_has_none_is_told(
    tmp_path: Path, newest: int, at: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert check(tmp_path, {0: [90], 1: [90], 2: [newest]}, {}) == (at, "0,1")
    for index in (0, 1):
        assert f"shard {index} has no checkpoint: it starts from its server's model" in caplog.text


# --- The settings with which a run resumes, from those that it has recorded and those that are given now


def resumed(directory: Path, given: dict[str, Any], **first: Any) -> tuple[str, str]:
    """Return policy and outer optimizer of a run with settings ``first`` that resumes with ``given``."""
    began = effective_config(files.resolve({"name": directory.name, **first}), 2, has_script=False)
    (directory / "config.toml").write_text(files.dump(began))
    (directory / "hosts.txt").write_text("localhost slots=2\n")
    settings, _, _ = resume.resumed_settings(str(directory), given, [], None)
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
        resume.resumed_settings(str(tmp_path), {"peers": str(hosts)}, [], None)


@pytest.mark.parametrize("peers", [1, 3])
def test_in_gossip_the_number_of_peers_may_change(tmp_path: Path, peers: int) -> None:
    resumed(tmp_path, {})
    hosts = tmp_path / "others.txt"
    hosts.write_text(f"localhost slots={peers}\n")
    settings, used, _ = resume.resumed_settings(str(tmp_path), {"peers": str(hosts)}, [], None)
    assert used == hosts and resume.peers_before(settings) == 2
