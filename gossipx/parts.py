"""The replaceable parts of the parameter server: base classes and defaults, in one place to import from.

Each part can be replaced separately by a class of a few lines (Modularized Parameter Server, section 4.1): the two
sides of a table, its five storages, the placement of tables, and the sync model (the paper's consistency controller).
Pass them as ``gossipx.join(..., parts=Parts(...))`` or ``gossipx.initialize(parts=Parts(...))``. The communication
layer cannot be replaced. The hybrid sync model accepts a custom growth function.
"""

from __future__ import annotations

from gossipx.assembly.server import Parts
from gossipx.errors import ProtocolError
from gossipx.model.pool import typed
from gossipx.server.conditions import Apply, Conditions, Pull, State, SyncModel, View
from gossipx.server.placement import Partition, Placement, Table
from gossipx.server.sync_models import Double, Fixed, Growth, Hybrid, Step
from gossipx.tables.parts import (
    ApplyBuffer,
    ClientTable,
    Encoded,
    GradientStorage,
    ServerStorage,
    ServerTable,
    Storages,
    TransmitBuffer,
    WorkerStorage,
    raw,
)

__all__ = [
    "Apply",
    "ApplyBuffer",
    "ClientTable",
    "Conditions",
    "Double",
    "Encoded",
    "Fixed",
    "GradientStorage",
    "Growth",
    "Hybrid",
    "Partition",
    "Parts",
    "Placement",
    "ProtocolError",
    "Pull",
    "ServerStorage",
    "ServerTable",
    "State",
    "Step",
    "Storages",
    "SyncModel",
    "Table",
    "TransmitBuffer",
    "View",
    "WorkerStorage",
    "raw",
    "typed",
]
