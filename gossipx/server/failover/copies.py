"""Which shards a peer holds and which it follows, where shards have replicas; and how that changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gossipx.peer.exchange import PeerContext
from gossipx.protocol.effects import Answer, Effect, Forget, Note
from gossipx.protocol.events import Received
from gossipx.protocol.messages import BusyReply, NotReadyReply, Reply
from gossipx.protocol.server_messages import CopyRequest, RecordRequest, ServerRequest, WaitingRequest
from gossipx.server.failover.replica import FOLLOW, Replica, Standby
from gossipx.server.replies import Replies
from gossipx.server.shard import Shard


class Replication:
    """One peer's part in all shards that have replicas. Each method says what is to be done.

    Args:
        context: of its role.
        replies: takes the handlers of its requests.
        shards: that it holds; changed here.
        training: gives the ranks that train.

    Attributes:
        replicas: shards that it follows, or of which it is not known yet who holds them.
    """

    def __init__(
        self, context: PeerContext, replies: Replies, shards: dict[int, Shard], training: Callable[[], Sequence[int]]
    ):
        self._context = context
        self._replies = replies
        self._shards = shards
        self._training = training
        self.replicas: dict[int, Replica] = {}

    def follow(self, shard: Shard, holder: int, begins: bool = False) -> Replica:
        """Follow a shard that another peer holds, or holds unless it is ours to begin with."""
        answered = partial(self._copy_answered, shard.index)
        self.replicas[shard.index] = Replica(shard, holder, self._context, self._replies, answered, begins)
        return self.replicas[shard.index]

    def begin(self, now: float) -> list[Effect]:
        """All have come to START: ask who holds what."""
        return [effect for replica in self.replicas.values() for effect in replica.ask(now)]

    def _standby(self, index: int) -> Standby | None:
        shard = self._shards.get(index)
        return shard.records if shard is not None and isinstance(shard.records, Standby) else None

    # --- what others ask --------------------------------------------------------------------------

    def step_in(self, sender: int, request: ServerRequest, now: float) -> list[Effect]:
        """Hold the shard of a replica from now on, if its holder is gone and it is asked for."""
        replica = self.replicas.get(request.shard)
        if replica is None or isinstance(request, RecordRequest | WaitingRequest):
            return []
        if isinstance(request, CopyRequest):  # the holder's process has ended: it is another that asks
            other = sender == replica.holder and request.incarnation != replica.incarnation
            steps_in = other and replica.has_copy
        else:  # its own worker's word is not enough, if there are others: it may be we who are cut off
            own, alone = self._context.rank, set(self._training()) <= {self._context.rank}
            steps_in = self._context.members.is_gone(replica.holder) and (sender != own or alone)
        return self._hold(request.shard, now, alone=True) if steps_in else []

    def _hold(self, index: int, now: float, alone: bool = False) -> list[Effect]:
        """A shard that was followed is held here from now on."""
        replica = self.replicas.pop(index)
        self._replies.forget(() if replica.ticket is None else (replica.ticket,))
        shard = self._shards[index] = replica.shard
        alone = alone or self._context.members.is_gone(replica.holder)
        answered = partial(self._record_answered, index)
        shard.records = Standby(index, replica.holder, self._context, self._replies, answered, alone)
        told = f"shard {index} is held here from clock {shard.clock.clock} on: peer {replica.holder} is gone"
        note = [] if replica.begins else [Note("", told)]
        if not replica.has_copy:  # nobody has held it, as far as can be told
            return [*note, *shard.begin(now)]
        return [*replica.end(), *note, *shard.hold(now), *shard.look(self._training())]

    def recorded(self, event: Received, now: float) -> list[Effect]:
        """Another tells what has happened to a shard."""
        request = event.request
        assert isinstance(request, RecordRequest)
        if request.shard in self.replicas:
            return self.replicas[request.shard].recorded(event, now)
        held = request.shard in self._shards
        reply = BusyReply() if held else NotReadyReply("it holds no replica of this shard: give all peers the same")
        return [Answer(event.key, reply, now + request.patience)]

    def asked_for(self, event: Received, shard: Shard, now: float) -> list[Effect]:
        """Another asks for a copy of a shard that is held here."""
        request = event.request
        assert isinstance(request, CopyRequest)
        standby = self._standby(shard.index)
        if standby is None or event.sender != standby.rank or not shard.begun:
            return [Answer(event.key, NotReadyReply("it has no copy to give"), now + request.patience)]
        return standby.copied(event, shard, now)

    # --- what comes of its own requests -----------------------------------------------------------

    def _record_answered(self, index: int, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the answer to a record of a shard that is held here."""
        standby = self._standby(index)
        assert standby is not None
        if isinstance(reply, BusyReply):
            return [Forget(ticket), *self._let_go(index, standby, now)]
        return standby.answered(ticket, reply, now)

    def _copy_answered(self, index: int, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the answer of the holder of a shard that is followed here; it may have to be held here."""
        replica = self.replicas[index]
        effects = replica.answered(ticket, reply, now)
        return [*effects, *(self._hold(index, now) if replica.begins else [])]

    def _let_go(self, index: int, standby: Standby, now: float) -> list[Effect]:
        """The replica has taken the shard over: it is followed from now on."""
        shard = self._shards.pop(index)
        replica = self.follow(shard, standby.rank)
        told = f"shard {index} is held by peer {standby.rank} now, which had found this one gone"
        return [*standby.give_up(), *shard.let_go(), Note("", told), *replica.ask(now)]

    # --- as time goes on --------------------------------------------------------------------------

    def lost(self, rank: int) -> list[Effect]:
        """A peer is gone: its replicas are not waited for."""
        effects: list[Effect] = []
        for index in self._shards:
            standby = self._standby(index)
            if standby is not None and standby.rank == rank and standby.wanted:
                told = f"shard {index} has no replica now: peer {rank} is gone"
                effects += [*standby.gone(), Note("", told)]
        return effects

    def due(self, what: str, index: int, now: float) -> list[Effect]:
        """A rest is over: who is followed is asked again, or records are sent again."""
        if what == FOLLOW:  # once nobody trains there is nothing to come
            return self.replicas[index].ask(now) if index in self.replicas and self._training() else []
        if standby := self._standby(index):
            standby.again()
        return []

    def send(self, now: float) -> list[Effect]:
        """Send the records that may be sent."""
        return [effect for index in self._shards if (one := self._standby(index)) for effect in one.send(now)]
