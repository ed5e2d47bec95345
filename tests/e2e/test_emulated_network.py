"""The emulated network itself: it provides the given rate and delay, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from emulated import EmulatedNetwork, NetworkUnavailableError, lacking, sweep
from emulated.namespaces import names
from emulated.runs import train
from transfers import RECEIVER, ask, gets_the_rate, python, result, transfer

from runs import LONG, is_running


@pytest.fixture
def here() -> None:
    """Skip the test if this system cannot emulate networks."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)


needs_network = pytest.mark.usefixtures("here")


# --- rate -------------------------------------------------------------------------------------------


@needs_network
@pytest.mark.parametrize(
    ("rate", "count"),
    [("10mbit", 2_000_000), ("100mbit", 10_000_000), pytest.param("1gbit", 200_000_000, marks=pytest.mark.slow)],
)
def test_tcp_gets_the_links_rate(rate: str, count: int) -> None:
    with EmulatedNetwork(2, rate) as net:
        assert gets_the_rate(net.bucket, lambda: transfer(net.hosts[0], net.hosts[1:], count))


# --- isolation --------------------------------------------------------------------------------------


@needs_network
def test_a_peer_reaches_other_peers_and_nothing_else() -> None:
    devices = socket.if_nameindex()
    with EmulatedNetwork(2, "1gbit") as net, socket.create_server(("127.0.0.1", 0)) as outside:
        assert socket.if_nameindex() == devices  # devices of this machine are unchanged
        assert ask(python(net.hosts[1], RECEIVER, 1, 1))
        reach = """
            import json, socket, sys
            def reach(host, port):
                with socket.socket() as probe:
                    return probe.connect_ex((host, int(port)))
            places = (sys.argv[1], 5000), ("127.0.0.1", sys.argv[2]), ("192.0.2.1", 80)
            print(json.dumps([reach(*place) for place in places]))
        """
        told = result(python(net.hosts[0], reach, net.hosts[1].address, outside.getsockname()[1]))
        assert told == [0, errno.ECONNREFUSED, errno.ENETUNREACH]


# --- delay ------------------------------------------------------------------------------------------


@needs_network
def test_a_delay_delays_every_frame_and_changes_none() -> None:
    with EmulatedNetwork(2, "1gbit", delay_ms=15) as net:
        assert f"delay 15 ms by {'a switch in user space' if net.has_switch else 'netem'}" in net.describe()
        one, other = net.hosts
        server = python(one, RECEIVER, 5, 1)
        assert ask(server)
        connect = """
            import json, socket, sys, time
            trips = []
            for _ in range(5):
                began = time.monotonic()
                with socket.create_connection((sys.argv[1], 5000)) as connection:
                    trips.append(time.monotonic() - began)
            print(json.dumps(trips))
        """
        trips = result(python(other, connect, one.address))
        assert min(trips) >= 2 * 0.015
    with EmulatedNetwork(2, "1gbit", delay_ms=1) as net:
        count = 5_000_000  # mostly sent as large segments
        told = transfer(net.hosts[0], net.hosts[1:], count)
        assert told["digest"] == hashlib.sha256(random.Random(0).randbytes(count)).hexdigest()
        if net.has_switch:
            assert net.switch_counts()["passed"] > 0
            assert net.switch_counts()["overflowed"] == 0


# --- nothing is left --------------------------------------------------------------------------------


OWNER = """
    import signal, subprocess, sys, threading
    from emulated import EmulatedNetwork
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it, and so do we
    with EmulatedNetwork(2, "10mbit", delay_ms=1) as net:
        started = net.hosts[0].popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        print(net.hosts[0].namespace, started.pid, started.stdout.readline(), flush=True)
        threading.Event().wait()
"""


@contextlib.contextmanager
def owner() -> Any:
    """Start a process that owns a network; yield it, the name of the first namespace, and the processes in it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(OWNER)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            name, *pids = process.stdout.readline().split()
            yield process, name, [int(pid) for pid in pids]
        finally:
            process.kill()


@needs_network
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_all_is_gone_after_sigterm_or_ctrl_c(number: signal.Signals, code: int) -> None:
    with owner() as (process, name, pids):
        assert name in names()
        process.send_signal(number)
        assert process.wait(LONG) == code
        assert name not in names()
        assert not any(is_running(pid) for pid in pids)


@needs_network
def test_only_the_leftovers_of_a_killed_process_are_swept() -> None:
    with EmulatedNetwork(1, "10mbit") as net, owner() as (process, name, pids):
        sweep()
        assert name in names()
        process.kill()
        process.wait()
        assert len(pids) == 2
        sweep()
        assert name not in names()
        assert not any(is_running(pid) for pid in pids)
        assert net.hosts[0].namespace in names()


# --- what it needs ----------------------------------------------------------------------------------


def test_the_message_names_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    needs = "an emulated network needs root on Linux, with ip and tc (Debian's iproute2): "
    assert lacking.__wrapped__() == f"{needs}this is user 1000"
    monkeypatch.setattr("shutil.which", lambda tool: None)
    reason = lacking.__wrapped__()
    assert reason == f"{needs}ip and tc not found"
    monkeypatch.setattr("emulated.network.lacking", lambda: reason)
    with pytest.raises(NetworkUnavailableError, match="ip and tc not found"), EmulatedNetwork(2, "10mbit"):
        pass


# --- its purpose ------------------------------------------------------------------------------------


@needs_network
@pytest.mark.usefixtures("forked_hosts")
def test_gossipx_runs_on_several_machines(tmp_path: Path) -> None:
    """docs/hosts.md: the same command on each host starts that host's line."""
    with EmulatedNetwork(2, "100mbit") as net:
        options = ("--policy", "tau:5", "--blocking", "--iterations", "40", "--eval-interval", "0")
        one, other = train(net, tmp_path, "first", *options)
        received = [host.received() for host in net.hosts]
    assert one.lost == other.lost == []
    assert one.retrievals == other.retrievals == [8, 8]
    assert one.test_accuracy[0] == one.test_accuracy[1]  # after the finish all have the same model
    for told, counted in zip(one.bytes_received, received, strict=True):
        assert told is not None
        assert 8 * 4 * 102_882 < told < counted
