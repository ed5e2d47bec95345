"""Rate of pulls from another process: gossipx compared with unchecked sockets, gloo, torch rpc and memcpy.

hivemind and iperf3 are included if they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _hivemind import Hivemind
from _remote import HERE, Gloo, Gossipx, Iperf, Raw, Rpc, pin
from _report import figure
from _secured import Secured
from torch import nn

from gossipx.memory import Memory
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.tools import certs
from gossipx.wire import Bytes

SIZES = (8_000_000, 44_000_000, 240_000_000)
QUESTIONS = 400
SECONDS = 300.0
NEW = "gossipx, TCP, each a new version"
"""Pulls of a new version each, like nearly all pulls of a run. The sender reads a version once for its checksum; in all
other rows the same version is pulled repeatedly."""


def _median(work: Callable[[], None]) -> Callable[[], float]:
    def once() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return once


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


def pulls(size: int, rounds: int, scratch: Path) -> tuple[list[tuple[str, ...]], list[dict[str, Any]]]:
    """Return the table's rows and the figures for one size; each round runs all ways in turn."""
    local, remote = Memory(size), Memory(size)
    buffer, averaging = Memory(size).view, Averaging(size)
    source, target = (np.frombuffer(memory.view, dtype=np.uint8) for memory in (local, remote))
    ways: dict[str, Any] = {
        "sockets, sendall": Raw(size, "sendall"),
        "sockets, sendfile": Raw(size, "sendfile"),
        "gossipx, TCP": Gossipx(size, "tcp", lambda: Bytes(buffer)),
        NEW: Gossipx(size, "tcp", lambda: Bytes(buffer), versions="many"),
        "gossipx, TCP, averaged": Gossipx(size, "tcp", averaging.sink, averaging.compare),
        "gossipx, TCP, averaged and committed": Gossipx(size, "tcp", averaging.sink, averaging.commit),
        "gossipx, shared memory": Gossipx(size, "shm", lambda: Bytes(buffer)),
        "gossipx, shared memory, averaged": Gossipx(size, "shm", averaging.sink, averaging.compare),
        "gossipx, gloo": Gossipx(size, "gloo", lambda: Bytes(buffer)),
        "gloo": Gloo(size, str(scratch / f"gloo-{size}")),
    }
    if shutil.which("iperf3"):
        ways |= {"iperf3": Iperf(size)}
    rate = _rates(size, {"memcpy": lambda: np.copyto(target, source)}, ways, rounds)
    # torch rpc runs after all others, because its threads never sleep on one machine and use every core.
    rate |= _rates(size, {}, {"torch rpc": Rpc(size, str(scratch / f"rpc-{size}"))}, rounds)
    if importlib.util.find_spec("hivemind"):
        rate |= _rates(size, {}, {"hivemind, all-reduce of two": Hivemind(size)}, rounds)
    raw = max(rate["sockets, sendall"], rate["sockets, sendfile"])
    others = max(value for name, value in rate.items() if name.startswith(("gloo", "torch", "hivemind")))
    references: dict[str, tuple[float, float | None]] = {
        "gossipx, TCP": (raw, 0.9),
        NEW: (raw, 0.9),
        "gossipx, TCP, averaged": (rate["gossipx, TCP"], 0.75),
        "gossipx, TCP, averaged and committed": (rate["gossipx, TCP"], None),
        "gossipx, shared memory": (rate["memcpy"], 0.9),
        "gossipx, shared memory, averaged": (rate["gossipx, shared memory"], 0.75),
        "gossipx, gloo": (rate["gloo"], None),
    }
    rows, figures = _told(size, rate, references, raw)
    for way in ("gossipx, TCP", NEW):
        name = f"{size // 1_000_000} MB: {way}, ahead of gloo, rpc and hivemind"
        figures.append(figure(name, rate[way], "GB/s", goal=others, met=rate[way] > others))
    return rows, figures


def secured(size: int, rounds: int, scratch: Path) -> tuple[list[tuple[str, ...]], list[dict[str, Any]]]:
    """Return the cost of checksums, MACs and encryption, each compared with sockets that do only that."""
    buffer = Memory(size).view
    hosts = scratch / "hosts.txt"
    hosts.write_text(f"{HERE}:40000\n")
    certs.new(scratch / "certs", hosts)
    tls = f"tls:{scratch / 'certs'}"
    ways: dict[str, Any] = {
        "gossipx, TCP, unchecked": Gossipx(size, "unchecked", lambda: Bytes(buffer)),
        "gossipx, TCP": Gossipx(size, "tcp", lambda: Bytes(buffer)),
        NEW: Gossipx(size, "tcp", lambda: Bytes(buffer), versions="many"),
        "sockets, XXH3": Secured(size, "xxh3"),
        "gossipx, TCP, MAC": Gossipx(size, "mac", lambda: Bytes(buffer)),
        "sockets, HMAC-SHA256": Secured(size, "mac"),
        "gossipx, TLS": Gossipx(size, tls, lambda: Bytes(buffer)),
        "sockets, TLS 1.3": Secured(size, tls),
    }
    rate = _rates(size, {}, ways, rounds)
    unchecked = rate["gossipx, TCP, unchecked"]
    references: dict[str, tuple[float, float | None]] = {
        "gossipx, TCP": (unchecked, 0.8),
        NEW: (unchecked, 0.8),
        "gossipx, TCP, MAC": (rate["sockets, HMAC-SHA256"], 0.9),
        "gossipx, TLS": (rate["sockets, TLS 1.3"], 0.9),
    }
    return _told(size, rate, references, unchecked)


def _rates(size: int, more: dict[str, Callable[[], None]], ways: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return the GB/s of each way, medians over rounds."""
    kinds = {name: _median(work) for name, work in more.items()}
    kinds |= {name: _median(way.pull) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 2):
        for name, once in kinds.items():
            if name in ways and isinstance(ways[name], Gossipx):
                ways[name].prepare()
            took = once()
            took = getattr(ways.get(name), "seconds", took)  # iperf3 measures its own time
            if number >= 2:  # by then all memory has been touched
                seconds[name].append(took)
    for way in ways.values():
        way.close()
    return {name: size / statistics.median(values) / 1e9 for name, values in seconds.items()}


def _told(
    size: int, rate: dict[str, float], references: dict[str, tuple[float, float | None]], other: float
) -> tuple[list[tuple[str, ...]], list[dict[str, Any]]]:
    """Return rows and figures; ``other`` is the reference of all ways without their own."""
    rows, figures = [], []
    megabytes = f"{size // 1_000_000} MB"
    for name, value in rate.items():
        reference, goal = references.get(name, (other, None))
        met = None if goal is None else value >= goal * reference
        shown = None if goal is None else goal * reference
        wanted = "" if goal is None else f"{goal:.0%}"
        rows.append((megabytes, name, f"{value:.2f}", f"{value / reference:.0%}", wanted))
        figures.append(figure(f"{megabytes}: {name}", value, "GB/s", reference=reference, goal=shown, met=met))
    return rows, figures


def apart(what: str, *arguments: object) -> list[Any]:
    """Run :func:`pulls`, :func:`secured` or :func:`questions` in a separate process, pinned to one core.

    A process can join gloo and rpc only once.
    """
    command = [sys.executable, __file__, what, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    told: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def questions() -> tuple[tuple[str, ...], dict[str, Any]]:
    """Time a request of 1 KB and its reply: gossipx compared with blocking sockets that send as many bytes each way."""
    ways = {"sockets": Raw(1, "sendall"), "gossipx": Gossipx(1, "tcp", lambda: Bytes(memoryview(bytearray(1))))}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(QUESTIONS + 20):
        for name, way in ways.items():
            took = _median(way.ask)()
            if number >= 20:
                seconds[name].append(took)
    for way in ways.values():
        way.close()
    medians = {name: statistics.median(values) * 1e6 for name, values in seconds.items()}
    ratio = medians["gossipx"] / medians["sockets"]
    row = ("1 KB", "gossipx, request and answer", f"{medians['gossipx']:.0f} µs", f"{ratio:.2f} of sockets", "< 2")
    one = figure(
        "A request of 1 KB and its answer",
        medians["gossipx"],
        "µs",
        reference=medians["sockets"],
        goal=2 * medians["sockets"],
        met=ratio < 2,
    )
    return row, one


if __name__ == "__main__":
    torch.set_num_threads(1)
    pin(0)
    what, *given = sys.argv[1:]
    if what == "questions":
        told: Any = questions()
    else:
        size, rounds, scratch = given
        told = {"pulls": pulls, "secured": secured}[what](int(size), int(rounds), Path(scratch))
    print(json.dumps(told))
