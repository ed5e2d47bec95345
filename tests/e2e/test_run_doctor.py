"""``gossipx doctor`` in real processes: on loopback, where three addresses stand for machines, and in namespaces."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from emulated import EmulatedNetwork, Host, lacking
from emulated.namespaces import run
from ports import address, free_ports

from gossipx.launch.hosts import DEFAULT_PORT
from runs import LONG, Ended, Folder, Process, is_running

SHORT = "3"  # seconds to wait for missing hosts


def start(two: Folder, *options: str | Path) -> Process:
    return two.gossipx("doctor", "--peers", two.hosts, "--json", *options)


def findings(ended: Ended, code: int) -> dict[str, Any]:
    assert ended.code == code, ended.shown
    assert "Traceback" not in ended.errors, ended.shown
    found: dict[str, Any] = json.loads(ended.output)
    assert found["exit_code"] == code
    return found


def lines(found: dict[str, Any], level: str, about: str) -> list[str]:
    return [
        f"{verdict['text']}: {verdict['advice']}"
        for verdict in found["verdicts"]
        if (verdict["level"], verdict["about"]) == (level, about)
    ]


def failures(found: dict[str, Any]) -> list[str]:
    return [verdict["text"] for verdict in found["verdicts"] if verdict["level"] == "fail"]


def ways(found: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the measurements by host."""
    return {int(number): pair for number, pair in found["findings"]["ways"].items()}


def machines(two: Folder, count: int, slots: int = 1) -> int:
    """Write a hosts file of loopback addresses; with ``--advertise`` each address stands for a machine.

    Return their port.
    """
    port, *_ = free_ports(slots)
    two.hosts.write_text("".join(f"{address(n + 1)}:{port} slots={slots}\n" for n in range(count)))
    return port


def test_each_of_three_processes_reports_what_it_sees(two: Folder) -> None:
    machines(two, 3, slots=2)
    started = [start(two, "--advertise", address(n + 1)) for n in range(3)]
    for number, found in enumerate(findings(process.end(), 0) for process in started):
        assert len(found["findings"]["reached"]) == 6, "its own second line, too"
        assert found["findings"]["heard"] == sorted({0, 1, 2} - {number})
        assert set(ways(found)) == {0, 1, 2}
        assert all(way["rate"] > 0 and way["latency"] > 0 for way in ways(found).values())


def test_a_missing_host_is_reported_with_advice(two: Folder) -> None:
    machines(two, 2)
    found = findings(start(two, "--advertise", address(), "--wait", SHORT).end(), 1)
    (line,) = lines(found, "fail", "reach")
    assert f"{address()} → {address(2)}" in line and "Connection refused" in line
    assert "start the same command there" in line
    assert ways(found) == {}


def test_another_program_on_the_port_is_reported_by_both_sides(two: Folder) -> None:
    port = machines(two, 2)
    with socket.create_server((address(2), port)) as server:
        threading.Thread(target=greet_as_ssh, args=(server,), daemon=True).start()
        there = findings(start(two, "--wait", SHORT).end(), 1)
        (line,) = lines(there, "fail", "ports")
        assert f"port {port} of {address(2)} is not free: no gossipx listens there" in line and "another port" in line
        here = findings(start(two, "--advertise", address(), "--wait", SHORT).end(), 1)
        (line,) = lines(here, "fail", "reach")
        assert "no gossipx listens there" in line and "SSH" in line


def greet_as_ssh(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].sendall(b"SSH-2.0-other\r\n" * 10)


@pytest.mark.slow
def test_a_run_at_work_reports_its_model_and_receives_no_load(two: Folder) -> None:
    running = two.start_run(two.script(JOINS_AND_WAITS), two.path)
    running.line("ready")
    found = findings(start(two, two.script(JOINS, "other.py"), "5").end(), 1)
    (line,) = lines(found, "fail", "model")
    assert f"{address()} (a run)" in line
    (note,) = lines(found, "note", "ports")
    assert "a run is at work there" in note
    assert all(way["rate"] is None and way["latency"] > 0 for way in ways(found).values()), "no load for a run"
    (two.path / "go").touch()
    running.end(code=0)


def test_a_run_of_another_secret_is_not_to_be_stopped(two: Folder) -> None:
    secret = ("--secret-file", a_secret(two.path / "secret"))
    running = two.start_run(*secret, two.script(JOINS_AND_WAITS), two.path)
    running.line("ready")
    found = findings(start(two, "--wait", SHORT).end(), 5)
    (line,) = lines(found, "fail", "ports")
    assert "not authorised: " in line and "give all hosts and runs the same --secret-file" in line
    assert len(failures(found)) == 1 and "stop" not in line and "another port" not in line
    (two.path / "go").touch()
    running.end(code=0)


JOINS = """
model = nn.Linear(int(sys.argv[1]), 1)
with gossipx.join(model, torch.optim.SGD(model.parameters(), 0.1)) as peer:
    raise AssertionError("a doctor's script must stop in join")
"""
JOINS_AND_WAITS = """
import time

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 1)
    print("ready", flush=True)
    while not (FOLDER / "go").exists():
        time.sleep(0.05)
"""


def test_another_secret_ends_with_5_on_both_sides(two: Folder) -> None:
    machines(two, 2)
    secrets_of = [a_secret(two.path / name) for name in ("one", "other")]
    started = [
        start(two, "--advertise", address(number), "--wait", SHORT, "--secret-file", secret)
        for number, secret in enumerate(secrets_of, 1)
    ]
    for process in started:
        (line,) = lines(findings(process.end(), 5), "fail", "reach")
        assert "the secrets differ" in line and "--secret-file" in line


def a_secret(file: Path) -> Path:
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    return file


def test_a_different_hosts_file_is_reported(two: Folder) -> None:
    machines(two, 2)
    other = two.path / "other.txt"
    other.write_text(two.hosts.read_text() + f"{address(3)}\n")
    one = start(two, "--advertise", address(), "--wait", SHORT)
    two = start(two, "--advertise", address(2), "--wait", SHORT, "--peers", other)
    for process in (one, two):
        found = findings(process.end(), 1)
        here, there = (2, 3) if process is one else (3, 2)
        (text,) = [text for text in failures(found) if "the hosts files differ" in text]
        assert f"the hosts files differ: {here} peers here and {there} there" in text


def test_ctrl_c_ends_it_at_once_and_leaves_nothing(two: Folder) -> None:
    port = machines(two, 2)
    process = start(two, "--advertise", address(), "--wait", "3600")
    until = time.monotonic() + LONG
    while not listens(port):
        assert is_running(process.pid) and time.monotonic() < until
    process.signal(signal.SIGINT)
    ended = process.end(30)
    assert ended.code == 130 and not ended.output and "Traceback" not in ended.errors, ended.shown
    assert not listens(port)


def listens(port: int) -> bool:
    with socket.socket() as knocking:
        return knocking.connect_ex((address(), port)) == 0


# --- in namespaces ----------------------------------------------------------------------------------


@pytest.fixture
def network(forked_hosts: None) -> None:
    """Skip the test where the system allows no emulated networks."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)


def start_on(host: Host, folder: Path, *options: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gossipx", "doctor", "--peers", folder / "hosts.txt", "--secret-file"]
    whole = [*command, folder / "secret", "--bind", "0.0.0.0", "--json", *options]
    return host.popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str], code: int) -> dict[str, Any]:
    output, errors = process.communicate(timeout=LONG)
    return findings(Ended(process.returncode, output, errors), code)


def prepare(net: EmulatedNetwork, path: Path) -> None:
    (path / "hosts.txt").write_text("".join(f"{host.address}\n" for host in net.hosts))
    a_secret(path / "secret")


@pytest.mark.usefixtures("network")
def test_what_is_measured_is_what_was_shaped(tmp_path: Path) -> None:
    """One of three tries must succeed, as the machine may be busy. No try may measure more than the link's rate."""
    with EmulatedNetwork(2, "40mbit", delay_ms=10) as net:
        prepare(net, tmp_path)

        def measured() -> bool:
            started = [start_on(host, tmp_path) for host in net.hosts]
            one, other = (ways(end(process, 0)) for process in started)
            both = [one[1], other[0]]
            assert all(way["latency"] >= 0.02 for way in both)
            assert all(8 * way["rate"] < 60e6 for way in both), "the bucket is full at first"
            return all(8 * way["rate"] > 20e6 and way["latency"] < 0.1 for way in both)

        assert any(measured() for _ in range(3))


@pytest.mark.usefixtures("network")
@pytest.mark.fault(70)
@pytest.mark.slow
def test_a_path_that_is_cut_one_way_and_a_missing_host_are_reported(tmp_path: Path) -> None:
    """The second host's replies on the first host's connections are lost; its own connections to the first work."""
    with EmulatedNetwork(3, "100mbit") as net:
        prepare(net, tmp_path)
        first, second, third = net.hosts
        rule = ("to", first.address, "ipproto", "tcp", "sport", str(DEFAULT_PORT), "blackhole")
        run("ip", "-n", second.namespace, "rule", "add", "pref", "10", *rule)
        run("ip", "-n", third.namespace, "link", "set", "dev", "eth0", "down")
        started = [start_on(host, tmp_path, "--wait", "8") for host in (first, second)]
        one, other = (end(process, 1) for process in started)
        cut, missing = lines(one, "fail", "reach")
        assert f"{first.address} → {second.address}:{DEFAULT_PORT}" in cut and "does not answer" in cut
        assert "(the other way works)" in cut and f"TCP port {DEFAULT_PORT}" in cut
        assert f"{first.address} → {third.address}" in missing and "the other way" not in missing
        assert ways(one) == {} and ways(other)[0]["rate"] > 0
        assert "no probe has arrived" in lines(other, "warn", "reach")[0]


@pytest.mark.slow
@pytest.mark.usefixtures("network")
def test_a_path_that_loses_full_size_packets_is_reported_by_both_ends(tmp_path: Path) -> None:
    """Small messages pass, as in a tunnel whose MTU is unknown to the hosts."""
    with EmulatedNetwork(2, "100mbit") as net:
        prepare(net, tmp_path)
        for host in net.hosts:  # else the kernel joins several packets, and no length is checked
            run("ip", "-n", host.namespace, "link", "set", "dev", "eth0", "gso_max_size", "1500")
        run("ip", "-n", net.hosts[1].lan, "link", "set", "dev", net.hosts[1].port, "mtu", "1300")
        started = [start_on(host, tmp_path, "--wait", "8") for host in net.hosts]
        # A link drops what exceeds its MTU in both directions, and each host reports what does not reach it.
        for process, path in zip(started, ("198.18.0.2 → 198.18.0.1", "198.18.0.1 → 198.18.0.2"), strict=True):
            (line,) = lines(end(process, 1), "fail", "bandwidth")
            assert f"{path}: small messages arrive in time, 64 KiB do not" in line and "MTU" in line
