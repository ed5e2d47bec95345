"""Random kills of peers, hubs, servers and workers, and restarts, in real processes: every run ends in bounded time.

All that finish hold the same model, or the run says that they do not, by exit code 3.
"""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import pytest

from runs import Folder, Process, Run, children, differences, folder, is_running, kill_processes

MODES = {
    "gossip": ("--policy", "tau:20", "--iterations", "4000"),
    "hub": ("--hub", "0", "--iterations", "4000"),
    "bsp": ("--servers", "0", "--sync", "bsp", "--iterations", "1500"),
    "ssp": ("--servers", "0,1", "--sync", "ssp:staleness=3", "--iterations", "1500"),
    "hybrid": ("--servers", "0", "--sync", "hybrid:fixed=2,wait=true", "--iterations", "1500"),
}
SERVERS = {"bsp": (0,), "ssp": (0, 1), "hybrid": (0,)}
PEERS, KILLS = 4, 6
BRIEF = ("--batch-size", "8", "--eval-interval", "0", "--log-interval", "1", "--peer-timeout", "3")
AGAIN = """
import os, runpy, sys
os.environ.update(GOSSIPX_CONFIG=sys.argv[1] + "/config.toml", GOSSIPX_PEERS=sys.argv[1] + "/hosts.txt")
os.environ.update(GOSSIPX_RANK=sys.argv[2])
runpy.run_module("gossipx.launch.loops.train", run_name="__main__")
"""


class Peers:
    """The processes of a run's peers, those that were started again included."""

    def __init__(self, here: Folder, run: Process, servers: tuple[int, ...]):
        self._here = here
        self._servers = servers
        self._pids = children(run.pid)
        self._first = set(self._pids.values())
        self.again: list[Process] = []

    def kill(self, rng: random.Random) -> None:
        """Kill one of those that run, but not the last that the run has started itself, with which it would end.

        A server, which workers wait for, is always started again, others mostly, and always if only one is left.
        """
        running = [rank for rank, pid in self._pids.items() if is_running(pid)]
        first = [rank for rank in running if self._pids[rank] in self._first]
        rank = rng.choice([rank for rank in running if len(first) > 1 or rank not in first])
        kill_processes(self._pids[rank])
        if rng.random() < 0.6 or rank in self._servers or len(running) == 2:
            self.again.append(self._here.start("-c", AGAIN, self._here.path / "x", str(rank)))
            self._pids[rank] = self.again[-1].pid


def furthest(line: str) -> float:
    """Return the largest part of their iterations that peers in training have made, from 0 to 1."""
    return max(int(made) / int(of) for made, of in re.findall(r" train (\d+)/(\d+)", line))


@pytest.mark.fault(1, 39, 44, 51)
@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_every_run_ends_with_equal_models_or_says_that_it_does_not(tmp_path: Path, mode: str) -> None:
    """Thirty kills in all."""
    rng = random.Random(mode)
    with folder(tmp_path, PEERS) as here:
        run = here.start_run(*BRIEF, *MODES[mode])
        run.line(r" train \d+/")
        peers = Peers(here, run, SERVERS.get(mode, ()))
        progress = 0.0
        for when in sorted(rng.uniform(0.0, 0.8) for _ in range(KILLS)):
            while progress < when:
                progress = max(progress, furthest(run.line(r" train \d+/")))
            peers.kill(rng)
        ended = run.end()
        restarted = [process.end() for process in peers.again]
    assert ended.code in (0, 3), ended.shown
    for one in restarted:
        assert one.code in (0, 3, -signal.SIGKILL), one.shown  # it may have been killed, too
    if ended.code == 0:
        made = Run(here.path / "x", ended)
        finished = [rank for rank, name in enumerate(here.names) if name not in made.summary["lost"]]
        assert finished
        for rank in finished:
            assert max(differences(made.model(finished[0]), made.model(rank)).values()) <= 1e-6, ended.shown
