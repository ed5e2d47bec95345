"""Rules about who reaches whom: names, ports, connections."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable

from gossipx.launch.doctor.findings import UNASKED, Host, Port, Reached
from gossipx.launch.doctor.rules.case import Case, Verdict


def names(case: Case) -> list[Verdict]:
    """Each name stands for the same address everywhere, and for loopback nowhere unless all do."""
    unknown: dict[tuple[int, str], list[int]] = defaultdict(list)
    loopback: dict[tuple[int, str], list[int]] = defaultdict(list)
    meant: dict[int, dict[int, frozenset[str]]] = defaultdict(dict)
    alone = all(
        _is_loopback(address) for row in case.in_order() for name in row.names for address in name.addresses
    )  # then all hosts are this machine
    for row in case.in_order():
        for name in row.names:
            if not name.addresses:
                unknown[name.host, name.error].append(row.host)
                continue
            if not alone and any(map(_is_loopback, name.addresses)):
                loopback[name.host, next(filter(_is_loopback, name.addresses))].append(row.host)
            meant[name.host][row.host] = frozenset(name.addresses)
    found = [
        Verdict(
            "fail",
            "names",
            f"{case.name(host)} does not resolve on {case.names(on)} ({error})",
            "correct it in the hosts file, or add it to DNS or /etc/hosts there",
        )
        for (host, error), on in unknown.items()
    ]
    for (host, address), on in loopback.items():
        text = f"{case.name(host)} stands for {address} on {case.names(on)}, which other machines cannot reach"
        advice = "put its address in the network beside its name in /etc/hosts there, or into the hosts file"
        found.append(Verdict("fail", "names", text, advice))
    found += _differing(case, meant)
    found += _same(case, meant)
    return found or [Verdict("ok", "names", f"{_count(len(case.hosts), 'host')}, known on {_heard(case)}")]


def _differing(case: Case, meant: dict[int, dict[int, frozenset[str]]]) -> list[Verdict]:
    found = []
    for host, by in meant.items():
        for one, addresses in by.items():
            first = next(iter(by))
            if not addresses & by[first] and not any(map(_is_loopback, addresses | by[first])):
                text = (
                    f"{case.name(host)} is {_listed(by[first])} on {case.name(first)}"
                    f" and {_listed(addresses)} on {case.name(one)}"
                )
                found.append(Verdict("warn", "names", text, "right behind NAT or split DNS; else mend the one"))
                break
    return found


def _same(case: Case, meant: dict[int, dict[int, frozenset[str]]]) -> list[Verdict]:
    found = []
    first_of: dict[str, int] = {}
    for host, by in meant.items():
        for address in sorted(frozenset().union(*by.values())):
            first = first_of.setdefault(address, host)
            if first != host and not _is_loopback(address):
                text = f"{case.name(first)} and {case.name(host)} are both {address}"
                found.append(Verdict("warn", "names", text, "list a host by one name, with slots=N for several peers"))
                break
    return found


def ports(case: Case) -> list[Verdict]:
    """Each line's port can be listened at."""
    found = _unasked(case)
    runs = []
    opened = 0
    for row in case.in_order():
        numbers = {peer.rank: peer.port for peer in case.hosts[row.host].peers}
        for port in row.ports:
            number, name = numbers.get(port.rank, 0), case.name(row.host)
            if port.state in ("taken", "doctor"):
                found.append(_taken(f"port {number} of {name}", port))
            elif port.state == "refused":
                found.append(Verdict("fail", "ports", f"{name}: {port.text}"))
            elif port.state == "run":
                runs.append(f"{number} of {name}")
            elif port.state == "open":
                opened += 1
    if runs:
        text = f"{'port' if len(runs) == 1 else 'ports'} {', '.join(runs)}: a run goes on there"
        found.append(Verdict("note", "ports", text, "it was asked what it is, and not measured with"))
    if opened and not any(verdict.level == "fail" for verdict in found):
        found.insert(0, Verdict("ok", "ports", f"{_count(opened, 'port')} free on {_heard(case)}"))
    return found


def _taken(place: str, port: Port) -> Verdict:
    advice = "stop that, or give the line another port"
    if port.state == "doctor":
        who = " ".join(("another gossipx doctor", port.text)).strip()
    else:  # a run does not answer if one side alone has TLS
        who = port.text or "another program"
        advice = f"if it is a run, give the doctor its --tls-cert, --tls-key and --tls-ca, or none; else {advice}"
    return Verdict("fail", "ports", f"{place} is taken by {who}", advice)


# Who holds a port and does not say what it is, and what is to be done.
_HOLDERS = {
    "authorised": (
        "a gossipx run with another secret",
        "give the doctor that run's --secret-file, or none if it has none",
    ),
    "version": ("a gossipx run of another version", "start the doctor by the gossipx that has started that run"),
    "peers": ("a gossipx run of another hosts file", "give the doctor that run's, or the line another port"),
}
# Whoever speaks TLS may have a certificate.
_CERTIFIED = (
    "a program with another certificate",
    "if it is a run, give the doctor its --tls-cert, --tls-key and --tls-ca; else stop it, or give another port",
)


def _unasked(case: Case) -> list[Verdict]:
    """Ports that are held by a gossipx which does not tell this one what it is; those of a host and cause in one."""
    alike: dict[tuple[int, str, str], list[Port]] = defaultdict(list)
    for row in case.in_order():
        for port in row.ports:
            if port.state in UNASKED:
                alike[row.host, port.state, port.cause].append(port)
    found = []
    for (host, state, cause), held in alike.items():
        numbers = {peer.rank: peer.port for peer in case.hosts[host].peers}
        who, advice = _CERTIFIED if case.tls and state == "authorised" else _HOLDERS[state]
        seen = "; ".join(filter(None, (cause, ", ".join(dict.fromkeys(port.text for port in held if port.text)))))
        place = f"{'port' if len(held) == 1 else 'ports'} {_spans(numbers.get(port.rank, 0) for port in held)}"
        text = f"{place} of {case.name(host)}: {who} listens there ({seen})"
        found.append(Verdict("fail", "ports", text, advice, 5 if state == "authorised" else 1))
    return found


MTU = "packets of full size are lost (MTU of a tunnel or VPN): ping -M do -s 1472"
# What is to be done, by what was seen; of a host whose doctor was heard of, and of one that was not.
_HEARD_OF = {
    "refused": "its doctor listens elsewhere: give --bind 0.0.0.0 there, or look for a firewall that refuses",
    "timeout": "let TCP port {ports} in there (firewall, security group); behind NAT, forward it and give --advertise",
    "no route": "look at addresses and routes: ip route get, on both",
    "silent": "look at the load of that machine, and for a firewall that lets connections in and no data through",
    "closed": "give both the same --secret-file, or both --tls-cert, --tls-key and --tls-ca",
}
_NOT_HEARD_OF = {
    "refused": "start the same command there; if it is, see --bind there and the line's port",
    "timeout": "start that machine, and let TCP port {ports} in there (firewall, security group)",
    "no route": "look at its address, and at routes: ip route get, here",
    "silent": "see what listens there: ss -ltnp, and whether one of the two has TLS and the other has not",
    "closed": "another program, another gossipx, or TLS on one side alone: see ss -ltnp there",
}
_ANYWAY = {
    "foreign": "stop what listens there, or give the line another port; or one side alone has TLS",
    "authorised": "give every host the same --secret-file, or certificates of one CA for its host in the file",
    "version": "install the same gossipx on both",
    "peers": "give every host the same hosts file",
    "other": "a port is forwarded to another machine, or two machines have one address: see the hosts file",
    "local": "this machine lacks what it takes: see ulimit -n",
}
_WHAT = {
    "refused": "",  # these are told by what the system says
    "timeout": "",
    "no route": "",
    "silent": "something listens and does not answer",
    "closed": "something listens and hangs up",
    "foreign": "no gossipx listens there",
    "authorised": "not authorised",
    "version": "",
    "peers": "the hosts files differ",
    "other": "another peer",
    "local": "cannot ask",
}


def reach(case: Case) -> list[Verdict]:
    """Each host reaches each line."""
    failed: dict[tuple[int, str], list[tuple[int, Reached]]] = defaultdict(list)
    odd: dict[tuple[int, str], list[int]] = defaultdict(list)
    for row, host, one in case.seen():
        if one.outcome == "ok" and one.text:
            odd[host.number, one.text].append(row.host)
        if one.outcome not in ("ok", "name") and not _is_told(case, host, one):
            failed[host.number, one.outcome].append((row.host, one))
    found = [_failure(case, case.hosts[host], outcome, seen) for (host, outcome), seen in failed.items()]
    for (number, text), on in odd.items():
        what = f"{case.name(number)} is reached from {case.names(on)} at one of its addresses alone: {text}"
        advice = "take the dead address out of DNS or /etc/hosts: each connection tries it, and may wait for it"
        found.append(Verdict("warn", "reach", what, advice))
    if found:
        return found
    if not all(one.outcome == "ok" for _, _, one in case.seen()):
        return []  # names or ports tell why
    lines = {one.rank for _, _, one in case.seen()}
    return [Verdict("ok", "reach", f"{_count(len(lines), 'peer')}, reached from {_heard(case)}")]


def _is_told(case: Case, host: Host, one: Reached) -> bool:
    """Whether the rule of ports has said it: its own host could not listen there, and knows no less of who does."""
    row = case.rows.get(host.number)
    states = {"doctor", "refused", one.outcome if one.outcome in UNASKED else "taken"}
    return row is not None and any(port.rank == one.rank and port.state in states for port in row.ports)


def _failure(case: Case, host: Host, outcome: str, seen: list[tuple[int, Reached]]) -> Verdict:
    by_rank = {peer.rank: peer.port for peer in host.peers}
    numbers = _spans(by_rank[one.rank] for _, one in seen)
    sources = {source for source, _ in seen}
    heard = host.number in case.rows
    both = [source for source in sources if case.reaches(host.number, source)]
    way = f"{case.names(sources)} → {host.name}:{numbers}"
    text = next((one.text for _, one in seen if one.text), "")
    what = ": ".join(part for part in (_WHAT.get(outcome, outcome), text) if part)
    if both and heard:
        what += f" (while {host.name} → {case.names(both)} works)"
    elif not heard and outcome in _NOT_HEARD_OF:
        what += ", and nothing was heard of its doctor"
    advice = (_HEARD_OF if heard else _NOT_HEARD_OF) | _ANYWAY
    code = 5 if outcome == "authorised" else 1
    return Verdict("fail", "reach", f"{way}: {what}", advice.get(outcome, "").format(ports=numbers), code)


def interrupted(case: Case) -> list[Verdict]:
    """Each doctor that was met came to its end, and told what it had found."""
    met = {host.number for _, host, one in case.seen() if one.outcome == "ok" and one.facts is not None}
    runs = {host.number for _, host, one in case.seen() if one.facts is not None and one.facts.role == "run"}
    missing = {number for number in met - runs if number not in case.rows}
    missing |= {row.host for row in case.in_order() if not row.done}
    advice = f"start it again on all hosts; if that is no help, large messages do not get through: {MTU}"
    return [
        Verdict("fail", "findings", f"the doctor on {case.name(number)} answers, and its findings did not come", advice)
        for number in sorted(missing)
    ]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _spans(numbers: Iterable[int]) -> str:
    """``29400-29403,29410``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _listed(addresses: frozenset[str]) -> str:
    return " and ".join(sorted(addresses))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _heard(case: Case) -> str:
    """Whose doctors were heard of, in words."""
    return case.names(case.rows) if len(case.rows) <= 4 else f"all {len(case.rows)} hosts that were heard of"
