"""A small network of namespaces on this machine, created on demand and removed afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from emulated import namespaces
from emulated.namespaces import GONE_WITHIN, NetworkUnavailableError, lacking, run, sweep, works
from emulated.shaping import HIDING, TokenBucket, netem

SUBNET = "198.18.0"
"""Reserved for measurements of networks (RFC 2544), so that a stray packet reaches nobody."""
MOST_PEERS = 64


class Host:
    """One peer's host in the network.

    Attributes:
        address: IPv4 address, the same in every network, since namespaces are separate.
        namespace: name of its namespace, for ``ip netns exec``.
        lan: namespace of the switch.
        port: device of the switch to which its link is connected.
    """

    def __init__(self, namespace: str, port: str, lan: str, number: int):
        self.address = f"{SUBNET}.{number}"
        self.namespace = namespace
        self.port = port
        self.lan = lan
        self._processes: list[subprocess.Popen[Any]] = []

    def hide(self) -> None:
        """Drop each packet that would open a TCP connection to this host, as NAT or a firewall does; needs nft."""
        run("ip", "netns", "exec", self.namespace, "nft", "--file", "-", given=HIDING)

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the host. It and its child processes are killed when the network is removed.

        Args:
            command: program and arguments. If FORKED_PYTHON is set, that forks Python's processes; see :mod:`forks`.
            options: options of :class:`subprocess.Popen`.
        """
        inside = list(map(str, command))
        if sys.executable in inside and "FORKED_PYTHON" in os.environ:
            inside[inside.index(sys.executable)] = os.environ["FORKED_PYTHON"]
            options["env"] = {**(options.get("env") or os.environ), "FORKS_NETWORK": f"/run/netns/{self.namespace}"}
        else:
            inside = ["ip", "netns", "exec", self.namespace, *inside]  # 'ip' execs, so this process becomes the command
        process = subprocess.Popen(inside, **options)
        self._processes.append(process)
        return process

    def received(self) -> int:
        """Return the bytes to the peer so far: Ethernet frames with headers, as counted by its link's token bucket."""
        queues = json.loads(run("tc", "-n", self.lan, "-s", "-j", "qdisc", "show", "dev", self.port))
        return int(next(one["bytes"] for one in queues if one["kind"] == "tbf"))

    def reap(self) -> None:
        """Wait for the processes that were started here, which have ended or been killed."""
        for process in self._processes:
            process.wait(GONE_WITHIN)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


class EmulatedNetwork:
    """Peers on one switch, each with a link of a given rate, isolated from this machine's network.

    Each peer has a namespace, with a veth pair to a bridge in a namespace between them, and a token bucket at both ends
    of the pair, which shape both directions. There is no route to this machine. Leaving the ``with`` block removes
    everything, even after an error; namespaces of a killed process are removed by the next network (:func:`sweep`).

    Args:
        peers: number of peers.
        rate: rate of each link in each direction, in tc's notation: ``100mbit``.
        delay_ms: one-way delay between two peers; a round trip takes twice that.

    Attributes:
        hosts: hosts by number, from 0.
        bucket: token bucket that shapes the links.
        has_switch: whether frames pass through a switch in user space, which delays them, instead of a bridge.

    Raises:
        NetworkUnavailableError: this system cannot emulate a network; raised when the block is entered.
        ValueError: invalid arguments.
    """

    def __init__(self, peers: int, rate: str, delay_ms: float = 0.0):
        if not 1 <= peers <= MOST_PEERS or delay_ms < 0:
            raise ValueError(f"1 to {MOST_PEERS} peers, and a delay that is not negative")
        self.bucket = TokenBucket.of(rate)
        self._rate = rate
        self._delay_ms = delay_ms
        self._prefix = namespaces.unique_prefix()
        self._lan = f"{self._prefix}-lan"
        self.hosts = [Host(f"{self._prefix}-{n}", f"port{n}", self._lan, n + 1) for n in range(peers)]
        self.has_switch = False
        self._switch: subprocess.Popen[str] | None = None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> EmulatedNetwork:
        reason = lacking()
        if reason is not None:
            raise NetworkUnavailableError(reason)
        sweep()
        with contextlib.ExitStack() as undo:
            undo.enter_context(_ended_by_signals())
            undo.callback(self._remove)
            self._make()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def describe(self) -> str:
        """Return rate and delay, and their mechanisms, in words."""
        by = "a switch in user space (this kernel has no netem)" if self.has_switch else "netem"
        delay = f"delay {self._delay_ms:g} ms by {by}" if self._delay_ms else "no delay"
        return f"{len(self.hosts)} peers, {self._rate} each way ({self.bucket}), {delay}"

    def switch_counts(self) -> dict[str, int]:
        """Return the frames ``passed`` and ``overflowed`` in the switch in user space, if there is one."""
        assert self._switch is not None and self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.write("\n")
        self._switch.stdin.flush()
        line = self._switch.stdout.readline()
        if not line:
            raise RuntimeError("the switch has ended; why, it has told on standard error")
        counts: dict[str, int] = json.loads(line)
        return counts

    # --- making it ----------------------------------------------------------------------------------

    def _make(self) -> None:
        run("ip", "netns", "add", self._lan)
        has_netem = works("tc", "-n", self._lan, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        self.has_switch = self._delay_ms > 0 and not has_netem
        if not self.has_switch:
            run("ip", "-n", self._lan, "link", "add", "name", "lan0", "type", "bridge", "mcast_snooping", "0")
            run("ip", "-n", self._lan, "link", "set", "dev", "lan0", "addrgenmode", "none", "up")
        for host in self.hosts:
            self._connect(host)
        if self.has_switch:
            self._start_switch()

    def _connect(self, host: Host) -> None:
        inside, between = ("ip", "-n", host.namespace), ("ip", "-n", self._lan)
        run("ip", "netns", "add", host.namespace)
        run(*between, "link", "add", "name", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        run("tc", "-n", host.namespace, "qdisc", "add", "dev", "eth0", "root", *self.bucket.arguments())
        place = ["root"]
        if self._delay_ms and not self.has_switch:
            line = netem(self.bucket, self._delay_ms)
            run("tc", "-n", self._lan, "qdisc", "add", "dev", host.port, "root", "handle", "1:", *line)
            place = ["parent", "1:1", "handle", "2:"]
        run("tc", "-n", self._lan, "qdisc", "add", "dev", host.port, *place, *self.bucket.arguments())
        if not self.has_switch:
            run(*between, "link", "set", "dev", host.port, "master", "lan0")
        run(*between, "link", "set", "dev", host.port, "addrgenmode", "none", "up")
        run(*inside, "link", "set", "dev", "eth0", "addrgenmode", "none", "up")
        run(*inside, "link", "set", "dev", "lo", "up")

    def _start_switch(self) -> None:
        program = Path(__file__).with_name("switch.py")
        command = ["ip", "netns", "exec", self._lan, sys.executable, str(program), str(self._delay_ms / 1e3)]
        ports = [host.port for host in self.hosts]
        self._switch = subprocess.Popen([*command, *ports], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.switch_counts()  # returns once the switch is serving

    def _remove(self) -> None:
        """Remove everything; an error in one step does not stop the others."""
        with _signals_wait(), contextlib.ExitStack() as last_first:
            for host in self.hosts:
                last_first.callback(host.reap)
            last_first.callback(self._remove_namespaces)
            if self._switch is not None:
                last_first.callback(_end, self._switch)

    def _remove_namespaces(self) -> None:
        namespaces.remove(name for name in namespaces.names() if name.startswith(f"{self._prefix}-"))


def _end(switch: subprocess.Popen[str]) -> None:
    assert switch.stdin is not None and switch.stdout is not None
    with switch.stdin, switch.stdout:
        switch.kill()
        switch.wait(GONE_WITHIN)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the program by an exception, if they would have ended it without one."""

    def ended(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    ours = []
    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, ended)
                ours.append(number)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Block signals during the removal, so that a second Ctrl-C does not interrupt it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
