"""Retrievals and accuracy, or loss of text, of the policies, for the tables of docs/figures.md.

bin/bench policies                  one seed of each policy, lenet on iid images (about 5 minutes on 2 cores)
bin/bench policies --full           five seeds, iid and Dirichlet 0.3 (about an hour)
bin/bench policies --task text      the transformer (about 25 minutes; --full: iid and contiguous, half a day)

    --only ROW         rows in addition to tau:10; it may be repeated
    --partition, --seeds, --iterations    other than the above
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _bench.cli import Given, bench
from _bench.peers import train
from _bench.tables import Table, interval

from gossipx.metrics.summary import Summary
from gossipx.tasks.presets import PRESETS


@dataclass(frozen=True)
class Task:
    """A task that the policies train; without --full its data have the first of the partitions.

    The summaries are judged by what is ``measured``, ``accuracy`` or ``loss``.
    """

    model: str
    iterations: int
    partitions: tuple[str, str]
    measured: str


TASKS = {
    "fashion-mnist": Task("lenet", 3000, ("iid", "dirichlet:alpha=0.3"), "accuracy"),
    "text": Task("transformer", 800, ("iid", "contiguous"), "loss"),
}
PAPERS = "adaptive:threshold={threshold:g}"
"""The paper's rule with the threshold of the model's preset."""
MOMENTUM = ("--outer", "momentum:0.6")
ALONE = ("tau:10", "tau:50", "tau:100", PAPERS, "adaptive", "travel", "drift", "never")
KINDS = {
    **{policy: ("--policy", policy) for policy in ALONE},
    "tau:50, momentum:0.6": ("--policy", "tau:50", *MOMENTUM),
    "auto:budget=2%, momentum:0.6": ("--policy", "auto:budget=2%", *MOMENTUM),
    **{f"waves, {policy}": ("--exchange", "waves", "--policy", policy) for policy in ("tau:100", "tau:400")},
}
"""Options by the name of a row."""
GOALS = {PAPERS: (0.90, 0.010), "travel": (0.85, 0.005)}
"""The least share of retrievals saved, and the most accuracy lost, of LeNet on iid images."""
PEERS = 4
OPTIONS = {
    "--task": {"choices": list(TASKS), "default": "fashion-mnist"},
    "--iterations": {"type": int},
    "--seeds": {"type": int, "choices": range(1, 6), "help": "default: 1, with --full 5"},
    "--partition": {"help": "only this one"},
    "--only": {"action": "append", "choices": list(KINDS), "help": "rows in addition to tau:10; default: all"},
}


def policies(given: Given) -> Iterator[Table]:
    """Yield a table per partition of the data."""
    task = TASKS[given.task]
    iterations = given.iterations or given.of(20, task.iterations, task.iterations)
    seeds = range(given.seeds or given.of(1, 1, 5))
    partitions = (given.partition,) if given.partition else given.of(*[task.partitions[:1]] * 2, task.partitions)
    kinds = ["tau:10"] if given.smoke else [kind for kind in KINDS if not given.only or kind in ("tau:10", *given.only)]
    own = f"own {task.measured}"
    headings = ("policy", "models", "saved", "MB", f"{own}, before finish", f"{own}, after", "of the average")
    for partition in partitions:
        common = ("--task", given.task, "--partition", partition, "--iterations", str(iterations))
        title = f"{partition}: {task.model}, {PEERS} peers, {iterations} iterations, {len(seeds)} seeds"
        table = Table(f"{title}; models and MB per peer", headings)
        runs = {kind: _train(task, KINDS[kind], common, seeds) for kind in kinds}
        for kind, summaries in runs.items():
            _compare(table, task, partition, kind, summaries, runs["tau:10"])
        yield table


def _train(task: Task, kind: tuple[str, ...], common: tuple[str, ...], seeds: range) -> list[Summary]:
    options = [option.format(threshold=PRESETS[task.model].threshold) for option in (*kind, *common)]
    with tempfile.TemporaryDirectory() as scratch:
        return [train(Path(scratch), PEERS, *options, "--eval-interval", "0", "--seed", str(seed)) for seed in seeds]


def _compare(table: Table, task: Task, partition: str, kind: str, found: list[Summary], tau: list[Summary]) -> None:
    """Add a row and its figures."""
    key, sign = f"test_{task.measured}", 1 if task.measured == "accuracy" else -1
    retrievals, pulls, own = _mean(tau, "retrievals"), _mean(found, "retrievals"), _mean(found, key)
    saved, lost = 1 - pulls / max(retrievals, 1), sign * (_mean(tau, key) - own)
    ends = [statistics.fmean(getattr(one, key)) for one in found]
    half = f" ± {interval(ends):.4f}" if len(ends) > 1 else ""
    averaged = statistics.fmean(getattr(one, f"consensus_{task.measured}") or 0.0 for one in found)
    counts = (f"{pulls:.1f}", f"{saved:.1%}", f"{_mean(found, 'bytes_received') / 1e6:.1f}")
    judged = (f"{_mean(found, f'{key}_before_finish'):.4f}", f"{own:.4f}{half}", f"{averaged:.4f}")
    table.row(kind if "," in kind else found[0].policy, *counts, *judged)
    goals = GOALS.get(kind) if task.model == "lenet" and partition == "iid" else None
    name = f"{partition} {kind.format(threshold=PRESETS[task.model].threshold)}"
    table.figure(f"{name} retrievals per peer", pulls, "", reference=retrievals)
    table.figure(f"{name} retrievals saved", saved, "of tau:10's", least=goals and goals[0])
    table.figure(f"{name} {task.measured} worse", lost, "than tau:10", most=goals and goals[1])


def _mean(summaries: list[Summary], key: str) -> float:
    """Return the mean of a per-peer figure over peers and seeds."""
    return statistics.fmean(statistics.fmean(getattr(one, key)) for one in summaries)


if __name__ == "__main__":
    bench(__file__, __doc__, policies, OPTIONS)
