"""Managers that a script passes in place of a peer's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ports import places
from torch import nn

import gossipx
from gossipx import policies
from gossipx.errors import UsageError
from gossipx.settings import files
from runs import TEN_LINES, Folder

SPARE = """
class Spare(gossipx.SyncManager):
    def step(self, step, delta, drift=None):
        return super().step(step, delta, drift) and step % 20 == 0
"""
COUNTING = """
from collections import Counter

class Counting(gossipx.CommManager):
    sent = Counter()

    def request(self, to, request, **rest):
        self.sent[type(request).__name__] += 1
        return super().request(to, request, **rest)
"""


def training(arguments: str, before: str = "", after: str = "") -> str:
    joined = before + TEN_LINES.replace("(model, optimizer)", f"(model, optimizer, {arguments})")
    return joined + "with peer:\n    train(peer, model, optimizer, 40)\n" + after


@pytest.mark.fault(66)
def test_a_sync_manager_of_a_scripts_own_decides(two: Folder) -> None:
    """A subclass is made with the run's policy, and is recorded; a run by that file asks for it again."""
    options = ("--blocking", two.script(training("sync_manager=Spare", SPARE)), two.path)
    run = two.run("--policy", "tau:5", *options)
    assert run.summary["retrievals"] == [2, 2], "the policy alone would have pulled eight times"
    assert run.summary["policy"] == "object Spare:policy=tau:5"
    config = run.directory / "config.toml"
    assert files.resolve(files.load(config)).decides == "object Spare:policy=tau:5"
    again = two.run("--config", config, *options, name="again")
    assert again.summary["retrievals"] == [2, 2]
    asked = "the policy is the object Spare:policy=tau:5 of a script, which no setting can name: pass it as"
    assert asked in two.refused("--config", config, name="built-in")


@pytest.mark.fault(66)
def test_an_object_with_the_interface_has_a_policy_of_its_own(two: Folder) -> None:
    made = "sync_manager=Spare(gossipx.policies.parse('tau:10'), seed=1)"
    script = two.script(training(made, SPARE))
    run = two.run("--blocking", script, two.path)
    assert run.summary["retrievals"] == [2, 2]
    assert run.summary["policy"] == "object Spare"
    config = run.directory / "config.toml"
    again = two.run("--config", config, script, two.path, name="again")
    assert again.summary["retrievals"] == [2, 2]
    told = "has no effect, since sync_manager= is an object with a policy of its own: leave one out"
    assert f"--policy tau:5 {told}" in two.refused("--policy", "tau:5", script, two.path, name="given")
    both = two.script(training(f"policy=lambda seen: True, {made}", SPARE))
    assert f"policy= {told}" in two.refused(both, two.path, name="both")


def test_with_servers_a_sync_manager_is_told_that_it_has_no_effect(two: Folder) -> None:
    run = two.run("--servers", "0", two.script(training("sync_manager=Spare", SPARE)), two.path)
    assert "sync_manager= has no effect, since a parameter server uses --sync instead" in run.ended.shown


def test_a_comm_manager_of_a_scripts_own_sends_and_receives(two: Folder) -> None:
    script = two.script(training("comm_manager=Counting", COUNTING, "tell(peer, **Counting.sent)\n"))
    run = two.run("--policy", "tau:10", "--blocking", script, two.path)
    assert run.summary["retrievals"] == [4, 4]
    assert all(two.told(rank)["PullRequest"] >= 4 and "ArriveRequest" in two.told(rank) for rank in range(2))


INTERFACE = [name for name in dir(gossipx.SyncManager(policies.Never())) if name[0] != "_"]


@pytest.mark.fault(66)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sync_manager": object()}, "of type object has no 'policy': give a subclass of gossipx.SyncManager"),
        (
            {"sync_manager": type("Old", (), dict.fromkeys({*INTERFACE} - {"fired"}))()},
            "of type Old has no 'fired': give",
        ),
        (
            {"sync_manager": dict},
            "sync_manager= is the class dict: give a subclass of gossipx.SyncManager or an object",
        ),
        (
            {"sync_manager": type("Told", (), dict.fromkeys(INTERFACE, "tau:10"))()},
            "of type Told has a policy of type str",
        ),
        ({"comm_manager": 3}, "comm_manager= is of type int: give a subclass of gossipx.CommManager, or a function"),
        ({"comm_manager": lambda rank: rank}, "does not take CommManager's arguments (got an unexpected keyword"),
        ({"comm_manager": lambda **rest: rest}, "comm_manager= of type dict has no 'trust': give a subclass of"),
    ],
)
def test_a_wrong_manager_is_refused_in_one_line(tmp_path: Path, given: dict[str, Any], told: str) -> None:
    (tmp_path / "hosts.txt").write_text(f"{places(1)[0]}\n")
    with pytest.raises(UsageError) as raised:
        gossipx.join(nn.Linear(4, 1), peers=tmp_path / "hosts.txt", rank=0, logdir=str(tmp_path), **given)
    assert told in str(raised.value) and "\n" not in str(raised.value)
