"""The pictures of bin/bench evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from _evidence_systems import PERIODS, SYSTEMS, shown

mpl.use("Agg")
from matplotlib import pyplot

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#F0E442", "#7F3C8D")
"""A palette for colour-blind readers (Okabe, Ito, 2008)."""
MARKS = "osv^D<>PX*"
NOTHING = 1e5
"""Bytes of a run without exchanges, at most; it is not drawn, since it would stretch the logarithmic axis."""


def evidence(comparison: Any, folder: Path) -> None:
    """Write ``TASK-RATE-bytes.png`` and ``-seconds.png``: loss or accuracy of the averaged models against either."""
    for axis, scale, label in (("bytes", 1e6, "MB sent per peer"), ("seconds", 1.0, "seconds of training")):
        figure, panel = pyplot.subplots(figsize=(9, 5), layout="constrained")
        drawn = [name for name in comparison.runs if comparison.mean(name, "bytes") > NOTHING]
        for name in drawn:
            points = [point for point in comparison.curve(name) if point[axis] > 0]  # the axis is logarithmic
            along = [point[axis] / scale for point in points]
            values = [point[comparison.workload.figure] for point in points]
            panel.plot(along, values, markevery=[len(points) - 1], label=shown(name), **_look(name))
        least = min((comparison.mean(name, axis) for name in drawn), default=1.0)
        panel.set_xlim(left=least / scale / 20)  # before its first exchange a system sends next to nothing
        label = f"{label}, {comparison.rate.replace('mbit', ' Mbit/s')}"
        _save(figure, panel, comparison, label, folder / f"{comparison.task}-{comparison.rate}-{axis}.png")


def periods(plan: Any, folder: Path) -> None:
    """Write ``TASK-periods.png``: loss or accuracy against bytes at the end of each run of the search for periods."""
    figure, panel = pyplot.subplots(figsize=(9, 5), layout="constrained")
    drawn = {name: [end for end in plan.ends(name) if end["bytes"] > NOTHING] for name in plan.systems}
    own = [end for name, ends in drawn.items() if SYSTEMS[name].is_gossipx for end in ends]
    best = [end for end in own if not any(_is_below(other, end, plan.workload) for other in own)]
    best.sort(key=lambda end: end["bytes"])
    along, values = [one["bytes"] / 1e6 for one in best], [one[plan.workload.figure] for one in best]
    panel.step(along, values, where="post", color="#0072B2", alpha=0.2, linewidth=8, label="best of gossipx", zorder=0)
    for name, ends in drawn.items():
        if ends:
            along, values = [one["bytes"] / 1e6 for one in ends], [one[plan.workload.figure] for one in ends]
            panel.plot(along, values, label=shown(name), **_look(name))
    label = f"MB sent per peer; a line joins periods of {', '.join(map(str, PERIODS))} steps"
    _save(figure, panel, plan, label, folder / f"{plan.task}-periods.png")


def _is_below(one: Any, other: Any, workload: Any) -> bool:
    """Return whether one run has both a lower loss, or a higher accuracy, and fewer bytes than another."""
    return bool(one["bytes"] < other["bytes"] and workload.error(one) < workload.error(other))


def _save(figure: Any, panel: Any, of: Any, label: str, target: Path) -> None:
    """Finish a picture of a comparison or a plan, and write it."""
    panel.set_xscale("log")
    panel.set_xlabel(label)
    panel.set_ylabel(f"test {of.workload.figure} of the averaged model")
    panel.set_title(f"{of.task}: {of.peers} peers, {of.steps} steps", fontsize=10)
    panel.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8, labelspacing=0.3)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def _look(name: str) -> dict[str, Any]:
    """Return how a system looks, which is the same in all pictures."""
    place, own = list(SYSTEMS).index(name), SYSTEMS[name].is_gossipx
    line = {"linewidth": 2.2, "zorder": 3} if own else {"linewidth": 1, "linestyle": "--", "alpha": 0.7}
    mark = {"marker": MARKS[(place + place // len(COLOURS)) % len(MARKS)], "markersize": 9 if own else 6}
    return {"color": COLOURS[place % len(COLOURS)], **mark, **line}
