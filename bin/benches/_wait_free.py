"""Effect of wait-free backpropagation on iterations whose communication takes as long as their computation.

The overlap of shards in FluentPS is measured, too: Figure 5b, or Figure 5a, where no tables are pulled before every
shard has received all pushes.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from _bench.tables import Table, medians
from _process_pool import SERVERS, WORKERS, Done, Job, ProcessPool, join
from emulated import EmulatedNetwork, NetworkUnavailableError
from torch import Tensor, nn

RATE = "1gbit"
WIDTH, LAYERS, BATCH = 512, 10, 384
"""Ten matrices of 1 MiB, one bucket each: 10 MB. The backward pass of four workers takes about 0.1 s on two cores."""
ASLEEP = 0.02
"""Seconds of a layer's forward pass, and half of its backward pass, on an emulated device. The backward pass of all
layers takes 0.4 s, and half of four models reach each server in 0.17 s."""
WARM_UP = 3
TRAINERS = list(range(SERVERS, SERVERS + WORKERS))
SERVED = {"servers": "0,1", "servers_only": True, "transport": "tcp"}
ALONE = {"policy": "never", "finish": "none", "transport": "tcp"}
KINDS: dict[str, tuple[list[int] | None, dict[str, Any]]] = {
    "no network (never)": (TRAINERS, ALONE),
    "wait-free": (None, SERVED),
    "wait-free, shards not overlapped": (None, {**SERVED, "overlap": False}),
    "all at the end": (None, {**SERVED, "wait_free": False}),
}
"""Processes of the run, and their settings."""
COMPUTED = {"on these cores": 0.0, "asleep, as a device would": ASLEEP}


def measure(rounds: int, iterations: int) -> Table:
    """Return the table, over an emulated network, or paced if the system has none; each round runs all kinds."""
    table = Table("", ("computed", "gradients leave", "ms per iteration", "of all at the end", "beyond never"))
    try:
        with EmulatedNetwork(SERVERS + WORKERS, RATE) as net, ProcessPool(hosts=net.hosts) as pool:
            _measure(table, pool, rounds, iterations, {})
            network = net.describe()
    except NetworkUnavailableError as error:
        with ProcessPool() as pool:
            _measure(table, pool, rounds, iterations, {"max_rate": RATE})
        network = f"loopback, what each sends paced by --max-rate {RATE}: {error}"
    megabytes = 4 * LAYERS * (WIDTH * WIDTH + WIDTH) / 1e6
    table.title = (
        f"{LAYERS} linear layers, {megabytes:.1f} MB, {WORKERS} workers, {SERVERS} servers, bsp, medians of"
        f" {rounds} x {iterations} iterations\n{network}"
    )
    return table


def _measure(table: Table, pool: ProcessPool, rounds: int, iterations: int, paced: dict[str, Any]) -> None:
    for computed, asleep in COMPUTED.items():
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind, (ranks, settings) in KINDS.items():
                job = {"iterations": iterations, "asleep": asleep, "settings": {**settings, **paced}}
                for done in pool.run(train, ranks, **job):
                    seconds[kind] += done["seconds"]  # of all workers, which run in lockstep under bsp
        found = medians(seconds)
        alone, whole = found["no network (never)"], found["all at the end"]
        for kind, value in found.items():
            beyond = f"{(value - alone) * 1e3:+.0f} ms"
            table.row(computed, kind, f"{value * 1e3:.0f}", f"{value / whole:.2f}", beyond)
            table.figure(f"{computed}, {kind}: an iteration", value, "s", reference=whole)
        table.figure(f"{computed}: wait-free, of all at the end", found["wait-free"] / whole, "", most=1.0)


# --- in each process ------------------------------------------------------------------------------------


class _Asleep(torch.autograd.Function):
    """A function that sleeps like a layer on a device, without use of the CPU."""

    @staticmethod
    def forward(context: Any, values: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        context.seconds = seconds
        time.sleep(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * context.seconds)
        return gradient, None


class Layers(nn.Module):
    """Linear layers, each of which sleeps ``asleep`` seconds in the forward and twice that in the backward pass."""

    def __init__(self, asleep: float):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self._asleep = asleep

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = torch.relu(layer(values))
            if self._asleep:
                values = _Asleep.apply(values, self._asleep)
        return values


def train(job: Job) -> Done:
    """Run a worker's iterations; on the emulated device, the batch is so small that the CPU is nearly idle."""
    torch.manual_seed(0)
    model = Layers(job["asleep"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    peer = join(job, model, optimizer)
    if peer is None:
        return {"seconds": []}
    batch = torch.randn(4 if job["asleep"] else BATCH, WIDTH)
    seconds = []
    with peer:
        peer.sync()  # exclude the first pull from the iterations
        for _ in range(WARM_UP + job["iterations"]):
            began = time.perf_counter()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[WARM_UP:]}
