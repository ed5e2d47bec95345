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
from seeds import some

from gossipx.metrics import summary
from runs import LONG, TEN_LINES, Folder, Process, children, folder, is_running

BUILT_IN = ("--policy", "tau:5", "--iterations", "100000", *BRIEF)


def training(here: Folder, *options: str | Path) -> Process:
    """Return a run, all of whose peers train."""
    run = here.start_run(*options)
    run.line(".*".join(rf"{name} train \d+" for name in here.names))
    return run


def prints_so_far(here: Folder, *options: str | Path) -> Process:
    """Return a run, all of whose peers have printed this."""
    run = here.start_run(*options)
    for _ in here.names:
        run.line("so far")
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
    ended = run.end(code=code)
    assert len(peers) == 2 and not any(is_running(pid) for pid in peers.values())
    assert ended.errors == "", ended.shown
    found = check_stopped(two, ended.output)
    again = resumed(two, "--iterations", str(max(found) + 10))
    assert again.summary["iterations"] == max(found) + 10 and again.summary["lost"] == again.summary["stopped"] == []


MODES = {
    "hub only": ("--policy", "tau:5", "--hub", "0", "--hub-only"),
    "servers": ("--servers", "0", "--sync", "bsp"),
    "servers only": ("--servers", "0", "--servers-only", "--sync", "asp"),
    "waves": ("--policy", "tau:5", "--exchange", "waves"),
}


@pytest.mark.fault(53)
@pytest.mark.parametrize("mode", some(MODES, "waves"))
def test_a_stopped_run_continues_in_every_mode(two: Folder, mode: str) -> None:
    """From where it was, not from the start."""
    run = two.start_run("--iterations", "100000", *BRIEF, *MODES[mode])
    run.line(rf"{two.names[1]} train [1-9]")
    run.signal(signal.SIGINT)
    ended = run.end(code=130)
    assert ended.errors == "" and f"continue with: gossipx run --resume {two.path / 'x'}" in ended.output, ended.shown
    found = summary.read(two.path / "x")
    assert found.lost == [] and found.stopped == two.names
    assert kept(two)[1]
    until = max(one or 0 for one in kept(two)) + 20
    again = resumed(two, "--iterations", str(until))
    assert "no checkpoint" not in again.ended.shown and again.summary["iterations"] == until
    received = again.summary["bytes_received"][1]
    assert received > (found.bytes_received[1] or 0) > 0, "it counts from the beginning"


@pytest.mark.fault(53)
@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_and_says_what_there_is(two: Folder) -> None:
    script = two.script(TEN_LINES + "train(peer, model, optimizer, 20)\nprint('so far')\nsignal.pause()\n")
    run = prints_so_far(two, "--checkpoint-every", "10", "--peer-timeout", "60", script, two.path)
    wait_for(two, 10, run)
    run.signal(signal.SIGINT)
    run.line("Ctrl-C again")
    run.signal(signal.SIGINT)
    ended = run.end(code=130)
    assert ended.errors == "", ended.shown
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
    run = prints_so_far(two, "--peer-timeout", "60", script, two.path)
    run.signal(signal.SIGINT)
    ended = run.end(code=130)
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
    run = prints_so_far(two, "--peer-timeout", "20", script, two.path)
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
    again.end(code=130)


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
    ended = peers[0].end(code=code)
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
def test_a_peer_started_again_by_hand_counts_for_min_peers(four: Folder) -> None:
    """Of 4 peers, 3 of which are needed, one is killed and started again; then another one is killed."""
    run = training(four, "--policy", "tau:1", "--min-peers", "3", "--iterations", "100000", *BRIEF)
    peers = children(run.pid)
    os.kill(peers[0], signal.SIGKILL)
    run.line(f"peer {four.names[0]} is lost")
    files = {"GOSSIPX_CONFIG": str(four.path / "x/config.toml"), "GOSSIPX_PEERS": str(four.path / "x/hosts.txt")}
    place = {**files, "GOSSIPX_RANK": "0"}
    main = f"import os; os.environ.update({place}); from gossipx.launch.loops.train import main; main()"
    again = four.start("-c", main)
    run.line(f"peer {four.names[0]} is back")
    os.kill(peers[1], signal.SIGKILL)
    run.line(f"peer {four.names[1]} is lost")
    run.line(f"{four.names[0]} restarted .* {four.names[1]} lost .* {four.names[3]} train")
    again.kill()
    ended = run.end(code=4)
    assert "2 of 4 peers left, fewer than" in ended.errors, ended.shown


@pytest.mark.fault(11)
@pytest.mark.fault(53)
@pytest.mark.slow
def test_workers_that_wait_for_a_lost_server_stop_in_order_on_ctrl_c(three: Folder) -> None:
    servers = ("--servers", "0", "--sync", "bsp", "--server-lost", "wait")
    run = training(three, *servers, "--iterations", "100000", *BRIEF, "--peer-timeout", "5")
    os.kill(children(run.pid)[0], signal.SIGKILL)
    run.line("has waited for .* it does not answer")
    run.signal(signal.SIGINT)
    ended = run.end(code=130)
    for rank in (1, 2):
        assert (store(three, rank).find() or 0) > 0, ended.shown
    assert "continue with: gossipx run --resume" in ended.output, ended.shown
    assert (three.path / "x" / "summary.json").exists()
