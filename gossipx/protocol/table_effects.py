"""Effects on the tables of a parameter server; the other effects are in :mod:`gossipx.protocol.effects`.

A *table* is one tensor of a shard, the part of the parameters that one server holds. The driver passes these effects to
a thread that carries them out one after the other, so a reply carries a bucket as it is after all earlier effects.

==============  ===============================  =====================================================================
effect          requested by                     the driver
==============  ===============================  =====================================================================
ApplyGradient   the shard                        does one optimizer step; reports GradientPoisoned for NaN or Inf
BufferGradient  the shard                        adds to the shard's gradient buffer; reports the same
ApplyBuffered   the shard                        does one optimizer step with the buffer
Record          the shard's records              appends to the journal
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

from typing import Any, TypeAlias

from msgspec import Struct

from gossipx.protocol.effects import Effect, Pieces
from gossipx.protocol.fields import Groups, Parts


class TableEffect(Effect, frozen=True):
    """Base of these effects."""


class ApplyGradient(TableEffect, frozen=True):
    """Do one optimizer step with ``scale`` times the gradient kept under ``ticket``, and release the ticket.

    ``buffers``: add the gradient to the gradient buffer of its shard, too.
    """

    ticket: int
    scale: float
    buffers: bool = False


class BufferGradient(TableEffect, frozen=True):
    """Add the gradient kept under ``ticket`` to the gradient buffer of its shard, and release the ticket."""

    ticket: int


class ApplyBuffered(TableEffect, frozen=True):
    """Do one optimizer step on a shard with the mean of its gradient buffer (``sums``: with its sum), and clear it."""

    shard: int
    sums: bool = False


ShardEvent: TypeAlias = tuple[str | int | float, ...]
"""An event of a shard: a word and its figures; see :meth:`gossipx.server.shard.Shard.apply_record`."""


class ShardRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The latest events of a shard, as its journal has them. The last one may be the gradient of a bucket.

    Attributes:
        shard: the shard.
        epoch: of the layout.
        number: of the record, counted from the first checkpoint of that layout.
        happened: the events, in order.
        bucket: of the gradient; −1: no gradient.
        progress, parts, settings: of the gradient, as in :class:`~gossipx.protocol.server_messages.GradientRequest`.
    """

    shard: int
    epoch: int
    number: int
    happened: tuple[ShardEvent, ...]
    bucket: int = -1
    progress: int = -1
    parts: Parts = ()
    settings: Groups = ()


class Record(TableEffect, frozen=True):
    """Append the events of a shard to its journal, before any later effect.

    Attributes:
        ticket: of the gradient that belongs to the record; None: no gradient.
    """

    record: ShardRecord
    ticket: int | None


class KeepShard(TableEffect, frozen=True):
    """Write a checkpoint of a shard, as it is after all earlier effects.

    Attributes:
        clock: of the shard.
        state: of the shard's role, as plain data.
    """

    shard: int
    clock: int
    state: dict[str, Any]


class RestoreTables(TableEffect, frozen=True):
    """Restore a shard's tables from its checkpoints and journals; :class:`~gossipx.protocol.events.TablesRestored`
    follows.

    Attributes:
        epoch: of the layout that the shard belongs to, which is this peer's.
    """

    shard: int
    epoch: int


class FillTables(TableEffect, frozen=True):
    """Initialize the tables of a shard with the values of our model."""

    shard: int


class Gather(TableEffect, frozen=True):
    """Keep all gradients of the iteration that has ended in the transmit buffers, and add those of the next one."""


class Fetch(TableEffect, frozen=True):
    """Make training wait for these buckets, each a shard and a number, before it uses their tables again."""

    buckets: tuple[tuple[int, int], ...]


class Unchanged(TableEffect, frozen=True):
    """Cancel the :class:`Fetch` of these buckets: training uses their tables as they are."""

    buckets: tuple[tuple[int, int], ...]


class Fetched(TableEffect, frozen=True):
    """Use the bucket received under ``ticket`` from now on, and release the ticket."""

    ticket: int


class PrepareTables(TableEffect, frozen=True):
    """Allocate the tables that this peer hosts in a new layout, and fill in the values that are here already.

    Attributes:
        epoch: of that layout.
        servers: for each shard, the rank that hosts it.
    """

    epoch: int
    servers: tuple[int, ...]


class TakeRanges(TableEffect, frozen=True):
    """Fill these pieces of the tables being prepared with what was received under ``ticket``, and release it."""

    ticket: int
    pieces: Pieces


class ReportPrepared(TableEffect, frozen=True):
    """Report :class:`~gossipx.protocol.events.Prepared` once all earlier effects are done."""

    epoch: int


class PlaceTables(TableEffect, frozen=True):
    """Switch to a new layout: use the shards prepared for it, and its buckets for training.

    If none were prepared, the shards that belong here must be restored first (:class:`RestoreTables`).

    Attributes:
        epoch: of that layout.
        servers: for each shard, the rank that hosts it.
    """

    epoch: int
    servers: tuple[int, ...]


class DropTables(TableEffect, frozen=True):
    """Release the tables that were prepared."""
