"""The settings of a run with a parameter server, as its roles need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gossipx.server.placement.layout import Layout, Layouts
from gossipx.server.sync_models.clock import Clock
from gossipx.server.sync_models.conditions import SyncModel


@dataclass(frozen=True)
class ServerSettings:
    """The arrangement of workers and servers; the same for all peers of a run.

    Attributes:
        layouts: makes the layout of any list of servers.
        layout: the first layout.
        clock_of: makes a shard's initial clock.
        holders: for each shard, the rank that holds it, followed by the rank of its replica if it has one.
        fixed: why the servers cannot be changed, in one line; empty: they can.
        trains: whether servers train, too.
        overlap: whether a worker pulls from each shard as soon as that has its push (FluentPS, Figure 5b).
        lost: whether workers wait for a lost server or stop.
        plans: for each shard, the sync models that it switches to, each with the clock to switch at.
        rate: the learning rate, for sync models that depend on it; None: unknown.
        every: ticks, or seconds, between two checkpoints of a shard; 0, 0: no checkpoints.
        syncs: each shard's sync model; empty: workers pull after each iteration.
        journals: whether changes of a shard are written to a journal before they are acknowledged.
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
        """For each shard, the rank that holds it at the start of the run."""
        return tuple(holders[0] for holders in self.holders)

    def workers(self, size: int) -> list[int]:
        """Return the ranks that train; they do not change when the servers change."""
        return [rank for rank in range(size) if self.trains or rank not in self.layout.servers]
