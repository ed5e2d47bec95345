"""Benchmarks of the parameter server with real processes, four workers and two servers.

bin/bench server              all parts, short (about 10 minutes)
bin/bench server --full       the tables of docs/figures-server.md (about 35 minutes)
bin/bench server --only throughput|links|safe|wait-free|staleness|hybrid
    throughput    pushes and pulls of tensors of 64 KiB to 16 MiB, compared with plain sockets
    links         the same from 1 MiB on, over emulated links of 1 Gbit/s
    safe          the same for 4 MiB, with a replica and with a journal, which preserve pushes when a server is killed
    wait-free     an iteration over 1 Gbit/s links, with gradients sent during backward, and all sent at its end
    staleness     delayed pulls (DPRs) of SSP and PSSP, soft barrier and lazy pulls (FluentPS, Figure 9 and Table IV)
    hybrid        hybrid less asp, and less bsp, in rounds of equal time (Hybrid Approach, section 6)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import _hybrid
import _staleness
import _throughput
import _wait_free
from _process_pool import ProcessPool
from _report import report

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]], list[dict[str, Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bin/bench server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=tuple(PARTS))
    arguments = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for name, measure in PARTS.items():
        if arguments.only in (None, name):
            table = measure(arguments.full)
            figures += table[-1]
            if not arguments.json:
                report(*table)
    if arguments.json:
        print(json.dumps({"figures": figures}, indent=2))


def _throughput_of(full: bool) -> Table:
    with ProcessPool() as pool:
        table: Table = _throughput.measure(pool, 3 if full else 1, 10 if full else 8)
    return table


def _links_of(full: bool) -> Table:
    table: Table = _throughput.measure_links(3 if full else 1, 5 if full else 3)
    return table


def _safe_of(full: bool) -> Table:
    with ProcessPool() as pool:
        table: Table = _throughput.measure_safe(pool, 3 if full else 1, 10 if full else 5)
    return table


def _wait_free_of(full: bool) -> Table:
    table: Table = _wait_free.measure(3 if full else 1, 20 if full else 8)
    return table


def _staleness_of(full: bool) -> Table:
    with ProcessPool() as pool:
        groups = _staleness.GROUPS if full else (2, 10)
        table: Table = _staleness.measure(pool, 2 if full else 1, 200 if full else 100, groups)
    return table


def _hybrid_of(full: bool) -> Table:
    with ProcessPool() as pool:
        table: Table = _hybrid.measure(pool, 5 if full else 2, 10.0 if full else 4.0)
    return table


PARTS: dict[str, Callable[[bool], Table]] = {
    "throughput": _throughput_of,
    "links": _links_of,
    "safe": _safe_of,
    "wait-free": _wait_free_of,
    "staleness": _staleness_of,
    "hybrid": _hybrid_of,
}


if __name__ == "__main__":
    main()
