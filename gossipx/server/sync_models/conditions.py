"""Push and pull conditions: the building blocks of every sync model.

A worker does iterations i = 0, 1, 2, ...: it pushes its gradient of iteration i, pulls with progress i, and waits for
the answer before iteration i + 1. The clock, V_train, is the number of ticks done: it ticks from i to i + 1 when enough
living workers have pushed iteration i. :class:`~gossipx.server.sync_models.clock.Clock` keeps it.

A sync model is an immutable value with explicit, plain state. Built-in models are in
:mod:`gossipx.server.sync_models.models`. For a custom one, inherit from :class:`SyncModel`, or pass two functions to
:class:`Conditions`.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

State = Any
"""Plain data: None, numbers, strings, and lists and dicts of them, so that it can be stored in a checkpoint."""


class Apply(enum.Enum):
    """How gradients are applied to a shard; N is the number of living workers.

    Attributes:
        PUSH: each push at once, g / N (FluentPS, Algorithm 1, line 15).
        EACH: each push at once, unscaled (Downpour; the asynchronous baseline of Hybrid Approach).
        TICK: pushes are summed in a buffer; at each tick one optimizer step uses the mean of the buffer. Pushes of fast
            workers that are ahead count in the next tick's mean.
        THRESHOLD: as TICK, but the step is done when the sync model's :meth:`SyncModel.may_apply` returns True.
    """

    PUSH = "push"
    EACH = "each"
    TICK = "tick"
    THRESHOLD = "threshold"

    @property
    def buffers(self) -> bool:
        """Whether gradients are collected in a buffer."""
        return self in (Apply.TICK, Apply.THRESHOLD)


@dataclass(frozen=True)
class View:
    """The state of a shard that conditions are evaluated on (FluentPS, section III-B).

    Attributes:
        clock: V_train, ticks done, from 0.
        pushed: Count[V_train], the number of living workers whose push of iteration ``clock`` is complete.
        workers: N, the number of living workers.
        fastest: the highest progress of a living worker: the last iteration whose push is complete. A worker that has
            not pushed since it joined counts with ``clock`` − 1 at that time.
        slowest: the lowest.
        buffered: the number of complete pushes of living workers in the gradient buffer.
        gradients: the number of complete pushes that were not dropped, since the start or the last switch.
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
        progress: i, the iteration that it pushed last.
        draw: a number in [0, 1), drawn once when the pull arrived.
        significance: ``|g| / |w|`` of the worker's last push (FluentPS, section III-E.2); 0 unless the sync model asks
            for it (:attr:`SyncModel.asks_significance`).
        applied: whether all of the worker's pushes have left the gradient buffer.
    """

    worker: int
    progress: int
    draw: float
    significance: float = 0.0
    applied: bool = True


@dataclass(frozen=True)
class SyncModel(abc.ABC):
    """A sync model of one shard. The default push condition is Count[V_train] == N, as for all but one model of Table
    III.
    """

    @property
    def default_apply(self) -> Apply:
        """How gradients are applied unless the user chooses."""
        return Apply.PUSH

    @property
    def answers_by_condition(self) -> bool:
        """Whether a delayed pull waits for :meth:`may_pull` even under lazy execution, instead of for the clock."""
        return False

    @property
    def drops_late(self) -> bool:
        """Whether a push of an iteration that the clock has passed is dropped."""
        return False

    @property
    def asks_significance(self) -> bool:
        """Whether :meth:`may_pull` uses ``pull.significance``, which costs workers a pass over their gradients.

        After a switch, workers learn this with the next tables that they receive.
        """
        return False

    @property
    def needs_rate(self) -> bool:
        """Whether :meth:`resolved` must be called before use."""
        return False

    def resolved(self, learning_rate: float) -> SyncModel:
        """Return the model with terms of the learning rate replaced by numbers."""
        return self

    def init(self) -> State:
        """Return the state at clock 0, or after a switch to this model."""
        return None

    @abc.abstractmethod
    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        """The pull condition: return whether the pull may be answered now."""

    def fetches(self, progress: int, fetched: int) -> bool:
        """Return whether a worker pulls after iteration ``progress``, or computes on with the tables that it has.

        Modularized Parameter Server, Code 4.4 (AfterClientUpdate). The worker pushes every gradient in any case. After
        a switch, it learns of the new model with the next tables that it receives.

        Args:
            progress: i, the iteration that it pushed last.
            fetched: the clock, V_train, of the tables that it has.
        """
        return True

    def may_tick(self, state: State, view: View) -> bool:
        """The push condition: return whether enough workers have pushed iteration ``view.clock``. Called if at least
        one has.
        """
        return view.pushed >= view.workers

    def may_apply(self, state: State, view: View) -> bool:
        """Return whether to apply the gradient buffer now. Called with ``Apply.THRESHOLD`` if it is not empty."""
        return False

    def ticked(self, state: State, view: View, pulls: int, delayed: int) -> State:
        """Return the state after a tick.

        Args:
            state: before it.
            view: after it.
            pulls: the number of pulls since the last tick or switch.
            delayed: how many of these could not be answered at once.
        """
        return state


@final
@dataclass(frozen=True)
class Conditions(SyncModel):
    """Custom pull and push conditions: SetcondPull and SetcondPush (FluentPS, section III-B).

    Attributes:
        pull: returns whether a pull may be answered now.
        push: returns whether the clock ticks now; called while at least one worker has pushed iteration ``view.clock``.
        apply: the default for how gradients are applied.
        significance: whether ``pull`` uses the pull's ``significance``.
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
