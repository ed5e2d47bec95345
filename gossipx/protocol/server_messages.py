"""Messages of the parameter server: between its workers, shards and replicas, and those that change its servers.

Fields and kinds as in :mod:`gossipx.protocol.messages`, which has the replies that are not of a server alone. The
modules below are rooms of ``gossipx/server``; its ``mode`` receives all of these and hands each to one of them.

================  ============================================  =================================================
message           sent by                                       handled by
================  ============================================  =================================================
GradientRequest   the worker, per bucket and iteration          the shard of the bucket
TablesRequest     the worker, per bucket it is about to use     the shard of the bucket
TablesReply       the shard; a server, to RangesRequest         the worker; the migration that has asked
SwitchRequest     the switching of the peer that was asked to   the switching of the peer that holds the shard
WaitingRequest    the search for deadlocks, once a pull waits   the mode of the peer that holds the other shard
WaitingReply      that mode                                     the search for deadlocks
RecordRequest     the records of a shard, which also go into    the shard's replica
                  its journal
CopyRequest       a replica, to begin and as a sign of life     the copies of the peer that holds the shard
CopyReply         those copies                                  the replica
ServersRequest    the peer that was asked to change servers     the coordinator: the holder of shard 0
PauseRequest      the coordinator                               the migration of every peer
PrepareRequest    the coordinator                               the migration of every new server
RangesRequest     the migration of a new server                 the migration of the server that has the values
PlaceRequest      the coordinator; a peer that seeks the        the migration of every peer
                  layout that stands
PlacedReply       the migration, to PlaceRequest and to a push  the coordinator; the migration that has asked
                  or pull of an earlier layout
================  ============================================  =================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gossipx.protocol.fields import (
    MAX_METADATA,
    MAX_MODEL,
    Ascii,
    Count,
    CountOrNone,
    FromZero,
    Groups,
    Happenings,
    Parts,
    Rank,
    Ranks,
    Seconds,
    Servers,
    Text,
    Workers,
    integer,
    kind,
)

MEASURED = -1.0
"""A significance that is measured as its request is sent."""

# --- pushes and pulls ---------------------------------------------------------------------------


@kind(27, MAX_METADATA, MAX_MODEL)
@dataclass(frozen=True)
class GradientRequest:
    """Brings the gradient of one bucket of a shard (FluentPS, sPush); its bytes are the frame's payload.

    The server takes in each once, however often it is brought.

    Attributes:
        shard, bucket: of which tables.
        incarnation: of the sender.
        progress: the iteration of the gradient, from 0.
        parts: what the payload holds.
        settings: of the optimizer's parameter groups, in order, the numbers that the sender has by now.
        patience: seconds that the sender waits.
        epoch: of the sender's layout.
        keep: the clock at which all shards take a checkpoint next, as far as the sender has heard.
    """

    shard: Rank
    bucket: Count
    incarnation: Count
    progress: Count
    parts: Parts
    settings: Groups
    patience: Seconds
    epoch: Count = 0
    keep: Count = 0


@kind(28)
@dataclass(frozen=True)
class TablesRequest:
    """Asks for one bucket of a shard (FluentPS, sPull), or only when the shard would give it.

    Attributes:
        shard, bucket: of which tables; a bucket of −1 is none.
        incarnation: of the requester.
        progress: the iteration that it has pushed last; −1: it takes the present values, and begins there.
        significance: |g| / |w| of that push, where the sync model looks at it; :data:`MEASURED` until it is sent.
        patience: seconds that it waits.
        epoch: of its layout.
        base: checksum of what the requester has of the bucket, where pulls have a codec; 0: it has nothing.
    """

    shard: Rank
    bucket: CountOrNone
    incarnation: Count
    progress: CountOrNone
    significance: FromZero
    patience: Seconds
    epoch: Count = 0
    base: Count = 0


@kind(37, MAX_METADATA, MAX_MODEL)
@dataclass(frozen=True)
class TablesReply:
    """A bucket of a shard; its bytes are the frame's payload.

    Attributes:
        clock: of the shard, V_train: a worker that is behind continues there.
        parts: what the payload holds.
        sync: the shard's sync model since a switch; empty: the one that the run began with.
        keep: the clock at which it takes a checkpoint next, where that is due by the clock on the wall.
        base: checksum of the values that the payload changes; 0: it has the values as they are.
    """

    clock: Count
    parts: Parts
    sync: Text = ""
    keep: Count = 0
    base: Count = 0


@kind(29)
@dataclass(frozen=True)
class SwitchRequest:
    """Asks a server to switch one of its shards to another sync model.

    Attributes:
        shard: which.
        sync: the model, as a spec.
        apply, pulls: words as in the settings; empty: the model's way, and as before.
    """

    shard: Rank
    sync: Text
    apply: Text
    pulls: Text


@kind(46)
@dataclass(frozen=True)
class WaitingRequest:
    """Asks which workers wait at a shard for their gradients to be applied; see
    :mod:`gossipx.server.failover.deadlock`.

    Attributes:
        shard: which.
    """

    shard: Rank


@kind(47, MAX_METADATA)
@dataclass(frozen=True)
class WaitingReply:
    """The workers that wait at a shard.

    Attributes:
        workers: ranks, each with the iteration of its gradient.
    """

    workers: Workers


# --- replicas -----------------------------------------------------------------------------------


@kind(30, MAX_METADATA, MAX_MODEL)
@dataclass(frozen=True)
class RecordRequest:
    """Tells the replica of a shard what has happened to it, in order; where that ends with the gradient of a bucket,
    its bytes are the frame's payload.

    Attributes:
        shard: which.
        copy: the one that the replica should have begun with, as its sender numbers them; in a journal the layout's
            epoch.
        number: of the record; they count from that copy.
        happened: in order.
        bucket: of the gradient; −1: there is none.
        progress, parts, settings: of the gradient, as in :class:`GradientRequest`.
        patience: seconds that the sender waits.
    """

    shard: Rank
    copy: Count
    number: Count
    happened: Happenings
    bucket: CountOrNone
    progress: CountOrNone
    parts: Parts
    settings: Groups
    patience: Seconds


@kind(31)
@dataclass(frozen=True)
class CopyRequest:
    """Asks for a copy of a shard, to be its replica from then on; a replica tells by it that it still is one.

    Attributes:
        shard: which.
        incarnation: of the sender.
        copy: that it has; −1: it has none.
        patience: seconds that it waits.
    """

    shard: Rank
    incarnation: Count
    copy: CountOrNone
    patience: Seconds


@kind(38, MAX_METADATA, MAX_MODEL)
@dataclass(frozen=True)
class CopyReply:
    """A copy of a shard; its tables are the frame's payload.

    Attributes:
        incarnation: of the sender.
        copy: its number.
        state: of the shard's role, as JSON.
        size: bytes of the payload.
    """

    incarnation: Count
    copy: Count
    state: Ascii
    size: Annotated[int, integer(0, MAX_MODEL)]


# --- a change of servers ------------------------------------------------------------------------


@kind(40, MAX_METADATA)
@dataclass(frozen=True)
class ServersRequest:
    """Asks the holder of shard 0 to have the shards of the run held by other peers; see
    :mod:`gossipx.server.failover.migration`.

    Attributes:
        number: of the sender's, so that a request that comes again is not begun again.
        servers: ranks, ascending.
        patience: seconds that the sender waits.
    """

    number: Count
    servers: Ranks
    patience: Seconds


@kind(41, MAX_METADATA)
@dataclass(frozen=True)
class PauseRequest:
    """Asks for no push of a further iteration; answered once all that were begun have come.

    Attributes:
        epoch: of the new layout.
        servers: by shard, the rank that holds it then.
        patience: seconds that the sender waits.
    """

    epoch: Count
    servers: Servers
    patience: Seconds


@kind(42, MAX_METADATA)
@dataclass(frozen=True)
class PrepareRequest:
    """Asks a server of the new layout to fetch what it lacks; answered once it has all.

    Attributes:
        epoch: of that layout.
        state: of the clock that its shards continue with, as JSON.
        sync: its sync model.
        patience: seconds that the sender waits.
    """

    epoch: Count
    state: Ascii
    sync: Text
    patience: Seconds


@kind(43)
@dataclass(frozen=True)
class RangesRequest:
    """Asks a server for values that move, with what belongs to them: the optimizer's state, gradients that wait.

    Attributes:
        epoch: of the new layout.
        batch: number of what moves to the sender, as all peers count it.
        sync: the sync model that the sender's shards will have.
        patience: seconds that the sender waits.
    """

    epoch: Count
    batch: Count
    sync: Text
    patience: Seconds


@kind(44, MAX_METADATA)
@dataclass(frozen=True)
class PlaceRequest:
    """Tells the sender's layout; answered by the receiver's.

    Attributes:
        epoch: of that layout.
        servers: by shard, the rank that holds it.
        decided: up to this epoch all changes are over, carried out or given up.
    """

    epoch: Count
    servers: Servers
    decided: Count


@kind(45, MAX_METADATA)
@dataclass(frozen=True)
class PlacedReply:
    """Tells the sender's layout; answers a push or pull of an earlier one, too.

    Attributes:
        epoch, servers, decided: as in :class:`PlaceRequest`.
    """

    epoch: Count
    servers: Servers
    decided: Count


ServerRequest = GradientRequest | TablesRequest | SwitchRequest | WaitingRequest | RecordRequest | CopyRequest
"""Requests to a server."""
MoveRequest = ServersRequest | PauseRequest | PrepareRequest | RangesRequest | PlaceRequest
"""Requests that a change of servers consists of."""
