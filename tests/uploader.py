"""A peer in a process of its own that uploads a model to rank 0 of a run of two, and waits for the answer.

python uploader.py WAY FOLDER SIZE PORT
"""

from __future__ import annotations

import sys
from pathlib import Path

from managers import LONG, Run, settings_of
from responder import model

from gossipx.protocol.messages import ElasticRequest
from gossipx.transports import Address

if __name__ == "__main__":
    way, folder, size, port = sys.argv[1:]
    run = Run(2)
    run.addresses[0] = Address("127.0.0.1", int(port))
    host = run.host(1, **settings_of(way, Path(folder), 1))
    host.ask(0, ElasticRequest(7, 1, 1, LONG), bytearray(0), upload=model(int(size))).get(timeout=LONG)
