"""Solvers of a small module, for the tests of Caffe's solver."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gossipx
from gossipx.solver.solver import Solver

BASICS = 'base_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 6\nsolver_mode: CPU\n'
PairExchange = list[tuple[Tensor, Tensor]]


def batches(count: int = 4, seed: int = 0) -> PairExchange:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(8, 3, generator=generator) for _ in range(count)]
    return [(x, (x[:, 0] > 0).long()) for x in inputs]


def module(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def right(output: Tensor, y: Tensor) -> Tensor:
    return (output.argmax(1) == y).float().mean()


class Made:
    """A solver with its file in ``folder``, and its log."""

    def __init__(self, folder: Path, text: str = "", basics: str = BASICS, **options: Any):
        (folder / "solver.prototxt").write_text(basics + text)
        self.stream = io.StringIO()
        usual = {"net": module(), "loss": nn.functional.cross_entropy, "train": batches(), "stream": self.stream}
        self.solver: Solver = gossipx.get_solver(folder / "solver.prototxt", **usual | options)

    @property
    def lines(self) -> list[str]:
        """The log's lines without time and source."""
        return [line.split("] ", 1)[1] for line in self.stream.getvalue().splitlines()]


def weights(solver: Solver) -> Tensor:
    return torch.cat([one.detach().reshape(-1).clone() for one in solver.net.module.parameters()])
