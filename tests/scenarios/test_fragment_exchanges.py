"""Exchanges of fragments in virtual time: all come round in turn, and both sides of an exchange move the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modes import PAIRS, PUSH, agree, nothing_left
from toy import SIZE, TIMEOUT, bound, ended, make, models, spread, until, world
from transcripts import LoggedWorld, finish_bytes, trained_bytes

from gossipx.protocol.events import JoinRun, Received, Restored
from gossipx.protocol.messages import (
    NotReadyReply,
    PairRequest,
    PullRequest,
    PushRequest,
    ReferenceRequest,
    ShardRequest,
    ShareRequest,
)
from gossipx.sim import Network, SimPeer

K = 3
PARTS = {"fragments": K}
STILL = {"gradient_step": lambda peer: None, "init": "own"}
"""No training: the weights change by exchanges alone."""
MODES: list[dict[str, Any]] = [{}, PUSH, PAIRS, {"exchange": "waves"}]
every_mode = pytest.mark.parametrize("mode", MODES, ids=["pull", "push", "pushpull", "waves"])
pulls_and_pairs = pytest.mark.parametrize("mode", [{}, PAIRS], ids=["pull", "pushpull"])


def moved(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    """Return the fragments in which two models differ."""
    pieces = enumerate(zip(before.split(SIZE), after.split(SIZE), strict=True), 1)
    return [number for number, (one, other) in pieces if not torch.equal(one, other)]


def again(made: LoggedWorld, what: str) -> None:
    """Run until peer 0 logs ``what`` once more."""
    count = len(made.lines(0, what))
    made.run(1000.0, until=lambda: len(made.lines(0, what)) > count)
    assert len(made.lines(0, what)) > count


@every_mode
@pytest.mark.parametrize("blocking", [False, True])
def test_all_fragments_come_round_and_the_finish_is_of_the_whole_model(mode: dict[str, Any], blocking: bool) -> None:
    made = ended(world(4, policy="tau:2", iterations=30, blocking=blocking, **PARTS, **mode), bound(4, 30, waits=8))
    agree(made, [0, 1, 2, 3])
    nothing_left(made)
    each = 6 * SIZE if "exchange" in mode else 4 * SIZE  # a wave of N moves 2 (N - 1) / N fragments
    for peer in made.peers.values():
        assert len(made.retrievals(peer.rank)) >= K
        received = trained_bytes(peer)
        assert received and received % each == 0, "fragments of 64 bytes each"
        assert finish_bytes(peer) == 2 * K * 4 * SIZE, "two rounds of whole models"


@pulls_and_pairs
def test_an_exchange_moves_the_fragment_exchanged_longest_ago(mode: dict[str, Any]) -> None:
    made = world(2, policy="tau:4", iterations=60, **STILL, **PARTS, **mode)
    seen: list[list[int]] = []
    made.run(0.5)
    for _ in range(K):
        before = made.peers[0].weights()
        again(made, "mixes")
        seen.append(moved(before, made.peers[0].weights()))
    assert seen == [[1], [2], [3]]
    again(made, "mixes")
    made.run(made.now + 0.1)
    assert made.peers[0].role._context.fragment_order.order == [2, 3, 1]


def test_pairs_leave_the_sum_of_each_fragment_unchanged() -> None:
    """Boyd et al., Randomized Gossip Algorithms: what one gains the other loses; the fragments agree in the end."""
    made = world(4, policy="tau:2", iterations=120, finish="none", **STILL, **PARTS, **PAIRS)
    made.run(0.5)
    begun = torch.stack([made.peers[rank].weights() for rank in range(4)])
    ended(made, bound(4, 120, waits=8))
    torch.testing.assert_close(models(made).sum(0), begun.sum(0), rtol=1e-5, atol=1e-5)
    assert spread(models(made)) < 1e-2 < spread(begun)


def test_k_waves_give_all_peers_the_mean_of_the_whole_model() -> None:
    """A wave gives the exact mean of one fragment: its number modulo K."""
    made = world(4, policy="tau:6", iterations=40, finish="none", **STILL, **PARTS, exchange="waves")
    made.run(0.5)
    begun = models(made)
    mean = begun.mean(0)
    for wave in range(1, K + 1):
        before = made.peers[0].weights()
        again(made, "takes the mean in")
        made.run(made.now + 2)
        now = models(made)
        assert moved(before, made.peers[0].weights()) == [wave]
        torch.testing.assert_close(now[:, : wave * SIZE], mean[: wave * SIZE].expand(4, -1), rtol=1e-6, atol=1e-6)
        assert torch.equal(now[:, wave * SIZE :], begun[:, wave * SIZE :])


@pulls_and_pairs
def test_a_fragment_whose_exchange_failed_is_next_again(mode: dict[str, Any]) -> None:
    made = world(2, network=Network(bandwidth=64), policy="tau:6", iterations=60, **STILL, **PARTS, **mode)
    until(made, 0, "mixes")
    made.crash(1, made.now + 4.5)
    made.run(made.now + 3 * TIMEOUT)
    assert made.peers[0].role.sync.failed + made.peers[0].role.sync.skipped > 0
    assert made.peers[0].role._context.fragment_order.order == [2, 3, 1]


@pytest.mark.parametrize("fragment", [0, K + 1, 2**40])
@pytest.mark.parametrize(
    ("mode", "request_"),
    [
        ({}, lambda number: PullRequest(1, 5.0, fragment=number)),
        (PUSH, lambda number: PushRequest(1, 1, number)),
        (PAIRS, lambda number: PairRequest(1, 1, number)),
        ({"exchange": "waves"}, lambda number: ShardRequest(1, (0, 1), number, (1, 1), (), 5.0)),
        ({"exchange": "waves"}, lambda number: ShareRequest(1, (0, 1), number, 0)),
        ({"exchange": "waves"}, lambda number: ReferenceRequest(number, (1, 1))),
    ],
    ids=["pull", "push", "pushpull", "shard", "share", "reference"],
)
def test_another_fragment_than_the_runs_is_refused(mode: dict[str, Any], request_: Any, fragment: int) -> None:
    role = make(0, 2, **PARTS, **mode).role
    role.handle(JoinRun(), 0.0)
    (answer,) = role.handle(Received(1, "key", request_(fragment)), 0.1)
    assert isinstance(answer.reply, NotReadyReply) and "--fragments" in answer.reply.reason


def test_a_run_that_resumes_continues_in_turn() -> None:
    """The order is in the state that checkpoints save; that of another number of fragments is ignored."""
    made = world(2, policy="tau:2", iterations=60, **PARTS)
    until(made, 0, "mixes")
    made.run(made.now + 0.1)
    role = made.peers[0].role
    order, draws = role._context.fragment_order.order, role.training.draw_state()
    assert order != [1, 2, 3]
    sync = role.sync.state_dict()
    same, other = make(0, 2, **PARTS).role, make(0, 2, fragments=2).role
    for one in (same, other):
        one.handle(Restored(3, sync, 1.0, draws), 0.0)
    assert same._context.fragment_order.order == order
    assert other._context.fragment_order.order == [1, 2]


def test_the_first_reference_of_a_fragment_is_that_part_of_the_initial_model() -> None:
    peer = make(0, 2, codec="3lc", **PARTS)
    assert peer.driver.models.codec is not None
    for fragment, values in enumerate(peer.weights().split(SIZE), 1):
        (begun,) = peer.driver.models.codec.of(fragment)._begun or ()
        assert torch.equal(begun.double(), values)


@pulls_and_pairs
def test_choco_mixing_of_fragments(mode: dict[str, Any]) -> None:
    """Without training, the differences of what was sent bring the models together, fragment by fragment."""
    options = {
        "codec": "3lc:sparsity=1",
        "mix": "choco:gamma=0.4",
        "policy": "tau:2",
        "finish": "none",
        **PARTS,
        **mode,
    }
    made = world(3, iterations=240, gradient_step=apart, **options)
    made.run(2.5)
    begun = spread(models(made))
    ended(made, 1000.0)
    assert spread(models(made)) < begun / 5


def apart(peer: SimPeer) -> None:
    """Move the peers apart in the first step, from their common beginning; then no training."""
    if peer.arena.step == 0:
        with torch.no_grad():
            for parameter in peer.module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(peer.rank)))
