"""Who exchanges with whom, and when it is whose turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gossipx import topology
from gossipx.config.settings import RunConfig
from gossipx.errors import UsageError
from gossipx.topology import schedules, weights
from gossipx.topology.schedules import Schedule


def build_schedule(config: RunConfig, size: int, hosts: Sequence[str] = ()) -> Schedule:
    """The schedule over the run's graph.

    Args:
        size: peers in the run.
        hosts: by rank; the sites of a topology that has none of its own.

    Raises:
        UsageError: a topology, schedule or weights that are not right, or do not go together.
    """
    graph = topology.load(config.sync.topology, size, config.run.seed)
    weights.check(config.sync.weights, graph)
    if config.sync.mode == "pushpull" and graph.edge_shares:
        raise UsageError(
            f"--mode pushpull takes half of a model, and '{graph.name}' gives edges weights: leave one out"
        )
    sites = graph.sites or tuple(hosts.index(host) for host in hosts)
    return schedules.parse(config.sync.schedule, dataclasses.replace(graph, sites=sites))
