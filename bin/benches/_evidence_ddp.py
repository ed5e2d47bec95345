"""DistributedDataParallel over gloo for bin/bench evidence: plain, with torch's hooks, and with post-local SGD.

Usage: _evidence_ddp.py FOLDER RANK
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from _evidence_task import Assignment
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

PORT = 29400
ONE_BUCKET_MB = 1000
FULL_STEPS = 2
"""Steps before PowerSGD compresses: the fewest that torch allows with error feedback, for the fewest bytes."""


def main() -> None:
    run, rank = Assignment.read(sys.argv[1]), int(sys.argv[2])
    model, optimizer = run.prepare()
    dist.init_process_group("gloo", f"tcp://{run.addresses[0]}:{PORT}", rank=rank, world_size=run.peers)
    kind = run.options["kind"]
    # PowerSGD starts collectives in callbacks. With two buckets their order differs between processes, which gloo
    # refuses ("Received data size doesn't match expected size"); one bucket holds all of a small model.
    cap = ONE_BUCKET_MB if kind == "powersgd" else None
    # Local SGD communicates only when it averages: no statistics of BatchNorm before each forward pass.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=cap, broadcast_buffers=kind != "local")
    if kind == "local":
        optimizer = _post_local(run, wrapped, optimizer)
    elif kind == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=run.options["rank"], start_powerSGD_iter=FULL_STEPS
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    run.train(rank, wrapped, optimizer)
    dist.barrier()  # so that no peer closes its connections too early
    dist.destroy_process_group()


def _post_local(run: Assignment, wrapped: nn.Module, optimizer: Any) -> PostLocalSGDOptimizer:
    """Return an optimizer that averages models every period, after a share of the steps with averaged gradients.

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (2020). A machine is one process here, so that after this
    share gradients stay local.
    """
    first = round(run.options["averaged"] * run.steps)
    own, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, own, first, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=run.options["period"], warmup_steps=first))


if __name__ == "__main__":
    main()
