"""``gossipx doctor``: looks at the machines of a run, before it or when it does not do what it should.

The same command is started on each host, as ``gossipx run`` is. Each listens where its peers would, probes all other
hosts, answers their probes, and reports what it sees itself.
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

from gossipx.config import security
from gossipx.config.settings import RunConfig
from gossipx.errors import GossipxError
from gossipx.launch.hosts import PeerLine, bind_host, peers_digest, read_hosts
from gossipx.tools.doctor import machine, model
from gossipx.tools.doctor.findings import Findings, Host, Line, Way, hosts_of
from gossipx.tools.doctor.listener import Listener
from gossipx.tools.doctor.probe import AGAIN, Prober, connect, probing, reach
from gossipx.transports import checkup
from gossipx.transports.links import Links
from gossipx.wire import Hello
from gossipx.wire.agreement import difference

# Seconds that others have to probe this host once its own probes are done: they may have started later, may be slow,
# and take a second or two for each host.
_STAY, _STAY_PER_HOST = 10.0, 5.0
_LOOK = 1.0  # seconds between two looks at which hosts are missing
# States of a line that answered. A later failure, such as its end, says less and does not replace them.
_TALKED = {"ok", "foreign", "authorised", "version", "peers", "other"}


def examine(
    settings: RunConfig, peers_file: Path, script: list[str] | None, wait: float, tell: Callable[[str], None]
) -> Findings:
    """Look at this machine, and at all others of the hosts file from here.

    Others must answer within ``wait`` seconds; ``tell`` is told which are missing. The model to look at is that of the
    script, with its arguments, or if that is empty, of the built-in task; None: no model. Errors are those of a run.
    """
    peers = read_hosts(peers_file)
    hosts = hosts_of(peers)
    names = machine.look_up(hosts)
    here = machine.hosts_here(hosts, names, settings.exchange.advertise, peers_file)
    lines = [peer for host in here for peer in host.peers]
    binds = {peer.rank: bind_host(peer, settings.exchange.bind, peers_file) for peer in lines}
    granted, *_ = [security.grant(settings.exchange, bind) for bind in binds.values()]
    with contextlib.ExitStack() as last:
        # As Ctrl-C does, so that a process that builds a model ends, too.
        last.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        what, manifest, fault = model.look(settings, len(peers), peers_file, lines[0], script)
        digest = hashlib.sha256(manifest).hexdigest() if manifest else ""
        me = Hello(lines[0].rank, lines[0].name, len(peers), peers_digest(peers), digest)
        found = Findings(hosts, [host.number for host in here], checkup.facts(me, "doctor"), names)
        found.model, found.fault, found.tls = what, fault, settings.exchange.tls_cert is not None
        found.devices = machine.devices(found.own, lines, settings.run.device)
        links = Links("doctor", 0, timeout=10.0)
        last.callback(links.abort)
        prober = Prober(me, peers, granted, links, threading.Lock())
        listener = Listener(lines, binds, prober, manifest)
        last.callback(listener.close)
        _Checkup(found, prober, listener, manifest, tell).go(wait)
    return found


@dataclass
class _Checkup:
    """One host's course through a checkup. ``found`` takes the results, while ``listener.news`` is held."""

    found: Findings
    prober: Prober
    listener: Listener
    manifest: bytes  # of the model of this host
    tell: Callable[[str], None]
    told: set[str] = field(default_factory=set)
    receiving: threading.Lock = field(default_factory=threading.Lock)  # so that one load comes in at a time
    pending: set[int] = field(default_factory=set)  # hosts whose probes are not done

    def go(self, wait: float) -> None:
        """Probe all hosts, then stay while others still probe this one."""
        found, news = self.found, self.listener.news
        found.ports = self.listener.ports
        own = {port.rank: port.state for port in found.ports}
        # Behind NAT a host need not reach its own address.
        answering = {"run"} if len(own) == 1 and len(self.prober.peers) > 1 else {"run", "open"}
        until = time.monotonic() + wait
        for host in found.hosts:
            targets = [peer for peer in host.peers if own.get(peer.rank, "run") in answering]
            if targets:
                self.pending.add(host.number)
                self.prober.links.spawn(f"probe-{host.number}", self._probe, host, targets, until)
        with news:
            while self.pending:  # each probe has its bounds, and ends
                if not news.wait(_LOOK):
                    absent = {number for number in self.pending if not found.seen(found.hosts[number])}
                    self._missing(absent, "start the same command there")
            until = time.monotonic() + _STAY + _STAY_PER_HOST * len(found.others)
            stays = any(state == "open" for state in own.values())
            while (left := found.met - self._probed()) and stays and time.monotonic() < until:
                if not news.wait(_LOOK):
                    self._missing(left, "it has not probed this host yet")
            found.heard = self._probed()

    def _probe(self, host: Host, targets: list[PeerLine], until: float) -> None:
        """Try lines of a host until all have answered, or the time is over; then measure with it."""
        seen: dict[int, Line] = {}
        try:
            left = targets if self.found.names[host.number].addresses else []
            while left:
                for peer in left:
                    one = reach(self.prober, peer)
                    if peer.rank not in seen or one.state in _TALKED or seen[peer.rank].state not in _TALKED:
                        seen[peer.rank] = one
                left = [peer for peer in left if seen[peer.rank].state != "ok"]
                if time.monotonic() > until or self.prober.links.closed.wait(AGAIN if left else 0.0):
                    break
            with self.listener.news:
                self.found.reached |= seen or {peer.rank: Line(peer.rank, "name") for peer in targets}
            with self.receiving:
                self._measure(host, [one for one in seen.values() if one.state == "ok"])
        finally:
            with self.listener.news:
                self.pending.discard(host.number)
                self.listener.news.notify_all()

    def _measure(self, host: Host, good: list[Line]) -> None:
        """Measure with a host, at one of the lines that it was reached at, and compare the model."""
        if not good:
            return
        # A run sends no load; of this machine's own lines another is asked than the one that asks.
        best = min(good, key=lambda one: (one.role != "doctor", one.rank == self.prober.me.rank))
        line, mine, differing = self.prober.peers[best.rank], self.prober.me.model, ""
        try:
            with probing(self.prober, line, connect(self.prober, line)) as probe:
                if mine and probe.facts["model"] not in ("", mine) and best.role == "doctor":
                    differing = f"{difference(self.manifest, probe.manifest())} ({self.found.own}, {host.name})"
                way = probe.measure(self.prober.sending)
        except GossipxError as error:
            way = Way(why=str(error))
        with self.listener.news:
            self.found.ways[host.number] = way
            self.found.differing = self.found.differing or differing

    def _probed(self) -> set[int]:
        names = self.listener.probed
        return {host.number for host in self.found.others if names & {peer.name for peer in host.peers}}

    def _missing(self, hosts: set[int], why: str) -> None:
        line = f"{self.found.own} waits for {self.found.names_of(hosts)}: {why}"
        if hosts and line not in self.told:
            self.tell(line)
            self.told.add(line)
