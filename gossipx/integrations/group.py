"""Communication inside a DDP group whose processes are one peer: rank 0 broadcasts its status and its weights.

Only rank 0 exchanges models with other peers. After each step it broadcasts a small status message. If a received model
was mixed, it broadcasts the weights, too, since DDP synchronizes gradients and buffers but not parameters. All of this
happens in the training thread between the last gradient of an iteration and the next forward pass, so that it does not
interfere with DDP's own collectives.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from gossipx.errors import GossipxError, printable

TIMEOUT = datetime.timedelta(days=30)
"""How long the other ranks wait for rank 0's status: rank 0 may wait for slow peers in the finish. If it dies, its
connections close, and the wait ends at once."""
LONGEST = 500
"""Characters of the reason for an end that are shared."""
MOST = 4096
"""Bytes of a status in JSON, filled up with spaces: all ranks broadcast equally many."""


class GroupStatus(msgspec.Struct, frozen=True):
    """The status that rank 0 broadcasts.

    Attributes:
        rank: the peer's rank in the run.
        size: number of peers in the run.
        iteration: iterations done.
        weights_follow: whether rank 0 broadcasts its weights next: a received model was mixed since the last status.
        exit_code: the exit code of rank 0, which is ending; None: it continues.
        reason: why it ends; empty if it left normally.
        asked: whether a signal has asked rank 0 to stop.
    """

    rank: int
    size: int
    iteration: int
    weights_follow: bool = True
    exit_code: int | None = None
    reason: str = ""
    asked: bool = False

    @staticmethod
    def of(error: BaseException) -> GroupStatus:
        """Return the status of a rank 0 that ends with this error."""
        if isinstance(error, GossipxError):
            code, reason = error.exit_code, str(error)
        elif isinstance(error, SystemExit):
            code, reason = (error.code, "") if isinstance(error.code, int) else (int(error.code is not None), "")
        elif isinstance(error, KeyboardInterrupt):
            code, reason = 130, ""
        else:
            code, reason = 1, f"{type(error).__name__}: {error}"
        return GroupStatus(0, 0, 0, exit_code=code & 0xFF, reason=printable(reason, LONGEST))

    def end(self) -> NoReturn:
        """End this process like rank 0.

        Raises:
            GossipxError: rank 0 failed; with its reason.
            SystemExit: rank 0 exited without an error message.
        """
        if not self.reason:
            raise SystemExit(self.exit_code)
        error = GossipxError(f"rank 0 of this group ended: {self.reason}")
        error.exit_code = self.exit_code or 1
        raise error


def rank_in_group() -> int:
    """Return the rank of this process in torch.distributed's world; 0 if that is not initialized."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class WorldGroup:
    """The processes of torch.distributed's world; only this process if torch.distributed is not initialized.

    Attributes:
        rank: the rank of this process in the group.
        size: number of processes in the group.
    """

    def __init__(self) -> None:
        self.rank = rank_in_group()
        self.size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        # The status is sent between CPUs: reading it from a GPU would synchronize with the training kernels.
        self._gloo = dist.new_group(backend="gloo", timeout=TIMEOUT) if self.size > 1 else None

    def share(self, status: GroupStatus | None) -> GroupStatus:
        """Broadcast rank 0's status, and return it on all ranks. The other ranks pass None."""
        if self._gloo is None:
            assert status is not None
            return status
        data = bytearray(MOST) if status is None else bytearray(msgspec.json.encode(status).ljust(MOST))
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0, group=self._gloo)
        return status or msgspec.json.decode(data, type=GroupStatus)

    def broadcast(self, vectors: Iterable[Tensor]) -> None:
        """Overwrite the vectors on all ranks with those of rank 0."""
        if self._gloo is not None:
            for vector in vectors:
                if vector.numel():
                    # GPU vectors use the default group, so that they are ordered with DDP's collectives.
                    dist.broadcast(vector, src=0, group=self._gloo if vector.device.type == "cpu" else None)

    def close(self) -> None:
        """Leave the group. Ranks that still wait for a status from this process fail."""
        if self._gloo is not None and dist.is_initialized():
            # Its threads use Python objects and must end before the interpreter does.
            dist.destroy_process_group(self._gloo)
        self._gloo = None
