"""What of a parameter server can be a user's own, in one place to import it from.

Each can be replaced alone by a class of a few lines (Modularized Parameter Server, section 4.1): the two sides of a
table, its five storages, the placement manager's decision, and the consistency controller. ``gossipx.join(...,
parts=Parts(...))`` and ``gossipx.initialize(parts=Parts(...))`` take them. Comm is none of them. The hybrid sync model
takes a growth function of one's own.
"""

from __future__ import annotations

from gossipx.assembly.server import Parts
from gossipx.errors import ProtocolError
from gossipx.model.buffers import typed
from gossipx.server.placement import Partition, Placement, Table
from gossipx.server.sync_models.conditions import Apply, Conditions, Pull, State, SyncModel, View
from gossipx.server.sync_models.growth import Double, Fixed, Growth, Step
from gossipx.server.sync_models.models import Hybrid
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
