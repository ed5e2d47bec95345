"""Rules about what hosts have alike, and about what was measured between them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

from gossipx.launch.doctor.findings import Facts, Row, Way
from gossipx.launch.doctor.rules.case import Case, Verdict
from gossipx.launch.doctor.rules.reaching import MTU
from gossipx.wire.agreement import difference

CLOCK = 1.0
"""Seconds that clocks may differ by: curves of TensorBoard, which are drawn over wall time, still lie on each other."""
FAR = 5.0
"""Times the median latency from which a way counts as far, if it also adds ``FAR_SECONDS``."""
FAR_SECONDS = 5e-3
SLOW = 4.0
"""Times below the median rate from which a way counts as slow: TCP alone does not make as much of a difference."""
UNEVEN = 3.0
"""Times that one direction may be faster than the other."""


def versions(case: Case) -> list[Verdict]:
    """gossipx and torch are the same everywhere; with whoever speaks another protocol nothing is compared."""
    found = []
    for what, advice in (
        ("gossipx", "install the same gossipx on all hosts"),
        ("torch", "install the same torch on all hosts: models and their random numbers may differ"),
    ):
        by: dict[str, list[int]] = defaultdict(list)
        for host, facts in _processes(case):
            by[str(getattr(facts, what)).partition("+")[0]].append(host)
        if len(by) > 1:
            listed = "; ".join(f"{version} on {case.names(hosts)}" for version, hosts in by.items())
            found.append(Verdict("warn", "versions", f"{what} differs: {listed}", advice))
    if found:
        return found
    told = [
        f"gossipx {facts.gossipx} (protocol {facts.protocol}), torch {facts.torch}, on all that were heard of"
        for _, facts in _processes(case)
    ]
    return [Verdict("ok", "versions", text) for text in told[:1]]


def _processes(case: Case) -> Iterator[tuple[int, Facts]]:
    """All that have told of themselves, doctors and runs."""
    for row in case.in_order():
        yield row.host, row.facts
    for _, host, one in case.seen():
        if one.facts is not None and one.facts.role == "run":
            yield host.number, one.facts


def machines(case: Case) -> list[Verdict]:
    """Two hosts are two machines."""
    by: dict[str, list[int]] = defaultdict(list)
    for row in case.in_order():
        by[row.facts.machine].append(row.host)
    return [
        Verdict("note", "machines", f"{case.names(hosts)} are one machine", "rates between them are of no network")
        for machine, hosts in by.items()
        if machine and len(hosts) > 1
    ]


def clocks(case: Case) -> list[Verdict]:
    """No clock is ahead of the others."""
    ahead = _ahead(case)
    if len(ahead) < 2:
        return []
    middle = statistics.median_low(offset for offset, _ in ahead.values())
    found = []
    for host, (offset, error) in ahead.items():
        off = offset - middle
        if abs(off) > CLOCK + error:
            word = "ahead of" if off > 0 else "behind"
            others = "the others" if len(ahead) > 2 else case.names(ahead.keys() - {host})
            text = f"the clock of {case.name(host)} is {abs(off):.1f} s {word} {others}"
            advice = "set it by NTP (timedatectl set-ntp true): "
            why = "certificates may seem expired or not valid yet" if case.tls else "curves over wall time lie apart"
            found.append(Verdict("warn", "clock", text, advice + why))
    spread = max(abs(offset - middle) for offset, _ in ahead.values())
    error = max(error for _, error in ahead.values())
    within = f"clocks within {max(spread, error) * 1e3:.1f} ms of each other, deadlines do not depend on them"
    return found or [Verdict("ok", "clock", within)]


def _ahead(case: Case) -> dict[int, tuple[float, float]]:
    """By host, the seconds by which its clock is ahead of the first one's, and how exact that is."""
    edges: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
    for row, way in _ways(case):
        if way.offset is not None and way.error is not None and way.to != row.host:
            edges[row.host].append((way.to, way.offset, way.error))
            edges[way.to].append((row.host, -way.offset, way.error))
    known: dict[int, tuple[float, float]] = {}
    if edges:
        first = min(edges)
        known[first] = (0.0, 0.0)
        left = [first]
        while left:
            here = left.pop(0)
            for to, offset, error in edges[here]:
                if to not in known:
                    known[to] = (known[here][0] + offset, known[here][1] + error)
                    left.append(to)
    return known


def _ways(case: Case) -> Iterator[tuple[Row, Way]]:
    """All that was measured between hosts; of one host with itself only where there is no other."""
    for row in case.in_order():
        for way in row.ways:
            if way.to != row.host or len(case.hosts) == 1:
                yield row, way


def latency(case: Case) -> list[Verdict]:
    """No way is much longer than the others."""
    between = {(row.host, way.to): way.latency for row, way in _ways(case) if way.latency is not None}
    if not between:
        return []
    middle = statistics.median(between.values())
    found = []
    for (one, other), seconds in between.items():
        if seconds > FAR * middle and seconds > middle + FAR_SECONDS:
            pair = f"{case.name(one)} and {case.name(other)}"
            text = f"{pair} are {seconds * 1e3:.1f} ms apart, where {middle * 1e3:.1f} ms are usual"
            found.append(Verdict("warn", "latency", text, "a far site: pulls wait for it; see gossipx topology list"))
    shown = _span(min(between.values()) * 1e3, max(between.values()) * 1e3, "ms")
    return found or [Verdict("ok", "latency", f"{shown} a round trip")]


def rates(case: Case) -> list[Verdict]:
    """Bytes get through, both ways, about as fast as elsewhere."""
    found = []
    rate: dict[tuple[int, int], float] = {}
    one_machine = {frozenset((row.host, way.to)) for row, way in _ways(case) if _is_one_machine(case, row.host, way.to)}
    for row, way in _ways(case):
        pair = f"between {case.name(row.host)} and {case.name(way.to)}"
        if row.host == way.to:
            pair = f"within {case.name(row.host)}"
        if way.stalled:
            text = f"{way.stalled // 1024} KiB do not get through {pair} in time, and small messages do"
            found.append(Verdict("fail", "bandwidth", text, f"the way is very slow, or {MTU}"))
        elif way.latency is None:
            found.append(Verdict("warn", "bandwidth", f"nothing was measured {pair}: {way.why}", "try again"))
        elif way.why:
            found.append(Verdict("note", "bandwidth", f"no rate was measured {pair}: {way.why}"))
        for ends, value in (((row.host, way.to), way.sent), ((way.to, row.host), way.received)):
            if value is not None:
                rate.setdefault(ends, value)
    middle = statistics.median(rate.values()) if rate else 0.0
    for (one, other), value in rate.items():
        if frozenset((one, other)) in one_machine:
            continue
        pair = f"{case.name(one)} → {case.name(other)}"
        if value * SLOW < middle:
            text = f"{pair} moves {_mbit(value)}, where {_mbit(middle)} are usual"
            found.append(Verdict("warn", "bandwidth", text, "look at that link: cable, duplex, other traffic, loss"))
        elif value * UNEVEN < rate.get((other, one), 0.0):
            text = f"{pair} moves {_mbit(value)}, and the other way {_mbit(rate[other, one])}"
            found.append(Verdict("warn", "bandwidth", text, "an uneven line, a duplex mismatch or loss one way"))
    if rate and not any(verdict.level in ("warn", "fail") for verdict in found):
        low, high = min(rate.values()), max(rate.values())
        shown = _mbit(low) if _mbit(low) == _mbit(high) else f"{_mbit(low)} to {_mbit(high)}"
        found.insert(0, Verdict("ok", "bandwidth", shown))
    return found


def _is_one_machine(case: Case, one: int, other: int) -> bool:
    ids = {case.rows[host].facts.machine if host in case.rows else str(host) for host in (one, other)}
    return len(ids) == 1 and "" not in ids


def models(case: Case) -> list[Verdict]:
    """All hosts, and the runs that go on, have the same model."""
    by: dict[str, list[str]] = defaultdict(list)
    for host, facts in _processes(case):
        name = case.name(host) if facts.role == "doctor" else f"{case.name(host)} (a run)"
        if facts.model and name not in by[facts.model]:
            by[facts.model].append(name)
    faults = [
        Verdict("fail", "model", f"{case.name(row.host)}: {row.fault}", "start it by gossipx run on that host alone")
        for row in case.in_order()
        if row.fault
    ]
    if faults:
        return faults
    if not by:
        advice = "give --model NAME, or your SCRIPT, as to gossipx run"
        return [Verdict("note", "model", "no model was looked at", advice)]
    if len(by) == 1:
        ((digest, hosts),) = by.items()
        what = next((row.model for row in case.in_order() if row.model), "the run's")
        return [Verdict("ok", "model", f"{what}, fingerprint {digest[:12]} on {', '.join(hosts)}")]
    listed = "; ".join(f"{digest[:12]} on {', '.join(hosts)}" for digest, hosts in by.items())
    described = {row.facts.model: row.manifest for row in case.in_order() if row.manifest}
    first = ""
    if len(described) > 1:
        mine, theirs, *_ = described.values()
        here, there = (by[digest][0] for digest in list(described)[:2])
        said = difference(mine.encode(), theirs.encode())
        first = f": {said.replace(' here and ', f' on {here} and ').removesuffix(' there')} on {there}"
    return [Verdict("fail", "model", f"it differs, {listed}{first}", "build the same model on every host")]


def devices(case: Case) -> list[Verdict]:
    """Each line's device is there, and its alone."""
    found: list[Verdict] = []
    seen: dict[str, list[int]] = defaultdict(list)
    for row in case.in_order():
        name = case.name(row.host)
        named = {peer.rank for peer in case.hosts[row.host].peers if peer.device}
        for device in row.devices:
            if not device.there:
                advice = "correct device= in the hosts file" if device.rank in named else "correct --device there"
                found.append(Verdict("fail", "devices", f"{name}: {device.text}", advice))
            elif "shared by" in device.text:
                text = f"{name}: {device.device} ({device.text})"
                found.append(Verdict("warn", "devices", text, "give each line a device of its own"))
            else:
                seen[f"{device.device} ({device.text})"].append(row.host)
        unused = len(row.accelerators) if all(device.device == "cpu" for device in row.devices) else 0
        if unused:
            text = f"{name} has {unused} CUDA devices that no line uses ({row.accelerators[0]})"
            found.append(Verdict("warn", "devices", text, "add device=cuda:0 to its line"))
    if any(verdict.level == "fail" for verdict in found) or not seen:
        return list(dict.fromkeys(found))  # several lines of a host may say the same
    listed = "; ".join(f"{device} on {case.names(hosts)}" for device, hosts in seen.items())
    return [Verdict("ok", "devices", listed), *dict.fromkeys(found)]


def _span(low: float, high: float, unit: str) -> str:
    one, other = f"{low:.2g}", f"{high:.2g}"
    return f"{one} {unit}" if one == other else f"{one} to {other} {unit}"


def _mbit(rate: float) -> str:
    return f"{rate * 8 / 1e9:.1f} Gbit/s" if rate >= 1.25e8 else f"{rate * 8 / 1e6:.3g} Mbit/s"
