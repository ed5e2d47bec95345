"""``gossipx doctor``: diagnosis of the machines of a run, before the run or when it misbehaves.

The user starts the same command on each host, as for ``gossipx run``. Each doctor listens on the ports of its peers,
probes all other hosts, answers their probes, and reports only what it sees itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gossipx.errors import GossipxError
from gossipx.launch.hosts import PeerLine, bind_host, line_of, peers_digest, read_hosts
from gossipx.settings.sections import RunConfig
from gossipx.tools.doctor import machine
from gossipx.tools.doctor.findings import Findings, Host, Line, Measurement, hosts_of
from gossipx.tools.doctor.listener import Listener
from gossipx.tools.doctor.probe import RETRY, Prober, connect, probing, reach
from gossipx.transports.access import grant
from gossipx.transports.handshake import checkup_facts
from gossipx.transports.link import Links
from gossipx.wire import Hello
from gossipx.wire.agreement import difference

# Seconds to wait for the probes of other hosts once this host's probes are done. The other doctors may have started
# later or run more slowly, and need a second or two per host.
_STAY, _STAY_PER_HOST = 10.0, 5.0
_POLL = 1.0  # seconds between two reports of missing hosts
# States of a line that answered. A later failure, such as the end of the doctor there, does not replace them.
_ANSWERED = {"ok", "foreign", "authorised", "version", "peers", "other"}


def examine(
    settings: RunConfig, peers_file: Path, script: list[str] | None, wait: float, report: Callable[[str], None]
) -> Findings:
    """Examine this machine, and all other hosts of the hosts file from here; raise the errors of ``gossipx run``.

    ``script`` is the command whose model is compared; empty: the built-in task's model; None: no model. The other hosts
    must answer within ``wait`` seconds; ``report`` receives a line about those that are missing.
    """
    peers = read_hosts(peers_file)
    hosts = hosts_of(peers)
    names = machine.resolve(hosts)
    here = machine.hosts_here(hosts, names, settings.exchange.advertise, peers_file)
    lines = [peer for host in here for peer in host.peers]
    binds = {peer.rank: bind_host(peer, settings.exchange.bind, peers_file) for peer in lines}
    granted, *_ = [grant(settings.exchange, bind) for bind in binds.values()]
    with contextlib.ExitStack() as stack:
        # SIGTERM acts like Ctrl-C, so that the process that builds a model also ends.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        title, manifest, fault = machine.model(settings, len(peers), peers_file, lines[0], script)
        digest = hashlib.sha256(manifest).hexdigest() if manifest else ""
        me = Hello(lines[0].rank, lines[0].name, len(peers), peers_digest(peers), digest)
        found = Findings(hosts, [host.number for host in here], checkup_facts(me, "doctor"), names)
        found.model, found.fault, found.tls = title, fault, settings.exchange.tls_cert is not None
        found.devices = machine.devices(found.own, lines, settings.run.device)
        links = Links("doctor", 0, timeout=10.0)
        stack.callback(links.abort)
        listing = "\n".join(line_of(peer.host, peer.port, peer.name, None, peer.behind_nat) for peer in peers).encode()
        aliases = [host.peers[0].name for host in here[1:]]
        prober = Prober(me, aliases, peers, listing, manifest, granted, links, threading.Lock())
        listener = Listener(lines, binds, prober)
        stack.callback(listener.close)
        _Checkup(found, prober, listener, report).run(wait)
    return found


@dataclass
class _Checkup:
    """The checkup that one host runs. ``listener.news`` guards ``found``, which receives the results."""

    found: Findings
    prober: Prober
    listener: Listener
    report: Callable[[str], None]
    reported: set[str] = field(default_factory=set)
    receiving: threading.Lock = field(default_factory=threading.Lock)  # this host receives one load at a time
    pending: set[int] = field(default_factory=set)  # hosts whose probes are not done

    def run(self, wait: float) -> None:
        """Probe all hosts, then stay while others still probe this host."""
        found, news = self.found, self.listener.news
        found.ports = self.listener.ports
        own = {port.rank: port.state for port in found.ports}
        # A host behind NAT may be unable to reach its own address.
        answering = {"run"} if len(own) == 1 and len(self.prober.peers) > 1 else {"run", "open"}
        until = time.monotonic() + wait
        for host in found.hosts:
            reachable = host.number not in found.hidden
            targets = [peer for peer in host.peers if reachable and own.get(peer.rank, "run") in answering]
            if targets:
                self.pending.add(host.number)
                self.prober.links.spawn(f"probe-{host.number}", self._probe, host, targets, until)
        with news:
            while self.pending:  # terminates, because each probe has deadlines
                if not news.wait(_POLL):
                    absent = {number for number in self.pending if not found.seen(found.hosts[number])}
                    self._missing(absent, "start the same command there")
            until = time.monotonic() + _STAY + _STAY_PER_HOST * len(found.others)
            stays = any(state == "open" for state in own.values())
            while (left := found.expected - self._probed()) and stays and time.monotonic() < until:
                if not news.wait(_POLL):
                    self._missing(left, "it has not probed this host yet")
            found.heard = self._probed()

    def _probe(self, host: Host, targets: list[PeerLine], until: float) -> None:
        """Try the lines of a host until all have answered or the time is over, then measure."""
        seen: dict[int, Line] = {}
        try:
            left = targets if self.found.names[host.number].addresses else []
            while left:
                for peer in left:
                    line = reach(self.prober, peer)
                    if peer.rank not in seen or line.state in _ANSWERED or seen[peer.rank].state not in _ANSWERED:
                        seen[peer.rank] = line
                left = [peer for peer in left if seen[peer.rank].state != "ok"]
                if time.monotonic() > until or self.prober.links.closed.wait(RETRY if left else 0.0):
                    break
            with self.listener.news:
                self.found.reached |= seen or {peer.rank: Line(peer.rank, "name") for peer in targets}
            with self.receiving:
                if good := [line for line in seen.values() if line.state == "ok"]:
                    self._measure(host, good)
        finally:
            with self.listener.news:
                self.pending.discard(host.number)
                self.listener.news.notify_all()

    def _measure(self, host: Host, good: list[Line]) -> None:
        """Measure the path to a host over one of its ``good`` lines, and compare the models."""
        # Prefer a doctor, because a run sends no load; on this machine, prefer another line than the prober's.
        best = min(good, key=lambda line: (line.role != "doctor", line.rank == self.prober.me.rank))
        peer, mine, differing = self.prober.peers[best.rank], self.prober.me.model, ""
        try:
            with probing(self.prober, peer, connect(self.prober, peer)) as probe:
                if mine and probe.facts["model"] not in ("", mine) and best.role == "doctor":
                    differing = (
                        f"{difference(self.prober.manifest, probe.read('model'))} ({self.found.own}, {host.name})"
                    )
                measured = probe.measure()
        except GossipxError as error:
            measured = Measurement(why=str(error))
        with self.listener.news:
            self.found.ways[host.number] = measured
            self.found.differing = self.found.differing or differing

    def _probed(self) -> set[int]:
        return {host.number for host in self.found.others if self.listener.probed & {p.name for p in host.peers}}

    def _missing(self, hosts: set[int], why: str) -> None:
        line = f"{self.found.own} waits for {self.found.names_of(hosts)}: {why}"
        if hosts and line not in self.reported:
            self.report(line)
            self.reported.add(line)
