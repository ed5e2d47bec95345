"""Slowdown of training steps while another process pulls the model."""

from __future__ import annotations

import functools
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from _remote import HERE, SECONDS, manager
from _report import figure
from torch import nn

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


def _cnn() -> tuple[nn.Module, torch.Tensor]:
    return build_model("lenet", classes=10, channels=1, pixels=28), torch.randn(32, 1, 28, 28)


def _mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(784, 96), nn.ReLU(), nn.Linear(96, 10)), torch.randn(32, 784)


class Training:
    """A model in training that answers pulls, like a peer's role and driver."""

    def __init__(self, made: tuple[nn.Module, torch.Tensor]):
        self._module, self._batch = made
        self._targets = torch.randint(0, 10, (len(self._batch),))
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=1e-4)
        self._loss = nn.CrossEntropyLoss()
        self.arena = ParameterArena(self._module)
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

    def step(self) -> None:
        """Run one step and its boundary."""
        self._optimizer.zero_grad()
        self._loss(self._module(self._batch), self._targets).backward()
        self._optimizer.step()
        self.arena.step_done()

    def mean_step(self) -> float:
        """Return the mean seconds per step of one segment."""
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < SEGMENT:
            self.step()
            steps += 1
        return (time.perf_counter() - began) / steps


def pull(nbytes: int, port: int, share: str) -> None:
    """Pull at the rate in the last line of input, in another process; at each line print the pulls since the last."""
    comm = manager(1, [Address(HERE, port), Address(HERE, 1)], lambda *given: None, "shm" if share else "tcp")
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


def disturbance(name: str, make: Callable[[], Any], share: bool, rounds: int) -> tuple[list[Any], list[Any]]:
    """Return rows and figures of one model; each round runs all rates, and ratios are to no pulls in the same round."""
    training = Training(make())
    comm = training.comm = manager(0, [Address(HERE, 1)] * 2, training.answer, "shm" if share else "tcp")
    nbytes = training.arena.nbytes()
    command = [sys.executable, __file__, str(nbytes), str(comm.address.port), "share" if share else ""]
    puller = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert puller.stdin is not None
    assert puller.stdout is not None

    def turn_to(rate: float) -> int:
        assert puller.stdin is not None
        assert puller.stdout is not None
        print(rate, file=puller.stdin, flush=True)
        return int(puller.stdout.readline())

    seconds: dict[str, list[float]] = {kind: [] for kind in RATES}
    pulls: dict[str, list[float]] = {kind: [] for kind in RATES}
    for number in range(rounds + 1):
        for kind, rate in RATES.items():
            turn_to(rate)
            took = training.mean_step()
            came = turn_to(0.0)
            if number:  # the first round is warm-up
                seconds[kind].append(took)
                pulls[kind].append(came / SEGMENT)
    puller.stdin.close()
    puller.wait(SECONDS)
    comm.close()
    way = "shared memory" if share else "TCP"
    rows, figures = [], []
    for kind in RATES:
        ratios = [one / none - 1 for one, none in zip(seconds[kind], seconds["none"], strict=True)]
        more = statistics.median(ratios)
        goal = GOALS.get(kind)
        shown = [
            name,
            way,
            kind,
            f"{statistics.median(pulls[kind]):.0f}",
            f"{statistics.median(seconds[kind]) * 1e3:.3f}",
        ]
        rows.append((*shown, f"{more:+.1%}", "" if goal is None else f"{goal:.0%}"))
        if goal is not None:
            what = f"{name} over {way}, pulled {kind}: longer steps"
            figures.append(figure(what, more, "of undisturbed", goal=goal, met=more < goal))
    return rows, figures


def served(full: bool) -> tuple[str, tuple[str, ...], list[Any], list[Any]]:
    """Return title, headings, rows and figures."""
    torch.set_num_threads(1)
    rows, figures = [], []
    for name, make in (("lenet, batch 32", _cnn), ("MLP 784-96-10, batch 32", _mlp)):
        for share in (False, True):
            more = disturbance(name, make, share, 15 if full else 7)
            rows += more[0]
            figures += more[1]
    headings = ("model", "way", "pulled", "pulls per second", "ms per step", "longer", "goal")
    return "A training step while another process pulls the model, medians of rounds in turn", headings, rows, figures


if __name__ == "__main__":
    pull(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
