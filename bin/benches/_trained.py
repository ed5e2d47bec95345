"""A built-in model in training, and how long each step has spent in its peer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import gossipx
from gossipx import Peer
from gossipx.tasks.models import MODELS, build_model


class Span(NamedTuple):
    """Seconds by the clock, and of these those that this thread had a core: what others' work does not make longer."""

    wall: float
    core: float


def now() -> Span:
    """To count from."""
    return Span(time.perf_counter(), time.thread_time())


def since(began: Span) -> Span:
    """What has passed."""
    wall, core = now()
    return Span(wall - began.wall, core - began.core)


def timed(work: Callable[[], object]) -> Span:
    """What it takes."""
    began = now()
    work()
    return since(began)


class Trained:
    """A model that trains on one batch of random images, of the size that it was published for.

    Args:
        name: one of MODELS.
        batch: images a step.

    Attributes:
        in_peer: what each step since :meth:`join` has spent in its peer's :meth:`~gossipx.Peer.step`.
    """

    def __init__(self, name: str, batch: int, rate: float = 1e-4):
        facts = MODELS[name].facts
        torch.manual_seed(0)
        self.module = build_model(name, classes=facts.classes, channels=facts.channels, pixels=facts.pixels)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=rate, momentum=0.9)
        self.in_peer: list[Span] = []
        self._images = torch.randn(batch, facts.channels, facts.pixels, facts.pixels)
        self._labels = torch.randint(0, facts.classes, (batch,))

    def step(self) -> None:
        """Forward, backward, the optimizer's step and what hangs on it."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(self._images), self._labels).backward()
        self.optimizer.step()

    def join(self, hosts: Path, **settings: Any) -> Peer:
        """Become a peer, as a user's script does."""
        began = now()

        def begin(*given: Any) -> None:
            nonlocal began
            began = now()

        def end(*given: Any) -> None:
            self.in_peer.append(since(began))

        self.optimizer.register_step_post_hook(begin)  # hooks come in turn: one before the peer's, one after
        peer = gossipx.join(self.module, self.optimizer, peers=hosts, **settings)
        self.optimizer.register_step_post_hook(end)
        return peer
