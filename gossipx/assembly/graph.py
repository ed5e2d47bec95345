"""The exchange schedule of a run: which peers exchange models with each other, and in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gossipx import topology
from gossipx.errors import UsageError
from gossipx.settings.sections import RunConfig
from gossipx.topology import schedules, weights
from gossipx.topology.schedules import Schedule


def build_schedule(config: RunConfig, size: int, hosts: Sequence[str] = ()) -> Schedule:
    """Return the schedule over the run's topology.

    Args:
        size: number of peers in the run.
        hosts: the host of each rank; peers on one host form a site if the topology defines no sites.

    Raises:
        UsageError: the topology, the schedule or the weights are invalid, or exclude each other.
    """
    graph = topology.load(config.sync.topology, size, config.run.seed)
    weights.check(config.sync.weights, graph)
    if config.sync.mode == "pushpull" and graph.edge_shares:
        raise UsageError(
            f"--mode pushpull averages two models equally, and '{graph.name}' has edge weights: leave one out"
        )
    sites = graph.sites or tuple(hosts.index(host) for host in hosts)
    return schedules.parse(config.sync.schedule, dataclasses.replace(graph, sites=sites))
