"""Effect of codecs on peers that pull each other's models: own and averaged accuracy, and bytes per model.

bin/bench models            one seed of tau:10, some codecs (about 3 minutes on 2 cores)
bin/bench models --full     the paper's rule, travel and tau:10, all codecs, three seeds (about an hour and a half)

    --keep FILE             results, one line per run; a run in the file is not repeated, even if the code has changed
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from _bench.cached_runs import CachedRuns, Job
from _bench.cli import Given, bench
from _bench.peers import train
from _bench.tables import Table
from _rows import PEERS, Result, result_of, table_of

NONE = "none"
CODECS: dict[str, tuple[str, ...]] = {
    NONE: (),
    "3lc:sparsity=1,residual=0.3": (),
    "3lc:sparsity=1,residual=0.1": (),
    "3lc:sparsity=1": (),
    "3lc:sparsity=1, choco 0.2": ("--codec", "3lc:sparsity=1", "--mixing", "choco:gamma=0.2"),
    "3lc:sparsity=1, choco 0.5": ("--codec", "3lc:sparsity=1", "--mixing", "choco:gamma=0.5"),
    "3lc:sparsity=1,residual=0.3, choco 0.5": (
        *("--codec", "3lc:sparsity=1,residual=0.3", "--mixing", "choco:gamma=0.5"),
    ),
    "topk:ratio=0.05, choco 0.2": ("--codec", "topk:ratio=0.05", "--mixing", "choco:gamma=0.2"),
    "onebit, choco 0.2": ("--codec", "onebit", "--mixing", "choco:gamma=0.2"),
    "efsignsgd, choco 0.5": ("--codec", "efsignsgd", "--mixing", "choco:gamma=0.5"),
    "efsignsgd, choco 0.2": ("--codec", "efsignsgd", "--mixing", "choco:gamma=0.2"),
    "int8": (),
    "int8, no references": ("--codec", "int8", "--references", "0"),
    "bf16, no references": ("--codec", "bf16", "--references", "0"),
    "qsgd:levels=7": (),
    "stochastic3": (),
    "stochastic3, choco 0.2": ("--codec", "stochastic3", "--mixing", "choco:gamma=0.2"),
}
"""Options by the name of a row; by default, the name is the codec's spec."""
SOME = (NONE, "3lc:sparsity=1,residual=0.3", "3lc:sparsity=1", "3lc:sparsity=1, choco 0.2", "efsignsgd, choco 0.2")
POLICIES = ("tau:10", "travel", "adaptive:threshold=0.025")
GOALS = {"3lc:sparsity=1,residual=0.3": (None, 0.005)}
"""Accuracy that a codec without loss may lose: less than the difference between two seeds of one codec."""
OPTIONS = {
    "--iterations": {"type": int, "default": 3000},
    "--seeds": {"type": int, "choices": range(1, 6), "help": "default: 1, with --full 3"},
    "--policy": {"action": "append", "help": "default: tau:10, with --full travel and the paper's rule, too"},
    "--only": {"action": "append", "choices": list(CODECS), "help": "rows in addition to none; default: all"},
    "--keep": {"type": Path},
}


def models(given: Given) -> Iterator[Table]:
    """Yield a table per policy."""
    chosen = given.only or given.of(("int8",), SOME, tuple(CODECS))
    names = [name for name in CODECS if name in (NONE, *chosen)]
    iterations = given.of(20, given.iterations, given.iterations)
    seeds, kept = given.seeds or given.of(1, 1, 3), CachedRuns(given.keep)
    for policy in given.policy or given.of(POLICIES[:1], POLICIES[:1], POLICIES):
        common = {"policy": policy, "iterations": iterations, **given.of({"peers": 2}, {}, {})}
        jobs = {name: [{**common, "row": name, "seed": seed} for seed in range(seeds)] for name in names}
        kept.complete([jobs[name][seed] for seed in range(seeds) for name in names], run, 1)
        title = f"{policy}: LeNet, {PEERS} peers, iid, {iterations} iterations, {seeds} seeds, 10,000 images"
        rows = {name: [kept[job] for job in own] for name, own in jobs.items()}
        yield table_of(title, policy, rows, "own", GOALS)


def run(job: Job) -> Result:
    """Run a job, and return its result."""
    codec = CODECS[job["row"]] or ("--codec", job["row"])
    options = ("--policy", job["policy"], *codec, "--iterations", str(job["iterations"]), "--eval-interval", "0")
    return result_of(train(job.get("peers", PEERS), *options, "--seed", str(job["seed"])))


if __name__ == "__main__":
    bench(__file__, __doc__, models, OPTIONS)
