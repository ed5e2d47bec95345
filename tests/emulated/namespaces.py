"""Network namespaces of this machine, named after the process that created them, so that leftovers can be removed."""

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
"""A namespace's name: process id, start time of the process, number of the network, and the part of the network."""
GONE_WITHIN = 10.0
"""Seconds that a killed process may take to end."""
_serial = itertools.count()


class NetworkUnavailableError(Exception):
    """Raised if this system cannot emulate a network; the message names the missing prerequisite."""


@functools.cache
def lacking() -> str | None:
    """Return what an emulated network needs and this system lacks, in a sentence; None: nothing."""
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
        bucket = ("tbf", "rate", "1gbit", "burst", "1mb", "latency", "1s")
        run("tc", "-n", trial, "qdisc", "add", "dev", "eth0", "root", *bucket)
    except NetworkUnavailableError as error:
        return f"{needs}: {error}"
    finally:
        remove(name for name in names() if name == trial)
    return None


def unique_prefix() -> str:
    """Return the common prefix of the names of one network's namespaces."""
    return f"gossipx-{os.getpid()}-{start_time(os.getpid())}-{next(_serial)}"


def names() -> list[str]:
    """Return the names of all named namespaces on this machine."""
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]


def sweep() -> list[str]:
    """Remove the namespaces of dead processes, and kill the processes that still run in them.

    Returns:
        The names of the removed namespaces.
    """
    left = []
    for name in names():
        match = NAME.fullmatch(name)
        if match is not None and start_time(int(match["pid"])) != int(match["began"]):
            left.append(name)
    remove(left)
    return left


def remove(those: Iterable[str]) -> None:
    """Kill all processes in these namespaces, and remove the namespaces with their devices; errors are raised at the
    end."""
    with contextlib.ExitStack() as each:
        for name in list(those):
            each.callback(_remove, name)


def _remove(name: str) -> None:
    try:
        _empty(name)
        run("ip", "netns", "del", name)
    except NetworkUnavailableError:
        if name in names():  # unless another process has just swept it
            raise


def _empty(name: str) -> None:
    by = time.monotonic() + GONE_WITHIN
    while pids := run("ip", "netns", "pids", name).split():  # repeat: a process may have been started meanwhile
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > by:
            raise RuntimeError(f"processes {' '.join(pids)} in namespace {name} do not end")


def start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; with the process id it identifies the process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return -1


def run(*command: str, given: str = "") -> str:
    """Return the output of a command.

    Raises:
        NetworkUnavailableError: the command failed; has its output.
    """
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise NetworkUnavailableError(f"'{' '.join(command)}' failed: {' '.join(done.stderr.split())}")
    return done.stdout


def works(*command: str) -> bool:
    """Return whether a command exists and succeeds."""
    try:
        run(*command)
    except (NetworkUnavailableError, FileNotFoundError):
        return False
    return True
