"""Time and bytes of the policies on emulated networks: real peers, each in its own namespace, and links shaped by tc.

bin/bench network                       four peers, lenet; 10 Mbit/s, 100 Mbit/s, 1 Gbit/s (about 9 minutes on 2 cores)
bin/bench network --full                three rounds of longer runs (about half an hour)
bin/bench network --scenario overlap    two peers, a model of 240 MB, 1 Gbit/s, a stand-in for a step (about 6 minutes)

It needs root on Linux with ip and tc (Debian's iproute2). A round runs all policies in turn. Ratios are to never in the
same round, and the table shows medians over rounds, so that other load on the machine affects all equally.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from _bench.cli import Given, bench
from _bench.tables import Table, known, median_ratio, medians
from emulated import EmulatedNetwork
from emulated.runs import train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gossipx.metrics.summary import Summary

NEVER = "never"
PEERS = 4
RATES = ("10mbit", "100mbit", "1gbit")
KINDS = {
    NEVER: ("--policy", NEVER),
    "tau:10": ("--policy", "tau:10"),
    "adaptive:threshold=0.025": ("--policy", "adaptive:threshold=0.025"),
    "tau:10, 4 fragments": ("--policy", "tau:10", "--fragments", "4"),
    "tau:10, blocking": ("--policy", "tau:10", "--blocking"),
}
"""Overlapped pulls, and for comparison the paper's Algorithm 2, which waits for each pull."""
LENGTHS = {"policies": ((1, 10), (2, 500), (3, 3000)), "overlap": ((1, 10), (2, 160), (3, 400))}
"""Rounds and iterations of a scenario, by size of the benchmark."""
Runs = dict[str, list[float]]
"""The values of a figure by its name, one per round."""


def network(given: Given) -> Table:
    """Return the table of the chosen scenario."""
    rounds, iterations = given.of(*LENGTHS[given.scenario])
    rounds, iterations = given.rounds or rounds, given.iterations or iterations
    return (policies if given.scenario == "policies" else overlap)(given.smoke, rounds, iterations)


def policies(smoke: bool, rounds: int, iterations: int) -> Table:
    """Return time and bytes of the policies by link."""
    headings = ("link", "policy", "pulls", "skipped", "s", "of never's", "blocked", "MB per link", "of never's")
    table = Table(f"lenet, {iterations} iterations, rounds: {rounds}; links shaped by tc", headings)
    peers, rates, kinds = (2, RATES[-1:], [NEVER]) if smoke else (PEERS, RATES, list(KINDS))
    for rate in rates:
        with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(peers, rate) as net:
            _describe(table, net)
            found = _rounds(kinds, rounds, functools.partial(_policy, net, Path(scratch), iterations))
        for kind, runs in found.items():
            one = medians(runs)
            times, links = (median_ratio(runs[name], found[NEVER][name]) for name in ("seconds", "bytes"))
            pulls = (f"{one['pulls']:.1f}", f"{one['skipped']:.1f}", f"{one['seconds']:.1f}", f"{times:.2f}")
            table.row(rate, kind, *pulls, f"{one['blocked']:.1%}", f"{one['bytes'] / 1e6:.1f}", f"{links:.1f}")
            never = medians(found[NEVER])
            table.figure(f"{rate} {kind}: training", one["seconds"], "s", reference=never["seconds"])
            table.figure(f"{rate} {kind}: received a link", one["bytes"], "bytes", reference=never["bytes"])
            table.figure(f"{rate} {kind}: pulls per peer", one["pulls"], "")
    return table


def _rounds(kinds: list[str], rounds: int, run: Callable[[str, int], Mapping[str, float]]) -> dict[str, Runs]:
    """Return what runs return, by kind; each round runs all kinds in turn."""
    made = [{kind: run(kind, number) for kind in kinds} for number in range(rounds)]
    return {kind: {name: [one[kind][name] for one in made] for name in made[0][kind]} for kind in kinds}


def _policy(net: EmulatedNetwork, scratch: Path, iterations: int, kind: str, seed: int) -> dict[str, float]:
    """Run peers, and return the seconds of the slowest, and means over peers.

    The bytes are those of Ethernet frames to a peer, from the first connection to the finish.
    """
    before = _received(net)
    common = ("--iterations", str(iterations), "--eval-interval", "0", "--seed", str(seed), "--overwrite")
    one = train(net, scratch, "run", *common, *KINDS[kind])[0]
    trained, blocked = known(one.train_seconds), known(one.blocked_seconds)
    return {
        "seconds": max(trained),
        "pulls": _mean(one, "retrievals"),
        "skipped": _mean(one, "skipped"),
        "blocked": statistics.fmean(part / whole for part, whole in zip(blocked, trained, strict=True)),
        "bytes": (_received(net) - before) / len(net.hosts),
    }


def _describe(table: Table, net: EmulatedNetwork) -> None:
    table.title = f"{table.title}\n{net.describe()}"
    print(net.describe(), file=sys.stderr)


def _mean(one: Summary, name: str) -> float:
    """Return the mean over peers; a peer without a value counts as 0."""
    return statistics.fmean(value or 0.0 for value in getattr(one, name))


def _received(net: EmulatedNetwork) -> int:
    return sum(host.counters().received for host in net.hosts)


# --- overlapped pulls of a large model ----------------------------------------------------------------------

PARAMETERS = 60_000_000
"""Number of float32 parameters: 240 MB, the paper's AlexNet."""
STEP_SECONDS = 0.05
RATE = "1gbit"
POLICIES = (NEVER, "tau:10", "tau:50")
MOST_TIME = 0.02
"""Limit for the training time that pulls add, as a fraction."""
LEAST_USE = 0.95
"""Goal for the use of the link during a pull, as a fraction of its rate, at tau:10."""


def overlap(smoke: bool, rounds: int, iterations: int) -> Table:
    """Return cost and use of the link of overlapped pulls of a large model, by two peers."""
    headings = ("policy", "pulls", "skipped", "ms per step", "measuring", "time added", "link, payload", "link, frames")
    sizes = f"{PARAMETERS * 4 / 1e6:.0f} MB, steps of {STEP_SECONDS * 1e3:.0f} ms asleep, {iterations} steps"
    table = Table(f"{sizes}, rounds: {rounds}; links shaped by tc", headings)
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(2, RATE) as net:
        _describe(table, net)
        found = _rounds(list(POLICIES), rounds, functools.partial(_overlapped, net, Path(scratch), iterations))
    for policy, runs in found.items():
        one, added = medians(runs), median_ratio(runs["seconds"], found[NEVER]["seconds"]) - 1
        pulled = policy != NEVER
        shares = (f"{added:+.1%}", f"{one['payload']:.1%}", f"{one['use']:.1%}") if pulled else ("–", "–", "–")
        step = 1e3 * one["seconds"] / iterations
        counts = (f"{one['pulls']:.1f}", f"{one['skipped']:.1f}", f"{step:.0f}", f"{one['overhead']:.0%}")
        table.row(policy, *counts, *shares)
        table.figure(f"overlap {policy}: measuring", one["overhead"], "of a step")
        if pulled:
            least = LEAST_USE if policy == "tau:10" else None
            table.figure(f"overlap {policy}: time added", added, "of never's", most=MOST_TIME)
            table.figure(f"overlap {policy}: link while busy", one["use"], "of its rate", least=least)
            table.figure(f"overlap {policy}: link while busy, payload", one["payload"], "of its rate")
    return table


def _overlapped(net: EmulatedNetwork, scratch: Path, iterations: int, policy: str, number: int) -> dict[str, float]:
    """Run both peers, and return the seconds of the slower one, means of both, and medians over pulls.

    ``payload`` is the model's bytes per second of a pull, as a share of the link's rate, and ``use`` the same for
    Ethernet frames, to which the rate applies.
    """
    script = (Path(__file__).with_name("_scripts.py"), "large", str(PARAMETERS), str(iterations), str(STEP_SECONDS))
    options = ("--policy", policy, "--delta", "sampled", "--overwrite", "--no-save-model", "--finish", "none")
    before = _received(net)
    one = train(net, scratch, "run", *options, *script)[0]
    # A joining peer also pulls the model; the frames' overhead is the same for all transfers.
    frames = (_received(net) - before) / (sum(known(one.bytes_received)) + 4 * PARAMETERS)
    pulls = [4 * PARAMETERS * 8 / spent / net.bucket.rate for spent in _pull_seconds(scratch, len(net.hosts))]
    payload = statistics.median(pulls) if pulls else 0.0
    return {
        "seconds": max(known(one.train_seconds)),
        "overhead": sum(known(one.overhead_seconds)) / sum(known(one.train_seconds)),
        "pulls": _mean(one, "retrievals"),
        "skipped": _mean(one, "skipped"),
        "payload": payload,
        "use": payload * frames,
    }


def _pull_seconds(scratch: Path, peers: int) -> list[float]:
    """Return the seconds of each pull, from the request to the last byte."""
    found: list[float] = []
    for rank in range(peers):
        folder = scratch / f"host-{rank}" / "run" / f"peer-{rank:02d}"
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        if "comm/pull_seconds" in events.Tags()["scalars"]:
            found += [event.value for event in events.Scalars("comm/pull_seconds")]
    return found


if __name__ == "__main__":
    options = {
        "--scenario": {"choices": tuple(LENGTHS), "default": "policies"},
        "--rounds": {"type": int},
        "--iterations": {"type": int},
    }
    bench(__file__, __doc__, network, options)
