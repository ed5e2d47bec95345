"""Facts of this machine alone: what names resolve to, which hosts are here, and which devices there are."""

from __future__ import annotations

import collections
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.launch.hosts import PeerLine, is_here
from gossipx.tools.doctor.findings import Host, Name, Verdict, plain

_LOOK_UP = 5.0  # seconds for all names at once: a resolver that does not answer takes as long, and often longer


def look_up(hosts: Sequence[Host]) -> list[Name]:
    """Return what the names of all hosts resolve to here."""
    found = {host.number: Name(host.number, (), f"no answer within {_LOOK_UP:g} s") for host in hosts}

    def one(host: Host) -> None:
        try:
            entries = socket.getaddrinfo(host.name, None, type=socket.SOCK_STREAM)
            found[host.number] = Name(host.number, tuple(dict.fromkeys(str(entry[4][0]) for entry in entries)))
        except (OSError, UnicodeError) as error:  # UnicodeError: what no name can be
            found[host.number] = Name(host.number, (), str(getattr(error, "strerror", None) or error))

    until = time.monotonic() + _LOOK_UP
    threads = [threading.Thread(target=one, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return list(found.values())


def hosts_here(hosts: Sequence[Host], names: Sequence[Name], advertise: str | None, file: Path) -> list[Host]:
    """Return the hosts that are this machine; UsageError if none is. Unlike for a run, others need not resolve."""
    if advertise is not None:
        if here := [host for host in hosts if host.name == advertise.strip("[]")]:
            return here
        raise UsageError(f"no line has the host '{advertise}' that --advertise names", file)
    own = {name.host for name in names if any(is_here(plain(address)) for address in name.addresses)}
    if not own:
        unknown = next((name for name in names if not name.addresses), None)
        why = f" ({hosts[unknown.host].name} does not resolve: {unknown.error})" if unknown else ""
        raise UsageError(f"no line is this machine{why}: add one, or say which by --advertise HOST", file)
    return [host for host in hosts if host.number in own]


def devices(host: str, peers: Sequence[PeerLine], default: str) -> list[Verdict]:
    """Return verdicts on the devices of a host's lines: each is there, and not shared."""
    lines = collections.Counter(peer.device or default for peer in peers)
    return [_device(host, name, lines[name], any(peer.device == name for peer in peers)) for name in lines]


def _device(host: str, name: str, lines: int, in_file: bool) -> Verdict:
    if name == "cpu":  # torch, which takes seconds to import, is not needed
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return Verdict("ok", "devices", f"cpu ({cores} cores) on {host}")
    import torch

    from gossipx.assembly.devices import check_device

    try:
        check_device(name, "device=" if in_file else "--device")
    except UsageError as error:
        advice = f"correct {'device= in the hosts file' if in_file else '--device there'}"
        return Verdict("fail", "devices", f"{host}: {error}", advice)
    about = torch.cuda.get_device_properties(name) if name.startswith("cuda") else None
    text = f"{name} ({about.name}, {about.total_memory / 2**30:.0f} GiB) on {host}" if about else f"{name} on {host}"
    if lines > 1:
        return Verdict("warn", "devices", f"{text} is shared by {lines} lines", "give each line a device of its own")
    return Verdict("ok", "devices", text)
