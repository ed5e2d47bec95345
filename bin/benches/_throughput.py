"""Throughput of pushes and pulls between workers and servers, compared with plain sockets that move the same bytes.

It is measured over loopback, where the processor is the limit; over links, where the network is the limit; and with the
journal that preserves pushes when a server is killed.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from _bench.tables import Table, medians
from _bench.training import seconds
from _process_pool import SERVERS, WORKERS, Done, Job, ProcessPool, join
from _ways import loss_based
from emulated import EmulatedNetwork, NetworkUnavailableError
from torch import nn

from gossipx.memory import Memory

SIZES = (2**16, 2**20, 2**22, 2**24)
"""Sizes of a tensor, in bytes."""
MODEL = 2**25
"""Total bytes of all tensors, half of them on each server."""
CONNECTIONS = 2
"""Connections between a worker and a server: gossipx's number of concurrent requests of one kind."""
GOAL = 0.7
WARM_UP = 3
Ways = dict[str, dict[str, Any]]
"""Settings of gossipx by the name of the configuration."""
TCP: Ways = {"gossipx, TCP": {"transport": "tcp"}}
WAYS: Ways = {**TCP, "gossipx, shared memory": {"transport": "auto"}}
SAFE: Ways = {
    **TCP,
    "with a journal": {"transport": "tcp", "checkpoint_every": 10**6},
}
SAFE_SIZE = 2**22
RATE = "1gbit"
"""Rate of each link."""
HEADINGS = ("tensor", "way", "GB/s, both ways, all workers", "of sockets", "goal")


def measure(
    rounds: int,
    iterations: int,
    sizes: tuple[int, ...] = SIZES,
    model: int = MODEL,
    ways: Ways = WAYS,
    net: EmulatedNetwork | None = None,
) -> Table:
    """Return the table; each round runs all configurations for all sizes of a tensor and ``model`` bytes in all."""
    network = "loopback" if net is None else RATE
    title = (
        f"Push and pull of {model / 2**20:g} MiB by each of {WORKERS} workers, {SERVERS} servers, bsp, medians of"
        f" {rounds} x {iterations} iterations, {network}"
    )
    table = Table(title if net is None else f"{title}\n{net.describe()}", HEADINGS)
    with ProcessPool(hosts=None if net is None else net.hosts) as pool:
        for size in sizes:
            taken: dict[str, list[float]] = {"sockets": [], **{way: [] for way in ways}}
            for _ in range(rounds):
                job = {"size": size, "model": model, "iterations": iterations}
                taken["sockets"] += _times(pool.run(plain, **job))
                for way in ways:
                    settings = {"servers": "0,1", "servers_only": True, "wait_free": False, **ways[way]}
                    taken[way] += _times(pool.run(served, **job, settings=settings))
            _tell(table, network, size, model, medians(taken))
    return table


def measure_links(rounds: int, iterations: int) -> Table:
    """Run :func:`measure` over emulated links of ``RATE``; return no rows if the system cannot emulate links."""
    try:
        with EmulatedNetwork(SERVERS + WORKERS, RATE) as net:
            return measure(rounds, iterations, SIZES[1:], ways=TCP, net=net)
    except NetworkUnavailableError as error:
        return Table(f"Push and pull over links of {RATE}: not measured, {error}", HEADINGS)


def _times(done: list[Done]) -> list[float]:
    """Return the seconds of each iteration for the slowest worker."""
    return [max(one) for one in zip(*(one["seconds"] for one in done if one["seconds"]), strict=True)]


def _tell(table: Table, network: str, size: int, model: int, taken: dict[str, float]) -> None:
    moved = 2 * WORKERS * model / 1e9
    raw = moved / taken["sockets"]
    called = f"{size // 1024} KiB" if size < 2**20 else f"{size // 2**20} MiB"
    table.row(called, "sockets, sendall", f"{raw:.2f}", "", "")
    for way in list(taken)[1:]:
        rate = moved / taken[way]
        goal = GOAL if way in TCP and size >= 2**20 else None
        table.row(called, way, f"{rate:.2f}", f"{rate / raw:.0%}", "" if goal is None else f"{goal:.0%}")
        what = f"{network}, {called} tensors: {way}"
        table.figure(what, rate, "GB/s", reference=raw)
        if goal is not None:
            table.figure(f"{what}, of sockets", rate / raw, "", least=goal)


# --- gossipx, in each process ---------------------------------------------------------------------------


def served(job: Job) -> Done:
    """Run iterations of a worker that computes nothing: push all gradients, and pull all values."""
    model = nn.Module()
    model.tensors = nn.ParameterList(torch.zeros(job["size"] // 4) for _ in range(job["model"] // job["size"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    peer = join(job, model, optimizer)
    if peer is None:
        return {"seconds": []}
    with peer:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)  # arithmetic on denormals would be slower
        peer.sync()  # exclude the first pull from the iterations
        return {"seconds": _timed(optimizer.step, job["iterations"])}


def _timed(once: Callable[[], Any], iterations: int) -> list[float]:
    return [seconds(once) for _ in range(WARM_UP + iterations)][WARM_UP:]


# --- plain sockets, in each process ---------------------------------------------------------------------


def plain(job: Job) -> Done:
    """Move the same bytes between the same number of processes and connections, without checks or arithmetic.

    As under bsp, a server sends nothing before it has received all pushes.
    """
    size = min(job["size"], job["model"] // SERVERS // CONNECTIONS)
    count = job["model"] // SERVERS // CONNECTIONS // size
    rounds = WARM_UP + job["iterations"]
    if job["rank"] < SERVERS:
        _serve(tuple(job["places"][job["rank"]]), size, count, rounds)
        return {"seconds": []}
    connected = [_connect(tuple(place)) for place in job["places"][:SERVERS] for _ in range(CONNECTIONS)]
    buffers = [Memory(size * count).view for _ in connected]
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))  # touches the memory

    def once() -> None:
        _at_once(lambda one: _exchange(connected[one], buffers[one], size), len(connected))

    taken = _timed(once, job["iterations"])
    for one in connected:
        one.close()
    return {"seconds": taken}


def _connect(place: tuple[str, int]) -> socket.socket:
    for _ in range(200):
        connecting = socket.socket()
        loss_based(connecting)
        connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connecting.connect(place)
            return connecting
        except ConnectionRefusedError:  # retry until it listens
            connecting.close()
            time.sleep(0.05)
    raise SystemExit(f"no process listens at {place}")


def _exchange(connected: socket.socket, buffer: memoryview, size: int) -> None:
    """Send and receive all tensors, one at a time."""
    for start in range(0, len(buffer), size):
        connected.sendall(buffer[start : start + size])
    for start in range(0, len(buffer), size):
        _receive(connected, buffer[start : start + size])


def _receive(connected: socket.socket, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        done += connected.recv_into(buffer[done:], 0, socket.MSG_WAITALL)


def _serve(place: tuple[str, int], size: int, count: int, rounds: int) -> None:
    with socket.create_server(place) as listening:
        loss_based(listening)
        connected = [listening.accept()[0] for _ in range(WORKERS * CONNECTIONS)]
    pushed = threading.Barrier(len(connected))

    def serve(one: int) -> None:
        connected[one].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = Memory(size * count).view
        for _ in range(rounds):
            for start in range(0, len(buffer), size):
                _receive(connected[one], buffer[start : start + size])
            pushed.wait()
            for start in range(0, len(buffer), size):
                connected[one].sendall(buffer[start : start + size])
        connected[one].close()

    _at_once(serve, len(connected))


def _at_once(what: Callable[[int], None], count: int) -> None:
    """Call a function for each number in a separate thread."""
    threads = [threading.Thread(target=what, args=(one,)) for one in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
