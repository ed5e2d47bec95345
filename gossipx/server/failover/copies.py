"""The replication of shards: which shards a peer holds, which it replicates, and how these roles change.

A shard with a replica has two peers: its holder serves it, and the other one follows the holder's records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gossipx.peer.exchange import PeerContext
from gossipx.protocol.effects import Answer, Effect, Forget, Note
from gossipx.protocol.events import Received
from gossipx.protocol.messages import BusyReply, NotReadyReply, Reply
from gossipx.protocol.server_messages import CopyRequest, RecordRequest, ServerRequest
from gossipx.server.failover.replica import FOLLOW, Replica, Standby
from gossipx.server.replies import Replies
from gossipx.server.shard import Shard


class Replication:
    """One peer's part in all replicated shards. Methods return the effects to carry out.

    Args:
        context: the role's.
        replies: the table of reply handlers.
        shards: the hosted shards; changed here.
        training: returns the ranks that train.

    Attributes:
        replicas: the shards that this peer follows, or whose holder is not known yet.
    """

    def __init__(
        self, context: PeerContext, replies: Replies, shards: dict[int, Shard], training: Callable[[], Sequence[int]]
    ):
        self._context = context
        self._replies = replies
        self._shards = shards
        self._training = training
        self.replicas: dict[int, Replica] = {}

    def follow(self, shard: Shard, holder: int, initial_holder: bool = False) -> Replica:
        """Follow a shard that ``holder`` serves; an ``initial_holder`` will hold it unless ``holder`` already does."""
        answered = partial(self._copy_answered, shard.index)
        self.replicas[shard.index] = Replica(shard, holder, self._context, self._replies, answered, initial_holder)
        return self.replicas[shard.index]

    def begin(self, now: float) -> list[Effect]:
        """Request a copy of every replicated shard, once all peers have reached START."""
        return [effect for replica in self.replicas.values() for effect in replica.ask(now)]

    def _standby(self, index: int) -> Standby | None:
        shard = self._shards.get(index)
        return shard.records if shard is not None and isinstance(shard.records, Standby) else None

    # --- requests --------------------------------------------------------------------------------

    def step_in(self, sender: int, request: ServerRequest, now: float) -> list[Effect]:
        """Become the holder of a replicated shard if a peer requests it and its holder is gone."""
        replica = self.replicas.get(request.shard)
        if replica is None:
            return []
        if isinstance(request, CopyRequest):  # the holder has restarted and lost its state
            other = sender == replica.holder and request.incarnation != replica.incarnation
            steps_in = other and replica.has_copy
        else:  # a request from our own worker proves nothing if others train: we may be the isolated peer
            own, alone = self._context.rank, set(self._training()) <= {self._context.rank}
            steps_in = self._context.members.is_gone(replica.holder) and (sender != own or alone)
        return self._take_over(request.shard, now, alone=True) if steps_in else []

    def _take_over(self, index: int, now: float, alone: bool = False) -> list[Effect]:
        """Become the holder of a shard that was followed."""
        replica = self.replicas.pop(index)
        self._replies.forget(() if replica.ticket is None else (replica.ticket,))
        shard = self._shards[index] = replica.shard
        alone = alone or self._context.members.is_gone(replica.holder)
        answered = partial(self._record_answered, index)
        shard.records = Standby(index, replica.holder, self._context, self._replies, answered, alone)
        text = f"this peer now holds shard {index}, from clock {shard.clock.clock}: peer {replica.holder} is gone"
        note = [] if replica.initial_holder else [Note("", text)]
        if not replica.has_copy:  # no known peer has held it
            return [*note, *shard.begin(now)]
        return [*replica.end(), *note, *shard.serve(now), *shard.update_members(self._training())]

    def record_received(self, event: Received, now: float) -> list[Effect]:
        """Handle a record of what happened to a shard."""
        request = event.request
        assert isinstance(request, RecordRequest)
        if request.shard in self.replicas:
            return self.replicas[request.shard].record_received(event, now)
        held = request.shard in self._shards
        reply = BusyReply() if held else NotReadyReply("it has no replica of this shard: start all peers alike")
        return [Answer(event.key, reply, now + request.patience)]

    def copy_requested(self, event: Received, shard: Shard, now: float) -> list[Effect]:
        """Handle a request for a copy of a shard that is held here."""
        request = event.request
        assert isinstance(request, CopyRequest)
        standby = self._standby(shard.index)
        if standby is None or event.sender != standby.rank or not shard.is_serving:
            return [Answer(event.key, NotReadyReply("it has no copy of this shard"), now + request.patience)]
        return standby.copy_requested(event, shard, now)

    # --- replies ---------------------------------------------------------------------------------

    def _record_answered(self, index: int, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the reply to a record of a shard that is held here."""
        standby = self._standby(index)
        assert standby is not None
        if isinstance(reply, BusyReply):
            return [Forget(ticket), *self._step_down(index, standby, now)]
        return standby.answered(ticket, reply, now)

    def _copy_answered(self, index: int, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the holder's reply to a request for a copy. It may make this peer the holder."""
        replica = self.replicas[index]
        effects = replica.answered(ticket, reply, now)
        return [*effects, *(self._take_over(index, now) if replica.initial_holder else [])]

    def _step_down(self, index: int, standby: Standby, now: float) -> list[Effect]:
        """Follow a shard from now on, since its replica has become the holder."""
        shard = self._shards.pop(index)
        replica = self.follow(shard, standby.rank)
        text = f"peer {standby.rank} now holds shard {index}, because it considered this peer lost"
        return [*standby.give_up(), *shard.step_down(), Note("", text), *replica.ask(now)]

    # --- losses and timers ------------------------------------------------------------------------

    def peer_lost(self, rank: int) -> list[Effect]:
        """Stop waiting for a lost peer's replicas."""
        effects: list[Effect] = []
        for index in self._shards:
            standby = self._standby(index)
            if standby is not None and standby.rank == rank and standby.enabled:
                text = f"shard {index} no longer has a replica: peer {rank} is gone"
                effects += [*standby.continue_alone(), Note("", text)]
        return effects

    def timer_fired(self, what: str, index: int, now: float) -> list[Effect]:
        """Handle a timer: request a copy again, or resume sending records."""
        if what == FOLLOW:  # without training workers, nothing more happens to the shard
            return self.replicas[index].ask(now) if index in self.replicas and self._training() else []
        if standby := self._standby(index):
            standby.retry()
        return []

    def send(self, now: float) -> list[Effect]:
        """Send the records that may be sent."""
        return [effect for index in self._shards if (one := self._standby(index)) for effect in one.send(now)]
