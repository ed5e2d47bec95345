"""Figures 3 to 6 of 3LC from the runs of bin/bench compression, and the curves of bin/bench evidence."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from _bench.cached_runs import CachedRuns
from _evidence_systems import PERIODS, SYSTEMS, shown
from compression import LINK_STEPS, link_seconds

mpl.use("Agg")
from matplotlib import pyplot, ticker

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#F0E442", "#7F3C8D")
"""A palette for colour-blind readers (Okabe, Ito, 2008)."""
MARKS = "osv^D<>PX*"
RUNNING = ("none", "stochastic3", "topk:ratio=0.05,sample=0.01", "localsteps:k=2", "3lc:sparsity=1")
"""Designs of Figure 4."""
NOTHING = 1e5
"""Bytes of a run without exchanges, at most; it is not drawn, since it would stretch the logarithmic axis."""
SHOWN = 6
"""Range of the accuracy axis below the best, in points: designs that do not learn would compress the others."""
SEEN = ("3lc:sparsity=1,small=1", "3lc:sparsity=1.75,small=1")


def draw(plan: Any, kept: CachedRuns, folder: Path) -> None:
    """Write each figure whose runs are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, drawn in {
        "figure-3.png": lambda: _over_time(plan, kept, plan.designs, list(LINK_STEPS)),
        "figure-4.png": lambda: _running(plan, kept),
        "figure-5.png": lambda: _over_time(plan, kept, plan.ternary, ["10mbit"]),
        "figure-6.png": lambda: _bits(plan, kept),
    }.items():
        try:
            figure = drawn()
        except KeyError as missing:
            print(f"{file} is not drawn: run {missing} is missing")
            continue
        figure.savefig(folder / file, dpi=120)
        pyplot.close(figure)


def _over_time(plan: Any, kept: CachedRuns, designs: dict[str, str], rates: Sequence[str]) -> Any:
    """Plot accuracy over training time, for a quarter of the steps up to all."""
    figure, panels = pyplot.subplots(1, len(rates), figsize=(1 + 4.5 * len(rates), 4.2), squeeze=False, sharey=True)
    for panel, rate in zip(panels[0], rates, strict=True):
        seconds = link_seconds(rate, plan.specs, plan.rounds, kept)
        for place, (name, spec) in enumerate(designs.items()):
            shares = plan.accuracies(spec, kept)
            times = [seconds[spec] * plan.steps * share / 100 / 3600 for share in shares]
            look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKS[place % len(MARKS)], "markersize": 5}
            panel.plot(times, list(shares.values()), label=name, linewidth=1.2, **look)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(ticker.NullFormatter())
        panel.set_xlabel(f"hours of training at {rate.replace('mbit', ' Mbit/s')}")
        panel.grid(alpha=0.3)
    best = max(accuracy for spec in designs.values() for accuracy in plan.accuracies(spec, kept).values())
    panels[0][0].set_ylim(best - SHOWN, best + 0.5)
    panels[0][0].set_ylabel("accuracy, %, median of runs")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.set_layout_engine("constrained")
    return figure


def _running(plan: Any, kept: CachedRuns) -> Any:
    """Plot loss and accuracy during training."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    names = {spec: name for name, spec in plan.designs.items()}
    for place, spec in enumerate(spec for spec in RUNNING if spec in names):
        made = plan.of(spec, kept)
        losses = [statistics.fmean(row) for row in zip(*(one["losses"] for one in made), strict=True)]
        judged = [statistics.fmean(point[1] for point in row) for row in zip(*(o["judged"] for o in made), strict=True)]
        look = {"color": COLOURS[place], "linewidth": 1.2}
        left.plot(_steps(len(losses), plan.steps), losses, label=names[spec], **look)
        right.plot(_steps(len(judged), plan.steps), [100 * one for one in judged], marker=MARKS[place], **look)
    for panel, label in ((left, "loss of the workers' batches"), (right, "accuracy on test images, %")):
        panel.set_xlabel("steps")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    left.set_yscale("log")
    left.legend(fontsize=8)
    return figure


def _bits(plan: Any, kept: CachedRuns) -> Any:
    """Plot bits per value during training, by direction."""
    figure, panels = pyplot.subplots(1, len(SEEN), figsize=(10, 4.2), layout="constrained")
    jobs = {job["spec"]: job for job in plan.jobs("ratios")}
    for panel, spec in zip(panels, SEEN, strict=True):
        run = kept[jobs[spec]]
        for place, way in enumerate(("push", "pull")):
            steps = _steps(len(run[way]), plan.ratio_steps)
            panel.plot(steps, run[way], label=f"{way}es" if way == "push" else f"{way}s", color=COLOURS[place])
        panel.axhline(1.6, color="#999999", linestyle="--", linewidth=1, label="without zero-run encoding")
        panel.set_title(spec.removesuffix(",small=1"), fontsize=10)
        panel.set_xlabel(f"steps of {plan.model}")
        panel.set_ylabel("bits per value")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    return figure


def _steps(count: int, last: int) -> list[float]:
    return [last * (place + 1) / count for place in range(count)]


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
