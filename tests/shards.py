"""Workers and a shard of a few numbers with plain SGD, which carry out a clock's decisions in tests.

Each table is one number and is pushed in a message of its own. Worker r's gradient is the weights that it has seen,
less r.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from gossipx.server.shard_clock import BufferDue, Decision, DelayedPulls, Handling, Release, ShardClock, Tick
from gossipx.server.sync_models import SyncModel, sync_model_from

RATE = 0.125


class Message(NamedTuple):
    """One table's gradient in one push."""

    life: int  # the worker's incarnation: a rank that returns has another one
    iteration: int
    table: int


class Answer(NamedTuple):
    """An answered pull."""

    life: int
    iteration: int
    at_once: bool
    applied: frozenset[Message]  # the tables' values at that time
    state: object  # the sync model's at that time


@dataclass
class Worker:
    rank: int
    life: int
    start: int  # its first iteration
    iteration: int  # the one that it computes, or whose pull waits
    progress: int  # the last iteration whose push is complete
    seen: list[float]
    draw: float = 0.0  # of its last pull
    index: int = 0  # of its last pull, if it was delayed: answered once the clock has passed it
    sent: int = 0
    waiting: bool = False


@dataclass
class Run:
    """Workers and a shard.

    Attributes:
        steps: the applied gradients, one entry per application: the factor and the messages.
        events: the clock's decisions, in order: "tick 3", "answer 0 2" (life, iteration).
        crews: for each tick, the number of workers at that time.
    """

    model: str | SyncModel
    ranks: Iterable[int] = range(3)
    apply: str | None = None
    pulls: str = "lazy"
    tables: int = 1
    seed: int = 0
    workers: dict[int, Worker] = field(default_factory=dict)
    steps: list[tuple[float, tuple[Message, ...]]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    crews: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    buffer: list[Message] = field(default_factory=list)
    applied: list[Message] = field(default_factory=list)
    dropped: list[Message] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = list(self.ranks)
        self.weights = [1.0] * self.tables
        self.sums = [0.0] * self.tables
        self.lives = 0
        self.clock = ShardClock(sync_model_from(self.model), self.apply, self.pulls, ranks, random.Random(self.seed))
        self.draws = random.Random(self.seed)  # the same numbers
        for rank in ranks:
            self._comes(rank)

    @property
    def able(self) -> list[int]:
        """Return the ranks of workers that do not wait."""
        return [rank for rank, worker in self.workers.items() if not worker.waiting]

    @property
    def state(self) -> tuple[object, ...]:
        """Return the state that two runs of equal models must share after every event."""
        waiting = {rank: (worker.iteration, worker.waiting) for rank, worker in self.workers.items()}
        return self.clock.clock, waiting, self.steps, self.events, self.weights, self.dropped

    def _comes(self, rank: int) -> None:
        first = self.clock.clock
        self.workers[rank] = Worker(rank, self.lives, first, first, first - 1, list(self.weights))
        self.lives += 1

    def join(self, rank: int) -> None:
        self._do(self.clock.joined(rank))
        self._comes(rank)

    def lose(self, rank: int) -> None:
        del self.workers[rank]
        self._do(self.clock.lost(rank))

    def switch(self, model: str | SyncModel, apply: str | None = None, pulls: str | None = None) -> None:
        self._do(self.clock.switch(sync_model_from(model), apply, pulls))

    def iterate(self, rank: int) -> None:
        """Send the rest of a worker's push, and its pull."""
        worker = self.workers[rank]
        iteration = worker.iteration
        while worker.iteration == iteration and not worker.waiting:
            self.send(rank)

    def send(self, rank: int) -> None:
        """Send a worker's next message of its push; after the last one its pull."""
        worker = self.workers[rank]
        assert not worker.waiting
        self._message(worker, Message(worker.life, worker.iteration, worker.sent))
        worker.sent += 1
        if worker.sent < self.tables:
            return
        worker.sent, worker.waiting, worker.progress = 0, True, worker.iteration
        self._do(self.clock.pushed(rank, worker.iteration))
        assert worker.waiting, "no worker is answered before it asks"
        worker.draw = self.draws.random()
        worker.index = worker.iteration
        if self.clock.pulls is DelayedPulls.SOFT:
            worker.index = min(worker.index, self.clock.clock)
        self._do(self.clock.pull(rank, worker.iteration, (worker.life, worker.iteration)), at_once=True)

    def _message(self, worker: Worker, message: Message) -> None:
        self.sent.append(message)
        part = self.clock.push_part(worker.rank, worker.iteration)
        gradient = worker.seen[message.table] - worker.rank
        if part.handling is Handling.DROP:
            self.dropped.append(message)
        if part.handling is Handling.BUFFER or part.buffers:
            self.buffer.append(message)
            self.sums[message.table] += gradient
        if part.handling is Handling.APPLY:
            self._step(part.scale, [message])
            self.weights[message.table] -= RATE * part.scale * gradient

    def _step(self, scale: float, messages: list[Message]) -> None:
        self.steps.append((scale, tuple(messages)))
        self.applied += messages

    def _do(self, decisions: list[Decision], at_once: bool = False) -> None:
        for decision in decisions:
            match decision:
                case BufferDue(count, sums):
                    assert self.buffer, "there is something to apply"
                    self._step(1.0 if sums else 1 / count, self.buffer)
                    for table in range(self.tables):
                        held = sum(message.table == table for message in self.buffer)
                        self.weights[table] -= RATE * self.sums[table] / (1 if sums else max(1, held))
                        self.sums[table] = 0.0
                    self.buffer = []
                case Tick(clock):
                    self.events.append(f"tick {clock}")
                    self.crews.append(len(self.workers))
                case Release(key):
                    self._answer(key, at_once)

    def _answer(self, key: object, at_once: bool) -> None:
        (worker,) = (one for one in self.workers.values() if (one.life, one.iteration) == key)
        assert worker.waiting, "a pull is answered once"
        self.events.append(f"answer {worker.life} {worker.iteration}")
        applied, state = frozenset(self.applied), copy.deepcopy(self.clock._state)
        self.answers.append(Answer(worker.life, worker.iteration, at_once, applied, state))
        worker.waiting, worker.seen = False, list(self.weights)
        worker.iteration = max(worker.iteration + 1, self.clock.clock)  # a late worker continues at the clock
