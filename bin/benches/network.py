"""Cost and use of the link of overlapped pulls of a large model, over an emulated network.

bin/bench network           two peers, a model of 240 MB, 1 Gbit/s, a stand-in for a step (about 6 minutes)
bin/bench network --full    three rounds of longer runs (about 20 minutes)

It needs root on Linux with ip and tc (Debian's iproute2). A round runs all policies in turn. Ratios are to never in the
same round, and the table shows medians over rounds, so that other load on the machine affects all equally. bin/bench
simulation has the policies for a small model.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from _bench.cli import Given, bench
from _bench.simulated import curves_of, mean
from _bench.tables import Table, known, median_ratio, medians
from emulated import EmulatedNetwork
from emulated.runs import train

PARAMETERS = 60_000_000
"""Number of float32 parameters: 240 MB, the paper's AlexNet."""
STEP_SECONDS = 0.05
RATE = "1gbit"
NEVER = "never"
POLICIES = (NEVER, "tau:10", "tau:50")
MOST_TIME = 0.02
"""Limit for the training time that pulls add, as a fraction."""
LEAST_USE = 0.95
"""Goal for the use of the link during a pull, as a fraction of its rate, at tau:10."""
HEADINGS = ("policy", "pulls", "skipped", "ms per step", "measuring", "time added", "link, payload", "link, frames")


def network(given: Given) -> Table:
    """Return the table."""
    rounds, iterations = given.of((1, 10), (2, 160), (3, 400))
    rounds, iterations = given.rounds or rounds, given.iterations or iterations
    sizes = f"{PARAMETERS * 4 / 1e6:.0f} MB, steps of {STEP_SECONDS * 1e3:.0f} ms asleep, {iterations} steps"
    table = Table(f"{sizes}, rounds: {rounds}; links shaped by tc", HEADINGS)
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(2, RATE) as net:
        table.title = f"{table.title}\n{net.describe()}"
        print(net.describe(), file=sys.stderr)
        made = [{policy: _run(net, Path(scratch), iterations, policy) for policy in POLICIES} for _ in range(rounds)]
    for policy in POLICIES:
        one = medians({name: [run[policy][name] for run in made] for name in made[0][policy]})
        added = median_ratio(*([run[which]["seconds"] for run in made] for which in (policy, NEVER))) - 1
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


def _run(net: EmulatedNetwork, scratch: Path, iterations: int, policy: str) -> dict[str, float]:
    """Run both peers, and return the seconds of the slower one, means of both, and medians over pulls.

    ``payload`` is the model's bytes per second of a pull, as a share of the link's rate, and ``use`` the same for
    Ethernet frames, to which the rate applies.
    """
    script = (Path(__file__).with_name("_scripts.py"), "large", str(PARAMETERS), str(iterations), str(STEP_SECONDS))
    options = ("--policy", policy, "--delta", "sampled", "--overwrite", "--no-save-model", "--finish", "none")
    before = _received(net)
    one = train(net, scratch, "run", *options, "--recorder", "csv", *script)[0]
    # A joining peer also pulls the model; the frames' overhead is the same for all transfers.
    frames = (_received(net) - before) / (sum(known(one.bytes_received)) + 4 * PARAMETERS)
    folders = [scratch / f"host-{rank}" / "run" / f"peer-{rank:02d}" for rank in range(len(net.hosts))]
    took = [spent for folder in folders for spent in curves_of(folder).get("comm/pull_seconds", {}).values()]
    payload = statistics.median(4 * PARAMETERS * 8 / spent / net.bucket.rate for spent in took) if took else 0.0
    return {
        "seconds": max(known(one.train_seconds)),
        "overhead": sum(known(one.overhead_seconds)) / sum(known(one.train_seconds)),
        "pulls": mean(one.retrievals),
        "skipped": mean(one.skipped),
        "payload": payload,
        "use": payload * frames,
    }


def _received(net: EmulatedNetwork) -> int:
    return sum(host.received() for host in net.hosts)


if __name__ == "__main__":
    bench(__file__, __doc__, network, {"--rounds": {"type": int}, "--iterations": {"type": int}})
