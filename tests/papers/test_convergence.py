"""Section VI on a small problem: exchanges make each peer's own model good on all data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import ended, maker
from transcripts import LoggedWorld

PEERS = 4
ITERATIONS = 200
BATCH = 16
RATE = 0.1


def blobs() -> tuple[Tensor, Tensor]:
    """Return four overlapping clouds of 250 points each in the plane, ordered by class."""
    generator = torch.Generator().manual_seed(5)
    centres = torch.tensor([[1.5, 0.0], [0.0, 1.5], [-1.5, 0.0], [0.0, -1.5]])
    classes = torch.arange(PEERS).repeat_interleave(250)
    return centres[classes] + torch.randn(1000, 2, generator=generator), classes


POINTS, CLASSES = blobs()


def shard(rank: int) -> tuple[Tensor, Tensor]:
    """Return a peer's data, far from iid: nine in ten of its points belong to its own class."""
    generator = torch.Generator().manual_seed(rank)
    own = CLASSES.eq(rank).nonzero().flatten()
    others = CLASSES.ne(rank).nonzero().flatten()
    rows = torch.cat([own, others[torch.randperm(len(others), generator=generator)[: len(own) // 9]]])
    return POINTS[rows], CLASSES[rows]


def model() -> nn.Module:
    made = nn.Linear(2, PEERS)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def trainer(points: Tensor, classes: Tensor, module: nn.Module, seed: int) -> Callable[..., None]:
    """Return a function that does one step of SGD on a random batch."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def step(_: object = None) -> None:
        rows = torch.randint(len(points), (BATCH,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(points[rows]), classes[rows]).backward()
        optimizer.step()

    return step


def loss(module: nn.Module) -> float:
    """Return the loss on all data."""
    with torch.no_grad():
        return float(nn.functional.cross_entropy(module(POINTS), CLASSES))


def run(policy: str, **settings: Any) -> list[float]:
    """Return the loss on all data of each peer's own model, at the end of a run without the finish."""
    made = LoggedWorld(0)
    for rank in range(PEERS):
        module = model()
        options = {"module": module, "gradient_step": trainer(*shard(rank), module, rank), "iterations": ITERATIONS}
        made.start(rank, maker(rank, PEERS, policy=policy, finish="none", **options, **settings))
    return [loss(peer.module) for peer in ended(made, ITERATIONS + 100.0).peers.values()]


@pytest.fixture(scope="module")
def never() -> list[float]:
    return run("never")


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        pytest.param("tau:5", {}, marks=pytest.mark.slow),
        ("adaptive:threshold=0.01", {}),
        pytest.param("travel:distance=0.2", {}, marks=pytest.mark.slow),
        pytest.param("tau:5", {"mode": "push"}, marks=pytest.mark.slow),
        ("travel:distance=0.2", {"mode": "push", "weights": "push-sum"}),
        ("adaptive:threshold=0.01", {"mode": "pushpull"}),
    ],
)
def test_exchanging_beats_training_alone(policy: str, mode: dict[str, Any], never: list[float]):
    """Table II, Figure 6: each peer's own model on all data, compared with τ = ∞ and with SGD in one process."""
    module = model()
    step = trainer(POINTS, CLASSES, module, 99)
    for _ in range(ITERATIONS):
        step()
    reference = loss(module)

    exchanging = run(policy, **mode)
    assert all(own < alone for own, alone in zip(exchanging, never, strict=True))
    assert sum(exchanging) / PEERS - reference < (sum(never) / PEERS - reference) / 2
