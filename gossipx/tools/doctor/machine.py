"""Facts about this machine: how it resolves host names, its hosts, its devices, and the model that it would train."""

from __future__ import annotations

import collections
import os
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from gossipx.errors import GossipxError, UsageError, printable
from gossipx.launch.environment import ENV_CONFIG, ENV_DESCRIBE, ENV_DEVICE, ENV_PEERS, ENV_PROGRESS, ENV_RANK
from gossipx.launch.hosts import PeerLine, is_here, refuse_repeated
from gossipx.launch.run.children import Child, command_of
from gossipx.launch.start import script_exists
from gossipx.settings import files
from gossipx.settings.sections import RunConfig
from gossipx.tools.doctor.findings import Host, Name, Verdict

_RESOLVE = 5.0  # seconds for all names together, because an unresponsive resolver takes that long or longer
_JOIN = 120.0  # seconds in which a script must reach gossipx.join: it may read data first


def resolve(hosts: Sequence[Host]) -> list[Name]:
    """Resolve the names of all hosts in parallel."""
    found = {host.number: Name(host.number, (), f"no answer within {_RESOLVE:g} s") for host in hosts}

    def resolve_one(host: Host) -> None:
        try:
            entries = socket.getaddrinfo(host.name, None, type=socket.SOCK_STREAM)
            addresses = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries)
            found[host.number] = Name(host.number, tuple(addresses))
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            found[host.number] = Name(host.number, (), str(getattr(error, "strerror", None) or error))

    until = time.monotonic() + _RESOLVE
    threads = [threading.Thread(target=resolve_one, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return list(found.values())


def hosts_here(hosts: Sequence[Host], names: Sequence[Name], advertise: str | None, file: Path) -> list[Host]:
    """Return the hosts that are this machine, or raise UsageError. Unlike in a run, other names may be unresolved."""
    if advertise is not None:
        if here := [host for host in hosts if host.name == advertise.strip("[]")]:
            return here
        raise UsageError(f"no line has the host '{advertise}' given by --advertise", file)
    known = {hosts[name.host].name: [ip_address(one) for one in name.addresses] for name in names if name.addresses}
    first = {host: min(addresses, key=lambda one: one.version) for host, addresses in known.items()}
    refuse_repeated([peer for host in hosts for peer in host.peers], first, file)
    own = {name.host for name in names if any(is_here(ip_address(address)) for address in name.addresses)}
    if not own:
        unknown = next((name for name in names if not name.addresses), None)
        why = f" ({hosts[unknown.host].name} does not resolve: {unknown.error})" if unknown else ""
        raise UsageError(f"no line is this machine{why}: add one, or name one with --advertise HOST", file)
    return [host for host in hosts if host.number in own]


def devices(host: str, peers: Sequence[PeerLine], default: str) -> list[Verdict]:
    """Return verdicts on the devices of a host's lines: each must exist and not be shared."""
    lines = collections.Counter(peer.device or default for peer in peers)
    return [_device(host, name, lines[name], any(peer.device == name for peer in peers)) for name in lines]


def _device(host: str, name: str, lines: int, in_file: bool) -> Verdict:
    if name == "cpu":  # avoids importing torch, which takes seconds
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


def model(
    settings: RunConfig, peers: int, file: Path, first: PeerLine, script: list[str] | None
) -> tuple[str, bytes, str]:
    """Return a title of the model that peer ``first`` would train, its description, and the error if it is missing."""
    if script is None:
        return "", b"", ""
    from gossipx.assembly.presets import effective_config

    complete = effective_config(settings, peers, bool(script))
    title = script[0] if script else f"{complete.task.model} for {complete.task.task}"
    if not script_exists(script):
        raise UsageError("no such script", file=script[0])
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as options:
        options.write(files.dump(complete))
        options.flush()
        environment = {
            "OMP_NUM_THREADS": str(settings.run.threads),
            **os.environ,
            ENV_CONFIG: options.name,
            ENV_PEERS: str(file.resolve()),
            ENV_RANK: str(first.rank),
            ENV_DEVICE: first.device or settings.run.device,
            ENV_DESCRIBE: "1",
        }
        try:
            return title, _description(command_of(script), environment), ""
        except GossipxError as error:
            return title, b"", printable(f"{title} {error}")


def _description(command: list[str], environment: dict[str, str]) -> bytes:
    """Return the description of the model, one line per tensor, or raise GossipxError."""
    reported: dict[str, Any] = {}
    printed = [""]
    child = Child(command, environment, ENV_PROGRESS, on_line=printed.append, on_event=reported.update)
    until = time.monotonic() + _JOIN
    with selectors.DefaultSelector() as selector:
        try:
            child.register(selector)
            while child.process.poll() is None and time.monotonic() < until:
                for key, _ in selector.select(0.1):
                    if key.fd in selector.get_map():
                        key.data()
            child.drain(selector)
        finally:
            child.signal(signal.SIGKILL)
            child.process.wait()
    if "manifest" in reported:
        return str(reported["manifest"]).encode()
    if child.process.returncode == -signal.SIGKILL:
        raise GossipxError(f"did not reach gossipx.join within {_JOIN:g} s")
    last = reported.get("error", printed[-1].strip())
    raise GossipxError(f"ended without gossipx.join ({child.describe_exit()}): {last}")
