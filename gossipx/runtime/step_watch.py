"""A watch on training whose updates are not counted as iterations.

Only the steps of the joined optimizer, or calls of ``Peer.step``, are iterations. A script may leave them without an
error: it makes a second optimizer in mid-run, a wrapper replaces the optimizer, or a loop such as SAM's never calls
``step()``. Then this peer would train on, exchange nothing, and still end well.

Two signs of an update do not depend on how it is made. torch calls a global hook after each step of any optimizer. And
torch counts changes of a parameter in its ``_version``, which is compared at each backward pass; gossipx writes models
into flat buffers, which this does not count. Changes through ``parameter.data`` are not counted either, so unusually
many backward passes without an iteration compare values too. gossipx mixes models only at iterations, not between them.
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
from gossipx.runtime.gradients import fingerprint

log = logging.getLogger("gossipx")

PATIENCE = 20
"""Updates without an iteration that are told, if there were none between earlier iterations. Loops that make several
updates per iteration on purpose, such as five of a critic, stay below it."""
USUAL = 3
"""Factor on the most updates between two earlier iterations, added to PATIENCE: a loop with some means it. The same
factor on the most backward passes says how many are unusual; comparing values costs too much for all."""


class StepWatch:
    """Warns once if a module's parameters change again and again without an iteration.

    Args:
        module: the joined model.
        copies: whether steps of an optimizer over parameters of the same sizes count, too. Not with a server in this
            process, which makes such steps.
    """

    def __init__(self, module: nn.Module, *, copies: bool = True):
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._known = {id(parameter) for parameter in parameters}
        self._sizes = _sizes(parameters) if copies else []
        self._optimizer: torch.optim.Optimizer | None = None
        self._in_step = False  # LBFGS computes gradients in its step
        self._steps = 0  # of other optimizers, since the last iteration
        self._by = ""  # the class of the optimizer that made the last of them
        self._of_copies = 0  # steps of optimizers that train a copy of the model, since the last iteration
        self._changes = 0  # found by backward passes, since the last iteration
        self._backwards = 0  # since the last iteration; these two count each probe
        self._usual = 0  # the most updates between two earlier iterations
        self._usual_backwards = 0
        self._iteration = 0
        self._told = False
        # The first and the last are rarely both unused.
        self._probes = {id(parameter): parameter for parameter in (*parameters[:1], *parameters[-1:])}
        self._seen: dict[int, tuple[int, int | None]] = {
            key: (probe._version, None) for key, probe in self._probes.items()
        }
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
        self._usual = max(self._usual, self._steps, self._changes, self._of_copies)
        self._usual_backwards = max(self._usual_backwards, self._backwards)
        self._steps = self._changes = self._of_copies = self._backwards = 0
        self._iteration = iteration
        self._in_step = False
        for key, probe in self._probes.items():
            self._seen[key] = probe._version, None

    def training_ended(self) -> None:
        """Warn of updates since the last iteration if there were none between earlier ones."""
        changes = self._changes // max(1, len(self._probes))
        # One change may be that of averaged weights, which are loaded before an evaluation that computes gradients.
        if self._iteration and not self._usual and not self._told and (self._steps or changes > 1):
            self._tell(max(self._steps, changes))

    def close(self, keeps_steps: bool = False) -> None:
        """Remove all hooks, except with ``keeps_steps`` those of the optimizer that is followed."""
        self._remove(self._handles)
        if not keeps_steps:
            self._remove(self._of_optimizer)

    def _remove(self, handles: list[RemovableHandle]) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_step = True

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step of another optimizer than the joined one, if it trains this model or a copy of it."""
        if optimizer is self._optimizer:
            self._in_step = False
        elif self._told:
            return
        elif any(id(parameter) in self._known for parameter in parameters_of(optimizer)):
            self._steps += 1
            self._by = f" by {type(optimizer).__name__}"
            self._tell_if_many(self._steps)
        elif self._sizes and _sizes(p for p in parameters_of(optimizer) if p.grad is not None) == self._sizes:
            self._of_copies += 1
            if self._are_many(self._of_copies):
                self._tell_of_copy(optimizer)

    def _computed(self, parameter: torch.Tensor) -> None:
        """Compare a parameter whose gradient was computed with its state at the backward pass before."""
        if self._in_step or self._told:
            self._seen[id(parameter)] = parameter._version, None
            return
        self._backwards += 1
        unusual = self._backwards >= USUAL * max(len(self._probes), self._usual_backwards)
        version, values = self._seen[id(parameter)]
        now = parameter._version, _values(parameter) if unusual else None
        self._seen[id(parameter)] = now
        if now[0] != version or (None not in (now[1], values) and now[1] != values):
            self._changes += 1
            self._tell_if_many(self._changes // len(self._probes))

    def _are_many(self, updates: int) -> bool:
        return updates >= PATIENCE + USUAL * self._usual

    def _tell_if_many(self, updates: int) -> None:
        if self._are_many(updates):
            self._tell(updates)

    def _tell(self, updates: int) -> None:
        self._told = True
        whose = "peer.step()" if self._optimizer is None else "the joined optimizer's step"
        log.warning(
            "the model changes without %s: %d updates%s since iteration %d; call peer.step() after each, or join the"
            " optimizer that steps: peer.join_optimizer(optimizer)",
            whose,
            updates,
            self._by if self._steps else "",
            self._iteration,
        )

    def _tell_of_copy(self, optimizer: torch.optim.Optimizer) -> None:
        self._told = True
        log.warning(
            "%d steps of %s since iteration %d train a copy of the joined model, or another of its sizes, and nothing"
            " trains the joined one: peers exchange only that; train it, not a copy",
            self._of_copies,
            type(optimizer).__name__,
            self._iteration,
        )


def _sizes(parameters: Iterable[torch.Tensor]) -> list[int]:
    return sorted(parameter.numel() for parameter in parameters)


def _values(parameter: torch.Tensor) -> int | None:
    """Return a fingerprint of a parameter's values; None while a CUDA graph is captured, which must not wait."""
    if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return int(fingerprint(parameter))


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
