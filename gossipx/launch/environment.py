"""Environment variables by which ``gossipx run`` configures its child processes, and by which users configure it."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import stat
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.runtime.figures.progress import Progress

ENV_CONFIG = "GOSSIPX_CONFIG"
"""Path of the run's effective settings, a TOML file in the run's directory."""
ENV_PEERS = "GOSSIPX_PEERS"
"""Path of the hosts file."""
ENV_RANK = "GOSSIPX_RANK"
"""Rank of the peer that this process is."""
ENV_SIZE = "GOSSIPX_SIZE"
"""Number of peers, one process each, if there is no hosts file; see :mod:`gossipx.launch.world.launchers`."""
ENV_LOCAL_RANK = "GOSSIPX_LOCAL_RANK"
"""Number of this process among the peers of this machine, from 0."""
ENV_LOCAL_SIZE = "GOSSIPX_LOCAL_SIZE"
"""Number of peers on this machine."""
ENV_MASTER = "GOSSIPX_MASTER"
"""host[:port] of rank 0, where the processes of the run find each other."""
ENV_DEVICE = "GOSSIPX_DEVICE"
"""Device to train on: device= of the hosts file, or --device."""
ENV_RESUME = "GOSSIPX_RESUME"
"""Set and not empty: the run resumes from its checkpoints. :data:`ADDED`: so it does, but this peer is new in it."""
ADDED = "added"
"""Value of :data:`ENV_RESUME` for a peer that the run did not have before, which has no checkpoint."""
ENV_RESUME_AT = "GOSSIPX_RESUME_AT"
"""Iteration of the checkpoints to resume from; empty: the newest of each peer."""
ENV_ADMISSION = "GOSSIPX_ADMISSION"
"""Path of the file with which this peer joins a run under way, a JSON file in the run's directory."""
ENV_PROGRESS = "GOSSIPX_PROGRESS_FD"
"""File descriptor of the pipe for progress events to the parent process."""
ENV_DESCRIBE = "GOSSIPX_DESCRIBE"
"""Path of a file: ``gossipx.join`` writes the model's tensors there and ends the process; empty: it trains."""
ENV_STOP_WITH_INPUT = "GOSSIPX_STOP_WITH_INPUT"
"""Set and not empty: ``gossipx run`` was started by ssh from another host, and stops when its standard input ends."""
ENV_DEBUG = "GOSSIPX_DEBUG"
"""Set and not empty: gossipx's own errors are shown with a traceback."""


def start_reporting() -> Progress:
    """Return the channel to the parent process, if any, and report errors from now on.

    An error of gossipx that ends this process is then reported there, or else printed, in one line.

    Raises:
        UsageError: the script has started this process, which only imports the script.
    """
    channel = Progress(_pipe(int(os.environ[ENV_PROGRESS])) if ENV_PROGRESS in os.environ else None)
    channel.take_errors(with_traceback=bool(os.environ.get(ENV_DEBUG)))
    # Set while a process that multiprocessing has started imports the script: it asks so itself, to refuse processes
    # that would start such processes in turn.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "a process that the script has started, such as a worker of a DataLoader, imports the script again: put its"
            " training under 'if __name__ == \"__main__\":'"
        )
    return channel


def _pipe(number: int) -> int | None:
    """Return the file descriptor of the progress pipe, or None.

    A launcher such as torchrun between ``gossipx run`` and this process closes the pipe in its children. It is then
    reopened from the parent process. The same number may also belong to another file here, which is not a pipe.
    """
    with contextlib.suppress(OSError):
        writes = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        if writes and stat.S_ISFIFO(os.fstat(number).st_mode):
            return number
    with contextlib.suppress(OSError):
        parents = Path(f"/proc/{os.getppid()}/fd/{number}")
        if parents.is_fifo():
            return os.open(parents, os.O_WRONLY)
    return None
