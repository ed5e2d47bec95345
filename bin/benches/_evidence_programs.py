"""The programs of bin/bench evidence: one peer each of the systems that it compares.

Run by itself, this is the script that ``gossipx run`` starts: ``_evidence_programs.py FOLDER``.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _evidence_task import Assignment
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import gossipx as gossip

# --- DistributedDataParallel over gloo: plain, with torch's hooks, and with post-local SGD ------------------

PORT = 29400
ONE_BUCKET_MB = 1000
FULL_STEPS = 2
"""Steps before PowerSGD compresses: the fewest that torch allows with error feedback, for the fewest bytes."""


def ddp(folder: str, rank: int) -> None:
    run = Assignment.read(folder)
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


def _post_local(run: Assignment, wrapped: nn.Module, optimizer: Any) -> Any:
    """Return an optimizer that averages models every period, after a share of the steps with averaged gradients.

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (2020). A machine is one process here, so that after this
    share gradients stay local.
    """
    from torch.distributed.optim import PostLocalSGDOptimizer  # imports much of torch.jit

    first = round(run.options["averaged"] * run.steps)
    own, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, own, first, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=run.options["period"], warmup_steps=first))


# --- averaging of models by hivemind, if it is installed (tested with 1.1.12) -------------------------------

SECONDS = 600.0
"""Maximum seconds of one average."""


def hivemind(folder: str, rank: int) -> None:
    """Find the other peers through hivemind's DHT, match in one group, and average all parameters every period."""
    import hivemind as hive

    run = Assignment.read(folder)
    model, optimizer = run.prepare()
    # One peer after the other connects to all before it. Groups of more than two failed when all knew only the first
    # peer, probably because libp2p does not pass on the emulated network's addresses, reserved for measurements.
    known = run.wait("address", rank)
    dht = hive.DHT(start=True, initial_peers=known, host_maddrs=[f"/ip4/{run.addresses[rank]}/tcp/0"])
    run.tell("address", rank, str(dht.get_visible_maddrs()[0]))
    averager = hive.averaging.DecentralizedAverager(
        [parameter.detach().clone() for parameter in model.parameters()],
        dht,
        prefix="evidence",
        target_group_size=run.peers,
        min_group_size=run.peers,
        start=True,
    )

    def average(done: int) -> None:
        if done % run.options["period"]:
            return
        with torch.no_grad():
            with averager.get_tensors() as kept:
                for mine, parameter in zip(kept, model.parameters(), strict=True):
                    mine.copy_(parameter)
            averager.step(timeout=SECONDS)
            with averager.get_tensors() as kept:
                for mine, parameter in zip(kept, model.parameters(), strict=True):
                    parameter.copy_(mine)

    run.train(rank, model, optimizer, after_step=average)
    run.wait("trained", run.peers)
    averager.shutdown()
    dht.shutdown()


# --- DiLoCo (arXiv:2311.08105) by torchft, if it is installed (tested with 0.2.0) ---------------------------

LIGHTHOUSE_PORT = 29410
TIMEOUT = timedelta(seconds=600)
"""Longer than a period of the slowest link, so that no peer counts as lost."""
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""The paper's outer optimizer, SGD with Nesterov momentum (section 3.1)."""


def torchft(folder: str, rank: int) -> None:
    """Train as a replica group of one process. The lighthouse, which decides on participants, runs in peer 0."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    run = Assignment.read(folder)
    first, own = run.addresses[0], run.addresses[rank]
    model, optimizer = run.prepare()
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    lighthouse = LighthouseServer(bind=f"{first}:{LIGHTHOUSE_PORT}", min_replicas=run.peers) if rank == 0 else None
    store = torch.distributed.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=run.peers,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{first}:{LIGHTHOUSE_PORT}",
        replica_id=f"peer-{rank}",
        hostname=own,
        init_sync=False,  # all start from the same weights
    )
    with DiLoCo(manager, [model], optimizer, outer, sync_every=run.options["period"]):
        run.train(rank, model, optimizer)
    run.wait("trained", run.peers)
    manager.shutdown()
    if lighthouse is not None:
        lighthouse.shutdown()


def gossipx(folder: str) -> None:
    """Run the shared training in a joined peer."""
    run = Assignment.read(folder)
    model, optimizer = run.prepare()
    with gossip.join(model, optimizer) as peer:
        run.train(peer.rank, model, optimizer, before_reading=peer.sync)


if __name__ == "__main__":
    gossipx(sys.argv[1])
