"""The processes of a DDP group, which are one peer: what its rank 0 tells the others.

Rank 0 alone gossips. At each step it says in one small message whether another peer's model has entered its weights,
and if so, gives these to the others: DDP spreads gradients and buffers, and no parameters. All of it happens in the
training thread, after the last gradient of one iteration and before the first forward pass of the next, so that it
never crosses what DDP itself sends.
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gossipx.errors import GossipxError

PATIENCE = datetime.timedelta(days=30)
"""How long the others wait for a word of rank 0, which may wait for slow peers at the finish. Its death ends the wait
at once, as its connections close."""


@dataclass(frozen=True)
class GroupStatus:
    """What rank 0 says.

    Attributes:
        rank, size: of the peer among all peers.
        iteration: iterations done.
        entered: whether another model has entered the weights since the last word: they follow.
        exit_code: with which rank 0 ends; None: it goes on.
        reason: why it ends.
    """

    rank: int
    size: int
    iteration: int
    entered: bool = True
    exit_code: int | None = None
    reason: str = ""

    @staticmethod
    def of(error: BaseException) -> GroupStatus:
        """That rank 0 ends, by this error."""
        if isinstance(error, GossipxError):
            code, reason = error.exit_code, str(error)
        elif isinstance(error, SystemExit):
            code, reason = (error.code, "") if isinstance(error.code, int) else (int(error.code is not None), "")
        elif isinstance(error, KeyboardInterrupt):
            code, reason = 130, ""
        else:
            code, reason = 1, f"{type(error).__name__}: {error}"
        return GroupStatus(0, 0, 0, exit_code=code, reason=reason)

    def end(self) -> NoReturn:
        """End as rank 0 does.

        Raises:
            GossipxError: with what rank 0 failed.
            SystemExit: it has left.
        """
        if not self.reason:
            raise SystemExit(self.exit_code)
        error = GossipxError(f"rank 0 of this group ended: {self.reason}")
        error.exit_code = self.exit_code or 1
        raise error


FORM = struct.Struct("<iiq?h500s")


def _packed(status: GroupStatus) -> bytes:
    code = -1 if status.exit_code is None else status.exit_code & 0xFF
    return FORM.pack(status.rank, status.size, status.iteration, status.entered, code, status.reason.encode()[:500])


def _unpacked(data: bytes) -> GroupStatus:
    rank, size, iteration, entered, code, reason = FORM.unpack(data)
    text = reason.rstrip(b"\0").decode(errors="ignore")
    return GroupStatus(rank, size, iteration, entered, None if code < 0 else code, text)


class Group:
    """The processes of torch.distributed's world, or this process alone if there is none.

    Attributes:
        rank: of this process in the group.
        size: processes in it.
    """

    def __init__(self) -> None:
        there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if there else 0
        self.size = dist.get_world_size() if there else 1
        # Words go between processors: one from a GPU would have training wait for it.
        self._gloo = dist.new_group(backend="gloo", timeout=PATIENCE) if self.size > 1 else None

    def tell(self, status: GroupStatus | None) -> GroupStatus:
        """Rank 0 gives a word, the others None; all return it."""
        if self._gloo is None:
            assert status is not None
            return status
        data = torch.zeros(FORM.size, dtype=torch.uint8)
        if status is not None:
            data = torch.frombuffer(bytearray(_packed(status)), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._gloo)
        return status or _unpacked(bytes(data.numpy()))

    def give(self, vectors: Iterable[Tensor]) -> None:
        """All ranks' vectors become those of rank 0."""
        if self._gloo is not None:
            for vector in vectors:
                if vector.numel():
                    # From a GPU by DDP's own way, in whose order it is.
                    dist.broadcast(vector, src=0, group=self._gloo if vector.device.type == "cpu" else None)

    def close(self) -> None:
        """End this process's part. A word that others still wait for does not come: they fail."""
        if self._gloo is not None and dist.is_initialized():
            # Its threads hold Python's objects, and must not outlive the interpreter.
            dist.destroy_process_group(self._gloo)
        self._gloo = None
