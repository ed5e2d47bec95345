"""Push and pull conditions: what every sync model of a shard is made of, and what it decides from.

A worker does iterations i = 0, 1, 2, ...: it pushes its gradient of iteration i, pulls with progress i, and waits for
the answer before iteration i + 1. The clock, V_train, is the number of ticks done: it ticks from i to i + 1 when enough
living workers have pushed iteration i. :class:`~gossipx.server.sync_models.clock.Clock` keeps it.

A sync model is an immutable value with explicit, plain state. Shipped ones are in
:mod:`gossipx.server.sync_models.models`; one of your own is a subclass of :class:`SyncModel`, or :class:`Conditions` of
two functions.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

State = Any
"""Plain data: None, numbers, strings, and lists and dicts of them, so that a checkpoint can hold it."""


class Apply(enum.Enum):
    """How gradients are applied to a shard; N is the number of living workers.

    Attributes:
        PUSH: each push at once, g / N (FluentPS, Algorithm 1, line 15).
        EACH: each push at once and whole (Downpour; the asynchronous baseline of Hybrid Approach).
        TICK: pushes are summed in one buffer; at a tick one optimizer step is done with the mean of what it holds. What
            fast workers have pushed ahead is in the mean of the next tick.
        THRESHOLD: the same, done when the sync model's :meth:`SyncModel.may_apply` says so.
    """

    PUSH = "push"
    EACH = "each"
    TICK = "tick"
    THRESHOLD = "threshold"

    @property
    def buffers(self) -> bool:
        """Whether gradients wait in a buffer."""
        return self in (Apply.TICK, Apply.THRESHOLD)


@dataclass(frozen=True)
class View:
    """What conditions see of a shard (FluentPS, section III-B).

    Attributes:
        clock: V_train, ticks done, from 0.
        pushed: Count[V_train], living workers whose push of iteration ``clock`` is complete.
        workers: N, the living.
        fastest: the highest progress of a living worker: the last iteration whose push is complete; ``clock`` − 1 as it
            was when they joined for those that have not pushed since.
        slowest: the lowest.
        buffered: complete pushes of living workers that wait in the gradient buffer.
        gradients: complete pushes that were not dropped, since the start or the last switch.
    """

    clock: int
    pushed: int
    workers: int
    fastest: int
    slowest: int
    buffered: int
    gradients: int


@dataclass(frozen=True)
class Pull:
    """A worker's pull.

    Attributes:
        worker: its rank.
        progress: i, the iteration whose gradient it has pushed last.
        draw: a number in [0, 1), drawn once when the pull came.
        significance: ``|g| / |w|`` of the worker's last push (FluentPS, section III-E.2); 0 unless the sync model asks
            for it (:attr:`SyncModel.asks_significance`).
        applied: whether nothing of what the worker has pushed waits in the gradient buffer.
    """

    worker: int
    progress: int
    draw: float
    significance: float = 0.0
    applied: bool = True


@dataclass(frozen=True)
class SyncModel(abc.ABC):
    """Decides for one shard; the base's own push condition is Count[V_train] == N, as of all but one in Table III."""

    @property
    def default_apply(self) -> Apply:
        """How gradients are applied where the user does not say."""
        return Apply.PUSH

    @property
    def answers_by_condition(self) -> bool:
        """Whether a delayed pull waits for :meth:`may_pull` with lazy pulls, too, and not for the clock."""
        return False

    @property
    def drops_late(self) -> bool:
        """Whether a push of an iteration that the clock has passed is thrown away."""
        return False

    @property
    def asks_significance(self) -> bool:
        """Whether :meth:`may_pull` looks at ``pull.significance``, which takes workers a pass over their gradients.

        After a switch they hear of it by the next tables that they are given.
        """
        return False

    @property
    def needs_rate(self) -> bool:
        """Whether :meth:`resolved` has to be called before use."""
        return False

    def resolved(self, learning_rate: float) -> SyncModel:
        """The same with the learning rate put in where it is written in terms of that."""
        return self

    def init(self) -> State:
        """The state at clock 0, or when the shard is switched to this model."""
        return None

    @abc.abstractmethod
    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        """The pull condition: whether the pull may be answered now."""

    def fetches(self, progress: int, fetched: int) -> bool:
        """On a worker: whether it pulls after iteration ``progress``, or computes on with the tables that it has.

        Modularized Parameter Server, Code 4.4 (AfterClientUpdate). It pushes every gradient all the same. After a
        switch it hears of the new model by the next tables that it is given.

        Args:
            progress: i, the iteration whose gradient it has pushed last.
            fetched: the clock, V_train, by which it was given these tables.
        """
        return True

    def may_tick(self, state: State, view: View) -> bool:
        """The push condition: whether enough have pushed iteration ``view.clock``; asked if at least one has."""
        return view.pushed >= view.workers

    def may_apply(self, state: State, view: View) -> bool:
        """Whether the gradient buffer is to be applied now; asked with ``Apply.THRESHOLD`` if it is not empty."""
        return False

    def ticked(self, state: State, view: View, pulls: int, delayed: int) -> State:
        """The state after a tick.

        Args:
            state: before it.
            view: after it.
            pulls: that came since the last tick or switch.
            delayed: how many of these could not be answered at once.
        """
        return state


@final
@dataclass(frozen=True)
class Conditions(SyncModel):
    """A user's own pull and push conditions: SetcondPull and SetcondPush (FluentPS, section III-B).

    Attributes:
        pull: whether a pull may be answered now.
        push: whether the clock ticks now; it is asked while at least one has pushed iteration ``view.clock``.
        apply: how gradients are applied where that is not said.
        significance: whether ``pull`` looks at the pull's ``significance``.
    """

    pull: Callable[[View, Pull], bool]
    push: Callable[[View], bool]
    apply: Apply = Apply.PUSH
    significance: bool = False

    @property
    def default_apply(self) -> Apply:
        return self.apply

    @property
    def asks_significance(self) -> bool:
        return self.significance

    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        return bool(self.pull(view, pull))

    def may_tick(self, state: State, view: View) -> bool:
        return bool(self.push(view))
