"""Push-sum: Kempe, Dobra, Gehrke (2003), Protocol Push-Sum; Assran et al. (2019), Stochastic Gradient Push.

Peers make no training steps, so that conservation and the limit can be checked. x = w z; z is the module.
"""

from __future__ import annotations

import itertools
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from seeds import some
from torch import Tensor
from toy import SIZE, TIMEOUT, Point, bound, ended, maker, models, until
from transcripts import LoggedWorld

from gossipx.peer.offers import OfferPhase
from gossipx.peer.pushes import LEAST_WEIGHT
from gossipx.protocol.messages import Stage
from gossipx.sim import Network, SimPeer
from gossipx.topology import Topology


def still(peer: SimPeer) -> None:
    """Make no training step."""


def start(size: int, graph: Topology, network: Network | None = None, seed: int = 0, **options) -> LoggedWorld:
    """Return a run of peers with different initial models that push and do not train."""
    made = LoggedWorld(seed, network)
    given = {"policy": "tau:1", "init": "own", "gradient_step": still, "mode": "push", "weights": "push-sum"}
    paces = options.pop("paces", [1.0 + 0.01 * rank for rank in range(size)])
    for rank in range(size):
        made.start(rank, maker(rank, size, graph=graph, compute=paces[rank], **{**given, **options}))
    return made


def directed_ring(size: int) -> Topology:
    return Topology("directed ring", tuple(((rank + 1) % size,) for rank in range(size)))


def exponential(size: int) -> Topology:
    """Rank r pushes to r + 1, r + 2, r + 4, ... (Assran et al., section 3.1 and Appendix A)."""
    hops = [2**power for power in range((size - 1).bit_length())]
    return Topology("exponential", tuple(tuple(sorted({(r + hop) % size for hop in hops} - {r})) for r in range(size)))


UNBALANCED = Topology("unbalanced", ((1, 2, 3), (0, 2), (0,), (0, 1)))
"""A strongly connected graph where some peers receive more pushes than others."""


def starts(size: int) -> Tensor:
    return torch.stack([Point(rank).x.detach().double() for rank in range(size)])


def under_way(made: LoggedWorld) -> list[tuple[float, Tensor]]:
    """Return the weight and the model of each push that has left its sender and that its receiver has not mixed."""
    found = []  # pushes of live peers
    for rank, peer in made.peers.items():
        for inbound in peer.role.exchange._inbound if peer.down_since is None else []:
            if inbound.phase is OfferPhase.FETCHING or inbound.sender not in made.peers:
                continue
            sender = made.peers[inbound.sender].role
            if sender.incarnation == inbound._incarnation and sender.exchange._settled.get(rank) == inbound._number:
                incoming = peer.driver.models.received[inbound.ticket].incoming
                found.append((inbound.reply.weight, incoming.buffer.vectors[0].double()))
    return found


def mass(made: LoggedWorld) -> tuple[float, Tensor]:
    """Return Σ w and Σ w z, including pushes in flight."""
    own = [(peer.role.weight, peer.weights()) for peer in made.peers.values()]
    parts = own + under_way(made)
    return math.fsum(weight for weight, _ in parts), sum(weight * model for weight, model in parts)  # type: ignore


def conserved(made: LoggedWorld, size: int) -> None:
    weight, total = mass(made)
    assert weight == size  # halves and sums of halves of 1 are exact
    torch.testing.assert_close(total, starts(size).sum(0), rtol=1e-5, atol=1e-5)


# --- mass conservation: Kempe et al., Proposition 2.2 -------------------------------------------------


@examples(40)
@given(
    size=st.integers(2, 6),
    seed=st.integers(0, 10_000),
    paces=st.lists(st.floats(0.5, 2.0), min_size=6, max_size=6),
    blocking=st.booleans(),
    capacity=st.sampled_from([1, 3]),
    loss=st.sampled_from([0.0, 0.03, 0.1]),
    repeat=st.sampled_from([0.0, 0.3]),
    jitter=st.sampled_from([0.0, 1.0]),
    bandwidth=st.sampled_from([4.0 * SIZE, 1e9]),
    cut=st.none() | st.floats(2.0, 60.0),
)
def test_mass_is_conserved_at_every_moment(size, seed, paces, blocking, capacity, loss, repeat, jitter, bandwidth, cut):
    """Σ w = N and Σ w z stay constant, even if messages are lost, repeated and reordered.

    Σ w also stays constant through the finish until the last peer ends; in the finish models become averages.
    """
    network = Network(bandwidth=bandwidth, delay=0.05, loss=loss, repeat=repeat, jitter=jitter)
    everyone = Topology("all", tuple(tuple(set(range(size)) - {rank}) for rank in range(size)))
    options = {"paces": paces, "blocking": blocking, "iterations": 30, "peer_timeout": 20.0, "max_pushes": capacity}
    made = start(size, everyone, network, seed, **options)
    if cut is not None:
        network.cut([0], [1], cut, cut + 3.0, one_way=seed % 2 == 0)
    for moment in itertools.count():
        if made.run(0.37 * moment):
            break
        if any(peer.role.stage >= Stage.AGREE for peer in made.peers.values()):
            assert mass(made)[0] == size
        else:
            conserved(made, size)
    assert math.fsum(peer.role.weight for peer in made.peers.values()) == size
    if not (loss or jitter or cut is not None):
        assert sum(peer.role.sync.retrievals for peer in made.peers.values()) > size


def one_pushes(policy: str, iterations: int, **options: Any) -> LoggedWorld:
    """Return a run of two peers where only 0 pushes, at the time when 1 has requested the first push."""
    made = LoggedWorld(0, Network(delay=0.1))
    options = {"graph": Topology("one way", ((1,), (0,))), "init": "own", "gradient_step": still, **options}
    options |= {"mode": "push", "weights": "push-sum", "iterations": iterations}
    made.start(0, maker(0, 2, policy=policy, **options))
    made.start(1, maker(1, 2, policy="never", **options))
    return until(made, 1, "takes from 0")


@pytest.mark.parametrize("finish", ["consensus", "none"])
@pytest.mark.parametrize("width", [0.3, 1.0, 5.0, 0.9 * TIMEOUT])
@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.fault(26)
def test_what_is_lost_as_training_ends_is_asked_for_again(lost: str, width: float, finish: str):
    """Both finish their last iteration while the receiver asks in vain whether the push is valid.

    The sender has either given half away or refuses to from then on, and answers so while it waits for other peers.
    """
    made = one_pushes("tau:5", 6, finish=finish)
    if lost == "request":
        made.network.cut([1], [0], made.now + 0.15, made.now + 0.15 + width, one_way=True)
    else:
        made.network.cut([0], [1], made.now + 0.25, made.now + 0.25 + width, one_way=True)  # the model has arrived
    ended(made, bound(2, 6))
    assert made.fired["cut"] > 0
    weights = [peer.role.weight for peer in made.peers.values()]
    assert weights == ([0.5, 1.5] if lost == "answer" else [1.0, 1.0])
    if finish == "consensus":
        mean = starts(2).mean(0)
        torch.testing.assert_close(models(made), mean.expand(2, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.fault(5)
def test_a_model_in_doubt_is_kept_aside_while_its_sender_cannot_be_reached(given: bool):
    """Without an answer for peer_timeout, and another push meanwhile; once answered, a valid push is mixed."""
    made = LoggedWorld(0, Network(delay=0.1))
    graph = Topology("two into one", ((2,), (2,), (0, 1)))
    options = {"graph": graph, "init": "own", "gradient_step": still, "mode": "push", "weights": "push-sum"}
    for rank, policy in enumerate(("tau:5", "tau:7", "never")):
        made.start(rank, maker(rank, 3, policy=policy, iterations=100, finish="none", **options))
    until(made, 2, "takes from 0")
    # The model has arrived; with one_way the question whether it is valid arrives too, but not the answer.
    made.network.cut([0], [2], made.now + 0.35, made.now + 4 * TIMEOUT, one_way=given)
    made.run(made.now + 4 * TIMEOUT - 1)
    assert made.peers[2].role.members.others[0].lost
    assert [inbound.sender for inbound in made.peers[2].role.exchange._inbound if inbound.in_doubt] == [0]
    assert len(made.lines(2, "mixes 1")) >= 3 and not made.lines(2, "mixes 0")
    conserved(made, 3)
    made.run(made.now + TIMEOUT)
    assert made.lines(2, "mixes 0")
    conserved(made, 3)
    ended(made, bound(3, 100, waits=2))
    assert math.fsum(peer.role.weight for peer in made.peers.values()) == 3.0


def test_a_sender_that_dies_in_doubt_loses_no_weight_that_it_gave():
    made = one_pushes("tau:5", 40)
    made.network.cut([0], [1], made.now + 0.35, made.now + 2.0, one_way=True)
    made.crash(0, made.now + 1.0)
    ended(made, bound(2, 40))
    assert made.lines(1, "mixes 0")
    assert [peer.role.weight for peer in made.peers.values()] == [0.5, 1.5]
    x = starts(2)
    torch.testing.assert_close(made.peers[1].weights(), (0.5 * x[0] + x[1]) / 1.5, rtol=1e-5, atol=1e-6)


def test_what_was_given_up_is_not_taken():
    """The receiver settles long after the sender has given up: the push is refused, and no mass has moved."""
    made = one_pushes("tau:25", 40)
    made.network.cut([1], [0], made.now + 0.15, made.now + TIMEOUT + 2, one_way=True)  # it cannot ask to settle
    made.run(39.5)
    assert made.fired["cut"] > 0
    assert [peer.role.weight for peer in made.peers.values()] == [1.0, 1.0]
    assert torch.equal(models(made), starts(2))
    assert made.peers[0].role.sync.failed == 1


@pytest.mark.parametrize("number", range(6))
def test_a_crash_takes_what_the_peer_had_and_no_more(number: int):
    """A lost peer takes its own weight and unmixed received halves with it, but no offered or requested ones.

    A half that has arrived at another peer is kept there, even if that peer asks in vain whether it is valid.
    """
    made = start(4, exponential(4), Network(bandwidth=4 * SIZE * 3, delay=0.02), iterations=40)
    made.run(11.0 + 0.13 * number)
    made.crash(2, made.now)
    made.run(made.now + 0.03)  # messages in flight from it arrive
    crashed = made.peers[2].role
    taken = crashed.exchange._inbound
    had = crashed.weight + sum(inbound.reply.weight for inbound in taken if inbound.phase is OfferPhase.SETTLED)
    others = [inbound for rank in (0, 1, 3) for inbound in made.peers[rank].role.exchange._inbound]
    in_doubt = [inbound for inbound in others if inbound.sender == 2 and inbound.phase is OfferPhase.SETTLING]
    had -= sum(inbound.reply.weight for inbound in in_doubt)
    made.run(35.0)
    assert made.fired["crash"] == 1
    del made.peers[2]
    assert mass(made)[0] == pytest.approx(4 - had, abs=1e-12)


def test_a_restarted_peer_weighs_one_again():
    made = start(3, directed_ring(3), iterations=40)
    made.restart(1, 8.5)
    made.run(8.6)
    assert made.peers[1].role.weight == 1.0
    ended(made, bound(3, 40, waits=2))
    assert all(0 < peer.role.weight < 3 for peer in made.peers.values())


def test_a_checkpoint_brings_the_weight_back():
    """A checkpoint at any time restores the weight and model of that time, and nothing later."""
    from gossipx.protocol.events import Restored

    made = start(3, directed_ring(3), iterations=40)
    made.run(7.5)
    peer = made.peers[1]
    state, weight, model = peer.role.sync.state_dict(), peer.role.weight, peer.weights()
    made.run(15.2)
    peer.module.x.data.copy_(model)
    peer.arena.set_boundary(7)
    peer.handle(Restored(7, state, weight))
    assert peer.role.weight == weight and peer.role.exchange.over and peer.role.exchange.captured_ticket is None
    ended(made, bound(3, 60, waits=2))
    assert torch.isfinite(models(made)).all()


# --- convergence to the average: Kempe et al., Theorem 3.1; Assran et al., Theorem 1 --------------------


@pytest.mark.parametrize(
    "graph",
    some(
        [*map(directed_ring, (2, 3, 5)), *map(exponential, (4, 6, 7)), UNBALANCED],
        UNBALANCED,
    ),
    ids=lambda graph: f"{graph.name} {len(graph.neighbours)}",
)
def test_all_come_to_the_average_on_directed_graphs(graph: Topology):
    """z_i → (1/N) Σ x_i on every strongly connected graph, exponentially."""
    size = len(graph.neighbours)
    mean = starts(size).mean(0)
    made = start(size, graph, iterations=120, finish="none")
    apart = []
    for time in (1.0, 11.0, 31.0, 61.0, 116.0):
        made.run(time)
        apart.append(float((models(made) - mean).abs().max()))
    rounding = 1e-6
    assert all(later < max(earlier / 2, rounding) for earlier, later in pairwise(apart)), apart
    assert apart[-1] < rounding < 0.5 < apart[0]
    ended(made, bound(size, 120, 1.1))


def test_without_weights_a_directed_graph_does_not_keep_the_average():
    """Without weights, models do not converge to the mean."""
    mean = starts(4).mean(0)
    away = {}
    for push_sum in (False, True):
        made = start(4, UNBALANCED, iterations=200, weights="push-sum" if push_sum else "uniform", finish="none")
        ended(made, bound(4, 200, 1.1))
        away[push_sum] = float((models(made) - mean).abs().max())
    assert away[True] < 1e-3 < 0.05 < away[False], away


@pytest.mark.parametrize("size", [2, 3, 5, 6])
def test_the_finish_weighs_by_weight(size: int):
    """Σ w z / Σ w is the mean of all initial models, however unequal the weights have become."""
    made = start(size, directed_ring(size), Network(bandwidth=4 * SIZE * 2), iterations=7, policy="random:p=0.6")
    ended(made, bound(size, 7, 1.1, waits=2))
    weights = [peer.role.weight for peer in made.peers.values()]
    assert len(set(weights)) > 1 and math.fsum(weights) == size
    torch.testing.assert_close(models(made), starts(size).mean(0).expand(size, -1), rtol=1e-5, atol=1e-5)


def test_who_is_never_pushed_to_stops_giving_in_time():
    """No peer pushes to 0, so its weight would vanish, and its training with it."""
    graph = Topology("a source", ((1,), (2,), (3,), (2,)))
    made = start(4, graph, iterations=60, finish="none")
    ended(made, bound(4, 60, 1.1))
    assert LEAST_WEIGHT / 2 <= made.peers[0].role.weight < LEAST_WEIGHT
    assert made.peers[0].role.sync.skipped > 20
