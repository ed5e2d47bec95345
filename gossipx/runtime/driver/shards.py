"""Checkpoints and journals of the shards that a server holds.

A shard is one part of the parameter server's tables; its clock ticks once per iteration of its workers. A checkpoint is
taken at ticks of the clock, independently of the server's own training. A journal records every change since the last
checkpoint, so that a server whose process is killed can be restarted without losing pushes. Both are valid for one
layout, the assignment of shards to servers: when the servers change, each shard is checkpointed at once, and older
files are not used.

With the sync model bsp the checkpoints form a consistent cut of the whole run: a shard after k ticks has the values
with which workers begin iteration k. Workers take theirs after k iterations, and a run resumes from a k that all have.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gossipx.checkpoint import (
    KEEP,
    Checkpoint,
    CheckpointError,
    JournalFile,
    NotRemovedError,
    Store,
    drop_journals,
    journal_clocks,
    journal_path,
    pack,
    records_of,
    unpack,
)
from gossipx.errors import UsageError
from gossipx.protocol.table_effects import ApplyBuffered, ApplyGradient, BufferGradient, ShardRecord
from gossipx.runtime.driver.clock import CLOSE_TIMEOUT, LimitedLog, SerialWorker
from gossipx.server.shard import Shard
from gossipx.tables.store import Gradient, TableStore
from gossipx.wire.frames import encoded

log = logging.getLogger("gossipx")

CLOCK, TABLES = "clock", "tables"
"""Names of the parts of a shard's checkpoint."""
SERVERS, EPOCH = "servers", "epoch"
"""Keys in the clock's part: the rank of each shard's server, and the epoch of that layout."""
LOSES = "if this peer is killed, pushes are lost"


def store_of_shard(directory: Path, shard: int, keep: int = KEEP) -> Store:
    """Return the store of a shard's checkpoints in the run's directory."""
    return Store(directory / f"shard-{shard:02d}" / "checkpoints", keep)


def servers_of(store: Store, clock: int) -> tuple[int, ...]:
    """Return the rank of each shard's server at the checkpoint of ``clock``; empty if it is missing."""
    found = store.load(clock)
    return tuple(unpack(found.parts[CLOCK]).get(SERVERS, ())) if found is not None and found.iteration == clock else ()


@dataclass
class ShardKeeper:
    """Takes checkpoints of shards and writes their journals.

    Checkpoints are written by a thread of its own; other methods are for the thread that works on the tables.

    Attributes:
        stores: by shard, the checkpoints of every shard that this peer may hold.
        table_store: the tables of this peer.
        fresh: returns a shard in its initial state, given its index and the servers of a layout.
        servers: by shard, the rank of its server.
        journals: whether journals are written.
        unwritten: number of checkpoints, and of changes for the journals, that could not be written.
    """

    stores: Mapping[int, Store]
    table_store: TableStore
    fresh: Callable[[int, Sequence[int]], Shard]
    servers: Sequence[int]
    journals: bool = False
    unwritten: int = 0
    _epoch: int = 0
    _journals: dict[int, JournalFile] = field(default_factory=dict)  # open journals
    _begun: set[int] = field(default_factory=set)  # shards whose journals in this layout have begun
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _writing: set[int] = field(default_factory=set)  # shards whose checkpoints are being written

    def __post_init__(self) -> None:
        self._warn = LimitedLog().warn
        self._serial_worker = SerialWorker("gossipx-shards")

    def place(self, epoch: int, servers: Sequence[int]) -> None:
        """Switch to another layout.

        Files are not deleted: the new server may be another process of this machine that writes there already.
        """
        self._epoch, self.servers = epoch, servers
        self._close_journals()
        self._begun.clear()

    def save_checkpoint(self, shard: int, clock: int, state: dict[str, Any]) -> None:
        """Take a checkpoint of a shard. All earlier changes must have been applied.

        It is skipped while the shard's previous one is still being written. With journals, the first one of a layout is
        waited for, since the journal is useless without it.
        """
        first = self.journals and shard not in self._begun
        if first:
            self.settle()
        with self._lock:
            if shard in self._writing:
                log.warning("shard %d: a checkpoint is skipped because the previous one is still being written", shard)
                return
            self._writing.add(shard)
        state = {**state, SERVERS: list(self.servers), EPOCH: self._epoch}
        parts = {CLOCK: pack(state, CLOCK), TABLES: pack(self.table_store.state_dict(shard), TABLES)}
        store = self.stores[shard]
        if self.journals:
            self._begin_journal(shard, clock, after=-1 if first else clock)

        def write() -> None:
            try:
                store.save(clock, parts)
                drop_journals(store.directory.parent, before=store.oldest() or 0)
            except NotRemovedError as error:
                self._warn(f"old checkpoint of {shard}", str(error))
            except OSError as error:
                why = f"{error.filename}: an old journal cannot be removed ({error.strerror})"
                self._warn(f"old journal of {shard}", why)
            except CheckpointError as error:
                self.unwritten += 1
                self._warn(f"checkpoint of {shard}", str(error))
            finally:
                with self._lock:
                    self._writing.discard(shard)

        self._serial_worker.put(write)
        if first and not self.settle():
            log.warning("shard %d: its first checkpoint takes too long to write: %s", shard, LOSES)

    def _begin_journal(self, shard: int, clock: int, after: int, append: bool = False) -> None:
        """Open the journal of the changes after the checkpoint of ``clock``.

        Args:
            after: delete the journals of clocks after this one, because the run has resumed from an earlier checkpoint.
                −1 deletes all, because they are of another layout.
            append: continue an existing journal.
        """
        if previous := self._journals.pop(shard, None):
            previous.close()
        self._begun.add(shard)
        directory = self.stores[shard].directory.parent
        try:
            drop_journals(directory, after=after)
            self._journals[shard] = JournalFile(journal_path(directory, clock), append)
        except OSError as error:
            self._no_journal(shard, error)

    def record(self, record: ShardRecord, gradient: Gradient | None) -> None:
        """Append a change of a shard to its journal. This takes ownership of the caller's reference to the gradient."""
        with contextlib.ExitStack() as stack:
            if gradient is not None:
                stack.callback(gradient.release)
            shard_journal = self._journals.get(record.shard)
            if shard_journal is None:
                self.unwritten += record.shard in self._begun  # otherwise no journals are written
                return
            words = encoded(record)
            _read_record(words)  # a figure that JSON lacks, such as NaN, must not become a gap when it is read
            try:
                shard_journal.append(words, memoryview(b"") if gradient is None else gradient.view)
            except OSError as error:
                self._journals.pop(record.shard).close()
                self.unwritten += 1
                self._no_journal(record.shard, error)

    def _no_journal(self, shard: int, error: OSError) -> None:
        directory = self.stores[shard].directory.parent
        why = f"the journal cannot be written until the next checkpoint ({error.strerror})"
        self._warn(f"journal of {shard}", f"{directory}: {why}: {LOSES}")

    def records(self, shard: int, clock: int, first: int) -> Iterator[tuple[ShardRecord, Gradient]]:
        """Yield the changes of a shard since a checkpoint in order, each with its gradient.

        Stop at a gap, or at a record of another layout or another version, and delete the journals after it. A gap
        arises if the disk was full until the next checkpoint, and that checkpoint is damaged.

        Args:
            clock: the clock of the checkpoint.
            first: the number of the first record after it.
        """
        directory, last = self.stores[shard].directory.parent, clock

        def report(line: str) -> None:
            log.warning("%s: the changes of shard %d in them are lost", line, shard)

        for number, (journal_clock, words, content) in enumerate(records_of(directory, clock, report), first):
            record = _record(words)
            if record is None or (record.epoch, record.number) != (self._epoch, number):
                message = "shard %d: the journal has a gap between clocks %d and %d: later changes are lost"
                log.warning(message, shard, last, journal_clock)
                drop_journals(directory, after=last)
                return
            last = journal_clock
            yield record, Gradient(record, content)

    def restore_tables(self, index: int) -> dict[str, Any] | None:
        """Restore a shard's tables from its last checkpoint and its journal, after its server was killed.

        Returns:
            The state of the shard's role at that time, with the number of its next record; None: there is no checkpoint
            of the current layout.

        Raises:
            UsageError: the checkpoint is of other tables.
        """
        found = self.stores[index].load()
        if found is None:
            return None
        state: dict[str, Any] = unpack(found.parts[CLOCK])
        if not self._is_of_this_layout(state):
            return None  # the servers were changed since the checkpoint
        self._restore(index, found)
        shard = self.fresh(index, self.servers)
        shard.load_state_dict(state)
        clock = shard.clock.clock
        for record, gradient in self.records(index, clock, shard.records.number):
            for effect in shard.apply_record(record, 0):
                match effect:
                    case ApplyGradient(_, scale, buffers):
                        self.table_store.apply(gradient, scale, buffers)
                    case BufferGradient():
                        self.table_store.buffer(gradient)
                    case ApplyBuffered(_, sums):
                        self.table_store.apply_buffer(index, sums)
        last = max(journal_clocks(self.stores[index].directory.parent), default=clock)
        last = max(last, clock)
        self._begin_journal(index, last, after=last, append=True)
        message = "shard %d is restored from its checkpoint and its journal, at clock %d"
        log.warning(message, index, shard.clock.clock)
        return shard.state_dict()

    def _is_of_this_layout(self, state: dict[str, Any]) -> bool:
        return [*state[SERVERS]] == [*self.servers] and state.get(EPOCH) == self._epoch

    def resume(self, shard: Shard, at: int | None) -> None:
        """Restore a shard from a checkpoint, if there is one, in a resumed run.

        Args:
            at: the clock of the checkpoint, from which all peers resume; None: the newest complete one. Then this peer
                may have been restarted alone, and its journals must stay as they are until the shard begins.

        Raises:
            UsageError: the checkpoint is of other tables.
        """
        found = self.stores[shard.index].load(at)
        if found is None:
            return
        state = unpack(found.parts[CLOCK])
        if at is None and [*state[SERVERS]] != [*self.servers]:
            log.warning("%s: shard %d is not resumed from it: it is of other servers", found.path, shard.index)
            return
        self._restore(shard.index, found)
        shard.resume(state, together=at is not None)

    def _restore(self, shard: int, found: Checkpoint) -> None:
        """Load the tables of a shard from a checkpoint."""
        try:
            self.table_store.load_state_dict(shard, unpack(found.parts[TABLES]))
        except (UsageError, ValueError, KeyError) as error:
            raise UsageError(f"the checkpoint is of other tables: {error}", found.path) from error

    def settle(self) -> bool:
        """Wait until all checkpoints that were taken are written. Return False after :data:`CLOSE_TIMEOUT` seconds."""
        written = threading.Event()
        self._serial_worker.put(written.set)
        return written.wait(CLOSE_TIMEOUT)

    def close(self) -> None:
        """Wait for queued checkpoints, and close the journals."""
        self._serial_worker.close(wait=True)
        self._close_journals()

    def _close_journals(self) -> None:
        for shard_journal in self._journals.values():
            shard_journal.close()
        self._journals.clear()


_read_record = msgspec.json.Decoder(ShardRecord).decode


def _record(words: bytes) -> ShardRecord | None:
    """Return the record that these words describe; None: they have another form."""
    try:
        return _read_record(words)
    except msgspec.MsgspecError:
        return None
