"""Decentralized peer-to-peer gossip training for PyTorch.

The public names are imported on first use, so that ``gossipx --help`` does not wait for torch.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # under their own names, by which type checkers know that they are public
    from gossipx import codecs as codecs
    from gossipx import optimizers as optimizers
    from gossipx import parts as parts
    from gossipx import policies as policies
    from gossipx import recorders as recorders
    from gossipx.comm import CommManager as CommManager
    from gossipx.launch.loops.attach import attach as attach
    from gossipx.launch.loops.attach import get_solver as get_solver
    from gossipx.launch.loops.initialize import initialize as initialize
    from gossipx.launch.loops.join import join as join
    from gossipx.runtime.training.peer import Peer as Peer
    from gossipx.solver.solver import Solver as Solver
    from gossipx.sync import SyncManager as SyncManager

_HOMES = {
    **{name: f"gossipx.{name}" for name in ("codecs", "optimizers", "parts", "policies", "recorders")},
    "CommManager": "gossipx.comm:CommManager",
    "Peer": "gossipx.runtime.training.peer:Peer",
    "Solver": "gossipx.solver.solver:Solver",
    "SyncManager": "gossipx.sync:SyncManager",
    "attach": "gossipx.launch.loops.attach:attach",
    "get_solver": "gossipx.launch.loops.attach:get_solver",
    "initialize": "gossipx.launch.loops.initialize:initialize",
    "join": "gossipx.launch.loops.join:join",
}
"""Modules of the public names, and classes and functions in them."""
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return pkgutil.resolve_name(_HOMES[name])
    raise AttributeError(f"module 'gossipx' has no attribute '{name}'")
