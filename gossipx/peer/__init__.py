"""The peer: one model replica that trains on its own data and pulls models of others, as a pure state machine."""

from gossipx.peer.role import PeerRole
from gossipx.peer.settings import PeerSettings

__all__ = ["PeerRole", "PeerSettings"]
