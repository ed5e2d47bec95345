"""``gossipx server set-servers`` while real processes train. The scenarios test what a change does in each case."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import Folder, Process, Run, differences, folder, one_line

SCRIPT = """
import threading

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 33), nn.Tanh(), nn.Linear(33, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
problems = []


def change(*servers):
    try:
        peer.set_servers(servers)
    except gossipx.errors.UsageError as error:
        problems.append(str(error))


with gossipx.join(model, optimizer) as peer:
    while peer.iteration < 60:
        if peer.rank == 1 and len(sys.argv) > 2:
            if peer.iteration == 10:
                change(7)
                change(0, 1, 2)
            elif peer.iteration == 30:  # whatever the training thread does meanwhile
                other = threading.Thread(target=change, args=(2, 1))
                other.start()
            elif peer.iteration == 50:
                other.join()
        train(peer, model, optimizer, peer.iteration + 1)
values = [float(one) for parameter in model.parameters() for one in parameter.detach().reshape(-1)]
tell(peer, problems=problems, values=values, taken=peer._role.server.contributions)
"""
COMMANDED = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 20)
    while not (FOLDER / "changed").exists():
        train(peer, model, optimizer, peer.iteration + 1)
"""


def set_servers(here: Folder, servers: str) -> str:
    """Change the servers of a running run. Return the command's output."""
    ended = here.start("-m", "gossipx", "server", "set-servers", here.path / "x", servers).end()
    assert ended.code == 0, ended.shown
    return ended.output


def trains(here: Folder, process: Process, pulls: str = r"[1-9]\d*") -> None:
    process.line(rf"{here.names[0]} train .* pulls {pulls}")


@pytest.mark.parametrize(
    "options", [("--placement", "sliced"), pytest.param(("--no-wait-free", "--bucket", "0"), marks=pytest.mark.slow)]
)
def test_bsp_ends_as_a_run_with_fixed_servers(tmp_path: Path, options: tuple[str, ...]) -> None:
    """FluentPS, section III-A: workloads are rebalanced among the present servers, and nothing else changes."""
    told = []
    with folder(tmp_path, 3) as here:
        script = here.script(SCRIPT)
        for name, more in (("stays", ()), ("changes", ("changes",))):
            run = here.run("--servers", "0", *options, script, tmp_path, *more, name=name)
            assert (run.summary["lost"], sum(run.summary["failed"])) == ([], 0)
            told.append([here.told(rank) for rank in range(3)])
    stayed, changed = told
    assert [one["problems"] for one in changed] == [[], ["there is no peer 7: ranks are 0 to 2"], []]
    assert all(one["values"] == stayed[0]["values"] for one in (*stayed, *changed))
    assert [one["taken"] > 0 for one in changed] == [True] * 3


def test_servers_are_set_from_the_command_line(tmp_path: Path) -> None:
    """Wrong ones are refused in a line, and training continues."""
    with folder(tmp_path, 3) as here:
        process = here.start_run("--servers", "0", here.script(COMMANDED), tmp_path)
        trains(here, process)
        assert set_servers(here, "0,1,2") == "the servers are now 0,1,2\n"
        process.line(r"the servers are now 0,1,2, at epoch 1")
        assert set_servers(here, "2,1") == "the servers are now 2,1\n"
        for servers, told in (
            ("0,3", "server '3' is not a peer: give a rank from 0 to 2, or a name"),
            ("1,1", "the servers 1,1 name a peer twice"),
            ("2,1", "the servers are already"),
            ("0,x", "server 'x' is not a peer: give a rank from 0 to 2, or a name"),
            ("0,", "SERVERS '0,': give numbers or names of peers separated by commas, as in 0,1,2"),
            ("", "SERVERS '': give numbers or names of peers separated by commas, as in 0,1,2"),
        ):
            wrong = here.start("-m", "gossipx", "server", "set-servers", here.path / "x", servers).end()
            assert told in one_line(wrong, 2)
        (tmp_path / "changed").touch()
        ended = process.end()
        assert ended.code == 0, ended.shown
    run = Run(tmp_path / "x", ended)
    assert (run.summary["lost"], sum(run.summary["failed"])) == ([], 0)
    assert all(max(differences(run.model(0), run.model(rank)).values()) == 0 for rank in (1, 2))


NAMES = ("first", "second", "last")
JOINED = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = {"mode": "server", "servers": [0], "logdir": FOLDER / "runs", "name": "hand"}
with gossipx.join(model, optimizer, peers="hosts.txt", rank=int(sys.argv[2]), **settings) as peer:
    train(peer, model, optimizer, 20)
    print("trains", flush=True)
    while not (FOLDER / "changed").exists():
        train(peer, model, optimizer, peer.iteration + 1)
    if peer.rank == 0:
        try:
            peer.set_servers(["nobody"])
        except gossipx.errors.UsageError as error:
            refused = str(error)
        peer.set_servers(["last"])
    train(peer, model, optimizer, 400)
tell(peer, refused=refused if peer.rank == 0 else "", values=model.weight.flatten().tolist())
"""


@pytest.mark.slow
def test_peers_that_were_started_by_hand_take_commands(tmp_path: Path) -> None:
    """A run that only uses gossipx.join leaves no settings, and is found by its peers' directories."""
    with folder(tmp_path, 3) as here:
        here.hosts.write_text("".join(f"{name} name={word}\n" for name, word in zip(here.names, NAMES, strict=True)))
        script = here.script(JOINED)
        started = [here.start(script, tmp_path, str(rank)) for rank in range(3)]
        for process in started:
            process.line("trains")
        command, given = ("-m", "gossipx", "server"), ("--logdir", tmp_path / "runs", "hand")
        ended = here.start(*command, "set-servers", *given, "first, second").end()
        assert (ended.code, ended.output) == (0, "the servers are now first,second\n"), ended.shown
        ended = here.start(*command, "set-sync", *given, "asp").end()
        assert (ended.code, ended.output) == (0, "all shards now use asp\n"), ended.shown
        wrong = here.start(*command, "set-servers", *given, "frist").end()
        assert "server 'frist' is not a peer: give a rank from 0 to 2, or a name (did you mean 'first'?)" in one_line(
            wrong, 2
        )
        (tmp_path / "changed").touch()
        for process in started:
            ended = process.end()
            assert ended.code == 0, ended.shown
        told = [here.told(rank) for rank in range(3)]
        assert told[0]["refused"] == "server 'nobody' is not a peer: give a rank from 0 to 2, or a name"
        assert told[0]["values"] == told[1]["values"] == told[2]["values"]
        none = here.start(*command, "set-sync", tmp_path, "asp").end()
        assert "no such run: " in one_line(none, 2)
