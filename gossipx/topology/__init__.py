"""Topologies: which peers exchange models, in which order (schedules), with which weights, and an analysis of these.

An edge i → j means that i initiates exchanges with j: i pulls j's model or, in runs that push, pushes its own to j. In
an undirected graph both may initiate.
"""

from gossipx.topology.files import shipped, topology_from
from gossipx.topology.graphs import Topology
from gossipx.topology.rounds import RoundPart, part_in_round, wave_rounds

__all__ = [
    "RoundPart",
    "Topology",
    "part_in_round",
    "shipped",
    "topology_from",
    "wave_rounds",
]
