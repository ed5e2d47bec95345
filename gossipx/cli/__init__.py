"""The command line: words in, calls out; no logic."""

from gossipx.cli.commands import main

__all__ = ["main"]
