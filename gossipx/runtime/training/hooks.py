"""Hooks on a script's module and its optimizers, by which its training loop reaches the peer while that is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from torch import nn

from gossipx.runtime.optimizers import Optimizers
from gossipx.runtime.training.backward import Backward
from gossipx.runtime.training.bypass import OptimizerBypass
from gossipx.runtime.training.schedule_free import ScheduleFree
from gossipx.runtime.training.step_watch import StepWatch


class Hooks:
    """The hooks of one peer.

    Args:
        step: called at the end of each iteration.
        backward: sends gradients and waits for tables in server mode; None in other modes.
        schedule_free: what the optimizers exchange beside the weights; None: nothing.

    Attributes:
        watch: warns of loops whose steps do not reach the model.
        before_leaving: functions of the script, called when the peer leaves on request, before its checkpoint is taken.
        closes: what :meth:`close` calls, last in first out.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Optimizers,
        step: Callable[[], None],
        backward: Backward | None,
        schedule_free: ScheduleFree | None,
    ):
        self.backward = backward
        self.watch = StepWatch(module, optimizers)
        self.before_leaving: list[Callable[[], None]] = []
        self._optimizers = optimizers
        self._schedule_free = schedule_free
        self.closes = contextlib.ExitStack()
        self.closes.callback(self.watch.close)
        if schedule_free is not None:
            self.closes.callback(schedule_free.close)
        if backward is not None:
            for optimizer in optimizers:
                self.closes.callback(OptimizerBypass(optimizer, backward.iteration_done).close)
        optimizers.count(step)

    def begin(self) -> None:
        """Start to send gradients, if the run has servers."""
        if self.backward is not None:
            self.backward.start()

    def settle(self, tables: Sequence[int] | None = None) -> None:
        """Wait until the model holds the current values of these tables; None: of all."""
        if self.backward is not None:
            self.backward.wait(tables)

    def take_wait_seconds(self) -> float:
        """Return for how long the training thread waited for tables since the last call."""
        if self.backward is None:
            return 0.0
        seconds, self.backward.wait_seconds = self.backward.wait_seconds, 0.0
        return seconds

    def ended(self) -> None:
        """Prepare the model for the finish: the training loop has ended normally."""
        self.watch.training_ended()
        if self._schedule_free is not None:
            self._schedule_free.training_ended()

    def leaving(self) -> None:
        """Call what the script wants to be called before the checkpoint of a peer that leaves on request."""
        for prepare in self.before_leaving:
            prepare()

    def close(self, again: bool) -> None:
        """Remove the hooks.

        Args:
            again: whether each further step shall still reach the peer, which then ends the script again.
        """
        if not again:
            self._optimizers.close()
        self.closes.close()
        if self.backward is not None:
            self.backward.close()
