"""Cost of overlapped pulls of a large model over a slow link, and their use of the link."""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _report import figure
from emulated import EmulatedNetwork
from emulated.runs import train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gossipx.metrics.summary import Summary

PARAMETERS = 60_000_000
"""Number of float32 parameters: 240 MB, the paper's AlexNet."""
STEP_SECONDS = 0.05
RATE = "1gbit"
POLICIES = ("never", "tau:10", "tau:50")
MOST_TIME = 0.02
"""Limit for the training time that pulls add, as a fraction."""
LEAST_USE = 0.95
"""Goal for the use of the link during a pull, as a fraction of its rate, at tau:10."""


@dataclass(frozen=True)
class Overlapped:
    """One run of both peers.

    Attributes:
        seconds: training time of the slower peer.
        step_seconds: time of one step of the slower peer.
        overhead: share of the training time in which gossipx measures the model in the training thread.
        pulls: completed pulls, mean of both peers.
        skipped: decisions to pull during a pull, mean of both peers.
        payload_use: model bytes per second of a pull, as a share of the link's rate; median over pulls.
        use: the same for Ethernet frames, to which the link's rate applies.
    """

    seconds: float
    step_seconds: float
    overhead: float
    pulls: float
    skipped: float
    payload_use: float
    use: float


def measure(rounds: int, iterations: int) -> tuple[str, list[str], list[list[str]], list[Any]]:
    """Return title, headings, rows and figures for two peers on one machine.

    Args:
        rounds: each runs all policies in turn. Ratios are to never in the same round; medians are over rounds.
        iterations: length of each run.
    """
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(2, RATE) as net:
        network = net.describe()
        print(network, file=sys.stderr)
        runs = [{policy: _run(net, Path(scratch), policy, iterations) for policy in POLICIES} for _ in range(rounds)]
    rows, figures = [], []
    for policy in POLICIES:
        medians = {
            name: statistics.median(getattr(one[policy], name) for one in runs) for name in Overlapped.__annotations__
        }
        added = statistics.median(one[policy].seconds / one["never"].seconds for one in runs) - 1
        pulled = policy != "never"
        rows.append(
            [
                policy,
                f"{medians['pulls']:.1f}",
                f"{medians['skipped']:.1f}",
                f"{medians['step_seconds'] * 1e3:.0f}",
                f"{medians['overhead']:.0%}",
                f"{added:+.1%}" if pulled else "–",
                f"{medians['payload_use']:.1%}" if pulled else "–",
                f"{medians['use']:.1%}" if pulled else "–",
            ]
        )
        figures.append(figure(f"overlap {policy}: measuring", medians["overhead"], "of a step"))
        if pulled:
            figures += _figures(policy, added, medians)
    headings = ["policy", "pulls", "skipped", "ms per step", "measuring", "time added", "link, payload", "link, frames"]
    megabytes = PARAMETERS * 4 / 1e6
    title = f"{megabytes:.0f} MB, steps of {STEP_SECONDS * 1e3:.0f} ms asleep, {iterations} steps, rounds: {rounds}"
    return f"{title}; links shaped by tc\n{network}", headings, rows, figures


def _figures(policy: str, added: float, medians: dict[str, float]) -> list[Any]:
    goal = LEAST_USE if policy == "tau:10" else None
    met = medians["use"] >= LEAST_USE if policy == "tau:10" else None
    return [
        figure(f"overlap {policy}: time added", added, "of never's", goal=MOST_TIME, met=added <= MOST_TIME),
        figure(f"overlap {policy}: link while busy", medians["use"], "of its rate", goal=goal, met=met),
        figure(f"overlap {policy}: link while busy, payload", medians["payload_use"], "of its rate"),
    ]


def _run(net: EmulatedNetwork, scratch: Path, policy: str, iterations: int) -> Overlapped:
    script = Path(__file__).with_name("_large_model.py")
    options = ("--policy", policy, "--delta", "sampled", "--overwrite", "--no-save-model", "--finish", "none")
    before = _received(net)
    one = train(net, scratch, "run", *options, script, str(PARAMETERS), str(iterations), str(STEP_SECONDS))[0]
    # A joining peer also pulls the model; the frames' overhead is the same for all transfers.
    frames = (_received(net) - before) / (_numbers(one, "bytes_received") + 4 * PARAMETERS)
    seconds = [value or 0.0 for value in one.train_seconds]
    overhead = [value or 0.0 for value in one.overhead_seconds]
    pulls = [4 * PARAMETERS * 8 / spent / net.bucket.rate for spent in _pull_seconds(scratch, len(net.hosts))]
    payload_use = statistics.median(pulls) if pulls else 0.0
    return Overlapped(
        seconds=max(seconds),
        step_seconds=max(seconds) / iterations,
        overhead=sum(overhead) / sum(seconds),
        pulls=_numbers(one, "retrievals") / len(net.hosts),
        skipped=_numbers(one, "skipped") / len(net.hosts),
        payload_use=payload_use,
        use=payload_use * frames,
    )


def _numbers(one: Summary, name: str) -> float:
    return sum(value or 0.0 for value in getattr(one, name))


def _received(net: EmulatedNetwork) -> int:
    return sum(host.counters().received for host in net.hosts)


def _pull_seconds(scratch: Path, peers: int) -> list[float]:
    """Return the seconds of each pull, from the request to the last byte."""
    found: list[float] = []
    for rank in range(peers):
        events = EventAccumulator(
            str(scratch / f"host-{rank}" / "run" / f"peer-{rank:02d}"), size_guidance={"scalars": 0}
        )
        events.Reload()
        if "comm/pull_seconds" in events.Tags()["scalars"]:
            found += [event.value for event in events.Scalars("comm/pull_seconds")]
    return found
