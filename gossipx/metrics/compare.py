"""The comparison of runs, like the paper's Table II, with means over seeds and a fixed period at equal traffic."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossipx import policies
from gossipx.errors import UsageError
from gossipx.figures import LINES, Combine, ComparedLine
from gossipx.metrics.intervals import Estimate, estimate
from gossipx.metrics.summary import PerPeer, Summary
from gossipx.policies import Policy, Tau


@dataclass(frozen=True)
class FixedPeriod:
    """The figures of a fixed period (``tau``) with as many retrievals as another policy.

    Interpolated linearly in the logarithm of the retrievals between two measured periods of the same setting.

    Attributes:
        between: names of the two rows, the one with fewer retrievals first.
        figures: the interpolated figures, by name.
    """

    between: tuple[str, str]
    figures: dict[str, float]


@dataclass(frozen=True)
class Row:
    """One run in the comparison, or several that differ only in their seeds. A field is None without a value.

    Counts of faults and of peers are sums over several runs, other figures are means over them.

    Attributes:
        name: name of the run; of several, what their names have in common.
        runs: names of the runs.
        seeds: their seeds.
        codec: codec of models or gradients; ``none`` if they were sent unencoded.
        reduction: share of the first row's retrievals that this one saves.
        agreed: whether all peers ended with the same model, in all runs.
        lost: number of peers that did not finish.
        stopped: number of peers that were stopped before the finish.
        figures: the values of :data:`gossipx.figures.LINES` by key; None without a value. Each is also an attribute.
        intervals: half the 95 % interval of each mean over several runs, by name of the figure.
        paired: differences from the first row's runs of the same seeds, by name of the figure; empty for the first row,
            and without common seeds.
        fixed_period: a fixed period at equal retrievals; None: this is one, or there are no suitable runs.
    """

    name: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    policy: str
    codec: str
    reduction: float | None
    agreed: bool | None
    lost: int
    stopped: int
    figures: dict[str, float | None]
    intervals: dict[str, float]
    paired: dict[str, Estimate]
    fixed_period: FixedPeriod | None

    def __getattr__(self, name: str) -> float | None:
        figures: dict[str, float | None] = vars(self).get("figures", {})  # empty while an object is being copied
        if name not in figures:
            raise AttributeError(f"a comparison has no figure '{name}'")
        return figures[name]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data: one flat object."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "figures"} | self.figures


REACHED = tuple(line.key for _, line in LINES if line.key.startswith(("accuracy", "loss")))
"""Figures of a row that say how good the models are."""

_Measured = Mapping[str, float | None]
"""The figures of one run that are compared, by key of their lines."""


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
                agreed=_agreed(group.runs),
                lost=sum(len(run.lost) for run in group.runs),
                stopped=sum(len(run.stopped) for run in group.runs),
                figures={line.key: _value(figure.name, line, group.runs, own) for figure, line in LINES},
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
    found = {}
    for figure, line in LINES:
        if line.combine not in (Combine.COUNT, Combine.SEEN):
            value = _combined(run, figure.name, line.combine)
            found[line.key] = None if value is None else value * line.factor
    return found


def _combined(run: Summary, name: str, combine: Combine) -> float | None:
    """Return one number of the figures of a run's peers."""
    figures: PerPeer = getattr(run, name) if combine is not Combine.RUN else [getattr(run, name)]
    match combine:
        case Combine.MEAN:
            return _mean(run.of_training(figures))
        case Combine.SERVING:
            return _mean(run.of_serving(figures))
        case Combine.SHARE:
            pairs = zip(figures, run.train_seconds, strict=True)
            return _mean([None if value is None or not of else value / of for value, of in pairs])
        case Combine.LOWEST:
            return min(_present(run.of_training(figures)), default=None)
        case Combine.HIGHEST:
            return max(_present(run.of_training(figures)), default=None)
        case Combine.SEEN:
            return max(_present(figures), default=None)
    return _sum(figures)


def _value(name: str, line: ComparedLine, runs: Sequence[Summary], means: Mapping[str, Estimate]) -> float | None:
    """Return the value of a line for runs that differ only in their seeds, given their ``means``."""
    if line.combine in (Combine.COUNT, Combine.SEEN):
        return _sum([_combined(run, name, line.combine) for run in runs])
    return means[line.key].mean if line.key in means else None


def _agreed(runs: Sequence[Summary]) -> bool | None:
    """Return whether each run ended with one model."""
    agreements = [run.agreed for run in runs]
    return False if False in agreements else None if None in agreements else True


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


def _present(figures: PerPeer) -> list[float]:
    return [value for value in figures if value is not None]


def _mean(figures: PerPeer) -> float | None:
    present = _present(figures)
    return sum(present) / len(present) if present else None


def _sum(figures: PerPeer) -> float | None:
    present = _present(figures)
    return sum(present) if present else None
