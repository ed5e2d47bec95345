"""Effects that roles ask for on the tables of a parameter server; see :mod:`gossipx.actor` for all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gossipx.server_messages import RecordRequest

Pieces = tuple[tuple[int, int, int], ...]
"""Of tables: the number of one, the first element, and the one behind the last."""


@dataclass(frozen=True)
class Asked:
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
    """One optimizer step on a shard with the mean of what its gradient buffer holds, which is empty then."""

    shard: int


@dataclass(frozen=True)
class Share:
    """The gradient that was kept under ``ticket`` is known under ``other``, too: our request that brings it along."""

    ticket: int
    other: int


@dataclass(frozen=True)
class Record:
    """Write what has happened to a shard into its journal, before anything that is asked for after it is done.

    Attributes:
        ticket: the gradient that goes with it was kept under this; None: none does.
    """

    record: RecordRequest
    ticket: int | None


@dataclass(frozen=True)
class TakeCopy:
    """The tables of a shard are those that came under ``ticket``. Then forget the ticket."""

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
class ComeBack:
    """Bring a shard's tables back as its checkpoints and journals have them; :class:`~gossipx.actor.CameBack` tells.

    Attributes:
        epoch: of the layout that it is a shard of, by which this peer goes.
    """

    shard: int
    epoch: int


@dataclass(frozen=True)
class FillTables:
    """The tables of a shard begin with the values of our own model."""

    shard: int


@dataclass(frozen=True)
class Fetch:
    """These buckets, each a shard and a number, are to be fetched before their tables are used again."""

    buckets: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Unchanged:
    """These buckets are not fetched after all: their tables are used as they are."""

    buckets: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Fetched:
    """What came under ``ticket`` is to be used from now on. Then forget the ticket."""

    ticket: int


@dataclass(frozen=True)
class PrepareTables:
    """Make the tables that lie here by a layout that is to be, and fill in what lies here already.

    Attributes:
        epoch: of that layout.
        servers: by shard, the rank that is to hold it.
    """

    epoch: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class TakeRanges:
    """What came under ``ticket`` belongs to these pieces of the tables that are being prepared. Then forget it."""

    ticket: int
    pieces: Pieces


@dataclass(frozen=True)
class TellPrepared:
    """Tell :class:`~gossipx.actor.Prepared` once all of these tables is done that was asked for before."""

    epoch: int


@dataclass(frozen=True)
class PlaceTables:
    """Go over to a layout: to the shards that were prepared for it, and to its buckets of what this peer trains with.

    If none were prepared, what is to lie here has yet to come back (:class:`ComeBack`).

    Attributes:
        epoch: of that layout.
        servers: by shard, the rank that holds it.
    """

    epoch: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class DropTables:
    """The tables that were prepared are not needed."""


MoveEffect = PrepareTables | TakeRanges | TellPrepared | PlaceTables | DropTables
"""Of a change of servers."""
TableEffect = (
    ApplyGradient
    | BufferGradient
    | ApplyBuffer
    | Share
    | Record
    | TakeCopy
    | KeepShard
    | ComeBack
    | FillTables
    | Fetch
    | Unchanged
    | Fetched
    | MoveEffect
)
