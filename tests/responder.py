"""A peer in a separate process that answers every request with one model, until its standard input ends.

python responder.py WAY FOLDER SIZE PORT
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from managers import Run, settings_of

from gossipx.transports import Address


def model(size: int) -> bytes:
    """The model that it sends: numbers that are all different."""
    return np.arange(-(-size // 8), dtype="<u8").tobytes()[:size]


if __name__ == "__main__":
    way, folder, size, port = sys.argv[1:]
    host = Run(2).host(1, bind=Address("127.0.0.1", int(port)), **settings_of(way, Path(folder), 1))
    host.serve(model(int(size)))
    print(host.comm.address.port, flush=True)
    sys.stdin.read()
    host.comm.close()
