"""The integration with Hugging Face Accelerate: ``join`` makes its training loop a peer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossipx.errors import UsageError, how_to_install
from gossipx.integrations.ddp import GroupPeer, PendingJoin, PolicyLike, shard
from gossipx.runtime.figures.scores import Evaluate
from gossipx.runtime.optimizers import OneOrMore

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise UsageError(f"Accelerate cannot be imported ({error}): {how_to_install('accelerate')}") from error

__all__ = ["join", "shard"]

SPLIT = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}
"""Distributed types under which no process holds the whole model, or gossipx cannot access it."""


def check_whole(kind: DistributedType) -> None:
    """Check that each process holds the whole model.

    Raises:
        UsageError: it does not.
    """
    if kind in SPLIT:
        raise UsageError(
            f"{kind.value} splits the model among processes: gossipx needs the whole model in each process, "
            "so use one process or DDP"
        )


def join(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: OneOrMore,
    *,
    peers: str | Path | None = None,
    policy: PolicyLike = None,
    rank: int | None = None,
    evaluate: Evaluate | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> GroupPeer:
    """Join a run from a loop under Accelerate: each update by ``optimizer`` is then an iteration of the run.

    This is :func:`gossipx.join` for Accelerate. Under DDP the processes are one peer. ``accelerator.save_state`` saves
    gossipx's state, too; call ``load_state`` after joining. From then on, both use a directory of this peer alone
    within the given one.

    Args:
        accelerator: the accelerator that prepared the model and the optimizer.
        model, optimizer: as returned by ``accelerator.prepare``; several optimizers as a list.
        peers, policy, rank, config_file, settings: as for :func:`gossipx.join`.
        evaluate: as for :func:`gossipx.join`, of the unwrapped model; called by the main process only.

    Raises:
        UsageError: as :func:`gossipx.integrations.ddp.join`; or the optimizer is not prepared.
    """
    check_whole(accelerator.distributed_type)
    optimizers = []
    for one in [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer:
        if not isinstance(one, AcceleratedOptimizer):
            raise UsageError("this optimizer is not prepared: give the one that accelerator.prepare returned")
        optimizers.append(one.optimizer)
    plain = accelerator.unwrap_model(model)
    joining = PendingJoin(peers, policy, rank, evaluate, config_file, settings, "Accelerate")
    peer = joining.join(plain, optimizers)
    accelerator.register_for_checkpointing(peer)
    _separate(accelerator, joining.own)
    return peer


def _separate(accelerator: Accelerator, own: Callable[[str | os.PathLike[str]], str]) -> None:
    """Make ``save_state`` and ``load_state`` use the peer's own directory within the given one."""
    save, load, project = accelerator.save_state, accelerator.load_state, accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        project.project_dir = own(project.project_dir)

    def save_state(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return save(None if output_dir is None else own(output_dir), *args, **kwargs)

    def load_state(input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if input_dir is None:
            return load(None, *args, **kwargs)
        kept = own(input_dir)
        if not Path(kept).expanduser().exists():
            raise UsageError(f"{kept}: no state of this peer: give load_state the directory that save_state was given")
        return load(kept, *args, **kwargs)

    accelerator.save_state, accelerator.load_state = save_state, load_state
