"""``gossipx peer join``: a process that is in nobody's hosts file joins a run of real processes under way."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority
from ports import address, free_ports, places
from resuming import BRIEF
from seeds import some

from runs import (
    TEN_LINES,
    Folder,
    Process,
    Run,
    agree,
    differences,
    is_running,
    one_line,
)

LATE = (
    TEN_LINES
    + """
begun = peer.iteration
while not all_have(peer, "seen", peer.iteration >= begun + 60 and peer.size == int(sys.argv[2]), map(int, sys.argv[3])):
    train(peer, model, optimizer, peer.iteration + 1)
tell(peer, begun=begun, first=first, rank=peer.rank, size=peer.size)
"""
)
"""A script that trains until all peers, whose number and ranks it is given, know each other and have trained."""


def join(two: Folder, contact: str, *options: str | Path, logdir: Path | None = None) -> Process:
    (port,) = free_ports(1)
    where = ("--peers", contact, "--port", str(port), "--logdir", logdir or two.path)
    return two.gossipx("peer", "join", *where, *options)


MODES = {
    "pull": ("--policy", "tau:3"),
    "pushpull": ("--mode", "pushpull", "--policy", "tau:3"),
    "push": ("--mode", "push", "--policy", "tau:3"),
    "waves": ("--exchange", "waves", "--policy", "tau:5"),
    "coded": ("--policy", "tau:3", "--codec", "int8"),
}


@pytest.mark.parametrize("mode", some(MODES, "waves"))
def test_a_third_peer_joins_a_run_of_two_and_all_hold_one_model_at_the_end(two: Folder, mode: str) -> None:
    """It needs an address and nothing of the run's settings; its first model is that of a peer that trains."""
    script = two.script(LATE)
    run = two.start_run(*MODES[mode], "--peer-timeout", "20", script, two.path, "3", "012")
    run.line(" train ")
    late = join(two, two.names[1], script, two.path, "3", "012")
    told = late.end(code=0).output
    ended = run.end(code=0)
    assert re.search(r"peer 127\.0\.0\.1:\d+ has joined the run", ended.output), ended.shown
    made = Run(two.path / "x", ended)
    assert agree(made, 3)
    figures = made.summary
    assert figures["peers"] == 3 and figures["lost"] == [] and figures["agreed"] is True
    assert len(figures["retrievals"]) == 3 and None not in figures["retrievals"]
    assert two.told(2)["begun"] > 0 and two.told(2)["rank"] == 2
    assert [two.told(rank)["size"] for rank in range(3)] == [3, 3, 3]
    assert two.told(2)["first"] != two.told(0)["first"], "its first model is no initial one"
    line = (
        rf"peer 2 \(127\.0\.0\.1:\d+\): \d+ iterations, {figures['retrievals'][2]} retrievals, all peers hold one model"
    )
    assert re.search(line, told), told


@pytest.mark.parametrize("drained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_built_in_task_is_joined_without_a_script_and_left_in_order(two: Folder, drained: bool) -> None:
    """On Ctrl-C, or because somebody drains it by the name that gossipx status shows; it is restarted by that name."""
    run = two.start_run("--policy", "tau:5", "--iterations", "100000", *BRIEF)
    run.line(" train ")
    (nowhere,) = places(1)
    late = join(two, f"{nowhere},{two.names[0]}")
    late.line(r" train \d+/100000 .*pulls [1-9]")
    *begun, newcomer = json.loads(two.gossipx("status", "x", "--logdir", two.path, "--json").end(code=0).output)
    assert [one["name"] for one in begun] == two.names and newcomer["stage"] == "train"
    assert newcomer["iteration"] > 0 and newcomer["last_exchange"] in two.names
    if drained:
        again = two.gossipx("peer", "restart", "--logdir", two.path, "x", newcomer["name"]).end(code=0)
        assert f"{newcomer['name']} is being restarted" in again.output
        late.line("is restarted, as asked")
        late.line(r" train \d+/100000 .*pulls [1-9]")
        drain = two.gossipx("peer", "drain", "--logdir", two.path, "x", newcomer["name"]).end(code=0)
        assert f"{newcomer['name']} has left" in drain.output
    else:
        late.signal(signal.SIGINT)
    left = late.end(code=0 if drained else 130)
    assert "left the run; the same command joins it again" in left.output, left.shown
    run.signal(signal.SIGTERM)
    run.end(code=0)


@pytest.mark.slow
def test_over_tls_with_a_certificate_for_its_own_address(two: Folder, tmp_path: Path) -> None:
    """One that is turned away for its certificate gets no rank: the next newcomer is the third peer. As on another
    machine, nothing of the run's directory is there."""
    authority = Authority(tmp_path / "ca")
    script = two.script(LATE)
    arguments = (script, two.path, "3", "012")
    run = two.start_run("--policy", "tau:3", "--peer-timeout", "20", *authority.issue(address()).options(), *arguments)
    run.line(" train ")
    contact = two.names[1]
    line = one_line(join(two, contact, *authority.issue("198.51.100.7").options(), *arguments).end(), 5)
    assert re.search(r"not authorised: the certificate of [\d.:]+ is not for '127\.0\.0\.1', its own address", line)
    line = one_line(join(two, contact, *Authority(tmp_path / "other").issue().options(), *arguments).end(), 5)
    assert "was not signed by a CA in --tls-ca" in line
    line = one_line(join(two, contact, *arguments).end(), 1)
    assert f"no peer of a run answers at --peers: {contact} closed the connection: does the run have TLS" in line
    apart = tmp_path / "apart"
    late = join(two, contact, *authority.issue().options(), *arguments, logdir=apart).end(code=0)
    made = Run(two.path / "x", run.end(code=0))
    assert max(differences(made.model(0), Run(apart / "x", late).model(2)).values()) == 0.0
    assert made.summary["peers"] == 3 and made.summary["lost"] == [] and two.told(2)["begun"] > 0


# --- refusals -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def training(two: Folder) -> Iterator[None]:
    run = two.start_run("--iterations", "100000", "--policy", "tau:5", *BRIEF)
    run.line(" train ")
    yield
    assert is_running(run.pid)


def test_a_run_with_a_peer_behind_nat_says_so_in_one_line(two: Folder) -> None:
    ports = [name.partition(":")[2] for name in two.names]
    two.hosts.write_text(f"{address()}:{ports[0]}\n{address(2)}:{ports[1]} nat\n")
    with training(two):
        told = "refused: a peer of the run is behind NAT, and could not be reached by a new one"
        assert one_line(join(two, two.names[0]).end(), 2) == f"{two.names[0]}: {told}"
        assert not list((two.path / "x").glob("*-2*"))


@pytest.mark.slow
def test_mistakes_are_told_in_one_line_and_leave_nothing(two: Folder, tmp_path: Path) -> None:
    with training(two):
        (nowhere,) = places(1)
        line = one_line(join(two, nowhere).end(), 1)
        assert "no peer of a run answers at --peers: " in line and "Connection refused" in line
        assert "--peers is 'a:b:c', not host[:port]" in one_line(join(two, "a:b:c").end(), 2)

        other = two.script("with gossipx.join(nn.Linear(4, 1)): pass")
        mismatch = join(two, two.names[0], other, two.path).end()
        assert mismatch.code == 2 and "build the same model on every host" in mismatch.errors, mismatch.shown
        assert not [path.name for path in (two.path / "x").iterdir() if re.search(r"-0*[23]\b", path.name)]

        elsewhere = tmp_path / "elsewhere"
        shutil.copytree(two.path / "x", elsewhere / "x")
        (elsewhere / "x" / "hosts.txt").write_text("localhost\n")
        line = one_line(join(two, two.names[0], logdir=elsewhere).end(), 2)
        assert "it is of another run named 'x': give --logdir DIR" in line

        secret = tmp_path / "secret"
        secret.write_text("a secret of thirty-two characters")
        secret.chmod(0o600)
        line = one_line(join(two, two.names[0], "--secret-file", secret).end(), 5)
        assert "this peer has no secret" in line
