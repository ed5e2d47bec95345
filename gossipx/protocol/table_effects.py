"""Effects on the tables of a parameter server, which roles ask of their driver; others are in
:mod:`gossipx.protocol.effects`.

Parts of ``gossipx/server`` ask for them. The driver hands them to its tables, which do one after the other on a thread
of their own, so that an answer gives a bucket as it is after all that was asked for before.

==============  ===============================  =====================================================================
effect          asked for by                     what the driver does
==============  ===============================  =====================================================================
ApplyGradient   the shard                        one optimizer step; tells GradientPoisoned if it holds NaN or Inf
BufferGradient  the shard                        adds to the shard's buffer; tells the same
ApplyBuffer     the shard                        one optimizer step with the buffer
Share           the replica's sender             has a gradient go along with another request
Record          the shard's records              writes to the journal
TakeCopy        the replica                      replaces its tables by a copy
KeepShard       the shard                        takes a checkpoint
ComeBack        the holding of shards            reads checkpoint and journal; tells CameBack
FillTables      the shard                        begins with the values of our model
Fetch           the worker                       has training wait for buckets before it uses them
Unchanged       the worker                       has training use buckets as they are
Fetched         the worker                       puts a pulled bucket in its place
PrepareTables   the migration                    makes the tables of a new layout
TakeRanges      the migration                    fills in values that have moved here
TellPrepared    the migration                    tells Prepared
PlaceTables     the migration                    replaces the old layout by the new one
DropTables      the migration                    drops the tables of a layout that was given up
==============  ===============================  =====================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gossipx.protocol.server_messages import RecordRequest

Pieces = tuple[tuple[int, int, int], ...]
"""Of tables: the number of one, the first element, and the one after the last."""


@dataclass(frozen=True)
class RequestedBucket:
    """A bucket that a worker has asked for.

    Attributes:
        shard, bucket: which.
        worker: its rank.
        base: checksum of what it has of it, where pulls have a codec; 0: nothing.
    """

    shard: int
    bucket: int
    worker: int = 0
    base: int = 0


@dataclass(frozen=True)
class ApplyGradient:
    """One optimizer step with ``scale`` times the gradient that was kept under ``ticket``. Then forget the ticket."""

    ticket: int
    scale: float


@dataclass(frozen=True)
class BufferGradient:
    """Add the gradient that was kept under ``ticket`` to its shard's gradient buffer. Then forget the ticket."""

    ticket: int


@dataclass(frozen=True)
class ApplyBuffer:
    """One optimizer step on a shard with the mean of its gradient buffer, which is empty then."""

    shard: int


@dataclass(frozen=True)
class Share:
    """Hold the gradient that was kept under ``ticket`` under ``other``, too: our request that brings it along."""

    ticket: int
    other: int


@dataclass(frozen=True)
class Record:
    """Write what has happened to a shard into its journal, before anything else that is asked for later is done.

    Attributes:
        ticket: the gradient that goes with it was kept under this; None: none does.
    """

    record: RecordRequest
    ticket: int | None


@dataclass(frozen=True)
class TakeCopy:
    """Replace the tables of a shard by those that came under ``ticket``. Then forget the ticket."""

    ticket: int
    shard: int


@dataclass(frozen=True)
class KeepShard:
    """Take a checkpoint of a shard, as it is after all that was asked for before.

    Attributes:
        clock: of the shard.
        state: its role's, plain data.
    """

    shard: int
    clock: int
    state: dict[str, Any]


@dataclass(frozen=True)
class RestoreTables:
    """Bring a shard's tables back as its checkpoints and journals have them;
    :class:`~gossipx.protocol.events.TablesRestored` tells.

    Attributes:
        epoch: of the layout that it belongs to, which is this peer's.
    """

    shard: int
    epoch: int


@dataclass(frozen=True)
class FillTables:
    """Begin the tables of a shard with the values of our own model."""

    shard: int


@dataclass(frozen=True)
class Fetch:
    """Have these buckets, each a shard and a number, fetched before their tables are used again."""

    buckets: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Unchanged:
    """Do not fetch these buckets after all: their tables are used as they are."""

    buckets: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Fetched:
    """Use the bucket that came under ``ticket`` from now on. Then forget the ticket."""

    ticket: int


@dataclass(frozen=True)
class PrepareTables:
    """Make the tables that lie here by a new layout, and fill in what lies here already.

    Attributes:
        epoch: of that layout.
        servers: by shard, the rank that holds it then.
    """

    epoch: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class TakeRanges:
    """Fill these pieces of the tables that are being prepared with what came under ``ticket``. Then forget it."""

    ticket: int
    pieces: Pieces


@dataclass(frozen=True)
class ReportPrepared:
    """Tell :class:`~gossipx.protocol.events.Prepared` once all is done that was asked for before."""

    epoch: int


@dataclass(frozen=True)
class PlaceTables:
    """Replace the layout: use the shards that were prepared for it, and its buckets of what this peer trains with.

    If none were prepared, the shards that belong here have yet to come back (:class:`RestoreTables`).

    Attributes:
        epoch: of that layout.
        servers: by shard, the rank that holds it.
    """

    epoch: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class DropTables:
    """Drop the tables that were prepared."""


MoveEffect = PrepareTables | TakeRanges | ReportPrepared | PlaceTables | DropTables
"""Of a change of servers."""
TableEffect = (
    ApplyGradient
    | BufferGradient
    | ApplyBuffer
    | Share
    | Record
    | TakeCopy
    | KeepShard
    | RestoreTables
    | FillTables
    | Fetch
    | Unchanged
    | Fetched
    | MoveEffect
)
