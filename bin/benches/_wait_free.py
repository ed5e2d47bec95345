"""What wait-free backpropagation makes of an iteration where moving the model takes as long as computing it.

Beside it what FluentPS's overlap of shards makes of it: Figure 5b, or 5a where no tables are asked for before every
shard has all that was pushed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from _process_pool import SERVERS, WORKERS, Done, Job, ProcessPool, join
from _report import figure
from emulated import EmulatedNetwork, NetworkUnavailableError
from torch import Tensor, nn

RATE = "1gbit"
WIDTH, LAYERS, BATCH = 512, 10, 384
"""Ten matrices of 1 MiB: 10 MB, a bucket each. Four workers' backward takes about 0.1 s on two cores."""
ASLEEP = 0.02
"""Seconds of a layer's forward, and half of its backward, where a device computes: 0.4 s of backward, in which half of
four models reach each server in 0.17 s."""
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
"""Processes that take part, and their settings."""
COMPUTED = {"on these cores": 0.0, "asleep, as a device would": ASLEEP}


def measure(rounds: int, iterations: int) -> Any:
    """Title, headings, rows and figures; over an emulated network, or paced where the system has none.

    Args:
        rounds: in each of which every kind has its turn.
        iterations: that are measured, of each.
    """
    try:
        with EmulatedNetwork(SERVERS + WORKERS, RATE) as net, ProcessPool(hosts=net.hosts) as crew:
            rows, figures = _measure(crew, rounds, iterations, {})
            network = net.describe()
    except NetworkUnavailableError as error:
        with ProcessPool() as crew:
            rows, figures = _measure(crew, rounds, iterations, {"max_rate": RATE})
        network = f"loopback, what each sends paced by --max-rate {RATE}: {error}"
    megabytes = 4 * LAYERS * (WIDTH * WIDTH + WIDTH) / 1e6
    title = (
        f"{LAYERS} linear layers, {megabytes:.1f} MB, {WORKERS} workers, {SERVERS} servers, bsp, medians of"
        f" {rounds} x {iterations} iterations\n{network}"
    )
    return title, ("computed", "gradients leave", "ms an iteration", "of all at the end", "beyond never"), rows, figures


def _measure(crew: ProcessPool, rounds: int, iterations: int, paced: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    rows, figures = [], []
    for computed, asleep in COMPUTED.items():
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind, (ranks, settings) in KINDS.items():
                job = {"iterations": iterations, "asleep": asleep, "settings": {**settings, **paced}}
                seconds[kind] += _times(crew.run("_wait_free:train", ranks, **job))
        median = {kind: statistics.median(values) for kind, values in seconds.items()}
        alone, whole = median["no network (never)"], median["all at the end"]
        for kind, value in median.items():
            rows.append(
                (computed, kind, f"{value * 1e3:.0f}", f"{value / whole:.2f}", f"{(value - alone) * 1e3:+.0f} ms")
            )
            figures.append(figure(f"{computed}, {kind}: an iteration", value, "s", reference=whole))
        shorter = figure(f"{computed}: wait-free, of all at the end", median["wait-free"] / whole, "", goal=1.0)
        figures.append({**shorter, "met": median["wait-free"] < whole})
    return rows, figures


def _times(done: list[Done]) -> list[float]:
    """Of every iteration of every worker: under bsp they go in step."""
    return [seconds for one in done for seconds in one["seconds"]]


# --- in each process ------------------------------------------------------------------------------------


class _Asleep(torch.autograd.Function):
    """Takes as long as a device would be busy with a layer, and leaves this machine's cores alone."""

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
    """Linear layers; ``asleep`` seconds each forward pass of one, twice that a backward pass."""

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
    """A worker's iterations; asleep, its batch is so small that its cores have next to nothing to do."""
    torch.manual_seed(0)
    model = Layers(job["asleep"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    peer = join(job, model, optimizer)
    if peer is None:
        return {"seconds": []}
    batch = torch.randn(4 if job["asleep"] else BATCH, WIDTH)
    seconds = []
    with peer:
        peer.sync()  # what comes first is not part of an iteration
        for _ in range(WARM_UP + job["iterations"]):
            began = time.perf_counter()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[WARM_UP:]}
