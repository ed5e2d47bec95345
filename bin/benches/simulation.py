"""The simulator against real runs: retrievals and training time at 4 peers, on links of three rates.

bin/bench simulation            220 iterations of lenet (about 25 minutes on 2 cores)
bin/bench simulation --full     three rounds (about an hour and a quarter)

Real peers run in namespaces whose links are shaped by tc; it needs root on Linux with ip and tc (Debian's iproute2).
The simulator gets the rate and the latency of the links and, from the real run without exchanges, the time of an
iteration, in which a process mostly sleeps (bin/benches/_scripts.py), as four peers share the cores here. The
table shows medians over rounds; each round has a seed of its own, which the simulated run shares.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _bench.cli import Given, bench
from _bench.simulated import run
from _bench.tables import Table, known
from emulated import EmulatedNetwork
from emulated.runs import train

from gossipx.metrics.summary import Summary

PEERS = 4
SCRIPT = (str(Path(__file__).with_name("_scripts.py")), "paced")
RATES = ("10mbit", "100mbit", "1gbit")
NEVER = "never"
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    NEVER: {"sync": {"policy": "never"}},
    "tau:50": {"sync": {"policy": "tau:50"}},
    "random:p=0.02": {"sync": {"policy": "random:p=0.02"}},
    "adaptive": {"sync": {"policy": "adaptive:threshold=0.75,relative=true,max_silence=100"}},
    "travel": {"sync": {"policy": "travel:distance=1.5"}},
    "tau:50, blocking": {"sync": {"policy": "tau:50", "blocking": True}},
    "tau:10, blocking": {"sync": {"policy": "tau:10", "blocking": True}},
    "waves, tau:50": {"sync": {"policy": "tau:50", "exchange": "waves"}},
    "waves, tau:50, blocking": {"sync": {"policy": "tau:50", "exchange": "waves", "blocking": True}},
    "hub, tau:20": {"sync": {"policy": "tau:20"}, "hub": {"hub": "0"}},
    "server, bsp": {"server": {"servers": "0", "sync": "bsp"}},
    "server, ssp:3": {"server": {"servers": "0", "sync": "ssp:staleness=3"}},
}
EXACT = ("tau:50", "random:p=0.02", "tau:50, blocking", "tau:10, blocking")
"""Kinds whose retrievals do not depend on the models, so that a simulated run has the same ones."""
PACE = 0.1
"""Seconds of an iteration."""
SHORT = 8
"""With a server, which sends the model twice in each iteration, one iteration in eight is done."""
EVALUATION = 1.0
"""Seconds of the evaluation at the end of a real run, about: a pull that begins with the last iteration ends then."""
NEAR, SECONDS = 0.10, 0.15
"""Goals: the largest relative differences of retrievals and of training time."""


Pair = tuple[Summary, Summary]
"""The real run and the simulated one."""


def simulation(given: Given) -> Table:
    """Return the table."""
    rounds, iterations = given.rounds or given.of(1, 1, 3), given.iterations or given.of(10, 220, 220)
    peers, rates, named = given.of((2, "1gbit", NEVER), *[(PEERS, given.rates, given.kinds)] * 2)
    kinds = [NEVER, *(kind for kind in named.split(";") if kind != NEVER)]
    headings = ("link", "run", "retrievals", "simulated", "s", "simulated", "of the real run's", "in goal")
    headings = (*headings, "skipped", "blocked", "MB received")
    table = Table(f"lenet, {peers} peers, {iterations} iterations, rounds: {rounds}", headings)
    for rate in rates.split(","):
        measured = _measure(rate, kinds, rounds, iterations, peers)
        for kind in kinds:
            _tell(table, rate, kind, [one[kind] for one in measured])
    return table


def _measure(rate: str, kinds: list[str], rounds: int, iterations: int, peers: int) -> list[dict[str, Pair]]:
    found: list[dict[str, Pair]] = []
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(peers, rate) as net:
        print(net.describe(), file=sys.stderr)
        for seed in range(rounds):
            pairs: dict[str, Pair] = {}
            seconds = 0.0
            for kind in kinds:
                settings = _settings(kind, seed, iterations)
                served = ["served"] if "server" in settings else []
                script = [*SCRIPT, *map(str, (seed, settings["run"]["iterations"], PACE, peers)), *served]
                options = [*_options(settings), "--overwrite", *script]
                real = train(net, Path(scratch), "run", *options)[0]
                seconds = seconds or _seconds(real) / iterations
                tables = {
                    "simulation": {"peers": peers},
                    "compute": {"seconds": seconds, "evaluation": EVALUATION},
                    "network": {"preset": rate},
                }
                pairs[kind] = real, run(tables, settings).summary
                print(rate, kind, *((one.retrievals, _seconds(one)) for one in pairs[kind]), file=sys.stderr)
            found.append(pairs)
    return found


def _settings(kind: str, seed: int, iterations: int) -> dict[str, dict[str, Any]]:
    iterations //= SHORT if "server" in KINDS[kind] else 1
    run = {"seed": seed, "iterations": iterations, "recorder": "none"}
    return {"run": run, **KINDS[kind]}


def _options(settings: dict[str, dict[str, Any]]) -> list[str]:
    options = []
    for table in settings.values():
        for name, value in table.items():
            if name == "iterations":  # an argument of the script
                continue
            option = f"--{name.replace('_', '-')}"
            options += [option] if value is True else [option, str(value)]
    return options


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean over peers; a peer without a value counts as 0."""
    return statistics.fmean(value or 0.0 for value in values)


def _seconds(one: Summary) -> float:
    """Return the training time of the slowest peer."""
    return max(known(one.train_seconds))


def _tell(table: Table, rate: str, kind: str, pairs: list[Pair]) -> None:
    """Add a row and its figures, from pairs of several rounds; the last columns are those of real runs."""
    means = [[_mean(one.retrievals) for one in pair] for pair in pairs]
    retrievals = [statistics.median(pair[n] for pair in means) for n in (0, 1)]
    times = [statistics.median(_seconds(pair[n]) for pair in pairs) for n in (0, 1)]
    difference = max(abs(simulated - real) / max(real, 1.0) for real, simulated in means)
    exact = all(known(real.retrievals) == known(simulated.retrievals) for real, simulated in pairs)
    ratio = statistics.median(_seconds(simulated) / _seconds(real) for real, simulated in pairs)
    near, in_time = exact if kind in EXACT else difference <= NEAR, abs(ratio - 1) <= SECONDS
    met = {True: "yes", False: "NO"}
    numbers = (f"{number:.1f}" for number in (*retrievals, *times))
    real = [pair[0] for pair in pairs]
    skipped = statistics.median(_mean(one.skipped) for one in real)
    blocked = statistics.median(_mean(one.blocked_seconds) / _mean(one.train_seconds) for one in real)
    received = statistics.median(_mean(one.bytes_received) for one in real) / 1e6
    costs = (f"{skipped:.1f}", f"{blocked:.1%}", f"{received:.1f}")
    table.row(rate, kind, *numbers, f"{ratio:.2f}", f"{met[near]}, {met[in_time]}", *costs)
    most, name = 0.0 if kind in EXACT else NEAR, f"{kind}, {rate}"
    table.figure(f"{name}: difference of retrievals", difference, "", most=most, met=near)
    table.figure(f"{name}: difference of time", abs(ratio - 1), "", most=SECONDS)


if __name__ == "__main__":
    options = {
        "--rounds": {"type": int},
        "--iterations": {"type": int},
        "--rates": {"default": ",".join(RATES)},
        "--kinds": {"default": ";".join(KINDS)},
    }
    bench(__file__, __doc__, simulation, options)
