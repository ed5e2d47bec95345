"""Adaptive Communication for Distributed Deep Learning: each test names the equation or section that it checks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from arenas import mix
from torch import nn
from toy import SIZE, Point, alone, ended, maker, sgd, until, world
from transcripts import LoggedWorld

from gossipx import policies
from gossipx.model.arena import ParameterArena
from gossipx.policies import Observation, Policy
from gossipx.sim import Network, SimPeer
from gossipx.sync import SyncManager, consensus_distance


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def pulls(manager: SyncManager, deltas: list[float]) -> list[int]:
    """Return the iterations at which it pulls, if every pull completes at once."""
    found = []
    for step, delta in enumerate(deltas, 1):
        if manager.step(step, delta):
            manager.requested()
            manager.completed()
            found.append(step)
    return found


# --- Eq. 5 to 7: the delta --------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "rate"), [(torch.optim.SGD, 0.5), (torch.optim.SGD, 0.01), (torch.optim.Adam, 0.01)])
def test_delta_is_the_distance_between_two_iterates(kind: type[torch.optim.Optimizer], rate: float):
    """Eq. 6, for any optimizer; Eq. 5, 7: with plain SGD Δ_t = η‖g_{t−1}‖."""
    module = net()
    arena = ParameterArena(module)
    optimizer = kind(module.parameters(), lr=rate)
    for seed in range(5):
        before = torch.nn.utils.parameters_to_vector(module.parameters()).detach().double()
        optimizer.zero_grad()
        module(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in module.parameters()))
        optimizer.step()
        after = torch.nn.utils.parameters_to_vector(module.parameters()).detach().double()
        delta = arena.step_done()
        assert delta == pytest.approx(float((after - before).norm()), rel=1e-5)
        assert kind is not torch.optim.SGD or delta == pytest.approx(rate * norm, rel=1e-5)


def test_mixing_is_no_part_of_the_delta():
    """Eq. 7: Δ_t measures the optimizer's step only; x_{t−1} is the model after any mixing."""
    module, other = Point(0), Point(1)
    arena, theirs = ParameterArena(module), ParameterArena(other)
    mix(arena, bytes(theirs.snapshot().buffer.view), 0.5)
    before = module.x.detach().double()
    sgd(module)
    assert arena.step_done() == pytest.approx(float((module.x.detach().double() - before).norm()), rel=1e-6)


# --- Eq. 3, 4 and Algorithm 2 -----------------------------------------------------------------------


def test_blocking_run_is_algorithm_2():
    """Return the result of Algorithm 2, line by line in numpy, with the targets j that the run drew in line 4.

    All peers reach an iteration and send their requests at the same time, so each replies with its model of that time.
    At t = 0 no peer mixes, since decisions follow an iteration.
    """
    size, period, last, rate = 4, 3, 20, 0.05
    made = world(size, policy=f"tau:{period}", iterations=last, blocking=True, init="own", finish="none")
    ended(made, 200.0)
    targets = {(rank, pull.step): pull.sender for rank in made.peers for pull in made.retrievals(rank)}
    assert len(targets) == size * (last // period)

    x = np.stack([Point(rank).x.detach().numpy() for rank in range(size)])
    goal = np.stack([Point(rank).target.numpy() for rank in range(size)])
    for t in range(last):
        if t and t % period == 0:  # line 3
            j = [targets[rank, t] for rank in range(size)]  # line 4
            x = (x + x[j]) / 2  # line 5
        x = x - np.float32(rate) * (x - goal)  # line 7
    got = np.stack([made.peers[rank].weights().numpy() for rank in range(size)])
    np.testing.assert_allclose(got, x, rtol=0, atol=1e-6)


def test_overlapped_pull_keeps_the_progress_made_meanwhile():
    """x += ½ (x_j − x_at_request): steps between request and reply are fully kept."""
    made = until(world(2, network=Network(bandwidth=4 * SIZE / 2.5), policy="tau:4", init="own"), 0, "pulls 1")
    peer = made.peers[0]
    base, step = peer.weights(), peer.arena.step
    made.run(made.now + 0.5)  # the request has arrived, and peer 1 has not stepped since
    theirs = made.peers[1].weights()
    until(made, 0, "mixes 1")
    steps = peer.arena.step - step
    assert steps == 3
    progress = alone(0, steps, base)
    torch.testing.assert_close(peer.weights(), progress + (theirs - base) / 2, rtol=0, atol=1e-6)
    assert made.retrievals(peer.rank)[0].distance == pytest.approx(float((theirs - base).norm()), rel=1e-6)


# --- Section V-B: the difference of delta -----------------------------------------------------------


def test_pulls_when_the_difference_of_delta_exceeds_the_threshold():
    """Section V-B: |Δ_t − Δ_r| > threshold, in both directions; Δ_r is 0 before the first retrieval."""
    manager = SyncManager(policies.parse("adaptive:threshold=0.25"))
    #         |Δ−0|  exceeds  equals  within  below   within  above
    deltas = [0.125, 0.5, 0.75, 0.625, 0.125, 0.25, 0.75]
    assert pulls(manager, deltas) == [2, 5, 7]
    assert manager.retrievals == 3
    assert manager.observation is not None and manager.observation.difference == 0.625, "0.75 against 0.125"


def test_relative_threshold_is_a_share_of_the_delta_at_the_retrieval():
    manager = SyncManager(policies.parse("adaptive:threshold=0.5,relative=true"))
    assert pulls(manager, [4.0, 5.0, 6.0, 6.5, 3.25, 3.0]) == [1, 4, 6]


def test_delta_at_retrieval_is_restored_when_the_request_fails():
    manager = SyncManager(policies.parse("adaptive:threshold=0.25"))
    assert pulls(manager, [1.0]) == [1]
    assert manager.step(2, 3.0)
    manager.requested()
    manager.abandoned()
    assert (manager.retrievals, manager.failed) == (1, 1)
    assert not manager.step(3, 1.25), "it is compared with 1.0 again"


def test_way_travelled_goes_on_when_the_request_fails():
    manager = SyncManager(policies.parse("travel:distance=3.5"))
    assert [manager.step(t, 1.0) for t in (1, 2, 3, 4)] == [False, False, False, True]
    manager.requested()
    assert not manager.step(5, 1.0)
    manager.abandoned()
    assert manager.step(6, 1.0), "6 long: nothing is forgotten"
    manager.requested()
    manager.completed()
    assert [manager.step(t, 1.0) for t in (7, 8, 9, 10)] == [False, False, False, True]


@dataclass(frozen=True)
class Watch(Policy):
    """A policy that pulls when 4 divides t, and records its observations."""

    uses_drift: ClassVar[bool] = True
    seen: list[Observation] = field(default_factory=list)

    def decide(self, state: None, observation: Observation) -> tuple[bool, None]:
        self.seen.append(observation)
        return observation.step % 4 == 0, state


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(("mode", "others"), [("pull", "never"), ("push", "tau:3"), ("pushpull", "never")])
def test_drift_is_the_way_that_own_steps_have_led(mode: str, others: str, blocking: bool):
    """‖x_t − x_r‖, with x_r the model at the request plus the mixed change, is the sum of own steps only.

    x_r is the model at the push or at the begin of the pair, too; models that others push then move x and x_r alike.
    """
    policy, ways = Watch(), list[torch.Tensor]()

    def step(peer: SimPeer) -> None:
        before = peer.weights()
        sgd(peer.module)
        ways.append(peer.weights() - before)

    made = LoggedWorld(0, Network(bandwidth=4 * SIZE / 1.5))
    options = {"blocking": blocking, "init": "own", "mode": mode}
    made.start(1, maker(1, 2, policy=others, **options))
    made.start(0, maker(0, 2, policy=policy, gradient_step=step, **options))
    ended(made, 200.0)
    assert len(made.retrievals(0)) >= 3
    for seen in policy.seen:  # requests are sent after steps 4, 8, ...; if overlapped, models arrive two steps later
        began = (seen.step - 1) // 4 * 4
        assert seen.drift == pytest.approx(float(sum(ways[began : seen.step]).norm()), rel=1e-4)


def test_drift_goes_on_from_the_earlier_retrieval_when_the_request_fails():
    made = LoggedWorld(0)
    policy = Watch()
    made.start(1, maker(1, 2, policy="never", init="own"))
    made.start(0, maker(0, 2, policy=policy, init="own"))
    made.run(6.5)
    made.network.cut([0], [1], 6.5)  # the request after step 8 fails; that after step 4 did not
    made.run(11.5)
    assert made.fired["cut"] > 0 and made.peers[0].role.sync.failed == 1
    assert made.peers[0].role.sync.in_flight is False
    assert policy.seen[-1].drift == pytest.approx(made.peers[0].driver.captures.reference.distance(), rel=1e-6)
    assert policy.seen[-1].drift > policy.seen[7].drift, "it counts on from step 4"


# --- Eq. 8: the distance to the averaged models -----------------------------------------------------


@pytest.mark.parametrize("peers", [2, 3, 4, 9, 100])
def test_consensus_distance_is_exact_over_all_pairs(peers: int):
    """Eq. 8: over all j and i ≠ j the estimate of D² is exactly the mean of D_j², so its square is unbiased."""
    models = np.random.default_rng(peers).normal(size=(peers, 7)) * np.linspace(0.1, 3, peers)[:, None]
    true = np.mean(np.sum((models - models.mean(0)) ** 2, axis=1))
    pairs = [float(np.sum((models[i] - models[j]) ** 2)) for i, j in itertools.permutations(range(peers), 2)]
    assert consensus_distance(pairs, peers) ** 2 == pytest.approx(true, rel=1e-12)
    each = [consensus_distance([pair], peers) ** 2 for pair in pairs]
    assert np.mean(each) == pytest.approx(true, rel=1e-12)
    assert math.isnan(consensus_distance([], peers))
