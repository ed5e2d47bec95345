"""A peer's share of a training step: peer.step() compared with forward, backward and optimizer step, on one thread.

bin/bench overhead            LeNet, ConvNet and ResNet-20 at batches of 64, two peers on loopback (about 2 minutes)
bin/bench overhead --full     three times as many steps, and every policy on every model (about 8 minutes)

The other peer has joined and is idle. Every second step is one of the same model without a peer. On a busy machine,
long steps are interrupted far more often than short calls, which makes shares of medians too small; so shares of CPU
time are given, too. If a policy does not fire, a step costs one pass over the model and its snapshot, and some Python;
drift needs a second pass. Every 10th step records figures, and every 50th checks the parameters' addresses: means
include both, medians do not. Some policies pull at times; peer.step() then mixes a model.

The estimate for ResNet-20, made before the measurement: its 0.27 million parameters are 1.1 MB. The pass reads them and
their snapshot, and writes the snapshot: 3.2 MB, not in the caches after a step, at about 8 GB/s: 0.4 ms. Python adds
0.1 ms, and the figures of every 10th step 0.03 ms. A step of 64 images is 16 GFLOP, about 300 ms. The share is 0.2 %.
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
from _ports import reserved
from _report import figure, report
from _trained import Span, Trained, timed

BATCH = 64
GOAL = 0.01
"""Limit of peer.step() as a share of a step of ResNet-20, while the policy does not fire."""
GOAL_MODEL = "resnet20"
NO = "adaptive:threshold=1e30"
PULLING = ("adaptive:threshold=0.02", "travel:distance=2")
POLICIES = (NO, "drift:distance=1e30", *PULLING)
FULL = (NO, "travel:distance=1e30", "drift:distance=1e30", *PULLING)
RATE = 0.01
"""Learning rate, large enough that the adaptive policies pull at times."""
WARM = 3
PATIENCE = 120.0
"""Seconds for the other peer to join: more than in a run, because the machine may be busy."""
STEPS = {"lenet": 200, "convnet": 50, "resnet20": 50}
"""Steps with a peer for each policy: a multiple of 50, so that work at every 50th step has its true share."""
HEADINGS = ("model", "policy", "pulls", "a step, ms", "peer.step(), ms", "mean", "share", "of means", "... on a core")


@dataclass
class Measured:
    """Steps of one model under one policy.

    Attributes:
        plain: times of steps without a peer.
        joined: times of steps with a peer, each right after the plain step of the same index.
        inside: time of ``peer.step()`` in each joined step.
        pulls: number of models pulled meanwhile.
    """

    plain: list[Span] = field(default_factory=list)
    joined: list[Span] = field(default_factory=list)
    inside: list[Span] = field(default_factory=list)
    pulls: int = 0


def measure(model: str, policy: str, steps: int) -> Measured:
    """Time ``steps`` steps with a peer, and as many without one."""
    measured = Measured()
    alone, trained = Trained(model, BATCH, RATE), Trained(model, BATCH, RATE)
    with tempfile.TemporaryDirectory() as scratch, reserved(2) as port:
        hosts = Path(scratch) / "hosts.txt"
        hosts.write_text(f"127.0.0.1:{port} slots=2\n")
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
    """Return the median's 95 % interval by order statistics, which assume no distribution."""
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
    report(f"Share of peer.step() in a step, batches of {BATCH}, one thread", HEADINGS, rows, figures)
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
    """Describe how much longer whole steps are with a peer; the interval includes the machine's noise."""
    ratios = [one.wall / other.wall - 1 for one, other in zip(measured.joined, measured.plain, strict=True)]
    low, high = interval(ratios)
    return (
        f"{model}, {NO}: whole steps are {statistics.median(ratios):+.2%} longer with a peer"
        f" (95 % interval of the median {low:+.2%} to {high:+.2%}, {len(ratios)} pairs)"
    )


if __name__ == "__main__":
    main()
