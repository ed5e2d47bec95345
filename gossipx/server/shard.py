"""The server of one shard, as a pure state machine (FluentPS, Algorithm 1, lines 1 to 25 of the server).

The shard's clock decides which gradients to apply and which pulls to answer. This module translates messages into calls
of the clock, and its decisions into effects. A push takes one message per bucket. A pull is answered only after its
worker's own push of that iteration is complete here, so messages may arrive in any order. All pulls of one worker and
iteration are answered together.

A shard's decisions follow from its inputs in order. So a log of these inputs, with the gradients, leads from an earlier
copy to the same tables. Records of them go to a journal beside the shard's checkpoints. Acknowledgements wait until the
records of their inputs are written, so no acknowledged push is lost with the shard's process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from gossipx.errors import UsageError
from gossipx.peer.membership import Requests
from gossipx.protocol.effects import Answer, Effect, Forget, Keep, Note, RequestedBucket
from gossipx.protocol.events import Received
from gossipx.protocol.messages import AcceptReply, NotReadyReply, Reply
from gossipx.protocol.server_messages import (
    GradientRequest,
    PushAgainReply,
    TablesReply,
    TablesRequest,
)
from gossipx.protocol.table_effects import (
    ApplyBuffered,
    ApplyGradient,
    BufferGradient,
    FillTables,
    KeepShard,
    Record,
    ShardEvent,
    ShardRecord,
)
from gossipx.server.conditions import SyncModel
from gossipx.server.requests import Deferred, defer, put_off
from gossipx.server.shard_clock import BufferDue, Decision, Handling, Release, ShardClock, Tick
from gossipx.server.sync_models import spec_of, sync_model_from

MOST_ENTRIES = 500
"""The number of entries at which a record without a gradient is made."""


class Records:
    """The log of one shard's inputs, for its journal.

    Args:
        shard: its index.
        epoch: of the layout that the shard belongs to; a journal is valid for one layout only.
        enabled: whether records are made.

    Attributes:
        number: of the next record, to be made or applied.
    """

    def __init__(self, shard: int, epoch: int = 0, enabled: bool = False):
        self.enabled = enabled
        self.number = 0
        self._shard = shard
        self._epoch = epoch
        self._happened: list[ShardEvent] = []

    def log(self, *entry: str | int | float) -> None:
        """Append an input of the shard to the next record."""
        if self.enabled:
            self._happened.append(entry)

    def log_push(self, push: GradientRequest, ticket: int) -> list[Effect]:
        """Make a record of all inputs up to a push, whose gradient is kept under ``ticket``."""
        if not self.enabled:
            return []
        gradient = push.bucket, push.progress, push.parts, push.settings
        return [Record(ShardRecord(*self._next(), *gradient), ticket)]

    def flush(self, at_least: int = 1) -> list[Effect]:
        """Make a record of the inputs without a gradient, if there are at least ``at_least``."""
        return [Record(ShardRecord(*self._next()), None)] if len(self._happened) >= at_least else []

    def _next(self) -> tuple[int, int, int, tuple[ShardEvent, ...]]:
        """Return the place of the next record, and the inputs in it."""
        happened, self._happened = tuple(self._happened), []
        self.number += 1
        return self._shard, self._epoch, self.number - 1, happened

    def delay_answers(self, effects: Sequence[Effect]) -> list[Effect]:
        """Delay the answers among ``effects`` until the records made so far are written."""
        if not self.enabled:
            return list(effects)
        return [replace(one, in_order=True) if isinstance(one, Answer) else one for one in effects]


@dataclass
class WaitingPull:
    """A pull of one bucket that has not been answered yet."""

    deferred: Deferred
    requested: RequestedBucket


@dataclass
class ShardWorker:
    """A worker as one shard knows it.

    Attributes:
        receiving: the iteration of the push being received; -1: none yet.
        received: the buckets of that push that have arrived.
        pulls: its waiting pulls, by iteration.
        significance: from the last of these pulls.
        released: pulls up to this iteration are answered.
    """

    incarnation: int
    receiving: int = -1
    received: set[int] = field(default_factory=set)
    pulls: dict[int, list[WaitingPull]] = field(default_factory=dict)
    significance: float = 0.0
    released: int = -1


NEXT_RECORD = "next_record"
"""The key in a shard's state for the number of the next record."""
FURTHEST = 100_000
"""Maximum number of iterations that a push may be ahead of its worker's progress and the shard's clock."""


class Shard:
    """One shard's server. Methods return the effects to carry out.

    Args:
        index: the shard's.
        buckets: the number of buckets.
        clock: knows the workers that the run begins with.
        requests: the role's open requests; numbers tickets.
        every: ticks between two checkpoints; 0: none are taken at intervals.

    Attributes:
        records: logs what happens to the shard, for its journal.
        is_serving: workers are answered.
        restored: the shard continues from a saved state.
        run_resumes: all peers resume together from the checkpoint of this shard's clock.
        restarted_at: the clock at which it continued when its server was last restarted; see ``TablesReply``.
    """

    def __init__(
        self,
        index: int,
        buckets: int,
        clock: ShardClock,
        requests: Requests,
        every: int,
    ):
        self.index = index
        self.clock = clock
        self.records = Records(index)
        self._initial_sync = clock.model
        self._every = every
        self._kept_at = 0  # the clock of the last checkpoint
        self._handed_over = False  # that one is of another layout
        self.restored = self.run_resumes = False
        self.restarted_at = -1
        self._buckets = buckets
        self._requests = requests
        self._workers: dict[int, ShardWorker] = {}
        self.is_serving = False
        self._early: list[tuple[Received, TablesRequest]] = []  # pulls that arrived before the tables were filled

    def begin(self, now: float) -> list[Effect]:
        """Start once all peers have reached START: fill the tables with this peer's own model, unless restored."""
        fill: list[Effect] = [] if self.restored else [FillTables(self.index)]
        return [*fill, *self.checkpoint(first=self.records.enabled), *self.serve(now)]

    def begin_again(self, clock: int, now: float) -> list[Effect]:
        """Start without the state that the shard had when its server was killed, with the model of a worker that has
        reached ``clock``.
        """
        self.clock.start_at(clock)
        self.restarted_at = 0
        text = (
            f"shard {self.index} was lost when this server was killed: it continues from clock {clock} with a worker's "
            f"model, the sync model {spec_of(self.clock.model)} and a new optimizer state"
        )
        return [Note("", text), *self.begin(now)]

    def begin_late(self, now: float) -> list[Effect]:
        """Start from a checkpoint, although workers have advanced since."""
        self.restarted_at = self.clock.clock
        text = f"shard {self.index} continues from clock {self.restarted_at}, and what it had applied since is lost"
        return [Note("", text), *self.begin(now)]

    def serve(self, now: float) -> list[Effect]:
        """Answer workers from now on."""
        self.is_serving = True
        early, self._early = self._early, []
        return [effect for event, request in early for effect in self.requested(event, request, now)]

    @property
    def waiting(self) -> bool:
        """Whether any pull waits."""
        return any(pulls for worker in self._workers.values() for pulls in worker.pulls.values())

    @property
    def holding_up(self) -> list[int]:
        """The workers that pulls wait for."""
        return self.clock.holding_up if self.clock.waiting else []

    # --- checkpoints ------------------------------------------------------------------------------

    def checkpoint(self, last: bool = False, first: bool = False, leaves: bool = False) -> list[Effect]:
        """Take a checkpoint if one is due.

        Args:
            last: training is over.
            first: the shard begins.
            leaves: the shard's holder is about to leave, so one is due in any case.
        """
        clock, every = self.clock.clock, self._every
        by_ticks = every and clock // every > self._kept_at // every
        due = leaves or by_ticks or ((last or first) and every)
        if not due or (clock == self._kept_at and not (first or self._handed_over)):
            return []
        self._kept_at, self._handed_over = clock, False
        # Flush the log first: what the checkpoint contains must not appear in a later record.
        flushed = self.records.flush()
        return [*flushed, KeepShard(self.index, clock, self.state_dict())]

    def state_dict(self) -> dict[str, Any]:
        """Return what the next decision depends on, as JSON data, without waiting pulls: workers repeat those."""
        workers = [[rank, one.incarnation, one.receiving, sorted(one.received)] for rank, one in self._workers.items()]
        return {"clock": self.clock.state_dict(), "workers": workers, NEXT_RECORD: self.records.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; the tables must be from the same moment."""
        clock = state["clock"]
        made = clock["made"]
        if made != self.clock.settings:  # the sync model was switched after the run began
            self.clock.switch(sync_model_from(made["model"]), made["apply"], made["pulls"])
        self.clock.load_state_dict(clock)
        self._workers = {
            rank: ShardWorker(incarnation, receiving, set(received))
            for rank, incarnation, receiving, received in state["workers"]
        }
        self.records.number = state[NEXT_RECORD]
        self._kept_at, self.restored = self.clock.clock, True

    def resume(self, state: dict[str, Any], together: bool) -> None:
        """Restore a checkpoint in a resumed run, in which all workers begin at the shard's clock.

        Args:
            together: whether all peers are known to do so. If not, this one may also have been restarted alone.
        """
        self.run_resumes = together
        clock = state["clock"]["clock"][0]
        workers = [[rank, clock - 1, 0, None, False, False, 0] for rank, *_ in state["clock"]["workers"]]
        self.load_state_dict({**state, "clock": {**state["clock"], "workers": workers}, "workers": []})

    def apply_record(self, record: ShardRecord, ticket: int) -> list[Effect]:
        """Apply a record of what had happened to this shard, to restore it. Return the effects on the tables.

        Invalid entries are skipped.

        Args:
            record: the next one, by number.
            ticket: the record's gradient is kept under it; it is used or forgotten.
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
                    with contextlib.suppress(UsageError):  # the shard could switch, if its settings were the same
                        effects += self._switched(sync_model_from(sync), apply, pulls)
        made: list[Effect] = [one for one in effects if not isinstance(one, Answer | Note)]
        uses = any(isinstance(one, ApplyGradient | BufferGradient | Forget) and one.ticket == ticket for one in made)
        return made if uses else [*made, Forget(ticket)]

    # --- other servers ------------------------------------------------------------------------------

    def hand_over(self) -> dict[str, Any]:
        """Return the state that shards of another layout continue with, as plain data. No push may be in flight."""
        return {**self.state_dict(), NEXT_RECORD: 0, "kept": self._kept_at}

    def take_over(self, state: dict[str, Any]) -> list[Effect]:
        """Continue from what :meth:`hand_over` returned. A journal of this layout starts with a checkpoint.

        The last checkpoint of the other layout does not fit, so the next one is taken even if the clock stays.
        """
        workers = [[rank, incarnation, -1, []] for rank, incarnation, *_ in state["workers"]]
        self.load_state_dict({**state, "workers": workers})
        self._kept_at, self._handed_over = state["kept"], True
        self.is_serving = True
        return self.checkpoint(first=True) if self.records.enabled else []

    def close(self, reply: Reply, now: float) -> list[Effect]:
        """Stop serving, since the shard moves elsewhere, and answer all waiting pulls with ``reply``."""
        waiting = [one for worker in self._workers.values() for pulls in worker.pulls.values() for one in pulls]
        early, self._early = self._early, []
        return [
            *(one.deferred.answer(reply) for one in waiting),
            *(Answer(event.key, reply, now + request.patience) for event, request in early),
        ]

    # --- requests ---------------------------------------------------------------------------------

    def requested(self, event: Received, request: GradientRequest | TablesRequest, now: float) -> list[Effect]:
        """Handle a worker's push or pull."""
        if not self.is_serving and isinstance(request, TablesRequest):
            self._early.append((event, request))
            return []
        if not self.is_serving or request.bucket >= self._buckets:
            return [Answer(event.key, NotReadyReply("it does not have these tables yet"), now + request.patience)]
        effects: list[Effect] = []
        known = self._workers.get(event.sender)
        if known is None or known.incarnation != request.incarnation:
            self.records.log("met", event.sender, request.incarnation)
            effects += self._met(event.sender, request.incarnation)
        if isinstance(request, GradientRequest):
            effects += self._pushed(event, request, now)
        else:
            effects += self._pulled(event, request, now)
        return self.records.delay_answers([*effects, *self.records.flush(at_least=MOST_ENTRIES)])

    def _met(self, worker: int, incarnation: int) -> list[Effect]:
        """Register a new worker, or a new incarnation of a known one."""
        effects = self._drop(worker) if worker in self._workers else []
        self._workers[worker] = ShardWorker(incarnation)
        if worker not in self.clock.progress:
            effects += self._carry_out(self.clock.joined(worker))
        return effects

    def _pushed(self, event: Received, request: GradientRequest, now: float) -> list[Effect]:
        done = Answer(event.key, AcceptReply(), now + request.patience)
        if request.progress > max(self.clock.progress[event.sender], self.clock.clock) + FURTHEST:
            return [Answer(event.key, NotReadyReply("the push is too far ahead"), now + request.patience)]
        ticket = self._requests.ticket()
        if not self._may_push(event.sender, request.progress, request.bucket):
            # A duplicate, or discarded when its worker was lost. Its acknowledgement may still have to wait.
            return [Keep(event.key, ticket), Forget(ticket), done]
        self.records.log("push", event.sender, request.progress, request.bucket)
        taken = self._take(event.sender, request.progress, request.bucket, ticket)
        is_dropped = isinstance(taken[0], Forget)  # then records do not need the gradient
        recorded = self.records.flush() if is_dropped else self.records.log_push(request, ticket)
        return [Keep(event.key, ticket), *recorded, done, *taken, *self._ask_clock(event.sender)]

    def _may_push(self, sender: int, progress: int, bucket: int) -> bool:
        """Return whether this bucket of a push is valid and new."""
        worker = self._workers.get(sender)
        if worker is None or not 0 <= bucket < self._buckets or progress <= self.clock.progress[sender]:
            return False
        return worker.receiving != progress or bucket not in worker.received

    def _take(self, sender: int, progress: int, bucket: int, ticket: int) -> list[Effect]:
        """Take in one bucket of a push, whose gradient is kept under ``ticket``."""
        worker = self._workers[sender]
        if worker.receiving != progress:
            worker.receiving, worker.received = progress, set()
        worker.received.add(bucket)
        part = self.clock.push_part(sender, progress)
        effects: list[Effect] = []
        match part.handling:
            case Handling.APPLY:
                effects.append(ApplyGradient(ticket, part.scale, part.buffers))
            case Handling.BUFFER:
                effects.append(BufferGradient(ticket))
            case Handling.DROP:
                effects.append(Forget(ticket))
        if len(worker.received) == self._buckets:
            effects += self._carry_out(self.clock.pushed(sender, progress))
        return effects

    def _pulled(self, event: Received, request: TablesRequest, now: float) -> list[Effect]:
        worker = self._workers[event.sender]
        waiting = WaitingPull(defer(event.key, request.patience, now), _requested_bucket(event.sender, request))
        if request.progress <= worker.released:
            applied = self._pulled_now(event.sender) if request.progress < 0 else []
            return [*applied, self._answer(waiting)]
        if request.pushed and request.progress > self.clock.progress[event.sender]:
            return [waiting.deferred.answer(PushAgainReply())]
        worker.significance = request.significance
        worker.pulls.setdefault(request.progress, []).append(waiting)
        return self._ask_clock(event.sender)

    def _ask_clock(self, rank: int) -> list[Effect]:
        """Pass those pulls to the clock whose own push is complete."""
        worker = self._workers[rank]
        progress = self.clock.progress[rank]
        effects: list[Effect] = []
        for wanted in sorted(worker.pulls):
            if wanted <= progress and (rank, wanted) not in self.clock.waiting:
                self.records.log("pull", rank, wanted, worker.significance)
                effects += self._carry_out(self.clock.pull(rank, wanted, (rank, wanted), worker.significance))
        return effects

    def answer_at_once(self, event: Received, request: TablesRequest, now: float) -> list[Effect]:
        """Answer a pull at once with the current values, for a peer that no longer trains."""
        applied = self._pulled_now(event.sender)
        deferred = Deferred(event.key, now + request.patience)
        answer = self._answer(WaitingPull(deferred, _requested_bucket(event.sender, request)))
        return self.records.delay_answers([*applied, answer]) if applied else [answer]

    def _pulled_now(self, rank: int) -> list[Effect]:
        made = self.clock.pull_now(rank)
        if not made:
            return []
        self.records.log("apply")
        return [*self._carry_out(made), *self.records.flush()]

    def put_off(self, now: float) -> list[Effect]:
        """Answer pulls that have waited for long with a BusyReply, so that their senders see that this peer lives."""
        effects: list[Effect] = []
        for worker in self._workers.values():
            for progress, pulls in worker.pulls.items():
                worker.pulls[progress] = [one for one in pulls if one.deferred.put_off_at > now]
                effects += [off for one in pulls if one.deferred.put_off_at <= now for off in put_off(one.deferred)]
        return effects

    # --- members ----------------------------------------------------------------------------------

    def lost(self, worker: int) -> list[Effect]:
        """Remove a worker that is gone or has finished, so that nothing waits for it."""
        self.records.log("lost", worker)
        return self.records.delay_answers([*self._drop(worker), *self.records.flush(at_least=MOST_ENTRIES)])

    def _refuse_pulls(self, worker: ShardWorker) -> list[Effect]:
        """Refuse all waiting pulls of a worker."""
        refused = [one for waiting in worker.pulls.values() for one in waiting]
        worker.pulls = {}
        return [one.deferred.answer(NotReadyReply("this worker is no longer a member")) for one in refused]

    def _drop(self, worker: int) -> list[Effect]:
        known = self._workers.pop(worker, None)
        refused = self._refuse_pulls(known) if known else []
        return [*refused, *self._carry_out(self.clock.lost(worker))]

    def update_members(self, training: Iterable[int]) -> list[Effect]:
        """Remove the workers that are not in ``training`` any more."""
        here = set(training)
        return [effect for rank in list(self.clock.progress) if rank not in here for effect in self.lost(rank)]

    # --- decisions --------------------------------------------------------------------------------

    def _carry_out(self, made: list[Decision]) -> list[Effect]:
        effects: list[Effect] = []
        for decision in made:
            match decision:
                case BufferDue(_, sums):
                    effects.append(ApplyBuffered(self.index, sums))
                case Release(key):
                    assert isinstance(key, tuple)
                    effects += self._release(*key)
                case Tick():
                    pass
        return effects

    def switch(self, model: SyncModel, apply: str = "", pulls: str = "") -> list[Effect]:
        """Switch to another sync model. No push is lost, and every waiting pull is checked again.

        Raises:
            UsageError: the switch is not possible; nothing has changed.
        """
        effects = self._switched(model, apply, pulls)
        self.records.log("switch", spec_of(model), apply, pulls)
        return self.records.delay_answers([*effects, *self.records.flush()])

    def _switched(self, model: SyncModel, apply: str = "", pulls: str = "") -> list[Effect]:
        before = self.clock.model
        made = self.clock.switch(model, apply or None, pulls or None)
        text = f"shard {self.index} switches from {spec_of(before)} to {spec_of(model)} at clock {self.clock.clock}"
        return [Note("", text), *self._carry_out(made)]

    def _release(self, rank: int, progress: int) -> list[Effect]:
        worker = self._workers[rank]
        worker.released = max(worker.released, progress)
        return [self._answer(one) for one in worker.pulls.pop(progress, [])]

    def _answer(self, waiting: WaitingPull) -> Answer:
        sync = "" if self.clock.model is self._initial_sync else spec_of(self.clock.model)
        reply = TablesReply(self.clock.clock, (), sync, restarted_at=self.restarted_at)
        tables = None if waiting.requested.bucket < 0 else waiting.requested
        return replace(waiting.deferred.answer(reply), tables=tables)


def _requested_bucket(worker: int, request: TablesRequest) -> RequestedBucket:
    return RequestedBucket(request.shard, request.bucket, worker, request.base)
