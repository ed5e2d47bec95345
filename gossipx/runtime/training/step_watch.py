"""A watch on training whose updates are not counted as iterations.

Only the steps of the joined optimizers, or calls of ``Peer.step``, are iterations. A script may leave them without an
error: it makes another optimizer in mid-run, a wrapper replaces the optimizer, or a loop such as SAM's never calls
``step()``. Then this peer would train on, exchange nothing, and still end well.

Two signs of an update do not depend on how it is made. torch calls a global hook after each step of any optimizer. And
torch counts changes of a parameter in its ``_version``, which is compared at each backward pass; gossipx writes models
into flat buffers, which this does not count. Changes through ``parameter.data`` are not counted either, so unusually
many backward passes without an iteration compare values too. gossipx mixes models only at iterations, not between them.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gossipx.runtime.optimizers import Optimizers, parameters_of, untraced
from gossipx.runtime.training.gradients import fingerprint

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
        optimizers: the joined optimizers.
    """

    def __init__(self, module: nn.Module, optimizers: Optimizers):
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._known = {id(parameter) for parameter in parameters}
        self._optimizers = optimizers
        self._in_step = False  # LBFGS computes gradients in its step
        self._steps = 0  # since the last iteration
        self._by = ""  # the class of the optimizer that made the last of them
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
        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(untraced(self._begins)),
            register_optimizer_step_post_hook(untraced(self._stepped)),
        ]
        for probe in self._probes.values():
            hook = untraced(self._computed)
            self._handles.append(probe.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def optimizers_replaced(self) -> None:
        """Record that other optimizers were joined: what they do may be told again."""
        self._told = False

    def iteration_done(self, iteration: int) -> None:
        """Record an iteration."""
        self._usual = max(self._usual, self._steps, self._changes)
        self._usual_backwards = max(self._usual_backwards, self._backwards)
        self._steps = self._changes = self._backwards = 0
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

    def close(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_step = self._in_step or optimizer in self._optimizers.all

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step that trains this model and ends no iteration."""
        joined = optimizer in self._optimizers.all
        if joined:
            self._in_step = False
        if self._told or (joined and optimizer not in self._optimizers.stepped):  # it ended one, or was skipped
            return
        if any(id(parameter) in self._known for parameter in parameters_of(optimizer)):
            self._steps += 1
            self._by = f" by {type(optimizer).__name__}"
            self._tell_if_many(self._steps)

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

    def _tell_if_many(self, updates: int) -> None:
        if updates >= PATIENCE + USUAL * self._usual:
            self._tell(updates)

    def _tell(self, updates: int) -> None:
        self._told = True
        joined = self._optimizers
        remedy = "call peer.step() after each, or join the optimizer that steps: peer.join_optimizer(optimizer)"
        whose = "the joined optimizer's step" if joined else "peer.step()"
        if joined.stepped:
            idle = " and ".join(type(one).__name__ for one in joined.idle)
            whose = f"a step of {idle}, and an iteration needs one of each joined optimizer"
            remedy = "join only those that step: peer.join_optimizer([...])"
        log.warning(
            "the model changes without %s: %d updates%s since iteration %d; %s",
            whose,
            updates,
            self._by if self._steps else "",
            self._iteration,
            remedy,
        )


def _values(parameter: torch.Tensor) -> int | None:
    """Return a fingerprint of a parameter's values; None while a CUDA graph is captured, which must not wait."""
    if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return int(fingerprint(parameter))
