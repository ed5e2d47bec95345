"""The program behind ``gossipx`` and ``python`` in a shell, run by a fork server: ``python -I -S command.py SOCKET
COMMAND...``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from forks.client import Process


def main() -> None:
    """Run the command; pass on signals, streams, folder, environment and exit code."""
    process = Process(sys.argv[1], sys.argv[2:], Path.cwd(), os.environ, (0, 1, 2))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: process.send_signal(number))
    code = process.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
