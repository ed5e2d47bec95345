"""Decentralized peer-to-peer gossip training for PyTorch.

The public names are imported on first use, so that ``gossipx --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossipx import codecs, optimizers, parts, policies, recorders
    from gossipx.comm import CommManager
    from gossipx.launch.loops.attach import attach, get_solver
    from gossipx.launch.loops.initialize import initialize
    from gossipx.launch.loops.join import join
    from gossipx.runtime.training.peer import Peer
    from gossipx.solver.solver import Solver
    from gossipx.sync import SyncManager

__all__ = [
    "CommManager",
    "Peer",
    "Solver",
    "SyncManager",
    "attach",
    "codecs",
    "get_solver",
    "initialize",
    "join",
    "optimizers",
    "parts",
    "policies",
    "recorders",
]

_HOMES = {
    "CommManager": "gossipx.comm",
    "Peer": "gossipx.runtime.training.peer",
    "Solver": "gossipx.solver.solver",
    "SyncManager": "gossipx.sync",
    "attach": "gossipx.launch.loops.attach",
    "get_solver": "gossipx.launch.loops.attach",
    "initialize": "gossipx.launch.loops.initialize",
    "join": "gossipx.launch.loops.join",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("codecs", "optimizers", "parts", "policies", "recorders"):
        return importlib.import_module(f"gossipx.{name}")
    raise AttributeError(f"module 'gossipx' has no attribute '{name}'")
