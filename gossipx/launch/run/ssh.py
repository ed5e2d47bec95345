"""``gossipx run --ssh``: starts the lines of other hosts by ssh, with the same command.

The user's own ssh client is called, with the user's configuration and keys. All hosts need the same directory, hosts
file, script and Python at the same paths. A remote ``gossipx run`` stops in order when its standard input ends: on
request, or if this process or the connection dies.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gossipx.errors import UsageError
from gossipx.launch.environment import ENV_PROGRESS, ENV_STOP_WITH_INPUT
from gossipx.launch.hosts import PeerLine
from gossipx.launch.run.children import Child
from gossipx.launch.start import Start
from gossipx.settings.sections import KEYS

ANYWHERE = ("0.0.0.0", "::", "[::]")
"""Values of --bind that mean all addresses of a machine, so that they suit every host."""
END_WITHIN = 3.0
"""Seconds that clients have to end when this process ends at once: enough to say what they still have to say."""
CONNECTION_FAILED = 255
"""Exit code of ssh if it could not connect."""


@dataclass(frozen=True)
class Command:
    """A ``gossipx run`` as given, to be repeated on other hosts.

    Attributes:
        settings: given options by name; None: not given.
        config: the file given by --config.
        resume: the run given by --resume.
        script: the script and its arguments.
    """

    settings: Mapping[str, Any]
    config: Path | None
    resume: str | None
    script: Sequence[str]

    def on_others(self, start: Start) -> dict[str, list[str]]:
        """Return the arguments of ``gossipx`` by host, for all hosts of a run but this one.

        Raises:
            UsageError: there is no other host, or no ssh client.
        """
        assert start.settings.run.name is not None
        name, logdir = start.settings.run.name, start.settings.run.logdir
        return {host: self.on(host, name, logdir) for host in remote_hosts(start.peers, start.here)}

    def on(self, host: str, name: str, logdir: str) -> list[str]:
        """Return the arguments of ``gossipx`` on ``host``.

        Each host has a directory of its own below ``logdir``, as machines may share a file system.
        """
        bind = self.settings.get("bind")
        replaced = {
            **self.settings,
            "name": None if self.resume else name,
            "logdir": str(Path(logdir) / host.replace(":", "_")),
            "advertise": host,
            "bind": bind if bind is None or bind in ANYWHERE else host,
        }
        arguments = ["run", *(["--config", str(self.config)] if self.config else [])]
        arguments += ["--resume", self.resume] if self.resume else []
        for key in KEYS.values():
            arguments += _option(key.name, key.option, replaced.get(key.name))
        return [*arguments, *self.script]


def remote_hosts(peers: Sequence[PeerLine], here: Sequence[int]) -> list[str]:
    """Return the hosts whose lines are not of this machine, in the file's order; errors as for
    :meth:`Command.on_others`."""
    own = {peers[rank].host for rank in here}
    others = list(dict.fromkeys(peer.host for peer in peers if peer.host not in own))
    if not others:
        raise UsageError("--ssh starts peers on other hosts, and all lines of the hosts file are this machine: omit it")
    if shutil.which("ssh") is None:
        raise UsageError("--ssh needs the program ssh, which was not found (on Debian: apt install openssh-client)")
    return others


def _option(name: str, option: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [option if value else f"--no-{name.replace('_', '-')}"]
    return [option, ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)]


class Remote:
    """The ``gossipx run`` of other hosts, one ssh client each.

    Args:
        commands: arguments of ``gossipx`` by host.
        tell: shows a line.

    Attributes:
        codes: exit codes of those that have ended, by host.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], tell: Callable[[str], None]):
        self._commands = commands
        self._tell = tell
        self._clients: dict[str, Child] = {}
        self.codes: dict[str, int] = {}
        self._heard: set[str] = set()  # hosts that have printed a line
        self._remind_at = 0.0

    def start(self, selector: selectors.BaseSelector) -> None:
        """Start the clients, and register their output with ``selector``."""
        for host, arguments in self._commands.items():
            words = ["exec", "env", f"{ENV_STOP_WITH_INPUT}=1", sys.executable, "-m", "gossipx", *arguments]
            command = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"
            client = Child(
                ["ssh", host, command], os.environ, ENV_PROGRESS, partial(self._show, host), stdin=subprocess.PIPE
            )
            client.register(selector)
            self._clients[host] = client

    def _show(self, host: str, line: str) -> None:
        self._heard.add(host)
        self._tell(f"[{host}] {line}")

    @property
    def running(self) -> list[str]:
        """Hosts whose clients have not ended."""
        return [host for host in self._clients if host not in self.codes]

    def check(self, selector: selectors.BaseSelector) -> list[str]:
        """Return the hosts whose clients have ended with an error since the last call."""
        failed = []
        for host in self.running:
            code = self._clients[host].process.poll()
            if code is not None:
                self._clients[host].drain(selector)
                self.codes[host] = code = code if code >= 0 else CONNECTION_FAILED
                if code:
                    failed.append(host)
        return failed

    def why(self, host: str) -> str:
        """Say how the client of ``host`` ended."""
        code = self.codes[host]
        if code == CONNECTION_FAILED:
            return f"{host}: ssh has failed, or its connection was lost"
        return f"{host}: its gossipx run ended with exit code {code}"

    def remind(self, now: float, every: float) -> None:
        """Say which hosts are waited for, once per ``every`` seconds; give up those that have not printed a line."""
        if now <= self._remind_at:
            return
        if self._remind_at:
            waits = [host for host in self.running if host in self._heard]
            if waits:
                self._tell(f"waiting for the peers of {', '.join(waits)} to end")
            for host in self.running:
                if host not in self._heard:
                    self._tell(f"{host}: its ssh was killed, because nothing has come from there")
                    self._clients[host].process.kill()
        self._remind_at = now + every

    def stop(self) -> None:
        """Ask all hosts to stop in order."""
        for client in self._clients.values():
            assert client.process.stdin is not None
            with contextlib.suppress(OSError):
                client.process.stdin.close()

    def end(self) -> None:
        """Stop all hosts, and kill the clients that have not ended within :data:`END_WITHIN`; their hosts stop then
        too."""
        self.stop()
        by = time.monotonic() + END_WITHIN
        for host, client in self._clients.items():
            try:
                client.process.wait(max(0.0, by - time.monotonic()))
            except subprocess.TimeoutExpired:
                client.process.kill()
                client.process.wait()
                self._tell(f"{host}: did not stop within {END_WITHIN:g} s; its ssh was killed")
