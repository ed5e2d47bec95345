"""The hosts file: one line per host, ``host[:port] [slots=N] [device=cuda:0] [name=...] [nat]``."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.protocol.fields import MAX_RANKS
from gossipx.protocol.places import LEAST_PORT, fault
from gossipx.specs import suggest, texts

DEFAULT_PORT = 29400
"""Port of the first peer of a host: above commonly used registered ports, below the ephemeral ports of the system."""
LONGEST = 500
"""Maximum characters per line; names are sent over the network and written to logs."""
_LINE = re.compile(r"""(?P<host>\[[^\]]*\]|[^\s:\[\]@,/"'-][^\s:\[\]@,/"'*]*)(?::(?P<port>[^\s:]*))?""")
RESOLVE = 5.0
"""Seconds in which all names must resolve: a resolver that does not respond takes that long or longer."""
LOOPBACK = "127.0.0.1"
NAT = "nat"
"""Word on the line of a host to which other hosts cannot connect."""
ADVICE = "give --peers hosts.txt, with one line per host such as 'localhost slots=4'"
"""How a command is told its peers."""
_KEYS = {"slots": "slots=N", "device": "device=cuda:0", "name": "name=TEXT"}


@dataclass(frozen=True)
class PeerLine:
    """One peer of a hosts file.

    Attributes:
        rank: index of the peer in the file, from 0.
        host: a name or an address, without brackets.
        port: TCP port on which the peer listens.
        device: device to train on; None: the one in the run's settings.
        name: name of the peer in messages and results.
        line: line number in the file, from 1; 0: it is in none.
        behind_nat: whether other hosts cannot connect to its host, which connects to them instead.
    """

    rank: int
    host: str
    port: int
    device: str | None
    name: str
    line: int
    behind_nat: bool = False

    @property
    def shown(self) -> str:
        """Its address, as in a hosts file."""
        return _shown(self.host, self.port)


def address_of(text: str, name: str = "--peers", otherwise: int = DEFAULT_PORT) -> tuple[str, int]:
    """Return the host and the port that ``host[:port]`` names.

    Args:
        name: of the option or variable, for messages.
        otherwise: the port if none is given.

    Raises:
        UsageError: it is malformed.
    """
    match = _LINE.fullmatch(text)
    port = match["port"] if match is not None else None
    if match is None or (port is not None and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise UsageError(f"{name} is {text[:50]!r}, not host[:port] (write an IPv6 address in brackets)")
    return match["host"].strip("[]"), otherwise if port is None else int(port)


def read_hosts(path: Path) -> list[PeerLine]:
    """Return all peers of a hosts file, by rank. ``slots=N`` defines N peers on consecutive ports.

    Raises:
        UsageError: names the file and the line.
    """
    missing = "hosts file not found: write one line per host, such as 'localhost slots=4'"
    return parse_hosts(texts.read(path, "hosts file", missing=missing), path)


def parse_hosts(text: str, path: Path | None) -> list[PeerLine]:
    """Return the peers in the text of a hosts file, like :func:`read_hosts`; ``path`` is used in messages."""
    peers: list[PeerLine] = []
    seen: dict[object, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split("#", 1)[0].strip()
        for peer in _parse(content, path, number, len(peers)) if content else []:
            for what, key in (("address", (peer.host, peer.port)), ("name", peer.name)):
                if key in seen:
                    shown = key if isinstance(key, str) else _shown(*key)
                    raise UsageError(f"{what} '{shown}' is already on line {seen[key]}", path, number)
                seen[key] = number
            peers.append(peer)
    if not peers:
        raise UsageError("no peers in the file: write one line per host, such as 'localhost slots=4'", path, 1)
    _check_nat(peers, path)
    return peers


def _check_nat(peers: Sequence[PeerLine], path: Path | None) -> None:
    first: dict[str, PeerLine] = {}
    for peer in peers:
        before = first.setdefault(peer.host, peer)
        if peer.behind_nat is not before.behind_nat:
            reason = (
                f"'{peer.host}' is also on line {before.line}: '{NAT}' is for a host, so write it on both or neither"
            )
            raise UsageError(reason, path, peer.line)
    if len(first) > 1 and all(peer.behind_nat for peer in peers):
        raise UsageError(f"every host has '{NAT}': the others must be able to connect to one of them", path, 1)


def _parse(content: str, path: Path | None, number: int, rank: int) -> list[PeerLine]:
    first, *rest = content.split()
    match = _LINE.fullmatch(first)
    if match is None:
        form = "one line per host, such as 'node1 slots=4', and an IPv6 address in brackets"
        raise UsageError(f"'{first}' is not host[:port]: write {form}", path, number)
    host = match["host"].strip("[]")
    if match["host"].startswith("["):
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise UsageError(f"'{match['host']}' is not an IPv6 address", path, number) from None
    port = DEFAULT_PORT if match["port"] is None else _number(match["port"], "port", LEAST_PORT, 65535, path, number)
    given: dict[str, str] = {}
    behind_nat = NAT in rest
    for part in (one for one in rest if one != NAT):
        key, equals, value = part.partition("=")
        if not equals or key not in _KEYS or not value:
            known = ", ".join([*_KEYS.values(), NAT])
            raise UsageError(f"'{part}' is not one of {known}{suggest(key, {**_KEYS, NAT: NAT})}", path, number)
        if key in given:
            raise UsageError(f"'{key}' is given twice", path, number)
        given[key] = value
    slots = _number(given.get("slots", "1"), "slots", 1, 65535, path, number)
    if rank + slots > MAX_RANKS:
        raise UsageError(f"more than {MAX_RANKS} peers", path, number)
    if port + slots > 65536:
        raise UsageError(f"{slots} slots starting at port {port} need ports above 65535", path, number)
    if not "".join(content.split()).isprintable() or len(content) > LONGEST:
        raise UsageError(f"not one printable line of at most {LONGEST} characters", path, number)
    peers = []
    for slot in range(slots):
        name = given.get("name")
        name = _shown(host, port + slot) if name is None else name if slots == 1 else f"{name}-{slot}"
        peers.append(PeerLine(rank + slot, host, port + slot, given.get("device"), name, number, behind_nat))
    if found := fault(host, port, peers[0].name) or fault(host, port, peers[-1].name):
        raise UsageError(found, path, number)
    return peers


def _number(text: str, what: str, least: int, most: int, path: Path | None, line: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
        raise UsageError(f"{what} '{text}' is not an integer from {least} to {most}", path, line)
    return int(text)


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def hosts_line(host: str, port: int, name: str, device: str | None, behind_nat: bool = False) -> str:
    """Return one peer as a line of a hosts file."""
    more = ("" if device is None else f" device={device}") + (f" {NAT}" if behind_nat else "")
    return f"{_shown(host, port)} name={name}{more}"


def peers_digest(peers: Sequence[PeerLine]) -> str:
    """Return a digest of the peers' names and addresses, on which all peers of a run must agree."""
    text = "\n".join(hosts_line(peer.host, peer.port, peer.name, None, peer.behind_nat) for peer in peers)
    return hashlib.sha256(text.encode()).hexdigest()


def local_ranks(peers: Sequence[PeerLine], advertise: str | None, path: Path) -> list[int]:
    """Return the ranks of the peers on this machine.

    Args:
        advertise: host whose lines are this machine; None: compare addresses.
        path: the hosts file, for messages.

    Raises:
        UsageError: no line is this machine, a name does not resolve, two lines have the same address, or loopback
            addresses are mixed with others.
    """
    if advertise is not None:  # behind NAT, no address of the file may belong to this machine: names are not resolved
        addresses: Mapping[str, Sequence[_Address]] = {}
        loopback = {peer.host: peer.host for peer in peers if is_loopback_name(peer.host)}
    else:
        addresses = _resolved(peers, path)
        loopback = {host: str(own[0]) for host, own in addresses.items() if own[0].is_loopback}
    here = lines_here(peers, addresses, advertise, path)
    _refuse_mixture(loopback, peers, path)
    return [peer.rank for peer in here]


def lines_here(
    peers: Sequence[PeerLine], addresses: Mapping[str, Sequence[_Address]], advertise: str | None, path: Path
) -> list[PeerLine]:
    """Return the lines that are this machine: those of ``advertise``, or those with an address of this machine.

    Args:
        addresses: of each host that is known here.

    Raises:
        UsageError: no line is, or two lines have the same address.
    """
    if advertise is not None:
        here = [peer for peer in peers if peer.host == advertise.strip("[]")]
        fault = f"no line has the host '{advertise}' that --advertise names"
    else:
        _refuse_repeated(peers, addresses, path)
        here = [peer for peer in peers if any(map(is_here, addresses.get(peer.host, ())))]
        unknown = ", ".join(dict.fromkeys(peer.host for peer in peers if peer.host not in addresses))
        fault = "no line is this machine" + (f", where {unknown} does not resolve" if unknown else "")
        fault += ": add one, or name its host by --advertise HOST"
    if not here:
        raise UsageError(fault, path)
    return here


def _refuse_repeated(peers: Sequence[PeerLine], addresses: Mapping[str, Sequence[_Address]], path: Path) -> None:
    lines: dict[tuple[_Address, int], PeerLine] = {}
    for peer in (one for one in peers if one.host in addresses):
        first = lines.setdefault((addresses[peer.host][0], peer.port), peer)
        if first is not peer:
            reason = f"'{peer.shown}' is the same address as '{first.shown}' on line {first.line}"
            raise UsageError(reason, path, peer.line)


def _resolved(peers: Sequence[PeerLine], path: Path | None) -> dict[str, tuple[_Address, ...]]:
    """Return the addresses of each host; a name behind NAT may be known to its own host alone."""
    found = resolve(peer.host for peer in peers)
    for peer in peers:
        if isinstance(why := found[peer.host], str) and not peer.behind_nat:
            reason = f"host '{peer.host}' does not resolve ({why})"
            raise UsageError(f"{reason}: correct it, or add it to /etc/hosts", path, peer.line)
    return {host: own for host, own in found.items() if not isinstance(own, str)}


def resolve(names: Iterable[str]) -> dict[str, tuple[_Address, ...] | str]:
    """Return the addresses of each host name on this machine, IPv4 first, or why it has none.

    IPv4 comes first, so that 'localhost' is the same address for peers that bind and peers that connect. All names are
    looked up at the same time, within :data:`RESOLVE` seconds.
    """
    found: dict[str, tuple[_Address, ...] | str] = dict.fromkeys(names, f"no answer within {RESOLVE:g} s")

    def look_up(name: str) -> None:
        try:
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses = dict.fromkeys(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries)
            found[name] = tuple(sorted(addresses, key=lambda one: one.version))
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid name, such as 'two..dots'
            found[name] = str(getattr(error, "strerror", None) or error)

    until = time.monotonic() + RESOLVE
    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(found)


def only_address(bind: str) -> str | None:
    """Return the one address on which a peer with this ``--bind`` listens; None: all, loopback, or a name."""
    if not is_address(bind):
        return None
    address = ipaddress.ip_address(bind)
    return None if address.is_unspecified or address.is_loopback else bind


def bind_host(peer: PeerLine, bind: str, path: Path | None) -> str:
    """Return the address on which a peer listens: ``bind``, or the loopback address of its line.

    Raises:
        UsageError: other peers could not reach it there.
    """
    address = _resolved([replace(peer, behind_nat=False)], path)[peer.host][0]  # its own host must know its name
    literal = LOOPBACK if bind == "localhost" else bind
    chosen = ipaddress.ip_address(literal) if is_address(literal) else None
    if chosen is None:
        try:
            socket.getaddrinfo(bind, None)
        except (OSError, UnicodeError):
            raise UsageError(
                f"--bind '{bind}' is not an address: give an address of this machine, or 0.0.0.0 for all"
            ) from None
    if address.is_loopback:
        if literal == LOOPBACK:  # the default
            return str(address)
        if chosen is not None and not chosen.is_unspecified and chosen != address:
            raise UsageError(
                f"others connect to {address} ('{peer.host}'), but peers listen on {bind}: leave --bind out, or give"
                " the host that address",
                path,
                peer.line,
            )
        return bind
    if chosen is not None and chosen.is_loopback:
        raise UsageError(
            f"peers listen on loopback only, so others cannot reach '{peer.host}': give --bind 0.0.0.0 (or one "
            "address), and --secret-file FILE or --tls-cert, --tls-key and --tls-ca",
            path,
            peer.line,
        )
    return bind


def _refuse_mixture(loopback: Mapping[str, str], peers: Sequence[PeerLine], path: Path) -> None:
    """Refuse a file in which some hosts, but not all, are loopback; ``loopback`` has the addresses of those."""
    first = next((peer for peer in peers if peer.host in loopback), None)
    if first is not None and any(peer.host not in loopback for peer in peers):
        is_name = not is_loopback_name(first.host)  # Debian's installer gives a machine's own name 127.0.1.1
        shown = f"{loopback[first.host]} here" if is_name else "loopback"
        advice = "correct /etc/hosts, or give its address" if is_name else "give its network address"
        reason = f"'{first.host}' is {shown}, which other machines cannot reach: {advice}"
        raise UsageError(reason, path, first.line)


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_address(text: str) -> bool:
    """Return whether a host, as written, is an address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback_name(host: str) -> bool:
    """Return whether a host, as written, is a loopback address or localhost; no name is resolved."""
    return host.lower() == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_here(address: _Address) -> bool:
    """Return whether an address belongs to this machine, that is, a socket can bind to it."""
    try:
        with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6) as probe:
            probe.bind((str(address), 0))
    except OSError:  # also where the system has no IPv6
        return False
    return True
