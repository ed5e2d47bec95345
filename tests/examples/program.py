# program.py
"""Code 4.5: a user program with the parts of Code 4.1 to 4.4."""

import torch
from round_robin import RoundRobinPlacement
from stale import SSPConsistency
from top_percent import TopServerStorage, TopTransmitBuffer

import gossipx
from gossipx.parts import Parts, Storages

MAX_ITERATION = 600
parts = Parts(
    placement=RoundRobinPlacement(),
    sync=SSPConsistency(staleness=3),
    storages=Storages(transmit=TopTransmitBuffer, server=TopServerStorage),
)

with gossipx.initialize(parts=parts) as server:
    weight = server.create_table([20, 10], name="weight")
    bias = server.create_table([10], name="bias")
    server.start()
    batches = torch.Generator().manual_seed(server.peer.rank)
    for _ in range(MAX_ITERATION):
        x = torch.randn(32, 20, generator=batches)
        error = x @ server.sync(weight) + server.sync(bias) - x.cumsum(1)[:, ::2]
        server.update(weight, x.T @ error / 32)
        server.update(bias, error.mean(0))
        server.clock()

wrong = server.values(weight) - torch.ones(20, 20).triu()[:, ::2]
print(f"weights are off by {float(wrong.abs().max()):.4f}")
