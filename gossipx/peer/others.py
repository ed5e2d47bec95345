"""The knowledge of one peer about each other peer.

A run may have thousands of peers, and in virtual time all of them share one process, but each peer exchanges models
with few others. Therefore :class:`Others` stores an entry for a peer when something about it is first recorded or
looked up. In CPython 3.11 an entry takes 330 bytes, the first transfer in one direction 170 more, and 14 further ones
another 700.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossipx.protocol.messages import PeerProgress, Stage
from gossipx.topology.ranks import AllBut, added_to

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
        first_stage: the first stage that it announced; None: none yet.
        stage: the furthest stage that its current incarnation announced; None: none yet.
        incarnation: the incarnation that announced it.
        restarted: whether that is not its first incarnation.
        step: iterations that it had done by then.
        comparison, digest, models: its final model, as in :class:`~gossipx.protocol.messages.PeerProgress`.
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
        missed: whether we slept since its last reply, so that it may have ended without us.
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
    models: float = 0.0
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
        enough = 1 if self.stage is Stage.DONE else REFUSALS
        return self.stage is Stage.LEFT or (self.stage is not None and self.refusals >= enough)

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
        if self.incarnation is None and self.stage is Stage.TRAIN:  # as all_train says: its first one trained
            is_new = told.stage < Stage.TRAIN
        before, after = (self.stage or 0, self.comparison, self.step), (told.stage, told.comparison, told.step)
        if is_new or self.stage is None or after > before:
            self.stage, self.report, self.step, self.advanced_at = told.stage, told.report, told.step, now
            self.comparison, self.digest, self.models = told.comparison, told.digest, told.models
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
        """Return the entry of ``rank`` for a change that leaves it as available for exchanges as it is.

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
