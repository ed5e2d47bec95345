"""A built-in model in training, with the time that each step spends in its peer."""

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


class Trained:
    """A model that trains on one batch of random images of its published size.

    Args:
        name: a key of MODELS.
        batch: images per step.
        rate: the learning rate.

    Attributes:
        in_peer: time in the peer's :meth:`~gossipx.Peer.step` of each step since :meth:`join`.
    """

    def __init__(self, name: str, batch: int, rate: float = 1e-4):
        facts = MODELS[name]
        torch.manual_seed(0)
        self.module = build_model(name, classes=facts.classes, channels=facts.channels, pixels=facts.pixels)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=rate, momentum=0.9)
        self.in_peer: list[Span] = []
        self._images = torch.randn(batch, facts.channels, facts.pixels, facts.pixels)
        self._labels = torch.randint(0, facts.classes, (batch,))

    def step(self) -> None:
        """Run forward, backward, and the optimizer's step with its hooks."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(self._images), self._labels).backward()
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
