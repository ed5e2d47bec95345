"""One line that makes a loop under Accelerate a peer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossipx.errors import UsageError
from gossipx.integrations.ddp import GroupPeer, Joining, PolicyLike, shard

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise UsageError(f"Accelerate cannot be imported ({error}): pip install 'gossipx[accelerate]'") from error

__all__ = ["join", "shard"]

SPLIT = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}
"""Ways to train in which no process holds the whole model, or none that gossipx can reach."""


def check_whole(kind: DistributedType) -> None:
    """See that each process holds the whole model.

    Raises:
        UsageError: it does not.
    """
    if kind in SPLIT:
        raise UsageError(
            f"{kind.value} splits the model among processes: gossipx takes one process or DDP, "
            "where each process holds all of it"
        )


def join(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    peers: str | Path | None = None,
    policy: PolicyLike = None,
    rank: int | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> GroupPeer:
    """Make a loop under Accelerate a peer: from here on each update by ``optimizer`` is an iteration of the run.

    As :func:`gossipx.join`. Under DDP the processes are one peer. ``accelerator.save_state`` keeps gossipx's state,
    too; ``load_state`` comes after joining.

    Args:
        accelerator: has prepared what follows.
        model, optimizer: as ``accelerator.prepare`` gave them.
        peers, policy, rank, config_file, settings: as for :func:`gossipx.join`.
        evaluate: gives the accuracy of the unwrapped model, from 0 to 1; called by the main process alone.

    Raises:
        UsageError: as :func:`gossipx.integrations.ddp.join`; or the optimizer is not prepared.
    """
    check_whole(accelerator.distributed_type)
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise UsageError("join what accelerator.prepare gave: this optimizer is not prepared")
    plain = accelerator.unwrap_model(model)
    peer = Joining(peers, policy, rank, evaluate, config_file, settings).join(plain, optimizer.optimizer)
    peer.copy_state()
    accelerator.register_for_checkpointing(peer)
    return peer
