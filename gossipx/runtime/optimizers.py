"""The optimizers of a peer, and the rule by which their steps are iterations.

A model may have several: Muon for its matrices beside AdamW for the rest, or one each for a GAN's generator and
discriminator. An iteration ends with the step after which each of them has stepped at least once since the last
iteration. So the order does not matter, and a critic may step five times for each step of the generator. A step that a
gradient scaler skips does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gossipx.errors import UsageError
from gossipx.model.layout import plain_name

OneOrMore = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
"""The optimizers of a model, as a script gives them."""

Hook = TypeVar("Hook", bound=Callable[..., object])


class Optimizers:
    """All optimizers of one model.

    Args:
        module: the model.
        given: its optimizers. Without any, the loop counts its iterations itself.

    Attributes:
        all: the optimizers, each once, in the given order.
        stepped: those that have stepped since the last iteration.

    Raises:
        UsageError: the module is none, or one of them is not an optimizer or trains none of the model's parameters.
    """

    def __init__(self, module: nn.Module, given: OneOrMore | None):
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"join takes the model first, then the optimizer: {type(module).__name__} is not a torch module"
            )
        self._names = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
        self.all = self._checked(given)
        self.stepped: set[torch.optim.Optimizer] = set()
        self._on_iteration: Callable[[], None] | None = None
        self._handles: list[RemovableHandle] = []

    def __bool__(self) -> bool:
        return bool(self.all)

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.all)

    @property
    def kinds(self) -> list[str]:
        """The names of their classes."""
        return [type(one).__name__ for one in self.all]

    @property
    def idle(self) -> list[torch.optim.Optimizer]:
        """Those that have not stepped since the last iteration."""
        return [one for one in self.all if one not in self.stepped]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return their states, each with the optimizer's class and the names of its parameters."""
        return [
            {"kind": kind, "trains": self._trained(one), "state": one.state_dict()}
            for kind, one in zip(self.kinds, self.all, strict=True)
        ]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Give each optimizer the state of the one of its class that trained the same parameters, in any order.

        Raises:
            ValueError: one of them finds no such state, or has other parameter groups.
        """
        left = list(states)
        for kind, one in zip(self.kinds, self.all, strict=True):
            trains = self._trained(one)
            found = next((state for state in left if (state["kind"], state["trains"]) == (kind, trains)), None)
            if found is None:
                raise ValueError(f"it has none of the class {kind} over the same parameters")
            left = [state for state in left if state is not found]
            one.load_state_dict(found["state"])

    def _trained(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the names of an optimizer's parameters, in its order; empty: it is not the model's."""
        return [self._names.get(id(parameter), "") for parameter in parameters_of(optimizer)]

    def replace(self, given: OneOrMore) -> None:
        """Take the steps of these optimizers for iterations from now on.

        Raises:
            UsageError: as when this is made; nothing is changed then.
        """
        found = self._checked(given)
        if not found:
            raise UsageError("no optimizer is given: call peer.step() after each update instead")
        self._remove_hooks()
        self.all = found
        self.stepped.clear()
        self._add_hooks()

    def count(self, on_iteration: Callable[[], None]) -> None:
        """Call ``on_iteration`` at the end of each iteration from now on, until :meth:`close`."""
        self._on_iteration = on_iteration
        self._add_hooks()

    def close(self) -> None:
        """Remove all hooks."""
        self._remove_hooks()
        self._on_iteration = None  # break the reference cycle with the peer

    def _add_hooks(self) -> None:
        self._handles += [one.register_step_post_hook(untraced(self._stepped)) for one in self.all]

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if overflowed(optimizer):
            return
        self.stepped.add(optimizer)
        if not self.idle and self._on_iteration is not None:
            self.stepped.clear()
            self._on_iteration()

    def _checked(self, given: OneOrMore | None) -> tuple[torch.optim.Optimizer, ...]:
        several = isinstance(given, Iterable)
        found = list(given) if isinstance(given, Iterable) else [] if given is None else [given]
        for one in found:
            _check(one)
            if not any(id(parameter) in self._names for parameter in parameters_of(one)):
                whose = type(one).__name__ if several else "the optimizer"
                raise UsageError(
                    f"{whose} trains none of the model's parameters: join the model for which it was created"
                )
        return tuple(dict.fromkeys(found))  # one that is given twice counts once


def _check(one: object) -> None:
    """Check that something is an optimizer."""
    kind = type(one).__name__
    if hasattr(one, "get_last_lr"):
        raise UsageError(f"{kind} is a learning rate scheduler: give the optimizer that it schedules in its place")
    if not isinstance(one, torch.optim.Optimizer):
        raise UsageError(f"{kind} is not a torch optimizer: leave it out, and call peer.step()")


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Return the parameters that an optimizer trains."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer skips its update because GradScaler reported an overflow."""
    overflow = getattr(optimizer, "found_inf", None)
    return overflow is not None and bool(float(overflow))


def untraced(hook: Hook) -> Hook:
    """Return a hook that torch.compile calls as it is, in the middle of what it compiles.

    Hooks work on flat buffers by numpy, on threads and on sockets, which a compiler cannot trace.
    """
    return cast(Hook, torch.compiler.disable(hook))  # type: ignore[no-untyped-call]
