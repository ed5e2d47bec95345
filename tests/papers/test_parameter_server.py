"""Parameter server runs against the statements of their papers, in virtual time and with real optimizers.

FluentPS, Algorithm 1 and Table III; Modularized Parameter Server, Algorithm 1; Hybrid Approach, Algorithm 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import served
import torch
from seeds import seeds, some
from torch import Tensor
from transcripts import LoggedWorld

from gossipx.assembly.server import Parts
from gossipx.optimizers import LARS
from gossipx.server.sync_models import Drop
from gossipx.sim import Network


def models(made: LoggedWorld) -> Tensor:
    return torch.stack([served.values(peer.module) for peer in made.peers.values()])


OPTIMIZERS: dict[str, served.Optimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": served.sgd,
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.8, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "lars": lambda parameters: LARS(parameters, lr=5.0, weight_decay=0.01),
}


@pytest.mark.parametrize("name", some(OPTIMIZERS, "momentum", "adamw", "lars"))
def test_bsp_is_one_process_on_the_joined_batch(name: str) -> None:
    """N workers on N batches, one optimizer step per tick with the mean: modular paper, Algorithm 1, with a mean."""
    made = served.ended(served.world(4, servers="0,2", optimizer=OPTIMIZERS[name], slow={1: 1.7}))
    expected = served.joined(range(4), optimizer=OPTIMIZERS[name])
    torch.testing.assert_close(models(made), expected.expand(4, -1), rtol=1e-9, atol=1e-9)
    assert served.clocks(made) == {0: served.ITERATIONS, 1: served.ITERATIONS}


@pytest.mark.parametrize("placed", ["range", "greedy", "uniform", "round-robin", "heuristic", "sliced"])
@pytest.mark.parametrize("bucket", some([0, 100, 10**6], 100))
def test_placement_and_buckets_change_no_result(placed: str, bucket: int) -> None:
    options: dict[str, Any] = {"servers": "0,1,2", "placement": placed, "bucket": bucket}
    made = served.ended(served.world(3, **options))
    torch.testing.assert_close(models(made), served.joined(range(3)).expand(3, -1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("only", [True, False])
def test_servers_alone_or_training_and_with_a_barrier_of_all_shards(overlap: bool, only: bool) -> None:
    """FluentPS, Figure 5a and 5b: the same result."""
    made = served.ended(served.world(4, servers="1,3", servers_only=only, overlap=overlap, slow={0: 2.0}))
    workers = [0, 2] if only else range(4)
    torch.testing.assert_close(models(made), served.joined(workers).expand(4, -1), rtol=1e-9, atol=1e-9)


def test_more_servers_than_tables() -> None:
    made = served.ended(served.world(8, servers="0,1,2,3,4,5,6", placement="range"))
    torch.testing.assert_close(models(made), served.joined(range(8)).expand(8, -1), rtol=1e-9, atol=1e-9)


def log_of(made: LoggedWorld) -> list[tuple[int, str]]:
    return [(entry.rank, entry.what) for entry in made.log]


PLAIN: served.Optimizer = OPTIMIZERS["sgd"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"sync": "ssp:staleness=0", "apply": "tick"}, {"sync": "bsp"}),
        ({"sync": "ssp:staleness=inf"}, {"sync": "asp"}),
        ({"sync": "pssp:staleness=2,p=1"}, {"sync": "ssp:staleness=2"}),
        ({"sync": "pssp:staleness=2,p=0"}, {"sync": "asp"}),
        ({"sync": "hybrid:fixed=1"}, {"sync": "asp", "apply": "each"}),
        ({"sync": "hybrid:fixed=4,wait=true"}, {"sync": "bsp"}),
        ({"parts": Parts(sync=Drop(4))}, {"sync": "bsp"}),
    ],
)
@pytest.mark.parametrize("pulls", some(["lazy", "soft"], "lazy"))
@pytest.mark.parametrize("seed", seeds(3))
def test_equal_models(one: dict[str, Any], other: dict[str, Any], pulls: str, seed: int) -> None:
    """Equal clocks, equal pulls answered at equal times, and equal parameters, for plain SGD.

    A push is one message here. If a push of several messages is applied at once, its first parts are applied before the
    rest arrives.
    """
    slow = {0: 1.0, 1: 1.3 + seed / 7, 2: 2.9, 3: 0.6}
    worlds = [
        served.ended(
            served.world(4, seed, Network(delay=0.02), slow, optimizer=PLAIN, pulls=pulls, bucket=10**6, **given)
        )
        for given in (one, other)
    ]
    assert log_of(worlds[0]) == log_of(worlds[1])
    assert served.clocks(worlds[0]) == served.clocks(worlds[1])
    torch.testing.assert_close(models(worlds[0]), models(worlds[1]), rtol=1e-12, atol=1e-12)


def test_asp_applies_each_push_by_its_share_as_it_comes() -> None:
    """FluentPS, line 15: w ← w + g/N. A worker computes with the current values, whatever the others do.

    N counts the training workers: after the first has finished, the other's gradients are unscaled.
    """
    made = served.ended(served.world(2, servers="0", optimizer=PLAIN, sync="asp", slow={1: 2.3}, bucket=10**6))
    module = served.Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    own = {rank: served.Net() for rank in range(2)}
    pushed = dict.fromkeys(range(2), 0)
    for entry in made.log:
        if entry.what.startswith("step "):
            rank = entry.rank
            served.gradients(own[rank], [served.batch(rank, pushed[rank])])
            pushed[rank] += 1
            share = 1 / 2 if rank == 0 or pushed[0] < served.ITERATIONS else 1
            for there, here in zip(module.parameters(), own[rank].parameters(), strict=True):
                there.grad = None if here.grad is None else share * here.grad
            optimizer.step()
            own[rank].load_state_dict(module.state_dict())
    torch.testing.assert_close(models(made), served.values(module).expand(2, -1), rtol=1e-9, atol=1e-9)


def test_hybrid_applies_gradients_at_once_and_with_the_buffer() -> None:
    """Hybrid Approach, Algorithm 1, step 2: of two gradients the first is applied alone, then their mean.

    After the first worker has finished, K is 1.
    """
    sync = "hybrid:fixed=2,at_once=true"
    made = served.ended(served.world(2, servers="0", optimizer=PLAIN, sync=sync, slow={1: 2.3}, bucket=10**6))
    module = served.Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    own = {rank: served.Net() for rank in range(2)}
    pushed = dict.fromkeys(range(2), 0)
    held: list[dict[str, torch.Tensor]] = []
    for entry in made.log:
        if entry.what.startswith("step "):
            rank = entry.rank
            served.gradients(own[rank], [served.batch(rank, pushed[rank])])
            pushed[rank] += 1
            held.append({name: one.grad.clone() for name, one in own[rank].named_parameters() if one.grad is not None})
            completes = len(held) == 2 or (pushed[0] == served.ITERATIONS and rank == 1)
            used = held if completes else held[-1:]
            for name in held[0]:
                module.get_parameter(name).grad = torch.stack([one[name] for one in used]).mean(0)
            held = [] if completes else held
            optimizer.step()
            own[rank].load_state_dict(module.state_dict())
    torch.testing.assert_close(models(made), served.values(module).expand(2, -1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", some(range(4), 2))
@pytest.mark.parametrize("wait", ["true", "false"])
def test_hybrid_grows_from_asynchronous_to_synchronous(wait: str, seed: int) -> None:
    """K grows by the step function: the first gradients are applied alone, the last ones in means of four.

    By the words of Algorithm 1 no worker waits. The last gradients do not always fill the buffer, but are in the final
    values of all peers.
    """
    sync = f"hybrid:step=6,wait={wait}"
    network = Network(delay=0.05, jitter=0.5)
    options: dict[str, Any] = {"optimizer": PLAIN, "sync": sync, "iterations": 20, "bucket": 10**6}
    slow = {1: 1.01, 2: 1.02, 3: 1.03}
    made = served.ended(served.world(4, seed, network, slow, servers="0", **options))
    torch.testing.assert_close(models(made), models(made)[:1].expand(4, -1), rtol=0, atol=0)
    clock = made.peers[0].role.exchange.shards[0].clock  # type: ignore[union-attr]
    assert clock.buffered == 0 and clock.counts.applied == clock.counts.gradients == 4 * 20
    assert wait == "true" or clock.counts.delayed == 0


def test_ssp_limits_the_lead_to_its_staleness() -> None:
    made = served.ended(served.world(3, sync="ssp:staleness=2", pulls="soft", slow={2: 5.0}))
    done = dict.fromkeys(range(3), 0)
    for entry in made.log:
        if entry.what.startswith("step "):
            done[entry.rank] += 1
            # A worker that computes iteration i (from 0) had its pull of i − 1 answered: i − 1 < V_train + s.
            assert done[entry.rank] - 2 < done[2] + 2 or entry.rank == 2
    assert max(peer.blocked_seconds for peer in made.peers.values()) > 10


def test_drop_continues_without_the_slowest() -> None:
    """N_t = 2 of 3: the straggler's late gradients are dropped, and it continues at the clock."""
    made = served.ended(served.world(3, sync="drop:n=2", slow={2: 2.6}))
    exchange = made.peers[0].role.exchange
    shard = exchange.shards[0]  # type: ignore[union-attr]
    assert shard.clock.counts.late > 0
    assert shard.clock.clock >= served.ITERATIONS
    assert made.peers[0].blocked_seconds < 3


@pytest.mark.parametrize(
    "sync",
    [
        "bsp",
        "ssp:staleness=2",
        "drop:n=2",
        "hybrid:step=5",
        "dsps",
        "pssp:staleness=1,p=0.5",
    ],
)
def test_shards_may_have_different_models(sync: str) -> None:
    made = served.ended(served.world(3, servers="0,1", sync=f"{sync}|asp", slow={2: 2.2}))
    assert torch.isfinite(models(made)).all()


def test_settings_of_the_optimizer_follow_the_loop() -> None:
    """A schedule in the training loop sets the learning rate of the servers' steps."""

    optimizers: dict[int, torch.optim.Optimizer] = {}

    def step(peer: Any) -> None:
        served.step(peer)
        for group in optimizers[peer.rank].param_groups:
            group["lr"] = 0.1 / (1 + peer.arena.step)

    def worker(rank: int) -> Any:
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            optimizers[rank] = PLAIN(parameters)
            return optimizers[rank]

        peer = served.make(rank, 2, optimizer=optimizer)
        peer._gradient_step = step
        return peer

    made = served.world(2, optimizer=PLAIN)
    made._makers = {rank: (lambda n, rank=rank: worker(rank)) for rank in range(2)}  # type: ignore[misc]
    served.ended(made)
    module = served.Net()
    for iteration in range(served.ITERATIONS):
        served.gradients(module, [served.batch(rank, iteration) for rank in range(2)])
        torch.optim.SGD(module.parameters(), lr=0.1 / (1 + iteration)).step()
    torch.testing.assert_close(models(made), served.values(module).expand(2, -1), rtol=1e-9, atol=1e-9)
