"""Averaging of models by hivemind for bin/bench evidence, if hivemind is installed (tested with 1.1.12).

Peers find each other through hivemind's DHT, match in one group, and average all parameters every period.

Usage: _evidence_hivemind.py FOLDER RANK
"""

from __future__ import annotations

import sys

import torch
from _evidence_task import Assignment

SECONDS = 600.0
"""Maximum seconds of one average."""


def main() -> None:
    import hivemind

    run, rank = Assignment.read(sys.argv[1]), int(sys.argv[2])
    model, optimizer = run.prepare()
    # One peer after the other connects to all before it. Groups of more than two failed when all knew only the first
    # peer, probably because libp2p does not pass on the emulated network's addresses, reserved for measurements.
    known = run.wait("address", rank)
    dht = hivemind.DHT(start=True, initial_peers=known, host_maddrs=[f"/ip4/{run.addresses[rank]}/tcp/0"])
    run.tell("address", rank, str(dht.get_visible_maddrs()[0]))
    averager = hivemind.averaging.DecentralizedAverager(
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


if __name__ == "__main__":
    main()
