"""The hooks between a torch module and a parameter server: they push gradients and wait for parameters.

With wait-free backpropagation (Modularized Parameter Server, section 2.3.2, Figure 2.4), communication overlaps with
computation: a hook on each parameter pushes its gradient as soon as autograd has accumulated it, and a pre-forward hook
on each module waits only for the parameters that this module reads. Without it, the optimizer's step pushes all
gradients and waits for all parameters. In both cases the servers update the parameters, and the optimizer's own step
does nothing.

A loop that changes gradients after backward, as clipping and GradScaler do, needs the second way. So the first
iteration is *observed*: its gradients are pushed at the optimizer's step, as the loop has left them. If they are the
same as after backward, the next iterations are wait-free. Each of them checks its gradients again at the step.

A *table* is one trained parameter. A *shard* is a part of all tables that is hosted by one server. A *bucket* is a
group of tables of a shard, or a part of one table, that is sent as one message.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossipx.errors import UsageError
from gossipx.runtime.optimizers import untraced
from gossipx.runtime.training.forwards import Forwards
from gossipx.runtime.training.gradients import Change, GradientWatch, fingerprint
from gossipx.tables.client import TableClient

log = logging.getLogger("gossipx")

POLL_INTERVAL = 0.5
"""Seconds between two checks for signals and errors while the training thread waits for tables."""
NO_WAIT_FREE = "give --no-wait-free (wait_free=False), which sends gradients at the optimizer's step"
NO_SYNC = (
    "put all but the last backward pass of an iteration into 'with peer.no_sync():'; if another optimizer than the"
    f" joined one steps, join that one; if the optimizer's step was skipped, {NO_WAIT_FREE}"
)

NO_HOOK = "let the optimizer given to gossipx.join make the step, not a hook on the parameter that removes its gradient"


class Sending(enum.Enum):
    """When gradients are sent."""

    OBSERVED = "at the optimizer's step; wait-free from the next iteration on, if nothing changes them after backward"
    WAIT_FREE = "as soon as they are computed"
    AT_STEP = "at the optimizer's step"


class Backward:
    """Hooks on a module and its optimizer.

    Args:
        module: the model; its parameters are the tables.
        tables: the trained parameters with their names, by table.
        client: the worker's side of the tables.
        on_gradients_ready: called with the (shard, bucket) pairs whose gradients are complete and can be pushed.
            Before the first gradient of an iteration it is called with no pair, to announce the iteration.
        wait_for_resume: waits until training may continue, at most the given number of seconds; returns whether it may.
        poll: called every :data:`POLL_INTERVAL` seconds while tables are awaited; raises to end the wait.
        wait_free: whether gradients are sent as they are computed, if the loop does not change them after backward.
            Otherwise all are sent at the optimizer's step, which then waits for the new tables.

    Attributes:
        wait_seconds: seconds that the training thread waited for tables.
    """

    def __init__(
        self,
        module: nn.Module,
        tables: Sequence[tuple[str, nn.Parameter]],
        client: TableClient,
        on_gradients_ready: Callable[[Sequence[tuple[int, int]]], None],
        wait_for_resume: Callable[[float], bool],
        poll: Callable[[], None],
        wait_free: bool,
    ):
        self.wait_seconds = 0.0
        self._client = client
        self._names = [name for name, _ in tables]
        self._parameters = [parameter for _, parameter in tables]
        self._on_gradients_ready, self._wait_for_resume, self._poll = on_gradients_ready, wait_for_resume, poll
        self._sending = Sending.OBSERVED if wait_free else Sending.AT_STEP
        self._syncing = True
        self._begun = False  # whether this iteration's first gradient was taken
        self._used: set[int] = set()  # tables that were written into the model for this iteration
        self._watch = GradientWatch()
        self._deferred: list[tuple[int, int]] = []  # buckets that are sent at the optimizer's step
        self._left: dict[int, tuple[int, int]] = {}  # by table: the state of its parameter when values came last
        self._told_of_writes = self._told_of_zeros = False
        self._had_gradient: set[int] = set()
        self._values: dict[int, Tensor] = {}  # by table: a fingerprint of these values, if they will be compared
        self._turn = 0  # the table whose values are noted: to compare all each time would cost as much as to copy them
        self._unread: list[int] = []  # tables that are awaited after each step, since no module's forward reads them
        self._handles: list[RemovableHandle] = []
        self._forwards: Forwards | None = None
        if wait_free:
            self._forwards = Forwards(module, self._parameters, self.wait)
            for number, parameter in enumerate(self._parameters):
                hook = untraced(self._on_gradient(number))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _on_gradient(self, number: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if not self._syncing or self._sending is Sending.AT_STEP:
                return
            name = self._names[number]
            if parameter.grad is None:
                raise UsageError(f"'{name}' has no gradient after backward: {NO_HOOK}")
            _check_dense(name, parameter.grad)
            if self._sending is Sending.OBSERVED:
                if number in self._watch.taken:
                    self._send_at_step(f"'{name}' gets several gradients before one step")
                self._watch.take(number, parameter.grad)
                return
            if number not in self._used:
                raise UsageError(f"'{name}' was used outside its module's forward: {NO_WAIT_FREE}")
            if number in self._watch.taken:
                raise UsageError(f"'{name}' has two gradients in one iteration: {NO_SYNC}")
            self._begin()
            self._watch.take(number, parameter.grad)
            self._send(self._client.update(number, parameter.grad))

        return hook

    def _send_at_step(self, why: str) -> None:
        self._sending = Sending.AT_STEP
        log.warning("gradients are sent at the optimizer's step from now on, as with --no-wait-free: %s", why)

    def start(self) -> None:
        """Begin the training loop. Without wait-free backpropagation, first wait until all tables are in the model."""
        self.after_step()
        self.wait_seconds = 0.0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes only accumulate gradients."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def update(self, table: int, gradient: Tensor) -> None:
        """Take a copy of a gradient that the caller computed itself, without autograd and so without a hook.

        Raises:
            ValueError: the table already has a gradient in this iteration.
        """
        self._begin()
        complete = self._client.update(table, gradient)
        if self._sending is Sending.AT_STEP:
            self._deferred += complete
        else:
            self._send(complete)

    # --- the optimizer's step ---------------------------------------------------------------------

    def iteration_done(self) -> None:
        """Send all gradients that were not sent yet, and end the iteration; called just before the optimizer's step.

        Raises:
            UsageError: a gradient was changed after it was sent, so the servers would not see the change.
        """
        observed = bool(self._watch.taken) or self._begun
        self._begin()
        sent: Collection[int] = self._watch.taken if self._sending is Sending.WAIT_FREE else ()
        self._check_changes()
        if self._sending is Sending.OBSERVED and observed:
            self._sending = Sending.WAIT_FREE
            self._unread = sorted(self._forwards.learn().intersection(self._watch.taken)) if self._forwards else []
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None and number not in sent:
                _check_dense(self._names[number], parameter.grad)
                self._send(self._client.update(number, parameter.grad))
        self._warn_of_zeros()
        self._send([*self._deferred, *self._client.flush()])
        self._deferred.clear()
        self._watch.taken.clear()
        self._used.clear()
        self._begun = False
        self._turn = (self._turn + 1) % max(1, len(self._parameters))

    def _warn_of_zeros(self) -> None:
        """Name once a table that the servers will change although it has no gradient, which they take for zeros."""
        if self._told_of_zeros:
            return
        without = self._client.without_gradient
        for number in without:
            settings = self._client.settings_of(number)
            had = number in self._had_gradient
            moves = settings.get("weight_decay") or (had and settings and settings.get("momentum", 1))
            if moves and settings.get("lr", 1) and self._parameters[number].numel():
                self._told_of_zeros = True
                log.warning(
                    "'%s' has no gradient in this iteration, which servers take for zeros: weight decay and momentum"
                    " still change it; to keep it as it is, give it a parameter group of its own, with lr=0 now",
                    self._names[number],
                )
                return
        self._had_gradient.update(set(range(len(self._names))).difference(without))

    def _check_changes(self) -> None:
        """Send gradients at the optimizer's step if the loop has changed this iteration's since backward."""
        if self._sending is Sending.AT_STEP:
            self._remove_hooks()  # not at once in _send_at_step, which one of them may have called
            return
        change, table = self._watch.changed(self._parameters)
        if change is Change.NONE:
            return
        if change is Change.VALUES and self._sending is Sending.WAIT_FREE:
            raise UsageError(
                f"the gradient of '{self._names[table]}' was changed after it was sent (by clipping, GradScaler or"
                f" noise?): {NO_WAIT_FREE}"
            )
        self._send_at_step(f"the gradient of '{self._names[table]}' was changed after backward")

    def _send(self, buckets: Sequence[tuple[int, int]]) -> None:
        if buckets:
            self._on_gradients_ready(buckets)

    def after_step(self) -> None:
        """Wait for the tables that no forward hook waits for: without wait-free backpropagation, for all."""
        if self._sending is not Sending.WAIT_FREE:
            self.wait(None)
        elif self._unread:
            self.wait(self._unread)

    def wait(self, tables: Sequence[int] | None) -> None:
        """Wait for the new values of these tables (None: of all), and write them into the model."""
        self._wait_for_tables(tables)
        numbers = range(len(self._parameters)) if tables is None else tables
        written: list[int] = []

        def look(number: int) -> None:
            if self._is_written(number):
                written.append(number)

        for number in self._client.apply(tables, look):
            parameter = self._parameters[number]
            self._left[number] = _written(parameter)
            if number == self._turn and not self._told_of_writes:
                self._values[number] = fingerprint(parameter)
        if written and not self._told_of_writes:
            self._told_of_writes = True
            log.warning(
                "the loop has written to '%s' itself, or moved it: the servers do not see this, and their values"
                " replace it",
                self._names[written[0]],
            )
        self._used.update(numbers)

    def _is_written(self, table: int) -> bool:
        """Return whether the loop has written to a table since values came last."""
        parameter = self._parameters[table]
        state, values = _written(parameter), self._values.pop(table, None)
        # A write through .data changes only the values.
        return state != self._left.get(table, state) or (values is not None and bool(values != fingerprint(parameter)))

    def _begin(self) -> None:
        """Begin an iteration before its first gradient.

        Wait for all tables, even for those that the forward pass did not use, and until training may continue.
        """
        self._wait_for_tables(None)
        if self._begun:
            return
        self._begun = True
        self._on_gradients_ready(())
        if not self._wait_for_resume(0.0):
            began = time.perf_counter()
            while not self._wait_for_resume(POLL_INTERVAL):
                self._poll()
            self.wait_seconds += time.perf_counter() - began

    def _wait_for_tables(self, tables: Sequence[int] | None) -> None:
        if not self._client.ready(tables):
            began = time.perf_counter()
            while not self._client.wait(tables, POLL_INTERVAL):
                self._poll()
            self.wait_seconds += time.perf_counter() - began

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        if self._forwards is not None:
            self._forwards.close()
            self._forwards = None

    def close(self) -> None:
        """Remove all hooks."""
        self._remove_hooks()
        self._poll = lambda: None  # break the reference cycle with the peer


def _check_dense(name: str, gradient: Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise UsageError(
            f"the gradient of '{name}' is sparse, which servers do not take: make its layer with sparse=False, or leave"
            " out the servers"
        )


def _written(parameter: Tensor) -> tuple[int, int]:
    """Return numbers that change when a loop writes to a parameter or gives it other memory."""
    return parameter._version, parameter.data_ptr()
