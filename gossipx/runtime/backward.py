"""The hooks between a torch module and a parameter server: they push gradients and wait for parameters.

With wait-free backpropagation (Modularized Parameter Server, section 2.3.2, Figure 2.4), communication overlaps with
computation: a hook on each parameter pushes its gradient as soon as autograd has accumulated it, and a pre-forward hook
on each module waits only for that module's own parameters. Without it, the optimizer's step pushes all gradients and
waits for all parameters. In both cases the servers update the parameters, and the optimizer's own step does nothing.

A *table* is one trained parameter. A *shard* is a part of all tables that is hosted by one server. A *bucket* is a
group of tables of a shard, or a part of one table, that is sent as one message.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossipx.errors import UsageError
from gossipx.tables.client import Client

POLL_INTERVAL = 0.5
"""Seconds between two checks for signals and errors while the training thread waits for tables."""
NO_WAIT_FREE = "give --no-wait-free (wait_free=False), which sends gradients at the optimizer's step"
NO_SYNC = (
    "put all but the last backward pass of an iteration into 'with peer.no_sync():';"
    f" or, if GradScaler skipped the step, {NO_WAIT_FREE}"
)
ALL_GROUPS = "call add_param_group before it, since the servers have an optimizer with those groups"
UNSCALE = "call scaler.unscale_(optimizer) before scaler.step(optimizer), and " + NO_WAIT_FREE


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
        wait_free: whether gradients are sent as they are computed. Otherwise all are sent at the optimizer's step,
            which then waits for the new tables.

    Attributes:
        wait_seconds: seconds that the training thread waited for tables.
    """

    def __init__(
        self,
        module: nn.Module,
        tables: Sequence[tuple[str, nn.Parameter]],
        client: Client,
        on_gradients_ready: Callable[[Sequence[tuple[int, int]]], None],
        wait_for_resume: Callable[[float], bool],
        poll: Callable[[], None],
        wait_free: bool,
    ):
        self.wait_seconds = 0.0
        self._client = client
        self._tables = tables
        self._on_gradients_ready, self._wait_for_resume, self._poll = on_gradients_ready, wait_for_resume, poll
        self._wait_free = wait_free
        self._syncing = True
        self._begun = False  # whether this iteration's first gradient was taken
        self._used: set[int] = set()  # tables that were written into the model for this iteration
        self._versions: dict[int, int] = {}  # by table: torch's version counter of its gradient when it was taken
        self._deferred: list[tuple[int, int]] = []  # buckets that are sent at the optimizer's step
        self._unhook: list[Callable[[], object]] = []
        if wait_free:
            for number, (_, parameter) in enumerate(tables):
                hook = self._on_gradient(number)
                handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._unhook.append(handle.remove)
            self._before_modules(module)

    def _before_modules(self, module: nn.Module) -> None:
        numbers = {id(parameter): number for number, (_, parameter) in enumerate(self._tables)}
        for child in module.modules():
            own = sorted({numbers[id(p)] for p in child.parameters(recurse=False) if id(p) in numbers})
            if own:
                handle = child.register_forward_pre_hook(self._before(own))
                self._unhook += [handle.remove, _kept_out_of_copies(child, handle.id)]

    def _before(self, own: list[int]) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.wait(own)

        return hook

    def _on_gradient(self, number: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if not self._syncing:
                return
            name = self._tables[number][0]
            if number not in self._used:
                raise UsageError(f"'{name}' was used outside its module's forward: {NO_WAIT_FREE}")
            if number in self._versions:
                raise UsageError(f"'{name}' has two gradients in one iteration: {NO_SYNC}")
            assert parameter.grad is not None
            self._begin()
            self._versions[number] = parameter.grad._version
            if complete := self._client.update(number, parameter.grad):
                self._on_gradients_ready(complete)

        return hook

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
        if self._wait_free:
            self._send(complete)
        else:
            self._deferred += complete

    # --- the optimizer's step ---------------------------------------------------------------------

    def iteration_done(self) -> None:
        """Send all gradients that were not sent yet, and end the iteration; called just before the optimizer's step.

        Raises:
            UsageError: a gradient was changed after it was sent, so the servers would not see the change.
        """
        self._begin()
        for number, (name, parameter) in enumerate(self._tables):
            if parameter.grad is None:
                continue
            if not self._wait_free:
                self._send(self._client.update(number, parameter.grad))
            elif number in self._versions and parameter.grad._version != self._versions[number]:
                raise UsageError(
                    f"the gradient of '{name}' was changed after it was sent (gradient clipping?): {NO_WAIT_FREE}"
                )
        self._send([*self._deferred, *self._client.flush()])
        self._deferred.clear()
        self._versions.clear()
        self._used.clear()
        self._begun = False

    def _send(self, buckets: Sequence[tuple[int, int]]) -> None:
        if buckets:
            self._on_gradients_ready(buckets)

    def after_step(self) -> None:
        """Wait for all tables, unless the forward hooks do that (wait-free backpropagation)."""
        if not self._wait_free:
            self.wait(None)

    def wait(self, tables: Sequence[int] | None) -> None:
        """Wait for the new values of these tables (None: of all), and write them into the model."""
        self._wait_for_tables(tables)
        self._client.apply(tables)
        self._used.update(range(len(self._tables)) if tables is None else tables)

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

    def close(self) -> None:
        """Remove all hooks."""
        for unhook in self._unhook:
            unhook()
        self._poll = lambda: None  # break the reference cycle with the peer


def _kept_out_of_copies(module: nn.Module, hook: int) -> Callable[[], object]:
    """Leave a forward pre-hook out of pickles and deep copies of its module: it cannot be saved, and waits for tables.

    Returns:
        A function that undoes this.
    """

    def reduce(protocol: Any) -> Any:
        made = type(module).__reduce_ex__(module, protocol)
        if isinstance(made, str) or len(made) < 3 or not isinstance(made[2], dict):
            return made  # the module's own format
        state = dict(made[2])
        del state["__reduce_ex__"]
        state["_forward_pre_hooks"] = state["_forward_pre_hooks"].copy()
        state["_forward_pre_hooks"].pop(hook, None)
        return (*made[:2], state, *made[3:])

    vars(module)["__reduce_ex__"] = reduce
    return lambda: vars(module).pop("__reduce_ex__", None)


class OptimizerBypass:
    """A hook that makes an optimizer's step do nothing, because the servers make it.

    It hides the gradients during the step, so that the optimizer skips all parameters.

    Args:
        optimizer: the training loop's optimizer.
        before: called before each step, while the gradients are still in place.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: Callable[[], None]):
        self._before = before
        self._groups = len(optimizer.param_groups)
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._handle = optimizer.register_step_pre_hook(self._hide)

    def _hide(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:  # a fused optimizer unscales within its step
            raise UsageError(f"gradients are still scaled by GradScaler when they are sent to servers: {UNSCALE}")
        if len(optimizer.param_groups) != self._groups:
            raise UsageError(f"the optimizer has other parameter groups than at gossipx.join: {ALL_GROUPS}")
        self._before()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def restore_gradients(self) -> None:
        """Restore the gradients after the step."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def close(self) -> None:
        """Remove the hook: the optimizer makes its steps again."""
        self._handle.remove()
