"""Who exchanges models with whom: graphs, whose turn it is, what share is taken, and what follows from these.

An edge i → j means that i turns to j: i pulls j's model (and, where models are pushed, pushes its own to j). In an
undirected graph both may turn to each other.
"""

from gossipx.topology.files import load, shipped
from gossipx.topology.graphs import Topology
from gossipx.topology.rounds import Meeting, agreement_meeting, agreement_rounds

__all__ = [
    "Meeting",
    "Topology",
    "agreement_meeting",
    "agreement_rounds",
    "load",
    "shipped",
]
