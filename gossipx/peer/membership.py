"""The membership list: what this peer knows about each other peer, and the requests that await a reply.

There is no membership service. Every peer learns about the others from ordinary traffic: any request or reply proves
that its sender is alive, and a failed request is the only evidence that it is not. For each other peer the list holds

- its stage, as it last told us, and its incarnation, which a restart changes;
- whether it is **suspected**: requests have failed since it was last heard from. It is then left alone for a back-off
  that doubles with each failure, up to ``peer_timeout / 4``;
- whether it is **lost**: requests have failed for ``peer_timeout``, or its address refused three connections in a row.
  Nobody waits for a lost peer. One message from it ends the loss, and a restarted peer is accepted in the same way;
- whether it is **suspended**: its last model held NaN or Inf, so none is requested from it for a while;
- the times of recent model transfers in each direction, from which the next deadline is derived, as TCP derives its
  retransmission timeout from round-trip times.

Five questions are asked of these, each by other parts:

==========================  ==========================================================================================
``OtherPeer.is_out``        lost or has left: nobody waits for it
``OtherPeer.silent``        suspected, lost or has left: it is not expected to answer
``unavailable``             silent or suspended: to be left out of a wave
``OtherPeer.has_ended``     has left, or nothing listens at its address any more: its process is not there
``is_gone``                 lost or has ended, which may show earlier: server mode continues without it
==========================  ==========================================================================================

:class:`Membership` answers the questions that depend on this: which neighbour to exchange with next, how long to wait
for it, which peers a barrier waits for and which take part in a wave. It produces no effects; it is updated by
:mod:`gossipx.peer.role`, which reports every message and every failure.

A run may have thousands of peers, and in virtual time all of them share one process, but each peer exchanges models
with few others. Therefore :class:`Others` stores an entry for a peer when something about it is first recorded or
looked up. In CPython 3.11 an entry takes 330 bytes, the first transfer in one direction 170 more, and 14 further ones
another 700.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from gossipx.figures import Counters
from gossipx.protocol.effects import Send
from gossipx.protocol.events import Fault
from gossipx.protocol.messages import PeerProgress, Request, Stage
from gossipx.topology.ranks import AllBut, Without, added_to, position_of
from gossipx.topology.schedules import Schedule

FIRST_BACKOFF = 1 / 100
"""First back-off after a failed request, as a share of ``peer_timeout`` (0.3 s of 30 s); it doubles each time."""
LONGEST_BACKOFF = 1 / 4
"""Longest back-off, as a share of ``peer_timeout``; short enough to notice the end of a network partition soon."""
PATIENCE = 2.0, 4.0
"""A model may take 2 · (m + 4 s) seconds, with m the median and s the deviation of recent transfers: twice what is
hardly ever exceeded, so that the deadline grows ahead of a network that slows down steadily."""
DEVIATION = 1.4826
"""Factor from the median absolute deviation to the standard deviation of normally distributed values."""
PATIENCE_LEAST = 1 / 4
"""Lower bound of that deadline, as a share of peer_timeout (7.5 s of 30 s), as a machine may be overloaded for a while.
A sender allows at least the whole peer_timeout: the receiver knows better when to give up."""
PATIENCE_DOUBLINGS = 6
"""Limit on doublings of that deadline, one per transfer that missed it: all that is known is that it takes longer."""

REFUSALS = 3
"""A known peer whose address refuses this many connections in a row is lost: its process has ended."""
MAX_TRANSFERS = 15
"""Number of transfer times behind a deadline: enough for a median, few enough to follow changes of the network."""


@dataclass(slots=True)
class Transfers:
    """Recent model transfers in one direction, with one peer or with all.

    Attributes:
        seconds: durations of the last transfers.
        late: transfers that have missed their deadline since the last success.
        rate: smoothed models per second; None before the first transfer.
    """

    seconds: tuple[float, ...] = ()
    late: int = 0
    rate: float | None = None

    def record(self, seconds: float) -> None:
        """Record a transfer that took ``seconds``; it counts half in the moving average ``rate``."""
        self.seconds = (*self.seconds[1 - MAX_TRANSFERS :], seconds)
        self.late = 0
        if seconds > 0:
            self.rate = ((self.rate or 1 / seconds) + 1 / seconds) / 2


_NO_REPORT: dict[str, Any] = {}


@dataclass(slots=True)
class OtherPeer:
    """This peer's knowledge of one other peer.

    Attributes:
        first_stage: the first stage that it told us; None: none yet.
        stage: the furthest stage that its current incarnation told us; None: none yet.
        incarnation: the incarnation that told it; None: none did, also if ``stage`` is known from ``all_train``.
        restarted: whether that is not its first incarnation.
        step: iterations that it had done by then.
        comparison, digest, weight: of its final model, as in :class:`~gossipx.protocol.messages.PeerProgress`, where
            the weight is called ``models``.
        told_at: when it last told its stage.
        advanced_at: when its stage, its iterations or its comparison last advanced.
        report: its final figures; empty until it has some.
        knows_report: whether it has our final figures.
        faults: requests to it that failed in a row; determines the back-off.
        refusals: how many times in a row nothing answered at its address.
        silent_since: time of the first failure since it was last heard from; None while it is responsive.
        backoff_until: time before which no request is sent to it, unless it is heard from earlier.
        suspended_until: time before which no model is requested from it, since its last one held NaN or Inf.
        lost: whether it is considered dead. Nobody waits for it.
        missed: whether we slept since its last reply, so that it may have ended without us; the role resets it at the
            next one.
        incoming: transfers of its models to us; None: there was no reason to look at them yet.
        outgoing: transfers of our models to it; None: as above.
    """

    first_stage: Stage | None = None
    stage: Stage | None = None
    incarnation: int | None = None
    restarted: bool = False
    step: int = 0
    comparison: int = 0
    digest: str = ""
    weight: float = 0.0
    told_at: float = -math.inf
    advanced_at: float = -math.inf
    report: dict[str, Any] = field(default_factory=lambda: _NO_REPORT)
    knows_report: bool = False
    faults: int = 0
    refusals: int = 0
    silent_since: float | None = None
    backoff_until: float = 0.0
    suspended_until: float = 0.0
    lost: bool = False
    missed: bool = False
    incoming: Transfers | None = None
    outgoing: Transfers | None = None

    def transfers(self, outgoing: bool) -> Transfers:
        """Return the transfers to this peer if ``outgoing``, else those from it."""
        if outgoing:
            self.outgoing = self.outgoing or Transfers()
            return self.outgoing
        self.incoming = self.incoming or Transfers()
        return self.incoming

    @property
    def silent(self) -> bool:
        """Whether it is suspected, lost or has left."""
        return self.is_out or self.silent_since is not None

    @property
    def is_out(self) -> bool:
        """Whether it is lost or has left."""
        return self.lost or self.stage is Stage.LEFT

    @property
    def has_ended(self) -> bool:
        """Whether its process seems to have ended: it has left the run, or nothing listens at its address any more."""
        enough_refusals = 1 if self.stage is Stage.DONE else REFUSALS
        return self.stage is Stage.LEFT or (self.stage is not None and self.refusals >= enough_refusals)

    def may_be_asked(self, now: float) -> bool:
        """Return whether a model may be requested from it now."""
        return self.stage is not Stage.LEFT and max(self.backoff_until, self.suspended_until) <= now

    def record(self, told: PeerProgress, now: float) -> None:
        """Record its stage and progress, unless it is known to have advanced further: messages may overtake each other.

        An announcement of another incarnation replaces all earlier ones.
        """
        self.first_stage = told.stage if self.first_stage is None else self.first_stage
        self.told_at = now
        is_new = self.incarnation not in (None, told.incarnation)
        if self.incarnation is None and self.stage is Stage.TRAIN:
            # Known only from all_train, which is of its first process: one in an earlier stage was started after it.
            is_new = told.stage < Stage.TRAIN
        before, after = (self.stage or 0, self.comparison, self.step), (told.stage, told.comparison, told.step)
        if is_new or self.stage is None or after > before:
            self.stage, self.report, self.step, self.advanced_at = told.stage, told.report, told.step, now
            self.comparison, self.digest, self.weight = told.comparison, told.digest, told.models
        self.incarnation, self.restarted = told.incarnation, self.restarted or is_new


class Others(Mapping[int, OtherPeer]):
    """The knowledge of one peer about each other peer of the run, by rank.

    Iteration is over all ranks, ascending. ``others[rank]`` stores an entry if it is missing, so questions about all
    peers use :meth:`peek` or :attr:`known`.

    Args:
        rank: this peer's own rank.
        size: number of peers that began the run.

    Attributes:
        ranks: all ranks, ascending.
        known: the stored entries. Other threads must iterate over a copy.
        doubtful: ranks that may not be available for an exchange: those looked up since
            :meth:`~gossipx.peer.membership.Membership.draw` last found them available.
    """

    def __init__(self, rank: int, size: int):
        self.known: dict[int, OtherPeer] = {}
        self.doubtful: set[int] = set()
        self.ranks: Sequence[int] = AllBut(rank, size)
        self._unknown = OtherPeer()

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.known or rank in self.ranks

    def __getitem__(self, rank: int) -> OtherPeer:
        entry = self.entry(rank)
        self.doubtful.add(rank)  # the caller may change the entry
        return entry

    def entry(self, rank: int) -> OtherPeer:
        """Return the entry of ``rank`` for a change that cannot make it unavailable for exchanges.

        Raises:
            KeyError: the run has no such other peer.
        """
        entry = self.known.get(rank)
        if entry is None:
            if rank not in self.ranks:
                raise KeyError(rank)
            entry = self.known[rank] = OtherPeer(self._unknown.first_stage, self._unknown.stage)
        return entry

    def peek(self, rank: int) -> OtherPeer:
        """Return what is known of ``rank``, to be read only."""
        return self.known.get(rank, self._unknown)

    def add(self, rank: int, entry: OtherPeer) -> None:
        """Add a peer that joined, or replace the entry of another one with its rank."""
        self.known[rank] = entry
        self.doubtful.add(rank)
        if rank not in self.ranks:
            self.ranks = added_to(self.ranks, rank)

    def all_train(self) -> None:
        """Record that all other peers have started and are training, without an entry for each."""
        self._unknown = OtherPeer(Stage.START, Stage.TRAIN)
        for other in self.known.values():
            other.first_stage, other.stage = Stage.START, Stage.TRAIN


class Rates(Mapping[int, float]):
    """The measured models per second from each peer or, if ``outgoing``, to each; read from the entries when used."""

    def __init__(self, others: Others, outgoing: bool):
        self._known = others.known
        self._outgoing = outgoing

    def __getitem__(self, rank: int) -> float:
        other = self._known.get(rank)
        rate = None if other is None else other.transfers(self._outgoing).rate
        if rate is None:
            raise KeyError(rank)
        return rate

    def __iter__(self) -> Iterator[int]:
        return (rank for rank, other in self._known.items() if other.transfers(self._outgoing).rate is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Membership:
    """The membership list of one peer.

    Args:
        rank: this peer's own rank.
        size: number of peers in the run.
        schedule: chooses partners, within its topology.
        peer_timeout: seconds.
        rng: used to choose partners and to randomize back-offs.
        model_timeout: seconds that a model may take before any transfer was measured; peer_timeout if that is more.
        counts: gets the number of peers that became suspected after they had been heard from.

    Attributes:
        others: the entry of each other peer, by rank.
        size: number of peers in the run, with those that joined it under way.
        timeout: peer_timeout.
        model_timeout: seconds to wait for a model when no transfer was measured.
        last_transfer: the rank of the peer to or from which a model was last sent, and when; None: none was.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        schedule: Schedule,
        peer_timeout: float,
        rng: random.Random,
        model_timeout: float = 0.0,
        counts: Counters | None = None,
    ) -> None:
        self.others = Others(rank, size)
        self.size = max(size, rank + 1)
        self._rank = rank
        self._schedule = schedule
        of_graph = schedule.topology.neighbours  # a peer that joins has all others as neighbours
        self._neighbours: Sequence[int] = of_graph[rank] if rank < size else AllBut(rank, size)
        self._rates = Rates(self.others, outgoing=False), Rates(self.others, outgoing=True)
        self._with_all = Transfers(), Transfers()  # the last transfers with any peer, incoming and outgoing
        self._round = -1  # the schedule's round: one per exchange
        self.timeout = peer_timeout
        self.model_timeout = max(peer_timeout, model_timeout)
        self._counts = Counters() if counts is None else counts
        self.last_transfer: tuple[int, float] | None = None
        self._rng = rng

    def add(self, rank: int, lost: bool) -> None:
        """Add a peer that joined, as a neighbour of all, or forget what is known of another one with its rank.

        Args:
            lost: count it as lost until it is heard from.
        """
        self.others.add(rank, OtherPeer(lost=lost))
        if position_of(rank, self._neighbours) is None:
            self._neighbours = added_to(self._neighbours, rank)
        self.size = max(self.size, rank + 1)

    def count_as_lost(self, ranks: Iterable[int]) -> None:
        """Count peers as lost until they are heard from."""
        for rank in ranks:
            self.others.entry(rank).lost = True

    def draw(
        self,
        now: float,
        exclude: Collection[int] = (),
        again: bool = False,
        outgoing: bool = False,
        in_training: bool = False,
    ) -> int | None:
        """Return the neighbour to exchange with next; None if none is available.

        Args:
            exclude: ranks to exclude.
            again: choose a replacement within the current round of the schedule, instead of starting the next round.
            outgoing: the exchange sends our model, rather than fetching one; selects whose transfer rates count.
            in_training: exclude peers whose training is over, which others may still pull from.
        """
        self._round += not again
        unavailable = self._unavailable_for_exchange(now, Stage.TRAIN if in_training else Stage.COMPARE)
        unavailable.update(exclude)
        free = Without(self._neighbours, unavailable) if unavailable else self._neighbours
        return self._schedule.partner(self._rank, self._round, free, self._rng, self._rates[outgoing])

    def _unavailable_for_exchange(self, now: float, last: Stage) -> set[int]:
        """Return the ranks that may not be asked now, or are in a stage after ``last``, in time linear in the doubtful
        ones.
        """
        known, doubtful = self.others.known, self.others.doubtful
        unavailable = set()
        for rank in tuple(doubtful):
            other = known[rank]
            stage = other.stage or Stage.JOINING
            if not other.may_be_asked(now) or stage > last:
                unavailable.add(rank)
            elif stage <= Stage.TRAIN:  # one in a later stage is unavailable with another ``last``
                doubtful.discard(rank)
        return unavailable

    def record_transfer(self, rank: int, seconds: float, now: float, outgoing: bool = False) -> None:
        """Record that a model took ``seconds`` from ``rank`` to us (``outgoing``: from us to ``rank``)."""
        self.last_transfer = rank, now
        for transfers in (self.others.entry(rank).transfers(outgoing), self._with_all[outgoing]):
            transfers.record(seconds)

    def patience(self, rank: int, outgoing: bool = False, doublings: int = PATIENCE_DOUBLINGS) -> float:
        """Return the seconds to wait for a model from ``rank`` (``outgoing``: to ``rank``).

        The value follows the last transfers with that peer, else the last ones with any peer, else ``model_timeout``.
        Each transfer that was late since the last success doubles it, at most ``doublings`` times.
        """
        transfers = self.others.peek(rank).transfers(outgoing)
        measured = transfers.seconds or self._with_all[outgoing].seconds
        patience = self.model_timeout
        if measured:
            usual = median(measured)
            deviation = DEVIATION * median([abs(seconds - usual) for seconds in measured])
            least = self.timeout * (1 if outgoing else PATIENCE_LEAST)
            patience = max(least, PATIENCE[0] * (usual + PATIENCE[1] * deviation))
        return float(patience * 2 ** min(transfers.late, doublings))

    def longest_patience(self, ranks: Sequence[int], doublings: int) -> float:
        """Return the longest :meth:`patience` for a model from one of ``ranks``, which must not be empty."""
        known = self.others.known
        different = [rank for rank in ranks if rank in known]
        different += [rank for rank in ranks if rank not in known][:1]  # it is the same for all that are not known
        return max(self.patience(rank, doublings=doublings) for rank in different)

    def record_late(self, rank: int, outgoing: bool = False) -> None:
        """Record that a model from ``rank`` (``outgoing``: to ``rank``) missed its deadline."""
        self.others.entry(rank).transfers(outgoing).late += 1

    def in_training(self, now: float) -> list[int]:
        """Return the ranks, ascending, that respond and seem to be training: the members of a wave starting now."""
        training = (Stage.START, Stage.TRAIN)  # START, too: no peer announces that its training begins
        unavailable, peek = self.unavailable(now), self.others.peek
        return [rank for rank in self.others if peek(rank).stage in training and rank not in unavailable]

    def in_finish(self) -> list[int]:
        """Return the ranks, ascending, known to have reached the finish: the members of the last wave."""
        finishing = (Stage.FINISH, Stage.AGREE)
        return sorted(rank for rank, other in self._known() if other.stage in finishing and not other.is_out)

    def unavailable(self, now: float) -> set[int]:
        """Return the ranks to leave out of a wave that starts now: silent or suspended peers."""
        return {rank for rank, other in self._known() if other.silent or other.suspended_until > now}

    def _known(self) -> list[tuple[int, OtherPeer]]:
        """Return the stored entries, in any order; other threads may ask, too."""
        return list(self.others.known.items())

    def draw_state(self) -> dict[str, Any]:
        """Return what partner choices depend on, as plain data: generator, round and transfer times."""
        version, words, gauss = self._rng.getstate()
        others = {str(rank): _saved(map(other.transfers, (False, True))) for rank, other in sorted(self._known())}
        members = {"round": self._round, "others": others, "with_all": _saved(self._with_all)}
        return {"rng": [version, list(words), gauss], "members": members}

    def load_draw_state(self, state: dict[str, Any]) -> None:
        """Restore :meth:`draw_state`. Which peers are alive is not restored; it is learned anew.

        Peers that are no longer in the run are ignored.
        """
        version, words, gauss = state["rng"]
        self._rng.setstate((version, tuple(words), gauss))
        self._round = state["members"]["round"]
        known = {rank: both for rank, both in state["members"]["others"].items() if int(rank) in self.others}
        for rank, both in known.items():
            other = self.others.entry(int(rank))
            other.incoming, other.outgoing = _restored(both)
        self._with_all = _restored(state["members"]["with_all"])

    def to_probe(self, now: float) -> list[int]:
        """Return the ranks to probe as a wave starts: all silent peers, and one other at random.

        The random one is needed because a peer that is never a partner in any round would not be noticed when it dies.
        """
        known = self._known()
        resting = {r for r, other in known if not other.may_be_asked(now) or other.stage is Stage.DONE}
        silent = sorted(rank for rank, other in known if other.silent and rank not in resting)
        responsive = Without(self.others.ranks, resting.union(silent))
        return silent + ([self._rng.choice(responsive)] if responsive else [])

    @property
    def has_joined_late(self) -> bool:
        """Whether others were already training when this peer joined."""
        return any(other.first_stage is not None and other.first_stage >= Stage.TRAIN for _, other in self._known())

    def alive(self) -> int:
        """Return the number of peers that are neither lost nor have left, including this one."""
        return 1 + len(self.others) - sum(other.is_out for _, other in self._known())

    def without_figures(self) -> list[int]:
        """Return the ranks whose final figures have not arrived."""
        return [rank for rank in self.others if self.others.peek(rank).stage is not Stage.DONE]

    def restarted(self) -> list[int]:
        """Return the ranks, ascending, whose process ended and was started again, and that are present now."""
        return sorted(rank for rank, other in self._known() if other.restarted and not other.is_out)

    def is_gone(self, rank: int) -> bool:
        """Return whether ``rank`` is lost or its process seems to have ended; False for this peer's own rank."""
        other = self.others.peek(rank)
        return other.lost or other.has_ended

    def awaited(self) -> list[int]:
        """Return the ranks that are neither lost nor have left."""
        out = {rank for rank, other in self._known() if other.is_out}
        return [rank for rank in self.others if rank not in out]

    def heard_from(self, rank: int) -> None:
        """Record a request or reply of ``rank``, which proves that it is alive: end its back-off and its loss."""
        other = self.others.known.get(rank)
        if other is None:
            return
        other.faults = other.refusals = 0
        other.silent_since = None
        other.backoff_until = 0.0
        other.lost = False

    def woke(self) -> None:
        """Record that this peer has slept: the others may have ended the run meanwhile."""
        for _, other in self._known():
            other.missed = not other.is_out

    def back_off(self, rank: int, now: float) -> float:
        """Back off from ``rank``, longer each time; return the time when the back-off ends."""
        other = self.others[rank]
        pause = min(FIRST_BACKOFF * 2**other.faults, LONGEST_BACKOFF) * self.timeout
        other.faults = min(other.faults + 1, 30)  # keeps 2**faults small
        other.backoff_until = now + pause * self._rng.uniform(0.5, 1.5)
        return other.backoff_until

    def failed(self, rank: int, fault: Fault, now: float) -> bool:
        """Record a failed request to ``rank``.

        Returns:
            True if the peer has just become lost.
        """
        other = self.others[rank]
        if fault is not Fault.LOCAL:  # a local fault says nothing about the other peer
            other.refusals = other.refusals + 1 if fault is Fault.UNREACHABLE else 0
        ended = other.stage in (Stage.DONE, Stage.LEFT)  # then it may exit at any time
        if other.silent_since is None:
            other.silent_since = now
            self._counts.add("suspicions", other.stage is not None and not ended)
        self.back_off(rank, now)
        silent = now - other.silent_since >= self.timeout
        if other.lost or ended or not (other.has_ended or silent):
            return False
        other.lost = True
        return True


class Requests:
    """Allocates tickets and keeps the requests of this peer that await a reply."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[int, tuple[int, Request, float]] = {}

    def send(self, to: int, request: Request, now: float, deadline: float) -> Send:
        """Return the effect that sends ``request``, and keep it as open until :meth:`close`."""
        ticket = self.ticket()
        self._open[ticket] = (to, request, now)
        return Send(ticket, to, request, deadline)

    def ticket(self) -> int:
        """Allocate an unused ticket."""
        self._last += 1
        return self._last

    def close(self, ticket: int) -> tuple[int, Request, float]:
        """Remove a request that was answered or has failed; return its receiver, the request, and the sending time."""
        return self._open.pop(ticket)

    def is_open(self, ticket: int) -> bool:
        """Return whether the request still awaits its reply."""
        return ticket in self._open

    def opened(self, kind: type[Request]) -> Iterator[tuple[int, int]]:
        """Yield the ticket and the receiver of each open request of type ``kind``, the oldest first."""
        return ((ticket, to) for ticket, (to, request, _) in self._open.items() if isinstance(request, kind))

    def open_ranks(self, kind: type[Request]) -> set[int]:
        """Return the ranks to which requests of type ``kind`` are open."""
        return {to for _, to in self.opened(kind)}

    def open_ranks_except(self, *kinds: type[Request]) -> set[int]:
        """Return the ranks to which requests of other types than ``kinds`` are open."""
        return {to for to, request, _ in self._open.values() if not isinstance(request, kinds)}


def _saved(both: Iterable[Transfers]) -> list[list[Any]]:
    """Return the transfers in both directions as plain data."""
    return [[list(one.seconds), one.late, one.rate] for one in both]


def _restored(both: Iterable[list[Any]]) -> tuple[Transfers, Transfers]:
    """Return the transfers that :func:`_saved` returned."""
    incoming, outgoing = (Transfers(tuple(seconds), late, rate) for seconds, late, rate in both)
    return incoming, outgoing
