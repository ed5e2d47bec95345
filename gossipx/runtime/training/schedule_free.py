"""Schedule-free optimizers, those of the package schedulefree: their second set of weights is exchanged, too.

Such an optimizer (A. Defazio et al., *The Road Less Scheduled*, 2024) has no schedule for the learning rate. While it
trains, the parameters are the points y at which gradients are computed; the weights z that its steps move are in its
state; and the average x, which is the model to evaluate, follows from both: y = (1 − β) z + β x. Its methods
``train()`` and ``eval()`` change the parameters from x to y and back.

Averaging y alone would leave each peer's z behind: the finish would give all peers one y, but not one x, and with
different data the peers' z, and with them y, would drift apart. So z becomes buffers of the module, which are exchanged
like its other buffers. Both are then averages of the same peers, and x, which is linear in them, is too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossipx.errors import UsageError
from gossipx.runtime.optimizers import parameters_of

NAME = "schedule_free_z"
"""Name of the buffers, followed by the parameter's number."""


class ScheduleFree:
    """The z of schedule-free optimizers as buffers of a module that is about to be joined.

    They are not persistent: a ``state_dict`` of the module does not have them, and one of the optimizer does.

    Args:
        module: the module; it gets the buffers.
        optimizers: schedule-free optimizers; they get their state before their first step.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Any]):
        self._module = module
        self._optimizers = optimizers
        self._parameters: list[tuple[Tensor, Any]] = []  # with the optimizer
        own = {id(parameter) for parameter in module.parameters()}
        for optimizer in optimizers:
            _make_state(optimizer)
            trained = (one for one in parameters_of(optimizer) if id(one) in own and one.requires_grad)
            self._parameters += [(parameter, optimizer) for parameter in trained]
        for number, (parameter, optimizer) in enumerate(self._parameters):
            module.register_buffer(f"{NAME}{number}", optimizer.state[parameter]["z"], persistent=False)
        # Loading a state gives an optimizer other tensors.
        self._handles = [one.register_load_state_dict_post_hook(self._loaded) for one in optimizers]

    def _loaded(self, loaded: torch.optim.Optimizer) -> None:
        """Copy a loaded z into the buffers, and let the optimizer work on these again."""
        for number, (parameter, optimizer) in enumerate(self._parameters):
            if optimizer is loaded:
                buffer = self._module.get_buffer(f"{NAME}{number}")
                with torch.no_grad():
                    buffer.copy_(loaded.state[parameter].get("z", parameter))
                loaded.state[parameter]["z"] = buffer

    def training_ended(self) -> None:
        """Change the parameters to x, the model to evaluate and to save, unless the script has done so."""
        for optimizer in self._optimizers:
            optimizer.eval()

    def close(self) -> None:
        """Remove the buffers from the module; the optimizers keep them."""
        for handle in self._handles:
            handle.remove()
        for number in range(len(self._parameters)):
            delattr(self._module, f"{NAME}{number}")


def of(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer], has_servers: bool) -> ScheduleFree | None:
    """Prepare a module for those of its optimizers that are schedule-free; None: it has no such optimizer.

    Raises:
        UsageError: there is one, and the run has a parameter server, whose servers make the steps.
    """
    found = [one for one in optimizers if is_one(one)]
    if found and has_servers:
        raise UsageError(
            f"{type(found[0]).__name__} cannot train on servers, as its train() and eval() change the weights: leave"
            " out --servers, or use another optimizer"
        )
    return ScheduleFree(module, found) if found else None


def is_one(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is schedule-free."""
    return all("train_mode" in group for group in optimizer.param_groups)


def _make_state(optimizer: Any) -> None:
    """Let the optimizer make the state that it lacks, which it does in a step. This one has the length 0."""
    lacking = [one for one in parameters_of(optimizer) if one.requires_grad and "z" not in optimizer.state[one]]
    gradients = [(parameter, parameter.grad) for parameter in parameters_of(optimizer)]
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    for parameter, _ in gradients:
        parameter.grad = None
    for parameter in lacking:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group.update(train_mode=True, lr=0.0)
    optimizer.step()
    for parameter, gradient in gradients:
        parameter.grad = gradient
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        group.update(before)
