"""Peers that are killed or stop in the finish: real processes, real sockets."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from runs import TEN_LINES, Folder, differences, folder

STRUCK = (
    TEN_LINES
    + """
from gossipx.runtime.driver.captures import Captures
if peer.rank == 1:
    merge = Captures.merge
    def struck(*arguments):
        strike(signal.SIGKILL)
        return merge(*arguments)
    Captures.merge = struck
with peer:
    train(peer, model, optimizer, 20)
"""
)
"""A script whose peer 1 kills itself as it merges its first model of the finish."""


BY_THEMSELVES = TEN_LINES.replace("optimizer)\n", "optimizer, peers=sys.argv[2], rank=int(sys.argv[3]))\n")

ASLEEP = """
from gossipx.peer.last_wave import LastWave
if peer.rank == 1:
    requested = LastWave.requested
    def slept(*arguments):
        print("falls asleep", flush=True)
        strike(signal.SIGSTOP)
        return requested(*arguments)
    LastWave.requested = slept
with peer:
    train(peer, model, optimizer, 20)
"""
"""The end of a script whose peer 1 stops itself as it is asked for its model in the finish, before it answers."""


@pytest.mark.fault(51)
def test_a_peer_killed_in_the_finish(four: Folder) -> None:
    run = four.run("--policy", "never", "--peer-timeout", "20", four.script(STRUCK), four.path)
    assert run.summary["lost"] == [four.names[1]] and run.summary["agreed"] is True
    assert "the finish left peers with different models" in run.ended.output, run.ended.shown
    assert all(max(differences(run.model(0), run.model(rank)).values()) == 0.0 for rank in (2, 3))


@pytest.mark.fault(79)
@pytest.mark.parametrize("peers", [2, 3])
def test_peers_without_a_parent_of_which_one_sleeps_until_the_others_have_ended(tmp_path: Path, peers: int) -> None:
    """The two that are awake agree, and say what they did not see; a single one cannot claim to be most of two."""
    with folder(tmp_path, peers) as here:
        path = here.script(BY_THEMSELVES.replace("[3]))", "[3]), peer_timeout=2)") + ASLEEP)
        started = [here.start(path, here.path, here.hosts, str(rank)) for rank in range(peers)]
        started[1].line("falls asleep")
        awake = [started[rank].end() for rank in range(peers) if rank != 1]
        started[1].signal(signal.SIGCONT)
        asleep = started[1].end()
    assert all(one.code == (0 if peers > 2 else 3) for one in awake), "\n".join(one.shown for one in awake)
    assert all("peer 1 was not seen to end the finish" in one.errors for one in awake), awake
    assert asleep.code == 3 and "peers hold different models" in asleep.errors, asleep.shown


@pytest.mark.fault(51, 55)
@pytest.mark.parametrize("end", ["if peer:", "with peer:"])
def test_peers_that_join_by_themselves(two: Folder, end: str) -> None:
    """One moves a weight away, and one ends with NaN; each tells by its own exit code."""
    script = f"""
{end}
    train(peer, model, optimizer, 10)
    if peer.rank == 0:
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    else:
        model[0].weight.data.fill_(float("nan"))
"""
    path = two.script(BY_THEMSELVES + script)
    started = [two.start(path, two.path, two.hosts, str(rank)) for rank in range(2)]
    ended = [process.end() for process in started]
    assert [one.code for one in ended] == [3, 1], "\n".join(one.shown for one in ended)
    assert "peers hold different models" in ended[0].errors and "NaN or Inf in its model" in ended[1].errors
