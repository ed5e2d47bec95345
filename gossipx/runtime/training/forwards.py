"""The hooks that wait for tables before the forward pass of a module, with wait-free backpropagation.

A module waits for its own parameters. Some modules also read parameters of their children without calling them:
``nn.MultiheadAttention`` reads the weight of its output projection. So the hooks observe one iteration, in which all
tables are up to date, and from then on a module also waits for the tables of children that were not called in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gossipx.runtime.optimizers import untraced


class Forwards:
    """Pre-forward hooks on all modules that hold tables, themselves or in their children.

    Args:
        module: the model.
        parameters: the parameter of each table.
        wait: waits for tables, and writes their values into the model.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], wait: Callable[[Sequence[int]], None]):
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}

        def tables(of: Iterator[nn.Parameter]) -> list[int]:
            return sorted({numbers[id(one)] for one in of if id(one) in numbers})

        self._wait = wait
        self._modules = [one for one in module.modules() if tables(one.parameters())]
        self._own = {id(one): tables(one.parameters(recurse=False)) for one in self._modules}
        self._below = {id(one): tables(one.parameters()) for one in self._modules}
        self._modes: dict[int, bool] = {}  # by module that was called in the observed iteration: whether it trained
        self._reads: dict[int, list[int]] = {}  # what these wait for; empty while they are observed
        # Before other hooks: those of torch's spectral_norm and weight_norm read parameters.
        self._unhook: list[Callable[[], object]] = []
        for one in self._modules:
            handle = one.register_forward_pre_hook(untraced(self._before), prepend=True)
            self._unhook += [handle.remove, _kept_out_of_copies(one, handle.id)]

    def _before(self, module: nn.Module, args: Any) -> None:
        if not self._reads:
            if torch.is_grad_enabled():
                self._modes[id(module)] = module.training
        elif torch.is_grad_enabled() and self._modes.get(id(module)) is module.training:
            self._wait(self._reads[id(module)])
        else:  # it may read other parameters than observed, such as in an evaluation, where no gradient reveals it
            self._wait(self._below[id(module)])

    def learn(self) -> set[int]:
        """End the observed iteration: let each module wait for what it reads. Return the tables that no module reads.

        The nearest module around a module that was not called waits for the tables of that one.
        """
        reads = {id(one): set(self._own[id(one)]) for one in self._modules}
        around: dict[int, list[nn.Module]] = {}
        for one in self._modules:
            for child in one.children():
                around.setdefault(id(child), []).append(one)
        unread = set[int]()
        for one in self._modules:
            if id(one) not in self._modes:
                readers = list(self._called_around(one, around))
                for reader in readers:
                    reads[id(reader)].update(self._own[id(one)])
                unread.update(() if readers else self._own[id(one)])
        self._reads = {key: sorted(tables) for key, tables in reads.items()}
        return unread - {table for key in self._modes for table in reads[key]}

    def _called_around(self, module: nn.Module, around: dict[int, list[nn.Module]]) -> Iterator[nn.Module]:
        """Yield the nearest modules around a module that were called; several if it is part of several."""
        for outer in around.get(id(module), ()):
            if id(outer) in self._modes:
                yield outer
            else:
                yield from self._called_around(outer, around)

    def close(self) -> None:
        """Remove all hooks."""
        for unhook in self._unhook:
            unhook()


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
