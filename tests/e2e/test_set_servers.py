"""``gossipx server set-servers`` while real processes train. The scenarios test what a change does in each case."""

from __future__ import annotations

import pytest

from runs import Folder, Process, Run, differences, one_line

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


@pytest.mark.parametrize(
    "options", [("--placement", "sliced"), pytest.param(("--no-wait-free", "--bucket", "0"), marks=pytest.mark.slow)]
)
def test_bsp_ends_as_a_run_with_fixed_servers(three: Folder, options: tuple[str, ...]) -> None:
    """FluentPS, section III-A: workloads are rebalanced among the present servers, and nothing else changes."""
    told = []
    script = three.script(SCRIPT)
    for name, more in (("stays", ()), ("changes", ("changes",))):
        run = three.run("--servers", "0", *options, script, three.path, *more, name=name)
        assert (run.summary["lost"], sum(run.summary["failed"])) == ([], 0)
        told.append([three.told(rank) for rank in range(3)])
    stayed, changed = told
    assert [one["problems"] for one in changed] == [[], ["there is no peer 7: ranks are 0 to 2"], []]
    assert all(one["values"] == stayed[0]["values"] for one in (*stayed, *changed))
    assert [one["taken"] > 0 for one in changed] == [True] * 3


def test_servers_are_set_from_the_command_line(three: Folder) -> None:
    """Wrong ones are refused in a line, and training continues."""
    process = three.start_run("--servers", "0", three.script(COMMANDED), three.path)
    process.line(rf"{three.names[0]} train .* pulls [1-9]\d*")

    def set_servers(servers: str) -> Process:
        return three.gossipx("server", "set-servers", three.path / "x", servers)

    for servers in ("0,1,2", "2,1"):
        assert set_servers(servers).end(code=0).output == f"the servers are now {servers}\n"
    process.line(r"the servers are now 0,1,2, at epoch 1")
    for servers, told in (
        ("0,3", "server '3' is not a peer: give a rank from 0 to 2, or a name"),
        ("1,1", "the servers 1,1 name a peer twice"),
        ("2,1", "the servers are already"),
        ("0,", "SERVERS '0,': give numbers or names of peers separated by commas, as in 0,1,2"),
        ("", "SERVERS '': give numbers or names of peers separated by commas, as in 0,1,2"),
    ):
        assert told in one_line(set_servers(servers).end(), 2)
    (three.path / "changed").touch()
    run = Run(three.path / "x", process.end(code=0))
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
def test_peers_that_were_started_by_hand_take_commands(three: Folder) -> None:
    """A run that only uses gossipx.join leaves no settings, and is found by its peers' directories."""
    three.hosts.write_text("".join(f"{name} name={word}\n" for name, word in zip(three.names, NAMES, strict=True)))
    script = three.script(JOINED)
    started = [three.start(script, three.path, str(rank)) for rank in range(3)]
    for process in started:
        process.line("trains")
    given = ("--logdir", three.path / "runs", "hand")
    set_servers, set_sync = (("server", f"set-{what}", *given) for what in ("servers", "sync"))
    assert three.gossipx(*set_servers, "first, second").end(code=0).output == "the servers are now first,second\n"
    assert three.gossipx(*set_sync, "asp").end(code=0).output == "all shards now use asp\n"
    told = "server 'frist' is not a peer: give a rank from 0 to 2, or a name (did you mean 'first'?)"
    assert told in one_line(three.gossipx(*set_servers, "frist").end(), 2)
    (three.path / "changed").touch()
    for process in started:
        process.end(code=0)
    first, second, last = (three.told(rank) for rank in range(3))
    assert first["refused"] == "server 'nobody' is not a peer: give a rank from 0 to 2, or a name"
    assert first["values"] == second["values"] == last["values"]
