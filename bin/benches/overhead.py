"""What a peer takes of a training step: peer.step() beside forward, backward and the optimizer's step, on one thread.

bin/bench overhead            LeNet, ConvNet and ResNet-20 at batches of 64, two peers on loopback (about 2 minutes)
bin/bench overhead --full     three times as many steps, and every policy on every model (about 8 minutes)

The other peer is joined and idle. Every second step is one of the same model without a peer. On a machine that has more
to do, steps are interrupted far more often than what is short, so that shares of medians come out too small: shares are
told of the time that the thread had a core, too. A policy that says no costs one pass over the model and its snapshot,
and some Python; drift a second pass. Every 10th step records figures, every 50th looks at where the parameters lie:
medians leave that out, means have it. Beside these are policies that pull at times; peer.step() mixes a model then.

What was expected of ResNet-20, before it was measured: 0.27 million parameters are 1.1 MB. The pass reads them and
their snapshot, and writes that: 3.2 MB, which are not in the caches after a step, at some 8 GB/s: 0.4 ms. Python adds
0.1 ms, the figures of every 10th step 0.03 ms. A step of 64 images is 16 GFLOP, some 300 ms. So 0.2 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _idle_peer import IdlePeer
from _report import figure, report
from _runs import free_port
from _trained import Span, Trained, timed

BATCH = 64
GOAL = 0.01
"""Of a step of ResNet-20: what peer.step() stays under while the policy says no."""
GOAL_MODEL = "resnet20"
NO = "adaptive:threshold=1e30"
PULLING = ("adaptive:threshold=0.02", "travel:distance=2")
POLICIES = (NO, "drift:distance=1e30", *PULLING)
FULL = (NO, "travel:distance=1e30", "drift:distance=1e30", *PULLING)
RATE = 0.01
"""Learning rate: the weights move, so that the policies that pull do so at times."""
WARM = 3
PATIENCE = 120.0
"""Seconds that the other peer may take to join: on a machine with more to do, longer than a run would wait."""
STEPS = {"lenet": 200, "convnet": 50, "resnet20": 50}
"""With a peer, of each policy: whole numbers of what comes every 50th step."""
HEADINGS = ("model", "policy", "pulls", "a step, ms", "peer.step(), ms", "mean", "share", "of means", "... on a core")


@dataclass
class Measured:
    """Steps of one model under one policy.

    Attributes:
        plain: whole steps without a peer.
        joined: whole steps with one, each right after the plain one of the same place.
        inside: what of each of these was ``peer.step()``.
        pulls: models that came meanwhile.
    """

    plain: list[Span] = field(default_factory=list)
    joined: list[Span] = field(default_factory=list)
    inside: list[Span] = field(default_factory=list)
    pulls: int = 0


def measure(model: str, policy: str, steps: int) -> Measured:
    """Time so many steps with a peer, and as many without one."""
    measured = Measured()
    alone, trained = Trained(model, BATCH, RATE), Trained(model, BATCH, RATE)
    with tempfile.TemporaryDirectory() as scratch:
        hosts = Path(scratch) / "hosts.txt"
        hosts.write_text(f"127.0.0.1:{free_port(2)} slots=2\n")
        settings = {"policy": policy, "logdir": scratch, "name": "overhead", "peer_timeout": PATIENCE}
        with IdlePeer(model, hosts, settings):
            peer = trained.join(hosts, rank=0, **settings)
            for number in range(WARM + steps):
                plain, joined = timed(alone.step), timed(trained.step)
                if number >= WARM:
                    measured.plain.append(plain)
                    measured.joined.append(joined)
            measured.inside = trained.in_peer[WARM:]
            measured.pulls = peer.state_dict()["sync"]["counts"][0]
            peer.close()
    return measured


def interval(values: list[float]) -> tuple[float, float]:
    """The median's 95 % interval, by order statistics: no assumption of how they are distributed."""
    ordered = sorted(values)
    half = round(0.98 * len(ordered) ** 0.5)
    middle = len(ordered) // 2
    return ordered[max(0, middle - half)], ordered[min(len(ordered) - 1, middle + half)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bin/bench overhead", description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[tuple[str, ...]] = []
    figures: list[Any] = []
    told: list[str] = []
    for model, steps in STEPS.items():
        for policy in FULL if arguments.full else POLICIES if model == GOAL_MODEL else (NO,):
            measured = measure(model, policy, steps * (3 if arguments.full else 1))
            row, more = _told(model, policy, measured)
            rows.append(row)
            figures += more
            if policy == NO:
                told.append(_longer(model, measured))
    if arguments.json:
        print(json.dumps({"figures": figures}, indent=2))
        return
    report(f"What peer.step() takes of a step, batches of {BATCH}, one thread", HEADINGS, rows, figures)
    print(*told, sep="\n")


def _told(model: str, policy: str, measured: Measured) -> tuple[tuple[str, ...], list[Any]]:
    step, inside = (statistics.median(one.wall for one in spans) for spans in (measured.plain, measured.inside))
    mean = statistics.fmean(one.wall for one in measured.inside)
    shares = {
        "median": inside / step,
        "mean": mean / statistics.fmean(one.wall for one in measured.plain),
        "mean on a core": sum(one.core for one in measured.inside) / sum(one.core for one in measured.plain),
    }
    times = (f"{step * 1e3:.1f}", f"{inside * 1e3:.3f}", f"{mean * 1e3:.3f}")
    row = (model, policy, str(measured.pulls), *times, *(f"{share:.3%}" for share in shares.values()))
    name = f"{model}, {policy}: peer.step()"
    held = GOAL if model == GOAL_MODEL and policy not in PULLING else None
    figures = []
    for what, share in shares.items():
        met = None if held is None else share < held
        figures.append(figure(f"{name}, {what}", share, "of a step", goal=held, met=met))
    figures.append(figure(f"{name}, seconds", inside, "s", reference=step))
    return row, figures


def _longer(model: str, measured: Measured) -> str:
    """How much longer whole steps are; what the machine's other work makes of it is in the interval."""
    ratios = [one.wall / other.wall - 1 for one, other in zip(measured.joined, measured.plain, strict=True)]
    low, high = interval(ratios)
    return (
        f"{model}, {NO}: whole steps are {statistics.median(ratios):+.2%} longer with a peer"
        f" (95 % interval of the median {low:+.2%} to {high:+.2%}, {len(ratios)} pairs)"
    )


if __name__ == "__main__":
    main()
