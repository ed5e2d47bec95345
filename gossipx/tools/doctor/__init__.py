"""``gossipx doctor``: diagnosis of the machines of a run, before the run or when it misbehaves.

The user starts the same command on each host, as for ``gossipx run``. Each doctor listens on the ports of its peers,
probes all other hosts, answers their probes, and reports only what it sees itself.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from gossipx.errors import GossipxError, ProtocolError, printable
from gossipx.launch.hosts import PeerLine, bind_host, lines_here, peers_digest, read_hosts, resolve
from gossipx.memory import Source
from gossipx.protocol.messages import BusyReply
from gossipx.settings.sections import RunConfig
from gossipx.tools.doctor import machine
from gossipx.tools.doctor.probe import LOAD, RETRY, ProbeSettings, connect_to_line, probing, try_line
from gossipx.tools.doctor.verdicts import Findings, Host, Line, Measurement, hosts_of
from gossipx.transports import Address, Listener, Stream, handshake
from gossipx.transports.access import grant
from gossipx.transports.handshake import checkup_facts
from gossipx.transports.link import Link, Links
from gossipx.wire import MAX_LOAD, CheckupReply, CheckupRequest, Hello, Message, frames

# Seconds to wait for the probes of other hosts once this host's probes are done. The other doctors may have started
# later or run more slowly, and need a second or two per host.
_STAY, _STAY_PER_HOST = 10.0, 5.0
_POLL = 1.0  # seconds between two reports of missing hosts
# States of a line that answered. A later failure, such as the end of the doctor there, does not replace them.
_ANSWERED = {"ok", "foreign", "authorised", "version", "peers", "other"}
_SILENT = 15.0  # seconds after which a silent connection is closed
_MAX_THREADS = 64  # of the doctor, plus four per peer: each connection has its own thread
_ZEROS = memoryview(bytes(MAX_LOAD))  # the system allocates these pages when they are first read


def examine(
    settings: RunConfig, peers_file: Path, script: list[str] | None, wait: float, report: Callable[[str], None]
) -> Findings:
    """Examine this machine, and all other hosts of the hosts file from here; raise the errors of ``gossipx run``.

    ``script`` is the command whose model is compared; empty: the built-in task's model; None: no model. The other hosts
    must answer within ``wait`` seconds; ``report`` receives a line about those that are missing.
    """
    peers = read_hosts(peers_file)
    resolved = resolve(peer.host for peer in peers)
    hosts = hosts_of(peers, resolved)
    known = {name: own for name, own in resolved.items() if not isinstance(own, str)}
    lines = lines_here(peers, known, settings.exchange.advertise, peers_file)
    binds = {peer.rank: bind_host(peer, settings.exchange.bind, peers_file) for peer in lines}
    granted, *_ = [grant(settings.exchange, bind) for bind in binds.values()]
    with contextlib.ExitStack() as stack:
        # SIGTERM acts like Ctrl-C, so that the process that builds a model also ends.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        title, tensors, fault = machine.described_model(settings, len(peers), peers_file, lines[0], script)
        digest = hashlib.sha256(tensors.encode()).hexdigest() if tensors else ""
        me = Hello(lines[0].rank, lines[0].name, len(peers), peers_digest(peers), digest)
        here = [host.number for host in hosts if host.peers[0] in lines]
        devices = list(machine.check_devices(lines[0].host, lines, settings.run.device))
        found = Findings(hosts, here, checkup_facts(me, "doctor"), devices, title, fault)
        links = Links("doctor", 0, timeout=10.0)
        stack.callback(links.abort)
        probes = ProbeSettings(me=me, peers=peers, access=granted, links=links)
        listener = stack.enter_context(contextlib.closing(DoctorListener(lines, binds, probes)))
        _Checkup(found, probes, listener, report).run(wait)
    return found


@dataclass
class _Checkup:
    """The checkup that one host runs. ``listener.news`` guards ``found``, which receives the results."""

    found: Findings
    probes: ProbeSettings
    listener: DoctorListener
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
        answering = {"run"} if len(own) == 1 and len(self.probes.peers) > 1 else {"run", "open"}
        until = time.monotonic() + wait
        for host in found.hosts:
            reachable = host.number not in found.hidden
            targets = [peer for peer in host.peers if reachable and own.get(peer.rank, "run") in answering]
            if targets:
                self.pending.add(host.number)
                self.probes.links.spawn(f"probe-{host.number}", self._probe, host, targets, until)
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
            left = targets if host.addresses else []
            while left:
                for peer in left:
                    line = try_line(self.probes, peer)
                    if peer.rank not in seen or line.state in _ANSWERED or seen[peer.rank].state not in _ANSWERED:
                        seen[peer.rank] = line
                left = [peer for peer in left if seen[peer.rank].state != "ok"]
                if time.monotonic() > until or self.probes.links.closed.wait(RETRY if left else 0.0):
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
        """Measure the path to a host over one of its ``good`` lines."""
        # Prefer a doctor, because a run sends no load; on this machine, prefer another line than the prober's.
        best = min(good, key=lambda line: (not line.is_doctor, line.rank == self.probes.me.rank))
        peer = self.probes.peers[best.rank]
        try:
            with probing(self.probes, peer, connect_to_line(self.probes, peer)) as probe:
                measured = probe.measure()
        except GossipxError as error:
            measured = Measurement(why=str(error))
        with self.listener.news:
            self.found.ways[host.number] = measured

    def _probed(self) -> set[int]:
        """Return the other hosts that have probed this one; the names of one machine count together."""
        others = self.found.others
        seen = [host for host in others if self.listener.probed & {peer.name for peer in host.peers}]
        addresses = {address for host in seen for address in host.addresses}
        return {host.number for host in others if host in seen or addresses & set(host.addresses)}

    def _missing(self, hosts: set[int], why: str) -> None:
        line = f"{self.found.own} waits for {self.found.names_of(hosts)}: {why}"
        if hosts and line not in self.reported:
            self.report(line)
            self.reported.add(line)


class DoctorListener:
    """The answering side, which listens at the ports of ``lines``; ``binds`` has the addresses to bind to, by rank."""

    def __init__(self, lines: Sequence[PeerLine], binds: Mapping[int, str], settings: ProbeSettings):
        self.news = threading.Condition()  # guards the findings, and this:
        self.probed: set[str] = set()  # names of peers that have received a load, the last step of a probe
        self._settings = settings
        self._sending = threading.Lock()  # held while a load is sent
        self._listening: list[Listener] = []
        self.ports = [self._open(peer, Address(binds[peer.rank], peer.port)) for peer in lines]

    def _open(self, peer: PeerLine, place: Address) -> Line:
        try:
            listening = self._settings.access.transport.listen(place)
        except GossipxError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                return Line(peer.rank, "denied", printable(str(error)))
            seen = try_line(self._settings, peer)
            return replace(seen, state=seen.facts.get("role", seen.state))
        self._listening.append(listening)
        me = msgspec.structs.replace(self._settings.me, rank=peer.rank, name=peer.name)
        self._settings.links.spawn(f"accept-{peer.rank}", self._accept, listening, me)
        return Line(peer.rank, "open")

    def close(self) -> None:
        """Stop listening."""
        for listening in self._listening:
            listening.close()

    def _accept(self, listening: Listener, me: Hello) -> None:
        links = self._settings.links
        while not links.closed.is_set():
            try:
                stream = listening.accept()
            except GossipxError:
                links.closed.wait(0.05)  # the system lacks a resource, such as file descriptors
                continue
            if links.threads < _MAX_THREADS + 4 * len(self._settings.peers):
                links.spawn("answer", self._serve, stream, me)
            else:
                stream.abort()

    def _serve(self, stream: Stream, me: Hello) -> None:
        """Answer the requests on one connection until the other side closes it and reports the error, if any."""
        settings, deadline = self._settings, time.monotonic() + _SILENT
        with contextlib.suppress(GossipxError), contextlib.ExitStack() as stack:
            link = settings.links.add(stream)
            stack.callback(settings.links.drop, link)
            if settings.access.secret is not None:
                handshake.challenge(link, settings.access.secret, me, deadline)
            names, hosts = [peer.name for peer in settings.peers], [peer.host for peer in settings.peers]
            request: Message = handshake.receive_query(link, names, hosts, deadline)
            while isinstance(request, CheckupRequest):
                self._answer(link, me, request)
                request = link.receive(time.monotonic() + _SILENT).message

    def _answer(self, link: Link, me: Hello, request: CheckupRequest) -> None:
        if request.part == "facts":
            self._send(link, CheckupReply(checkup_facts(me, "doctor")))
        elif request.part != "load":
            raise ProtocolError(f"a doctor has no '{request.part}'")
        # One load at a time: each would slow the other down.
        elif not self._sending.acquire(blocking=False):
            self._send(link, BusyReply())
        else:
            try:
                load = _ZEROS[: request.back]
                self._send(link, CheckupReply(size=len(load)), Source(load))
            finally:
                self._sending.release()
                with self.news:
                    self.probed.add(request.name)
                    self.news.notify_all()

    def _send(self, link: Link, reply: CheckupReply | BusyReply, load: Source | None = None) -> None:
        link.stream.tune()
        link.send(frames.encode(reply, 0, load, link.checks), time.monotonic() + LOAD)
