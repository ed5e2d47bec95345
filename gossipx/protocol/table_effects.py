"""Effects on the tables of a parameter server; the other effects are in :mod:`gossipx.protocol.effects`.

A *table* is one tensor of a shard, the part of the parameters that one server holds. The driver passes these effects to
a thread that carries them out one after the other, so a reply carries a bucket as it is after all earlier effects.

==============  ===============================  =====================================================================
effect          requested by                     the driver
==============  ===============================  =====================================================================
ApplyGradient   the shard                        does one optimizer step; reports GradientPoisoned for NaN or Inf
BufferGradient  the shard                        adds to the shard's gradient buffer; reports the same
ApplyBuffered   the shard                        does one optimizer step with the buffer
Share           the sender of records            attaches a gradient to another request
Record          the shard's records              appends to the journal
TakeCopy        the replica                      replaces its tables by a copy
KeepShard       the shard                        writes a checkpoint
RestoreTables   hosted_shards                    reads checkpoint and journal; reports TablesRestored
FillTables      the shard                        initializes tables with the values of our model
Gather          the worker                       keeps an iteration's gradients, which are not pushed
Fetch           the worker                       makes training wait for buckets before it uses them
Unchanged       the worker                       lets training use buckets as they are
Fetched         the worker                       writes a pulled bucket into our model
PrepareTables   the migration                    allocates the tables of a new layout
TakeRanges      the migration                    fills in values that moved here
ReportPrepared  the migration                    reports Prepared
PlaceTables     the migration                    replaces the current layout by the new one
DropTables      the migration                    releases the tables of an abandoned layout
==============  ===============================  =====================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gossipx.protocol.server_messages import RecordRequest

Pieces = tuple[tuple[int, int, int], ...]
"""Pieces of tables: the index of the table, the first element, and the element after the last."""


@dataclass(frozen=True)
class RequestedBucket:
    """A bucket requested by a worker.

    Attributes:
        shard, bucket: the bucket.
        worker: its rank.
        base: if pulls have a codec: the checksum of the bucket as the worker has it; 0: it has none.
    """

    shard: int
    bucket: int
    worker: int = 0
    base: int = 0


@dataclass(frozen=True)
class ApplyGradient:
    """Do one optimizer step with ``scale`` times the gradient kept under ``ticket``, and release the ticket.

    ``buffers``: add the gradient to the gradient buffer of its shard, too.
    """

    ticket: int
    scale: float
    buffers: bool = False


@dataclass(frozen=True)
class BufferGradient:
    """Add the gradient kept under ``ticket`` to the gradient buffer of its shard, and release the ticket."""

    ticket: int


@dataclass(frozen=True)
class ApplyBuffered:
    """Do one optimizer step on a shard with the mean of its gradient buffer (``sums``: with its sum), and clear it."""

    shard: int
    sums: bool = False


@dataclass(frozen=True)
class Share:
    """Keep the gradient of ``ticket`` under ``other`` too, our request that forwards it."""

    ticket: int
    other: int


@dataclass(frozen=True)
class Record:
    """Append the events of a shard to its journal, before any later effect.

    Attributes:
        ticket: of the gradient that belongs to the record; None: no gradient.
    """

    record: RecordRequest
    ticket: int | None


@dataclass(frozen=True)
class TakeCopy:
    """Replace the tables of a shard by the payload kept under ``ticket``, and release the ticket."""

    ticket: int
    shard: int


@dataclass(frozen=True)
class KeepShard:
    """Write a checkpoint of a shard, as it is after all earlier effects.

    Attributes:
        clock: of the shard.
        state: of the shard's role, as plain data.
    """

    shard: int
    clock: int
    state: dict[str, Any]


@dataclass(frozen=True)
class RestoreTables:
    """Restore a shard's tables from its checkpoints and journals; :class:`~gossipx.protocol.events.TablesRestored`
    follows.

    Attributes:
        epoch: of the layout that the shard belongs to, which is this peer's.
    """

    shard: int
    epoch: int


@dataclass(frozen=True)
class FillTables:
    """Initialize the tables of a shard with the values of our model."""

    shard: int


@dataclass(frozen=True)
class Gather:
    """Keep all gradients of the iteration that has ended in the transmit buffers, and add those of the next one."""


@dataclass(frozen=True)
class Fetch:
    """Make training wait for these buckets, each a shard and a number, before it uses their tables again."""

    buckets: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Unchanged:
    """Cancel the :class:`Fetch` of these buckets: training uses their tables as they are."""

    buckets: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Fetched:
    """Use the bucket received under ``ticket`` from now on, and release the ticket."""

    ticket: int


@dataclass(frozen=True)
class PrepareTables:
    """Allocate the tables that this peer hosts in a new layout, and fill in the values that are here already.

    Attributes:
        epoch: of that layout.
        servers: for each shard, the rank that hosts it.
    """

    epoch: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class TakeRanges:
    """Fill these pieces of the tables being prepared with what was received under ``ticket``, and release it."""

    ticket: int
    pieces: Pieces


@dataclass(frozen=True)
class ReportPrepared:
    """Report :class:`~gossipx.protocol.events.Prepared` once all earlier effects are done."""

    epoch: int


@dataclass(frozen=True)
class PlaceTables:
    """Switch to a new layout: use the shards prepared for it, and its buckets for training.

    If none were prepared, the shards that belong here must be restored first (:class:`RestoreTables`).

    Attributes:
        epoch: of that layout.
        servers: for each shard, the rank that hosts it.
    """

    epoch: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class DropTables:
    """Release the tables that were prepared."""


MoveEffect = PrepareTables | TakeRanges | ReportPrepared | PlaceTables | DropTables
"""Effects of a change of servers."""
TableEffect = (
    ApplyGradient
    | BufferGradient
    | ApplyBuffered
    | Share
    | Record
    | TakeCopy
    | KeepShard
    | RestoreTables
    | FillTables
    | Gather
    | Fetch
    | Unchanged
    | Fetched
    | MoveEffect
)
