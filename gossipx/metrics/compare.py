"""The table that lays runs side by side: the paper's Table II for one's own runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossipx.metrics.summary import Figures, Summary


@dataclass(frozen=True)
class Row:
    """One run in the comparison. None where a run has no such figure.

    Attributes:
        codec: ``none`` where models or gradients travelled as they are.
        retrievals: a peer, mean.
        delayed_pulls: DPRs, of all shards together; 0 without servers.
        received_mb: while training, a peer, mean, 10⁶ bytes.
        finish_mb: in the finish, a peer, mean.
        reduction: share of the first run's retrievals that this one saves.
        accuracy: own models after the finish, mean.
        accuracy_worst: the worst peer's.
        accuracy_before_finish: mean.
        accuracy_averaged: of the average of all models.
        blocked: share of the training time in which gossipx stopped the training thread, mean of those that train.
        lost: how many peers did not finish.
    """

    name: str
    policy: str
    codec: str
    retrievals: float | None
    reduction: float | None
    delayed_pulls: float | None
    received_mb: float | None
    finish_mb: float | None
    accuracy: float | None
    accuracy_worst: float | None
    accuracy_before_finish: float | None
    accuracy_averaged: float | None
    wall_seconds: float
    blocked: float | None
    lost: int


def compare(summaries: Sequence[Summary]) -> list[Row]:
    """A row a run; reductions are against the first."""
    first = _mean(summaries[0].retrievals)
    return [_row(summary, first) for summary in summaries]


def _row(summary: Summary, first: float | None) -> Row:
    retrievals = _mean(summary.retrievals)
    present = [value for value in summary.test_accuracy if value is not None]
    fractions: Figures = [
        None if blocked is None or not seconds else blocked / seconds
        for blocked, seconds in zip(summary.blocked_seconds, summary.train_seconds, strict=True)
    ]
    return Row(
        name=summary.name,
        policy=summary.policy,
        codec=summary.codec,
        retrievals=retrievals,
        reduction=None if retrievals is None or not first else 1 - retrievals / first,
        delayed_pulls=_sum(summary.delayed_pulls),
        received_mb=_mean(summary.bytes_received, 1e-6),
        finish_mb=_mean(summary.finish_bytes, 1e-6),
        accuracy=_mean(summary.test_accuracy),
        accuracy_worst=min(present, default=None),
        accuracy_before_finish=_mean(summary.test_accuracy_before_finish),
        accuracy_averaged=summary.consensus_accuracy,
        wall_seconds=summary.wall_seconds,
        blocked=_mean(fractions),
        lost=len(summary.lost),
    )


def _mean(figures: Figures, unit: float = 1.0) -> float | None:
    present = [value for value in figures if value is not None]
    return sum(present) / len(present) * unit if present else None


def _sum(figures: Figures) -> float | None:
    present = [value for value in figures if value is not None]
    return sum(present) if present else None
