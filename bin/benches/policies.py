"""Retrievals and accuracy of the policies, for the tables of docs/figures.md.

bin/bench policies            one seed of each policy, iid (about 3 minutes on 2 cores)
bin/bench policies --full     five seeds, iid and Dirichlet 0.3 (about half an hour)
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _report import figure, report
from _runs import train

from gossipx.metrics.summary import Summary

PAPERS = "adaptive:threshold=0.025"
"""The paper's rule with the threshold of LeNet's preset."""
KINDS = {
    **{policy: ("--policy", policy) for policy in ("tau:10", "tau:100", PAPERS, "travel", "drift", "never")},
    "default": (),
    "auto:budget=2%, momentum:0.6": ("--policy", "auto:budget=2%", "--outer", "momentum:0.6"),
    **{f"waves, {policy}": ("--exchange", "waves", "--policy", policy) for policy in ("tau:100", "tau:400")},
}
"""Options by the name of a row."""
PEERS = 4
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t for a two-sided 95 % interval, by the number of seeds."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="bin/bench policies", description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--seeds", type=int, choices=range(1, 6), help="default: 1, with --full 5")
    parser.add_argument("--partition", help="only this one, instead of iid, or of both with --full")
    parser.add_argument("--only", action="append", choices=list(KINDS), help="rows in addition to tau:10; default: all")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds or (5 if arguments.full else 1))
    partitions = ("iid", "dirichlet:alpha=0.3") if arguments.full else ("iid",)
    if arguments.partition:
        partitions = (arguments.partition,)
    kinds = [kind for kind in KINDS if not arguments.only or kind in ("tau:10", *arguments.only)]
    figures: list[Any] = []
    for partition in partitions:
        with tempfile.TemporaryDirectory() as scratch:
            runs = {kind: _train(Path(scratch), KINDS[kind], partition, seeds, arguments) for kind in kinds}
        figures += _report(partition, runs, arguments)
    if arguments.json:
        print(json.dumps({"figures": figures}, indent=2))


def _train(
    scratch: Path, kind: tuple[str, ...], partition: str, seeds: range, arguments: argparse.Namespace
) -> list[Summary]:
    options = (*kind, "--partition", partition, "--iterations", str(arguments.iterations))
    return [train(scratch, "run", PEERS, *options, "--eval-interval", "0", "--seed", str(seed)) for seed in seeds]


def _report(partition: str, runs: dict[str, list[Summary]], arguments: argparse.Namespace) -> list[Any]:
    rows, figures = [], []
    reference = _mean(runs["tau:10"], "retrievals")
    accuracy = _mean(runs["tau:10"], "test_accuracy")
    for policy, summaries in runs.items():
        pulls = _mean(summaries, "retrievals")
        saved = 1 - pulls / reference
        own = _mean(summaries, "test_accuracy")
        averaged = statistics.fmean(float(one.consensus_accuracy or 0.0) for one in summaries)
        rows.append(
            (
                policy if policy == "default" or "," in policy else summaries[0].policy,
                f"{pulls:.1f}",
                f"{saved:.1%}",
                f"{_mean(summaries, 'bytes_received') / 1e6:.1f}",
                f"{_mean(summaries, 'test_accuracy_before_finish'):.4f}",
                f"{own:.4f}{_interval(summaries)}",
                f"{averaged:.4f}",
            )
        )
        goals = {PAPERS: (0.90, 0.010), "travel": (0.85, 0.005)}.get(policy) if partition == "iid" else None
        figures.append(figure(f"{partition} {policy} retrievals per peer", pulls, "", reference=reference))
        figures.append(
            figure(
                f"{partition} {policy} retrievals saved",
                saved,
                "of tau:10's",
                goal=goals[0] if goals else None,
                met=saved >= goals[0] if goals else None,
            )
        )
        figures.append(
            figure(
                f"{partition} {policy} accuracy lost",
                accuracy - own,
                "against tau:10",
                goal=goals[1] if goals else None,
                met=accuracy - own <= goals[1] if goals else None,
            )
        )
    headings = ("policy", "models per peer", "saved", "MB per peer", "own, before finish", "own, after", "averaged")
    count = len(runs["tau:10"])
    title = f"{partition}: {PEERS} peers, {arguments.iterations} iterations, {count} seeds, 10,000 test images"
    if not arguments.json:
        report(title, headings, rows, figures)
    return figures


def _mean(summaries: list[Summary], key: str) -> float:
    """Return the mean of a per-peer figure over peers and seeds."""
    return statistics.fmean(statistics.fmean(getattr(one, key)) for one in summaries)


def _interval(summaries: list[Summary]) -> str:
    """Return half the 95 % interval of the mean accuracy over seeds."""
    if len(summaries) < 2:
        return ""
    means = [statistics.fmean(float(value or 0.0) for value in one.test_accuracy) for one in summaries]
    return f" ± {T_95[len(means)] * statistics.stdev(means) / len(means) ** 0.5:.4f}"


if __name__ == "__main__":
    main()
