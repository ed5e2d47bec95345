"""Agreement on the final model: after the last wave peers compare their models, and replace those that differ.

A peer that dies or stops during the last wave leaves the others with different means. Therefore each peer announces the
checksum of its final model (stage COMPARE) together with the model's weight: the number of models of which it is the
mean. If all are equal, the peers agree. If not, all choose the same model, and those that have another one fetch it:

1. a model of a peer that has its final figures already (DONE), since that peer does not change any more;
2. the model of most weight, which lost the least training;
3. of these the one that most peers have, and at last the one of the lowest rank.

Then they compare again, since peers may have chosen from different announcements or may have failed meanwhile. Once no
more peers fail, one more comparison finds all models equal, because by then all know the same announcements. After
:data:`COMPARISONS` a peer keeps the model that it has, and says so.

A peer that sleeps meanwhile finds nobody to compare its model with when it wakes. To such a peer, others that have
ended without it look like others that have crashed, and so does it to them. Therefore only peers that were seen to end,
at DONE, count as agreeing, and a peer claims agreement only if they, with itself, outnumber those of the finish that it
did not see end, and none of these may have ended while it slept. Two groups of peers that lost sight of each other in
the finish can then not both claim it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gossipx.peer.membership import Membership, OtherPeer, Requests
from gossipx.protocol.effects import Adopt, Answer, Effect, Forget, Note, Resume, Send
from gossipx.protocol.events import Received
from gossipx.protocol.messages import FinalRequest, ModelReply, NotReadyReply, Stage

COMPARISONS = 5
"""Comparisons of one finish: the first, and one for each of four failures that happen one after the other."""


@dataclass
class _Candidate:
    """A final model that peers have announced.

    Attributes:
        holders: the ranks of the peers that have it.
        final: whether one of them does not change any more.
        weight: the sum of the weights of the models of which it is the mean.
    """

    holders: list[int]
    final: bool = False
    weight: float = 0.0

    def order(self) -> tuple[bool, float, int, int]:
        """Return the sort key: the largest is chosen."""
        return self.final, self.weight, len(self.holders), -min(self.holders)


class Agreement:
    """One peer's view of the final models. Methods return the effects to carry out; None: compare again.

    Args:
        rank: this peer's own rank.
        members: the role's membership list.
        requests: the role's open requests.

    Attributes:
        comparison: number of the current comparison, from 1; 0 before the first.
        digest: checksum of our final model; empty: we have none.
        weight: its weight, as that of a candidate.
        since: when our finish began.
        averaged: the ranks that the last wave averages, as each of its members names them; empty before it.
        settled: whether the last comparison found all models equal; None: the comparisons are not over.
    """

    def __init__(self, rank: int, members: Membership, requests: Requests):
        self.comparison = 0
        self.digest = ""
        self.weight = 0.0
        self.since = math.inf
        self.averaged: tuple[int, ...] = ()
        self.settled: bool | None = None
        self._rank = rank
        self._members = members
        self._requests = requests
        self._chosen = _Candidate([])
        self._wanted = ""  # the digest of that model
        self._ticket: int | None = None  # of our request for it, until it is adopted
        self._source = -1  # rank that it went to
        self._is_adopting = False

    def compare(self, arrived: Sequence[int], now: float) -> list[Effect] | None:
        """Compare our model with those of the peers that have arrived at this comparison."""
        found = {self.digest: _Candidate([self._rank], weight=self.weight)}
        for rank in arrived:
            other = self._members.others.peek(rank)
            if not other.digest:  # it takes no part
                continue
            candidate = found.setdefault(other.digest, _Candidate([]))
            candidate.holders.append(rank)
            candidate.final = candidate.final or other.stage is Stage.DONE
            candidate.weight = max(candidate.weight, other.weight)
        if len(found) == 1:
            self.settled = True
            return [Resume()]
        if self.comparison >= COMPARISONS:
            self.settled = False
            text = f"peers still hold {len(found)} different models after {self.comparison} comparisons"
            return [Note("differs", f"{text}: this peer keeps its own"), Resume()]
        self._wanted = max(found, key=lambda digest: found[digest].order())
        if self._wanted == self.digest:
            return None
        self._chosen = found[self._wanted]
        self._chosen.holders.sort()
        names = ", ".join(map(str, self._chosen.holders))
        note = Note("differs", f"the finish left peers with different models: fetching that of peer {names}")
        # Each peer starts elsewhere in the list, so that not all ask one holder.
        start = self._rank % len(self._chosen.holders)
        self._chosen.holders = self._chosen.holders[start:] + self._chosen.holders[:start]
        request = self._fetch(now)
        return None if request is None else [note, request]

    def _fetch(self, now: float) -> Send | None:
        if not self._chosen.holders:
            self._ticket = None
            return None
        self._source, deadline = self._chosen.holders.pop(0), now + self._members.model_timeout
        request = self._requests.send(self._source, FinalRequest(self._wanted), now, deadline)
        self._ticket = request.ticket
        return request

    def replied(self, ticket: int) -> list[Effect]:
        """Handle the model that we requested."""
        if ticket != self._ticket:
            return [Forget(ticket)]
        self._is_adopting = True
        return [Adopt(ticket)]

    def failed(self, ticket: int, now: float) -> list[Effect] | None:
        """Handle a request for a final model that brought none: ask another peer that has it."""
        if ticket != self._ticket:
            return [Forget(ticket)]
        self._is_adopting = False
        request = self._fetch(now)
        return None if request is None else [Forget(ticket), request]

    def adopted(self, ticket: int) -> bool:
        """Record that our model was replaced; return whether ``ticket`` was our request."""
        if ticket != self._ticket:
            return False
        self._ticket, self._is_adopting = None, False
        self.weight = self._chosen.weight
        return True

    def source_of(self, ticket: int) -> int | None:
        """Return the rank from which we requested the model ``ticket``; None if it is not our request."""
        return self._source if ticket == self._ticket else None

    def requested(self, event: Received, wanted: str, now: float) -> Answer:
        """Answer a request for our final model."""
        if wanted != self.digest or self._is_adopting:
            return Answer(event.key, NotReadyReply("it has another final model by now"), now + self._members.timeout)
        return Answer(event.key, ModelReply(step=0), now + self._members.model_timeout)

    @property
    def unseen(self) -> list[int]:
        """The ranks, ascending, of the peers of the finish that were not seen to end it or to leave.

        They are those that the last wave averages, as its members name them, and those that we met: see
        :meth:`_was_here`.
        """
        known = self._members.others.known.copy()  # the main thread asks, too
        ended = {rank for rank, other in known.items() if other.stage in (Stage.DONE, Stage.LEFT)}
        here = {*self.averaged, *(rank for rank, other in known.items() if self._was_here(other))}
        return sorted(here - ended - {self._rank})

    def _was_here(self, other: OtherPeer) -> bool:
        """Return whether a peer was in the finish, as far as we know: it may have ended while we slept, it has told us
        that it reached the finish, or it has told us its stage since we reached ours.
        """
        return other.missed or (other.stage or Stage.JOINING) >= Stage.FINISH or other.told_at >= self.since

    @property
    def doubted(self) -> list[int]:
        """:attr:`unseen`; empty if the peers that were seen to end with a model, and this one, outnumber them.

        Not if one of them may have ended while we slept: it may have taken all sleepers for dead before its finish.
        """
        unseen = self.unseen
        slept = any(self._members.others.peek(rank).missed for rank in unseen)
        return unseen if slept or len(unseen) > len(self._ended()) else []

    def _ended(self) -> list[OtherPeer]:
        others = self._members.others.known.copy().values()
        return [other for other in others if other.stage is Stage.DONE and other.digest]

    @property
    def agreed(self) -> bool | None:
        """Whether all peers that were seen to end hold our model, and are enough; None: no models were compared."""
        if not self.comparison:
            return None
        same = all(other.digest == self.digest for other in self._ended())
        return self.settled is True and same and not self.doubted

    def note_unseen(self) -> list[Effect]:
        """Name the peers whose end was not seen, as we end."""
        if not self.comparison or not self.unseen:
            return []
        names, claim = ", ".join(map(str, self.unseen)), ", so no agreement is claimed" if self.doubted else ""
        return [Note("unseen", f"peer {names} was not seen to end the finish: it may hold another model{claim}")]

    def leave(self) -> None:
        """Drop a model that still arrives."""
        self._ticket = None
