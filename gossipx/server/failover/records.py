"""What is made of what happens to a shard, so that no push that was answered is lost with the shard's holder.

Its decisions follow from what happens to it, in order: so a record of that, and of the gradients, is enough to come to
the same tables from an earlier copy. Such records go to a journal beside the shard's checkpoints, or to a peer that
holds a replica; nothing is answered that tells of what is not yet safe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gossipx.protocol.effects import Answer, Effect
from gossipx.protocol.fields import Happening
from gossipx.protocol.server_messages import GradientRequest, RecordRequest
from gossipx.protocol.table_effects import Record

MOST = 500
"""Entries of one record."""


class Records:
    """Makes records of what happens to one shard; here nothing is done with them.

    Args:
        shard: its index.
        copy: of the shard, that records count from: the epoch of a journal's layout, or the number of a replica's copy.

    Attributes:
        number: of the next record after that copy, to be made or to be followed.
    """

    wanted = False
    """Whether records are made at all."""
    from_checkpoint = False
    """Whether they are of use only with a checkpoint that they count from."""

    def __init__(self, shard: int, copy: int = 0):
        self.shard = shard
        self.copy = copy
        self.number = 0
        self._happened: list[Happening] = []

    def happened(self, *entry: str | int | float) -> None:
        """Something has happened to the shard; it goes with the next record."""
        if self.wanted:
            self._happened.append(entry)

    def pushed(self, push: GradientRequest, ticket: int) -> list[Effect]:
        """A gradient was taken in, which was kept under ``ticket``: make a record of it and all before it."""
        return self._made(push, ticket)

    def made(self, least: int = 1) -> list[Effect]:
        """Make a record of what has happened without a gradient, if it is ``least`` entries."""
        return self._made(None, None) if self.wanted and len(self._happened) >= least else []

    def _made(self, push: GradientRequest | None, ticket: int | None) -> list[Effect]:
        if not self.wanted:
            return []
        happened, self._happened = tuple(self._happened), []
        gradient = (-1, -1, (), ()) if push is None else (push.bucket, push.progress, push.parts, push.settings)
        # How long it is waited for is up to whoever sends it.
        record = RecordRequest(self.shard, self.copy, self.number, happened, *gradient, patience=1.0)
        self.number += 1
        return self.taken(record, ticket)

    def taken(self, record: RecordRequest, ticket: int | None) -> list[Effect]:
        """Do with a record what is to be done."""
        return []

    def safe(self, effects: Sequence[Effect]) -> list[Effect]:
        """Have answers wait until what they tell of is safe."""
        return list(effects)


class Journal(Records):
    """Has records written down before anything is answered; they are of use to no other layout."""

    wanted = from_checkpoint = True

    def taken(self, record: RecordRequest, ticket: int | None) -> list[Effect]:
        return [Record(record, ticket)]

    def safe(self, effects: Sequence[Effect]) -> list[Effect]:
        return [dataclasses.replace(one, in_order=True) if isinstance(one, Answer) else one for one in effects]
