"""The command line: parsing of arguments and printing of results; the work is done by the packages below.

Importing its modules adds their commands to the group ``gossipx``.
"""

from gossipx.cli import in_progress, machines, planning, results, starting  # noqa: F401
from gossipx.cli.main_group import main

__all__ = ["main"]
