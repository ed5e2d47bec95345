"""Helpers that use arenas in tests as the drivers do."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gossipx.model.arena import ParameterArena
from gossipx.model.pool import Snapshot
from gossipx.model.receive import Incoming


def mix_in(arena: ParameterArena, model: bytes, share: float) -> float:
    """x ← x + share · (x_j − x), as a driver mixes a pushed model; return ‖x_j − x‖₂, NaN if refused."""
    incoming = Incoming(arena, None)
    incoming.take(0, memoryview(bytearray(model)))
    distance = incoming.norm()
    if math.isfinite(distance):
        distance = arena.exchanged.subtract(incoming.buffer)
        arena.exchanged.commit(incoming.buffer, share)
    incoming.release()
    return distance


def mix(arena: ParameterArena, model: bytes, share: float, base: Snapshot | None = None) -> float:
    """x ← x + share · (x_j − base), as a driver mixes a pulled model; return ‖x_j − base‖₂, NaN if refused.

    Args:
        base: takes ownership of the caller's reference; None: x as of the last boundary.
    """
    incoming = Incoming(arena, base or arena.snapshot())
    incoming.take(0, memoryview(bytearray(model)))
    distance = incoming.norm()
    if math.isfinite(distance):
        arena.exchanged.commit(incoming.buffer, share)
    incoming.release()
    return distance


def adopt(arena: ParameterArena, model: bytes, step: int) -> bool:
    """Replace the whole model, as a driver does on joining."""
    incoming = Incoming(arena, None, whole=True)
    incoming.take(0, memoryview(bytearray(model)))
    taken = arena.adopt(incoming.buffer, step)
    incoming.release()
    return taken


def average(arena: ParameterArena, theirs: ParameterArena, numbers: Iterable[int]) -> None:
    """Average fragments as in a wave of two peers."""
    for number in numbers:
        fragment = arena.fragment(number)
        captured, sent = arena.snapshot(of=fragment), theirs.snapshot(of=theirs.fragment(number))
        incoming = Incoming(arena, None, fragment=number)
        incoming.take(0, sent.buffer.view)
        sent.release()
        assert fragment.merge(incoming.buffer, captured.buffer, 1, 1) >= 0
        merged = fragment.snapshot_of(incoming.give_away(), 0)
        fragment.apply_merged(merged, captured)
        merged.release()
        captured.release()


class Net(nn.Module):
    """A model with every kind of tensor that the layout treats differently."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.body = nn.Linear(5, 7)
        self.head = nn.Linear(7, 2).double()
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("order", torch.randperm(9))
        self.register_buffer("mask", torch.rand(5) > 0.5)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.conv(images)).mean((2, 3))
        return self.head(torch.tanh(self.body(features)).double())


class HalfNet(nn.Module):
    """Trained values, a statistic and a frozen value of one dtype, usually of 16 bits, and a float32 layer."""

    def __init__(self, seed: int, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(40, 33).to(dtype)
        self.norm = nn.BatchNorm1d(33).to(dtype)
        self.head = nn.Linear(33, 4)
        self.frozen = nn.Parameter(torch.randn(5).to(dtype), requires_grad=False)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    module(images).square().sum().backward()
    optimizer.step()


def model_of(arena: ParameterArena, whole: bool = False) -> bytes:
    """Return a model as its bytes on the wire."""
    snapshot = arena.snapshot(whole)
    model = bytes(snapshot.buffer.view)
    snapshot.release()
    return model


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
