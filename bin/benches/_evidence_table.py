"""Table and figures of bin/bench evidence, from the points of all runs over one link."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from _bench.tables import Table, interval
from _evidence_systems import DDP, SYSTEMS, shown
from _evidence_task import WORKLOADS

from gossipx.tasks.costs import published_sizes

Point = Mapping[str, float]
"""The state of a run after a step; see :func:`_evidence_task.curve`."""
NEAR = 0.1
"""How far above DDP's final loss a system counts as close to it."""
MARGIN = 0.05
"""Share of bytes or seconds that is noise."""
LOSS_GOALS = {0.05: 500, 0.10: 1000, 0.15: 3000}
"""How many times fewer bytes than DDP gossipx must need, by how much higher the loss of text may be."""
ACCURACY_GOALS = {0.0: 300, 0.005: 1000}
"""The same for images, by how much lower the accuracy may be than that of ``tau:10``."""
SOONER = ("100mbit", 20)
"""The link over which gossipx must be close to DDP's loss this many times sooner than DDP."""
BASE = "tau:10"


@dataclass
class Comparison:
    """Systems that trained the same task over the same links.

    ``runs`` are points by system, one list per seed; ``ends`` are the last points of runs with other periods too, means
    over seeds; ``left_out`` names the systems without results.
    """

    task: str
    rate: str
    peers: int
    steps: int
    runs: dict[str, list[Sequence[Point]]]
    periods: Mapping[str, int]
    ends: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    left_out: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.workload = WORKLOADS[self.task]
        self._ends = {name: [self.curve(name)[-1], *self.ends.get(name, ())] for name in self.runs}
        self._reached = {name: self._reach(name) for name in self.runs}

    def title(self) -> str:
        """Return what was compared, and what the table leaves out."""
        model = self.workload.model
        average = 2 * (self.peers - 1) / self.peers * 4 * sum(count for _, count in published_sizes(model)) / 1e6
        seeds = max(map(len, self.runs.values()), default=0)
        return (
            f"{self.task} ({self.workload.partition}), {model}, {self.peers} peers, {self.rate}, {self.steps} steps,"
            f" seeds: {seeds}\n{self.workload.figure} of the average of all models; that last average is not in the"
            f" bytes (an all-reduce: {average:.1f} MB per peer)"
            + (f"\nwithout results: {', '.join(map(shown, self.left_out))}" if self.left_out else "")
        )

    def table(self) -> Table:
        """Return a row per system, and the figures, with the goals that apply."""
        figure, near = self.workload.figure, f"DDP's loss + {NEAR:g}"
        headings = ("system", "period", figure, "own models", "MB per peer", "of DDP's", "s")
        table = Table(self.title(), (*headings, f"s to {near}", f"MB to {near}", "ahead of gossipx"))
        ahead = {axis: self.ahead(axis) for axis in ("bytes", "seconds")}
        for name, runs in self.runs.items():
            last = [points[-1][figure] for points in runs]
            half = f" ± {interval(last):.3f}" if len(last) > 1 else ""
            whole, reached = self._share(name), self._reached[name]
            table.row(
                shown(name),
                self.periods.get(name, ""),
                f"{statistics.fmean(last):.3f}{half}",
                f"{self.mean(name, 'own'):.3f}" if all("own" in points[-1] for points in runs) else "",
                f"{self.mean(name, 'bytes') / 1e6:.2f}",
                "" if whole is None else f"1/{1 / whole:.0f}" if whole < 0.5 else f"{whole:.2f}",
                f"{self.mean(name, 'seconds'):.1f}",
                "–" if reached is None else f"{reached['seconds']:.1f}",
                "–" if reached is None else f"{reached['bytes'] / 1e6:.2f}",
                ", ".join(axis for axis, names in ahead.items() if name in names),
            )
        where = f"{self.task}, {self.rate}"
        for name in self.runs:
            for key, unit in ((figure, ""), ("bytes", "bytes"), ("seconds", "s")):
                reference = self.mean(DDP, key) if DDP in self.runs else None
                table.figure(f"{where}, {shown(name)}: {key}", self.mean(name, key), unit, reference=reference)
        if self._own():
            rivals = [name for name in self.left_out if not SYSTEMS[name].is_gossipx]
            unknown = f", without a result of {', '.join(rivals)}" if rivals else ""
            for axis, names in ahead.items():
                name, met = f"{where}: ahead of gossipx in error and {axis}{unknown}", not names and not rivals
                table.figure(name, len(names), "systems", most=0, met=met)
            self._tell_goals(table, where)
        return table

    def mean(self, name: str, key: str) -> float:
        """Return the mean over seeds of a value at the end."""
        return statistics.fmean(points[-1][key] for points in self.runs[name])

    def error(self, name: str) -> float:
        """Return the mean over seeds of the loss, or of one minus the accuracy, at the end."""
        return statistics.fmean(self.workload.error(points[-1]) for points in self.runs[name])

    def curve(self, name: str) -> list[dict[str, float]]:
        """Return the mean over seeds of each point."""
        return [mean(points) for points in zip(*self.runs[name], strict=True)]

    def ahead(self, axis: str) -> list[str]:
        """Return the other systems with both lower loss and fewer bytes or seconds than one of the best of gossipx.

        The best of gossipx are its runs, with any period, that none of its other runs is ahead of. One is ahead if it
        is lower in both, and in one of them by more than noise.

        Args:
            axis: ``bytes`` or ``seconds``.
        """
        own = [end for name in self._own() for end in self._ends[name]]
        best = [end for end in own if not any(self._is_ahead(other, end, axis) for other in own)]
        rivals = [name for name in self.runs if not SYSTEMS[name].is_gossipx]
        return [
            name
            for name in rivals
            if any(self._is_ahead(end, other, axis) for end in self._ends[name] for other in best)
        ]

    def _is_ahead(self, one: Point, other: Point, axis: str) -> bool:
        less, cheaper = self.workload.error(other) - self.workload.error(one), one[axis] / max(other[axis], 1.0)
        return less > 0 and cheaper < 1 and (less > self.workload.noise or cheaper < 1 - MARGIN)

    def _share(self, name: str) -> float | None:
        """Return bytes as a share of DDP's."""
        return self.mean(name, "bytes") / self.mean(DDP, "bytes") if DDP in self.runs else None

    def _reach(self, name: str) -> dict[str, float] | None:
        """Return mean seconds and bytes to DDP's loss + NEAR with the same seed; None: not reached with some seed."""
        if DDP not in self.runs:
            return None
        pairs = zip(self.runs[name], self.runs[DDP], strict=True)
        each = [reach(points, ddp[-1]["loss"] + NEAR) for points, ddp in pairs]
        found = [one for one in each if one is not None]
        if len(found) < len(each):
            return None
        return {key: statistics.fmean(one[key] for one in found) for key in ("seconds", "bytes")}

    def _tell_goals(self, table: Table, where: str) -> None:
        if DDP not in self.runs:
            return
        if self.workload.figure == "loss":
            for more, times in LOSS_GOALS.items():
                name = f"{where}: fewer bytes than DDP, at most {more:g} above its loss"
                table.figure(name, self._fewest(self.error(DDP) + more), "times", least=times)
        elif BASE in self.runs:
            for less, times in ACCURACY_GOALS.items():
                name = f"{where}: fewer bytes than DDP, at most {less:g} below the accuracy of {BASE}"
                table.figure(name, self._fewest(self.error(BASE) + less), "times", least=times)
        if self.rate == SOONER[0] and self.workload.figure == "loss":
            name = f"{where}: sooner than DDP at its loss + {NEAR:g}"
            table.figure(name, self._soonest(), "times", least=SOONER[1])

    def _fewest(self, error: float) -> float:
        """Return DDP's bytes divided by the fewest of gossipx with at most this error; 0: it is never that low."""
        ends = [end for name in self._own() for end in self._ends[name]]
        fewest = [end["bytes"] for end in ends if self.workload.error(end) <= error]
        return self.mean(DDP, "bytes") / max(min(fewest), 1.0) if fewest else 0.0

    def _soonest(self) -> float:
        """Return DDP's seconds to come close to its loss, divided by the fewest of gossipx; 0: it never does."""
        seconds = [one["seconds"] for name in self._own() if (one := self._reached[name]) is not None]
        ddp = self._reached[DDP]
        assert ddp is not None  # its last point is below its loss + NEAR
        return ddp["seconds"] / min(seconds) if seconds else 0.0

    def _own(self) -> list[str]:
        return [name for name in self.runs if SYSTEMS[name].is_gossipx]


def mean(points: Sequence[Point]) -> dict[str, float]:
    """Return the mean of each value of the points, for example of several seeds."""
    return {key: statistics.fmean(point[key] for point in points) for key in points[0]}


def stretched(whole: Sequence[Point], timed: Sequence[Point]) -> list[dict[str, float]]:
    """Return the points of a synchronous system's run over a fast link with the seconds of another link.

    ``timed`` is the run's begin over that link: its mean after the first point is the time of a step.
    """
    first, last = timed[0], timed[-1]
    seconds = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
    return [{**point, "seconds": point["step"] * seconds} for point in whole]


def reach(points: Sequence[Point], loss: float) -> dict[str, float] | None:
    """Return seconds and bytes at which a run first has a loss, on straight lines between its points."""
    for place, point in enumerate(points):
        if point["loss"] <= loss:
            if place == 0:
                return {key: point[key] for key in ("seconds", "bytes")}
            before = points[place - 1]
            share = (before["loss"] - loss) / (before["loss"] - point["loss"])
            return {key: before[key] + share * (point[key] - before[key]) for key in ("seconds", "bytes")}
    return None
