"""The server of one shard, decided purely (FluentPS, Algorithm 1, lines 1 to 25 of the server).

Its clock says what follows from pushes and pulls; here messages become these, and decisions become effects. A push
comes as one message a bucket and is complete with the last of them. Pulls of the same iteration are answered together,
and never before the push of that iteration is complete here: in which order they come does not matter.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gossipx.errors import UsageError
from gossipx.peer.membership import Requests
from gossipx.protocol.effects import Answer, Effect, Forget, Keep, Note
from gossipx.protocol.events import Received
from gossipx.protocol.messages import AcceptReply, NotReadyReply, Reply
from gossipx.protocol.server_messages import GradientRequest, RecordRequest, TablesReply, TablesRequest
from gossipx.protocol.table_effects import (
    ApplyBuffer,
    ApplyGradient,
    BufferGradient,
    FillTables,
    KeepShard,
    RequestedBucket,
)
from gossipx.server.deferred import Deferred, defer, put_off
from gossipx.server.due import Due
from gossipx.server.failover.records import MOST, Records
from gossipx.server.sync_models import decisions
from gossipx.server.sync_models.clock import Clock
from gossipx.server.sync_models.conditions import SyncModel
from gossipx.server.sync_models.decisions import Decision, Fate
from gossipx.server.sync_models.models import describe, parse

NEXT_RECORD = "next_record"
"""In a shard's state: the number of the first record after it."""
FURTHEST = 100_000
"""Iterations that a worker may go ahead by at once, where another shard's clock has gone on without it; each may be a
tick."""


@dataclass
class _Waiting:
    """A pull of one bucket that is not answered yet."""

    deferred: Deferred
    asked: RequestedBucket


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
        every: a checkpoint is due after so many ticks, or after so many seconds; 0, 0: never.
        leads: it says when these seconds have passed, for all shards and workers.

    Attributes:
        records: of what happens to it, for the next that holds it.
        restored: it continues from a state.
    """

    def __init__(
        self,
        index: int,
        buckets: int,
        clock: Clock,
        requests: Requests,
        plan: Sequence[tuple[int, SyncModel]] = (),
        every: tuple[int, float] = (0, 0.0),
        leads: bool = True,
    ):
        self.index = index
        self.clock = clock
        self.records = Records(index)
        self._begins_by = clock.model
        self._plan = deque(plan)
        self._due = Due(every, leads)
        self.restored = False
        self._buckets = buckets
        self._requests = requests
        self._workers: dict[int, _Worker] = {}
        self._begun = False
        self._early: list[Received] = []  # they came before the tables were filled

    def begin(self, now: float) -> list[Effect]:
        """All have come to START: the tables begin with our own model's values."""
        fill: list[Effect] = [] if self.restored else [FillTables(self.index)]
        first = [] if self.restored else self.keep(now, first=self.records.from_checkpoint)
        return [*fill, *first, *self.hold(now)]

    def hold(self, now: float) -> list[Effect]:
        """Answer workers from now on."""
        self._begun, self._due.since = True, now
        early, self._early = self._early, []
        return [effect for event in early for effect in self.requested(event, now)]

    @property
    def begun(self) -> bool:
        """Whether workers are answered."""
        return self._begun

    @property
    def waiting(self) -> bool:
        """Whether pulls wait."""
        return any(pulls for worker in self._workers.values() for pulls in worker.pulls.values())

    @property
    def holding_up(self) -> list[int]:
        """Workers that pulls wait for."""
        return self.clock.holding_up if self.clock.waiting else []

    @property
    def counted(self) -> dict[str, tuple[int, float]]:
        """Its clock, delayed pulls (DPRs), gradients taken in; see ``ServerRole.counted``."""
        clock = self.clock
        furthest = max([clock.clock, *(progress + 1 for progress in clock.progress.values())])
        figures = {"clock": clock.clock, "delayed_pulls": clock.counts.delayed, "gradients": clock.counts.gradients}
        return {f"server/{name}/shard-{self.index:02d}": (furthest, value) for name, value in figures.items()}

    # --- checkpoints ------------------------------------------------------------------------------

    def keep(self, now: float, last: bool = False, first: bool = False, leaves: bool = False) -> list[Effect]:
        """Take a checkpoint if one is due.

        Args:
            last, first: of the end of training, of its beginning, if there are to be any.
            leaves: its holder is about to leave: one in any case.
        """
        if not self._due.take(self.clock.clock, now, last, first, leaves):
            return []
        # What the checkpoint has must not be in a record after it.
        made = self.records.made()
        return [*made, KeepShard(self.index, self.clock.clock, self.state_dict())]

    def state_dict(self) -> dict[str, Any]:
        """All that the next decision depends on, as plain data that JSON can hold; pulls that wait are asked again."""
        workers = [[rank, one.incarnation, one.coming, sorted(one.have)] for rank, one in self._workers.items()]
        return {"clock": self.clock.state_dict(), "workers": workers, NEXT_RECORD: self.records.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; the tables are those of that time."""
        clock = state["clock"]
        made = clock["made"]
        now = self.clock
        if made != {"model": describe(now.model), "apply": now.apply.value, "pulls": now.pulls.value}:
            self.clock.switch(parse(made["model"]), made["apply"], made["pulls"])  # it was switched since the run began
        self.clock.load_state_dict(clock)
        self._plan = deque(step for step in self._plan if step[0] > clock["clock"][0])
        self._workers = {
            rank: _Worker(incarnation, coming, set(have)) for rank, incarnation, coming, have in state["workers"]
        }
        self.records.number = state[NEXT_RECORD]
        self._due.kept, self.restored = self.clock.clock, True

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, together with all workers: they begin at its clock, wherever they were."""
        clock = state["clock"]["clock"][0]
        workers = [[rank, clock - 1, 0, None, False, False] for rank, *_ in state["clock"]["workers"]]
        self.load_state_dict({**state, "clock": {**state["clock"], "workers": workers}, "workers": []})

    def follow(self, record: RecordRequest, ticket: int) -> list[Effect]:
        """Have happen what has happened to the shard that this is a copy of; what follows for its tables.

        So a replica follows its holder, and a shard that comes back its journal. What has no sense (the record is
        another peer's) is left out.

        Args:
            record: the next one, by number.
            ticket: the record's gradient was kept under it; it is used or forgotten.
        """
        self.records.number = record.number + 1
        effects: list[Effect] = []
        for entry in record.happened:
            match entry:
                case ("met", int(worker), int(incarnation)):
                    effects += self._met(worker, incarnation)
                case ("lost", int(worker)):
                    effects += self._drop(worker)
                case ("push", int(worker), int(progress), int(bucket)) if self._may_push(worker, progress, bucket):
                    effects += self._take(worker, progress, bucket, ticket)
                case ("pull", int(worker), int(progress), int() | float() as drawn) if worker in self.clock.progress:
                    effects += self._carry_out(self.clock.pull(worker, progress, (worker, progress), float(drawn)))
                case ("apply",):
                    effects += self._carry_out(self.clock.apply_now())
                case ("switch", str(sync), str(apply), str(pulls)):
                    with contextlib.suppress(UsageError):  # the holder could, unless its settings are others
                        effects += self._switched(parse(sync), apply, pulls)
        made: list[Effect] = [one for one in effects if not isinstance(one, Answer | Note)]
        uses = any(isinstance(one, ApplyGradient | BufferGradient | Forget) and one.ticket == ticket for one in made)
        return made if uses else [*made, Forget(ticket)]

    # --- other servers ------------------------------------------------------------------------------

    def hand_over(self) -> dict[str, Any]:
        """What the shards of another layout go on with, as plain data, once no push is on its way."""
        return {**self.state_dict(), NEXT_RECORD: 0, "plan": len(self._plan), "kept": self._due.kept}

    def take_over(self, state: dict[str, Any], now: float) -> list[Effect]:
        """Go on with what :meth:`hand_over` gave: workers push and pull on as they did.

        Its journal begins with a checkpoint: there is none of this layout yet.
        """
        plan = list(self._plan)[len(self._plan) - state["plan"] :]
        workers = [[rank, incarnation, -1, []] for rank, incarnation, *_ in state["workers"]]
        self.load_state_dict({**state, "workers": workers})
        self._plan = deque(plan)
        self._due.take_over(state["kept"], now)
        self._begun = True
        return self.keep(now, first=True) if self.records.from_checkpoint else []

    def close(self, reply: Reply, now: float) -> list[Effect]:
        """It lies here no more: pulls that wait are answered so."""
        waiting = [one for worker in self._workers.values() for pulls in worker.pulls.values() for one in pulls]
        early, self._early = self._early, []
        return [
            *(one.deferred.answer(reply) for one in waiting),
            *(Answer(event.key, reply, _patience(event, now)) for event in early),
        ]

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
        if isinstance(request, GradientRequest):
            self._due.at = max(self._due.at, request.keep)
        effects: list[Effect] = []
        known = self._workers.get(event.sender)
        if known is None or known.incarnation != request.incarnation:
            self.records.happened("met", event.sender, request.incarnation)
            effects += self._met(event.sender, request.incarnation)
        if isinstance(request, GradientRequest):
            effects += self._pushed(event, request, now)
        else:
            effects += self._pulled(event, request, now)
        return self.records.safe([*effects, *self.records.made(least=MOST)])

    def _met(self, worker: int, incarnation: int) -> list[Effect]:
        """A worker is here that the clock does not know, or a new life of one that it does."""
        effects = self._drop(worker) if worker in self._workers else []
        self._workers[worker] = _Worker(incarnation)
        if worker not in self.clock.progress:
            effects += self._carry_out(self.clock.joined(worker))
        return effects

    def _pushed(self, event: Received, request: GradientRequest, now: float) -> list[Effect]:
        done = Answer(event.key, AcceptReply(), now + request.patience)
        if request.progress > max(self.clock.progress[event.sender], self.clock.clock) + FURTHEST:
            return [Answer(event.key, NotReadyReply("it is not that far"), now + request.patience)]
        ticket = self._requests.ticket()
        if not self._may_push(event.sender, request.progress, request.bucket):
            # It is taken in or counted, or was given up when the worker was lost. Its answer may have to wait.
            return [Keep(event.key, ticket), Forget(ticket), done]
        self.records.happened("push", event.sender, request.progress, request.bucket)
        taken = self._take(event.sender, request.progress, request.bucket, ticket)
        is_dropped = isinstance(taken[0], Forget)  # then nobody needs the gradient
        recorded = self.records.made() if is_dropped else self.records.pushed(request, ticket)
        return [Keep(event.key, ticket), *recorded, done, *taken, *self._ask_clock(event.sender)]

    def _may_push(self, sender: int, progress: int, bucket: int) -> bool:
        """Whether this bucket of a push is one that was not taken in yet, and could be."""
        worker = self._workers.get(sender)
        if worker is None or not 0 <= bucket < self._buckets or progress <= self.clock.progress[sender]:
            return False
        return worker.coming != progress or bucket not in worker.have

    def _take(self, sender: int, progress: int, bucket: int, ticket: int) -> list[Effect]:
        """Take in a bucket of a push, whose gradient is kept under ``ticket``."""
        worker = self._workers[sender]
        if worker.coming != progress:
            worker.coming, worker.have = progress, set()
        worker.have.add(bucket)
        part = self.clock.push_part(sender, progress)
        effects: list[Effect] = []
        match part.fate:
            case Fate.APPLY:
                effects.append(ApplyGradient(ticket, part.scale))
            case Fate.BUFFER:
                effects.append(BufferGradient(ticket))
            case Fate.DROP:
                effects.append(Forget(ticket))
        if len(worker.have) == self._buckets:
            effects += self._carry_out(self.clock.pushed(sender, progress))
        return effects

    def _pulled(self, event: Received, request: TablesRequest, now: float) -> list[Effect]:
        worker = self._workers[event.sender]
        waiting = _Waiting(defer(event.key, request.patience, now), _asked(event))
        if request.progress <= worker.released:
            return [self._give(waiting)]
        worker.significance = request.significance
        worker.pulls.setdefault(request.progress, []).append(waiting)
        return self._ask_clock(event.sender)

    def _ask_clock(self, rank: int) -> list[Effect]:
        """Put the pulls to the clock whose own push is complete."""
        worker = self._workers[rank]
        progress = self.clock.progress[rank]
        effects: list[Effect] = []
        for wanted in sorted(worker.pulls):
            if wanted <= progress and (rank, wanted) not in self.clock.waiting:
                self.records.happened("pull", rank, wanted, worker.significance)
                effects += self._carry_out(self.clock.pull(rank, wanted, (rank, wanted), worker.significance))
        return effects

    def give(self, event: Received, now: float) -> list[Effect]:
        """Answer a pull by what there is, to a peer that trains no more."""
        request = event.request
        assert isinstance(request, TablesRequest)
        return [self._give(_Waiting(Deferred(event.key, now + request.patience), _asked(event)))]

    def put_off(self, now: float) -> list[Effect]:
        """Pulls that have waited for long are to be asked for again: their senders see that we are still here."""
        effects: list[Effect] = []
        for worker in self._workers.values():
            for progress, pulls in worker.pulls.items():
                worker.pulls[progress] = [one for one in pulls if one.deferred.until > now]
                effects += [off for one in pulls if one.deferred.until <= now for off in put_off(one.deferred)]
        return effects

    # --- members ----------------------------------------------------------------------------------

    def lost(self, worker: int) -> list[Effect]:
        """A worker is gone, or has come to its end: nobody waits for it."""
        self.records.happened("lost", worker)
        return self.records.safe([*self._drop(worker), *self.records.made(least=MOST)])

    def let_go(self) -> list[Effect]:
        """Another peer holds it: who waits is to ask there."""
        self._begun = False
        return [effect for worker in list(self._workers) for effect in self._refused(self._workers[worker])]

    def _refused(self, worker: _Worker) -> list[Effect]:
        """A worker's pulls are not waited for any more."""
        gone = [one for waiting in worker.pulls.values() for one in waiting]
        worker.pulls = {}
        return [one.deferred.answer(NotReadyReply("it is not waited for any more")) for one in gone]

    def _drop(self, worker: int) -> list[Effect]:
        known = self._workers.pop(worker, None)
        refused = self._refused(known) if known else []
        return [*refused, *self._carry_out(self.clock.lost(worker))]

    def look(self, training: Iterable[int]) -> list[Effect]:
        """Members may have changed: those that are not in ``training`` any more are not waited for."""
        here = set(training)
        return [effect for rank in list(self.clock.progress) if rank not in here for effect in self.lost(rank)]

    def waited_for(self, elsewhere: Mapping[int, int]) -> list[Effect]:
        """These workers wait at other shards: if the gradient buffer waits for nobody else, it is applied as it is.

        Args:
            elsewhere: by worker the iteration whose gradient is to be applied there.
        """
        if not self.clock.is_deadlocked(elsewhere):
            return []
        self.records.happened("apply")
        effects = self._carry_out(self.clock.apply_now())
        return self.records.safe([*effects, *self.records.made()])

    # --- decisions --------------------------------------------------------------------------------

    def _carry_out(self, made: list[Decision]) -> list[Effect]:
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
            effects += self._switched(self._plan.popleft()[1])
        return effects

    def switch(self, model: SyncModel, apply: str = "", pulls: str = "") -> list[Effect]:
        """Go over to another sync model, with no push lost and every pull looked at again.

        Raises:
            UsageError: it cannot be; nothing is changed then.
        """
        effects = self._switched(model, apply, pulls)
        self.records.happened("switch", describe(model), apply, pulls)
        return self.records.safe([*effects, *self.records.made()])

    def _switched(self, model: SyncModel, apply: str = "", pulls: str = "") -> list[Effect]:
        before = self.clock.model
        made = self.clock.switch(model, apply or None, pulls or None)
        told = f"shard {self.index} goes from {describe(before)} to {describe(model)} at clock {self.clock.clock}"
        return [Note("", told), *self._carry_out(made)]

    def _release(self, rank: int, progress: int) -> list[Effect]:
        worker = self._workers[rank]
        worker.released = max(worker.released, progress)
        return [self._give(one) for one in worker.pulls.pop(progress, [])]

    def _give(self, waiting: _Waiting) -> Answer:
        sync = "" if self.clock.model is self._begins_by else describe(self.clock.model)
        reply = TablesReply(self.clock.clock, (), sync, self._due.at)
        tables = None if waiting.asked.bucket < 0 else waiting.asked
        return replace(waiting.deferred.answer(reply), tables=tables)


def _asked(event: Received) -> RequestedBucket:
    request = event.request
    assert isinstance(request, TablesRequest)
    return RequestedBucket(request.shard, request.bucket, event.sender, request.base)


def _patience(event: Received, now: float) -> float:
    assert isinstance(event.request, TablesRequest)
    return now + event.request.patience
