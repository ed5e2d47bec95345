"""The command line: words in, calls out; no logic."""

from gossipx.cli.commands import main
from gossipx.cli.topology import topology

main.add_command(topology)

__all__ = ["main"]
