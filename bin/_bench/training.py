"""Models in training on one thread, and the time that a peer adds to their steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gossipx
from gossipx import Peer
from gossipx.tasks.models import MODELS, build_model


class Span(NamedTuple):
    """A duration in seconds of wall time and of this thread's CPU time, which other processes do not lengthen."""

    wall: float
    core: float


def now() -> Span:
    """Return the current times."""
    return Span(time.perf_counter(), time.thread_time())


def since(began: Span) -> Span:
    """Return the time since ``began``."""
    wall, core = now()
    return Span(wall - began.wall, core - began.core)


def timed(work: Callable[[], object]) -> Span:
    """Return the time that a call takes."""
    began = now()
    work()
    return since(began)


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def built(name: str) -> nn.Module:
    """Return a built-in model with its published size."""
    facts = MODELS[name]
    torch.manual_seed(0)
    return build_model(name, classes=facts.classes, channels=facts.channels, pixels=facts.pixels)


class Training:
    """A classifier that trains on one batch.

    Args:
        module: the model, of ten classes or more.
        inputs: the batch; its labels are random.
        rate, momentum: of SGD; with the default, weights change next to nothing.

    Attributes:
        in_peer: time in the peer's :meth:`~gossipx.Peer.step` of each step since :meth:`join`.
    """

    def __init__(self, module: nn.Module, inputs: Tensor, rate: float = 1e-4, momentum: float = 0.0):
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=momentum)
        self.in_peer: list[Span] = []
        self._inputs, self._labels = inputs, torch.randint(0, 10, (len(inputs),))

    @classmethod
    def of(cls, name: str, batch: int, rate: float = 1e-4) -> Training:
        """Return the training of a built-in model with momentum on random images of its published size."""
        facts = MODELS[name]
        inputs = torch.randn(batch, facts.channels, facts.pixels, facts.pixels)
        return cls(built(name), inputs, rate, momentum=0.9)

    def step(self) -> None:
        """Run forward, backward, and the optimizer's step with its hooks."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(self._inputs), self._labels).backward()
        self.optimizer.step()

    def join(self, hosts: Path, **settings: Any) -> Peer:
        """Join a run, as a user's script does."""
        began = now()

        def begin(*given: Any) -> None:
            nonlocal began
            began = now()

        def end(*given: Any) -> None:
            self.in_peer.append(since(began))

        self.optimizer.register_step_post_hook(begin)  # hooks run in order: this one before the peer's, the other after
        peer = gossipx.join(self.module, self.optimizer, peers=hosts, **settings)
        self.optimizer.register_step_post_hook(end)
        return peer


def idle(model: str, hosts: str, settings: dict[str, Any]) -> None:
    """Join as the second peer, in a process of its own, and do not train: only serve pulls of the model."""
    peer = Training.of(model, 1).join(Path(hosts), rank=1, **settings)
    sys.stdin.read()
    peer.close()
