"""The server of one shard, decided purely (FluentPS, Algorithm 1, lines 1 to 25 of the server).

Its clock says what follows from pushes and pulls; here messages become these, and decisions become effects. A push
comes as one message a bucket and is complete with the last of them. Pulls of the same iteration are answered together,
and never before the push of that iteration is complete here: in which order they come does not matter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossipx.actor import (
    Answer,
    ApplyBuffer,
    ApplyGradient,
    BufferGradient,
    Effect,
    FillTables,
    Forget,
    Keep,
    KeepShard,
    Note,
    Received,
)
from gossipx.messages import AcceptReply, BusyReply, GradientRequest, NotReadyReply, TablesReply, TablesRequest
from gossipx.peer.requests import Requests
from gossipx.server import decisions
from gossipx.server.clock import Clock
from gossipx.server.conditions import SyncModel
from gossipx.server.decisions import Decision, Fate
from gossipx.server.models import describe, parse

FURTHEST = 100_000
"""Iterations that a worker may go ahead by at once, where another shard's clock has gone on without it; each may be a
tick."""


@dataclass
class _Waiting:
    """A pull of one bucket that is not answered yet."""

    key: Hashable
    bucket: int
    deadline: float
    until: float = math.inf  # then it is to be asked for again


@dataclass
class _Worker:
    """What is known of a worker.

    Attributes:
        incarnation: of its process.
        coming: the iteration of the push that is coming.
        have: its buckets that are here.
        pulls: by iteration, its pulls that wait.
        significance: what the last of these told.
        released: up to this iteration they are answered.
    """

    incarnation: int
    coming: int = -1
    have: set[int] = field(default_factory=set)
    pulls: dict[int, list[_Waiting]] = field(default_factory=dict)
    significance: float = 0.0
    released: int = -1


class Shard:
    """One shard's server. Each method says what is to be done.

    Args:
        index: of the shard.
        buckets: how many it has.
        clock: with the workers that the run begins with.
        requests: the role's, for tickets.
        plan: sync models that it goes over to, each with the clock from which on.
        every: a checkpoint is due after so many ticks, or the first tick after so many seconds; 0, 0: never.
    """

    def __init__(
        self,
        index: int,
        buckets: int,
        clock: Clock,
        requests: Requests,
        plan: Sequence[tuple[int, SyncModel]] = (),
        every: tuple[int, float] = (0, 0.0),
    ):
        self.index = index
        self.clock = clock
        self._plan = deque(plan)
        self._every = every
        self._kept = 0  # the clock of the last checkpoint
        self._kept_at = 0.0
        self._restored = False
        self._buckets = buckets
        self._requests = requests
        self._workers: dict[int, _Worker] = {}
        self._begun = False
        self._early: list[Received] = []  # they came before the tables were filled

    def begin(self, now: float) -> list[Effect]:
        """All have come to START: the tables begin with our own model's values."""
        self._begun, self._kept_at = True, now
        early, self._early = self._early, []
        fill = [] if self._restored else [FillTables(self.index)]
        return [*fill, *(effect for event in early for effect in self.requested(event, now))]

    @property
    def waiting(self) -> bool:
        """Whether pulls wait."""
        return any(pulls for worker in self._workers.values() for pulls in worker.pulls.values())

    @property
    def holding_up(self) -> list[int]:
        """Workers that pulls wait for."""
        return self.clock.holding_up if self.clock.waiting else []

    # --- checkpoints ------------------------------------------------------------------------------

    def keep(self, now: float, last: bool = False) -> list[Effect]:
        """Take a checkpoint if one is due; ``last``: of the end of training, if there are to be any."""
        ticks, seconds = self._every
        clock = self.clock.clock
        due = (ticks and clock // ticks > self._kept // ticks) or (seconds and now - self._kept_at >= seconds)
        if clock == self._kept or not (due or (last and (ticks or seconds))):
            return []
        self._kept, self._kept_at = clock, now
        return [KeepShard(self.index, clock, self.clock.state_dict())]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint: the tables are back already. Workers begin at the clock, wherever they were."""
        clock, made = state["clock"][0], state["made"]
        if describe(self.clock.model) != made["model"]:  # it was switched since the run began
            self.clock.switch(parse(made["model"]), made["apply"], made["pulls"])
        self._plan = deque(step for step in self._plan if step[0] > clock)
        workers = [[rank, clock - 1, 0, None, False, False] for rank, *_ in state["workers"]]
        self.clock.load_state_dict({**state, "workers": workers})
        self._kept, self._restored = self.clock.clock, True

    # --- requests ---------------------------------------------------------------------------------

    def requested(self, event: Received, now: float) -> list[Effect]:
        """A worker pushes, or pulls."""
        request = event.request
        assert isinstance(request, GradientRequest | TablesRequest)
        if not self._begun and isinstance(request, TablesRequest):
            self._early.append(event)
            return []
        if not self._begun or request.bucket >= self._buckets:
            return [Answer(event.key, NotReadyReply("it has no such tables yet"), now + request.patience)]
        joined = self._meet(event.sender, request.incarnation, now)
        if isinstance(request, GradientRequest):
            return [*joined, *self._pushed(event, request, now)]
        return [*joined, *self._pulled(event, request, now)]

    def _meet(self, worker: int, incarnation: int, now: float) -> list[Effect]:
        """See that the clock knows this life of a worker."""
        known = self._workers.get(worker)
        effects: list[Effect] = []
        if known is not None and known.incarnation != incarnation:
            effects += self.lost(worker, now)
            known = None
        if known is None:
            self._workers[worker] = _Worker(incarnation)
        if worker not in self.clock.progress:
            effects += self._carry_out(self.clock.joined(worker), now)
        return effects

    def _pushed(self, event: Received, request: GradientRequest, now: float) -> list[Effect]:
        worker = self._workers[event.sender]
        done = Answer(event.key, AcceptReply(), now + request.patience)
        if request.progress <= self.clock.progress[event.sender]:
            return [done]  # it is counted, or was given up when the worker was lost
        if request.progress > max(self.clock.progress[event.sender], self.clock.clock) + FURTHEST:
            return [Answer(event.key, NotReadyReply("it is not that far"), now + request.patience)]
        if worker.coming != request.progress:
            worker.coming, worker.have = request.progress, set()
        if request.bucket in worker.have:
            return [done]
        worker.have.add(request.bucket)
        part = self.clock.push_part(event.sender, request.progress)
        ticket = self._requests.ticket()
        effects: list[Effect] = [Keep(event.key, ticket)]
        match part.fate:
            case Fate.APPLY:
                effects.append(ApplyGradient(ticket, part.scale))
            case Fate.BUFFER:
                effects.append(BufferGradient(ticket))
            case Fate.DROP:
                effects.append(Forget(ticket))
        effects.append(done)
        if len(worker.have) < self._buckets:
            return effects
        effects += self._carry_out(self.clock.pushed(event.sender, request.progress), now)
        return effects + self._ask_clock(event.sender, now)

    def _pulled(self, event: Received, request: TablesRequest, now: float) -> list[Effect]:
        worker = self._workers[event.sender]
        waiting = _Waiting(event.key, request.bucket, now + request.patience, now + request.patience / 2)
        if request.progress <= worker.released:
            return [self._give(waiting)]
        worker.significance = request.significance
        worker.pulls.setdefault(request.progress, []).append(waiting)
        return self._ask_clock(event.sender, now)

    def _ask_clock(self, rank: int, now: float) -> list[Effect]:
        """Put the pulls to the clock whose own push is complete."""
        worker = self._workers[rank]
        progress = self.clock.progress[rank]
        effects: list[Effect] = []
        for wanted in sorted(worker.pulls):
            if wanted <= progress and (rank, wanted) not in self.clock.waiting:
                made = self.clock.pull(rank, wanted, (rank, wanted), worker.significance)
                effects += self._carry_out(made, now)
        return effects

    def give(self, event: Received, now: float) -> list[Effect]:
        """Answer a pull by what there is, to a peer that trains no more."""
        request = event.request
        assert isinstance(request, TablesRequest)
        return [self._give(_Waiting(event.key, request.bucket, now + request.patience))]

    def put_off(self, now: float) -> list[Effect]:
        """Pulls that have waited for long are to be asked for again: their senders see that we are still here."""
        effects: list[Effect] = []
        for worker in self._workers.values():
            for progress, pulls in worker.pulls.items():
                late = [one for one in pulls if one.until <= now]
                worker.pulls[progress] = [one for one in pulls if one.until > now]
                effects += [Answer(one.key, BusyReply(), one.deadline) for one in late]
        return effects

    # --- members ----------------------------------------------------------------------------------

    def lost(self, worker: int, now: float) -> list[Effect]:
        """A worker is gone, or has come to its end: nobody waits for it."""
        known = self._workers.pop(worker, None)
        gone = [one for waiting in known.pulls.values() for one in waiting] if known else []
        refused: list[Effect] = [
            Answer(one.key, NotReadyReply("it is not waited for any more"), one.deadline) for one in gone
        ]
        return [*refused, *self._carry_out(self.clock.lost(worker), now)]

    def look(self, now: float, training: Iterable[int]) -> list[Effect]:
        """Members may have changed: those that are not in ``training`` any more are not waited for."""
        here = set(training)
        return [effect for rank in list(self.clock.progress) if rank not in here for effect in self.lost(rank, now)]

    # --- decisions --------------------------------------------------------------------------------

    def _carry_out(self, made: list[Decision], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for decision in made:
            match decision:
                case decisions.ApplyBuffer():
                    effects.append(ApplyBuffer(self.index))
                case decisions.Release(key):
                    assert isinstance(key, tuple)
                    effects += self._release(*key)
                case decisions.Tick():
                    pass
        if self._plan and self._plan[0][0] <= self.clock.clock:
            effects += self.switch(self._plan.popleft()[1], now)
        return effects

    def switch(self, model: SyncModel, now: float, apply: str = "", pulls: str = "") -> list[Effect]:
        """Go over to another sync model, with no push lost and every pull looked at again.

        Raises:
            UsageError: it cannot be; nothing is changed then.
        """
        before = self.clock.model
        made = self.clock.switch(model, apply or None, pulls or None)
        told = f"shard {self.index} goes from {describe(before)} to {describe(model)} at clock {self.clock.clock}"
        return [Note("", told), *self._carry_out(made, now)]

    def _release(self, rank: int, progress: int) -> list[Effect]:
        worker = self._workers[rank]
        worker.released = max(worker.released, progress)
        return [self._give(one) for one in worker.pulls.pop(progress, [])]

    def _give(self, waiting: _Waiting) -> Answer:
        reply = TablesReply(self.clock.clock, ())
        tables = None if waiting.bucket < 0 else (self.index, waiting.bucket)
        return Answer(waiting.key, reply, waiting.deadline, tables=tables)
