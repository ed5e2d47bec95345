"""What ``gossipx run`` tells the processes that it starts, by environment variables."""

from __future__ import annotations

import os

from gossipx.drive.progress import Progress

ENV_CONFIG = "GOSSIPX_CONFIG"
"""The run's effective configuration, a TOML file in the run's directory."""
ENV_PEERS = "GOSSIPX_PEERS"
"""The hosts file."""
ENV_RANK = "GOSSIPX_RANK"
"""Which of its peers this process is."""
ENV_DEVICE = "GOSSIPX_DEVICE"
"""What it trains on: the hosts file's device=, or the run's."""
ENV_RESUME = "GOSSIPX_RESUME"
ENV_RESUME_AT = "GOSSIPX_RESUME_AT"
"""Set and not empty: the run goes on from its checkpoints."""
ENV_PROGRESS = "GOSSIPX_PROGRESS_FD"
"""The pipe on which it tells how it gets on."""
ENV_DEBUG = "GOSSIPX_DEBUG"
"""Set and not empty: errors of gossipx's own come with a traceback."""


def progress() -> Progress:
    """The way to the parent process; errors that end this process go there, too, from here on."""
    if ENV_PROGRESS not in os.environ:
        return Progress(None)
    told = Progress(int(os.environ[ENV_PROGRESS]))
    told.take_errors(with_traceback=bool(os.environ.get(ENV_DEBUG)))
    return told
