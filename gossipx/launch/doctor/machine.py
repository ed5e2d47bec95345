"""What can be seen of this machine alone: names, ports and devices."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from gossipx.launch.doctor.findings import Device, Host, Name

_LOOK_UP = 5.0
"""Seconds for all names together: a resolver that does not answer takes as long by itself, and often."""
_LISTENS = "0A"  # of a socket, in /proc/net/tcp
_GIB = 2**30
_DRIVER = Path("/proc/driver/nvidia")


def look_up(hosts: Sequence[Host]) -> list[Name]:
    """What the names of all hosts stand for here."""
    answers: queue.SimpleQueue[Name] = queue.SimpleQueue()
    for host in hosts:
        threading.Thread(
            target=lambda host=host: answers.put(_look_up(host)), name=f"gossipx-resolve-{host.number}", daemon=True
        ).start()
    found = {host.number: Name(host.number, (), f"no answer within {_LOOK_UP:g} s") for host in hosts}
    with contextlib.suppress(queue.Empty):
        for _ in hosts:
            name = answers.get(timeout=_LOOK_UP)
            found[name.host] = name
    return list(found.values())


def _look_up(host: Host) -> Name:
    try:
        entries = socket.getaddrinfo(host.name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: what no name can be
        return Name(host.number, (), str(getattr(error, "strerror", None) or error))
    return Name(host.number, tuple(dict.fromkeys(str(entry[4][0]) for entry in entries)))


def is_here(address: str) -> bool:
    """Whether an address is this machine's: one can bind to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            place = socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4]
            trial.bind(place)
    except OSError:
        return False
    return True


def listener(port: int) -> str:
    """Which process listens on a TCP port of this machine, as ``python3 (pid 12)``; empty where that cannot be told."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(_link(file) in sockets for file in (process / "fd").iterdir()):
                name = "".join(c for c in (process / "comm").read_text().strip() if c.isprintable())
                return f"{name} (pid {process.name})"
    return ""


def _link(file: Path) -> str:
    with contextlib.suppress(OSError):
        return str(file.readlink())
    return ""


def devices(host: Host, default: str) -> tuple[tuple[Device, ...], tuple[str, ...], str]:
    """What the host's lines are to train on, all accelerators that are here, and their driver's version.

    Args:
        default: for lines without ``device=``.
    """
    users = collections.Counter(peer.device or default for peer in host.peers)
    found = []
    for peer in host.peers:
        name = peer.device or default
        there, text = _described(name, "device=" if peer.device else "--device")
        shared = there and users[name] > 1 and name.partition(":")[0] != "cpu"
        found.append(Device(peer.rank, name, there, f"{text}, shared by {users[name]} lines" if shared else text))
    return tuple(found), _accelerators(), _driver()


def _described(name: str, option: str) -> tuple[bool, str]:
    """Whether a device is here, and what it is or why it is not; ``option`` has named it."""
    if name == "cpu":  # torch, which takes seconds to import, is not needed
        return True, f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"
    import torch

    from gossipx.build.devices import check_device
    from gossipx.errors import UsageError

    try:
        check_device(name, option)
    except UsageError as error:
        return False, str(error)
    device = torch.device(name)
    return True, _cuda(device.index or 0) if device.type == "cuda" else device.type


def _accelerators() -> tuple[str, ...]:
    if not _DRIVER.exists():
        return ()
    import torch

    return tuple(_cuda(number) for number in range(torch.cuda.device_count()))


def _cuda(number: int) -> str:
    import torch

    about = torch.cuda.get_device_properties(number)
    return f"{about.name}, {about.total_memory / _GIB:.0f} GiB"


def _driver() -> str:
    with contextlib.suppress(OSError):
        line = (_DRIVER / "version").read_text().splitlines()[0]
        return next((word for word in line.split() if word[0].isdigit() and "." in word), "")
    return ""
