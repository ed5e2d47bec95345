"""Network namespaces of this machine: named after the process that made them, so that none is left for good."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

TOOLS = ("ip", "tc")
NAME = re.compile(r"gossipx-(?P<pid>\d+)-(?P<began>\d+)-\d+-\w+")
"""The process that made it, when that began, and its how manieth network; then what it is in that."""
GONE_WITHIN = 10.0
"""Seconds that a killed process may take to go."""
_serial = itertools.count()


class NetworkUnavailableError(Exception):
    """There can be no emulated network here; the message says what it needs."""


@functools.cache
def lacking() -> str | None:
    """What an emulated network needs and this system does not have, in a sentence; None: nothing."""
    needs = "an emulated network needs root on Linux, with ip and tc (Debian's iproute2)"
    if sys.platform != "linux":
        return f"{needs}: this is {sys.platform}"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{needs}: {' and '.join(missing)} not found"
    if os.geteuid() != 0:
        return f"{needs}: this is user {os.geteuid()}"
    trial = f"{unique_prefix()}-trial"
    try:
        run("ip", "netns", "add", trial)
        run("ip", "-n", trial, "link", "add", "name", "lan0", "type", "bridge")
        run("ip", "-n", trial, "link", "add", "name", "port0", "type", "veth", "peer", "name", "eth0")
        run(
            "tc",
            "-n",
            trial,
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            "1gbit",
            "burst",
            "1mb",
            "latency",
            "1s",
        )
    except NetworkUnavailableError as error:
        return f"{needs}: {error}"
    finally:
        remove(name for name in names() if name == trial)
    return None


def unique_prefix() -> str:
    """What the names of one network's namespaces begin with."""
    return f"gossipx-{os.getpid()}-{_began(os.getpid())}-{next(_serial)}"


def names() -> list[str]:
    """Of all namespaces that have one, anybody's."""
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]


def sweep() -> list[str]:
    """Remove the namespaces of processes that are dead, and kill what still runs in them.

    Returns:
        Their names.
    """
    left = []
    for name in names():
        match = NAME.fullmatch(name)
        if match is not None and _began(int(match["pid"])) != int(match["began"]):
            left.append(name)
    remove(left)
    return left


def remove(those: Iterable[str]) -> None:
    """Kill all that runs in these namespaces, and remove them with their devices; what fails is told at the end."""
    with contextlib.ExitStack() as each:
        for name in list(those):
            each.callback(_remove, name)


def _remove(name: str) -> None:
    try:
        _empty(name)
        run("ip", "netns", "del", name)
    except NetworkUnavailableError:
        if name in names():  # and was not swept by another process just now
            raise


def _empty(name: str) -> None:
    by = time.monotonic() + GONE_WITHIN
    while pids := run("ip", "netns", "pids", name).split():  # again: one may have been started meanwhile
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > by:
            raise RuntimeError(f"processes {' '.join(pids)} in namespace {name} do not end")


def _began(pid: int) -> int:
    """When a process began, in ticks since the machine did: with its number, it is that process and no later one."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return -1


def run(*command: str, given: str = "") -> str:
    """The output of a command.

    Raises:
        NetworkUnavailableError: it failed; with what it told.
    """
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise NetworkUnavailableError(f"'{' '.join(command)}' failed: {' '.join(done.stderr.split())}")
    return done.stdout


def works(*command: str, given: str = "") -> bool:
    """Whether a command is there and does not fail."""
    try:
        run(*command, given=given)
    except (NetworkUnavailableError, FileNotFoundError):
        return False
    return True
