"""``gossipx compare --plot``: what is drawn of runs, from their directories."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from gossipx import topology
from gossipx.assembly.hub import elastic_settings
from gossipx.assembly.server_settings import server_ranks
from gossipx.config import files
from gossipx.config.settings import RunConfig
from gossipx.errors import UsageError
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE
from gossipx.launch.hosts import read_hosts
from gossipx.metrics import curves, plot
from gossipx.metrics.plot import Drawn, Graph
from gossipx.metrics.summary import Summary

log = logging.getLogger("gossipx")


def draw(runs: Sequence[tuple[Path, Summary]], target: Path) -> None:
    """Draw runs into a picture.

    Args:
        runs: their directories and summaries.
        target: png or svg.

    Raises:
        UsageError: a run that has no curves, a target that is no picture, or matplotlib is not installed.
        GossipxError: the picture cannot be written.
    """
    plot.check_target(target)
    plot.draw([_drawn(path, summary) for path, summary in runs], target)


def _drawn(path: Path, summary: Summary) -> Drawn:
    directory = path if path.is_dir() else path.parent
    if not (directory / CONFIG_FILE).is_file():
        raise UsageError("nothing to plot: no run is there, with its curves", directory)
    settings = files.resolve(files.load(directory / CONFIG_FILE))
    names = tuple(line.name for line in read_hosts(directory / HOSTS_FILE))
    return Drawn(summary.name, summary.policy, curves.read(directory), graph_of(settings, names))


def graph_of(settings: RunConfig, names: tuple[str, ...]) -> Graph:
    """Who exchanges with whom in a run.

    Args:
        settings: the run's.
        names: of its peers, by rank.
    """
    ranks = range(len(names))
    around = server_ranks(settings, names)
    if around is not None:
        edges = tuple((one, other) for other in around for one in ranks if one != other)
        return Graph("parameter server", names, _once(edges), centres=around)
    hub = elastic_settings(settings, names)
    if hub is not None:
        return Graph("hub", names, tuple((one, hub.rank) for one in ranks if one != hub.rank), centres=(hub.rank,))
    if settings.sync.exchange == "waves":
        return Graph("waves", names, tuple((one, other) for one in ranks for other in ranks if one < other))
    title = Path(settings.sync.topology).name
    try:
        made = topology.load(settings.sync.topology, len(names), settings.run.seed)
    except UsageError as error:  # the run had its file, which need not be where this is called
        log.warning("%s: the picture has no edges of it", error)
        return Graph(f"{title} (not found)", names, ())
    edges = tuple((one, other) for one in ranks for other in made.neighbours[one])
    return Graph(title, names, edges if made.directed else _once(edges), made.directed)


def _once(edges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted({(min(edge), max(edge)) for edge in edges}))
