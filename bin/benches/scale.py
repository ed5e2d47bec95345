"""Cost per iteration and loss as the number of peers grows, in virtual time: which exchange to choose where.

bin/bench scale           4 to 64 peers, loss at 4 and 8 (about 6 minutes on one core)
bin/bench scale --full    4 to 1,000 peers, three rates of the links, churn (about three hours)

Seconds and bytes are those of traffic alone, of ResNet-110 with 74 ms per iteration, whose time varies between
iterations (log-normal, sigma 0.1). The loss is that of LeNet on Fashion-MNIST after some iterations. DDP is not
simulated: its iteration takes as long as that of the slowest peer, and a ring all-reduce, 2 (N − 1) steps of 1/N of
the model, overlaps with two thirds of it, the backward pass. A crash stops all until its peer has returned. Its loss is
that of a server with bsp: both compute the same.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "_papers"))

from _report import figure, report
from _simulated import Run, mean, merged, run

from gossipx.sim.network import FULL_PACKET, PRESETS
from gossipx.tasks.models import costs, published_sizes

RATES = ("100mbit", "1gbit", "10gbit")
MODEL = "resnet110"
SIGMA = 0.1
SYSTEMS: dict[str, dict[str, dict[str, Any]]] = {
    "tau:10 (default)": {"sync": {"policy": "tau:10", "finish": "none"}},
    "tau:1": {"sync": {"policy": "tau:1", "finish": "none"}},
    "waves, tau:50": {"sync": {"policy": "tau:50", "exchange": "waves", "finish": "none"}},
    "DiLoCo": {
        "sync": {
            "policy": "tau:50",
            "exchange": "waves",
            "outer": "nesterov:lr=0.7,momentum=0.9",
            "blocking": True,
            "finish": "none",
        }
    },
    "server, bsp": {
        "server": {"sync": "bsp"},
        "exchange": {"peer_timeout": 3600.0},  # all fetch the first model of one peer
    },
}
DDP = "DDP"
MOST_WORKERS = 256
"""Workers of a server: it sends to each of them, so that a simulated iteration costs their square."""
THEORY = {
    "tau:10 (default)": (0.0, 0.0),
    "tau:1": (0.0, 0.0),
    "waves, tau:50": (0.0, "log N"),
    "DiLoCo": ("log N", "log N"),
    "server, bsp": ("0 with N/4 servers", 0.0),
    DDP: ("0, latency 1", 0.0),
}
"""Exponents of N that seconds and bytes per peer should grow with."""
CRASHES, DOWNTIME = 0.01, 60.0
"""Churn: the share of the peers that crash per minute, and the mean seconds until one returns."""
CHURN: dict[str, dict[str, Any]] = {
    "churn": {"rate": CRASHES, "downtime": DOWNTIME},
    "exchange": {"peer_timeout": 10.0},
    "simulation": {"announcements": False},  # nor do all fetch the first model of one peer
}
LONGER = 3
"""With churn, how many times as many iterations: in a short run hardly a peer crashes."""
CHURNED = "1gbit"
"""The rate of the links of runs with churn: a blocking wave of 1,000 peers takes minutes then, and its run many."""
Costs = dict[int, tuple[float, float]]
"""By number of peers: seconds and received bytes of an iteration of a peer."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bin/bench scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = (4, 16, 64, 256, 1000) if arguments.full else (4, 16, 64)
    rates = RATES if arguments.full else ("1gbit",)
    iterations = 200 if arguments.full else 100
    costs = {rate: costs_of(rate, sizes, iterations, arguments.full and rate == CHURNED) for rate in rates}
    tables = [costs_table(sizes, costs), losses(sizes if arguments.full else (4, 8), 200, costs)]
    if arguments.json:
        print(json.dumps({"figures": [one for table in tables for one in table[3]]}, indent=2))
        return
    for table in tables:
        report(*table)


Table = tuple[str, list[str], list[list[str]], list[Any]]


def costs_of(rate: str, sizes: Sequence[int], iterations: int, with_churn: bool) -> dict[str, Costs]:
    """Return the costs of each system on links of a rate."""
    found: dict[str, Costs] = {}
    for system in (*SYSTEMS, DDP):
        there = [size for size in sizes if "server" not in system or size <= MOST_WORKERS]
        found[system] = {size: _cost(system, size, rate, iterations) for size in there}
        if with_churn and "server" not in system:
            found[f"{system}, churn"] = {size: _cost(system, size, rate, LONGER * iterations, CHURN) for size in there}
    return found


def costs_table(sizes: Sequence[int], costs: Mapping[str, Mapping[str, Costs]]) -> Table:
    """Return seconds and bytes per iteration by number of peers, and the exponents that they grow with."""
    rows, figures = [], []
    for rate, systems in costs.items():
        for system, found in systems.items():
            exponents = [_exponent({size: one[n] for size, one in found.items()}) for n in (0, 1)]
            cells = [f"{1000 * one[0]:.0f} ms, {one[1] / 1e6:.2f} MB" for one in found.values()]
            cells += [""] * (len(sizes) - len(cells))
            theory = THEORY.get(system, ("", ""))
            told = (f"{grows:.2f} ({of})" if of != "" else "" for grows, of in zip(exponents, theory, strict=True))
            rows.append([rate, system, *cells, *told])
            figures += [
                figure(f"{system}, {rate}, {size} peers: seconds per iteration", one[0], "s", reference=_step())
                for size, one in found.items()
            ]
    headings = ["link", "exchange", *(f"{size} peers" for size in sizes), "s grow as N^", "bytes as N^"]
    return f"Seconds per iteration, and bytes that a peer receives in it: {MODEL}", headings, rows, figures


def _step() -> float:
    return costs.STEP_SECONDS[MODEL]


def _cost(
    system: str, size: int, rate: str, iterations: int, churn: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[float, float]:
    """Return seconds and bytes per iteration of a peer that does not crash."""
    if system == DDP:
        seconds, moved = _ring(size, rate, iterations)
        return seconds * (1 + size * CRASHES / 60 * DOWNTIME if churn else 1), moved
    settings = merged(SYSTEMS[system])
    if "server" in settings:
        iterations = min(iterations, 20)
        settings["server"]["servers"] = ",".join(map(str, range(0, size, 4)))
    tables = {
        "simulation": {"peers": size, "work": "traffic", "model": MODEL},
        "run": {"iterations": iterations},
        "compute": {"spread": f"log-normal:sigma={SIGMA}"},
        "network": {"preset": rate},
    }
    one = run(tables, settings, churn or {})
    seconds = median(seconds for seconds in one.summary.train_seconds if seconds is not None)
    return seconds / iterations, mean(one.summary.bytes_received) / iterations


def _ring(size: int, rate: str, iterations: int) -> tuple[float, float]:
    """Return seconds and bytes per iteration of DDP: compute of the slowest peer, and a ring all-reduce."""
    rng, link = random.Random(0), PRESETS[rate]
    model = 4 * sum(count for _, count in published_sizes(MODEL))
    slowest = [
        max(rng.lognormvariate(-(SIGMA**2) / 2, SIGMA) for _ in range(size)) * _step() for _ in range(iterations)
    ]
    moved = 2 * (size - 1) / size * model
    bandwidth = link["bandwidth"] * FULL_PACKET[0] / FULL_PACKET[1]
    reduce = moved / bandwidth + 2 * (size - 1) * link["delay"]
    return fmean(seconds / 3 + max(2 * seconds / 3, reduce) for seconds in slowest), moved


def _exponent(values: dict[int, float]) -> float:
    """Return the least-squares slope of log(value) over log(peers)."""
    points = [(math.log(size), math.log(value)) for size, value in values.items() if value > 0]
    x, y = fmean(one[0] for one in points), fmean(one[1] for one in points)
    spread = sum((one[0] - x) ** 2 for one in points)
    return sum((one[0] - x) * (one[1] - y) for one in points) / spread if spread else 0.0


def losses(sizes: Sequence[int], iterations: int, costs: Mapping[str, Mapping[str, Costs]]) -> Table:
    """Return the loss on test data of the average of all models, and the seconds and bytes of as many iterations."""
    rows, figures = [], []
    for size in sizes:
        for system, settings in SYSTEMS.items():
            found = _trained(size, iterations, settings)
            figures.append(figure(f"{system}, {size} peers: loss", float(found.summary.consensus_loss or 0), ""))
            for name in (system, DDP) if "server" in system else (system,):
                each = [of[name].get(size) for of in costs.values()]
                cells = ["" if one is None else f"{iterations * one[0]:.0f} s" for one in each]
                moved = next((f"{iterations * one[1] / 1e6:.0f} MB" for one in each if one is not None), "")
                rows.append([str(size), name, f"{found.summary.consensus_loss:.3f}", *cells, moved])
    headings = ["peers", "exchange", "loss", *costs, "received"]
    return f"Loss after {iterations} iterations of LeNet, and what as many of {MODEL} cost", headings, rows, figures


def _trained(size: int, iterations: int, settings: Mapping[str, Mapping[str, Any]]) -> Run:
    tables = {
        "simulation": {"peers": size},
        "run": {"iterations": iterations, "eval_interval": 0},
        "compute": {"seconds": _step(), "spread": f"log-normal:sigma={SIGMA}"},
        "network": {"preset": "1gbit"},
    }
    finish = {"server": {"servers": "0"}} if "server" in settings else {"sync": {"finish": "consensus"}}
    return run(tables, settings, finish)


if __name__ == "__main__":
    main()
