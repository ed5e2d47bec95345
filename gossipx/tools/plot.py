"""``gossipx compare --plot``: curves of runs, read from their directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.launch.directory import CONFIG_FILE
from gossipx.metrics import curves, plot
from gossipx.metrics.compare import Group, grouped
from gossipx.metrics.plot import Drawn
from gossipx.metrics.summary import Summary
from gossipx.tools.recorded import setting_of


def draw(runs: Sequence[tuple[Path, Summary]], target: Path) -> None:
    """Plot runs to an image file; runs that differ only in their seeds share a line.

    Args:
        runs: the runs' directories and summaries.
        target: a png or svg file.

    Raises:
        UsageError: a run has no curves, the target is not an image file, or matplotlib is not installed.
        GossipxError: the image cannot be written.
    """
    plot.check_target(target)
    places = {id(summary): path if path.is_dir() else path.parent for path, summary in runs}
    summaries = [summary for _, summary in runs]
    groups = grouped(summaries, [setting_of(path) for path, _ in runs])
    plot.draw([_drawn(group, [places[id(run)] for run in group.runs]) for group in groups], target)


def _drawn(group: Group, directories: Sequence[Path]) -> Drawn:
    for directory in directories:
        if not (directory / CONFIG_FILE).is_file():
            raise UsageError("nothing to plot: the directory has no run", directory)
    own = group.estimates()
    skipped, failed = (own[name].mean if name in own else 0.0 for name in ("skipped", "failed"))
    return Drawn(group.shown, group.policy, curves.read(*directories), skipped, failed)
