"""``gossipx run --ssh``: with a real sshd on this machine, and with a program that stands in for ssh.

Two loopback addresses stand for two machines.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import address, free_ports

from gossipx.metrics import summary
from runs import LONG, TEN_LINES, Ended, Folder, Process, Run, differences, folder, one_line

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
BRIEF = ("--batch-size", "8", "--eval-interval", "0", "--peer-timeout", "20", "--policy", "tau:5")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is loopback on Linux alone")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Folder]:
    """A folder whose two peers are two hosts."""
    with folder(tmp_path, 1) as here:
        here.names = [f"{address(host)}:{port}" for host, port in enumerate(free_ports(2), 1)]
        here.hosts.write_text("".join(f"{name}\n" for name in here.names))
        yield here


def program(here: Folder, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make ``ssh`` a shell script."""
    path = here.path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


@pytest.fixture
def stand_in(hosts: Folder, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """The hosts, with an ``ssh`` that notes its arguments and runs the command here."""
    program(hosts, monkeypatch, f'printf "%s\\n" "$@" >> {hosts.path}/asked\nshift\nexec sh -c "$1"')
    return hosts


@pytest.fixture
def sshd(hosts: Folder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """The hosts, with a real sshd on the second one, and the real ssh with a key of its own."""
    ssh = shutil.which("ssh")
    if SSHD is None or ssh is None:
        pytest.skip("openssh-server and openssh-client are not installed")
    (port,) = free_ports(1)
    keys = hosts.path / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True, timeout=LONG)
    (keys / "sshd_config").write_text(
        f"ListenAddress {address(2)}:{port}\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/user.pub\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nSetEnv "
        + " ".join(f'{name}="{os.environ[name]}"' for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ)
        + "\n"
    )
    (keys / "config").write_text(
        f"Host {address(2)}\nPort {port}\nUser {getpass.getuser()}\nIdentityFile {keys}/user\nIdentitiesOnly yes\n"
        f"BatchMode yes\nUserKnownHostsFile {keys}/known\nStrictHostKeyChecking accept-new\nLogLevel ERROR\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, which its package makes at boot
    serving = subprocess.Popen([SSHD, "-D", "-e", "-f", keys / "sshd_config"], stderr=subprocess.PIPE)
    try:
        by = time.monotonic() + LONG
        while not answers(port):
            assert serving.poll() is None, serving.stderr and serving.stderr.read()
            assert time.monotonic() < by
        program(hosts, monkeypatch, f'exec {ssh} -F {keys}/config "$@"')
        yield hosts
    finally:
        serving.terminate()
        serving.wait(LONG)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address(2), port)) == 0


def start(here: Folder, *options: str | Path) -> Process:
    """Start ``gossipx run --ssh`` as on the first host."""
    return here.start_run("--advertise", address(), "--ssh", *BRIEF, *options, fresh=True)


def whole(here: Folder, ended: Ended) -> None:
    """Check that both hosts have the same model, and a summary of both peers."""
    runs = [Run(here.path / "x", ended), Run(here.path / address(2) / "x", ended)]
    for run in runs:
        found = run.summary
        assert found["lost"] == [] and found["agreed"] is True and None not in found["retrievals"]
    assert max(differences(runs[0].model(0), runs[1].model(1)).values()) == 0


@pytest.mark.slow
def test_both_hosts_train_and_the_others_lines_are_shown(sshd: Folder) -> None:
    ended = start(sshd, "--iterations", "30").end(code=0)
    assert f"[{address(2)}] wrote" in ended.output, ended.shown
    whole(sshd, ended)


def test_the_command_is_the_same_with_the_name_and_the_place_of_the_host(stand_in: Folder) -> None:
    loop = "with peer:\n    tell(peer, arguments=sys.argv[2:])\n    train(peer, model, optimizer, 30)\n"
    script = stand_in.script(TEN_LINES + loop)
    options = ("--advertise", address(), "--ssh", "--peer-timeout", "20", "--no-save-model")
    stand_in.run(*options, script, stand_in.path, "two words", "--flag", fresh=True)
    assert stand_in.told(0) == stand_in.told(1) == {"arguments": ["two words", "--flag"]}
    host, command = (stand_in.path / "asked").read_text().splitlines()
    assert host == address(2)
    assert f"cd {stand_in.path} && exec env GOSSIPX_STOP_WITH_INPUT=1" in command
    for part in ("--name x", f"--logdir {stand_in.path}/{address(2)}", f"--advertise {address(2)}", "--no-save-model"):
        assert part in command, command
    assert "--ssh" not in command and "'two words' --flag" in command


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow)]
)
def test_all_hosts_stop_in_order(stand_in: Folder, number: signal.Signals, code: int) -> None:
    run = start(stand_in, "--iterations", "1000000")
    run.line(rf"{stand_in.names[0]} train \d+")
    run.line(rf"\[{address(2)}\] {stand_in.names[1]} train \d+")
    run.signal(number)
    ended = run.end(code=code)
    assert f"[{address(2)}] stopped at" in ended.output, ended.shown
    for rank, directory in enumerate((stand_in.path / "x", stand_in.path / address(2) / "x")):
        assert stand_in.names[rank] in summary.read(directory).stopped
        assert any(directory.glob(f"peer-{rank:02d}/checkpoints/*/manifest.json"))


def test_a_host_that_ssh_does_not_reach_ends_the_run_before_it_trains(
    hosts: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(hosts, monkeypatch, f"echo 'ssh: connect to host {address(2)} port 22: Connection refused'; exit 255")
    ended = start(hosts, "--iterations", "30").end(code=1)
    assert f"[{address(2)}] ssh: connect to host" in ended.output
    assert ended.errors == f"{address(2)}: ssh has failed, or its connection was lost\n"
    assert not (hosts.path / "x").exists(), "the name stays free"


def test_what_ssh_cannot_start_is_refused_in_one_line(two: Folder) -> None:
    refused = two.refused("--ssh", "--iterations", "10")
    assert "all lines of the hosts file are this machine" in refused
    assert not (two.path / "x").exists()
    assert "--seeds" in two.refused("--ssh", "--seeds", "0-1")
    help_ = two.gossipx("run", "--ssh", "--dry-run", "--peers", two.hosts).end()
    assert "--dry-run" in one_line(help_, 2)


@pytest.mark.slow
def test_an_ssh_from_which_nothing_comes_is_killed_after_the_run(
    hosts: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(hosts, monkeypatch, "exec sleep 1000")
    ended = start(hosts, "--iterations", "10", "--peer-timeout", "2").end(code=255)
    assert f"{address(2)}: its ssh was killed, because nothing has come from there" in ended.output, ended.shown
    assert summary.read(hosts.path / "x").lost == [hosts.names[1]]


@pytest.mark.slow
def test_an_ssh_that_hangs_is_named_and_ends_at_the_second_signal(
    hosts: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(hosts, monkeypatch, "exec sleep 1000")
    run = start(hosts, "--iterations", "30", "--peer-timeout", "2")
    run.line(rf"{hosts.names[0]} joining")
    run.signal(signal.SIGINT)
    run.line(f"waiting for {address(2)} to stop; killed in")
    run.signal(signal.SIGINT)
    ended = run.end(code=130)
    assert f"{address(2)}: did not stop" in ended.output, ended.shown
