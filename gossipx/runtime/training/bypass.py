"""The bypass of a loop's optimizer in server mode, where the servers make the optimizer's step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gossipx.errors import UsageError
from gossipx.runtime.optimizers import overflowed, parameters_of, untraced

log = logging.getLogger(__name__)

ALL_GROUPS = "complete its groups before it, for example by add_param_group, since the servers' optimizers have those"


class OptimizerBypass:
    """Hooks that make an optimizer's step do nothing, because the servers make it.

    They hide the gradients during the step, so that the optimizer skips all parameters. What the step would do before
    its update, they do: they call a closure, and unscale the gradients for a fused optimizer, which otherwise
    leaves GradScaler's scale to its kernel.

    Args:
        optimizer: the training loop's optimizer.
        before: called before each step that is not skipped, while the gradients are still in place.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: Callable[[], None]):
        self._before = before
        self._groups = _group_ids(optimizer)
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._told = False  # that the servers do not take its state
        self._handle = optimizer.register_step_pre_hook(untraced(self._hide))
        self._after = optimizer.register_step_post_hook(untraced(self._restore_gradients))

    def _hide(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        later = self._handle.hooks_dict_ref()
        if later is not None and next(reversed(later)) != self._handle.id:
            raise UsageError(
                "a hook was added to the optimizer's step after gossipx.join, so it would see no gradients: call"
                " register_step_pre_hook before gossipx.join"
            )
        if _group_ids(optimizer) != self._groups:
            raise UsageError(
                "the optimizer has other parameter groups than at gossipx.join, or other parameters in them:"
                f" {ALL_GROUPS}"
            )
        if not self._told and any(_has_stepped(state) for state in optimizer.state.values()):
            self._told = True
            log.warning(
                "the optimizer has a state from earlier steps, such as momentum, and the servers do not take it: their"
                " optimizers keep their own state, which is new in a new run"
            )
        kept = _call_closure(args, kwargs)
        if not overflowed(optimizer):
            _unscale(optimizer)
            self._before()
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None
        return kept

    def _restore_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def close(self) -> None:
        """Remove the hooks: the optimizer makes its steps again."""
        self._handle.remove()
        self._after.remove()


def _group_ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _has_stepped(state: Mapping[str, Any]) -> bool:
    return bool(state) and float(state.get("step", 1)) > 0  # Adagrad has a state before its first step


@torch.no_grad()
def _unscale(optimizer: torch.optim.Optimizer) -> None:
    """Divide gradients by the scale that GradScaler has left to a fused optimizer, if any."""
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                parameter.grad.div_(scale)


def _call_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Call the closure among a step's arguments, if any, and return arguments whose closure returns its loss.

    Args:
        args: begins with the optimizer.
        kwargs: the keyword arguments.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None
    with torch.enable_grad():
        loss = closure()

    def called() -> Any:
        return loss

    return ((args[0], called, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": called})
