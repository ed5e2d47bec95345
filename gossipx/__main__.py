"""``python -m gossipx``."""

from gossipx.cli import main

main()
