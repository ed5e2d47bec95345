"""The command line: parsing of arguments and printing of results; the work is done by the packages below."""

from gossipx.cli.commands import main
from gossipx.cli.compare import compare
from gossipx.cli.completion import completion
from gossipx.cli.doctor import doctor
from gossipx.cli.export import export
from gossipx.cli.launch import launch
from gossipx.cli.peer import peer
from gossipx.cli.placement import placement
from gossipx.cli.server import server
from gossipx.cli.simulate import simulate
from gossipx.cli.status import runs, status
from gossipx.cli.topology import topology
from gossipx.cli.tune import tune

main.add_command(compare)
main.add_command(completion)
main.add_command(doctor)
main.add_command(export)
main.add_command(runs)
main.add_command(simulate)
main.add_command(status)
main.add_command(topology)
main.add_command(tune)
main.add_command(peer)
main.add_command(placement)
main.add_command(server)
main.add_command(launch)

__all__ = ["main"]
