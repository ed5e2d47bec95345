"""The command line: words in, calls out; no logic."""

from gossipx.cli.commands import main
from gossipx.cli.placement import placement
from gossipx.cli.server import server
from gossipx.cli.topology import topology

main.add_command(topology)
main.add_command(placement)
main.add_command(server)

__all__ = ["main"]
