"""Benchmarks of the parameter server with real processes, four workers and two servers.

bin/bench server              all parts, short (about 5 minutes)
bin/bench server --full       the tables of docs/figures-server.md (about 20 minutes)
bin/bench server --only throughput|links|safe|wait-free
    throughput    pushes and pulls of tensors of 64 KiB to 16 MiB, compared with plain sockets
    links         the same from 1 MiB on, over emulated links of 1 Gbit/s
    safe          the same for 4 MiB, with a journal, which preserves pushes when a server is killed
    wait-free     an iteration over 1 Gbit/s links, with gradients sent during backward, and all sent at its end
"""

from __future__ import annotations

import _throughput
import _wait_free
from _bench.cli import Given, bench
from _bench.tables import Table


def throughput(given: Given) -> Table:
    if given.smoke:
        return _throughput.measure(1, 1, (2**16,), 2**18, _throughput.TCP)
    return _throughput.measure(given.of(1, 1, 3), given.of(2, 8, 10))


def links(given: Given) -> Table:
    return _throughput.measure_links(given.of(1, 1, 3), given.of(1, 3, 5))


def safe(given: Given) -> Table:
    sizes, ways = (_throughput.SAFE_SIZE,), _throughput.SAFE
    return _throughput.measure(given.of(1, 1, 3), given.of(1, 5, 10), sizes, ways=ways)


def wait_free(given: Given) -> Table:
    return _wait_free.measure(given.of(1, 1, 3), given.of(1, 8, 20))


PARTS = {"throughput": throughput, "links": links, "safe": safe, "wait-free": wait_free}


if __name__ == "__main__":
    bench(__file__, __doc__, PARTS, smoke=("throughput",))
