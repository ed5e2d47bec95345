"""The peer: a pure state machine for one model replica that trains on its own data and exchanges models with others."""

from gossipx.peer.role import PeerRole

__all__ = ["PeerRole"]
