"""The status of a peer for people and monitors: its progress, what it waits for, and what it knows of the others."""

from __future__ import annotations

from gossipx.peer.barrier import PURPOSES
from gossipx.peer.role import PeerRole
from gossipx.protocol.messages import ArriveRequest, LeaveRequest, Stage

_AWAITED = {**PURPOSES, Stage.JOINING: "answer", Stage.START: "arrive"}


def status(role: PeerRole, now: float) -> dict[str, object]:
    """Return a peer's status.

    Args:
        now: seconds on the driver's monotonic clock.

    Returns:
        Plain figures by name: ``stage``; ``iteration``; ``retrievals``, ``skipped`` and ``failed`` as the SyncManager
        counts them; ``exchanges_with``, ranks that requests of exchanges are open to; ``waits_for``, ranks that it
        waits for in a stage where peers wait for each other, and ``waits_to``, what for (empty: it does not wait);
        ``joined``, of each peer that joined the run in progress its rank, port, host and name, separated by spaces;
        ``suspects``, ranks that have not answered since a request failed; ``lost`` and ``left``, ranks;
        ``last_exchange``, the rank of the peer with which a model was last exchanged, or None, and
        ``last_exchange_seconds``, how long ago that was.
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
