"""What ``gossipx run`` tells the processes that it starts, and what can be told to it, by environment variables."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from gossipx.runtime.progress import Progress

ENV_CONFIG = "GOSSIPX_CONFIG"
"""The run's effective configuration, a TOML file in the run's directory."""
ENV_PEERS = "GOSSIPX_PEERS"
"""The hosts file."""
ENV_RANK = "GOSSIPX_RANK"
"""Which of its peers this process is."""
ENV_SIZE = "GOSSIPX_SIZE"
"""How many peers there are, one a process, where no hosts file says so; see :mod:`gossipx.launch.cluster.world`."""
ENV_LOCAL_RANK = "GOSSIPX_LOCAL_RANK"
"""Which of this machine's peers this process is."""
ENV_LOCAL_SIZE = "GOSSIPX_LOCAL_SIZE"
"""How many of the peers are on this machine."""
ENV_MASTER = "GOSSIPX_MASTER"
"""host[:port] of peer 0, where all meet."""
ENV_DEVICE = "GOSSIPX_DEVICE"
"""What it trains on: the hosts file's device=, or the run's."""
ENV_RESUME = "GOSSIPX_RESUME"
ENV_RESUME_AT = "GOSSIPX_RESUME_AT"
"""Set and not empty: the run goes on from its checkpoints."""
ENV_PROGRESS = "GOSSIPX_PROGRESS_FD"
"""The pipe on which it tells how it gets on."""
ENV_DESCRIBE = "GOSSIPX_DESCRIBE"
"""Set and not empty: ``gossipx.join`` tells what the model is, and the process ends."""
ENV_DEBUG = "GOSSIPX_DEBUG"
"""Set and not empty: errors of gossipx's own come with a traceback."""


def progress() -> Progress:
    """The way to the parent process; errors that end this process go there, too, from here on."""
    if ENV_PROGRESS not in os.environ:
        return Progress(None)
    told = Progress(_pipe(int(os.environ[ENV_PROGRESS])))
    told.take_errors(with_traceback=bool(os.environ.get(ENV_DEBUG)))
    return told


def _pipe(number: int) -> int | None:
    """The pipe of that number; or the one of the process that started this one, a launcher such as torchrun, which has
    closed it here. The number may be that of something else here."""
    with contextlib.suppress(OSError):
        writes = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        if writes and stat.S_ISFIFO(os.fstat(number).st_mode):
            return number
    with contextlib.suppress(OSError):
        there = Path(f"/proc/{os.getppid()}/fd/{number}")
        if there.is_fifo():
            return os.open(there, os.O_WRONLY)
    return None
