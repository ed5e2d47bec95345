"""Newcomers: peers that are in nobody's hosts file and join a run under way.

A newcomer asks a peer of the run to be admitted. Only the lowest rank that trains, as far as is known, admits others,
so that two newcomers that ask at the same time get different ranks; every other peer names that one. The newcomer
gets the lowest free rank, and announces itself to all peers that it was told of. From then on it is a peer like the
others: it adopts a model before it exchanges any, takes part in waves and in the finish, and may admit others.

Anybody who reaches a peer may ask, and never come. Until a newcomer connects its rank is therefore only reserved, for
peer_timeout, and no other peer hears of it. One host has few ranks reserved at a time; its next newcomer gets the rank
that was reserved for its oldest. If hosts together have too many, the next one gets a rank of the host that has most.
Of two that ask with one name or address before either comes, both get the same rank, and the first to come has it. One
that comes late still has its rank if nobody else has come with it.

Every peer keeps the list of the peers that joined. It learns of one from the connection that this one opens, or from
the list that each stage announcement and each reply to one carries. A peer that was only heard of counts as lost, so
that nobody waits for it before it was met.

During a network partition two peers may admit newcomers, each under the same rank. When the lists meet, the newcomer
that was admitted by the lower rank keeps it, on all peers alike. The other one stops and has to ask again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from gossipx.peer.barrier import Barrier
from gossipx.peer.membership import Membership
from gossipx.protocol.effects import AddPeer, Effect, Note, ReportEntry, Resume, Stop
from gossipx.protocol.events import AskEntry, PeerMet, Received, Replied
from gossipx.protocol.fields import MAX_JOINED, JoinedPeer
from gossipx.protocol.messages import ArriveRequest, HereReply, Stage
from gossipx.protocol.places import fault

OVER = "its training is over"
MAX_RESERVED = 32
"""Ranks that are reserved for newcomers on one host: twice the accelerators of a large one, all joining at once."""


class _Reserved(NamedTuple):
    """A rank that a newcomer has until a time, unless it has connected by then; ``opener`` is its host."""

    peer: JoinedPeer
    opener: str
    until: float


class Newcomers:
    """One peer's list of the peers that joined the run. Methods return the effects to carry out.

    Args:
        rank: this peer's own rank.
        size: number of peers that began the run.
        members: the role's membership list; newcomers are added to it.
        barrier: announces this peer to those that it hears of while it waits.
        why_closed: why no peer can join this run; empty: one can.
        known: peers that had joined when this one started, including itself if it is one of them.
    """

    def __init__(
        self, rank: int, size: int, members: Membership, barrier: Barrier, why_closed: str, known: Iterable[JoinedPeer]
    ):
        self._rank = rank
        self._size = size
        self._members = members
        self._barrier = barrier
        self._why_closed = why_closed
        self._peers = {peer.rank: peer for peer in known}
        self._reserved: dict[int, _Reserved] = {}  # by rank, in the order in which they were given
        for each in self._peers.keys() - {rank}:
            members.add(each, lost=False)

    @property
    def listed(self) -> tuple[JoinedPeer, ...]:
        """All peers that joined, by rank."""
        return tuple(self._peers[rank] for rank in sorted(self._peers))

    @property
    def is_one(self) -> bool:
        """Whether this peer itself joined the run while it was in progress."""
        return self._rank >= self._size

    def present(self) -> dict[int, str]:
        """Return the names, by rank, of the other newcomers that this peer has met and that have not left."""
        peek = self._members.others.peek
        here = (peer for peer in self.listed if peer.rank != self._rank and not peek(peer.rank).is_out)
        return {peer.rank: peer.name for peer in here}

    def took_part(self) -> dict[int, str]:
        """Return the names, by rank, of the newcomers that this peer has ever met, and its own if it is one.

        Others may have been admitted and never begun, such as for an error in their script.
        """
        peek = self._members.others.peek
        met = [peer for peer in self.listed if peer.rank == self._rank or peek(peer.rank).first_stage is not None]
        return {peer.rank: peer.name for peer in met}

    # --- admission --------------------------------------------------------------------------------

    def asked(self, event: AskEntry, stage: Stage, now: float) -> list[Effect]:
        """Admit a process, or say why not; ``stage`` is this peer's own."""
        if refusal := self._why_closed or fault(event.host, event.port, event.name):
            return [ReportEntry(event.number, refusal=refusal)]
        peek = self._members.others.peek
        training = [rank for rank in self._members.awaited() if not self._is_over(peek(rank).stage)]
        if not self._is_over(stage):
            training.append(self._rank)
        if not training:
            return [ReportEntry(event.number, refusal=OVER)]
        if min(training) != self._rank:
            return [ReportEntry(event.number, elsewhere=min(training))]
        if stage is Stage.JOINING:
            return [ReportEntry(event.number, later="it has no model yet")]
        return [self._admit(event, now)]

    def _admit(self, event: AskEntry, now: float) -> ReportEntry:
        """Give a process a rank that is free, or the one that it was given before."""
        own = event.name, event.host, event.port
        for peer in self._peers.values():
            if (peer.name, peer.host, peer.port) == own:
                return self._entry(event, peer)
            if _collide(peer, event):
                refusal = f"{peer.name} is peer {peer.rank} of the run: choose another name or --port"
                return ReportEntry(event.number, refusal=refusal)
        kept = {rank: one for rank, one in self._reserved.items() if one.until > now}
        given = [rank for rank, one in kept.items() if _collide(one.peer, event)] or self._overdue(kept, event.opener)
        if given:
            rank = given[0]
            del kept[rank]  # to be the newest
        elif len(self._peers) >= MAX_JOINED:
            return ReportEntry(event.number, refusal=f"{MAX_JOINED} peers have joined already")
        else:
            rank = next(free for free in itertools.count(self._size) if free not in self._peers and free not in kept)
        newcomer = JoinedPeer(rank, *own, self._rank)
        self._reserved = {**kept, rank: _Reserved(newcomer, event.opener, now + self._members.timeout)}
        return self._entry(event, newcomer)

    def _overdue(self, kept: dict[int, _Reserved], opener: str) -> list[int]:
        """Return the ranks, oldest first, of which one is given again, for there are too many; empty: there are not."""
        ranks: dict[str, list[int]] = {}
        for rank, one in kept.items():
            ranks.setdefault(one.opener, []).append(rank)
        if len(own := ranks.get(opener, [])) >= MAX_RESERVED:
            return own
        return max(ranks.values(), key=len, default=[]) if len(self._peers) + len(kept) >= MAX_JOINED else []

    def _entry(self, event: AskEntry, newcomer: JoinedPeer) -> ReportEntry:
        joined = {**self._peers, newcomer.rank: newcomer}
        lost = tuple(sorted({*self._members.others} - {*self._members.awaited(), newcomer.rank}))
        return ReportEntry(event.number, newcomer.rank, tuple(joined[rank] for rank in sorted(joined)), lost)

    def _is_over(self, stage: Stage | None) -> bool:
        return stage is not None and stage >= Stage.FINISH

    # --- hearing of newcomers -----------------------------------------------------------------------

    def met(self, event: PeerMet, now: float) -> list[Effect]:
        """Handle a connection of a peer that joined."""
        known = self._peers.get(event.peer.rank)
        if self._why_closed or (known is not None and known.by == event.peer.by):  # it came too late for its place
            return []
        return self._learn(event.peer, now)

    def told(self, event: object, now: float) -> list[Effect]:
        """Read the list of the peers that joined in an announcement or in the reply to one."""
        match event:
            case Received(request=ArriveRequest(joined=joined)) | Replied(reply=HereReply(joined=joined)) if joined:
                return [effect for peer in joined if not self._why_closed for effect in self._learn(peer, now)]
        return []

    def _learn(self, peer: JoinedPeer, now: float) -> list[Effect]:
        """Take a newcomer into the list, unless another one has a better claim to its rank."""
        known = self._peers.get(peer.rank)
        if known == peer or peer.rank < self._size or (known is not None and _claim(known) <= _claim(peer)):
            return []
        if known is None and len(self._peers) >= MAX_JOINED:
            return []
        if found := fault(peer.host, peer.port, peer.name):
            return [Note("newcomer", f"peer {peer.rank} cannot join the run: {found}")]
        if peer.rank == self._rank:
            cause = f"rank {peer.rank} of this run belongs to {peer.name}, which another peer admitted meanwhile"
            return [Stop(f"{cause}: join again"), Resume()]
        effects = self._take(peer)
        if known is not None:
            text = f"{known.name} and {peer.name} were both admitted as peer {peer.rank}: {known.name} must join again"
            effects.append(Note("", text))
        return [*effects, *self._barrier.met(peer.rank, now)]

    def _take(self, peer: JoinedPeer) -> list[Effect]:
        self._reserved.pop(peer.rank, None)
        self._peers[peer.rank] = peer
        self._members.add(peer.rank, lost=True)
        return [AddPeer(peer)]


def _collide(peer: JoinedPeer, event: AskEntry) -> bool:
    """Return whether a newcomer and one that asks have one name or one address."""
    return peer.name == event.name or (peer.host, peer.port) == (event.host, event.port)


def _claim(peer: JoinedPeer) -> tuple[int, str]:
    """Return the sort key of two newcomers with one rank: the smaller one keeps it."""
    return peer.by, peer.name
