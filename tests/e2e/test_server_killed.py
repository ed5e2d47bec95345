"""A server's process is killed while workers train, in real processes: no acknowledged push is lost.

With bsp, and servers that do not train, a run whose server is killed must end with
the same models as an undisturbed run, to the last bit.
"""

from __future__ import annotations

import pytest

from runs import Folder, Process, Run, children, differences, kill_processes, one_line

pytestmark = pytest.mark.fault(39)

BRIEF = ("--batch-size", "8", "--eval-interval", "0", "--log-interval", "1", "--peer-timeout", "3", "--servers-only")

AGAIN = """
import os, runpy, sys
os.environ.update(GOSSIPX_CONFIG=sys.argv[1] + "/config.toml", GOSSIPX_PEERS=sys.argv[1] + "/hosts.txt")
os.environ.update(GOSSIPX_RANK=sys.argv[2], GOSSIPX_RESUME=",".join(sys.argv[3:]))
runpy.run_module("gossipx.launch.loops.train", run_name="__main__")
"""
"""Starts a peer of a run again, as docs/own-loop.md says; a third argument makes it resume from its checkpoints."""


def killed(process: Process, here: Folder, rank: int, least: int = 0) -> None:
    """Kill the peer ``rank``, a server, once a worker has pulled something, and has made 10 ** ``least`` iterations."""
    process.line(rf"{here.names[-1]} train \d{{{least + 1},}}/")
    kill_processes(children(process.pid)[rank])


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [(), ("1",)], ids=["", "GOSSIPX_RESUME"])
def test_it_is_restored_from_its_checkpoint_and_its_journal(three: Folder, resumes: tuple[str, ...]) -> None:
    options = (*BRIEF, "--servers", "0", "--checkpoint-every", "40", "--iterations", "250")
    whole = three.run(*options, name="whole")
    process = three.start_run(*options)
    killed(process, three, 0, least=len(resumes))
    again = three.start("-c", AGAIN, three.path / "x", "0", *resumes, fresh=True)
    run = Run(three.path / "x", process.end(code=0))
    came = again.end(code=0)
    assert "shard 0 is restored from its checkpoint and its journal" in came.errors, came.shown
    assert [max(differences(whole.model(rank), run.model(rank)).values()) for rank in (1, 2)] == [0, 0]


@pytest.mark.fault(44)
@pytest.mark.fault(56)
@pytest.mark.parametrize(
    ("sync", "options"),
    [
        ("bsp", ("--servers-only",)),
        pytest.param("bsp", (), marks=pytest.mark.slow),
        pytest.param("asp", ("--checkpoint-every", "40", "--no-journal"), marks=pytest.mark.slow),
    ],
    ids=["no checkpoints", "a server that trains", "no journal"],
)
def test_workers_continue_with_a_server_that_lost_its_state(three: Folder, sync: str, options: tuple[str, ...]) -> None:
    brief = [one for one in BRIEF if one != "--servers-only"]
    process = three.start_run(*brief, "--servers", "0", "--sync", sync, "--iterations", "250", *options)
    killed(process, three, 0)
    again = three.start("-c", AGAIN, three.path / "x", "0")
    ended, came = process.end(code=0), again.end(code=0)
    assert "shard 0 was lost when this server was killed: it continues from clock" in came.errors, came.shown
    for rank in (1, 2):
        told = f"[{three.names[rank]}] peer 0, a server, was restarted: the state of shard 0 is lost"
        assert told in ended.output, ended.shown


def test_workers_stop_without_it_if_configured(three: Folder) -> None:
    """With no peer to take the only server's place, all end soon after ``--peer-timeout``, with one line why."""
    process = three.start_run(*BRIEF, "--servers", "0", "--server-lost", "stop", "--iterations", "100000")
    killed(process, three, 0)
    ended = process.end()
    assert one_line(ended, 4) == "peer 0, a server, is lost, and --server-lost is stop"
    assert f"peer {three.names[0]} is lost: killed by SIGKILL" in ended.output
