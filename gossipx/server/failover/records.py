"""Records of what happens to a shard, so that no acknowledged push is lost with the shard's holder.

A shard's decisions follow from its inputs in order. So a log of these inputs, with the gradients, leads from an earlier
copy to the same tables. Records go to a journal beside the shard's checkpoints, or to the peer with the replica.
Acknowledgements wait until the records of their inputs are safe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gossipx.protocol.effects import Answer, Effect
from gossipx.protocol.fields import ShardEvent
from gossipx.protocol.server_messages import GradientRequest, RecordRequest
from gossipx.protocol.table_effects import Record

MOST = 500
"""The number of entries at which a record without a gradient is made."""


class Records:
    """The log of one shard's inputs; this base class discards it.

    Args:
        shard: its index.
        copy: identifies the copy of the shard that records are numbered from: the epoch of a journal's layout, or the
            number of a replica's copy.

    Attributes:
        number: of the next record after that copy, to be made or followed.
    """

    enabled = False
    """Whether records are made."""
    from_checkpoint = False
    """Whether records are useful only with a checkpoint to start from."""

    def __init__(self, shard: int, copy: int = 0):
        self.shard = shard
        self.copy = copy
        self.number = 0
        self._happened: list[ShardEvent] = []

    def log(self, *entry: str | int | float) -> None:
        """Append an input of the shard to the next record."""
        if self.enabled:
            self._happened.append(entry)

    def log_push(self, push: GradientRequest, ticket: int) -> list[Effect]:
        """Make a record of all inputs up to a push, whose gradient is kept under ``ticket``."""
        return self._made(push, ticket)

    def flush(self, at_least: int = 1) -> list[Effect]:
        """Make a record of the inputs without a gradient, if there are at least ``at_least``."""
        return self._made(None, None) if self.enabled and len(self._happened) >= at_least else []

    def _made(self, push: GradientRequest | None, ticket: int | None) -> list[Effect]:
        if not self.enabled:
            return []
        log, self._happened = tuple(self._happened), []
        gradient = (-1, -1, (), ()) if push is None else (push.bucket, push.progress, push.parts, push.settings)
        # The sender sets its own patience.
        record = RecordRequest(self.shard, self.copy, self.number, log, *gradient, patience=1.0)
        self.number += 1
        return self.write(record, ticket)

    def write(self, record: RecordRequest, ticket: int | None) -> list[Effect]:
        """Store or send a record."""
        return []

    def delay_answers(self, effects: Sequence[Effect]) -> list[Effect]:
        """Delay the answers among ``effects`` until the records made so far are safe."""
        return list(effects)


class Journal(Records):
    """A log that is written to disk before anything is acknowledged; valid for one layout only."""

    enabled = from_checkpoint = True

    def write(self, record: RecordRequest, ticket: int | None) -> list[Effect]:
        return [Record(record, ticket)]

    def delay_answers(self, effects: Sequence[Effect]) -> list[Effect]:
        return [dataclasses.replace(one, in_order=True) if isinstance(one, Answer) else one for one in effects]
