"""Push and pull conditions: the building blocks of every sync model of a parameter server.

A sync model decides for one shard (a part of the parameters, on one server) how far workers may run ahead of each
other. A worker does iterations i = 0, 1, 2, ...: it pushes its gradient of iteration i, pulls the new parameters with
progress i, and waits for the answer before iteration i + 1. The shard's *clock*, V_train, is the number of ticks done:
it ticks from i to i + 1 when the push condition finds that enough living workers have pushed iteration i. A pull is
answered at once if the pull condition allows it, otherwise it is *delayed*.
:class:`~gossipx.server.shard_clock.ShardClock` keeps the clock. A *switch* replaces a shard's sync model during the
run. A *table* is one trained parameter.

References are to the papers FluentPS, Modularized Parameter Server and Hybrid Approach, listed in docs/architecture.md.

A sync model is an immutable value with explicit, plain state. Built-in models are in
:mod:`gossipx.server.sync_models`. For a custom one, inherit from :class:`SyncModel`, or pass two functions to
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
        PUSH: each gradient g makes an optimizer step with g / N at once (FluentPS, Algorithm 1, line 15).
        EACH: each gradient makes an optimizer step at once, unscaled (Downpour SGD; the asynchronous baseline of Hybrid
            Approach).
        TICK: gradients are summed in a buffer; at each tick one optimizer step uses their mean. The buffer also holds
            gradients of fast workers for iterations ahead of the clock, which count in the next mean.
        THRESHOLD: as TICK, but the step is made when the sync model's :meth:`SyncModel.may_apply` returns True.
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
    """The state of a shard on which the conditions are evaluated (FluentPS, section III-B).

    Attributes:
        clock: V_train, the number of ticks done.
        pushed: Count[V_train], the number of living workers whose push of iteration ``clock`` is complete. A push may
            consist of several messages.
        workers: N, the number of living workers.
        fastest: the highest progress of a living worker: the last iteration whose push is complete. A worker that has
            not pushed since it joined counts with ``clock`` − 1 at that time.
        slowest: the lowest progress of a living worker.
        buffered: the number of complete pushes of living workers in the gradient buffer.
        gradients: the number of complete pushes since the start or the last switch, without dropped ones.
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
        draw: a random number in [0, 1), drawn once when the pull arrived, for probabilistic conditions.
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
    """A sync model of one shard.

    The default push condition is Count[V_train] = N: the clock ticks when all living workers have pushed. All models of
    FluentPS, Table III, but one have this condition.
    """

    @property
    def default_apply(self) -> Apply:
        """How gradients are applied if the user does not choose (``--apply``)."""
        return Apply.PUSH

    @property
    def answers_by_condition(self) -> bool:
        """Whether a delayed pull is answered when :meth:`may_pull` allows it, not when the clock has passed its index.

        For the index see ``gossipx.server.shard_clock.DelayedPulls``.
        """
        return False

    @property
    def sums(self) -> bool:
        """Whether a step with the gradient buffer uses its sum in place of its mean."""
        return False

    @property
    def applies_at_once(self) -> bool:
        """Whether a gradient that enters the buffer, and does not complete it, is applied at once, too.

        It is used only with ``Apply.THRESHOLD``.
        """
        return False

    @property
    def drops_late(self) -> bool:
        """Whether a late push, of an iteration that the clock has passed, is dropped."""
        return False

    @property
    def asks_significance(self) -> bool:
        """Whether :meth:`may_pull` uses ``pull.significance``, which costs workers a pass over their gradients.

        After a switch, workers learn this with the next tables that they receive.
        """
        return False

    @property
    def needs_rate(self) -> bool:
        """Whether :meth:`resolved` must be called before use, because a parameter depends on the learning rate."""
        return False

    def resolved(self, learning_rate: float) -> SyncModel:
        """Return this sync model with numbers in place of parameters that depend on the learning rate."""
        return self

    def init(self) -> State:
        """Return the state at clock 0, or after a switch to this model."""
        return None

    @abc.abstractmethod
    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        """Return whether the pull may be answered now: the pull condition."""

    def pushes(self, progress: int, fetched: int) -> bool:
        """Return whether a worker pushes in iteration ``progress``; if not, its gradients gather in the transmit
        buffers until the next push, and it does not pull either.

        Called on the worker before the first gradient of the iteration (Modularized Parameter Server, Code 4.4,
        AfterClientUpdate; Figure 2.3d). If shards have different sync models, the worker pushes to all of them when one
        asks for it. A push counts for all iterations up to its own. What has gathered at the end of training is pushed.

        Args:
            progress: i, the iteration.
            fetched: the clock, V_train, of the tables that it has.
        """
        return True

    def fetches(self, progress: int, fetched: int) -> bool:
        """Return whether a worker pulls after its push of iteration ``progress``; if not, it computes with the tables
        that it has.

        Called on the worker. After a switch, it learns of the new sync model with the next tables that it receives.

        Args:
            progress: i, the iteration that it pushed last.
            fetched: the clock, V_train, of the tables that it has.
        """
        return True

    def may_tick(self, state: State, view: View) -> bool:
        """Return whether the clock ticks now: the push condition.

        Called only if at least one worker has pushed iteration ``view.clock``.
        """
        return view.pushed >= view.workers

    def may_apply(self, state: State, view: View) -> bool:
        """Return whether to make an optimizer step with the gradient buffer now.

        Called only with ``Apply.THRESHOLD``, if the buffer is not empty.
        """
        return False

    def ticked(self, state: State, view: View, pulls: int, delayed: int) -> State:
        """Return the state after a tick.

        Args:
            state: the state before the tick.
            view: the shard after the tick.
            pulls: the number of pulls since the previous tick or the last switch.
            delayed: the number of these pulls that were delayed.
        """
        return state


@final
@dataclass(frozen=True)
class Conditions(SyncModel):
    """A sync model of two functions: SetcondPull and SetcondPush (FluentPS, section III-B).

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
