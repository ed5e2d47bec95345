"""The training state in a peer's checkpoint: how it is captured, and how a peer resumes from it.

The training thread captures everything at a step boundary, the model as an optimizer step left it. The model is a
snapshot of the arena, the flat buffers that hold it, and all else is copied. If the arena copies the model at each
boundary anyway, the snapshot costs no further copy. Other threads write the captured state to disk.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossipx.checkpoint import Checkpoint, Part, pack, unpack
from gossipx.errors import UsageError
from gossipx.hub import Centre, ElasticExchange
from gossipx.model import layout
from gossipx.model.arena import ParameterArena
from gossipx.runtime.driver import Driver
from gossipx.runtime.optimizers import Optimizers

MODEL, OPTIMIZER, RANDOM, PEER, DRIFT, OUTER, HUB = "model", "optimizer", "random", "peer", "drift", "outer", "hub"
TABLES = "tables"
"""Names of the parts of a checkpoint; ``tables`` is a worker's state towards a parameter server."""
SCRIPT = "script."
"""Prefix of the names of parts that the training script adds, so that they cannot collide with the names above."""


@dataclass(frozen=True)
class CapturedState:
    """The parts of one checkpoint, all of the same step boundary.

    Attributes:
        iteration: the iteration of the boundary.
        parts: all parts but the model's, by name.
        model: makes the model's part from the snapshot. It may have to copy from a GPU, so do not call it on the
            training thread.
        release: releases the snapshot; must be called once everything is written.
    """

    iteration: int
    parts: dict[str, Part]
    model: Callable[[], Part]
    release: Callable[[], None]


@dataclass(frozen=True)
class ScriptPart:
    """A part that the training script adds to checkpoints: the functions that get and set its state."""

    state_dict: Callable[[], object]
    load_state_dict: Callable[[Any], object]


class TrainingState:
    """The training state of one peer, as checkpoints save it.

    Args:
        optimizers: the joined optimizers; the script saves others itself.
        driver: carries out the exchanges of this peer; holds the arena and the peer's role.
        about: values of the settings that must be the same in the run that writes a checkpoint and in the run that
            resumes from it, by option.
        job: recorded in each checkpoint, to be found by a later attempt of the job.

    Attributes:
        awaited: classes of the optimizers whose states :meth:`restore` has left, as the joined ones are others.
        script_parts: the parts that the script adds, by name.
    """

    def __init__(self, optimizers: Optimizers, driver: Driver, about: Mapping[str, Any], job: str = ""):
        self.optimizers = optimizers
        self._driver = driver
        self._about = dict(about)
        self._job = job
        self.awaited: str | None = None
        self.script_parts: dict[str, ScriptPart] = {}

    @property
    def sound(self) -> bool:
        """Whether the model is finite; if not, no checkpoint must be written."""
        return self._driver.role.training.sound

    @property
    def iteration(self) -> int:
        """The number of iterations done; for a hub that does not train, the highest of the models in its centre."""
        centre = self._centre
        return self._driver.arena.step if centre is None or self._driver.role.trains else centre.step

    def obstacle(self) -> str:
        """Return why an optimizer's state cannot be saved, as far as its settings show; empty: it can."""
        try:
            pack([one.state_dict()["param_groups"] for one in self.optimizers], OPTIMIZER)
        except UsageError as error:
            return str(error)
        return ""

    def capture(self, figures: Mapping[str, Any]) -> CapturedState:
        """Capture the state. Only the training thread may call this, at a step boundary.

        Args:
            figures: metrics of the run so far, as plain data; :meth:`restore` returns them.

        Raises:
            UsageError: some state cannot be saved in a checkpoint.
        """
        driver, arena = self._driver, self._driver.arena
        parts = {SCRIPT + name: pack(part.state_dict(), name) for name, part in self.script_parts.items()}
        parts[RANDOM] = _random(self._device)
        if self.optimizers:
            parts[OPTIMIZER] = pack(self.optimizers.state_dict(), OPTIMIZER)
        if (
            (table_store := driver.tables.transfers.table_store) is not None
            and driver.role.trains
            and (tables := table_store.client.state_dict())
        ):
            parts[TABLES] = pack(tables, TABLES)
        with driver.committing:
            snapshot = arena.snapshot(whole=True)
            peer = {**driver.state_dict(), "about": self._about, "job": self._job, "figures": dict(figures)}
        with contextlib.ExitStack() as undo:
            undo.callback(snapshot.release)
            parts[PEER] = pack(peer, PEER)
            if driver.role.sync.policy.uses_drift:
                parts[DRIFT] = pack(driver.captures.reference.vectors(), DRIFT)
            if outers := [fragment.outer.vectors() for fragment in arena.fragments if fragment.outer is not None]:
                parts[OUTER] = pack(outers, OUTER)
            if (centre := self._centre) is not None and (held := driver.captures.hold(centre.ticket)) is not None:
                with contextlib.ExitStack() as after:
                    after.callback(held.release)
                    # "held" is the iteration of the held model.
                    parts[HUB] = pack({**centre.state_dict(), "held": held.step, "vectors": held.buffer.vectors}, HUB)
            undo.pop_all()

        def model() -> Part:
            tensors = layout.named(arena.slots, arena.whole, snapshot.buffer.vectors)
            return Part(tensors, {"manifest": list(arena.manifest)})

        return CapturedState(self.iteration, parts, model, snapshot.release)

    def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Restore everything but the random number generators (:meth:`restore_random`) and the script's parts.

        Returns:
            The ``figures`` that :meth:`capture` was called with.

        Raises:
            UsageError: the checkpoint is of a run with other settings, or of another model, optimizer or tables; the
                message says what differs.
        """
        driver = self._driver
        peer = unpack(checkpoint.parts[PEER])
        for option, ours in self._about.items():
            theirs = peer["about"].get(option)
            if theirs != ours:
                raise UsageError(f"the checkpoint is of a run with {option} {theirs}, not {ours}", checkpoint.path)
        self._restore_model(checkpoint, peer["iteration"])
        if self.optimizers and OPTIMIZER in checkpoint.parts:
            kinds = [one["kind"] for one in checkpoint.parts[OPTIMIZER].state]
            if sorted(kinds) == sorted(self.optimizers.kinds):
                self.restore_optimizers(checkpoint)
            else:
                self.awaited = " and ".join(kinds)
        if (table_store := driver.tables.transfers.table_store) is not None and TABLES in checkpoint.parts:
            try:
                table_store.client.load_state_dict(unpack(checkpoint.parts[TABLES]))
            except (UsageError, ValueError) as error:
                raise UsageError(f"the checkpoint is of other tables: {error}", checkpoint.path) from error
        driver.load_state_dict(peer)
        if driver.role.sync.policy.uses_drift and (vectors := unpack(checkpoint.parts[DRIFT])):
            driver.captures.reference.load(vectors)
        if OUTER in checkpoint.parts:
            for fragment, vectors in zip(driver.arena.fragments, unpack(checkpoint.parts[OUTER]), strict=True):
                if fragment.outer is not None:
                    fragment.outer.load(vectors)
        if (centre := self._centre) is not None and HUB in checkpoint.parts:
            hub = unpack(checkpoint.parts[HUB])
            centre.load_state_dict(hub)
            driver.captures.saved = hub["vectors"], hub["held"]
        return dict(peer["figures"])

    @property
    def _centre(self) -> Centre | None:
        """The centre of elastic averaging, if this peer is the hub; else None."""
        exchange = self._driver.role.exchange
        return exchange.centre if isinstance(exchange, ElasticExchange) else None

    def restore_optimizers(self, checkpoint: Checkpoint) -> None:
        """Restore the optimizers.

        Raises:
            UsageError: the checkpoint is of others.
        """
        if OPTIMIZER in checkpoint.parts:
            try:
                self.optimizers.load_state_dict(unpack(checkpoint.parts[OPTIMIZER]))
            except (ValueError, KeyError) as error:
                raise UsageError(f"the checkpoint is of another optimizer: {error}", checkpoint.path) from error
        self.awaited = None

    def restore_random(self, checkpoint: Checkpoint) -> None:
        """Restore the random number generators of torch, Python, numpy and a CUDA device."""
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
        for name, tensor in layout.named(arena.slots, arena.whole, buffer.vectors).items():
            tensor.copy_(part.tensors[name])
        if not arena.adopt(buffer, iteration):
            raise UsageError(
                "the checkpoint's model has a NaN or Inf: delete the checkpoint to resume from the one before",
                checkpoint.path,
            )
        arena.pool.free(buffer)


def _compare(theirs: list[str], arena: ParameterArena, checkpoint: Checkpoint) -> None:
    """Raise a UsageError unless the manifest in the checkpoint, one line per tensor, is that of the arena."""
    ours = list(arena.manifest)
    if theirs == ours:
        return
    pairs = zip([*theirs, "no more tensors"], [*ours, "no more tensors"], strict=False)
    saved, own = next((saved, own) for saved, own in pairs if saved != own)
    raise UsageError(
        f"the checkpoint is of another model: it has '{saved}' where this one has '{own}'", checkpoint.path
    )


def _random(device: torch.device) -> Part:
    """Return the states of all random number generators that :meth:`TrainingState.restore_random` restores."""
    kind, words, *rest = np.random.get_state()
    state: dict[str, Tensor | tuple[Any, ...]] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(words).tolist(), *rest),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return pack(state, RANDOM)
