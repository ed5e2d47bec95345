"""A watch on training whose updates are not counted as iterations.

Only the steps of the joined optimizer, or calls of ``Peer.step``, are iterations. A script may leave them without an
error: it makes a second optimizer in mid-run, a wrapper replaces the optimizer, or a loop such as SAM's never calls
``step()``. Then this peer would train on, exchange nothing, and still end well.

Two signs of an update do not depend on how it is made. torch calls a global hook after each step of any optimizer. And
torch counts changes of a parameter in its ``_version``, which is compared at each backward pass; gossipx writes models
into flat buffers, which this does not count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from gossipx.errors import UsageError

log = logging.getLogger("gossipx")

PATIENCE = 20
"""Updates without an iteration that are told, if there were none between earlier iterations. Loops that make several
updates per iteration on purpose, such as five of a critic, stay below it."""
USUAL = 3
"""Factor on the most updates between two earlier iterations, added to that number: a loop with some means it."""


class StepWatch:
    """Warns once if a module's parameters change again and again without an iteration.

    Args:
        module: the joined model.
    """

    def __init__(self, module: nn.Module):
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._known = {id(parameter) for parameter in parameters}
        self._optimizer: torch.optim.Optimizer | None = None
        self._in_step = False  # LBFGS computes gradients in its step
        self._steps = 0  # of other optimizers, since the last iteration
        self._changes = 0  # found by backward passes, since the last iteration
        self._usual = 0  # the most updates between two earlier iterations
        self._iteration = 0
        self._told = False
        # The first and the last are rarely both unused.
        self._probes = {id(parameter): parameter for parameter in (*parameters[:1], *parameters[-1:])}
        self._versions = {key: probe._version for key, probe in self._probes.items()}
        self._handles: list[RemovableHandle] = [register_optimizer_step_post_hook(self._stepped)]
        for probe in self._probes.values():
            self._handles.append(probe.register_post_accumulate_grad_hook(self._computed))  # type: ignore[no-untyped-call]
        self._of_optimizer: list[RemovableHandle] = []

    def follow(self, optimizer: torch.optim.Optimizer, on_step: Callable[..., None]) -> None:
        """Take the steps of this optimizer for iterations, instead of those of the previous one.

        Args:
            on_step: called after each step, as a post-hook of torch's.
        """
        self._remove(self._of_optimizer)
        self._optimizer = optimizer
        self._told = False
        self._of_optimizer = [
            optimizer.register_step_pre_hook(self._begins),
            optimizer.register_step_post_hook(on_step),
        ]

    def iteration_done(self, iteration: int) -> None:
        """Record an iteration."""
        self._usual = max(self._usual, self._steps, self._changes)
        self._steps = self._changes = 0
        self._iteration = iteration
        self._in_step = False
        for key, probe in self._probes.items():
            self._versions[key] = probe._version

    def close(self) -> None:
        """Remove all hooks."""
        self._remove(self._handles)
        self._remove(self._of_optimizer)

    def _remove(self, handles: list[RemovableHandle]) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_step = True

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step of another optimizer than the joined one, if it trains parameters of this model."""
        if optimizer is self._optimizer:
            self._in_step = False
        elif not self._told and any(id(parameter) in self._known for parameter in parameters_of(optimizer)):
            self._steps += 1
            self._tell_if_many(self._steps, f" by {type(optimizer).__name__}")

    def _computed(self, parameter: torch.Tensor) -> None:
        """Compare the version of a parameter whose gradient was computed with that at the backward pass before."""
        before, self._versions[id(parameter)] = self._versions[id(parameter)], parameter._version
        if before != parameter._version and not self._in_step and not self._told:
            self._changes += 1
            self._tell_if_many(self._changes // len(self._probes), "")

    def _tell_if_many(self, updates: int, by: str) -> None:
        if updates < PATIENCE + USUAL * self._usual:
            return
        self._told = True
        whose = "peer.step()" if self._optimizer is None else "the joined optimizer's step"
        log.warning(
            "the model changes without %s: %d updates%s since iteration %d; call peer.step() after each, or join the"
            " optimizer that steps: peer.join_optimizer(optimizer)",
            whose,
            updates,
            by,
            self._iteration,
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Return the parameters that an optimizer trains."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def check_optimizer(module: nn.Module, optimizer: object) -> None:
    """Check that an optimizer can be joined with a model.

    Raises:
        UsageError: it is not an optimizer, or trains none of the model's parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{type(optimizer).__name__} is not a torch optimizer: leave it out, and call peer.step()")
    own = {id(parameter) for parameter in module.parameters()}
    if not any(id(parameter) in own for parameter in parameters_of(optimizer)):
        raise UsageError("the optimizer trains none of the model's parameters: join the model for which it was created")
