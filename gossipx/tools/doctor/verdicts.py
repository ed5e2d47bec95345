"""The findings of one host's doctor, and the rules that turn them into verdicts, one line each.

A host is a host name in the hosts file together with all its lines. The probes write the findings, which are plain
data; the rules are pure functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from gossipx.launch.hosts import PeerLine

CLOCK = 1.0  # seconds that clocks may differ by, before curves over wall time are visibly shifted


@dataclass(frozen=True)
class Host:
    """One host of the hosts file.

    Attributes:
        number: its place in the file, from 0.
        name: in the file.
        peers: its lines.
        addresses: that the name resolves to on this machine, without interface; none: it does not.
        error: the resolver's, if it does not.
    """

    number: int
    name: str
    peers: tuple[PeerLine, ...]
    addresses: tuple[str, ...] = ()
    error: str = ""

    @property
    def behind_nat(self) -> bool:
        """Whether the file says that other hosts cannot connect to it."""
        return any(peer.behind_nat for peer in self.peers)


def hosts_of(peers: Sequence[PeerLine], resolved: Mapping[str, Sequence[object] | str]) -> list[Host]:
    """Return the hosts of a hosts file, in the file's order; ``resolved``: see :func:`gossipx.launch.hosts.resolve`."""
    hosts: list[Host] = []
    for name in dict.fromkeys(peer.host for peer in peers):
        lines, found = tuple(peer for peer in peers if peer.host == name), resolved.get(name, ())
        addresses, error = ((), found) if isinstance(found, str) else (tuple(map(str, found)), "")
        hosts.append(Host(len(hosts), name, lines, addresses, error))
    return hosts


@dataclass(frozen=True)
class Verdict:
    """One line of the doctor's report."""

    level: str  # "ok"; "note": not examined; "warn": a run would start; "fail": it would not, or not with all peers
    about: str
    text: str
    advice: str = ""
    exit_code: int = 1  # of the command, if the level is "fail"


@dataclass(frozen=True)
class Line:
    """The result for the line of peer ``rank``, and the ``facts`` that the process there reported.

    The state is "ok" or a key of ``verdicts.REACH``. For a port of this host it is "open" if the doctor listens there,
    "run" if a peer of a run does, else the reason why the doctor cannot listen.
    """

    rank: int
    state: str
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_doctor(self) -> bool:
        """Whether a doctor with the same hosts file has answered."""
        return self.state == "ok" and self.facts["role"] == "doctor"


@dataclass(frozen=True)
class Measurement:
    """Clock offset and rate between this host and another."""

    latency: float | None = None  # seconds of the fastest round trip
    offset: float = 0.0  # seconds by which the other clock is ahead, give or take half a round trip
    rate: float | None = None  # bytes per second received from there; 0: the load did not arrive in time
    why: str = ""  # the reason why latency or rate is missing


@dataclass
class Findings:
    """All observations of this host."""

    hosts: Sequence[Host]
    here: Sequence[int]  # numbers of the hosts that are this machine
    facts: dict[str, Any]  # of this doctor
    devices: Sequence[Verdict] = ()
    model: str = ""  # a title of the model whose fingerprint is in the facts
    fault: str = ""  # the reason why there is no model
    ports: Sequence[Line] = ()
    reached: dict[int, Line] = field(default_factory=dict)  # by rank
    ways: dict[int, Measurement] = field(default_factory=dict)  # by host
    heard: set[int] = field(default_factory=set)  # other hosts whose doctors have probed this host

    @property
    def own(self) -> str:
        """The name of this host."""
        return self.hosts[self.here[0]].name

    @property
    def others(self) -> list[Host]:
        """The hosts that are not this machine."""
        return [host for host in self.hosts if host.number not in self.here]

    @property
    def met(self) -> set[int]:
        """The other hosts whose doctors have answered."""
        return {host.number for host in self.others if any(line.is_doctor for line in self.seen(host))}

    @property
    def is_behind_nat(self) -> bool:
        """Whether the file says that other hosts cannot connect to this one."""
        return self.hosts[self.here[0]].behind_nat

    @property
    def hidden(self) -> set[int]:
        """The other hosts to which the file says that this one cannot connect."""
        return {host.number for host in self.others if host.behind_nat}

    @property
    def expected(self) -> set[int]:
        """The other hosts whose doctors should probe this host, as far as is known."""
        return set() if self.is_behind_nat else self.met | self.hidden

    def names_of(self, hosts: Iterable[int]) -> str:
        """Return the names of hosts, in the file's order."""
        return ", ".join(self.hosts[number].name for number in sorted(hosts))

    def seen(self, host: Host) -> list[Line]:
        """Return the results for the lines of a host."""
        return [self.reached[peer.rank] for peer in host.peers if peer.rank in self.reached]


def verdicts(found: Findings) -> list[Verdict]:
    """Apply all rules: each returns what is wrong, or that all is well."""
    return [*(verdict for rule in _RULES for verdict in rule(found)), *found.devices]


def check_host_names(found: Findings) -> Iterator[Verdict]:
    """Check that each name resolves, and to loopback only if all do."""
    needed = [host for host in found.hosts if host.addresses or host.number not in found.hidden]
    loopback = {host.name: [one for one in host.addresses if ip_address(one).is_loopback] for host in needed}
    alone = all(len(loopback[host.name]) == len(host.addresses) for host in needed)
    unresolved = [host for host in needed if not host.addresses]
    unreachable = {} if alone else {name: own for name, own in loopback.items() if own}
    for host in unresolved:
        advice = "correct it in the hosts file, or add it to DNS or to this machine's /etc/hosts"
        yield Verdict("fail", "names", f"{host.name} does not resolve on {found.own} ({host.error})", advice)
    for name, own in unreachable.items():
        text = f"{name} is {own[0]} on {found.own}, which other machines cannot reach"
        yield Verdict("fail", "names", text, "put its address in the network into /etc/hosts or the hosts file")
    if not unresolved and not unreachable:
        yield Verdict("ok", "names", f"{_count(needed, 'host')} resolved on {found.own}")


_LOOK = "find the program that listens there (ss -ltnp)"
REACH = {
    "refused": ("", "start the same command there; if it runs, check its --bind, its port and the firewall"),
    "timeout": ("it does not answer", "start it; allow TCP port {} (firewall, cloud); behind NAT see --advertise"),
    "no route": ("", "check its address, and the routes on both machines: ip route get"),
    "silent": ("a program listens and does not answer", f"{_LOOK}; check its load, and that both sides have TLS"),
    "closed": ("a program listens and closes the connection", f"{_LOOK}; give both the same secret or --tls-..."),
    "foreign": ("no gossipx listens there", f"{_LOOK} or give the line another port; check that both sides have TLS"),
    "authorised": ("not authorised", "give all hosts and runs the same --secret-file, or certificates of one CA"),
    "version": ("", "install the same gossipx on both"),
    "peers": ("the hosts files differ", "give all hosts and runs the same hosts file"),
    "other": ("another peer", "check for a forwarded port, or two machines with the same address in the hosts file"),
    "local": ("cannot connect", "this machine lacks a resource: see ulimit -n"),
    "denied": ("", ""),  # the system's message names cause and remedy
    "doctor": ("another gossipx doctor", "stop it, or give the line another port"),
}
"""Observation and advice by state, for a line that this host cannot reach or a port that it cannot listen on."""
CUT_OFF = "it is behind NAT or a firewall: allow TCP port {} there, check its --bind, or write 'nat' on its line"
"""Advice where nothing answers at a host whose doctor has reached this host."""


def _failures(found: Findings, about: str, place: str, lines: Collection[Line], heard: bool) -> Iterator[Verdict]:
    for state, text in dict.fromkeys((line.state, line.text) for line in lines if line.state in REACH):
        ports = _ports(found, [line for line in lines if (line.state, line.text) == (state, text)])
        what, advice = REACH[state]
        seen = ": ".join(filter(None, (place.replace("{}", ports), what, text)))
        if heard:
            seen += " (the other way works)"
            advice = CUT_OFF if state in ("refused", "timeout", "no route") else advice
        yield Verdict("fail", about, seen, advice.format(ports), 5 if state == "authorised" else 1)


def check_ports(found: Findings) -> Iterator[Verdict]:
    """Check that the doctor or a run listens on the port of each line of this host."""
    for host in (found.hosts[number] for number in found.here):
        lines = [port for port in found.ports if port.rank in {peer.rank for peer in host.peers}]
        yield from _failures(found, "ports", f"port {{}} of {host.name} is not free", lines, False)
        if runs := [port for port in lines if port.state == "run"]:
            text = f"port {_ports(found, runs)} of {host.name}: a run is at work there"
            yield Verdict("note", "ports", text, "the doctor only read its facts")
    if free := [port for port in found.ports if port.state == "open"]:
        yield Verdict("ok", "ports", f"{_count(free, 'port')} free on {found.own}")


def check_reachable(found: Findings) -> Iterator[Verdict]:
    """Check that this host reaches each line, and that each doctor that answers has reached this host."""
    for host in found.hosts:
        heard = host.number in found.heard
        yield from _failures(found, "reach", f"{found.own} → {host.name}:{{}}", found.seen(host), heard)
    yield from _behind_nat(found)
    unheard = found.expected - found.heard - found.hidden
    if unheard and any(port.state == "open" for port in found.ports):
        text = f"{found.names_of(unheard)} → {found.own}: no probe has arrived (the other way works)"
        nat = "" if found.heard else f"; if {found.own} is behind NAT, write 'nat' on its line on all hosts"
        yield Verdict("warn", "reach", text, f"see the report of the doctor there{nat}")
    elif all(line.state == "ok" for line in found.reached.values()):
        yield Verdict("ok", "reach", f"{_count(found.reached, 'peer')} reached from {found.own}")


def _behind_nat(found: Findings) -> Iterator[Verdict]:
    """Say which hosts are behind NAT according to the file, and which of these have reached this host."""
    if found.is_behind_nat:
        advice = "it connects to other hosts, and none can connect to it"
        yield Verdict("note", "reach", f"{found.own} is behind NAT", advice)
        return
    if connected := found.hidden & found.heard:
        text = f"{found.names_of(connected)} → {found.own}: behind NAT, and connects to this host"
        yield Verdict("ok", "reach", text)
    if missing := found.hidden - found.heard:
        text = f"{found.names_of(missing)} → {found.own}: behind NAT, and no probe has arrived"
        yield Verdict("fail", "reach", text, "start the same command there, and see its report")


def _hosts_by_value(found: Findings, fact: str) -> dict[str, str]:
    """Return the names of hosts by their value of a fact."""
    by: dict[str, list[str]] = defaultdict(list)
    seen = {found.own: found.facts}
    for host in found.hosts:
        for facts in (line.facts for line in found.seen(host) if line.facts):
            if facts["role"] == "run" or host in found.others:
                seen[host.name + (" (a run)" if facts["role"] == "run" else "")] = facts
    for name, facts in seen.items():
        by[facts[fact].partition("+")[0]].append(name)
    return {value: ", ".join(names) for value, names in by.items() if value}


def check_versions(found: Findings) -> Iterator[Verdict]:
    """Compare the versions of gossipx and torch; hosts with another protocol version are skipped."""
    differ = {fact: by for fact in ("gossipx", "torch") if len(by := _hosts_by_value(found, fact)) > 1}
    for fact, by in differ.items():
        text = f"{fact} differs: " + "; ".join(f"{version} on {on}" for version, on in by.items())
        yield Verdict("warn", "versions", text, f"install the same {fact} on all hosts")
    if not differ:
        text = "gossipx {gossipx} (protocol {protocol}), torch {torch}, on all hosts that answered"
        yield Verdict("ok", "versions", text.format(**found.facts))


def _measurements(found: Findings) -> dict[str, Measurement]:
    """Return the measurements with other hosts, or those within this machine if it is the only one."""
    return {found.hosts[n].name: pair for n, pair in found.ways.items() if n not in found.here or not found.others}


def check_clocks(found: Findings) -> Iterator[Verdict]:
    """Check that no clock is far from this host's."""
    ahead = {name: (it.offset, it.latency / 2) for name, it in _measurements(found).items() if it.latency is not None}
    off = {name: offset for name, (offset, error) in ahead.items() if abs(offset) > CLOCK + error}
    for name, offset in off.items():
        text = f"the clock of {name} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} {found.own}'s"
        why = "curves over wall time are shifted, and certificates may seem expired or not yet valid"
        yield Verdict("warn", "clock", text, f"set both by NTP (timedatectl set-ntp true): {why}")
    if ahead and not off:
        within = max(max(abs(offset), error) for offset, error in ahead.values()) * 1e3
        yield Verdict("ok", "clock", f"clocks within {within:.1f} ms; deadlines do not depend on them")


def check_rates(found: Findings) -> Iterator[Verdict]:
    """Check that a load arrives from each host."""
    for name, pair in _measurements(found).items():
        path = f"{name} → {found.own}"
        if pair.rate == 0:
            text = f"{path}: small messages arrive in time, 64 KiB do not"
            why = "full-size packets are lost (MTU of a tunnel or VPN): ping -M do -s 1472"
            yield Verdict("fail", "bandwidth", text, f"the path is very slow, or {why}")
        elif pair.why:
            level, advice = ("warn", "try again") if pair.latency is None or "busy" in pair.why else ("note", "")
            yield Verdict(level, "bandwidth", f"{path}: no rate was measured, {pair.why}", advice)
    if rates := [pair.rate for pair in _measurements(found).values() if pair.rate]:
        extremes = " to ".join(dict.fromkeys(map(bits, (min(rates), max(rates)))))
        yield Verdict("ok", "bandwidth", f"{extremes} to {found.own}")


def check_models(found: Findings) -> Iterator[Verdict]:
    """Check that all doctors and runs that answered have this host's model."""
    by = _hosts_by_value(found, "model")
    listed = "; ".join(f"{digest[:12]} on {on}" for digest, on in by.items())
    if found.fault:
        yield Verdict("fail", "model", f"{found.own}: {found.fault}", "start it on that host alone with gossipx run")
    elif not by:
        advice = "give --model NAME, or your SCRIPT, as to gossipx run"
        yield Verdict("note", "model", "no model was compared", advice)
    elif len(by) == 1:
        yield Verdict("ok", "model", f"{found.model or 'of the run'}, fingerprint {listed}")
    else:
        yield Verdict("fail", "model", f"the models differ, {listed}", "build the same model on every host")


_RULES = (check_host_names, check_ports, check_reachable, check_versions, check_clocks, check_rates, check_models)


def _ports(found: Findings, lines: Collection[Line]) -> str:
    ranks = {line.rank for line in lines}
    return ",".join(str(peer.port) for host in found.hosts for peer in host.peers if peer.rank in ranks)


def _count(things: Collection[object], what: str) -> str:
    return f"{len(things)} {what}" if len(things) == 1 else f"{len(things)} {what}s"


def bits(rate: float) -> str:
    """Format a rate in bytes per second as bits per second."""
    return f"{rate * 8 / 1e9:.1f} Gbit/s" if rate >= 1.25e8 else f"{rate * 8 / 1e6:.3g} Mbit/s"
