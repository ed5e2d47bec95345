"""The exchange schedule of a run: which peers exchange models with each other, and in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gossipx.errors import UsageError
from gossipx.settings.modes import HasPartners, Pairs
from gossipx.settings.sections import RunConfig
from gossipx.topology import topology_from
from gossipx.topology.schedules import Schedule, schedule_from
from gossipx.topology.weights import check_weights


def build_schedule(config: RunConfig, size: int, hosts: Sequence[str] = ()) -> Schedule:
    """Return the schedule over the run's topology.

    Args:
        size: number of peers in the run.
        hosts: the host of each rank; peers on one host form a site if the topology defines no sites.

    Raises:
        UsageError: the topology, the schedule or the weights are invalid, or exclude each other.
    """
    partners = config.mode if isinstance(config.mode, HasPartners) else HasPartners()
    graph = topology_from(partners.topology, size, config.run.seed)
    check_weights(partners.weights, graph)
    if isinstance(config.mode, Pairs) and graph.edge_shares:
        raise UsageError(
            f"--mode pushpull averages two models equally, and '{graph.name}' has edge weights: leave one out"
        )
    sites = graph.sites or tuple(hosts.index(host) for host in hosts)
    return schedule_from(partners.schedule, dataclasses.replace(graph, sites=sites))
