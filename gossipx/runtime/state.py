"""What a checkpoint of a peer is taken of, and how a peer goes on from it.

All of it is captured by the training thread at a step boundary: the model as a snapshot of the arena, which costs that
thread no copy where each boundary is kept anyway, the rest as copies.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossipx.checkpoint import Checkpoint, Part, pack, unpack
from gossipx.checkpoint.plain import copy_of
from gossipx.errors import UsageError
from gossipx.hub import Centre, Elastic
from gossipx.model import layout
from gossipx.model.arena import ParameterArena
from gossipx.runtime.driver import Driver

MODEL, OPTIMIZER, RANDOM, PEER, DRIFT, HUB = "model", "optimizer", "random", "peer", "drift", "hub"
TABLES = "tables"
"""Names of a peer's parts."""
SCRIPT = "script."
"""Names of a script's own parts begin so: they meet none of the others."""


@dataclass(frozen=True)
class CapturedState:
    """Parts that are consistent with each other.

    Attributes:
        iteration: at which.
        parts: by name, all but the model.
        model: makes that of the snapshot; for another thread than training's, which a device's copy would keep.
        release: gives the snapshot back; to be called once all is written.
    """

    iteration: int
    parts: dict[str, Part]
    model: Callable[[], Part]
    release: Callable[[], None]


@dataclass(frozen=True)
class OwnPart:
    """A part of the script's own: how its state is had, and how it is taken."""

    state_dict: Callable[[], object]
    load_state_dict: Callable[[Any], object]


class TrainingState:
    """One peer's training, as far as a checkpoint goes.

    Args:
        module: laid out in the driver's arena.
        optimizer: None: the script has a way of its own.
        about: what both must have alike who writes a checkpoint and who goes on from it, by the option that says it.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, driver: Driver, about: Mapping[str, Any]
    ):
        self._module = module
        self._optimizer = optimizer
        self._driver = driver
        self._about = dict(about)
        self.own: dict[str, OwnPart] = {}

    @property
    def sound(self) -> bool:
        """Whether the model is finite: what is not is no state to go on from."""
        return self._driver.role.training.sound

    @property
    def iteration(self) -> int:
        """Iterations done; of a hub that only serves, the most that a model it took in has seen."""
        centre = self._centre
        return self._driver.arena.step if centre is None or self._driver.role.trains else centre.step

    def capture(self, figures: Mapping[str, Any]) -> CapturedState:
        """All of it as it is now; for the training thread, at a step boundary.

        Args:
            figures: plain data, given back by :meth:`restore`.

        Raises:
            UsageError: state that a checkpoint cannot keep; or the module is not what was joined any more.
        """
        driver, arena = self._driver, self._driver.arena
        arena.check(self._module)
        parts = {SCRIPT + name: pack(own.state_dict(), name) for name, own in self.own.items()}
        parts[RANDOM] = _random(self._device)
        if self._optimizer is not None:
            parts[OPTIMIZER] = pack(self._optimizer.state_dict(), OPTIMIZER)
        if (
            (table_store := driver.tables.transfers.table_store) is not None
            and driver.role.trains
            and (kept := table_store.client.state_dict())
        ):
            parts[TABLES] = pack(kept, TABLES)
        with driver.committing:
            snapshot = arena.snapshot(whole=True)
            told = {**driver.state_dict(), "about": self._about, "figures": dict(figures)}
        with contextlib.ExitStack() as undo:
            undo.callback(snapshot.release)
            parts[PEER] = pack(told, PEER)
            if driver.role.sync.policy.uses_drift:
                parts[DRIFT] = pack(driver.captures.reference.vectors(), DRIFT)
            if (centre := self._centre) is not None and (held := driver.captures.hold(centre.ticket)) is not None:
                with contextlib.ExitStack() as after:
                    after.callback(held.release)
                    parts[HUB] = pack({**centre.state_dict(), "held": held.step, "vectors": held.buffer.vectors}, HUB)
            others = {name: copy_of(tensor) for name, tensor in layout.others(self._module).items()}
            undo.pop_all()

        def model() -> Part:
            tensors = layout.named(arena.slots, arena.sections, snapshot.buffer.vectors)
            return Part({**tensors, **others}, {"manifest": list(arena.manifest)})

        return CapturedState(self.iteration, parts, model, snapshot.release)

    def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Go on from a checkpoint, but for the random numbers and the script's own parts.

        Returns:
            What :meth:`capture` was given as figures.

        Raises:
            UsageError: it is one of another run or of another model, by what differs.
        """
        driver = self._driver
        told = unpack(checkpoint.parts[PEER])
        for option, ours in self._about.items():
            theirs = told["about"].get(option)
            if theirs != ours:
                raise UsageError(f"the checkpoint is of a run with {option} {theirs}, not {ours}", checkpoint.path)
        self._restore_model(checkpoint, told["iteration"])
        if self._optimizer is not None and OPTIMIZER in checkpoint.parts:
            try:
                self._optimizer.load_state_dict(unpack(checkpoint.parts[OPTIMIZER]))
            except (ValueError, KeyError) as error:
                raise UsageError(f"the checkpoint is of another optimizer: {error}", checkpoint.path) from error
        if (table_store := driver.tables.transfers.table_store) is not None and TABLES in checkpoint.parts:
            try:
                table_store.client.load_state_dict(unpack(checkpoint.parts[TABLES]))
            except (UsageError, ValueError) as error:
                raise UsageError(f"the checkpoint is of other tables: {error}", checkpoint.path) from error
        driver.load_state_dict(told)
        if driver.role.sync.policy.uses_drift and (vectors := unpack(checkpoint.parts[DRIFT])):
            driver.captures.reference.load(vectors)
        if (centre := self._centre) is not None and HUB in checkpoint.parts:
            kept = unpack(checkpoint.parts[HUB])
            centre.load_state_dict(kept)
            driver.captures.saved = kept["vectors"], kept["held"]
        return dict(told["figures"])

    @property
    def _centre(self) -> Centre | None:
        """What this peer holds for others, if it is a hub."""
        exchange = self._driver.role.exchange
        return exchange.centre if isinstance(exchange, Elastic) else None

    def restore_random(self, checkpoint: Checkpoint) -> None:
        """Go on with the random numbers, of torch, of Python and of numpy, and of a CUDA device."""
        state = unpack(checkpoint.parts[RANDOM])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and self._device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self._device)
        random.setstate(state["python"])
        kind, words, *rest = state["numpy"]
        np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))

    @property
    def _device(self) -> torch.device:
        return self._driver.arena.slots[0].tensor.device

    def _restore_model(self, checkpoint: Checkpoint, iteration: int) -> None:
        arena, part = self._driver.arena, checkpoint.parts[MODEL]
        _compare(part.state["manifest"], arena, checkpoint)
        buffer = arena.pool.buffer(whole=True)
        for name, tensor in layout.named(arena.slots, arena.sections, buffer.vectors).items():
            tensor.copy_(part.tensors[name])
        if not arena.adopt(buffer, iteration):
            raise UsageError(
                "the checkpoint's model holds NaN or Inf: remove it, to use the one before", checkpoint.path
            )
        arena.pool.free(buffer)
        for name, tensor in layout.others(self._module).items():
            if name in part.tensors:
                tensor.copy_(part.tensors[name])


def _compare(theirs: list[str], arena: ParameterArena, checkpoint: Checkpoint) -> None:
    ours = list(arena.manifest)
    if theirs == ours:
        return
    pairs = zip([*theirs, "no more tensors"], [*ours, "no more tensors"], strict=False)
    there, here = next((one, other) for one, other in pairs if one != other)
    raise UsageError(
        f"the checkpoint is of another model: it has '{there}' where this one has '{here}'", checkpoint.path
    )


def _random(device: torch.device) -> Part:
    """The generators' states."""
    kind, words, *rest = np.random.get_state()
    state: dict[str, Tensor | tuple[Any, ...]] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(words).tolist(), *rest),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return pack(state, RANDOM)
