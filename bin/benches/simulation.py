"""The simulator against real runs: retrievals and training time at 4 peers, on links of three rates.

bin/bench simulation            220 iterations of lenet (about 25 minutes on 2 cores)
bin/bench simulation --full     three rounds (about an hour and a quarter)

Real peers run in namespaces whose links are shaped by tc; it needs root on Linux with ip and tc (Debian's iproute2).
The simulator gets the rate and the latency of the links and, from the real run without exchanges, the time of an
iteration, in which a process mostly sleeps (bin/benches/_paced.py), as four peers share the cores of this machine. The
table shows medians over rounds; each round has a seed of its own, which the simulated run shares.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _report import figure, report
from emulated import EmulatedNetwork, NetworkUnavailableError
from emulated.runs import train

from gossipx.metrics import summary
from gossipx.metrics.summary import Summary

PEERS = 4
SCRIPT = str(Path(__file__).parent / "_paced.py")
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


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run.

    Attributes:
        retrievals: completed, of each peer.
        seconds: training time of the slowest peer.
    """

    retrievals: list[float]
    seconds: float

    @classmethod
    def of(cls, one: Summary) -> Outcome:
        return cls([float(n or 0) for n in one.retrievals], max(float(s or 0) for s in one.train_seconds))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bin/bench simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--kinds", default=";".join(KINDS))
    arguments = parser.parse_args()
    rounds, iterations = arguments.rounds or (3 if arguments.full else 1), arguments.iterations
    iterations = iterations or 220
    kinds = [NEVER, *(kind for kind in arguments.kinds.split(";") if kind != NEVER)]
    rows, figures = [], []
    try:
        for rate in arguments.rates.split(","):
            measured = _measure(rate, kinds, rounds, iterations)
            for kind in kinds:
                rows.append(_row(rate, kind, [one[kind] for one in measured]))
                figures += _figures(rate, kind, [one[kind] for one in measured])
    except NetworkUnavailableError as error:
        sys.exit(f"bin/bench simulation: {error}")
    if arguments.json:
        print(json.dumps({"figures": figures}, indent=2))
        return
    headings = ["link", "run", "retrievals", "simulated", "s", "simulated", "of the real run's", "in goal"]
    report(f"lenet, {PEERS} peers, {iterations} iterations, rounds: {rounds}", headings, rows, figures)


Pair = tuple[Outcome, Outcome]
"""The real run and the simulated one."""


def _measure(rate: str, kinds: list[str], rounds: int, iterations: int) -> list[dict[str, Pair]]:
    found: list[dict[str, Pair]] = []
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(PEERS, rate) as net:
        print(net.describe(), file=sys.stderr)
        for seed in range(rounds):
            pairs: dict[str, Pair] = {}
            seconds = 0.0
            for kind in kinds:
                settings = _settings(kind, seed, iterations)
                way = "server" if "server" in settings else "peers"
                script = [SCRIPT, *map(str, (seed, settings["run"]["iterations"], PACE, PEERS)), way]
                options = [*_options(settings), "--overwrite", *script]
                real = Outcome.of(train(net, Path(scratch), "run", *options)[0])
                seconds = seconds or real.seconds / iterations
                pairs[kind] = real, _simulate(Path(scratch), rate, seconds, settings)
                print(rate, kind, *pairs[kind], file=sys.stderr)
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


def _simulate(scratch: Path, rate: str, seconds: float, settings: dict[str, dict[str, Any]]) -> Outcome:
    tables = {
        "simulation": {"peers": PEERS},
        "compute": {"seconds": seconds, "evaluation": EVALUATION},
        "network": {"preset": rate},
        **settings,
    }
    lines = []
    for table, content in tables.items():
        lines += [f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in content.items())]
    scenario = scratch / "scenario.toml"
    scenario.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "gossipx", "simulate", str(scenario), "--logdir", str(scratch), "--overwrite"]
    subprocess.run([*command, "--name", "simulated"], check=True, stdout=subprocess.DEVNULL, timeout=600)
    return Outcome.of(summary.read(scratch / "simulated"))


def _row(rate: str, kind: str, pairs: list[Pair]) -> list[str]:
    real, simulated = (statistics.median(statistics.fmean(pair[n].retrievals) for pair in pairs) for n in (0, 1))
    seconds = [statistics.median(pair[n].seconds for pair in pairs) for n in (0, 1)]
    near, in_time = _met(kind, pairs)
    met = {True: "yes", False: "NO"}
    return [
        *(rate, kind, f"{real:.1f}", f"{simulated:.1f}", f"{seconds[0]:.1f}", f"{seconds[1]:.1f}"),
        *(f"{_ratio(pairs):.2f}", f"{met[near]}, {met[in_time]}"),
    ]


def _ratio(pairs: list[Pair]) -> float:
    return float(statistics.median(simulated.seconds / real.seconds for real, simulated in pairs))


def _difference(pairs: list[Pair]) -> float:
    """Return the largest relative difference of the mean retrievals."""
    means = [[statistics.fmean(one.retrievals) for one in pair] for pair in pairs]
    return max(abs(simulated - real) / max(real, 1.0) for real, simulated in means)


def _met(kind: str, pairs: list[Pair]) -> tuple[bool, bool]:
    """Return whether the retrievals and the training time are within their goals."""
    exact = all(real.retrievals == simulated.retrievals for real, simulated in pairs)
    return exact if kind in EXACT else _difference(pairs) <= NEAR, abs(_ratio(pairs) - 1) <= SECONDS


def _figures(rate: str, kind: str, pairs: list[Pair]) -> list[Any]:
    near, in_time = _met(kind, pairs)
    goal = 0.0 if kind in EXACT else NEAR
    name = f"{kind}, {rate}"
    return [
        figure(f"{name}: difference of retrievals", _difference(pairs), "", goal=goal, met=near),
        figure(f"{name}: difference of time", abs(_ratio(pairs) - 1), "", goal=SECONDS, met=in_time),
    ]


if __name__ == "__main__":
    main()
