"""A peer's checkpoints: when one is due, the thread that writes them, and the one that training resumes from.

The training thread captures the state, and a second thread writes and syncs it to the disk. A checkpoint that is due
while the previous one is still being written is skipped and counted: a queue would grow without bound on a slow disk.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossipx.checkpoint import (
    KEEP,
    PART,
    Checkpoint,
    CheckpointError,
    CheckpointPart,
    NotRemovedError,
    Store,
    pack,
    unpack,
)
from gossipx.errors import GossipxError, UsageError
from gossipx.hub import Centre, ElasticExchange
from gossipx.model import layout
from gossipx.model.arena import ParameterArena
from gossipx.runtime import model_files
from gossipx.runtime.driver import Driver
from gossipx.runtime.driver.clock import CLOSE_TIMEOUT, LimitedLog, SerialWorker
from gossipx.runtime.optimizers import Optimizers
from gossipx.settings.interval import CheckpointInterval

log = logging.getLogger("gossipx")

Figures = Callable[[], Mapping[str, Any]]
"""Returns the figures to be saved in a checkpoint."""


def store_of(directory: Path, rank: int, keep: int = KEEP) -> Store:
    """Return the store of a peer's checkpoints in the run's directory."""
    return Store(model_files.directory_of(directory, rank) / "checkpoints", keep)


class Checkpoints:
    """The checkpoints of one peer. For the training thread.

    Args:
        store: where they are written; None: none are written.
        every: the interval between checkpoints; falsy: only one when the peer is asked to leave.
        state: the training state that they save.
        resumes: whether the run resumes from checkpoints; the newest complete one is then loaded here.
        at: the iteration of the checkpoint to resume from; None: the newest.
        is_added: whether this peer has had no part in the run so far: checkpoints that it finds are not used.

    Attributes:
        skipped: number of checkpoints that were due while the previous one was being written.
        failed: number of checkpoints that could not be written.
        found: the checkpoint that training resumes from, if any.
        resumed: whether a checkpoint was found; None: the run does not resume.
    """

    def __init__(
        self,
        store: Store | None,
        every: CheckpointInterval,
        state: TrainingState,
        resumes: bool,
        at: int | None = None,
        is_added: bool = False,
    ):
        self.skipped = 0
        self.failed = 0
        self._store = store
        self._every = every
        self._state = state
        self.found = store.load(at) if store is not None and resumes and not is_added else None
        self.resumed = self.found is not None if resumes else None
        if store is not None and not resumes and not is_added and store.find() is not None:
            log.warning("%s: checkpoints of an earlier run are replaced; GOSSIPX_RESUME=1 resumes it", store.directory)
        self._last = -1 if self.found is None else self.found.iteration  # iteration of the newest checkpoint
        self._checked = max(self._last, 0)  # iteration of the last check whether one is due
        self._due = 0.0  # time.monotonic() at which the next is due, if the interval is in seconds
        self._writer: SerialWorker | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._error: GossipxError | None = None  # why the last one was not written
        self._warn = LimitedLog().warn

    @property
    def newest(self) -> int:
        """The iteration of the newest checkpoint; negative: none was written, or the last could not be."""
        return self._last

    # --- resuming -----------------------------------------------------------------------------------

    def restore(self) -> dict[str, Any]:
        """Restore model, optimizer and role from the checkpoint that was found, before joining.

        Returns:
            The figures in the checkpoint; empty if none was found.

        Raises:
            UsageError: the checkpoint is of another run or another model.
        """
        return {} if self.found is None else self._state.restore(self.found)

    def start(self) -> None:
        """Restore the random number generators and start the interval, when training begins."""
        if self._store is not None:
            self._store.clean()
            if problem := self._state.obstacle():
                log.warning("%s: no checkpoint can be written, not even on Ctrl-C", problem)
        if self.found is not None:
            self._state.restore_random(self.found)
            own = {name: part for name, part in self.found.parts.items() if name.startswith((SCRIPT, OPTIMIZER))}
            self.found = Checkpoint(self.found.path, self.found.iteration, own)  # free the memory of the other parts
        self._due = time.monotonic() + self._every.seconds

    def register(self, name: str, state_dict: Callable[[], object], load_state_dict: Callable[[Any], object]) -> None:
        """See :meth:`gossipx.runtime.training.peer.Peer.checkpoint_part`."""
        if not PART.fullmatch(name) or name in self._state.script_parts:
            raise UsageError(
                f"'{name}' is not a valid new name of a checkpoint part: use letters, digits and . - _, each once"
            )
        pack(state_dict(), name)  # fail now, not hours later at the first checkpoint
        if self.found is not None:
            part = self.found.parts.get(SCRIPT + name)
            if part is None:
                log.warning("%s: the checkpoint has no part '%s': it keeps its initial state", self.found.path, name)
            else:
                load_state_dict(unpack(part))
        self._state.script_parts[name] = ScriptPart(state_dict, load_state_dict)

    def optimizers_replaced(self) -> None:
        """Give the optimizers that were joined just now their state back, if training resumes from it."""
        if self.found is not None and OPTIMIZER in self.found.parts:
            self._state.restore_optimizers(self.found)

    # --- taking them --------------------------------------------------------------------------------

    def step_done(self, figures: Figures) -> None:
        """Take a checkpoint after an iteration if one is due.

        Raises:
            UsageError: the script has made a step with other optimizers than those whose state it resumes from.
        """
        if self._state.awaited is not None:
            ours = " and ".join(self._state.optimizers.kinds)
            raise UsageError(
                f"the checkpoint is of {self._state.awaited}, not {ours}: join that optimizer, or call"
                " peer.join_optimizer with it before the first step",
                self.found.path if self.found is not None else None,
            )
        if self.found is not None:
            self.found.parts.pop(OPTIMIZER, None)  # no more needed
        if not self._every or not self._is_due():
            return
        if not self._idle.is_set():
            self.skipped += 1
            self._warn(
                "skipped",
                "a checkpoint is skipped because the previous one is still being written: raise --checkpoint-every",
            )
            return
        self._take(figures)

    def training_ended(self, figures: Figures) -> None:
        """Take a checkpoint after the last iteration, if checkpoints are enabled, so that the run can be extended."""
        if self._every:
            self.leaving(figures)

    def leaving(self, figures: Figures) -> None:
        """Take the last checkpoint unless this iteration has one; :meth:`flush` waits until it is written."""
        if self._state.iteration != self._last and self._idle.wait(CLOSE_TIMEOUT):
            self._take(figures)

    def flush(self) -> GossipxError | None:
        """Wait until the last checkpoint is written. Return the error if it is not."""
        if not self._idle.wait(CLOSE_TIMEOUT):
            return CheckpointError(f"the last checkpoint was not written within {CLOSE_TIMEOUT:g} s: check the disk")
        return self._error

    def close(self, at_once: bool = False) -> None:
        """End the thread that writes; unless ``at_once``, wait until the last checkpoint is written."""
        if self._writer is not None:
            self._writer.close(wait=not at_once)
            self._writer = None

    def _is_due(self) -> bool:
        if self._every.iterations:
            # Compare multiples, not remainders: a hub that does not train is not checked at each iteration.
            before, self._checked = self._checked, self._state.iteration
            return self._checked // self._every.iterations > before // self._every.iterations
        return time.monotonic() >= self._due

    def _take(self, figures: Figures) -> None:
        if self._store is None or not self._state.sound:
            return
        self._due = time.monotonic() + self._every.seconds
        self._last = self._state.iteration
        try:
            captured = self._state.capture(figures())
        except UsageError as error:
            self._not_written(error)
            return
        self._idle.clear()
        self._writer = self._writer or SerialWorker("gossipx-checkpoints")
        self._writer.put(lambda: self._write(captured))

    # --- the thread that writes ---------------------------------------------------------------------

    def _write(self, captured: CapturedState) -> None:
        assert self._store is not None
        try:
            self._store.save(captured.iteration, {**captured.parts, MODEL: captured.model()})
            self._error = None
        except NotRemovedError as error:
            self._error = None
            self._warn("not removed", str(error))
        except GossipxError as error:
            self._not_written(error)
        except Exception as error:
            log.debug("a checkpoint has failed", exc_info=True)
            kind = type(error).__name__
            self._not_written(CheckpointError(f"a checkpoint cannot be written: {kind}: {error}"))
        finally:
            captured.release()
            self._idle.set()

    def _not_written(self, error: GossipxError) -> None:
        self._error, self._last = error, -1
        self.failed += 1
        self._warn("failed", str(error))


MODEL, OPTIMIZER, RANDOM, PEER, DRIFT, OUTER, HUB = "model", "optimizer", "random", "peer", "drift", "outer", "hub"
TABLES, WAVES = "tables", "waves"
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
    parts: dict[str, CheckpointPart]
    model: Callable[[], CheckpointPart]
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
            (table_store := driver.tables.store) is not None
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
            if waves := [codec.state_dict() for codec in driver.waves.codecs.values()]:
                parts[WAVES] = pack(waves, WAVES)
            if (centre := self._centre) is not None and (held := driver.captures.hold(centre.ticket)) is not None:
                with contextlib.ExitStack() as after:
                    after.callback(held.release)
                    # "held" is the iteration of the held model.
                    parts[HUB] = pack({**centre.state_dict(), "held": held.step, "vectors": held.buffer.vectors}, HUB)
            undo.pop_all()

        def model() -> CheckpointPart:
            tensors = layout.named(arena.slots, arena.whole, snapshot.buffer.vectors)
            return CheckpointPart(tensors, {"manifest": list(arena.manifest)})

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
        if (table_store := driver.tables.store) is not None and TABLES in checkpoint.parts:
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
        if WAVES in checkpoint.parts:
            for codec, state in zip(driver.waves.codecs.values(), unpack(checkpoint.parts[WAVES]), strict=True):
                codec.load_state_dict(state)
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


def _random(device: torch.device) -> CheckpointPart:
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
