"""DiLoCo (arXiv:2311.08105) by torchft for bin/bench evidence, if torchft is installed (tested with 0.2.0).

Each peer is a replica group of one process. The lighthouse, which decides on participants, runs in peer 0.

Usage: _evidence_torchft.py FOLDER RANK
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
from _evidence_task import Assignment

LIGHTHOUSE_PORT = 29410
TIMEOUT = timedelta(seconds=600)
"""Longer than a period of the slowest link, so that no peer counts as lost."""
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""The paper's outer optimizer, SGD with Nesterov momentum (section 3.1)."""


def main() -> None:
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    run, rank = Assignment.read(sys.argv[1]), int(sys.argv[2])
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


if __name__ == "__main__":
    main()
