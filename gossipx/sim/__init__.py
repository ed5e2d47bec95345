"""Roles in virtual time over a modelled network: the same decisions as in real processes, replayed from a seed."""

from gossipx.sim.network import Network
from gossipx.sim.peer import SimPeer
from gossipx.sim.world import Entry, World

__all__ = ["Entry", "Network", "SimPeer", "World"]
