"""One shard's clock: who has pushed what, which pulls wait, and what is to be done after each event.

It knows no tensor. What it is told of returns what the shard has to do, in order: apply the gradient buffer, note a
tick, answer a pull. See :mod:`gossipx.server.sync_models.conditions` for what a sync model decides.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gossipx import specs
from gossipx.errors import UsageError
from gossipx.server.sync_models.conditions import Apply, Pull, SyncModel, View
from gossipx.server.sync_models.decisions import ApplyBuffer, Counts, Decision, Fate, Part, Pulls, Release, Tick
from gossipx.server.sync_models.models import application, describe

__all__ = ["ApplyBuffer", "Clock", "Counts", "Decision", "Fate", "Part", "Pulls", "Release", "Tick"]


@dataclass
class _Worker:
    """A living worker.

    Attributes:
        progress: the last iteration whose push is complete.
        waiting: its complete pushes in the gradient buffer.
        coming: the iteration of the push whose messages came last.
        dropped: whether that push is thrown away. Its first message decides, so that a push is dropped whole or not.
        partly: whether some of that push is in the gradient buffer.
    """

    progress: int
    waiting: int = 0
    coming: int | None = None
    dropped: bool = False
    partly: bool = False


class Clock:
    """The bookkeeping of one shard (FluentPS, Algorithm 1).

    After every change of clock, membership or sync model all delayed pulls are looked at again. A worker has to have
    joined; anything else that is told of it is a ``ValueError``. A push of an iteration that is not above the worker's
    progress changes nothing, and progress may jump ahead: a worker that was late goes on at the clock.

    Args:
        model: see :mod:`gossipx.server.sync_models.models`; one with a step in terms of the learning rate has to be
            resolved.
        apply: how gradients are applied; None: the model's default.
        pulls: when a delayed pull is answered, ``lazy`` or ``soft``. Lazy as in Algorithm 1: fewer pulls have to wait.
        workers: ranks of those that are there at the start.
        rng: draws a number for every pull, whatever the model, so that models can be compared and switched.

    Attributes:
        clock: V_train, ticks done.
        epoch: how often the sync model was switched.
        counts: what has happened so far.

    Raises:
        UsageError: the model is not resolved, or ``apply`` does not go with it.
    """

    def __init__(
        self,
        model: SyncModel,
        apply: Apply | str | None = None,
        pulls: Pulls | str = Pulls.LAZY,
        workers: Iterable[int] = (),
        rng: random.Random | None = None,
    ):
        self.clock = 0
        self.epoch = 0
        self.counts = Counts()
        self._rng = rng if rng is not None else random.Random(0)
        self._workers = {worker: _Worker(-1) for worker in workers}
        self._delayed: list[tuple[Pull, Hashable]] = []  # in the order in which they came
        self._holds_any = False  # whether anything is in the gradient buffer, if only a part of a push
        self._complete = 0  # complete pushes in it, those of workers that are gone included
        self._pulls = _mode(pulls)
        self._install(model, apply)

    def _install(self, model: SyncModel, apply: Apply | str | None) -> None:
        if model.needs_rate:
            raise UsageError(f"sync model '{describe(model)}' needs the learning rate: call resolved(learning_rate)")
        self._apply = application(model, apply)
        self._model = model
        self._state = model.init()
        self._before = self.counts.gradients  # of earlier epochs
        self._since_tick = (0, 0)  # pulls, and how many of them waited

    # --- figures ----------------------------------------------------------------------------------

    @property
    def model(self) -> SyncModel:
        """The sync model in force."""
        return self._model

    @property
    def apply(self) -> Apply:
        """How gradients are applied."""
        return self._apply

    @property
    def pulls(self) -> Pulls:
        """When a delayed pull is answered."""
        return self._pulls

    @property
    def buffered(self) -> int:
        """Complete pushes in the gradient buffer; those of workers that are gone, too."""
        return self._complete

    @property
    def progress(self) -> dict[int, int]:
        """By living worker the last iteration whose push is complete."""
        return {worker: one.progress for worker, one in self._workers.items()}

    @property
    def waiting(self) -> list[Hashable]:
        """Keys of the pulls that are delayed now, in the order in which they came."""
        return [key for _, key in self._delayed]

    @property
    def holding_up(self) -> list[int]:
        """Living workers that have not pushed iteration ``clock``, the slowest first: who is to be probed."""
        behind = [worker for worker, one in self._workers.items() if one.progress < self.clock]
        return sorted(behind, key=lambda worker: (self._workers[worker].progress, worker))

    @property
    def stuck(self) -> dict[int, int]:
        """By worker whose pull waits as the gradient buffer, with its gradient, lacks more: the iteration of that."""
        if self._apply is not Apply.THRESHOLD:
            return {}
        return {pull.worker: pull.progress for pull, _ in self._delayed if self._workers[pull.worker].waiting}

    @property
    def moment(self) -> tuple[int, ...]:
        """Another one after every event that may have ended or begun a wait."""
        counts = self.counts
        return self.epoch, counts.gradients, counts.late, counts.pulls, len(self._workers), len(self._delayed)

    def is_deadlocked(self, elsewhere: Mapping[int, int]) -> bool:
        """Whether nobody is left who could fill the gradient buffer.

        Args:
            elsewhere: by worker that waits at another shard for its gradient to be applied, the iteration of that.
        """
        stuck = self.stuck
        return bool(stuck) and all(
            worker in stuck or (worker in elsewhere and elsewhere[worker] <= one.progress)
            for worker, one in self._workers.items()
        )

    def view(self) -> View:
        """What conditions see now."""
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

    def push_part(self, worker: int, progress: int) -> Part:
        """What to do with a message of the worker's push of iteration ``progress``; to be told as each comes."""
        one = self._known(worker)
        if progress <= one.progress:
            return Part(Fate.DROP)  # it is counted already
        self._coming(one, progress)
        if one.dropped:
            return Part(Fate.DROP)
        if self._apply.buffers:
            one.partly = self._holds_any = True
            return Part(Fate.BUFFER)
        return Part(Fate.APPLY, 1 / len(self._workers) if self._apply is Apply.PUSH else 1.0)

    def pushed(self, worker: int, progress: int) -> list[Decision]:
        """All messages of the worker's push of iteration ``progress`` have come and are dealt with."""
        one = self._known(worker)
        if progress <= one.progress:
            return []
        self._coming(one, progress)
        if one.dropped:
            self.counts.late += 1
        else:
            self.counts.gradients += 1
            self._complete += one.partly
            one.waiting += one.partly
        one.progress = progress
        return self._settle()

    def pull(self, worker: int, progress: int, key: Hashable, significance: float = 0.0) -> list[Decision]:
        """The worker asks for the shard, having pushed iteration ``progress``; −1 or its progress before it has.

        Args:
            worker: its rank.
            progress: i.
            key: names the pull in the :class:`Release` that answers it, now or after a later event.
            significance: |g| / |w| of its last push, where the sync model asks for it.
        """
        self._known(worker)
        pull = Pull(worker, progress, self._rng.random(), significance)
        passes = self._may_pull(self.view(), pull)
        self.counts.pulls += 1
        self.counts.delayed += not passes
        pulls, waited = self._since_tick
        self._since_tick = (pulls + 1, waited + (not passes))
        if passes:
            return [Release(key)]
        self._delayed.append((pull, key))
        return []

    def apply_now(self) -> list[Decision]:
        """Apply the gradient buffer as it is."""
        return [self._empty_buffer(), *self._settle()] if self._holds_any else []

    # --- members and models -----------------------------------------------------------------------

    def joined(self, worker: int) -> list[Decision]:
        """A worker has come and starts at the clock: it may pull at once, with progress ``clock`` − 1."""
        if worker in self._workers:
            raise ValueError(f"worker {worker} has joined already")
        self._workers[worker] = _Worker(self.clock - 1)
        return self._settle()

    def lost(self, worker: int) -> list[Decision]:
        """A worker is gone: nothing waits for it, and its pulls are forgotten.

        What it has pushed stays in the gradient buffer, and stands for no push of a living worker.
        """
        if self._workers.pop(worker, None) is None:
            return []
        self._delayed = [(pull, key) for pull, key in self._delayed if pull.worker != worker]
        return self._settle()

    def switch(
        self, model: SyncModel, apply: Apply | str | None = None, pulls: Pulls | str | None = None
    ) -> list[Decision]:
        """Go over to another sync model: a new epoch. No push is lost.

        Delayed pulls are answered if the new model's pull condition holds, lazy ones too; the others stay.

        Args:
            model: as in the constructor.
            apply: as in the constructor. A buffer that the new way does not fill is applied at once.
            pulls: when a delayed pull is answered from now on; None: as before.

        Raises:
            UsageError: as the constructor; then nothing is changed.
        """
        mode = self._pulls if pulls is None else _mode(pulls)
        self._install(model, apply)
        self._pulls = mode
        self.epoch += 1
        made: list[Decision] = []
        if self._holds_any and not self._apply.buffers:
            made.append(self._empty_buffer())
        return made + self._settle(by_condition=True)

    # --- what follows from a change ---------------------------------------------------------------

    def _known(self, worker: int) -> _Worker:
        if worker not in self._workers:
            raise ValueError(f"worker {worker} has not joined")
        return self._workers[worker]

    def _coming(self, one: _Worker, progress: int) -> None:
        """Note that a push has begun, if it has only now."""
        if one.coming != progress:
            one.coming, one.partly = progress, False
            one.dropped = self._model.drops_late and progress < self.clock

    def _settle(self, by_condition: bool = False) -> list[Decision]:
        """Apply, tick and answer whatever may be now.

        A tick needs one living worker at least that has pushed the iteration, so that the clock never passes the
        fastest and this ends, whatever a user's push condition says.
        """
        made: list[Decision] = []
        view = self.view()
        while True:
            by_threshold = self._apply is Apply.THRESHOLD and self._holds_any
            if by_threshold and self._model.may_apply(self._state, view):
                made.append(self._empty_buffer())
                view = self.view()
            if not view.pushed or not self._model.may_tick(self._state, view):
                break
            if self._apply is Apply.TICK and self._holds_any:
                made.append(self._empty_buffer())
            self.clock += 1
            made.append(Tick(self.clock))
            view = self.view()
            self._state = self._model.ticked(self._state, view, *self._since_tick)
            self._since_tick = (0, 0)
        return made + self._answer(view, by_condition)

    def _answer(self, view: View, by_condition: bool) -> list[Decision]:
        """Answer the delayed pulls whose time has come, in the order in which they came."""
        by_clock = self._pulls is Pulls.LAZY and not self._model.answers_by_condition
        made: list[Decision] = []
        kept = []
        for pull, key in self._delayed:
            passes = by_clock and view.clock > pull.progress
            if not passes and (by_condition or not by_clock):
                passes = self._may_pull(view, pull)
            if passes:
                made.append(Release(key))
            else:
                kept.append((pull, key))
        self._delayed = kept
        return made

    def _may_pull(self, view: View, pull: Pull) -> bool:
        applied = not self._workers[pull.worker].waiting
        return self._model.may_pull(self._state, view, dataclasses.replace(pull, applied=applied))

    def _empty_buffer(self) -> ApplyBuffer:
        count = max(1, self._complete)
        self._complete, self._holds_any = 0, False
        for one in self._workers.values():
            one.waiting, one.partly = 0, False
        return ApplyBuffer(count)

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything the next decision depends on, as plain data that JSON can hold.

        Delayed pulls are no part of it: workers ask again. The gradient buffer is the shard's to store beside it.
        """
        version, words, gauss = self._rng.getstate()
        return {
            "made": self.made,
            "model": copy.deepcopy(self._state),  # a user's model may update its own in place
            "workers": [[worker, *dataclasses.astuple(one)] for worker, one in self._workers.items()],
            "clock": [self.clock, self.epoch, self._before, *self._since_tick],
            "buffer": [self._complete, self._holds_any],
            "counts": dataclasses.astuple(self.counts),
            "draws": [version, list(words), gauss],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        Raises:
            UsageError: it is of a clock with another sync model, or another way to apply or to pull. Make the clock
                with those that ``state["made"]`` names; it can be switched then.
        """
        if state["made"] != self.made:
            saved, here = (" ".join(made.values()) for made in (state["made"], self.made))
            raise UsageError(
                f"the clock was saved as '{saved}' and this one is '{here}': make it as saved, then switch"
            )
        version, words, gauss = state["draws"]
        self._rng.setstate((version, tuple(words), gauss))
        self._state = copy.deepcopy(state["model"])
        self._workers = {worker: _Worker(*rest) for worker, *rest in state["workers"]}
        self.clock, self.epoch, self._before, pulls, delayed = state["clock"]
        self._since_tick = (pulls, delayed)
        self._complete, self._holds_any = state["buffer"]
        self.counts = Counts(*state["counts"])
        self._delayed = []

    @property
    def made(self) -> dict[str, str]:
        """By what it goes: the sync model, the ways to apply and to pull."""
        return {"model": describe(self._model), "apply": self._apply.value, "pulls": self._pulls.value}


def _mode(pulls: Pulls | str) -> Pulls:
    if isinstance(pulls, str):
        words = {one.value: one for one in Pulls}
        specs.known_word("way to answer pulls", pulls, words)
        return words[pulls]
    return pulls
