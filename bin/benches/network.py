"""Time and bytes of the policies on emulated networks: real peers, each in its own namespace, and links shaped by tc.

bin/bench network                       four peers, lenet; 10 Mbit/s, 100 Mbit/s, 1 Gbit/s (about 9 minutes on 2 cores)
bin/bench network --full                three rounds of longer runs (about half an hour)
bin/bench network --scenario overlap    two peers, a model of 240 MB, 1 Gbit/s, a stand-in for a step (about 6 minutes)

It needs root on Linux with ip and tc (Debian's iproute2). A round runs all policies in turn. Ratios are to never in the
same round, and the table shows medians over rounds, so that other load on the machine affects all equally.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _overlap
from _report import figure, report
from emulated import EmulatedNetwork, NetworkUnavailableError
from emulated.runs import train

PEERS = 4
RATES = ("10mbit", "100mbit", "1gbit")
KINDS = {
    "never": ("--policy", "never"),
    "tau:10": ("--policy", "tau:10"),
    "adaptive:threshold=0.025": ("--policy", "adaptive:threshold=0.025"),
    "tau:10, 4 fragments": ("--policy", "tau:10", "--fragments", "4"),
    "tau:10, blocking": ("--policy", "tau:10", "--blocking"),
}
"""Overlapped pulls, and for comparison the paper's Algorithm 2, which waits for each pull."""
LENGTHS = {
    ("policies", False): (2, 500),
    ("policies", True): (3, 3000),
    ("overlap", False): (2, 160),
    ("overlap", True): (3, 400),
}
"""Rounds and iterations of a scenario, short and with --full."""


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        seconds: training time of the slowest peer.
        pulls: completed pulls, mean over peers.
        skipped: decisions to pull during a pull, mean over peers.
        blocked: share of the training time that peers waited for gossipx, mean.
        link_bytes: bytes of Ethernet frames to a peer, mean, from the first connection to the finish.
    """

    seconds: float
    pulls: float
    skipped: float
    blocked: float
    link_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bin/bench network", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--scenario", choices=("policies", "overlap"), default="policies")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--iterations", type=int)
    arguments = parser.parse_args()
    default = LENGTHS[arguments.scenario, arguments.full]
    rounds, iterations = arguments.rounds or default[0], arguments.iterations or default[1]
    measure = policies if arguments.scenario == "policies" else _overlap.measure
    try:
        table = measure(rounds, iterations)
    except NetworkUnavailableError as error:
        sys.exit(f"bin/bench network: {error}")
    if arguments.json:
        print(json.dumps({"figures": table[-1]}, indent=2))
    else:
        report(*table)


def policies(rounds: int, iterations: int) -> tuple[str, list[str], list[list[str]], list[Any]]:
    """Return title, headings, rows and figures."""
    rows, figures, networks = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        for rate in RATES:
            with EmulatedNetwork(PEERS, rate) as net:
                networks.append(net.describe())
                print(networks[-1], file=sys.stderr)
                runs = [_round(net, Path(scratch), iterations, seed) for seed in range(rounds)]
            for kind in KINDS:
                rows.append(_row(rate, kind, runs))
                figures += _figures(rate, kind, runs)
    headings = ["link", "policy", "pulls", "skipped", "s", "of never's", "blocked", "MB per link", "of never's"]
    title = f"lenet, {iterations} iterations, rounds: {rounds}; links shaped by tc"
    return "\n".join([title, *networks]), headings, rows, figures


def _round(net: EmulatedNetwork, scratch: Path, iterations: int, seed: int) -> dict[str, Measured]:
    """Run each kind, one after the other."""
    common = ("--iterations", str(iterations), "--eval-interval", "0", "--seed", str(seed), "--overwrite")
    return {kind: _measure(net, scratch, *common, *options) for kind, options in KINDS.items()}


def _measure(net: EmulatedNetwork, scratch: Path, *options: str) -> Measured:
    before = _received(net)
    one = train(net, scratch, "run", *options)[0]
    trained = [float(seconds or 0.0) for seconds in one.train_seconds]
    blocked = [float(seconds or 0.0) for seconds in one.blocked_seconds]
    return Measured(
        seconds=max(trained),
        pulls=statistics.fmean(float(count or 0.0) for count in one.retrievals),
        skipped=statistics.fmean(float(count or 0.0) for count in one.skipped),
        blocked=statistics.fmean(part / whole for part, whole in zip(blocked, trained, strict=True)),
        link_bytes=(_received(net) - before) / PEERS,
    )


def _received(net: EmulatedNetwork) -> int:
    return sum(host.counters().received for host in net.hosts)


def _median(runs: list[dict[str, Measured]], kind: str, name: str) -> float:
    return float(statistics.median(getattr(one[kind], name) for one in runs))


def _ratio(runs: list[dict[str, Measured]], kind: str, name: str) -> float:
    """Return the median ratio to never in the same round."""
    return float(statistics.median(getattr(one[kind], name) / getattr(one["never"], name) for one in runs))


def _row(rate: str, kind: str, runs: list[dict[str, Measured]]) -> list[str]:
    return [
        rate,
        kind,
        f"{_median(runs, kind, 'pulls'):.1f}",
        f"{_median(runs, kind, 'skipped'):.1f}",
        f"{_median(runs, kind, 'seconds'):.1f}",
        f"{_ratio(runs, kind, 'seconds'):.2f}",
        f"{_median(runs, kind, 'blocked'):.1%}",
        f"{_median(runs, kind, 'link_bytes') / 1e6:.1f}",
        f"{_ratio(runs, kind, 'link_bytes'):.1f}",
    ]


def _figures(rate: str, kind: str, runs: list[dict[str, Measured]]) -> list[Any]:
    seconds = figure(
        f"{rate} {kind}: training", _median(runs, kind, "seconds"), "s", reference=_median(runs, "never", "seconds")
    )
    received = figure(
        f"{rate} {kind}: received a link",
        _median(runs, kind, "link_bytes"),
        "bytes",
        reference=_median(runs, "never", "link_bytes"),
    )
    pulls = figure(f"{rate} {kind}: pulls per peer", _median(runs, kind, "pulls"), "")
    return [seconds, received, pulls]


if __name__ == "__main__":
    main()
