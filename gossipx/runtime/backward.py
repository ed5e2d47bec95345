"""A torch module's dealings with a parameter server: gradients leave as they are made, tables are waited for when used.

Wait-free backpropagation (Modularized Parameter Server, section 2.3.2, Figure 2.4): each parameter's hook takes its
gradient as soon as autograd has accumulated it, and each module's pre-forward hook waits for its own parameters alone.
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

LOOK_EVERY = 0.5
"""Seconds between two looks at signals and errors while tables are waited for."""
NO_WAIT_FREE = "give --no-wait-free (wait_free=False), which sends gradients at the optimizer's step"
NO_SYNC = (
    "put all but the last backward pass of an iteration into 'with peer.no_sync():';"
    f" or, if GradScaler has left the step out, {NO_WAIT_FREE}"
)
UNSCALE = "call scaler.unscale_(optimizer) before scaler.step(optimizer), and " + NO_WAIT_FREE


class Backward:
    """Hooks on a module and its optimizer.

    Args:
        module: whose parameters are the tables.
        tables: these parameters, by table, with their names.
        client: the tables.
        ready: told of buckets whose gradients are made; of none before an iteration's first gradient is taken.
        may_go_on: waits a number of seconds for that to be allowed, if it is not; whether it is.
        look: called now and then while tables are waited for; raises to end that.
        wait_free: whether gradients leave as they are made; else all leave at the optimizer's step, and are waited for
            there.

    Attributes:
        waited: seconds that the training thread stood still for tables.
    """

    def __init__(
        self,
        module: nn.Module,
        tables: Sequence[tuple[str, nn.Parameter]],
        client: Client,
        ready: Callable[[Sequence[tuple[int, int]]], None],
        may_go_on: Callable[[float], bool],
        look: Callable[[], None],
        wait_free: bool,
    ):
        self.waited = 0.0
        self._client = client
        self._tables = tables
        self._ready, self._may_go_on, self._look = ready, may_go_on, look
        self._wait_free = wait_free
        self._syncing = True
        self._begun = False  # the iteration's first gradient has been taken
        self._used: set[int] = set()  # tables whose values of this iteration are in the model
        self._versions: dict[int, int] = {}  # of gradients, as they left
        self._kept_back: list[tuple[int, int]] = []  # buckets that leave at the step
        self._handles: list[RemovableHandle] = []
        if wait_free:
            for number, (_, parameter) in enumerate(tables):
                hook = self._on_gradient(number)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            self._handles += self._before_modules(module)

    def _before_modules(self, module: nn.Module) -> list[RemovableHandle]:
        numbers = {id(parameter): number for number, (_, parameter) in enumerate(self._tables)}
        handles = []
        for one in module.modules():
            own = sorted({numbers[id(p)] for p in one.parameters(recurse=False) if id(p) in numbers})
            if own:
                handles.append(one.register_forward_pre_hook(self._before(own)))
        return handles

    def _before(self, own: list[int]) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, given: Any) -> None:
            self.wait(own)

        return hook

    def _on_gradient(self, number: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if not self._syncing:
                return
            name = self._tables[number][0]
            if number not in self._used:
                raise UsageError(f"'{name}' was used without its module's forward: {NO_WAIT_FREE}")
            if number in self._versions:
                raise UsageError(f"'{name}' has two gradients in one iteration: {NO_SYNC}")
            assert parameter.grad is not None
            self._begin()
            self._versions[number] = parameter.grad._version
            if whole := self._client.update(number, parameter.grad):
                self._ready(whole)

        return hook

    def start(self) -> None:
        """The loop begins: without wait-free, with all tables in the model."""
        self.after_step()
        self.waited = 0.0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in it only accumulate."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def update(self, table: int, gradient: Tensor) -> None:
        """Take a table's gradient of this iteration that no hook has seen; it is copied.

        Raises:
            ValueError: it has given one in this iteration already.
        """
        self._begin()
        whole = self._client.update(table, gradient)
        if self._wait_free:
            self._send(whole)
        else:
            self._kept_back += whole

    # --- the optimizer's step ---------------------------------------------------------------------

    def iteration_done(self) -> None:
        """The loop has come to the optimizer's step: all that has not left leaves now.

        Raises:
            UsageError: a gradient was changed after it had left.
        """
        self._begin()
        for number, (name, parameter) in enumerate(self._tables):
            if parameter.grad is None:
                continue
            if not self._wait_free:
                self._send(self._client.update(number, parameter.grad))
            elif number in self._versions and parameter.grad._version != self._versions[number]:
                raise UsageError(
                    f"the gradient of '{name}' was changed after backward, when it had left (clipping?): {NO_WAIT_FREE}"
                )
        self._send([*self._kept_back, *self._client.flush()])
        self._kept_back.clear()
        self._versions.clear()
        self._used.clear()
        self._begun = False

    def _send(self, whole: Sequence[tuple[int, int]]) -> None:
        if whole:
            self._ready(whole)

    def after_step(self) -> None:
        """All tables are asked for; without wait-free they are waited for at once."""
        if not self._wait_free:
            self.wait(None)

    def wait(self, tables: Sequence[int] | None) -> None:
        """Have these tables' values in the model; None: all."""
        self._arrived(tables)
        self._client.apply(tables)
        self._used.update(range(len(self._tables)) if tables is None else tables)

    def _begin(self) -> None:
        """Gradients may leave: the iteration before is over, also for shards whose tables this one has not used."""
        self._arrived(None)
        if self._begun:
            return
        self._begun = True
        self._ready(())
        if not self._may_go_on(0.0):
            began = time.perf_counter()
            while not self._may_go_on(LOOK_EVERY):
                self._look()
            self.waited += time.perf_counter() - began

    def _arrived(self, tables: Sequence[int] | None) -> None:
        if not self._client.ready(tables):
            began = time.perf_counter()
            while not self._client.wait(tables, LOOK_EVERY):
                self._look()
            self.waited += time.perf_counter() - began

    def close(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._look = lambda: None  # its peer holds us


class Bypass:
    """Keeps an optimizer's step from changing anything: servers make it. It finds no gradients.

    Args:
        optimizer: the loop's.
        before: called when the loop comes to its step, with the gradients still there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: Callable[[], None]):
        self._before = before
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._handle = optimizer.register_step_pre_hook(self._set_aside)

    def _set_aside(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:  # a fused one, which would unscale them by itself
            raise UsageError(f"gradients are scaled by GradScaler, and servers would take them so: {UNSCALE}")
        self._before()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._kept.append((parameter, parameter.grad))
                    parameter.grad = None

    def put_back(self) -> None:
        """After the step: gradients are the loop's again."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept.clear()

    def close(self) -> None:
        """Let it make its steps again."""
        self._handle.remove()
