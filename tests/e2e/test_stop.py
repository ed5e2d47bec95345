"""Requests to stop: Ctrl-C, SIGHUP and SIGTERM, to ``gossipx run`` and to peers without it; a parent that dies."""

from __future__ import annotations

import os
import pty
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from forks.client import readable
from resuming import BRIEF, check_stopped, kept, resume, resumed, store, wait_for

from gossipx.metrics import summary
from runs import LONG, TEN_LINES, Folder, Process, Run, children, folder, is_running

BUILT_IN = ("--policy", "tau:5", "--iterations", "100000", *BRIEF)


def training(here: Folder, *options: str | Path, first: str = "train") -> Process:
    """Return a run, all of whose peers train."""
    run = here.start_run(*options)
    run.line(".*".join(rf"{name} {first if not rank else 'train'} \d+" for rank, name in enumerate(here.names)))
    return run


# --- gossipx run --------------------------------------------------------------------------------------


@pytest.mark.fault(53)
@pytest.mark.fault(4)
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGHUP, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_keeps_everything_and_says_how_to_continue(
    two: Folder, number: signal.Signals, code: int
) -> None:
    """Without --checkpoint-every."""
    run = training(two, *BUILT_IN)
    peers = children(run.pid)
    run.signal(number)
    ended = run.end()
    assert len(peers) == 2 and not any(is_running(pid) for pid in peers.values())
    assert ended.code == code and ended.errors == "" and "Traceback" not in ended.output, ended.shown
    found = check_stopped(two, ended.output)
    again = resumed(two, "--iterations", str(max(found) + 10))
    assert again.summary["iterations"] == max(found) + 10 and again.summary["lost"] == again.summary["stopped"] == []


@pytest.mark.fault(53)
@pytest.mark.parametrize(
    ("options", "first"),
    [
        pytest.param(("--hub", "0"), "train", marks=pytest.mark.slow),
        pytest.param(("--hub", "0", "--hub-only"), "serve", marks=pytest.mark.slow),
        pytest.param(("--servers", "0", "--sync", "bsp"), "train", marks=pytest.mark.slow),
        pytest.param(("--servers", "0", "--servers-only", "--sync", "asp"), "serve", marks=pytest.mark.slow),
        (("--exchange", "waves"), "train"),
    ],
    ids=["hub", "hub only", "servers", "servers only", "waves"],
)
def test_a_stopped_run_continues_in_every_mode(two: Folder, options: tuple[str, ...], first: str) -> None:
    """From where it was, not from the start."""
    policy = () if "--servers" in options else ("--policy", "tau:5")
    run = two.start_run(*policy, "--iterations", "100000", *BRIEF, *options)
    run.line(rf"{two.names[1]} train [1-9]")
    run.signal(signal.SIGINT)
    ended = run.end()
    assert ended.code == 130 and ended.errors == "" and "Traceback" not in ended.output, ended.shown
    assert f"continue with: gossipx run --resume {two.path / 'x'}" in ended.output, ended.shown
    found = summary.read(two.path / "x")
    assert found.lost == [] and found.stopped == two.names
    assert kept(two)[1]
    until = max(one or 0 for one in kept(two)) + 20
    again = resume(two, "--iterations", str(until)).end()
    assert again.code == 0 and "no checkpoint" not in again.shown, again.shown
    assert Run(two.path / "x", again).summary["iterations"] == until
    figures = summary.read(two.path / "x")
    assert figures.bytes_received[1] is not None and found.bytes_received[1] is not None
    assert figures.bytes_received[1] > found.bytes_received[1] > 0, "it counts from the beginning"


@pytest.mark.fault(53)
@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_and_says_what_there_is(two: Folder) -> None:
    script = two.script(TEN_LINES + "train(peer, model, optimizer, 20)\nprint('so far')\nsignal.pause()\n")
    run = two.start_run("--checkpoint-every", "10", "--peer-timeout", "60", script, two.path)
    for _ in two.names:
        run.line("so far")
    wait_for(two, 10, run)
    run.signal(signal.SIGINT)
    run.line("Ctrl-C again")
    run.signal(signal.SIGINT)
    ended = run.end()
    assert ended.code == 130 and ended.errors == "" and "Traceback" not in ended.output, ended.shown
    last = ended.output.splitlines()[-1]
    assert last == f"stopped at once; continue from the last checkpoints with: gossipx run --resume {two.path / 'x'}"
    assert all(kept(two))


@pytest.mark.fault(53)
def test_output_of_scripts_is_relayed_until_they_end(two: Folder) -> None:
    """And a script that is interrupted ends without a traceback."""
    script = two.script(
        TEN_LINES
        + """
try:
    with peer:
        train(peer, model, optimizer, 20)
        print("so far")
        train(peer, model, optimizer, 10**9)
finally:
    print("after the loop at", peer.iteration)
"""
    )
    run = two.start_run("--peer-timeout", "60", script, two.path)
    for _ in two.names:
        run.line("so far")
    run.signal(signal.SIGINT)
    ended = run.end()
    assert ended.code == 130 and "Traceback" not in ended.output + ended.errors, ended.shown
    found = check_stopped(two, ended.output)
    for name, iteration in zip(two.names, found, strict=True):
        assert f"[{name}] after the loop at {iteration}\n" in ended.output


@pytest.mark.slow
@pytest.mark.fault(53)
def test_ctrl_c_on_a_terminal(two: Folder) -> None:
    """The terminal sends it to the whole foreground process group; with a table instead of lines."""
    arguments = ["--peers", str(two.hosts), "--logdir", str(two.path), "--name", "x", *BUILT_IN]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(os.sys.executable, [os.sys.executable, "-m", "gossipx", "run", *arguments])
    seen = b""
    try:
        sent = False
        while readable(terminal, LONG):
            try:
                seen += os.read(terminal, 1 << 16)
            except OSError:  # it has ended
                break
            if not sent and re.search(rb"train .* [1-9]\d*/100000", seen):
                os.write(terminal, b"\x03")
                sent = True
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    text = seen.decode()
    assert "Traceback" not in text and "Ctrl-C again stops at once" in text, text
    check_stopped(two, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text))


@pytest.mark.fault(53)
def test_orphans_write_a_checkpoint(two: Folder) -> None:
    """The parent is killed; the script prints, which fails from then on."""
    script = two.script(
        TEN_LINES
        + """
with peer:
    train(peer, model, optimizer, 20)
    print("so far")
    while True:
        train(peer, model, optimizer, peer.iteration + 1)
        print(peer.iteration)
"""
    )
    run = two.start_run("--peer-timeout", "20", script, two.path)
    for _ in two.names:
        run.line("so far")
    ends = [os.pidfd_open(pid) for pid in children(run.pid).values()]
    assert len(ends) == 2
    os.kill(run.pid, signal.SIGKILL)
    for end in ends:
        assert readable(end, LONG), "a peer outlives its run"
        os.close(end)
    found = kept(two)
    assert None not in found
    run.end()
    again = resume(two, "--iterations", "100000")
    again.line(rf"\] {max(one or 0 for one in found) + 5}$")
    again.signal(signal.SIGINT)
    assert again.end().code == 130


# --- peers without gossipx run ------------------------------------------------------------------------

ALONE = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
HANDLERS
try:
    with gossipx.join(model, optimizer, peers="hosts.txt", rank=int(sys.argv[2]), name="x", logdir=".",
                      peer_timeout=20) as peer:
        begun = peer.iteration
        train(peer, model, optimizer, begun + 20)
        print("so far from", begun, flush=True)
        train(peer, model, optimizer, 10**9)
finally:
    tell(peer, iteration=peer.iteration, begun=begun, handlers=[
        signal.getsignal(one) == before for one, before in zip(
            (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
            (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL))])
"""


@pytest.mark.fault(53)
@pytest.mark.fault(4)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 0), (signal.SIGHUP, 130)]
)
def test_a_peer_without_gossipx_run_stops_in_order(two: Folder, number: signal.Signals, code: int) -> None:
    """With a checkpoint and its model; the other peer learns that it leaves, and continues."""
    script = two.script(ALONE.replace("HANDLERS", ""))
    peers = [two.start(script, two.path, str(rank)) for rank in range(2)]
    for peer in peers:
        peer.line("so far from 0")
    peers[0].signal(number)
    ended = peers[0].end()
    assert ended.code == code, ended.shown
    told: Any = two.told(0)
    assert store(two, 0).find() == told["iteration"] >= 20 and told["handlers"] == [True] * 3
    assert f"stopped at {told['iteration']}; continue with GOSSIPX_RESUME=1 in the environment" in ended.errors
    assert (two.path / "x" / "peer-00" / "model.safetensors").exists()
    assert "stopping" in ended.errors and "Traceback" not in ended.errors, ended.errors
    peers[1].signal(signal.SIGINT)
    assert "is lost" not in peers[1].end().shown


@pytest.mark.fault(53)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_peer_without_gossipx_run_that_makes_no_step_says_how_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    first = "import threading\nos.dup2(1, 2)\ngossipx.runtime.ending.stop_signals.ONE_KEYSTROKE = 0.0"
    script = ALONE.replace("HANDLERS", first).replace(
        "train(peer, model, optimizer, 10**9)", "threading.Event().wait()"
    )
    with folder(tmp_path, 1) as here:
        peer = here.start(here.script(script), here.path, "0")
        peer.line("so far from 0")
        peer.signal(number)
        peer.line(f"stopping {here.names[0]} at the end of its step.*: {number.name} again stops at once")
        peer.signal(number)
        ended = peer.end()
        assert ended.code == -signal.SIGINT and "KeyboardInterrupt" in ended.output, ended.shown


# --- peers that come back -----------------------------------------------------------------------------


@pytest.mark.fault(54)
def test_a_peer_started_again_by_hand_counts_for_min_peers(tmp_path: Path) -> None:
    """Of 4 peers, 3 of which are needed, one is killed and started again; then another one is killed."""
    with folder(tmp_path, 4) as here:
        options = ("--policy", "tau:1", "--min-peers", "3", "--iterations", "100000", *BRIEF)
        run = training(here, *options)
        peers = children(run.pid)
        os.kill(peers[0], signal.SIGKILL)
        run.line(f"peer {here.names[0]} is lost")
        files = {"GOSSIPX_CONFIG": str(here.path / "x/config.toml"), "GOSSIPX_PEERS": str(here.path / "x/hosts.txt")}
        place = {**files, "GOSSIPX_RANK": "0"}
        main = f"import os; os.environ.update({place}); from gossipx.launch.loops.train import main; main()"
        again = here.start("-c", main)
        run.line(f"peer {here.names[0]} is back")
        os.kill(peers[1], signal.SIGKILL)
        run.line(f"peer {here.names[1]} is lost")
        run.line(f"{here.names[0]} restarted .* {here.names[1]} lost .* {here.names[3]} train")
        again.kill()
        ended = run.end()
        assert ended.code == 4 and "2 of 4 peers left, fewer than" in ended.errors, ended.shown


@pytest.mark.fault(11)
@pytest.mark.fault(53)
@pytest.mark.slow
@pytest.mark.parametrize("mode", [("--policy", "tau:1"), ("--servers", "3", "--sync", "bsp")])
def test_peers_that_notice_that_too_few_are_left_stop_in_order(tmp_path: Path, mode: tuple[str, ...]) -> None:
    """The two that leave on request are no losses for ``gossipx run``; the other two know better."""
    with folder(tmp_path, 4) as here:
        run = training(here, *mode, "--min-peers", "3", "--iterations", "100000", *BRIEF)
        peers = children(run.pid)
        for rank in (0, 1):
            os.kill(peers[rank], signal.SIGTERM)
        ended = run.end()
        assert ended.code == 4 and "peers left, fewer than min_peers = 3" in ended.errors, ended.shown
        assert ended.errors.count("peers left") == 1, ended.shown
        for rank in (2, 3):
            assert (store(here, rank).find() or 0) > 0, ended.shown
        assert "continue with: gossipx run --resume" in ended.output, ended.shown
        assert (here.path / "x" / "summary.json").exists()


@pytest.mark.fault(11)
@pytest.mark.fault(53)
@pytest.mark.slow
@pytest.mark.parametrize(("lost", "code"), [("stop", 4), ("wait", 130)])
def test_workers_that_wait_for_a_lost_server_stop_in_order(tmp_path: Path, lost: str, code: int) -> None:
    """By themselves, or by Ctrl-C."""
    with folder(tmp_path, 3) as here:
        servers = ("--servers", "0", "--sync", "bsp", "--server-lost", lost)
        run = training(here, *servers, "--iterations", "100000", *BRIEF, "--peer-timeout", "5")
        os.kill(children(run.pid)[0], signal.SIGKILL)
        if lost == "wait":
            run.line("has waited for .* it does not answer")
            run.signal(signal.SIGINT)
        ended = run.end()
        assert ended.code == code, ended.shown
        assert ended.errors.count("is lost, and --server-lost is stop") == (lost == "stop"), ended.shown
        for rank in (1, 2):
            assert (store(here, rank).find() or 0) > 0, ended.shown
        assert "continue with: gossipx run --resume" in ended.output, ended.shown
        assert (here.path / "x" / "summary.json").exists()
