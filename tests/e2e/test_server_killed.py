"""A server's process is killed while workers train, in real processes: no acknowledged push is lost.

With bsp, and servers that do not train, a run whose server is killed must end with
the same models as an undisturbed run, to the last bit.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from forks.client import readable

from runs import LONG, Folder, Process, Run, children, differences, folder, kill_processes, one_line

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


def same(whole: Run, other: Run, workers: list[int]) -> None:
    for rank in workers:
        assert max(differences(whole.model(rank), other.model(rank)).values()) == 0, rank


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [(), ("1",)], ids=["", "GOSSIPX_RESUME"])
def test_it_is_restored_from_its_checkpoint_and_its_journal(tmp_path: Path, resumes: tuple[str, ...]) -> None:
    options = (*BRIEF, "--servers", "0", "--checkpoint-every", "40", "--iterations", "250")
    with folder(tmp_path, 3) as here:
        whole = here.run(*options, name="whole")
        process = here.start_run(*options)
        killed(process, here, 0, least=len(resumes))
        again = here.start("-c", AGAIN, here.path / "x", "0", *resumes, fresh=True)
        ended = process.end()
        assert ended.code == 0, ended.shown
        came = again.end()
        assert came.code == 0 and "shard 0 is restored from its checkpoint and its journal" in came.errors, came.shown
        same(whole, Run(here.path / "x", ended), [1, 2])


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
def test_workers_continue_with_a_server_that_lost_its_state(
    tmp_path: Path, sync: str, options: tuple[str, ...]
) -> None:
    with folder(tmp_path, 3) as here:
        brief = [one for one in BRIEF if one != "--servers-only"]
        process = here.start_run(*brief, "--servers", "0", "--sync", sync, "--iterations", "250", *options)
        killed(process, here, 0)
        again = here.start("-c", AGAIN, here.path / "x", "0")
        ended, came = process.end(), again.end()
    assert (ended.code, came.code) == (0, 0), ended.shown + came.shown
    assert "shard 0 was lost when this server was killed: it continues from clock" in came.errors, came.shown
    for rank in (1, 2):
        told = f"[{here.names[rank]}] peer 0, a server, was restarted: the state of shard 0 is lost"
        assert told in ended.output, ended.shown


CHANGES = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 33), nn.Tanh(), nn.Linear(33, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


with gossipx.join(model, optimizer) as peer:
    if peer.iteration:
        (FOLDER / "again").write_text("\\n")
    train(peer, model, optimizer, 20)
    if peer.rank < 2:  # the other serves on: what a worker computes as it is killed would be another matter
        for goes_on in ("changed", "killed"):
            if peer.rank == 0:
                (FOLDER / goes_on).open().readline()
            elif goes_on == "killed":
                (FOLDER / "waits").write_text("\\n")
            train(peer, model, optimizer, peer.iteration + 60)
values = [float(one) for parameter in model.parameters() for one in parameter.detach().reshape(-1)]
tell(peer, values=values)
"""
SCRIPT_AGAIN = (
    AGAIN.partition("runpy.run_module")[0]
    + """
os.environ["GOSSIPX_RESUME"] = sys.argv[3]
sys.argv[:] = sys.argv[4:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
)


class Gate:
    """A pipe on which a peer waits for a line, or announces its presence."""

    def __init__(self, path: Path):
        os.mkfifo(path)
        self._path = path
        self._pipe = os.open(path, os.O_RDWR)  # with both ends open here, no side blocks until the other opens it

    def open(self) -> None:
        os.write(self._pipe, b"\n")

    def reached(self) -> None:
        assert readable(self._pipe, LONG), self._path
        os.read(self._pipe, 1)

    def close(self) -> None:
        os.close(self._pipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "then", "held", "resumes"),
    [
        ("0", "0,2", "shard 0", ""),
        ("0,2", "2", "shard 0", ""),
        ("2,0", "2,0,1", "shard 0", "1"),
        ("2", "0", "", ""),
    ],
    ids=["a-new-one", "one-that-stays", "the-first-of-three", "one-that-is-none-any-more"],
)
def test_it_is_restored_after_a_change_of_servers(
    tmp_path: Path, servers: str, then: str, held: str, resumes: str
) -> None:
    """It uses the layout in force, though its settings name the first servers.

    Pushes since the change are in the journal only, including those of an iteration that not all have pushed.
    """
    options = ("--servers", servers, "--checkpoint-every", "1000", "--placement", "sliced", "--peer-timeout", "5")
    with contextlib.ExitStack() as closing, folder(tmp_path, 3) as here:
        script = here.script(CHANGES)
        places = [tmp_path / name for name in ("changed", "killed", "waits", "again")]
        for place in places:
            place.touch()  # a plain file blocks nobody
        here.run(*options, script, tmp_path, name="whole")
        whole = [here.told(rank)["values"] for rank in range(3)]
        for place in places:
            place.unlink()
        changed, killed, waits, again = (closing.enter_context(contextlib.closing(Gate(place))) for place in places)
        process = here.start_run(*options, script, tmp_path)
        process.line(rf"{here.names[0]} train .* pulls [1-9]\d*")
        set_ = here.start("-m", "gossipx", "server", "set-servers", here.path / "x", then).end()
        assert set_.code == 0, set_.shown
        changed.open()
        waits.reached()
        kill_processes(children(process.pid)[2])
        started = here.start("-c", SCRIPT_AGAIN, here.path / "x", "2", resumes, script, tmp_path, fresh=True)
        again.reached()
        killed.open()
        ended, came = process.end(), started.end()
        assert (ended.code, came.code) == (0, 0), ended.shown + came.shown
        told = f"{held} is restored from its checkpoint and its journal"
        assert (told in came.errors) == bool(held), came.shown
        assert [here.told(rank)["values"] for rank in range(3)] == whole


def test_workers_stop_without_it_if_configured(tmp_path: Path) -> None:
    """With no peer to take the only server's place, all end soon after ``--peer-timeout``, with one line why."""
    with folder(tmp_path, 3) as here:
        process = here.start_run(*BRIEF, "--servers", "0", "--server-lost", "stop", "--iterations", "100000")
        killed(process, here, 0)
        ended = process.end()
    assert one_line(ended, 4) == "peer 0, a server, is lost, and --server-lost is stop"
    assert f"peer {here.names[0]} is lost: killed by SIGKILL" in ended.output
