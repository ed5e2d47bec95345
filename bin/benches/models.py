"""Effect of codecs on peers that pull each other's models: own and averaged accuracy, and bytes per model.

bin/bench models            one seed of tau:10, some codecs (about 3 minutes on 2 cores)
bin/bench models --full     the paper's rule, travel and tau:10, all codecs, three seeds (about an hour and a half)

    --keep FILE             results, one line per run; a run in the file is not repeated, even if the code has changed
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from _bench.cached_runs import CachedRuns, Job
from _bench.cli import Given, bench
from _bench.peers import train
from _bench.tables import Table, interval, known

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
PEERS = 4
GOALS = {"3lc:sparsity=1,residual=0.3": 0.005}
"""Accuracy that a codec without loss may lose: less than the difference between two seeds of one codec."""


Result = dict[str, float]
HEADINGS = ("codec", "models per peer", "kB per model", "times fewer", "own, before finish", "less none", "averaged")
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
    iterations, peers = given.of((20, 2), *[(given.iterations, PEERS)] * 2)
    seeds, kept = given.seeds or given.of(1, 1, 3), CachedRuns(given.keep)
    for policy in given.policy or given.of(POLICIES[:1], POLICIES[:1], POLICIES):
        wanted = [
            {"policy": policy, "row": name, "iterations": iterations, "seed": seed}
            for seed in range(seeds)
            for name in names
        ]
        if peers != PEERS:
            wanted = [{**job, "peers": peers} for job in wanted]
        kept.complete(wanted, run, 1)
        title = f"{policy}: LeNet, {peers} peers, iid, {iterations} iterations, {seeds} seeds, 10,000 images"
        table = Table(title, HEADINGS)
        made = {name: [kept[job] for job in wanted if job["row"] == name] for name in names}
        for name, runs in made.items():
            _tell(table, policy, name, runs, made[NONE])
        yield table


def run(job: Job) -> Result:
    """Run a job. Return the number of ``models`` mixed per peer, the ``bytes`` of each on the wire, and the accuracy of
    the peers' ``own`` models before the finish and of the ``averaged`` model."""
    codec, peers = CODECS[job["row"]] or ("--codec", job["row"]), job.get("peers", PEERS)
    options = ("--policy", job["policy"], *codec, "--iterations", str(job["iterations"]), "--eval-interval", "0")
    with tempfile.TemporaryDirectory() as scratch:
        summary = train(Path(scratch), peers, *options, "--seed", str(job["seed"]))
    pulled = sum(known(summary.retrievals))
    return {
        "models": pulled / peers,
        "bytes": sum(known(summary.bytes_received)) / max(pulled, 1),
        "own": statistics.fmean(known(summary.test_accuracy_before_finish)),
        "averaged": summary.consensus_accuracy or 0.0,
    }


def _tell(table: Table, policy: str, name: str, runs: Sequence[Result], plain: Sequence[Result]) -> None:
    """Add the row and the figures of a codec, whose results are those of one run per seed, as those without a codec."""
    less = [one["own"] - other["own"] for one, other in zip(runs, plain, strict=True)]
    lost, half, size, whole = -statistics.fmean(less), interval(less), _mean(runs, "bytes"), _mean(plain, "bytes")
    shown = f"{-lost:+.4f} ± {half:.4f}" if len(less) > 1 else f"{-lost:+.4f}"
    sizes = (f"{_mean(runs, 'models'):.0f}", f"{size / 1e3:.1f}", f"{whole / size:.1f}")
    accuracy = (f"{_mean(runs, 'own'):.4f}", "" if name == NONE else shown, f"{_mean(runs, 'averaged'):.4f}")
    table.row(name, *sizes, *accuracy)
    table.figure(f"{policy}, {name}: bytes per model", size, "bytes", reference=whole)
    table.figure(f"{policy}, {name}: accuracy lost", lost, "of 1", most=GOALS.get(name))


def _mean(runs: Sequence[Result], key: str) -> float:
    return statistics.fmean(one[key] for one in runs)


if __name__ == "__main__":
    bench(__file__, __doc__, models, OPTIONS)
