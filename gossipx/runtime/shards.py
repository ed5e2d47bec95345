"""Checkpoints of the shards that lie with a peer: each is kept as its clock ticks, whatever its holder computes then.
Beside them lie journals of what has happened since, for a peer whose process is killed and started again. Both are of
one layout: when servers are changed, each shard of the new one is kept at once, and comes back by nothing older.

With bsp that makes one cut through the whole run: what a shard holds after k ticks is what workers begin iteration k
with. Workers keep theirs after k iterations, and a run goes on from a k that all have.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossipx.checkpoint import KEEP, Checkpoint, CheckpointError, Store, journal, pack, unpack
from gossipx.checkpoint.journal import Journal
from gossipx.errors import UsageError
from gossipx.protocol.fields import kind_of
from gossipx.protocol.server_messages import RecordRequest
from gossipx.protocol.table_effects import ApplyBuffer, ApplyGradient, BufferGradient
from gossipx.runtime.serial_worker import LONGEST, SerialWorker
from gossipx.server.shard import Shard
from gossipx.tables.store import Gradient, TableStore
from gossipx.wire.kinds import message_of, metadata_of

log = logging.getLogger("gossipx")

CLOCK, TABLES = "clock", "tables"
"""Names of a shard's parts."""
SERVERS, EPOCH = "servers", "epoch"
"""In the clock's state: by shard, the rank that held it then; and the epoch of that layout."""
LOSES = "were this peer killed, pushes would be lost"


def store_of_shard(directory: Path, shard: int, keep: int = KEEP) -> Store:
    """The checkpoints of a shard in the run's directory."""
    return Store(directory / f"shard-{shard:02d}" / "checkpoints", keep)


def servers_of(store: Store, clock: int) -> tuple[int, ...]:
    """By shard, the rank that held it when a shard's checkpoint was taken; empty: it has gone meanwhile."""
    found = store.load(clock)
    return tuple(unpack(found.parts[CLOCK]).get(SERVERS, ())) if found is not None and found.iteration == clock else ()


class ShardKeeper:
    """Keeps shards, off the thread that works on their tables.

    Args:
        stores: by shard, of all that may come to lie here.
        table_store: their tables.
        fresh: gives a shard as it was at the beginning, by the servers of a layout.
        servers: by shard, the rank that holds it as the run begins.
        journals: whether there are journals.
    """

    def __init__(
        self,
        stores: Mapping[int, Store],
        table_store: TableStore,
        fresh: Callable[[int, Sequence[int]], Shard],
        servers: Sequence[int],
        journals: bool = False,
    ):
        self._servers = servers
        self._epoch = 0
        self._stores = stores
        self._keeps_journals = journals
        self._journals: dict[int, Journal] = {}  # those that are being written
        self._kept: set[int] = set()  # shards whose journals, of this layout, have begun
        self._table_store = table_store
        self._fresh = fresh
        self._serial_worker = SerialWorker("gossipx-shards")
        self._lock = threading.Lock()
        self._writing: set[int] = set()

    def place(self, epoch: int, servers: Sequence[int]) -> None:
        """Go over to a layout; for the thread that works on the tables.

        Files stay: another process of this machine may be writing there by now.
        """
        self._epoch, self._servers = epoch, servers
        self._close_journals()
        self._kept.clear()

    def keep(self, shard: int, clock: int, state: dict[str, Any]) -> None:
        """Take a checkpoint; for the thread that works on the tables, after all that was decided before.

        One that comes while the shard's last is still being written is left out. The first that has a journal is waited
        for: until it is on the disk there is nothing to come back to.
        """
        first = self._keeps_journals and shard not in self._kept
        if first:
            self.settle()
        with self._lock:
            if shard in self._writing:
                log.warning("shard %d: a checkpoint is left out, as the one before is still being written", shard)
                return
            self._writing.add(shard)
        state = {**state, SERVERS: list(self._servers), EPOCH: self._epoch}
        parts = {CLOCK: pack(state, CLOCK), TABLES: pack(self._table_store.state_dict(shard), TABLES)}
        store = self._stores[shard]
        if self._keeps_journals:
            self._begin_journal(shard, clock, after=-1 if first else clock)

        def write() -> None:
            try:
                store.save(clock, parts)
                journal.drop(store.directory.parent, before=store.oldest() or 0)
            except OSError as error:
                log.warning("%s: an old journal cannot be removed (%s)", error.filename, error.strerror)
            except CheckpointError as error:
                log.warning("%s", error)
            finally:
                with self._lock:
                    self._writing.discard(shard)

        self._serial_worker.put(write)
        if first and not self.settle():
            log.warning("shard %d: its first checkpoint takes too long to be written: %s", shard, LOSES)

    def _begin_journal(self, shard: int, clock: int, after: int, goes_on: bool = False) -> None:
        """What happens from now on, the checkpoint of ``clock`` does not have.

        Args:
            after: journals of later checkpoints go: of a training that was gone back from; −1: all, of another layout.
        """
        if before := self._journals.pop(shard, None):
            before.close()
        self._kept.add(shard)
        directory = self._stores[shard].directory.parent
        try:
            journal.drop(directory, after=after)
            self._journals[shard] = Journal(journal.path_of(directory, clock), goes_on)
        except OSError as error:
            self._no_journal(error)

    def record(self, record: RecordRequest, gradient: Gradient | None) -> None:
        """Write down what has happened to a shard; for the thread that works on the tables."""
        with contextlib.ExitStack() as given_back:
            if gradient is not None:
                given_back.enter_context(contextlib.closing(gradient))
            writing = self._journals.get(record.shard)
            if writing is None:
                return
            try:
                writing.append(metadata_of(record), memoryview(b"") if gradient is None else gradient.view)
            except OSError as error:
                self._journals.pop(record.shard).close()
                self._no_journal(error)

    def _no_journal(self, error: OSError) -> None:
        log.warning(
            "%s: no journal can be written until the next checkpoint (%s): %s",
            error.filename or "journal",
            error.strerror,
            LOSES,
        )

    def records(self, shard: int, clock: int, first: int) -> Iterator[tuple[RecordRequest, Gradient]]:
        """What has happened to a shard since a checkpoint, in order, each with its gradient.

        Where a record is missing, as the disk was full until the next checkpoint and that is damaged, or is of another
        layout, it ends, and what was written down after that is removed.

        Args:
            clock: of the checkpoint.
            first: the number of the first record after it.
        """
        directory, last = self._stores[shard].directory.parent, clock
        for number, (begun, words, content) in enumerate(journal.read(directory, clock), first):
            record = message_of(kind_of(RecordRequest), words)
            assert isinstance(record, RecordRequest)
            if (record.copy, record.number) != (self._epoch, number):
                told = "shard %d: no journal has what happened between clocks %d and %d: all since is lost"
                log.warning(told, shard, last, begun)
                journal.drop(directory, after=last)
                return
            last = begun
            yield record, Gradient(record, content)

    def restore_tables(self, index: int) -> dict[str, Any] | None:
        """Bring a shard's tables back as they were when its holder's process was killed; for the thread that works on
        them.

        Returns:
            The state of its role then, with the number of its next record; None: nothing here is of this layout.

        Raises:
            UsageError: it is of other tables.
        """
        found = self._stores[index].load()
        if found is None:
            return None
        state: dict[str, Any] = unpack(found.parts[CLOCK])
        if not self._is_of_this_layout(state):
            return None  # the servers were changed since: what it had is of no use to those of now
        self._bring_back(index, found)
        shard = self._fresh(index, self._servers)
        shard.load_state_dict(state)
        clock = shard.clock.clock
        for record, gradient in self.records(index, clock, shard.records.number):
            for effect in shard.follow(record, 0):
                match effect:
                    case ApplyGradient(_, scale):
                        self._table_store.apply(gradient, scale)
                    case BufferGradient():
                        self._table_store.buffer(gradient)
                    case ApplyBuffer():
                        self._table_store.apply_buffer(index)
        last = max(journal.clocks(self._stores[index].directory.parent), default=clock)
        last = max(last, clock)
        self._begin_journal(index, last, after=last, goes_on=True)
        told = "shard %d comes back as it was when its server was killed, at clock %d"
        log.warning(told, index, shard.clock.clock)
        return shard.state_dict()

    def _is_of_this_layout(self, state: dict[str, Any]) -> bool:
        return [*state[SERVERS]] == [*self._servers] and state.get(EPOCH) == self._epoch

    def resume(self, shard: Shard, at: int | None) -> None:
        """Bring a shard back as it was at a checkpoint, if there is one, to go on from there with all workers.

        Args:
            at: the clock; None: of the newest that is whole.

        Raises:
            UsageError: it is of other tables.
        """
        found = self._stores[shard.index].load(at)
        if found is None:
            return
        state = unpack(found.parts[CLOCK])
        self._bring_back(shard.index, found)
        shard.resume(state)
        clock = shard.clock.clock
        if self._keeps_journals and self._is_of_this_layout(state):
            self._begin_journal(shard.index, clock, after=clock)
        elif self._keeps_journals:  # epochs count anew in a run that goes on
            self.keep(shard.index, clock, shard.state_dict())

    def _bring_back(self, shard: int, found: Checkpoint) -> None:
        """A shard's tables are as they were."""
        try:
            self._table_store.load_state_dict(shard, unpack(found.parts[TABLES]))
        except (UsageError, ValueError, KeyError) as error:
            raise UsageError(f"the checkpoint is of other tables: {error}", found.path) from error

    def settle(self) -> bool:
        """Wait until all checkpoints that were taken are written; False: they take too long.

        Whoever holds their shards next writes to the same places.
        """
        written = threading.Event()
        self._serial_worker.put(written.set)
        return written.wait(LONGEST)

    def close(self) -> None:
        """Keep no more; what is being written is finished."""
        self._serial_worker.close(wait=True)
        self._close_journals()

    def _close_journals(self) -> None:
        for writing in self._journals.values():
            writing.close()
        self._journals.clear()
