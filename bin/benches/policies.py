"""Retrievals, cost, and accuracy, or loss of text, of the policies, for the tables of docs/figures.md.

bin/bench policies                  one seed of each policy, lenet on iid images (about 5 minutes on 2 cores)
bin/bench policies --full           five seeds, iid and Dirichlet 0.3 (about an hour)
bin/bench policies --task text      the transformer (about 25 minutes; --full: iid and contiguous, half a day)

    --only ROW         rows in addition to tau:10; it may be repeated
    --partition, --seeds, --iterations, --peers    other than the above
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from _bench.cli import Given, bench
from _bench.peers import train
from _bench.tables import Table
from _rows import PEERS, Result, result_of, table_of

from gossipx.tasks.presets import PRESETS


@dataclass(frozen=True)
class Comparison:
    """A task that the policies train; without --full its data have the first of the partitions.

    The summaries are judged by what is ``measured``, ``accuracy`` or ``loss``.
    """

    model: str
    iterations: int
    partitions: tuple[str, str]
    measured: str


TASKS = {
    "fashion-mnist": Comparison("lenet", 3000, ("iid", "dirichlet:alpha=0.3"), "accuracy"),
    "text": Comparison("transformer", 800, ("iid", "contiguous"), "loss"),
}
PAPERS = "adaptive:threshold={threshold:g}"
"""The paper's rule with the threshold of the model's preset."""
MOMENTUM = ("--outer", "momentum:0.6")
ALONE = ("tau:10", "tau:50", "tau:100", PAPERS, "adaptive", "travel", "drift", "never")
KINDS = {
    **{policy: ("--policy", policy) for policy in ALONE},
    "tau:50, momentum:0.6": ("--policy", "tau:50", *MOMENTUM),
    "auto:budget=2%, momentum:0.6": ("--policy", "auto:budget=2%", *MOMENTUM),
    "tau:10, blocking": ("--policy", "tau:10", "--blocking"),
    **{f"waves, {policy}": ("--exchange", "waves", "--policy", policy) for policy in ("tau:100", "tau:400")},
}
"""Options by the name of a row."""
GOALS = {PAPERS: (0.90, 0.010), "travel": (0.85, 0.005)}
"""The least share of retrievals saved, and the most accuracy lost, of LeNet on iid images."""
OPTIONS = {
    "--task": {"choices": list(TASKS), "default": "fashion-mnist"},
    "--iterations": {"type": int},
    "--seeds": {"type": int, "choices": range(1, 6), "help": "default: 1, with --full 5"},
    "--partition": {"help": "only this one"},
    "--peers": {"type": int, "default": PEERS},
    "--only": {"action": "append", "choices": list(KINDS), "help": "rows in addition to tau:10; default: all"},
}


def policies(given: Given) -> Iterator[Table]:
    """Yield a table per partition of the data."""
    task = TASKS[given.task]
    threshold = PRESETS[task.model].threshold
    iterations = given.iterations or given.of(20, task.iterations, task.iterations)
    seeds = range(given.seeds or given.of(1, 1, 5))
    partitions = (given.partition,) if given.partition else given.of(*[task.partitions[:1]] * 2, task.partitions)
    kinds = ["tau:10"] if given.smoke else [kind for kind in KINDS if not given.only or kind in ("tau:10", *given.only)]
    for partition in partitions:
        common = ("--task", given.task, "--partition", partition, "--iterations", str(iterations))
        common = (*common, "--eval-interval", "0")
        rows: dict[str, list[Result]] = {}
        for kind in kinds:
            own = [option.format(threshold=threshold) for option in KINDS[kind]]
            runs = (train(given.peers, *own, *common, "--seed", str(seed)) for seed in seeds)
            rows[kind.format(threshold=threshold)] = [result_of(one, task.measured) for one in runs]
        title = f"{partition}: {task.model}, {given.peers} peers, {iterations} iterations, {len(seeds)} seeds"
        are_goals = task.model == "lenet" and partition == "iid"
        goals = {kind.format(threshold=threshold): each for kind, each in GOALS.items()} if are_goals else {}
        yield table_of(title, partition, rows, "after", goals, task.measured)


if __name__ == "__main__":
    bench(__file__, __doc__, policies, OPTIONS)
