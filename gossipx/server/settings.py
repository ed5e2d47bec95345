"""How a run with a parameter server is put together, as its roles see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gossipx.server.placement.layout import Layout, Layouts
from gossipx.server.sync_models.clock import Clock
from gossipx.server.sync_models.conditions import SyncModel


@dataclass(frozen=True)
class ServerSettings:
    """How workers and servers go together; the same for all peers of a run.

    Attributes:
        layouts: what lies where, by servers.
        layout: the first.
        clock_of: makes a shard's clock, as at the beginning of the run.
        holders: by shard, the rank that holds it, and that of its replica, if it is to have one.
        fixed: why the servers cannot be changed, in one line; empty: they can.
        trains: whether servers train, too.
        overlap: whether a worker pulls from each shard as soon as that has what it pushed (FluentPS, Figure 5b).
        lost: what a worker does while a server does not answer: wait for it, or stop.
        plans: by shard, the sync models that it goes over to, each with the clock from which on.
        rate: the learning rate, for sync models that go by it; None: it is not known.
        every: ticks, or seconds, between two checkpoints of a shard; 0, 0: none.
        syncs: by shard, the sync model; none: workers pull after each iteration.
        journals: what happens to a shard is written down before it is answered.
    """

    layouts: Layouts
    layout: Layout
    clock_of: Callable[[int], Clock]
    holders: tuple[tuple[int, ...], ...]
    fixed: str = ""
    trains: bool = True
    overlap: bool = True
    lost: Literal["wait", "stop"] = "wait"
    plans: tuple[tuple[tuple[int, SyncModel], ...], ...] = ()
    rate: float | None = None
    every: tuple[int, float] = (0, 0.0)
    syncs: tuple[SyncModel, ...] = ()
    journals: bool = False

    @property
    def servers(self) -> tuple[int, ...]:
        """By shard, the rank that holds it as the run begins."""
        return tuple(holders[0] for holders in self.holders)

    def workers(self, size: int) -> list[int]:
        """Ranks that train, whichever peers come to be servers later."""
        return [rank for rank in range(size) if self.trains or rank not in self.layout.servers]
