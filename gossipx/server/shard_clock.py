"""One shard's clock: which worker has pushed what, which pulls wait, and what follows from each event.

The clock handles no tensors. Each event returns the decisions that the shard must carry out, in order: apply the
gradient buffer, tick, answer a pull. Sync models are described in :mod:`gossipx.server.conditions`.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import random
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from gossipx.errors import UsageError
from gossipx.server.conditions import Apply, Pull, SyncModel, View
from gossipx.server.sync_models import application, chosen, spec_of


class DelayedPulls(enum.Enum):
    """The index of a delayed pull, which is answered once the clock has passed it (FluentPS, section III-C).

    Attributes:
        LAZY: its progress. The answer holds every push up to its own iteration, and the worker has lost its lead.
        SOFT: V_train, so that it waits for one tick: the soft barrier of SSP. The worker keeps its lead.
    """

    LAZY = "lazy"
    SOFT = "soft"


class Handling(enum.Enum):
    """The handling of one message of a push."""

    APPLY = "apply"
    BUFFER = "buffer"
    DROP = "drop"


@dataclass(frozen=True)
class PushDecision:
    """The decision about one message of a push.

    Attributes:
        handling: apply its gradients now, add them to the gradient buffer, or drop them.
        scale: the factor to apply them with: 1 / N (Algorithm 1, line 15) or 1.
        buffers: whether gradients that are applied now are added to the buffer, too.
    """

    handling: Handling
    scale: float = 1.0
    buffers: bool = False


@dataclass(frozen=True)
class BufferDue:
    """Do one optimizer step with the mean of the gradient buffer, and empty it.

    Attributes:
        count: the number of complete pushes in the buffer, at least 1: the divisor of the sum. If a step cuts a push of
            several messages in two, some tables hold one push more or less than that; for the exact mean, a shard
            counts the gradients that it adds to each table.
        sums: use the sum in place of the mean.
    """

    count: int
    sums: bool = False


@dataclass(frozen=True)
class Tick:
    """The clock has advanced to ``clock``."""

    clock: int


@dataclass(frozen=True)
class Release:
    """Answer the pull with this ``key``."""

    key: Hashable


Decision = BufferDue | Tick | Release


@dataclass
class Counts:
    """Counts of events so far.

    Attributes:
        pulls: pulls received.
        delayed: pulls that had to wait (DPRs).
        late: pushes dropped because they were late.
        gradients: complete pushes that were not dropped.
        applied: those that are not in the gradient buffer any more.
        steps: optimizer steps, if one push counts as one step where it is applied in several messages.
        staleness: the sum over ``applied`` of the steps between the pull that the gradient was computed with and the
            step that applies it.
    """

    pulls: int = 0
    delayed: int = 0
    late: int = 0
    gradients: int = 0
    applied: int = 0
    steps: int = 0
    staleness: int = 0


@dataclass
class _Worker:
    """A living worker.

    Attributes:
        progress: the last iteration whose push is complete.
        waiting: the number of its complete pushes in the gradient buffer.
        receiving: the iteration of the push being received; None: none yet.
        dropped: whether that push is dropped. The first message decides it for the whole push.
        partly: whether a part of that push is in the gradient buffer.
        read: the number of optimizer steps in the values that it has.
        alone: whether the push being received is applied at once, besides being buffered; see ``dropped``.
    """

    progress: int
    waiting: int = 0
    receiving: int | None = None
    dropped: bool = False
    partly: bool = False
    read: int = 0
    alone: bool = False


@dataclass(frozen=True)
class _Delayed:
    """A delayed pull.

    Attributes:
        pull: the pull.
        key: identifies it in the :class:`Release` that answers it.
        index: it is answered once the clock has passed this (FluentPS, Algorithm 1, lines 7 and 18).
    """

    pull: Pull
    key: Hashable
    index: int


class ShardClock:
    """The bookkeeping of one shard (FluentPS, Algorithm 1).

    After every change of clock, membership or sync model all delayed pulls are looked at again. A worker joins before
    its other events. A push of an iteration that is not above the worker's progress changes nothing. Progress may jump
    ahead: a late worker continues at the clock.

    Args:
        model: see :mod:`gossipx.server.sync_models`; a model in terms of the learning rate must be resolved.
        apply: how gradients are applied; None: the model's default.
        pulls: the index of delayed pulls, ``lazy`` or ``soft``. Lazy as in Algorithm 1: fewer pulls have to wait.
        workers: the ranks present at the start.
        rng: draws a number for every pull under any model, so that models can be compared and switched.

    Attributes:
        clock: V_train, ticks done.
        epoch: the number of switches of the sync model.
        counts: pulls, gradients and so on, so far.
        model: the sync model in force.
        apply: how gradients are applied.
        pulls: the index of delayed pulls.

    Raises:
        UsageError: the model is not resolved, or ``apply`` does not suit it.
    """

    def __init__(
        self,
        model: SyncModel,
        apply: Apply | str | None = None,
        pulls: DelayedPulls | str = DelayedPulls.LAZY,
        workers: Iterable[int] = (),
        rng: random.Random | None = None,
    ):
        self.clock = 0
        self.epoch = 0
        self.counts = Counts()
        self._rng = rng if rng is not None else random.Random(0)
        self._workers = {worker: _Worker(-1) for worker in workers}
        self._delayed: list[_Delayed] = []  # in order of arrival
        self._holds_any = False  # whether the gradient buffer holds anything, even a part of a push
        self._reads: list[int] = []  # of complete pushes in it, also of workers that are gone: see _Worker.read
        self.pulls = chosen(DelayedPulls, pulls, "way to answer pulls")
        self._install(model, apply)

    def _install(self, model: SyncModel, apply: Apply | str | None) -> None:
        if model.needs_rate:
            raise UsageError(f"sync model '{spec_of(model)}' needs the learning rate: call resolved(learning_rate)")
        self.apply = application(model, apply)
        self.model = model
        self._state = model.init()
        self._before = self.counts.gradients  # in earlier epochs
        self._since_tick = (0, 0)  # pulls, and how many of them were delayed

    # --- state ------------------------------------------------------------------------------------

    @property
    def buffered(self) -> int:
        """The number of complete pushes in the gradient buffer, including those of workers that are gone."""
        return len(self._reads)

    @property
    def progress(self) -> dict[int, int]:
        """For each living worker, the last iteration whose push is complete."""
        return {worker: one.progress for worker, one in self._workers.items()}

    @property
    def waiting(self) -> list[Hashable]:
        """The keys of the delayed pulls, in order of arrival."""
        return [one.key for one in self._delayed]

    @property
    def holding_up(self) -> list[int]:
        """The living workers whose pushes are waited for, the slowest first.

        They have not pushed iteration ``clock``; if pulls wait for the gradient buffer, they have no gradient in it.
        """
        by_buffer = self.awaits_gradients
        missing = [
            worker
            for worker, one in self._workers.items()
            if (not one.waiting if by_buffer else one.progress < self.clock)
        ]
        return sorted(missing, key=lambda worker: (self._workers[worker].progress, worker))

    @property
    def awaits_gradients(self) -> bool:
        """Whether a pull waits until the gradient buffer has reached its threshold."""
        by_threshold = self.apply is Apply.THRESHOLD
        return by_threshold and any(self._workers[one.pull.worker].waiting for one in self._delayed)

    def view(self) -> View:
        """Return the state that conditions are evaluated on."""
        progress = [one.progress for one in self._workers.values()]
        return View(
            clock=self.clock,
            pushed=sum(one >= self.clock for one in progress),
            workers=len(progress),
            fastest=max(progress, default=self.clock - 1),
            slowest=min(progress, default=self.clock - 1),
            buffered=sum(one.waiting for one in self._workers.values()),
            gradients=self.counts.gradients - self._before,
        )

    # --- pushes and pulls -------------------------------------------------------------------------

    def push_part(self, worker: int, progress: int) -> PushDecision:
        """Decide what to do with one message of the worker's push of iteration ``progress``; called as each arrives."""
        one = self._workers[worker]
        if progress <= one.progress:
            return PushDecision(Handling.DROP)  # already counted
        self._note_push(one, progress)
        if one.dropped:
            return PushDecision(Handling.DROP)
        if self.apply.buffers:
            one.partly = self._holds_any = True
            return PushDecision(Handling.APPLY, buffers=True) if one.alone else PushDecision(Handling.BUFFER)
        return PushDecision(Handling.APPLY, 1 / len(self._workers) if self.apply is Apply.PUSH else 1.0)

    def pushed(self, worker: int, progress: int) -> list[Decision]:
        """Complete the worker's push of iteration ``progress``, all of whose messages have been handled."""
        one = self._workers[worker]
        if progress <= one.progress:
            return []
        self._note_push(one, progress)
        if one.dropped:
            self.counts.late += 1
        else:
            self.counts.gradients += 1
            if one.partly:
                one.waiting += 1
                self._reads.append(one.read)
                self.counts.steps += one.alone
            else:
                self._count_step([one.read])
        one.progress = progress
        return self._settle()

    def pull(self, worker: int, progress: int, key: Hashable, significance: float = 0.0) -> list[Decision]:
        """Handle the worker's pull after it has pushed iteration ``progress``; −1 or its progress if it has not pushed
        yet.

        Args:
            worker: its rank.
            progress: i.
            key: identifies the pull in the :class:`Release` that answers it, now or later.
            significance: |g| / |w| of its last push, if the sync model asks for it.
        """
        one = self._workers[worker]
        pull = Pull(worker, progress, self._rng.random(), significance)
        passes = self._may_pull(self.view(), pull)
        self.counts.pulls += 1
        self.counts.delayed += not passes
        pulls, waited = self._since_tick
        self._since_tick = (pulls + 1, waited + (not passes))
        if passes:
            one.read = self.counts.steps
            return [Release(key)]
        # The soft barrier's index is V_train; a pull of an earlier iteration never waits longer than a lazy one.
        index = min(progress, self.clock) if self.pulls is DelayedPulls.SOFT else progress
        self._delayed.append(_Delayed(pull, key, index))
        return []

    def pull_now(self, worker: int) -> list[Decision]:
        """Handle a pull of the current values, which is answered at once, by a worker that begins or has ended.

        A buffer with a threshold is applied first, unless pulls may wait for it or its gradients are applied already.
        Otherwise the last gradients of a run, fewer than the threshold, would be in no worker's final values.
        """
        held = self.model.answers_by_condition or self.model.applies_at_once
        rest = self.apply is Apply.THRESHOLD and not held and self._reads
        made = self.apply_now() if rest else []
        if worker in self._workers:
            self._workers[worker].read = self.counts.steps
        return made

    def apply_now(self) -> list[Decision]:
        """Apply the gradient buffer as it is."""
        return [self._empty_buffer(), *self._settle()] if self._holds_any else []

    # --- members and models -----------------------------------------------------------------------

    def joined(self, worker: int) -> list[Decision]:
        """Add a worker. It starts at the clock: it may pull at once, with progress ``clock`` − 1."""
        self._workers[worker] = _Worker(self.clock - 1, read=self.counts.steps)
        return self._settle()

    def lost(self, worker: int) -> list[Decision]:
        """Remove a worker, and forget its pulls.

        Its pushes stay in the gradient buffer, but do not count towards a threshold.
        """
        if self._workers.pop(worker, None) is None:
            return []
        self._delayed = [one for one in self._delayed if one.pull.worker != worker]
        return self._settle()

    def switch(
        self, model: SyncModel, apply: Apply | str | None = None, pulls: DelayedPulls | str | None = None
    ) -> list[Decision]:
        """Switch to another sync model, which begins a new epoch. No push is lost.

        Delayed pulls that satisfy the new pull condition are answered; the others stay, with the index that they have.

        Args:
            model: as in the constructor.
            apply: as in the constructor. If the new mode does not use the buffer, it is applied at once.
            pulls: the index of pulls that are delayed from now on; None: as before.

        Raises:
            UsageError: as the constructor; nothing has changed.
        """
        mode = self.pulls if pulls is None else chosen(DelayedPulls, pulls, "way to answer pulls")
        self._install(model, apply)
        self.pulls = mode
        self.epoch += 1
        made: list[Decision] = []
        if self._holds_any and not self.apply.buffers:
            made.append(self._empty_buffer())
        return made + self._settle(by_condition=True)

    def start_at(self, clock: int) -> None:
        """Start at ``clock`` rather than 0, with all workers, since they have trained before."""
        self.clock = clock
        for one in self._workers.values():
            one.progress = clock - 1

    # --- decisions -------------------------------------------------------------------------------

    def _note_push(self, one: _Worker, progress: int) -> None:
        """Record the first message of a push."""
        if one.receiving != progress:
            one.receiving, one.partly = progress, False
            one.dropped = self.model.drops_late and progress < self.clock
            one.alone = False
            if self.apply is Apply.THRESHOLD and self.model.applies_at_once:
                view = self.view()
                view = dataclasses.replace(view, buffered=view.buffered + 1, gradients=view.gradients + 1)
                one.alone = not self.model.may_apply(self._state, view)

    def _settle(self, by_condition: bool = False) -> list[Decision]:
        """Apply, tick and answer whatever is possible now.

        A tick needs at least one living worker that has pushed the iteration. So the clock never passes the fastest
        worker, and this loop ends under any custom push condition.
        """
        made: list[Decision] = []
        view = self.view()
        while True:
            by_threshold = self.apply is Apply.THRESHOLD and self._holds_any
            if by_threshold and self.model.may_apply(self._state, view):
                made.append(self._empty_buffer())
                view = self.view()
            if not view.pushed or not self.model.may_tick(self._state, view):
                break
            if self.apply is Apply.TICK and self._holds_any:
                made.append(self._empty_buffer())
            self.clock += 1
            made.append(Tick(self.clock))
            view = self.view()
            self._state = self.model.ticked(self._state, view, *self._since_tick)
            self._since_tick = (0, 0)
        return made + self._answer(view, by_condition)

    def _answer(self, view: View, by_condition: bool) -> list[Decision]:
        """Answer the delayed pulls that may be answered, in order of arrival."""
        by_index = not self.model.answers_by_condition
        made: list[Decision] = []
        kept = []
        for one in self._delayed:
            passes = by_index and view.clock > one.index
            if passes or ((by_condition or not by_index) and self._may_pull(view, one.pull)):
                self._workers[one.pull.worker].read = self.counts.steps
                made.append(Release(one.key))
            else:
                kept.append(one)
        self._delayed = kept
        return made

    def _may_pull(self, view: View, pull: Pull) -> bool:
        applied = not self._workers[pull.worker].waiting
        return self.model.may_pull(self._state, view, dataclasses.replace(pull, applied=applied))

    def _empty_buffer(self) -> BufferDue:
        count = max(1, len(self._reads))
        self._count_step(self._reads)
        self._reads, self._holds_any = [], False
        for one in self._workers.values():
            one.waiting, one.partly = 0, False
        return BufferDue(count, self.model.sums)

    def _count_step(self, reads: list[int]) -> None:
        """Count an optimizer step with these gradients; ``reads``: see :class:`_Worker`."""
        self.counts.applied += len(reads)
        self.counts.staleness += sum(self.counts.steps - read for read in reads)
        self.counts.steps += 1

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next decision depends on, as JSON data.

        Delayed pulls are not included: workers repeat them. The shard stores the gradient buffer itself.
        """
        version, words, gauss = self._rng.getstate()
        return {
            "made": self.settings,
            "model": copy.deepcopy(self._state),  # a custom model may update its state in place
            "workers": [[worker, *dataclasses.astuple(one)] for worker, one in self._workers.items()],
            "clock": [self.clock, self.epoch, self._before, *self._since_tick],
            "buffer": [list(self._reads), self._holds_any],
            "counts": dataclasses.astuple(self.counts),
            "draws": [version, list(words), gauss],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            UsageError: the saved clock has another sync model, apply or pull mode. Make the clock as ``state["made"]``
                says; it can be switched afterwards.
        """
        if state["made"] != self.settings:
            saved, here = (" ".join(made.values()) for made in (state["made"], self.settings))
            raise UsageError(
                f"the clock was saved with '{saved}' and this one has '{here}': make it as saved, then switch"
            )
        version, words, gauss = state["draws"]
        self._rng.setstate((version, tuple(words), gauss))
        self._state = copy.deepcopy(state["model"])
        self._workers = {worker: _Worker(*rest) for worker, *rest in state["workers"]}
        self.clock, self.epoch, self._before, pulls, delayed = state["clock"]
        self._since_tick = (pulls, delayed)
        reads, self._holds_any = state["buffer"]
        self._reads = list(reads)
        self.counts = Counts(*state["counts"])
        self._delayed = []

    @property
    def settings(self) -> dict[str, str]:
        """The sync model, the apply mode and the pull mode, as words."""
        return {"model": spec_of(self.model), "apply": self.apply.value, "pulls": self.pulls.value}
