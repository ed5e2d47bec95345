"""Cost of exchanging models: the rate of pulls, secured or not, and the slowdown of training steps.

bin/bench exchange            pulls of 8, 44 and 240 MB from another process, compared with unchecked sockets, gloo,
                              torch rpc and memcpy; the same with checksums, MACs and encryption; and training steps
                              while another process pulls (about 6 minutes)
bin/bench exchange --full     more rounds
bin/bench exchange --only pulls|secured|served
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from _bench.cli import Given, bench
from _bench.peers import HERE
from _bench.processes import call, pin
from _bench.tables import Table
from _bench.training import seconds
from _served import served
from _ways import Gloo, Gossipx, Raw, Rpc, Secured, Way
from torch import nn

from gossipx.memory import Memory
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.tools import certs
from gossipx.wire import Bytes

SIZES = (8_000_000, 44_000_000, 240_000_000)
QUESTIONS = 400
TCP, SHARED = "gossipx, TCP", "gossipx, shared memory"
NEW = "gossipx, TCP, each a new version"
"""Pulls of a new version each, like nearly all pulls of a run. The sender reads a version once for its checksum; in all
other rows the same version is pulled repeatedly."""
MAC = "gossipx, TCP, MAC"
SMOKE = ("sockets, sendall", TCP, MAC)
RAW = ("sockets, sendall", "sockets, sendfile")
HEADINGS = ("model", "way", "GB/s", "of its reference", "goal")
REFERENCES: dict[str, tuple[str, float | None]] = {
    f"{TCP}, averaged": (TCP, 0.75),
    f"{TCP}, averaged and committed": (TCP, None),
    SHARED: ("memcpy", 0.9),
    f"{SHARED}, averaged": (SHARED, 0.75),
    "gossipx, gloo": ("gloo", None),
    MAC: ("sockets, HMAC-SHA256", 0.9),
    "gossipx, TLS": ("sockets, TLS 1.3", 0.9),
}
"""The way that another is compared with, and the least share of it; by default, unchecked transfers."""


class Averaging:
    """Sinks and commits of an arena whose model is one vector of ``size`` bytes."""

    def __init__(self, size: int):
        module = nn.Module()
        module.weights = nn.Parameter(torch.zeros(size // 4))
        self.arena = ParameterArena(module)

    def sink(self) -> Incoming:
        """Return the sink of a pull that starts at the last boundary and overlaps with one step."""
        incoming = Incoming(self.arena, self.arena.snapshot())
        self.arena.set_boundary(self.arena.step + 1)
        return incoming

    def compare(self, incoming: Incoming) -> None:
        """Check the complete pull, before the training thread uses it."""
        incoming.norm()
        incoming.release()

    def commit(self, incoming: Incoming) -> None:
        """Check the complete pull, and mix it into the weights."""
        incoming.norm()
        self.arena.exchanged.commit(incoming.buffer, 0.5)
        incoming.release()


def pulls(given: Given) -> Table:
    """Return the table of pulls by all ways."""
    title = f"One pull from another process of this machine, {os.cpu_count()} cores, medians of rounds in turn;"
    table = Table(f"{title} of one version again and again, where it does not say new", HEADINGS)
    for size in given.of((1_000_000,), SIZES, SIZES):
        rate = _apart(time_pulls, size, given)
        _tell(table, size, rate, max(rate[way] for way in RAW if way in rate), 0.9)
        others = [value for name, value in rate.items() if name.startswith(("gloo", "torch"))]
        for way in (TCP, NEW) if others else ():
            name = f"{size // 1_000_000} MB: {way}, ahead of gloo and rpc"
            table.figure(name, rate[way], "GB/s", least=max(others))
    medians = call(time_questions, given.of(20, QUESTIONS, QUESTIONS))
    ours, theirs = medians["gossipx"], medians["sockets"]
    table.row("1 KB", "gossipx, request and answer", f"{ours:.0f} µs", f"{ours / theirs:.2f} of sockets", "< 2")
    table.figure("A request of 1 KB and its answer", ours, "µs", reference=theirs, most=2 * theirs)
    return table


def secured(given: Given) -> Table:
    """Return the cost of checksums, MACs and encryption, each compared with sockets that do only that."""
    table = Table("Cost of checksums, MACs and encryption of a model, medians of rounds in turn", HEADINGS)
    for size in given.of((1_000_000,), SIZES[1:], SIZES[1:]):
        rate = _apart(time_secured, size, given)
        _tell(table, size, rate, rate.get("gossipx, TCP, unchecked", rate[TCP]), 0.8)
    return table


def _apart(work: Callable[..., dict[str, float]], size: int, given: Given) -> dict[str, float]:
    """Return the GB/s of each way, measured in a separate process: one can join gloo and rpc only once."""
    with tempfile.TemporaryDirectory() as scratch:
        rates: dict[str, float] = call(work, size, given.of(1, 9, 25), scratch, given.smoke)
    return rates


def _tell(table: Table, size: int, rate: Mapping[str, float], unchecked: float, goal: float) -> None:
    """Add rows and figures; ``goal`` is the least share of unchecked transfers that pulls over TCP must have."""
    megabytes = f"{size // 1_000_000} MB"
    for name, value in rate.items():
        other, share = REFERENCES.get(name, ("", goal if name in (TCP, NEW) else None))
        reference = rate.get(other, unchecked)
        table.row(megabytes, name, f"{value:.2f}", f"{value / reference:.0%}", f"{share:.0%}" if share else "")
        least = share * reference if share else None
        table.figure(f"{megabytes}: {name}", value, "GB/s", reference=reference, least=least)


# --- in a process of its own ------------------------------------------------------------------------------


def time_pulls(size: int, rounds: int, scratch: str, smoke: bool) -> dict[str, float]:
    """Return the GB/s of each way; each round runs all ways in turn."""
    local, remote = Memory(size), Memory(size)
    buffer, averaging = Memory(size).view, Averaging(size)
    source, target = (np.frombuffer(memory.view, dtype=np.uint8) for memory in (local, remote))
    place = Path(scratch)
    ways: dict[str, Callable[[], Way]] = {
        "sockets, sendall": lambda: Raw(size, "sendall"),
        "sockets, sendfile": lambda: Raw(size, "sendfile"),
        TCP: lambda: Gossipx(size, "tcp", lambda: Bytes(buffer)),
        NEW: lambda: Gossipx(size, "tcp", lambda: Bytes(buffer), versions="many"),
        f"{TCP}, averaged": lambda: Gossipx(size, "tcp", averaging.sink, averaging.compare),
        f"{TCP}, averaged and committed": lambda: Gossipx(size, "tcp", averaging.sink, averaging.commit),
        SHARED: lambda: Gossipx(size, "shm", lambda: Bytes(buffer)),
        f"{SHARED}, averaged": lambda: Gossipx(size, "shm", averaging.sink, averaging.compare),
        "gossipx, gloo": lambda: Gossipx(size, "gloo", lambda: Bytes(buffer)),
        "gloo": lambda: Gloo(size, str(place / f"gloo-{size}")),
    }
    rate = _rates(size, {"memcpy": lambda: np.copyto(target, source)}, ways, rounds, smoke)
    # torch rpc runs after all others, because its threads never sleep on one machine and use every core.
    rate |= _rates(size, {}, {"torch rpc": lambda: Rpc(size, str(place / f"rpc-{size}"))}, rounds, smoke)
    return rate


def time_secured(size: int, rounds: int, scratch: str, smoke: bool) -> dict[str, float]:
    """Return the GB/s of each way."""
    buffer, hosts, folder = Memory(size).view, Path(scratch) / "hosts.txt", Path(scratch) / "certs"
    hosts.write_text(f"{HERE}:40000\n")
    certs.new(folder, hosts)
    ways: dict[str, Callable[[], Way]] = {
        "gossipx, TCP, unchecked": lambda: Gossipx(size, "unchecked", lambda: Bytes(buffer)),
        TCP: lambda: Gossipx(size, "tcp", lambda: Bytes(buffer)),
        NEW: lambda: Gossipx(size, "tcp", lambda: Bytes(buffer), versions="many"),
        "sockets, XXH3": lambda: Secured(size, "xxh3"),
        MAC: lambda: Gossipx(size, "mac", lambda: Bytes(buffer)),
        "sockets, HMAC-SHA256": lambda: Secured(size, "mac"),
        "gossipx, TLS": lambda: Gossipx(size, f"tls:{folder}", lambda: Bytes(buffer)),
        "sockets, TLS 1.3": lambda: Secured(size, f"tls:{folder}"),
    }
    return _rates(size, {}, ways, rounds, smoke)


def _rates(
    size: int, more: Mapping[str, Callable[[], object]], ways: dict[str, Callable[[], Way]], rounds: int, smoke: bool
) -> dict[str, float]:
    """Return the GB/s of each way, medians over rounds."""
    pin(0)
    opened = {name: start() for name, start in ways.items() if not smoke or name in SMOKE}
    works = {**more, **{name: way.pull for name, way in opened.items()}}
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 2):
        for name, work in works.items():
            if name in opened:
                opened[name].prepare()
            took = seconds(work)
            if number >= 2:  # by then all memory has been touched
                taken[name].append(took)
    for way in opened.values():
        way.close()
    return {name: size / statistics.median(values) / 1e9 for name, values in taken.items()}


def time_questions(count: int) -> dict[str, float]:
    """Return the µs of a request of 1 KB and its reply: gossipx, and blocking sockets that send as many bytes."""
    pin(0)
    ways: dict[str, Raw | Gossipx] = {
        "sockets": Raw(1, "sendall"),
        "gossipx": Gossipx(1, "tcp", lambda: Bytes(memoryview(bytearray(1)))),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(count + 20):
        for name, way in ways.items():
            took = seconds(way.ask)
            if number >= 20:
                taken[name].append(took)
    for way in ways.values():
        way.close()
    return {name: statistics.median(values) * 1e6 for name, values in taken.items()}


if __name__ == "__main__":
    bench(__file__, __doc__, {"pulls": pulls, "secured": secured, "served": served})
