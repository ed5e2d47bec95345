"""The rules of the doctor: pure functions from the findings to verdicts, one line each."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from ipaddress import ip_address

from gossipx.tools.doctor.findings import Findings, Line, Measurement, Verdict

CLOCK = 1.0  # seconds that clocks may differ by, before curves over wall time are visibly shifted
SLOW = 4.0  # a host is slow below the median rate divided by this: TCP alone does not cause such a difference


def verdicts(found: Findings) -> list[Verdict]:
    """Apply all rules: each returns what is wrong, or that all is well."""
    return [*(verdict for rule in _RULES for verdict in rule(found)), *found.devices]


def names(found: Findings) -> Iterator[Verdict]:
    """Check that each name resolves, and to loopback only if all do."""
    loopback = {name.host: [item for item in name.addresses if ip_address(item).is_loopback] for name in found.names}
    alone = all(len(loopback[name.host]) == len(name.addresses) for name in found.names)
    needed = [name for name in found.names if name.addresses or name.host not in found.hidden]
    for name in needed:
        host = found.hosts[name.host].name
        if not name.addresses:
            advice = "correct it in the hosts file, or add it to DNS or to this machine's /etc/hosts"
            yield Verdict("fail", "names", f"{host} does not resolve on {found.own} ({name.error})", advice)
        elif loopback[name.host] and not alone:
            text = f"{host} is {loopback[name.host][0]} on {found.own}, which other machines cannot reach"
            yield Verdict("fail", "names", text, "put its address in the network into /etc/hosts or the hosts file")
    if all(name.addresses for name in needed) and (alone or not any(loopback.values())):
        yield Verdict("ok", "names", f"{_count(needed, 'host')} resolved on {found.own}")


_LOOK = "find the program that listens there (ss -ltnp)"
REACH = {
    "refused": ("", "start the same command there; if it runs, check its --bind, its port and the firewall"),
    "timeout": ("", "start that machine; allow TCP port {} (firewall, security group); behind NAT see --advertise"),
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
CUT_OFF = (
    "it seems to be behind NAT or a firewall: allow TCP port {} there and check its --bind, or write 'nat' on its line"
    " on all hosts"
)
"""Advice where nothing answers at a host whose doctor has reached this host."""


def _failures(
    found: Findings, about: str, place: str, lines: Collection[Line], heard: bool = False
) -> Iterator[Verdict]:
    for state, text in dict.fromkeys((line.state, line.text) for line in lines if line.state in REACH):
        ports = _ports(found, [line for line in lines if (line.state, line.text) == (state, text)])
        what, advice = REACH[state]
        seen = ": ".join(filter(None, (place.replace("{}", ports), what, text)))
        if heard:
            seen += " (the other way works)"
            advice = CUT_OFF if state in ("refused", "timeout", "no route") else advice
        yield Verdict("fail", about, seen, advice.format(ports), 5 if state == "authorised" else 1)


def ports(found: Findings) -> Iterator[Verdict]:
    """Check that the doctor or a run listens on the port of each line of this host."""
    for host in (found.hosts[number] for number in found.here):
        lines = [port for port in found.ports if port.rank in {peer.rank for peer in host.peers}]
        yield from _failures(found, "ports", f"port {{}} of {host.name} is not free", lines)
        if runs := [port for port in lines if port.state == "run"]:
            text = f"port {_ports(found, runs)} of {host.name}: a run is at work there"
            yield Verdict("note", "ports", text, "the doctor only read its facts")
    if free := [port for port in found.ports if port.state == "open"]:
        yield Verdict("ok", "ports", f"{_count(free, 'port')} free on {found.own}")


def reach(found: Findings) -> Iterator[Verdict]:
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
        gateways = found.names_of(host.number for host in found.others if not host.behind_nat)
        text = f"{found.own} is behind NAT: it connects to {gateways}"
        if found.hidden:
            text += f", and through these to {found.names_of(found.hidden)}, which is behind NAT too"
        yield Verdict("note", "reach", text, "no other host can connect to it")
        return
    if connected := found.hidden & found.heard:
        yield Verdict(
            "ok", "reach", f"{found.names_of(connected)} → {found.own}: behind NAT, and connects to this host"
        )
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


def versions(found: Findings) -> Iterator[Verdict]:
    """Compare the versions of gossipx and torch; hosts with another protocol version are skipped."""
    differ = {fact: by for fact in ("gossipx", "torch") if len(by := _hosts_by_value(found, fact)) > 1}
    for fact, by in differ.items():
        text = f"{fact} differs: " + "; ".join(f"{version} on {on}" for version, on in by.items())
        yield Verdict("warn", "versions", text, f"install the same {fact} on all hosts")
    if not differ:
        text = "gossipx {gossipx} (protocol {protocol}), torch {torch}, on all hosts that answered"
        yield Verdict("ok", "versions", text.format(**found.facts))


def _measured(found: Findings) -> dict[str, Measurement]:
    """Return the measurements with other hosts, or those within this machine if it is the only one."""
    return {found.hosts[n].name: pair for n, pair in found.ways.items() if n not in found.here or not found.others}


def clocks(found: Findings) -> Iterator[Verdict]:
    """Check that no clock is far from this host's."""
    ahead = {name: (it.offset, it.latency / 2) for name, it in _measured(found).items() if it.latency is not None}
    off = {name: offset for name, (offset, error) in ahead.items() if abs(offset) > CLOCK + error}
    for name, offset in off.items():
        text = f"the clock of {name} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} {found.own}'s"
        why = "certificates may seem expired or not yet valid" if found.tls else "curves over wall time are shifted"
        yield Verdict("warn", "clock", text, f"set both by NTP (timedatectl set-ntp true): {why}")
    if ahead and not off:
        within = max(max(abs(offset), error) for offset, error in ahead.values()) * 1e3
        yield Verdict("ok", "clock", f"clocks within {within:.1f} ms; deadlines do not depend on them")


def latency(found: Findings) -> Iterator[Verdict]:
    """Report the range of round-trip times; a distant host is not a fault."""
    taken = [pair.latency * 1e3 for pair in _measured(found).values() if pair.latency is not None]
    if taken:
        yield Verdict("ok", "latency", f"{_range(taken, '{:.2g} ms'.format)} per round trip")


def rates(found: Findings) -> Iterator[Verdict]:
    """Check that a load arrives from each host, at about the same rate."""
    rate = {name: pair.rate for name, pair in _measured(found).items() if pair.rate}
    middle = statistics.median_low(rate.values() or [0.0])
    slow = {name for name, value in rate.items() if value * SLOW < middle}
    for name, pair in _measured(found).items():
        path = f"{name} → {found.own}"
        if pair.rate == 0:
            text = f"{path}: small messages arrive in time, 64 KiB do not"
            why = "full-size packets are lost (MTU of a tunnel or VPN): ping -M do -s 1472"
            yield Verdict("fail", "bandwidth", text, f"the path is very slow, or {why}")
        elif pair.why:
            level, advice = ("warn", "try again") if pair.latency is None or "busy" in pair.why else ("note", "")
            yield Verdict(level, "bandwidth", f"{path}: no rate was measured, {pair.why}", advice)
        elif name in slow:
            text = f"{path}: {bits(rate[name])}, the median is {bits(middle)}"
            yield Verdict("warn", "bandwidth", text, "check that link: cable, duplex, other traffic, packet loss")
    if rate and not slow:
        yield Verdict("ok", "bandwidth", f"{_range(rate.values(), bits)} to {found.own}")


def models(found: Findings) -> Iterator[Verdict]:
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
        first = f": {found.differing}" if found.differing else ""
        yield Verdict("fail", "model", f"the models differ, {listed}{first}", "build the same model on every host")


_RULES = (names, ports, reach, versions, clocks, latency, rates, models)


def _ports(found: Findings, lines: Collection[Line]) -> str:
    ranks = {line.rank for line in lines}
    return ",".join(str(peer.port) for host in found.hosts for peer in host.peers if peer.rank in ranks)


def _count(things: Collection[object], what: str) -> str:
    return f"{len(things)} {what}" if len(things) == 1 else f"{len(things)} {what}s"


def _range(values: Collection[float], shown: Callable[[float], str]) -> str:
    return " to ".join(dict.fromkeys(map(shown, (min(values), max(values)))))


def bits(rate: float) -> str:
    """Format a rate in bytes per second as bits per second."""
    return f"{rate * 8 / 1e9:.1f} Gbit/s" if rate >= 1.25e8 else f"{rate * 8 / 1e6:.3g} Mbit/s"
