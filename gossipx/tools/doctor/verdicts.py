"""The rules of the doctor: findings in, one line per verdict out. Pure functions."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from gossipx.tools.doctor.findings import Findings, Line, Verdict, Way, plain

CLOCK = 1.0  # seconds that clocks may differ by: curves, which are drawn over wall time, still lie on each other
SLOW = 4.0  # a host is slow at so many times less than the median rate: TCP alone does not make as much of a difference


def verdicts(found: Findings) -> list[Verdict]:
    """Return all verdicts: each rule says what is wrong, or that all is well."""
    return [*(verdict for rule in _RULES for verdict in rule(found)), *found.devices]


def names(found: Findings) -> Iterator[Verdict]:
    """Each name resolves, and to loopback only if all do."""
    loopback = {name.host: [one for one in name.addresses if plain(one).is_loopback] for name in found.names}
    alone = all(len(loopback[name.host]) == len(name.addresses) for name in found.names)
    good = 0
    for name in found.names:
        host = found.hosts[name.host].name
        if not name.addresses:
            advice = "correct it in the hosts file, or add it to DNS or /etc/hosts here"
            yield Verdict("fail", "names", f"{host} does not resolve on {found.own} ({name.error})", advice)
        elif loopback[name.host] and not alone:
            text = f"{host} is {loopback[name.host][0]} on {found.own}, which other machines cannot reach"
            yield Verdict("fail", "names", text, "put its address in the network into /etc/hosts or the hosts file")
        else:
            good += 1
    if good == len(found.hosts):
        yield Verdict("ok", "names", f"{_count(found.hosts, 'host')}, known on {found.own}")


_LOOK = "see what listens there (ss -ltnp)"
REACH = {
    "refused": ("", "start the same command there; if it runs, see its --bind and port, and firewalls that refuse"),
    "timeout": ("", "start that machine; let TCP port {} in (firewall, security group); behind NAT see --advertise"),
    "no route": ("", "look at its address, and at routes on both: ip route get"),
    "silent": ("something listens and does not answer", f"{_LOOK}, its load, and if one side alone has TLS"),
    "closed": ("something listens and hangs up", f"{_LOOK}; give both the same secret, or both --tls-..."),
    "foreign": ("no gossipx listens there", f"{_LOOK}, or give the line another port; or one side alone has TLS"),
    "authorised": ("not authorised", "give all hosts and runs the same --secret-file, or certificates of one CA"),
    "version": ("", "install the same gossipx on both"),
    "peers": ("the hosts files differ", "give all hosts and runs the same hosts file"),
    "other": ("another peer", "a port is forwarded, or two machines have one address: see the hosts file"),
    "local": ("cannot ask", "this machine lacks what it takes: see ulimit -n"),
    "denied": ("", ""),  # the system says both
    "doctor": ("another gossipx doctor", "stop it, or give the line another port"),
}
"""What was seen at a line that this host does not reach, or at a port that it cannot listen at, and what to do."""


def _failures(found: Findings, about: str, place: str, lines: Collection[Line], more: str = "") -> Iterator[Verdict]:
    for (state, text), alike in _alike(lines).items():
        if state in REACH:
            ports, (what, advice) = _ports(found, alike), REACH[state]
            seen = ": ".join(filter(None, (place.replace("{}", ports), what, text))) + more
            yield Verdict("fail", about, seen, advice.format(ports), 5 if state == "authorised" else 1)


def ports(found: Findings) -> Iterator[Verdict]:
    """The doctor, or a run, listens at the port of each line of this host."""
    for host in (found.hosts[number] for number in found.here):
        lines = [port for port in found.ports if port.rank in {peer.rank for peer in host.peers}]
        yield from _failures(found, "ports", f"port {{}} of {host.name} is not free", lines)
        if runs := [port for port in lines if port.state == "run"]:
            text = f"port {_ports(found, runs)} of {host.name}: a run is at work there"
            yield Verdict("note", "ports", text, "it was asked what it is, and no more")
    if free := [port for port in found.ports if port.state == "open"]:
        yield Verdict("ok", "ports", f"{_count(free, 'port')} free on {found.own}")


def reach(found: Findings) -> Iterator[Verdict]:
    """This host reaches each line, and each doctor that answers has reached this host."""
    for host in found.hosts:
        more = " (the other way works)" if host.number in found.heard else ""
        yield from _failures(found, "reach", f"{found.own} → {host.name}:{{}}", found.seen(host), more)
    unheard = found.met - found.heard
    if unheard and any(port.state == "open" for port in found.ports):
        text = f"{found.names_of(unheard)} → {found.own}: no probe has come (the other way works)"
        yield Verdict("warn", "reach", text, "see what the doctor there says")
    elif all(line.state == "ok" for line in found.reached.values()):
        yield Verdict("ok", "reach", f"{_count(found.reached, 'peer')}, reached from {found.own}")


def _by(found: Findings, what: str) -> dict[str, str]:
    """Return the values of one of the facts, and which hosts have them, as doctor or as run."""
    by: dict[str, list[str]] = defaultdict(list)
    seen = {found.own: found.facts}
    for host in found.hosts:
        for facts in (line.facts for line in found.seen(host) if line.facts):
            if facts["role"] == "run" or host in found.others:
                seen[host.name + (" (a run)" if facts["role"] == "run" else "")] = facts
    for name, facts in seen.items():
        by[facts[what].partition("+")[0]].append(name)
    return {value: ", ".join(names) for value, names in by.items() if value}


def versions(found: Findings) -> Iterator[Verdict]:
    """gossipx and torch are the same everywhere; with another protocol nothing is compared."""
    differ = {what: by for what in ("gossipx", "torch") if len(by := _by(found, what)) > 1}
    for what, by in differ.items():
        text = f"{what} differs: " + "; ".join(f"{version} on {on}" for version, on in by.items())
        yield Verdict("warn", "versions", text, f"install the same {what} on all hosts")
    if not differ:
        text = "gossipx {gossipx} (protocol {protocol}), torch {torch}, on all that answered"
        yield Verdict("ok", "versions", text.format(**found.facts))


def _ways(found: Findings) -> dict[str, Way]:
    """Return what was measured with other hosts; within this one only if there are no others."""
    return {found.hosts[n].name: way for n, way in found.ways.items() if n not in found.here or not found.others}


def clocks(found: Findings) -> Iterator[Verdict]:
    """No clock is far ahead of this host's, or behind."""
    ahead = {name: (way.offset, way.latency / 2) for name, way in _ways(found).items() if way.latency is not None}
    off = {name: offset for name, (offset, error) in ahead.items() if abs(offset) > CLOCK + error}
    for name, offset in off.items():
        text = f"the clock of {name} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} {found.own}'s"
        why = "certificates may seem expired or not valid yet" if found.tls else "curves over wall time lie apart"
        yield Verdict("warn", "clock", text, f"set both by NTP (timedatectl set-ntp true): {why}")
    if ahead and not off:
        within = max(max(abs(offset), error) for offset, error in ahead.values()) * 1e3
        yield Verdict("ok", "clock", f"clocks within {within:.1f} ms, deadlines do not depend on them")


def latency(found: Findings) -> Iterator[Verdict]:
    """How far away the others are; a far one is no fault."""
    taken = [way.latency for way in _ways(found).values() if way.latency is not None]
    if taken:
        shown = _range(f"{seconds * 1e3:.2g} ms" for seconds in (min(taken), max(taken)))
        yield Verdict("ok", "latency", f"{shown} per round trip")


def rates(found: Findings) -> Iterator[Verdict]:
    """Bytes come from all hosts, and about as fast."""
    rate = {name: way.rate for name, way in _ways(found).items() if way.rate}
    middle = statistics.median_low(rate.values() or [0.0])
    slow = {name for name, value in rate.items() if value * SLOW < middle}
    for name, way in _ways(found).items():
        pair = f"{name} → {found.own}"
        if way.rate == 0:
            text = f"{pair}: 64 KiB do not get through in time, and small messages do"
            why = "packets of full size are lost (MTU of a tunnel or VPN): ping -M do -s 1472"
            yield Verdict("fail", "bandwidth", text, f"the way is very slow, or {why}")
        elif way.why:
            level, advice = ("warn", "try again") if way.latency is None or "busy" in way.why else ("note", "")
            yield Verdict(level, "bandwidth", f"{pair}: no rate was measured, {way.why}", advice)
        elif name in slow:
            text = f"{pair}: {bits(rate[name])}, where {bits(middle)} are usual"
            yield Verdict("warn", "bandwidth", text, "look at that link: cable, duplex, other traffic, loss")
    if rate and not slow:
        yield Verdict(
            "ok", "bandwidth", f"{_range(map(bits, (min(rate.values()), max(rate.values()))))} to {found.own}"
        )


def models(found: Findings) -> Iterator[Verdict]:
    """All hosts that answer, and runs at work, have this host's model."""
    by = _by(found, "model")
    listed = "; ".join(f"{digest[:12]} on {on}" for digest, on in by.items())
    if found.fault:
        yield Verdict("fail", "model", f"{found.own}: {found.fault}", "start it by gossipx run on that host alone")
    elif not by:
        advice = "give --model NAME, or your SCRIPT, as to gossipx run"
        yield Verdict("note", "model", "no model was looked at", advice)
    elif len(by) == 1:
        yield Verdict("ok", "model", f"{found.model or 'of the run'}, fingerprint {listed}")
    else:
        first = f": {found.differing}" if found.differing else ""
        yield Verdict("fail", "model", f"it differs, {listed}{first}", "build the same model on every host")


_RULES = (names, ports, reach, versions, clocks, latency, rates, models)


def _alike(lines: Collection[Line]) -> dict[tuple[str, str], list[Line]]:
    alike: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        alike[line.state, line.text].append(line)
    return alike


def _ports(found: Findings, lines: Collection[Line]) -> str:
    ranks = {line.rank for line in lines}
    return ",".join(str(peer.port) for host in found.hosts for peer in host.peers if peer.rank in ranks)


def _count(things: Collection[object], what: str) -> str:
    return f"{len(things)} {what}" if len(things) == 1 else f"{len(things)} {what}s"


def _range(shown: Iterable[str]) -> str:
    return " to ".join(dict.fromkeys(shown))


def bits(rate: float) -> str:
    """Return bytes per second as bits per second, in words."""
    return f"{rate * 8 / 1e9:.1f} Gbit/s" if rate >= 1.25e8 else f"{rate * 8 / 1e6:.3g} Mbit/s"
