"""Checkpoints of the shards that lie with a peer: each is kept as its clock ticks, whatever its holder computes then.

With bsp that makes one cut through the whole run: what a shard holds after k ticks is what workers begin iteration k
with. Workers keep theirs after k iterations, and a run goes on from a k that all have.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossipx.checkpoint import KEEP, Checkpoint, CheckpointError, Store, pack, unpack
from gossipx.drive.lane import Lane
from gossipx.errors import UsageError
from gossipx.storage.desk import Desk

log = logging.getLogger("gossipx")

CLOCK, TABLES = "clock", "tables"
"""Names of a shard's parts."""


def store_of_shard(directory: Path, shard: int, keep: int = KEEP) -> Store:
    """The checkpoints of a shard in the run's directory."""
    return Store(directory / f"shard-{shard:02d}" / "checkpoints", keep)


class ShardKeeper:
    """Keeps shards, off the thread that works on their tables.

    Args:
        stores: by shard, of those that lie here.
        desk: their tables.
    """

    def __init__(self, stores: Mapping[int, Store], desk: Desk):
        self._stores = stores
        self._desk = desk
        self._lane = Lane("gossipx-shards")
        self._lock = threading.Lock()
        self._writing: set[int] = set()

    def keep(self, shard: int, clock: int, state: dict[str, Any]) -> None:
        """Take a checkpoint; for the thread that works on the tables, after all that was decided before.

        One that comes while the shard's last is still being written is left out.
        """
        with self._lock:
            if shard in self._writing:
                log.warning("shard %d: a checkpoint is left out, as the one before is still being written", shard)
                return
            self._writing.add(shard)
        parts = {CLOCK: pack(state, CLOCK), TABLES: pack(self._desk.state_dict(shard), TABLES)}

        def write() -> None:
            try:
                self._stores[shard].save(clock, parts)
            except CheckpointError as error:
                log.warning("%s", error)
            finally:
                with self._lock:
                    self._writing.discard(shard)

        self._lane.put(write)

    def restore(self, shard: int, at: int | None) -> dict[str, Any] | None:
        """Bring a shard's tables back, before the run goes on.

        Args:
            at: the clock; None: of the newest that is whole.

        Returns:
            What :meth:`keep` was given as ``state``; None: there is no checkpoint.

        Raises:
            UsageError: it is of other tables.
        """
        found: Checkpoint | None = self._stores[shard].load(at)
        if found is None:
            return None
        try:
            self._desk.load_state_dict(shard, unpack(found.parts[TABLES]))
        except (UsageError, ValueError, KeyError) as error:
            raise UsageError(f"the checkpoint is of other tables: {error}", found.path) from error
        state: dict[str, Any] = unpack(found.parts[CLOCK])
        return state

    def close(self) -> None:
        """Keep no more; what is being written is finished."""
        self._lane.close(wait=True)
