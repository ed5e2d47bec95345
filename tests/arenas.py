"""What tests do with arenas beside real drivers."""

from __future__ import annotations

import math

from gossipx.arena import ParameterArena
from gossipx.incoming import Incoming
from gossipx.snapshots import Snapshot


def mix_in(arena: ParameterArena, model: bytes, share: float) -> float:
    """x ← x + share · (x_j − x), as a driver does it with a model that was pushed; ‖x_j − x‖₂, NaN if refused."""
    incoming = Incoming(arena, None)
    incoming.take(0, memoryview(bytearray(model)))
    distance = incoming.norm()
    if math.isfinite(distance):
        distance = arena.subtract(incoming.buffer)
        arena.commit(incoming.buffer, share)
    incoming.release()
    return distance


def mix(arena: ParameterArena, model: bytes, share: float, base: Snapshot | None = None) -> float:
    """x ← x + share · (x_j − base), as a driver does it with ``model`` from the wire; ‖x_j − base‖₂, NaN if refused.

    Args:
        base: given away; None: x as of the last boundary.
    """
    incoming = Incoming(arena, base or arena.snapshot())
    incoming.take(0, memoryview(bytearray(model)))
    distance = incoming.norm()
    if math.isfinite(distance):
        arena.commit(incoming.buffer, share)
    incoming.release()
    return distance
