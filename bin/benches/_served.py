"""Slowdown of training steps while another process pulls the model."""

from __future__ import annotations

import functools
import random
import statistics
import sys
import threading
import time
from collections.abc import Hashable

import torch
from _bench.cli import Given
from _bench.processes import SECONDS, Spawned
from _bench.tables import Table
from _bench.training import Training
from _ways import HERE, manager
from torch import Tensor, nn

from gossipx.comm import CommManager
from gossipx.memory import Memory
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import Snapshot
from gossipx.peer.membership import Membership, Requests
from gossipx.peer.serving import Outgoing, Serving
from gossipx.protocol.effects import Answer, Capture, Effect, Forget
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import PullRequest, Request
from gossipx.settings.modes import HasServing
from gossipx.tasks.models import build_model
from gossipx.topology import topology_from
from gossipx.topology.schedules import RandomNeighbour
from gossipx.transports import Address
from gossipx.wire import Bytes

RATES = {"none": 0.0, "10 a second": 10.0, "back to back": float("inf")}
GOALS = {"10 a second": 0.01, "back to back": 0.05}
SEGMENT = 1.5
"""Seconds of training at one rate of pulls before the next rate."""
HEADINGS = ("model", "way", "pulled", "pulls per second", "ms per step", "longer", "goal")


class Served:
    """A model in training that answers pulls, like a peer's role and driver."""

    def __init__(self, module: nn.Module, inputs: Tensor):
        self.training = Training(module, inputs)
        self.arena = ParameterArena(module)
        self.comm: CommManager | None = None
        settings = HasServing()
        members = Membership(0, 2, RandomNeighbour(topology_from("full", 2)), SECONDS, random.Random(0))
        self._serving = Serving(settings.max_served, settings.serve_share, Requests(), Outgoing(members))
        self._deciding = threading.Lock()
        self._held: dict[int, Snapshot] = {}

    def answer(self, sender: int, key: Hashable, request: Request, upload: object) -> None:
        """Answer a pull, which uploads nothing."""
        with self._deciding:
            self._do(self._serving.requested(Received(sender, key, request), self.arena.step, time.monotonic(), True))

    def _answered(self, key: Hashable, whole: bool) -> None:
        with self._deciding:
            self._do(self._serving.answered(Answered(key, whole)))

    def _do(self, effects: list[Effect]) -> None:
        assert self.comm is not None
        for effect in effects:
            match effect:
                case Capture(ticket):
                    self._held[ticket] = self.arena.snapshot()
                case Forget(ticket):
                    self._held.pop(ticket).release()
                case Answer(key, reply, deadline):
                    held = None if effect.captured is None else self._held[effect.captured].source
                    done = functools.partial(self._answered, key)
                    self.comm.answer(key, reply, payload=held, deadline=deadline, done=done, begins=effect.begins)

    def mean_step(self, lasting: float) -> float:
        """Return the mean seconds per step, with its boundary, of one segment."""
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < lasting:
            self.training.step()
            self.arena.step_done()
            steps += 1
        return (time.perf_counter() - began) / steps


def pull(nbytes: int, port: int, way: str) -> None:
    """Pull at the rate in the last line of input, in another process; at each line print the pulls since the last."""
    comm = manager(1, [Address(HERE, port), Address(HERE, 1)], lambda *given: None, way)
    buffer = Bytes(Memory(nbytes).view)
    rate, count = [0.0], [0]
    changed, over = threading.Event(), threading.Event()

    def work() -> None:
        done = threading.Event()
        while not over.is_set():
            changed.clear()
            now = rate[0]
            if not now:
                changed.wait()
                continue
            done.clear()
            deadline = time.monotonic() + SECONDS
            comm.request(0, PullRequest(1, SECONDS), deadline=deadline, payload=buffer, done=lambda reply: done.set())
            done.wait(SECONDS)
            count[0] += 1
            if now != float("inf"):
                changed.wait(1 / now)

    threading.Thread(target=work, daemon=True).start()
    for line in sys.stdin:
        print(count[0], flush=True)
        rate[0], count[0] = float(line), 0
        changed.set()
    over.set()
    changed.set()
    comm.close()


def served(given: Given) -> Table:
    """Return the table of steps; each round runs all rates, and ratios are to no pulls in the same round."""
    lenet = build_model("lenet", classes=10, channels=1, pixels=28), torch.randn(32, 1, 28, 28)
    mlp = nn.Sequential(nn.Linear(784, 96), nn.ReLU(), nn.Linear(96, 10)), torch.randn(32, 784)
    table = Table("A training step while another process pulls the model, medians of rounds in turn", HEADINGS)
    for name, (module, inputs) in {"lenet, batch 32": lenet, "MLP 784-96-10, batch 32": mlp}.items():
        for way, kind in {"TCP": "tcp", "shared memory": "shm"}.items():
            if not given.smoke or (module is mlp[0] and kind == "tcp"):
                _measure(table, name, way, kind, Served(module, inputs), given)
    return table


def _measure(table: Table, name: str, way: str, kind: str, serving: Served, given: Given) -> None:
    comm = serving.comm = manager(0, [Address(HERE, 1)] * 2, serving.answer, kind)
    lasting = given.of(0.05, SEGMENT, SEGMENT)
    seconds: dict[str, list[float]] = {rate: [] for rate in RATES}
    pulls: dict[str, list[float]] = {rate: [] for rate in RATES}
    with Spawned(pull, serving.arena.nbytes(), comm.address.port, kind) as puller:
        for number in range(given.of(1, 7, 15) + 1):
            for called, rate in RATES.items():
                puller.ask(rate)
                took = serving.mean_step(lasting)
                came = int(puller.ask(0.0))
                if number:  # the first round is warm-up
                    seconds[called].append(took)
                    pulls[called].append(came / lasting)
    comm.close()
    for called in RATES:
        ratios = [one / none - 1 for one, none in zip(seconds[called], seconds["none"], strict=True)]
        more, goal = statistics.median(ratios), GOALS.get(called)
        came, step = statistics.median(pulls[called]), statistics.median(seconds[called]) * 1e3
        table.row(name, way, called, f"{came:.0f}", f"{step:.3f}", f"{more:+.1%}", f"{goal:.0%}" if goal else "")
        if goal is not None:
            table.figure(f"{name} over {way}, pulled {called}: longer steps", more, "of undisturbed", most=goal)
