"""A peer's checkpoints: when one is due, the thread that writes them, and the one that training goes on from.

The training thread captures; one thread of its own writes, to the disk and not only to the system's memory. A
checkpoint that is due while the one before is still being written is left out and counted: a queue would grow on a slow
disk.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gossipx.checkpoint import KEEP, Checkpoint, CheckpointError, CheckpointInterval, Store, pack, unpack
from gossipx.checkpoint.store import PART
from gossipx.errors import GossipxError, UsageError
from gossipx.runtime import models
from gossipx.runtime.state import MODEL, SCRIPT, CapturedState, OwnPart, TrainingState

log = logging.getLogger("gossipx")

TELL_EVERY = 60.0
"""Seconds between two warnings of one kind; what falls between is counted and told with the next."""
LONGEST_WRITE = 300.0
"""Seconds that an ending peer waits for its last checkpoint: 3 GB at 10 MB/s. A disk that hangs must not keep it."""

Kept = Callable[[], Mapping[str, Any]]
"""Gives figures to be kept in a checkpoint."""


def store_of(directory: Path, rank: int, keep: int = KEEP) -> Store:
    """The checkpoints of a peer in the run's directory."""
    return Store(models.directory_of(directory, rank) / "checkpoints", keep)


class Checkpoints:
    """One peer's; all but :attr:`skipped` for the training thread.

    Args:
        store: None: none are written.
        every: how often one is due while training; none: only one as the peer is asked to leave.
        state: what they are taken of.
        resumes: the run goes on from checkpoints: the newest whole one is looked for here.
        at: the iteration of the one that is to be gone on from, whichever is the newest.
        told: gives the iteration after which the next is due, where others say so and not the clock on the wall here.

    Attributes:
        skipped: those that were due while one was being written.
        failed: those that could not be written.
        found: the one that training goes on from; None: there is none.
        resumed: None: the run is a new one; else whether there is one.
    """

    def __init__(
        self,
        store: Store | None,
        every: CheckpointInterval,
        state: TrainingState,
        resumes: bool,
        at: int | None = None,
        told: Callable[[], int] | None = None,
    ):
        self.skipped = 0
        self.failed = 0
        self._store = store
        self._every = every
        self._state = state
        self._told_by = told
        self._told_last = 0
        self.found = store.load(at) if store is not None and resumes else None
        self.resumed = self.found is not None if resumes else None
        self._last = -1 if self.found is None else self.found.iteration  # the iteration of the newest
        self._looked = max(self._last, 0)  # the iteration at which it was last asked whether one is due
        self._due = 0.0  # by the clock, where it goes by seconds
        self._queue: queue.SimpleQueue[CapturedState | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._error: GossipxError | None = None  # why the last one was not written
        self._told: dict[str, tuple[float, int]] = {}  # by kind of warning: when, and how many were not told since

    # --- going on from one --------------------------------------------------------------------------

    def restore(self) -> dict[str, Any]:
        """Bring the state of the checkpoint that was found into model, optimizer and role, before joining.

        Returns:
            The figures that were kept with it; empty if none was found.

        Raises:
            UsageError: it is of another run or model.
        """
        return {} if self.found is None else self._state.restore(self.found)

    def start(self) -> None:
        """Training begins, or goes on."""
        if self._store is not None:
            self._store.clean()
        if self.found is not None:
            self._state.restore_random(self.found)
            own = {name: part for name, part in self.found.parts.items() if name.startswith(SCRIPT)}
            self.found = Checkpoint(self.found.path, self.found.iteration, own)  # the rest is memory of no more use
        self._due = time.monotonic() + self._every.seconds

    def register(self, name: str, state_dict: Callable[[], object], load_state_dict: Callable[[Any], object]) -> None:
        """See :meth:`gossipx.runtime.peer.Peer.checkpoint_part`."""
        if not PART.fullmatch(name) or name in self._state.own:
            raise UsageError(f"'{name}' names no new part of a checkpoint: letters, digits and . - _, each name once")
        pack(state_dict(), name)  # what cannot be kept is told now, and not after hours
        if self.found is not None:
            part = self.found.parts.get(SCRIPT + name)
            if part is None:
                log.warning("%s: the checkpoint has no part '%s', which begins anew", self.found.path, name)
            else:
                load_state_dict(unpack(part))
        self._state.own[name] = OwnPart(state_dict, load_state_dict)

    # --- taking them --------------------------------------------------------------------------------

    def step_done(self, kept: Kept) -> None:
        """An iteration is done: take a checkpoint if one is due."""
        if not self._every or not self._is_due():
            return
        if not self._idle.is_set():
            self.skipped += 1
            self._tell(
                "skipped",
                "a checkpoint is left out, as the one before is still being written: raise --checkpoint-every",
            )
            return
        self._take(kept)

    def training_ended(self, kept: Kept) -> None:
        """The last iteration is done: where checkpoints are taken, one of this is, for a run that goes on longer."""
        if self._every:
            self.leaving(kept)

    def leaving(self, kept: Kept) -> None:
        """Take one in any case, the last, unless this iteration has one; see :meth:`flush`."""
        if self._state.iteration != self._last and self._idle.wait(LONGEST_WRITE):
            self._take(kept)

    def flush(self) -> GossipxError | None:
        """Wait until the last one is written; an error to end with, if it is not."""
        if not self._idle.wait(LONGEST_WRITE):
            return CheckpointError(f"the last checkpoint was not written within {LONGEST_WRITE:g} s: see the disk")
        return self._error

    def close(self) -> None:
        """Wait for what is being written, and end the thread."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join(LONGEST_WRITE)
            self._writer = None

    def _is_due(self) -> bool:
        if self._every.iterations:
            # Not where it is a multiple: a hub that only serves is looked at now and then, not at each iteration.
            before, self._looked = self._looked, self._state.iteration
            return self._looked // self._every.iterations > before // self._every.iterations
        if self._told_by is not None:
            told = self._told_by()
            due = self._told_last < told <= self._state.iteration
            self._told_last = told if due else self._told_last
            return due
        return time.monotonic() >= self._due

    def _take(self, kept: Kept) -> None:
        if self._store is None or not self._state.sound:
            return
        self._due = time.monotonic() + self._every.seconds
        self._last = self._state.iteration
        try:
            captured = self._state.capture(kept())
        except UsageError as error:
            self._not_written(error)
            return
        self._idle.clear()
        self._queue.put(captured)
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="gossipx-checkpoints", daemon=True)
            self._writer.start()

    # --- the thread that writes ---------------------------------------------------------------------

    def _write(self) -> None:
        assert self._store is not None
        while (captured := self._queue.get()) is not None:
            try:
                self._store.save(captured.iteration, {**captured.parts, MODEL: captured.model()})
                self._error = None
            except GossipxError as error:
                self._not_written(error)
            finally:
                captured.release()
                self._idle.set()

    def _not_written(self, error: GossipxError) -> None:
        self._error, self._last = error, -1
        self.failed += 1
        self._tell("failed", str(error))

    def _tell(self, kind: str, text: str) -> None:
        now = time.monotonic()
        told, held_back = self._told.get(kind, (-TELL_EVERY, 0))
        if now - told < TELL_EVERY:
            self._told[kind] = (told, held_back + 1)
            return
        self._told[kind] = (now, 0)
        log.warning("%s%s", text, f" ({held_back} more like it before)" if held_back else "")
