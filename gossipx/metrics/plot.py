"""Plots that compare runs: accuracy or loss against traffic and time, retrievals, and the graph of exchanges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossipx.errors import GossipxError, UsageError, how_to_install
from gossipx.metrics.curves import EMPTY, FIGURES, Band, Curves
from gossipx.specs import texts

SUFFIXES = (".png", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that people with colour blindness can distinguish (Okabe and Ito, 2008)."""
STYLES = ("-", "--", ":", "-.")
"""Line styles; the second and later ones are used from the eighth run on."""
NAMED = 12
"""Largest number of peers whose names are drawn beside the nodes of a single graph; more names would cover it."""
NUMBERED = 40
"""Largest number of peers whose ranks are drawn in the nodes of a single graph; half as many if there are several."""
GRAPHS = 4
"""Largest number of graphs drawn; a note counts the rest."""
LONGEST = 44
"""Largest number of characters per run in the legend."""


@dataclass(frozen=True)
class Graph:
    """The graph of which peers exchange models.

    Attributes:
        title: name of the topology.
        names: peer names, by rank.
        edges: pairs of ranks; from the first to the second if directed.
        directed: whether edges have a direction.
        centres: ranks of a hub or of servers.
    """

    title: str
    names: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    directed: bool = False
    centres: tuple[int, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """A run, or runs that differ only in their seeds.

    Attributes:
        name: of the run.
        by: policy or sync model.
        curves: of its peers.
        graph: of its exchanges.
        skipped, failed: decisions to exchange that had no effect, and failed exchanges, means over peers.
    """

    name: str
    by: str
    curves: Curves
    graph: Graph
    skipped: float = 0.0
    failed: float = 0.0


def check_target(target: Path) -> None:
    """Check that a plot can be written to ``target``, before any work is done.

    Raises:
        UsageError: it cannot, or matplotlib is not installed.
    """
    texts.check_target("--plot", target, SUFFIXES)
    check_library("--plot")


def check_library(option: str) -> None:
    """Check that matplotlib is installed.

    Raises:
        UsageError: it is not; names the option that needs it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{option} needs matplotlib: {how_to_install('plots')}") from error


def draw(runs: Sequence[Drawn], target: Path) -> None:
    """Draw the runs to ``target``, as png or svg; equal runs give equal bytes.

    Raises:
        GossipxError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "gossipx", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(11, 7.6), layout="constrained")
        cells = figure.add_gridspec(2, 2)
        panels = [figure.add_subplot(cells[place]) for place in ((0, 0), (0, 1), (1, 0))]
        figure_drawn = min((run.curves.figure for run in runs), key=FIGURES.index)
        drawn = [run.curves.figure == figure_drawn for run in runs]  # a loss has no place on an axis of accuracies
        traffic = [run.curves.by_megabytes if is_drawn else EMPTY for run, is_drawn in zip(runs, drawn, strict=True)]
        seconds = [run.curves.by_seconds if is_drawn else EMPTY for run, is_drawn in zip(runs, drawn, strict=True)]
        _curves(panels[0], traffic, "MB received per peer", f"test {figure_drawn}")
        _curves(panels[1], seconds, "seconds", f"test {figure_drawn}")
        _curves(panels[2], [run.curves.retrievals for run in runs], "iterations", "retrievals per peer")
        titles = (f"{figure_drawn} by traffic", f"{figure_drawn} by time", "retrievals")
        for panel, title in zip(panels, titles, strict=True):
            panel.set_title(title.capitalize())
        handles = panels[0].get_lines()
        labels = [_labelled(run) for run in runs]
        columns = max(1, min(len(runs), 3))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)
        _graphs(figure, cells[1, 1], list(dict.fromkeys(run.graph for run in runs)))
        metadata = {"Date": None} if target.suffix.lower() == ".svg" else {"Software": None}
        try:
            figure.savefig(target, dpi=150, metadata=metadata)
        except OSError as error:
            raise GossipxError(f"{target}: the plot cannot be written ({error.strerror})") from error


def _curves(panel: Any, bands: Sequence[Band], x: str, y: str) -> None:
    for number, band in enumerate(bands):
        colour = COLOURS[number % len(COLOURS)]
        style = STYLES[number // len(COLOURS) % len(STYLES)]
        marker = "o" if len(band.x) < 30 else ""
        panel.plot(band.x, band.mean, color=colour, linestyle=style, marker=marker, markersize=3, linewidth=1.5)
        panel.fill_between(band.x, band.least, band.most, color=colour, alpha=0.15, linewidth=0)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.set_xlim(left=0)
    panel.grid(alpha=0.3)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _graphs(figure: Any, cell: Any, graphs: Sequence[Graph]) -> None:
    shown = graphs[:GRAPHS]
    columns = 1 if len(shown) == 1 else 2
    places = cell.subgridspec(math.ceil(len(shown) / columns), columns)
    for number, graph in enumerate(shown):
        panel = figure.add_subplot(places[number // columns, number % columns])
        alone = len(shown) == 1
        has_numbers = len(graph.names) <= NUMBERED // (1 if alone else 2)
        _graph(panel, graph, has_names=alone and len(graph.names) <= NAMED, has_numbers=has_numbers)
        panel.set_title(f"{graph.title}, {len(graph.names)} peers")
        if number == GRAPHS - 1 and len(graphs) > GRAPHS:
            panel.text(0.5, -0.05, f"and {len(graphs) - GRAPHS} more", ha="center", transform=panel.transAxes)


def _graph(panel: Any, graph: Graph, has_names: bool, has_numbers: bool) -> None:
    """Draw a graph with ranks inside the nodes and names beside them, each if there is room."""
    import networkx as nx

    drawn = nx.DiGraph() if graph.directed else nx.Graph()
    drawn.add_nodes_from(range(len(graph.names)))
    drawn.add_edges_from(graph.edges)
    outer = [rank for rank in drawn if rank not in graph.centres]
    shells = [list(graph.centres), outer] if graph.centres and outer else [list(drawn)]
    places = nx.shell_layout(drawn, shells) if len(drawn) > 1 else {0: (0.0, 0.0)}
    colours = ["#D55E00" if rank in graph.centres else "#0072B2" for rank in drawn]
    size = max(15, 220 - 4 * len(drawn))
    style = {"alpha": max(0.08, min(0.6, 40 / max(len(graph.edges), 1))), "node_size": size}
    nx.draw_networkx_edges(drawn, places, ax=panel, **style, **({"arrowsize": 8} if graph.directed else {}))
    nx.draw_networkx_nodes(drawn, places, ax=panel, node_size=size, node_color=colours, linewidths=0)
    if has_numbers:
        nx.draw_networkx_labels(drawn, places, ax=panel, font_size=7, font_color="white")
    for rank, (x, y) in places.items() if has_names else ():
        side = "left" if x > 0.1 else "right" if x < -0.1 else "center"
        up = 0 if side != "center" else math.copysign(0.2, y or 1)
        panel.annotate(
            _short(graph.names[rank], 26),
            (x + math.copysign(0.12, x) * (side != "center"), y + up),
            ha=side,
            va="center",
        )
    # Nodes lie within the unit circle. Automatic limits would leave no height for a graph that is a line.
    panel.set_xlim(-1.6 if has_names else -1.2, 1.6 if has_names else 1.2)
    panel.set_ylim(-1.3, 1.3)
    panel.set_aspect("equal")
    panel.set_axis_off()


def _labelled(run: Drawn) -> str:
    """Return the legend entry of a run; the policy is shortened last, because runs differ in it."""
    name = _short(f"{_short(run.name, max(LONGEST - len(run.by) - 2, LONGEST // 3))}: {run.by}")
    counts = [f"{count:.1f} {what}" for count, what in ((run.skipped, "skipped"), (run.failed, "failed")) if count]
    return "\n".join([name, *([", ".join(counts)] if counts else [])])


def _short(text: str, most: int = LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
