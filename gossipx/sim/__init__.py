"""A simulator: the peers of real processes in virtual time, over a modelled network.

Everything random comes from one seed, so that a run with faults can be replayed exactly.
"""

from gossipx.sim.network import Network
from gossipx.sim.peer import SimPeer
from gossipx.sim.world import Entry, World

__all__ = ["Entry", "Network", "SimPeer", "World"]
