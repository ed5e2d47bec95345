"""The status of a peer for people and monitors: its progress, what it waits for, and what it knows of the others."""

from __future__ import annotations

from typing import Any

import msgspec

from gossipx.peer.barrier import PURPOSES
from gossipx.peer.role import PeerRole
from gossipx.protocol.messages import ArriveRequest, LeaveRequest, Stage

_AWAITED = {**PURPOSES, Stage.JOINING: "answer", Stage.START: "arrive"}


class Status(msgspec.Struct):
    """The figures of a peer that ``gossipx status`` shows; a status has further ones, which are passed on as they are.

    Attributes:
        stage: in lower case.
        iteration: number of iterations done.
        retrievals: as the SyncManager counts them.
        waiting: whether the training thread is blocked by gossipx.
        loss: the last one of training; None if it is missing or not finite.
        seconds, blocked_seconds: of training, and of these that the training thread was blocked.
        exchanges_with: ranks that requests of exchanges are open to.
        waits_for: ranks that it waits for in a stage where peers wait for each other.
        waits_to: what it waits for; empty: it does not wait.
        suspects: ranks that have not answered since a request failed.
        lost, left: ranks.
        joined: of each peer that joined the run in progress its rank, port, host and name, separated by spaces.
        last_exchange: rank of the peer with which a model was last exchanged.
        last_exchange_seconds: how long ago that was.
    """

    stage: str
    iteration: int
    retrievals: int
    waiting: bool
    loss: float | None
    seconds: float
    blocked_seconds: float
    exchanges_with: list[int]
    waits_for: list[int]
    waits_to: str
    suspects: list[int]
    lost: list[int]
    left: list[int]
    joined: list[str]
    last_exchange: int | None
    last_exchange_seconds: float | None


def status(role: PeerRole, now: float) -> dict[str, Any]:
    """Return what the role knows of a peer's :class:`Status`, and further figures of the SyncManager.

    Args:
        now: seconds on the driver's monotonic clock.
    """
    members, sync, barrier = role.members, role.sync, role.barrier
    last = members.last_transfer
    others = sorted(members.others.known.items())
    return {
        "stage": role.stage.name.lower(),
        "iteration": role.training.step,
        "retrievals": sync.retrievals,
        "skipped": sync.skipped,
        "failed": sync.failed,
        "exchanges_with": sorted(role.requests.open_ranks_except(ArriveRequest, LeaveRequest) - {role.rank}),
        "waits_for": barrier.absent() if barrier.active else [],
        "waits_to": _AWAITED.get(role.stage, "") if barrier.active else "",
        "suspects": [rank for rank, other in others if other.silent_since is not None and not other.is_out],
        "lost": [rank for rank, other in others if other.lost],
        "left": [rank for rank, other in others if other.stage is Stage.LEFT],
        "joined": [f"{peer.rank} {peer.port} {peer.host} {peer.name}" for peer in role.newcomers.listed],
        "last_exchange": None if last is None else last[0],
        "last_exchange_seconds": None if last is None else now - last[1],
    }
