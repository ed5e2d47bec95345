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
from dataclasses import replace
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
from gossipx.tools.doctor.verdicts import Host, Verdict

_RESOLVE = 5.0  # seconds for all names together, because an unresponsive resolver takes that long or longer
_JOIN = 120.0  # seconds in which a script must reach gossipx.join: it may read data first


def resolve_hosts(hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts with their addresses. All names are resolved in parallel."""
    found = {host.number: replace(host, error=f"no answer within {_RESOLVE:g} s") for host in hosts}

    def resolve_one(host: Host) -> None:
        try:
            entries = socket.getaddrinfo(host.name, None, type=socket.SOCK_STREAM)
            addresses = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries)
            found[host.number] = replace(host, addresses=tuple(addresses))
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            found[host.number] = replace(host, error=str(getattr(error, "strerror", None) or error))

    until = time.monotonic() + _RESOLVE
    threads = [threading.Thread(target=resolve_one, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return list(found.values())


def hosts_here(hosts: Sequence[Host], advertise: str | None, file: Path) -> list[Host]:
    """Return the hosts that are this machine, or raise UsageError. Unlike in a run, other names may be unresolved."""
    if advertise is not None:
        if here := [host for host in hosts if host.name == advertise.strip("[]")]:
            return here
        raise UsageError(f"no line has the host '{advertise}' given by --advertise", file)
    addresses = {host.name: [ip_address(one) for one in host.addresses] for host in hosts if host.addresses}
    first = {name: min(own, key=lambda one: one.version) for name, own in addresses.items()}
    refuse_repeated([peer for host in hosts for peer in host.peers], first, file)
    if here := [host for host in hosts if any(map(is_here, addresses.get(host.name, ())))]:
        return here
    unknown = next((host for host in hosts if not host.addresses), None)
    why = f" ({unknown.name} does not resolve: {unknown.error})" if unknown else ""
    raise UsageError(f"no line is this machine{why}: add one, or name one with --advertise HOST", file)


def check_devices(host: str, peers: Sequence[PeerLine], default: str) -> list[Verdict]:
    """Return verdicts on the devices of a host's lines: each must exist and not be shared."""
    lines = collections.Counter(peer.device or default for peer in peers)
    return [_device_line(host, name, lines[name], any(peer.device == name for peer in peers)) for name in lines]


def _device_line(host: str, name: str, lines: int, in_file: bool) -> Verdict:
    if name != "cpu":
        from gossipx.assembly.devices import check_device  # imports torch, which takes seconds

        try:
            check_device(name, "device=" if in_file else "--device")
        except UsageError as error:
            advice = f"correct {'device= in the hosts file' if in_file else '--device there'}"
            return Verdict("fail", "devices", f"{host}: {error}", advice)
        if lines > 1:
            text = f"{name} on {host} is shared by {lines} lines"
            return Verdict("warn", "devices", text, "give each line a device of its own")
    return Verdict("ok", "devices", f"{name} on {host}")


def described_model(
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
