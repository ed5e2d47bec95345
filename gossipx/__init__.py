"""Decentralized peer-to-peer gossip training for PyTorch.

The public names are loaded when they are first used, so that ``gossipx --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossipx import parts, policies
    from gossipx.comm import CommManager
    from gossipx.drive.peer import Peer
    from gossipx.launch.join import join
    from gossipx.launch.modular import initialize
    from gossipx.sync import SyncManager

__all__ = ["CommManager", "Peer", "SyncManager", "initialize", "join", "parts", "policies"]

_HOMES = {
    "CommManager": "gossipx.comm",
    "Peer": "gossipx.drive.peer",
    "SyncManager": "gossipx.sync",
    "initialize": "gossipx.launch.modular",
    "join": "gossipx.launch.join",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("parts", "policies"):
        return importlib.import_module(f"gossipx.{name}")
    raise AttributeError(f"module 'gossipx' has no attribute '{name}'")
