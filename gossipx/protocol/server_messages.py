"""Messages of the parameter server, between its workers and shards, and those that move shards between servers.

A *shard* is one part of the parameters, held by one peer, its server; a *bucket* is the part of a shard that one
message carries. Field types and kinds are as in :mod:`gossipx.protocol.messages`, which also has the general replies.
The receivers below are modules of ``gossipx/server``, whose ``mode`` receives all messages and dispatches them.

================  ============================================  =================================================
message           sent by                                       handled by
================  ============================================  =================================================
GradientRequest   the worker, per bucket and iteration          the shard of the bucket
TablesRequest     the worker, per bucket that it needs next     the shard of the bucket
TablesReply       the shard; a server, to RangesRequest         the worker; the migration that sent the request
PushAgainReply    the shard, to TablesRequest                   the worker, which repeats its pushes
SwitchRequest     the switching of the peer a user asked        the switching of the shard's server
ServersRequest    the peer asked to change servers              the coordinator: the server of shard 0
PauseRequest      the coordinator                               the migration of every peer
PrepareRequest    the coordinator                               the migration of every new server
RangesRequest     the migration of a new server                 the migration of the server that has the values
PlaceRequest      the coordinator; a peer that looks for the    the migration of every peer
                  current layout
PlacedReply       the migration, to PlaceRequest and to a push  the coordinator; the migration that sent the request
                  or pull of an earlier layout
================  ============================================  =================================================
"""

from __future__ import annotations

from gossipx.protocol import fields, messages

MEASURED = -1.0
"""Placeholder for a significance that is computed when its request is sent."""

# --- pushes and pulls ---------------------------------------------------------------------------


@fields.kind(45, fields.MAX_METADATA)
class PlacedReply(messages.Reply, frozen=True):
    """The sender's layout, in reply to a PlaceRequest or to a push or pull of an earlier layout.

    Attributes:
        epoch, servers, decided: as in :class:`PlaceRequest`.
    """

    epoch: fields.Count
    servers: fields.Servers
    decided: fields.Count


@fields.kind(37, fields.MAX_METADATA, fields.MAX_MODEL)
class TablesReply(messages.Reply, frozen=True):
    """A bucket of a shard; its bytes are the payload.

    Attributes:
        clock: V_train of the shard, at which a worker that is behind continues.
        parts: the contents of the payload.
        sync: the sync model of the shard since a switch; empty: the initial one.
        base: checksum of the values that the payload changes; 0: plain values.
        restarted_at: the clock at which the shard continued when its server was last restarted, 0 without any of its
            state; −1: it was not restarted.
    """

    clock: fields.Count
    parts: fields.Parts
    sync: fields.Text = ""
    base: fields.Count = 0
    restarted_at: fields.CountOrNone = -1


@fields.kind(39)
class PushAgainReply(messages.Reply, frozen=True):
    """Refuses a pull, since the shard has lost pushes that it waits for: its server was restarted without its state."""


@fields.kind(
    27, fields.MAX_METADATA, fields.MAX_MODEL, answers=(messages.AcceptReply, PlacedReply, messages.NotReadyReply)
)
class GradientRequest(messages.Request, frozen=True):
    """Carries the gradient of one bucket of a shard (FluentPS, sPush); its bytes are the payload.

    The server applies each gradient once, even if the request is repeated.

    Attributes:
        shard, bucket: the bucket.
        incarnation: of the sender.
        progress: the iteration of the gradient, from 0.
        parts: the contents of the payload.
        settings: current settings of the optimizer's parameter groups at the sender, in order.
        patience: seconds that the sender waits.
        epoch: of the sender's layout.
    """

    shard: fields.Rank
    bucket: fields.Count
    incarnation: fields.Count
    progress: fields.Count
    parts: fields.Parts
    settings: fields.Groups
    patience: fields.Seconds
    epoch: fields.Count = 0


@fields.kind(28, answers=(TablesReply, PlacedReply, PushAgainReply, messages.BusyReply, messages.NotReadyReply))
class TablesRequest(messages.Request, frozen=True):
    """Requests one bucket of a shard (FluentPS, sPull); without a bucket, only to be told when the shard would answer.

    Attributes:
        shard: the shard.
        bucket: in the shard; −1: none.
        incarnation: of the requester.
        progress: the iteration of its last push; −1: it requests the current values, and starts at the shard's clock.
        significance: ``|g| / |w|`` of that push, if the sync model uses it; :data:`MEASURED` until the request is sent.
        patience: seconds that the requester waits.
        epoch: of its layout.
        pushed: whether the shard has acknowledged all buckets of that push. If it lacks any, it has lost them.
        base: if pulls have a codec: the checksum of the bucket as the requester has it; 0: it has none.
    """

    shard: fields.Rank
    bucket: fields.CountOrNone
    incarnation: fields.Count
    progress: fields.CountOrNone
    significance: fields.FromZero
    patience: fields.Seconds
    epoch: fields.Count = 0
    pushed: bool = False
    base: fields.Count = 0


@fields.kind(29, answers=(messages.AcceptReply, messages.NotReadyReply))
class SwitchRequest(messages.Request, frozen=True):
    """Requests that a server switch one of its shards to another sync model.

    Attributes:
        shard: the shard.
        sync: the sync model, as a spec.
        apply: when gradients are applied, as in the settings; empty: the default of the sync model.
        pulls: when pulls are answered, as in the settings; empty: unchanged.
    """

    shard: fields.Rank
    sync: fields.Text
    apply: fields.Text
    pulls: fields.Text


# --- a change of servers ------------------------------------------------------------------------


@fields.kind(40, fields.MAX_METADATA, answers=(messages.AcceptReply, messages.BusyReply, messages.NotReadyReply))
class ServersRequest(messages.Request, frozen=True):
    """Requests that the server of shard 0 move the shards of the run to other peers; see
    :mod:`gossipx.server.migration`.

    Attributes:
        number: identifies the request at its sender, so that a repetition does not start another migration.
        servers: ranks of the new servers, ascending.
        patience: seconds that the sender waits.
    """

    number: fields.Count
    servers: fields.Ranks
    patience: fields.Seconds


@fields.kind(41, fields.MAX_METADATA, answers=(messages.AcceptReply, messages.BusyReply, messages.NotReadyReply))
class PauseRequest(messages.Request, frozen=True):
    """Requests that the receiver push no further iteration; answered once all pushes under way have arrived.

    Attributes:
        epoch: of the new layout.
        servers: for each shard, the rank that hosts it in that layout.
        patience: seconds that the sender waits.
    """

    epoch: fields.Count
    servers: fields.Servers
    patience: fields.Seconds


@fields.kind(42, fields.MAX_METADATA, answers=(messages.AcceptReply, messages.BusyReply, messages.NotReadyReply))
class PrepareRequest(messages.Request, frozen=True):
    """Requests that a server of the new layout fetch the values it lacks; answered once it has all of them.

    Attributes:
        epoch: of that layout.
        state: of the clock with which its shards continue, as JSON.
        sync: its sync model.
        patience: seconds that the sender waits.
    """

    epoch: fields.Count
    state: fields.Ascii
    sync: fields.Text
    patience: fields.Seconds


@fields.kind(43, answers=(TablesReply, messages.NotReadyReply))
class RangesRequest(messages.Request, frozen=True):
    """Requests values that move to the sender, with the optimizer's state and the gradients that wait for them.

    Attributes:
        epoch: of the new layout.
        batch: index of the requested part, which all peers count in the same way.
        sync: the sync model of the sender's shards.
        patience: seconds that the sender waits.
    """

    epoch: fields.Count
    batch: fields.Count
    sync: fields.Text
    patience: fields.Seconds


@fields.kind(44, fields.MAX_METADATA, answers=(PlacedReply, messages.BusyReply, messages.NotReadyReply))
class PlaceRequest(messages.Request, frozen=True):
    """Announces the sender's layout; the reply carries the receiver's.

    Attributes:
        epoch: of that layout.
        servers: for each shard, the rank that hosts it.
        decided: all migrations up to this epoch are over, completed or abandoned.
    """

    epoch: fields.Count
    servers: fields.Servers
    decided: fields.Count


ServerRequest = GradientRequest | TablesRequest | SwitchRequest
"""Requests to a server."""
CarryingRequest = messages.ElasticRequest | messages.ShardRequest | GradientRequest
"""Requests whose payload is a model or a part of one."""
CarryingReply = messages.ModelReply | messages.ShareReply | messages.ReferenceReply | TablesReply
"""Replies whose payload is a model or a part of one."""
