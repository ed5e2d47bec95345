"""``gossipx compare --plot``: curves and communication graphs of runs, read from their directories."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.hub import rank_of_hub
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE
from gossipx.launch.hosts import read_hosts
from gossipx.metrics import curves, plot
from gossipx.metrics.compare import Group, grouped
from gossipx.metrics.plot import Drawn, Graph
from gossipx.metrics.summary import Summary
from gossipx.server.plan import server_ranks
from gossipx.settings import files
from gossipx.settings.modes import Waves
from gossipx.settings.sections import RunConfig
from gossipx.tools.recorded import setting_of
from gossipx.topology import topology_from

log = logging.getLogger("gossipx")


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
    settings = files.resolve(files.load(directories[0] / CONFIG_FILE))
    names = tuple(line.name for line in read_hosts(directories[0] / HOSTS_FILE))
    own = group.estimates()
    skipped, failed = (own[name].mean if name in own else 0.0 for name in ("skipped", "failed"))
    graph = graph_of(settings, names)
    return Drawn(group.shown, group.policy, curves.read(*directories), graph, skipped, failed)


def graph_of(settings: RunConfig, names: tuple[str, ...]) -> Graph:
    """Return the communication graph of a run.

    Args:
        settings: the run's settings.
        names: the peers' names by rank.
    """
    ranks = range(len(names))
    servers = server_ranks(settings, names)
    if servers is not None:
        edges = tuple((one, other) for other in servers for one in ranks if one != other)
        return Graph("parameter server", names, _once(edges), centres=servers)
    hub = rank_of_hub(settings.mode, names)
    if hub is not None:
        return Graph("hub", names, tuple((one, hub) for one in ranks if one != hub), centres=(hub,))
    if isinstance(settings.mode, Waves):
        return Graph("waves", names, tuple((one, other) for one in ranks for other in ranks if one < other))
    given = settings.values["topology"]
    title = Path(given).name
    try:
        graph = topology_from(given, len(names), settings.run.seed)
    except UsageError as error:  # the run's topology file may not exist on this machine
        log.warning("%s: the plot shows no edges", error)
        return Graph(f"{title} (not found)", names, ())
    edges = tuple((one, other) for one in ranks for other in graph.neighbours[one])
    return Graph(title, names, edges if graph.directed else _once(edges), graph.directed)


def _once(edges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return undirected edges without duplicates."""
    return tuple(sorted({(min(edge), max(edge)) for edge in edges}))
