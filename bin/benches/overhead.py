"""A peer's share of a training step: peer.step() compared with forward, backward and optimizer step, on one thread.

bin/bench overhead                  LeNet, ConvNet and ResNet-20 at batches of 64, two peers on loopback, and the pass
                                    over a model that measures the delta of a step (about 3 minutes)
bin/bench overhead --full           three times as many steps, every policy on every model, and larger models (about 12
                                    minutes)
bin/bench overhead --only steps|passes

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

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from _bench.cli import Given, bench
from _bench.peers import hosts_file
from _bench.processes import Spawned
from _bench.tables import Table, median_ratio
from _bench.training import Span, Training, built, idle, seconds, timed

from gossipx.model import kernels
from gossipx.model.layout import lay_out, slots_of
from gossipx.model.section import TensorKind

NO = "adaptive:threshold=1e30"
FIRING = ("adaptive:threshold=0.02", "travel:distance=2")
POLICIES = (NO, "drift:distance=1e30", *FIRING)
STEPS = {"lenet": 200, "convnet": 50, "resnet20": 50}
"""Steps with a peer for each policy: a multiple of 50, so that work at every 50th step has its true share."""


class Row(NamedTuple):
    """A training, its number of steps, and the delta that is measured."""

    model: str
    policy: str
    steps: int
    batch: int = 64
    delta: str = "exact"


SHORT = [
    Row(model, policy, STEPS[model]) for model in STEPS for policy in POLICIES if policy == NO or model == "resnet20"
]
FULL = [
    *(Row(model, policy, 3 * STEPS[model]) for model in STEPS for policy in (*POLICIES, "travel:distance=1e30")),
    *(Row("resnet110", NO, 10, 128, delta) for delta in ("exact", "sampled")),
    *(Row("alexnet", NO, 10, 32, delta) for delta in ("exact", "sampled")),
]
"""Batches of large models are those of the presets, except that alexnet has an eighth, which makes its share larger."""
GOALS = {
    ("resnet20", "exact"): 0.01,
    ("resnet110", "exact"): 0.001,
    ("resnet110", "sampled"): 0.001,
    ("alexnet", "exact"): 0.04,
    ("alexnet", "sampled"): 0.01,
}
"""Limits of peer.step() as a share of a step, while the policy does not fire, by model and delta."""
RATE = 0.01
"""Learning rate, large enough that the adaptive policies pull at times."""
WARM = 3
PATIENCE = 120.0
"""Seconds for the other peer to join: more than in a run, because the machine may be busy."""
HEADINGS = (
    *("model", "policy", "delta", "pulls", "a step, ms"),
    *("peer.step(), ms", "mean", "share", "of means", "... on a core"),
)


@dataclass
class Measured:
    """Times of plain steps, without a peer; of steps with a peer, each right after the plain one of the same index; and
    of ``peer.step()`` in these; and the number of models pulled meanwhile."""

    plain: list[Span] = field(default_factory=list)
    joined: list[Span] = field(default_factory=list)
    inside: list[Span] = field(default_factory=list)
    pulls: int = 0


def measure(row: Row) -> Measured:
    """Time steps with a peer, and as many without one."""
    measured = Measured()
    alone, trained = (Training.of(row.model, row.batch, RATE) for _ in range(2))
    with tempfile.TemporaryDirectory() as scratch, hosts_file(Path(scratch), 2) as hosts:
        settings = {"policy": row.policy, "delta": row.delta, "logdir": scratch, "peer_timeout": PATIENCE}
        with Spawned(idle, row.model, str(hosts), settings):
            peer = trained.join(hosts, rank=0, **settings)
            for number in range(WARM + row.steps):
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


def overhead(given: Given) -> Table:
    """Return the table; below its title, how much longer whole steps are."""
    table, longer = Table("Share of peer.step() in a step, one thread", HEADINGS), []
    for row in given.of([Row("lenet", "tau:2", 30, 4)], SHORT, FULL):
        measured = measure(row)
        _tell(table, row, measured)
        if row.policy not in FIRING:
            longer.append(_longer(row, measured))
    table.title = "\n".join((table.title, *longer))
    return table


def _tell(table: Table, row: Row, measured: Measured) -> None:
    step, inside = (statistics.median(one.wall for one in spans) for spans in (measured.plain, measured.inside))
    mean = statistics.fmean(one.wall for one in measured.inside)
    shares = {
        "median": inside / step,
        "mean": mean / statistics.fmean(one.wall for one in measured.plain),
        "mean on a core": sum(one.core for one in measured.inside) / sum(one.core for one in measured.plain),
    }
    times = (f"{step * 1e3:.1f}", f"{inside * 1e3:.3f}", f"{mean * 1e3:.3f}")
    table.row(row.model, row.policy, row.delta, measured.pulls, *times, *(f"{share:.3%}" for share in shares.values()))
    name = f"{row.model}, {row.policy}, {row.delta}: peer.step()"
    goal = None if row.policy in FIRING else GOALS.get((row.model, row.delta))
    for what, share in shares.items():
        table.figure(f"{name}, {what}", share, "of a step", most=goal)
    table.figure(f"{name}, seconds", inside, "s", reference=step)


def _longer(row: Row, measured: Measured) -> str:
    """Describe how much longer whole steps are with a peer; the interval includes the machine's noise."""
    ratios = [one.wall / other.wall - 1 for one, other in zip(measured.joined, measured.plain, strict=True)]
    low, high = interval(ratios)
    return (
        f"{row.model}, {row.policy}, {row.delta}: whole steps are {statistics.median(ratios):+.2%} longer with a peer"
        f" (95 % interval of the median {low:+.2%} to {high:+.2%}, {len(ratios)} pairs)"
    )


# --- the delta of a step ------------------------------------------------------------------------------------

ROUNDS = {"lenet": 200, "resnet110": 60, "alexnet": 9}
MEMCPY, READ, EXACT, SAMPLED = "memcpy", "one read of both vectors", "kernels.advance", "kernels.Sampled"


def passes(given: Given) -> Table:
    """Return the cost of the passes that measure a delta, next to a memcpy of the model and a read of it."""
    table = Table("Passes over the trained parameters; medians", ("model", "values", "pass", "ms", "to memcpy"))
    for model, rounds in given.of({"lenet": 3}, ROUNDS, ROUNDS).items():
        length, taken = _side_by_side(model, given.of(1, 1, 3) * rounds)
        for name, values in taken.items():
            milliseconds, ratio = statistics.median(values) * 1e3, median_ratio(values, taken[MEMCPY])
            table.row(model, f"{length:,}", name, f"{milliseconds:.3f}", f"{ratio:.2f}")
            table.figure(f"{model} {name}", milliseconds, "ms", reference=milliseconds / ratio)
        reads = median_ratio(taken[EXACT], taken[READ])
        table.figure(f"{model} {EXACT} to {READ}", reads, "times", most=1.0)
    return table


@torch.no_grad()
def _side_by_side(model: str, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """Return the number of values, and the seconds of each pass in each round, with caches as an untimed call left."""
    module = built(model)
    section = lay_out([one for one in slots_of(module, mix_buffers=False) if one.kind is TensorKind.TRAINABLE])
    x = section.storage[: section.trainable]
    before, other = x.clone(), x.clone()
    starts = {(one.data_ptr() - x.data_ptr()) // one.itemsize: one.numel() for one in module.parameters()}
    small = [(start, start + count) for start, count in starts.items() if count < kernels.SMALL]
    sampled = kernels.Sampled(x, 0, small)
    runs: dict[str, Callable[[], object]] = {
        MEMCPY: lambda: other.copy_(x),
        READ: lambda: torch.dot(x, other),
        EXACT: lambda: kernels.advance(x, before, before),
        SAMPLED: lambda: sampled.advance(x),
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            taken[name].append(seconds(run))
    return len(x), taken


if __name__ == "__main__":
    bench(__file__, __doc__, {"steps": overhead, "passes": passes})
