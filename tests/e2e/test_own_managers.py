"""Managers that a script passes in place of a peer's own."""

from __future__ import annotations

import pytest

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


@pytest.mark.fault(66)
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("sync_manager=object()", "of type object has no 'policy': give a subclass of gossipx.SyncManager"),
        (
            "sync_manager=type('Empty', (gossipx.SyncManager,), {'__init__': lambda *args: None})",
            "of type Empty has no 'policy': give a",
        ),
        (
            "sync_manager=type('Old', (), {name: 0 for name in dir(gossipx.SyncManager(gossipx.policies.Never()))"
            " if name[0] != '_' and name != 'fired'})()",
            "of type Old has no 'fired': give a subclass",
        ),
        ("sync_manager=dict", "sync_manager= is the class dict: give a subclass of gossipx.SyncManager or an object"),
        (
            "sync_manager=type('Odd', (gossipx.SyncManager,), {'__init__': lambda self, policy, seed, more: None})",
            "sync_manager= Odd does not take SyncManager's arguments (missing a required argument: 'more'): give a",
        ),
        (
            "sync_manager=type('Told', (), {name: 'tau:10' for name in"
            " dir(gossipx.SyncManager(gossipx.policies.Never())) if name[0] != '_'})()",
            "sync_manager= of type Told has a policy of type str: give it one such as gossipx.policies.parse('tau:10')",
        ),
        ("comm_manager=3", "comm_manager= is of type int: give a subclass of gossipx.CommManager, or a function"),
        ("comm_manager=int", "comm_manager= int does not take CommManager's arguments ("),
        ("comm_manager=lambda rank: rank", "does not take CommManager's arguments (got an unexpected keyword argument"),
        ("comm_manager=lambda **rest: rest", "comm_manager= of type dict has no 'trust': give a subclass of"),
    ],
)  # fmt: skip
def test_a_wrong_manager_is_refused_in_one_line(two: Folder, arguments: str, told: str) -> None:
    assert told in two.refused(two.script(training(arguments)), two.path)
