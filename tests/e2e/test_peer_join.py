"""``gossipx peer join``: a process that is in nobody's hosts file joins a run of real processes under way."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from ports import address, free_ports, places
from resuming import BRIEF
from seeds import some

from runs import (
    LONG,
    TEN_LINES,
    Ended,
    Folder,
    Process,
    Run,
    agree,
    differences,
    folder,
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


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Folder]:
    with folder(tmp_path, 2) as made:
        yield made


def join(here: Folder, contact: str, *options: str | Path, logdir: Path | None = None) -> Process:
    (port,) = free_ports(1)
    logdir = logdir or here.path
    return here.start(
        "-m", "gossipx", "peer", "join", "--peers", contact, "--port", str(port), "--logdir", logdir, *options
    )


def ended_well(process: Process) -> Ended:
    ended = process.end()
    assert ended.code == 0 and "Traceback" not in ended.output + ended.errors, ended.shown
    return ended


def summary(here: Folder, name: str = "x") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((here.path / name / "summary.json").read_text())
    return found


MODES = {
    "pull": ("--policy", "tau:3"),
    "pushpull": ("--mode", "pushpull", "--policy", "tau:3"),
    "push": ("--mode", "push", "--policy", "tau:3"),
    "waves": ("--exchange", "waves", "--policy", "tau:5"),
    "coded": ("--policy", "tau:3", "--codec", "int8"),
}


@pytest.mark.parametrize("mode", some(MODES, "waves"))
def test_a_third_peer_joins_a_run_of_two_and_all_hold_one_model_at_the_end(here: Folder, mode: str) -> None:
    """It needs an address and nothing of the run's settings; its first model is that of a peer that trains."""
    script = here.script(LATE)
    run = here.start_run(*MODES[mode], "--peer-timeout", "20", script, here.path, "3", "012")
    run.line(" train ")
    late = join(here, here.names[1], script, here.path, "3", "012")
    told = ended_well(late).output
    ended = ended_well(run)
    assert re.search(r"peer 127\.0\.0\.1:\d+ has joined the run", ended.output), ended.shown
    made = Run(here.path / "x", ended)
    assert agree(made, 3)
    figures = made.summary
    assert figures["peers"] == 3 and figures["lost"] == [] and figures["agreed"] is True
    assert len(figures["retrievals"]) == 3 and None not in figures["retrievals"]
    assert here.told(2)["begun"] > 0 and here.told(2)["rank"] == 2
    assert [here.told(rank)["size"] for rank in range(3)] == [3, 3, 3]
    assert here.told(2)["first"] != here.told(0)["first"], "its first model is no initial one"
    line = (
        rf"peer 2 \(127\.0\.0\.1:\d+\): \d+ iterations, {figures['retrievals'][2]} retrievals, all peers hold one model"
    )
    assert re.search(line, told), told


@pytest.mark.slow
def test_two_join_by_different_contacts_with_a_secret_and_a_directory_of_their_own(
    here: Folder, tmp_path: Path
) -> None:
    """As on other machines: nothing of the run's directory is there. The second contact names the one that admits."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of thirty-two characters")
    secret.chmod(0o600)
    script = here.script(LATE)
    run = here.start_run(
        "--policy", "tau:3", "--secret-file", secret, "--peer-timeout", "20", script, here.path, "4", "0123"
    )
    run.line(" train ")
    rest = ("--secret-file", secret, script, here.path, "4", "0123")
    late = [join(here, here.names[which], *rest, logdir=tmp_path / f"at-{which}") for which in (0, 1)]
    for process in late:
        ended_well(process)
    ended_well(run)
    figures = summary(here)
    assert figures["peers"] == 4 and figures["lost"] == [] and figures["agreed"] is True
    directories = [tmp_path / f"at-{which}" / "x" for which in (0, 1)]
    ranks = [int(next(one.glob("peer-*")).name[5:]) for one in directories]
    assert sorted(ranks) == [2, 3]
    models = [Run(one, Ended(0, "", "")).model(rank) for one, rank in zip(directories, ranks, strict=True)]
    own = Run(here.path / "x", Ended(0, "", "")).model(0)
    assert all(max(differences(own, model).values()) == 0.0 for model in models)


@pytest.mark.parametrize("drained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_built_in_task_is_joined_without_a_script_and_left_in_order(here: Folder, drained: bool) -> None:
    """On Ctrl-C, or because somebody drains it by the name that gossipx status shows; it is restarted by that name."""
    run = here.start_run("--policy", "tau:5", "--iterations", "100000", *BRIEF)
    run.line(" train ")
    (nowhere,) = places(1)
    late = join(here, f"{nowhere},{here.names[0]}")
    late.line(r" train \d+/100000 .*pulls [1-9]")
    shown = here.start("-m", "gossipx", "status", "x", "--logdir", here.path, "--json").end()
    assert shown.code == 0, shown.shown
    *begun, newcomer = json.loads(shown.output)
    assert [one["name"] for one in begun] == here.names and newcomer["stage"] == "train"
    assert newcomer["iteration"] > 0 and newcomer["last_exchange"] in here.names
    if drained:
        again = here.start("-m", "gossipx", "peer", "restart", "--logdir", here.path, "x", newcomer["name"]).end()
        assert again.code == 0 and f"{newcomer['name']} is being restarted" in again.output, again.shown
        late.line("is restarted, as asked")
        late.line(r" train \d+/100000 .*pulls [1-9]")
        drain = here.start("-m", "gossipx", "peer", "drain", "--logdir", here.path, "x", newcomer["name"]).end()
        assert drain.code == 0 and f"{newcomer['name']} has left" in drain.output, drain.shown
    else:
        late.signal(signal.SIGINT)
    left = late.end()
    assert left.code == (0 if drained else 130) and "left the run; the same command joins it again" in left.output, (
        left.shown
    )
    run.signal(signal.SIGTERM)
    assert run.end().code == 0
    assert summary(here)["lost"] == [] or summary(here)["peers"] == 3


@pytest.mark.slow
def test_over_tls_with_a_certificate_for_its_own_address(here: Folder, tmp_path: Path) -> None:
    """One that is turned away for its certificate gets no rank: the next newcomer is the third peer."""
    authority = Authority(tmp_path / "ca")
    script = here.script(LATE)
    arguments = (script, here.path, "3", "012")
    run = here.start_run("--policy", "tau:3", "--peer-timeout", "20", *authority.issue(address()).options(), *arguments)
    run.line(" train ")
    contact = here.names[1]
    line = one_line(join(here, contact, *authority.issue("198.51.100.7").options(), *arguments).end(), 5)
    assert re.search(r"not authorised: the certificate of [\d.:]+ is not for '127\.0\.0\.1', its own address", line)
    line = one_line(join(here, contact, *Authority(tmp_path / "other").issue().options(), *arguments).end(), 5)
    assert "was not signed by a CA in --tls-ca" in line
    line = one_line(join(here, contact, *arguments).end(), 1)
    assert f"no peer of a run answers at --peers: {contact} closed the connection: does the run have TLS" in line
    ended_well(join(here, contact, *authority.issue().options(), *arguments))
    made = Run(here.path / "x", ended_well(run))
    assert agree(made, 3)
    assert made.summary["peers"] == 3 and made.summary["lost"] == [] and here.told(2)["begun"] > 0


# --- refusals -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def training(tmp_path: Path, *options: str, hosts: str = "") -> Iterator[Folder]:
    with folder(tmp_path, 2) as here:
        if hosts:
            here.hosts.write_text(hosts.format(*(name.partition(":")[2] for name in here.names)))
        run = here.start_run("--iterations", "100000", *options, *BRIEF)
        run.line(" train ")
        yield here
        assert is_running(run.pid)
        run.kill()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ("--servers", "1"),
            "the run has servers, which count their workers: only peers that exchange with each other",
        ),
        pytest.param(
            ("--hub", "0"),
            "the run has a hub, whose centre counts its workers: only peers that exchange with each other",
            marks=pytest.mark.slow,
        ),
        (
            ("--topology", "ring"),
            "--topology ring has no place for a new peer: only in 'full', the default, may any two",
        ),
        pytest.param(
            ("--schedule", "one-peer"),
            "--schedule one-peer is an order of the peers that began the run: use random",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_without_a_place_for_a_newcomer_says_so_in_one_line(tmp_path: Path, options: Any, told: str) -> None:
    with training(tmp_path, *options) as here:
        line = one_line(join(here, here.names[1]).end(), 2)
        assert line.startswith(f"{here.names[1]}: refused: {told}"), line
        assert sorted(path.name for path in (here.path / "x").iterdir() if "-2" in path.name) == []


def test_a_run_with_a_peer_behind_nat_says_so_in_one_line(tmp_path: Path) -> None:
    with training(tmp_path, "--policy", "tau:5", hosts=f"{address()}:{{}}\n{address(2)}:{{}} nat\n") as here:
        line = one_line(join(here, here.names[0]).end(), 2)
        assert (
            line == f"{here.names[0]}: refused: a peer of the run is behind NAT, and could not be reached by a new one"
        )
        assert not list((here.path / "x").glob("*-2*"))


@pytest.mark.slow
def test_mistakes_are_told_in_one_line_and_leave_nothing(tmp_path: Path) -> None:
    with training(tmp_path, "--policy", "tau:5") as here:
        (nowhere,) = places(1)
        line = one_line(join(here, nowhere).end(), 1)
        assert "no peer of a run answers at --peers: " in line and "Connection refused" in line
        assert "--peers is 'a:b:c', not host[:port]" in one_line(join(here, "a:b:c").end(), 2)

        other = here.script("with gossipx.join(nn.Linear(4, 1)): pass")
        mismatch = join(here, here.names[0], other, here.path).end()
        assert mismatch.code == 2 and "build the same model on every host" in mismatch.errors, mismatch.shown
        assert not [path.name for path in (here.path / "x").iterdir() if re.search(r"-0*[23]\b", path.name)]

        elsewhere = tmp_path / "elsewhere"
        shutil.copytree(here.path / "x", elsewhere / "x")
        (elsewhere / "x" / "hosts.txt").write_text("localhost\n")
        line = one_line(join(here, here.names[0], logdir=elsewhere).end(), 2)
        assert "it is of another run named 'x': give --logdir DIR" in line

        secret = tmp_path / "secret"
        secret.write_text("a secret of thirty-two characters")
        secret.chmod(0o600)
        line = one_line(join(here, here.names[0], "--secret-file", secret).end(), 5)
        assert "this peer has no secret" in line


@pytest.mark.slow
def test_a_newcomer_that_never_begins_is_no_peer_of_the_run(here: Folder) -> None:
    loop = """
while not all_have(peer, "heard", (FOLDER / "nothing").exists(), (0, 1)):
    train(peer, model, optimizer, peer.iteration + 1)
"""
    run = here.start_run("--policy", "tau:5", "--peer-timeout", "20", here.script(TEN_LINES + loop), here.path)
    run.line(" train ")
    ended = join(here, here.names[0], here.script("", "nothing.py"), here.path).end()
    assert ended.code == 1 and "without a call of gossipx.join" in ended.errors, ended.shown
    (here.path / "nothing").touch()
    ended_well(run)
    assert summary(here)["peers"] == 2 and summary(here)["lost"] == []


def test_after_a_run_has_ended_nobody_answers(here: Folder) -> None:
    ended = here.run("--policy", "never", "--iterations", "5", *BRIEF)
    assert ended.summary["peers"] == 2
    assert "no peer of a run answers" in one_line(join(here, here.names[0]).end(LONG), 1)
