"""Cost per iteration and loss as the number of peers grows, in virtual time: which exchange to choose where.

bin/bench scale           costs of 4 to 64 peers, loss of 4 and 16 (about 40 minutes on one core)
bin/bench scale --full    4 to 1,000 peers, and churn; loss of up to 16 peers with three seeds (hours)

Seconds and bytes are those of traffic alone, of ResNet-110 with 74 ms per iteration, whose time varies between
iterations (log-normal, sigma 0.1). The loss is that of LeNet on Fashion-MNIST, over links on which it takes as long as
ResNet-110 over those of the table; each number of iterations is a run of its own, with its own schedule of the learning
rate. DDP is not simulated: its iteration takes as long as that of the slowest peer, and a ring all-reduce, 2 (N − 1)
steps of 1/N of the model, overlaps with two thirds of it, the backward pass. A crash stops all until its peer has
returned; none crashes meanwhile. Its loss is that of a server with bsp: both compute the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
from _bench.cli import Given, bench
from _bench.simulated import Run, merged, run
from _bench.tables import Table

from gossipx.sim.network import FULL_PACKET, PRESETS
from gossipx.tasks import costs
from gossipx.tasks.models import build_model

RATES = ("100mbit", "1gbit", "10gbit")
MODEL = "resnet110"
STEP = costs.STEP_SECONDS[MODEL]
SIGMA = 0.1
WAVES = {"policy": "tau:50", "exchange": "waves", "finish": "none"}
SYSTEMS: dict[str, dict[str, dict[str, Any]]] = {
    "tau:10 (default)": {"sync": {"policy": "tau:10", "finish": "none"}},
    "tau:1": {"sync": {"policy": "tau:1", "finish": "none"}},
    "waves, tau:50": {"sync": WAVES},
    "DiLoCo": {"sync": {**WAVES, "outer": "nesterov:lr=0.7,momentum=0.9", "blocking": True}},
    "server, bsp": {"server": {"sync": "bsp"}},
    "server, bsp, equal shares": {"server": {"sync": "bsp"}, "network": {"uneven": 0.0}},
}
"""DiLoCo is blocking waves, without a coordinator; every worker of a server is a server, too. Equal shares: transfers
share a link equally, in place of the simulator's default, which follows measurements with a smaller model."""
DDP = "DDP"
SERVED, EQUAL = "server, bsp", "server, bsp, equal shares"
MOST_WORKERS, SERVED_ITERATIONS = 64, 4
"""Of a server: each worker sends to each, so that a simulated iteration costs their square at least."""
TRAINED = [system for system in SYSTEMS if system != EQUAL]
WAITING, PROMPT = ("DiLoCo", SERVED), ("tau:10 (default)", "waves, tau:50")
"""The loss of the former hardly depends on the links, since they wait for each model: that of DiLoCo with 64 peers
differed by 0.003 between 100 Mbit/s and 10 Gbit/s. On slow links, pushes of 64 workers to one server take longer than
the deadline. The latter make every exchange at 1 Gbit/s as at 10 Gbit/s: with 4 and 16 peers, the loss after 100
iterations differed by up to 0.003."""
THEORY = {
    "tau:10 (default)": ("0", "0"),
    "tau:1": ("0", "0"),
    "waves, tau:50": ("0", "log N"),
    "DiLoCo": ("log N", "log N"),
    SERVED: ("0", "0"),
    EQUAL: ("0", "0"),
    DDP: ("0, latency 1", "0"),
}
"""Exponents of N that the seconds beyond those of computing, and the bytes per peer, should grow with."""
LEAST_EXTRA = 0.005
"""The share of the step under which seconds beyond it are noise."""
CRASHES, DOWNTIME = 0.01, 60.0
"""Churn: the share of the peers that crash per minute, and the mean seconds until one returns."""
CHURN: dict[str, dict[str, Any]] = {
    "churn": {"rate": CRASHES, "downtime": DOWNTIME},
    "exchange": {"peer_timeout": 10.0},
}
CHURNED = "1gbit"
"""The rate of the links of runs with churn."""
WITH_CHURN = ("tau:10 (default)", "waves, tau:50", "DiLoCo", DDP)
"""Not tau:1: on full links it asks almost every peer for each pull, and a run of 256 peers takes more than an hour."""
LENGTHS, ONE_LENGTH = (12, 25, 50, 100, 200, 400), (100,)
"""Iterations of the runs whose loss is measured; the second with more than :data:`MOST_TRAINED` peers."""
MOST_TRAINED = 64
AVERAGED = {"sync": {"policy": "tau:1", "exchange": "waves", "blocking": True, "finish": "none"}}
"""Training that has the loss of DDP and of a server with bsp, for more than :data:`MOST_TRAINED` peers: the average of
the models after each iteration is the model of averaged gradients. With 4 and 6 peers, the losses differ by 0.0001."""
SECONDS, MEGABYTES = 30.0, 200.0
"""Budgets of a peer."""
Costs = dict[int, tuple[float, float]]
"""By number of peers: seconds and received bytes of an iteration of a peer."""
Losses = dict[tuple[int, str, str], dict[int, float]]
"""By number of peers, exchange and rate: the loss by iterations."""
LOSS_RATE = "1gbit"
"""The rate of the table of losses."""
NOISE = 0.01
"""Losses as close as this are not told apart. With 4 peers, 400 iterations and three seeds, tau:10 less waves varied by
0.007 from seed to seed, and DiLoCo less tau:10 by 0.027."""
SEEDED = 16
"""The most peers with several seeds."""


def scale(given: Given) -> Iterator[Table]:
    """Yield the tables."""
    sizes = given.of((4,), (4, 16, 64), (4, 16, 64, 256, 1000))
    rates, iterations = given.of((LOSS_RATE,), RATES, RATES), given.of(10, 100, 100)
    found = {rate: costs_of(rate, sizes, given.full and rate == CHURNED, iterations) for rate in rates}
    yield costs_table(sizes, found)
    if given.smoke:
        return
    losses: Losses = {}
    for size in given.of((), (4, 16), sizes):
        for system in TRAINED:
            for rate in RATES if size <= MOST_TRAINED else (LOSS_RATE,):
                seeds = 3 if given.full and size <= SEEDED else 1
                settings = AVERAGED if system == SERVED and size > MOST_TRAINED else SYSTEMS[system]
                alike = RATES[2] if system in WAITING else RATES[1] if system in PROMPT and rate == RATES[2] else rate
                done = losses.get((size, system, alike))
                losses[size, system, rate] = done or losses_of(size, settings, alike, seeds)
    yield losses_table(losses)
    yield budget_table(losses, found)


# --- seconds and bytes ----------------------------------------------------------------------------


def costs_of(rate: str, sizes: Sequence[int], with_churn: bool, iterations: int) -> dict[str, Costs]:
    """Return the costs of each system on links of a rate."""
    found: dict[str, Costs] = {}
    for system in (*SYSTEMS, DDP):
        there = [size for size in sizes if system not in (SERVED, EQUAL) or size <= MOST_WORKERS]
        found[system] = {size: _cost(system, size, rate, iterations) for size in there}
        if with_churn and system in WITH_CHURN:
            found[f"{system}, churn"] = {size: _cost(system, size, rate, _churned(size), CHURN) for size in there}
    return found


def _churned(size: int) -> int:
    """Return the iterations of a run with churn: ten minutes, and fewer with many peers, of which some crash sooner."""
    return 8_000 if size <= 64 else 2_000 if size <= 256 else 600


def costs_table(sizes: Sequence[int], costs: Mapping[str, Mapping[str, Costs]]) -> Table:
    """Return seconds and bytes per iteration by number of peers, and the exponents that they grow with."""
    headings = ("link", "exchange", *(f"{size} peers" for size in sizes), "s beyond computing: N^", "bytes: N^")
    table = Table(f"Seconds per iteration, and bytes that a peer receives in it: {MODEL}", headings)
    for rate, systems in costs.items():
        for system, by_size in systems.items():
            found = {size: by_size[size] for size in sizes if size in by_size}
            cells = [f"{1000 * one[0]:.0f} ms, {one[1] / 1e6:.2f} MB" for one in found.values()]
            cells += [""] * (len(sizes) - len(cells))
            extra = {size: one[0] - STEP for size, one in found.items()}
            grows = f"{_exponent(extra):.2f}" if min(extra.values()) > LEAST_EXTRA * STEP else "–"
            told = [grows, f"{_exponent({size: one[1] for size, one in found.items()}):.2f}"]
            theory = THEORY.get(system, ("", ""))
            told = [f"{one} ({of})" if of else one for one, of in zip(told, theory, strict=True)]
            table.row(rate, system, *cells, *told)
            for size, one in found.items():
                name = f"{system}, {rate}, {size} peers: seconds per iteration"
                table.figure(name, one[0], "s", reference=STEP)
    return table


def _cost(
    system: str, size: int, rate: str, iterations: int, churn: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[float, float]:
    """Return seconds and bytes per iteration of a peer that does not crash, and for a server without the start."""
    if system == DDP:
        seconds, moved = _ring(size, rate, iterations)
        return seconds * (1 + size * CRASHES / 60 * DOWNTIME if churn else 1), moved
    settings = merged(SYSTEMS[system])
    tables = {
        "simulation": {"peers": size, "work": "traffic", "model": MODEL},
        "run": {"iterations": iterations},
        "compute": {"spread": f"log-normal:sigma={SIGMA}"},
        "network": {"preset": rate},
    }
    if "server" not in settings:
        seconds, received = _means(run(tables, settings, {"simulation": {"announcements": False}}, churn or {}))
        return seconds / iterations, received / iterations
    settings["server"]["servers"] = ",".join(map(str, range(size)))
    first, whole = (
        _means(run(tables, settings, {"run": {"iterations": number}})) for number in (1, 1 + SERVED_ITERATIONS)
    )
    return (whole[0] - first[0]) / SERVED_ITERATIONS, (whole[1] - first[1]) / SERVED_ITERATIONS


def _means(one: Run) -> tuple[float, float]:
    """Return the median of the seconds and the mean of the bytes of the peers that trained through without a crash."""
    pairs = zip(one.summary.train_seconds, one.summary.bytes_received, strict=True)
    there = [(seconds, received) for seconds, received in pairs if seconds is not None and received is not None]
    longest = max(seconds for seconds, _ in there)
    through = [pair for pair in there if pair[0] > 0.9 * longest]  # others have the figures since their restart
    return median(seconds for seconds, _ in through), fmean(received for _, received in through)


def _ring(size: int, rate: str, iterations: int) -> tuple[float, float]:
    """Return seconds and bytes per iteration of DDP: compute of the slowest peer, and a ring all-reduce."""
    rng, link = random.Random(0), PRESETS[rate]
    model = 4 * sum(count for _, count in costs.published_sizes(MODEL))
    slowest = [max(rng.lognormvariate(-(SIGMA**2) / 2, SIGMA) for _ in range(size)) * STEP for _ in range(iterations)]
    moved = 2 * (size - 1) / size * model
    bandwidth = link["bandwidth"] * FULL_PACKET[0] / FULL_PACKET[1]
    reduce = moved / bandwidth + 2 * (size - 1) * link["delay"]
    return fmean(seconds / 3 + max(2 * seconds / 3, reduce) for seconds in slowest), moved


def _exponent(values: dict[int, float]) -> float:
    """Return the least-squares slope of log(value) over log(peers); NaN for one number of peers."""
    if len(values) < 2:
        return math.nan
    points = [(math.log(size), math.log(value)) for size, value in values.items()]
    return float(np.polyfit(*zip(*points, strict=True), 1)[0])


# --- loss -----------------------------------------------------------------------------------------


def losses_of(size: int, settings: Mapping[str, Mapping[str, Any]], rate: str, seeds: int) -> dict[int, float]:
    """Return the loss on test data of the average of all models by iterations, the mean over seeds."""
    trained = build_model("lenet", classes=10, channels=1, pixels=28)
    smaller = sum(one.numel() for one in trained.parameters()) / sum(count for _, count in costs.published_sizes(MODEL))
    link = f"{8 * PRESETS[rate]['bandwidth'] * smaller / 1000:.0f}kbit"
    if "server" in settings:
        end: dict[str, dict[str, Any]] = {"server": {"servers": "0"}}
    elif size <= SEEDED:
        end = {"sync": {"finish": "consensus"}}
    else:  # to evaluate the model of each peer would take longer than the training
        end = {"simulation": {"announcements": False, "recorded": 1}}
    tables = {
        "simulation": {"peers": size},
        "compute": {"seconds": STEP, "spread": f"log-normal:sigma={SIGMA}"},
        "network": {"preset": rate, "up": link, "down": link},
    }
    found = {}
    for length in LENGTHS if size <= MOST_TRAINED else ONE_LENGTH:
        lasts = {"iterations": length, "eval_interval": 0}
        runs = [run(tables, {"run": {**lasts, "seed": seed}}, settings, end) for seed in range(seeds)]
        found[length] = fmean(float(one.summary.consensus_loss or math.nan) for one in runs)
    return found


def losses_table(losses: Losses) -> Table:
    """Return the loss at equal iterations."""
    headings = ("peers", "exchange", *(f"{length} iterations" for length in LENGTHS))
    table = Table(f"Loss of LeNet at equal iterations, {LOSS_RATE}", headings)
    for (size, system, rate), found in losses.items():
        if rate != LOSS_RATE:
            continue
        told = f"{system}; {DDP}" if system == SERVED else system
        table.row(size, told, *(f"{found[each]:.3f}" if each in found else "" for each in LENGTHS))
        for length, loss in found.items():
            table.figure(f"{told}, {size} peers, {length} iterations: loss", loss, "")
    return table


def budget_table(losses: Losses, costs: Mapping[str, Mapping[str, Costs]]) -> Table:
    """Return the loss at equal seconds and at equal bytes; the least of each column are marked."""
    headings = ("peers", "exchange", *(f"{SECONDS:g} s at {rate}" for rate in costs), f"{MEGABYTES:g} MB received")
    title = f"Loss of LeNet after as many iterations as {MODEL} has in a budget; *: the least"
    table = Table(title, headings)
    for size in dict.fromkeys(size for size, *_ in losses if size <= MOST_TRAINED):
        kinds = [(f"{SECONDS:g} s at {rate}", rate, 0, SECONDS) for rate in costs]
        kinds += [(f"{MEGABYTES:g} MB", list(costs)[-1], 1, MEGABYTES * 1e6)]  # at the rate that no exchange fills
        columns = []
        for what, rate, index, budget in kinds:
            found = {}
            for system in (*TRAINED, DDP):
                trained = losses[size, SERVED if system == DDP else system, rate]
                found[system] = _loss_at(trained, budget / costs[rate][system][size][index])
            columns.append(found)
            for system, one in found.items():
                table.figure(f"{system}, {size} peers, {what}: loss", one, "")
        for system in (*TRAINED, DDP):
            cells = [f"{of[system]:.3f}{' *' if of[system] < min(of.values()) + NOISE else ''}" for of in columns]
            table.row(size, system, *cells)
    return table


def _loss_at(losses: Mapping[int, float], iterations: float) -> float:
    """Return the loss after a number of iterations, between or at the ends of those measured."""
    return float(np.interp(math.log(iterations), np.log(list(losses)), list(losses.values())))


if __name__ == "__main__":
    bench(__file__, __doc__, scale)
