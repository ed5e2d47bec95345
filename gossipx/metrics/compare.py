"""The comparison of runs, like the paper's Table II, with means over seeds and a fixed period at equal traffic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossipx import policies
from gossipx.errors import UsageError
from gossipx.metrics.intervals import Estimate, estimate
from gossipx.metrics.summary import Figures, Summary
from gossipx.policies import Policy, Tau


@dataclass(frozen=True)
class FixedPeriod:
    """The figures of a fixed period (``tau``) with as many retrievals as another policy.

    Interpolated linearly in the logarithm of the retrievals between two measured periods of the same setting.

    Attributes:
        between: names of the two rows, the one with fewer retrievals first.
        figures: the interpolated figures, by name of the row's field.
    """

    between: tuple[str, str]
    figures: dict[str, float]


@dataclass(frozen=True)
class Row:
    """One run in the comparison, or several that differ only in their seeds. A field is None without a value.

    Figures of peers are means over the peers that train. For several runs they are then means over the runs, and counts
    of faults and of peers are sums.

    Attributes:
        name: name of the run; of several, what their names have in common.
        runs: names of the runs.
        seeds: their seeds.
        codec: codec of models or gradients; ``none`` if they were sent unencoded.
        retrievals: per peer.
        skipped: decisions to exchange that came to nothing, per peer.
        failed: exchanges that did not complete, per peer.
        reduction: share of the first row's retrievals that this one saves.
        delayed_pulls: DPRs, summed over all shards; None without servers.
        received_mb: 10⁶ bytes received while training, per peer.
        serving_mb: the same of peers that only serve others; None: all of them train.
        finish_mb: 10⁶ bytes received in the finish, per peer.
        accuracy: of peers' own models after the finish.
        accuracy_worst: the same of the worst peer.
        accuracy_before_finish: the same before the finish.
        accuracy_averaged: of the average of all models.
        loss, loss_worst, loss_before_finish, loss_averaged: the same of the loss on test data.
        bits_per_character: the same as ``loss``, of text.
        train_seconds: from the first iteration to the last, of the peer that took longest.
        wall_seconds: from the first iteration to the end of the last peer, with finish and evaluations.
        blocked: share of the training time in which gossipx blocked the training thread.
        agreed: whether all peers ended with the same model, in all runs.
        lost: number of peers that did not finish.
        stopped: number of peers that were stopped before the finish.
        poisoned: received models refused because of NaN or Inf; this and the following are summed over peers.
        corrupted: received frames refused because they did not match their checksums.
        strangers: connections turned away because their openers did not prove to belong to the run.
        expiry_warnings: warnings that a certificate expires.
        suspicions: how often another peer stopped answering.
        set_back: how often a shard's server came back without all of the shard's state; of the worker that saw most.
        outliers: received models that were suddenly far from the receiver's.
        unwritten: records of curves, checkpoints and models that could not be written.
        crashes, restarts, lost_iterations: of a simulated run.
        intervals: half the 95 % interval of each mean over several runs, by name of the field.
        paired: differences from the first row's runs of the same seeds, by name of the field; empty for the first row,
            and without common seeds.
        fixed_period: a fixed period at equal retrievals; None: this is one, or there are no suitable runs.
    """

    name: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    policy: str
    codec: str
    retrievals: float | None
    skipped: float | None
    failed: float | None
    reduction: float | None
    delayed_pulls: float | None
    received_mb: float | None
    serving_mb: float | None
    finish_mb: float | None
    accuracy: float | None
    accuracy_worst: float | None
    accuracy_before_finish: float | None
    accuracy_averaged: float | None
    loss: float | None
    loss_worst: float | None
    loss_before_finish: float | None
    loss_averaged: float | None
    bits_per_character: float | None
    train_seconds: float | None
    wall_seconds: float | None
    blocked: float | None
    agreed: bool | None
    lost: int
    stopped: int
    poisoned: float | None
    corrupted: float | None
    strangers: float | None
    expiry_warnings: float | None
    suspicions: float | None
    set_back: float | None
    outliers: float | None
    unwritten: float | None
    crashes: float | None
    restarts: float | None
    lost_iterations: float | None
    intervals: dict[str, float]
    paired: dict[str, Estimate]
    fixed_period: FixedPeriod | None


REACHED = (
    *("accuracy", "accuracy_worst", "accuracy_before_finish", "accuracy_averaged"),
    *("loss", "loss_worst", "loss_before_finish", "loss_averaged"),
)
"""Fields of a row that say how good the models are."""

SUMMED = (
    *("poisoned", "corrupted", "strangers", "expiry_warnings", "suspicions", "outliers", "unwritten"),
    *("crashes", "restarts", "lost_iterations"),
)
"""Counts of a summary that are summed over peers and runs."""

_Measured = Mapping[str, float | None]
"""The figures of one run, by name of the row's field."""


@dataclass
class Group:
    """Runs that differ only in their seeds, with the figures of each.

    Attributes:
        setting: what they have in common, except the policy.
    """

    setting: object
    runs: list[Summary]
    measured: list[_Measured]

    @property
    def policy(self) -> str:
        return self.runs[0].policy

    @property
    def is_cut(self) -> bool:
        """Whether the run was stopped before its end; then it is the only one."""
        return bool(self.runs[0].stopped)

    @property
    def name(self) -> str:
        """The common part of the names: ``tau`` for ``tau-seed0``, ``tau-seed1``; else the first one."""
        stems = {run.name.removesuffix(f"-seed{run.seed}") for run in self.runs}
        return stems.pop() if len(stems) == 1 and len(self.runs) > 1 else self.runs[0].name

    @property
    def shown(self) -> str:
        """The name, and how many seeds there are of several."""
        return f"{self.name}, {len(self.runs)} seeds" if len(self.runs) > 1 else self.name

    def estimates(self) -> dict[str, Estimate]:
        """Return the means over the runs, by name of the figure."""
        found = {}
        for name in self.measured[0]:
            present = [value for run in self.measured if (value := run[name]) is not None]
            if present:
                found[name] = estimate(present)
        return found


def compare(summaries: Sequence[Summary], settings: Sequence[object] | None = None) -> list[Row]:
    """Return one row per run, or per group of runs that differ only in their seeds.

    Args:
        summaries: the runs, at least one. Reductions and paired differences are relative to the first row.
        settings: settings of each run but its seed and its policy, of any type with equality; None: unknown, so that
            runs are told apart by their summaries.
    """
    groups = grouped(summaries, settings)
    means = [group.estimates() for group in groups]
    first = None if groups[0].is_cut else means[0].get("retrievals")
    rows = []
    for group, own in zip(groups, means, strict=True):
        taken = own.get("retrievals")
        saved = None
        if first is not None and taken is not None and first.mean and not group.is_cut:
            saved = 1 - taken.mean / first.mean
        rows.append(
            Row(
                name=group.name,
                runs=tuple(run.name for run in group.runs),
                seeds=tuple(run.seed for run in group.runs),
                policy=group.policy,
                codec=group.runs[0].codec,
                reduction=saved,
                intervals={name: one.interval for name, one in own.items() if one.interval is not None},
                paired={} if group is groups[0] else _paired(group, groups[0]),
                fixed_period=_fixed_period(group, own, groups, means),
                **_means(group, own),
                **_counted(group.runs),
            )
        )
    return rows


def grouped(summaries: Sequence[Summary], settings: Sequence[object] | None = None) -> list[Group]:
    """Return the groups of runs that differ only in their seeds, in order of their first runs.

    Two runs of one seed are never in one group: they were made to be compared. A run that was stopped is alone in its
    group, since it trained less.
    """
    groups: list[Group] = []
    for number, run in enumerate(summaries):
        own = (run.codec, run.peers, run.task, run.model, run.partition, run.iterations)
        setting = own if settings is None or settings[number] is None else settings[number]
        for group in groups:
            is_alike = group.setting == setting and _policy(group.policy) == _policy(run.policy)
            is_alike = is_alike and group.runs[0].peers == run.peers and not (run.stopped or group.is_cut)
            if is_alike and run.seed not in {other.seed for other in group.runs}:
                group.runs.append(run)
                group.measured.append(_measured(run))
                break
        else:
            groups.append(Group(setting, [run], [_measured(run)]))
    return groups


def _measured(run: Summary) -> dict[str, float | None]:
    """Return the figures of a run whose means over seeds are compared."""
    of = run.of_training
    accuracies, losses = _present(of(run.test_accuracy)), _present(of(run.test_loss))
    fractions: Figures = [
        None if blocked is None or not seconds else blocked / seconds
        for blocked, seconds in zip(run.blocked_seconds, run.train_seconds, strict=True)
    ]
    return {
        "retrievals": _mean(of(run.retrievals)),
        "skipped": _mean(of(run.skipped)),
        "failed": _mean(of(run.failed)),
        "delayed_pulls": _sum(run.delayed_pulls),
        "received_mb": _mean(of(run.bytes_received), 1e-6),
        "serving_mb": _mean(run.of_serving(run.bytes_received), 1e-6),
        "finish_mb": _mean(of(run.finish_bytes), 1e-6),
        "accuracy": _mean(accuracies),
        "accuracy_worst": min(accuracies, default=None),
        "accuracy_before_finish": _mean(of(run.test_accuracy_before_finish)),
        "accuracy_averaged": run.consensus_accuracy,
        "loss": _mean(losses),
        "loss_worst": max(losses, default=None),
        "loss_before_finish": _mean(of(run.test_loss_before_finish)),
        "loss_averaged": run.consensus_loss,
        "bits_per_character": _mean(of(run.test_bits_per_character)),
        "train_seconds": max(_present(of(run.train_seconds)), default=None),
        "wall_seconds": run.wall_seconds,
        "blocked": _mean(fractions),
    }


def _means(group: Group, own: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: own[name].mean if name in own else None for name in group.measured[0]}


def _counted(runs: Sequence[Summary]) -> dict[str, Any]:
    """Return the counts of faults and of peers of all runs together, and whether each run ended with one model."""
    agreements = [run.agreed for run in runs]

    def total(name: str) -> float | None:
        return _sum([value for run in runs for value in getattr(run, name)])

    return {
        "agreed": False if False in agreements else None if None in agreements else True,
        "lost": sum(len(run.lost) for run in runs),
        "stopped": sum(len(run.stopped) for run in runs),
        "set_back": _sum([max(_present(run.set_back), default=None) for run in runs]),
        **{name: total(name) for name in SUMMED},
    }


def _paired(group: Group, first: Group) -> dict[str, Estimate]:
    """Return the mean differences from the runs of another group with the same seeds; none if one was stopped."""
    if group.is_cut or first.is_cut:
        return {}
    others = {run.seed: figures for run, figures in zip(first.runs, first.measured, strict=True)}
    found = {}
    for name in group.measured[0]:
        differences = [
            own - other
            for run, figures in zip(group.runs, group.measured, strict=True)
            if (own := figures[name]) is not None and (other := others.get(run.seed, {}).get(name)) is not None
        ]
        if differences:
            found[name] = estimate(differences)
    return found


def _fixed_period(
    group: Group, own: Mapping[str, Estimate], groups: Sequence[Group], means: Sequence[Mapping[str, Estimate]]
) -> FixedPeriod | None:
    """Return what a fixed period with as many retrievals reached; nothing is assumed beyond the measured periods."""
    taken = own.get("retrievals")
    if group.is_cut or _is_fixed(group.policy) or taken is None or taken.mean <= 0:
        return None
    periods = sorted(
        (
            (found["retrievals"].mean, other.name, found)
            for other, found in zip(groups, means, strict=True)
            if other.setting == group.setting and _is_fixed(other.policy) and not other.is_cut and "retrievals" in found
        ),
        key=lambda period: period[0],
    )
    for (fewer, below, low), (more, above, high) in itertools.pairwise(periods):
        if 0 < fewer <= taken.mean <= more and fewer < more:
            share = math.log(taken.mean / fewer) / math.log(more / fewer)
            names = [name for name in REACHED if name in low and name in high]
            figures = {name: low[name].mean + share * (high[name].mean - low[name].mean) for name in names}
            return FixedPeriod((below, above), figures)
    return None


def _policy(spec: str) -> Policy | str:
    """Return the policy of a run, which may be written in several ways; one that only its script knows, as text."""
    try:
        return policies.parse(spec)
    except UsageError:
        return spec


def _is_fixed(spec: str) -> bool:
    """Return whether a policy is a plain fixed period."""
    policy = _policy(spec)
    return isinstance(policy, Tau) and policy == Tau(policy.period)


def _present(figures: Figures) -> list[float]:
    return [value for value in figures if value is not None]


def _mean(figures: Sequence[float | None], unit: float = 1.0) -> float | None:
    present = [value for value in figures if value is not None]
    return sum(present) / len(present) * unit if present else None


def _sum(figures: Figures) -> float | None:
    present = _present(figures)
    return sum(present) if present else None
