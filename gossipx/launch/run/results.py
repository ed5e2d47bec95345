"""The summary of a run, from the reports of the peers of this machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gossipx.metrics.summary import Summary, agreed, per_peer, reported
from gossipx.settings.sections import RunConfig


def sum_up(
    settings: RunConfig,
    names: Sequence[str],
    built_in: bool,
    seconds: float,
    results: Mapping[int, dict[str, Any]],
    stopped: Mapping[int, dict[str, Any]],
    here: Collection[int],
) -> Summary:
    """Return the summary of a run that trained for ``seconds``.

    Args:
        names: of all peers by rank, with those that joined the run under way; empty: nobody had that rank.
        built_in: whether the run trains the built-in task.
        results: what the peers of this machine that finished have reported, by rank.
        stopped: figures of the peers with which the run was stopped, by rank.
        here: ranks of the peers whose processes are ours, so that their end is known.
    """
    reports: list[dict[str, Any] | None] = [stopped.get(rank) for rank in range(len(names))]
    accuracy = loss = None
    for rank, result in sorted(results.items()):
        reports[rank] = result["report"]
        # Peers on other machines sent their reports to these peers.
        for other, report in result["reports"].items():
            reports[int(other)] = reports[int(other)] or report
        accuracy = result["consensus_accuracy"] if accuracy is None else accuracy
        loss = result["consensus_loss"] if loss is None else loss
    is_counted = built_in and settings.run.seconds is None
    assert settings.run.name is not None
    told = [*results.values(), *stopped.values()]
    before = max((one.get("seconds_before", 0.0) for one in told), default=0.0)
    doubted = {rank for result in results.values() for rank in result["doubted"]}
    finished = [report for rank, report in enumerate(reports) if rank in results or rank not in stopped]
    done = [report["iterations"] for report in reports if report and "iterations" in report]
    return Summary(
        name=settings.run.name,
        policy=reported("policy", reports, settings.decides),
        codec=reported("codec", reports, settings.values["codec"]),
        seed=settings.run.seed,
        peers=len(names),
        task=settings.task.task if built_in else None,
        model=settings.task.model if built_in else None,
        partition=settings.task.partition,
        # The number of iterations that a script or a number of seconds allows is only in the reports.
        iterations=max(done) if done and (stopped or not is_counted) else settings.run.iterations,
        agreed=agreed(finished) and not doubted.difference(here),
        lost=[name for name, report in zip(names, reports, strict=True) if name and report is None],
        stopped=[names[rank] for rank in sorted(stopped.keys() - results.keys())],
        wall_seconds=before + seconds,
        consensus_accuracy=accuracy,
        consensus_loss=loss,
        figures=per_peer(reports),
    )
