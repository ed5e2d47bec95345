"""The table that compares runs side by side, like the paper's Table II."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossipx.metrics.summary import Figures, Summary


@dataclass(frozen=True)
class Row:
    """One run in the comparison. A field is None if the run does not have that value.

    Attributes:
        codec: codec of models or gradients; ``none`` if they were sent unencoded.
        retrievals: mean per peer.
        skipped: decisions to exchange that came to nothing, mean per peer.
        delayed_pulls: DPRs, summed over all shards; 0 without servers.
        received_mb: 10⁶ bytes received while training, mean per peer.
        finish_mb: 10⁶ bytes received in the finish, mean per peer.
        reduction: share of the first run's retrievals that this run saves.
        accuracy: of peers' own models after the finish, mean.
        accuracy_worst: the same of the worst peer.
        accuracy_before_finish: the same before the finish, mean.
        accuracy_averaged: of the average of all models.
        blocked: share of the training time in which gossipx blocked the training thread, mean of peers that train.
        agreed: whether all peers ended with the same model.
        lost: number of peers that did not finish.
        stopped: number of peers that were stopped before the finish.
        poisoned: received models refused because of NaN or Inf; this and the following are summed over peers.
        corrupted: received frames refused because they did not match their checksums.
        strangers: connections turned away because their openers did not prove to belong to the run.
        suspicions: how often another peer stopped answering.
        set_back: how often a shard's server came back without all of the shard's state; of the worker that saw most.
        unwritten: records of curves, checkpoints and models that could not be written.
    """

    name: str
    policy: str
    codec: str
    retrievals: float | None
    skipped: float | None
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
    agreed: bool | None
    lost: int
    stopped: int
    poisoned: float | None
    corrupted: float | None
    strangers: float | None
    suspicions: float | None
    set_back: float | None
    unwritten: float | None


def compare(summaries: Sequence[Summary]) -> list[Row]:
    """Return one row per run; reductions are relative to the first."""
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
        skipped=_mean(summary.skipped),
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
        agreed=summary.agreed,
        lost=len(summary.lost),
        stopped=len(summary.stopped),
        poisoned=_sum(summary.poisoned),
        corrupted=_sum(summary.corrupted),
        strangers=_sum(summary.strangers),
        suspicions=_sum(summary.suspicions),
        set_back=max((count for count in summary.set_back if count is not None), default=None),
        unwritten=_sum(summary.unwritten),
    )


def _mean(figures: Figures, unit: float = 1.0) -> float | None:
    present = [value for value in figures if value is not None]
    return sum(present) / len(present) * unit if present else None


def _sum(figures: Figures) -> float | None:
    present = [value for value in figures if value is not None]
    return sum(present) if present else None
