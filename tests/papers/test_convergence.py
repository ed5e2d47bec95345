"""Section VI on a small problem: pulls make each peer's own model good on all data, and the finish makes it common."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import ended
from transcripts import LoggedWorld

from gossipx import policies, topology
from gossipx.model.arena import ParameterArena
from gossipx.peer import PeerRole
from gossipx.settings import files
from gossipx.sim import SimPeer
from gossipx.sync import SyncManager

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


def trainer(points: Tensor, classes: Tensor, module: nn.Module, seed: int):
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


def loss_of(weights: Tensor) -> float:
    module = model()
    torch.nn.utils.vector_to_parameters(weights.float(), module.parameters())
    return loss(module)


def run(policy: str, **settings: Any) -> LoggedWorld:
    made = LoggedWorld(0)
    full = topology.topology_from("full", PEERS)

    def start(rank: int) -> None:
        def maker(incarnation: int) -> SimPeer:
            module = model()
            manager = SyncManager(policies.parse(policy), seed=rank)
            given = files.resolve({"peer_timeout": 10, **settings})
            role = PeerRole(rank, PEERS, manager, full, random.Random(rank), incarnation, settings=given)
            step = trainer(*shard(rank), module, rank)
            return SimPeer(role, module, step, ITERATIONS, lambda: 1.0, ParameterArena(module))

        made.start(rank, maker)

    for rank in range(PEERS):
        start(rank)
    return ended(made, ITERATIONS + 100.0)


def before_finish(made: LoggedWorld) -> list[float]:
    """Return the loss on all data of each peer's own model as it entered the finish."""
    return [loss_of(ordered(made, rank)) for rank in range(PEERS)]


def ordered(made: LoggedWorld, rank: int) -> Tensor:
    """Return the weights before the finish, without the arena's padding."""
    peer = made.peers[rank]
    start = peer.arena.sections[0].storage.data_ptr()
    places = [((p.data_ptr() - start) // 4, p.numel()) for p in peer.module.parameters()]
    return torch.cat([made.before_finish[rank][place : place + count] for place, count in places])


@pytest.fixture(scope="module")
def never() -> LoggedWorld:
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
def test_exchanging_beats_training_alone(policy: str, mode: dict[str, Any], never: LoggedWorld):
    """Table II, Figure 6: each peer's own model on all data, compared with τ = ∞ and with SGD in one process."""
    module = model()
    step = trainer(POINTS, CLASSES, module, 99)
    for _ in range(ITERATIONS):
        step()
    reference = loss(module)

    pulling, training_alone = before_finish(run(policy, **mode)), before_finish(never)
    for own, by_itself in zip(pulling, training_alone, strict=True):
        assert own < by_itself
    assert sum(pulling) / PEERS - reference < (sum(training_alone) / PEERS - reference) / 2


def test_the_finish_makes_own_and_averaged_model_one(never: LoggedWorld):
    for made in (never, run("tau:5")):
        mean = torch.stack([ordered(made, rank) for rank in range(PEERS)]).mean(0)
        for peer in made.peers.values():
            got = torch.nn.utils.parameters_to_vector(peer.module.parameters()).detach().double()
            torch.testing.assert_close(got, mean, rtol=1e-5, atol=1e-6)
            assert loss(peer.module) == pytest.approx(loss_of(mean), rel=1e-4)
        assert loss_of(mean) < min(before_finish(made)) * 1.05
