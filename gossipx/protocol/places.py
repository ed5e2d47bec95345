"""The check of a peer's host, port and name: the same in a hosts file as for a peer that joins a run under way."""

from __future__ import annotations

import ipaddress
import re

from gossipx.errors import printable

LEAST_PORT = 1024
"""Lowest port: those below belong to the system's services, and other tools' files have numbers of slots there."""
MAX_PLACE = 350
"""Maximum bytes of a host and a name together, so that 1,000 of them fit into one message."""
_HOST = re.compile(r"[^\s:\[\]-][^\s:\[\]]*")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*", re.IGNORECASE)
_SHOWN = 60


def is_everywhere(host: str) -> bool:
    """Return whether a host, as written, is the unspecified address, by which each machine means itself."""
    return re.fullmatch(r"\*|::|(::ffff:)?[0.:]*0[0.:]*|0x0+", host.lower()) is not None


def host_fault(host: str) -> str:
    """Return in one line why no peer can have this host, a name or an address without brackets; empty: one can."""
    shown = f"'{printable(host, _SHOWN)}{'…' * (len(host) > _SHOWN)}'"
    if is_everywhere(host):
        reason = f"{shown} is every address of a machine: write the one at which others reach it, or localhost"
        return f"{reason}; to listen on all addresses, give --bind 0.0.0.0"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _name_fault(host, shown)
    if address.is_multicast or address == ipaddress.IPv4Address("255.255.255.255"):
        return f"{shown} is not the address of one machine: give the one at which others reach it"
    return ""


def _name_fault(host: str, shown: str) -> str:
    if not _HOST.fullmatch(host) or not host.isprintable():
        return f"{shown} is not a host name or an address"
    try:
        host.encode("idna")  # as Python passes it to the system's resolver
    except UnicodeError:
        return f"{shown} is not a host name: its parts between dots need 1 to 63 characters"
    if _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
        return f"{shown} is not a whole IPv4 address"  # the resolver completes '0' to 0.0.0.0
    return ""


def fault(host: str, port: int, name: str) -> str:
    """Return in one line why no peer can have this host, port and name; empty: one can."""
    if found := host_fault(host):
        return found
    if not LEAST_PORT <= port < 65_536:
        return f"port {port} is not from {LEAST_PORT} to 65535"
    if not name or not name.isprintable() or any(map(str.isspace, name)):
        return "the name is not one printable word"
    size = len(host.encode()) + len(name.encode())
    return f"host and name have {size} bytes, more than {MAX_PLACE}" if size > MAX_PLACE else ""
