"""Workers and their waiting pulls, as one shard knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from gossipx.protocol.events import Received
from gossipx.protocol.server_messages import TablesRequest
from gossipx.protocol.table_effects import RequestedBucket
from gossipx.server.deferred import Deferred


@dataclass
class WaitingPull:
    """A pull of one bucket that has not been answered yet."""

    deferred: Deferred
    requested: RequestedBucket


@dataclass
class ShardWorker:
    """A worker as one shard knows it.

    Attributes:
        receiving: the iteration of the push being received; -1: none yet.
        received: the buckets of that push that have arrived.
        pulls: its waiting pulls, by iteration.
        significance: from the last of these pulls.
        released: pulls up to this iteration are answered.
    """

    incarnation: int
    receiving: int = -1
    received: set[int] = field(default_factory=set)
    pulls: dict[int, list[WaitingPull]] = field(default_factory=dict)
    significance: float = 0.0
    released: int = -1


def requested_bucket(event: Received) -> RequestedBucket:
    """Return the bucket that a pull asks for."""
    request = event.request
    assert isinstance(request, TablesRequest)
    return RequestedBucket(request.shard, request.bucket, event.sender, request.base)
