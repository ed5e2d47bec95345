"""Parameter server runs against the statements of their papers, in virtual time and with real optimizers.

FluentPS, Algorithm 1 and Table III; Modularized Parameter Server, Algorithm 1; Hybrid Approach, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import served
import torch
from seeds import some
from served import models
from torch import Tensor
from transcripts import LoggedWorld

from gossipx.optimizers import LARS
from gossipx.sim import Network

OPTIMIZERS: dict[str, served.Optimizer] = {
    "sgd": served.plain,
    "momentum": served.sgd,
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.8, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "lars": lambda parameters: LARS(parameters, lr=5.0, weight_decay=0.01),
    **({"muon": served.muon} if hasattr(torch.optim, "Muon") else {}),
}


@pytest.mark.parametrize("name", some(OPTIMIZERS, "momentum", "adamw", "lars", "muon"))
def test_bsp_is_one_process_on_the_joined_batch(name: str) -> None:
    """N workers on N batches, one optimizer step per tick with the mean: modular paper, Algorithm 1, with a mean."""
    made = served.ended(served.world(4, servers="0,2", optimizer=OPTIMIZERS[name], slow={1: 1.7}))
    expected = served.joined(range(4), optimizer=OPTIMIZERS[name])
    torch.testing.assert_close(models(made), expected.expand(4, -1), rtol=1e-9, atol=1e-9)
    assert served.clocks(made) == {0: served.ITERATIONS, 1: served.ITERATIONS}


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


Gradients = dict[str, Tensor]


def followed(made: LoggedWorld, used: Callable[[int, Gradients, dict[int, int]], Gradients]) -> Tensor:
    """Return the values after the steps of a run's log, carried out one after the other in one process.

    Args:
        made: a run in which each push is applied as it comes.
        used: returns the gradients to apply, of a worker, those of its batch, and how many batches each has done.
    """
    module, own = served.Net(), {rank: served.Net() for rank in made.peers}
    optimizer = served.plain(module.parameters())
    done = dict.fromkeys(own, 0)
    for entry in made.log:
        if entry.what.startswith("step "):
            rank = entry.rank
            served.gradients(own[rank], [served.batch(rank, done[rank])])
            done[rank] += 1
            found = {name: one.grad.clone() for name, one in own[rank].named_parameters() if one.grad is not None}
            for name, gradient in used(rank, found, done).items():
                module.get_parameter(name).grad = gradient
            optimizer.step()
            own[rank].load_state_dict(module.state_dict())
    return served.values(module)


def test_asp_applies_each_push_by_its_share_as_it_comes() -> None:
    """FluentPS, line 15: w ← w + g/N. A worker computes with the current values, whatever the others do.

    N counts the training workers: after the first has finished, the other's gradients are unscaled.
    """

    def share(rank: int, found: Gradients, done: dict[int, int]) -> Gradients:
        both = rank == 0 or done[0] < served.ITERATIONS
        return {name: one / (2 if both else 1) for name, one in found.items()}

    made = served.ended(served.world(2, servers="0", optimizer=served.plain, sync="asp", slow={1: 2.3}, bucket=10**6))
    torch.testing.assert_close(models(made), followed(made, share).expand(2, -1), rtol=1e-9, atol=1e-9)


def test_hybrid_applies_gradients_at_once_and_with_the_buffer() -> None:
    """Hybrid Approach, Algorithm 1, step 2: of two gradients the first is applied alone, then their mean.

    After the first worker has finished, K is 1.
    """
    held: list[Gradients] = []

    def alone_or_mean(rank: int, found: Gradients, done: dict[int, int]) -> Gradients:
        held.append(found)
        completes = len(held) == 2 or (done[0] == served.ITERATIONS and rank == 1)
        used = held[:] if completes else [found]
        if completes:
            held.clear()
        return {name: torch.stack([one[name] for one in used]).mean(0) for name in found}

    options: dict[str, Any] = {"optimizer": served.plain, "sync": "hybrid:fixed=2,at_once=true"}
    made = served.ended(served.world(2, servers="0", slow={1: 2.3}, bucket=10**6, **options))
    torch.testing.assert_close(models(made), followed(made, alone_or_mean).expand(2, -1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", some(range(4), 2))
@pytest.mark.parametrize("wait", ["true", "false"])
def test_hybrid_grows_from_asynchronous_to_synchronous(wait: str, seed: int) -> None:
    """K grows by the step function: the first gradients are applied alone, the last ones in means of four.

    By the words of Algorithm 1 no worker waits. The last gradients do not always fill the buffer, but are in the final
    values of all peers.
    """
    sync = f"hybrid:step=6,wait={wait}"
    network = Network(delay=0.05, jitter=0.5)
    options: dict[str, Any] = {"optimizer": served.plain, "sync": sync, "iterations": 20, "bucket": 10**6}
    slow = {1: 1.01, 2: 1.02, 3: 1.03}
    made = served.ended(served.world(4, seed, network, slow, servers="0", **options))
    torch.testing.assert_close(models(made), models(made)[:1].expand(4, -1), rtol=0, atol=0)
    clock = served.shards(made)[0].clock
    assert clock.buffered == 0 and clock.counts.applied == clock.counts.gradients == 4 * 20
    assert wait == "true" or clock.counts.delayed == 0


def test_ssp_limits_the_lead_to_its_staleness() -> None:
    made = served.ended(served.world(3, sync="ssp:staleness=2", pulls="soft", slow={2: 5.0}))
    served.check_lead(made, 2, slowest=2)
    assert max(peer.blocked_seconds for peer in made.peers.values()) > 10


def test_drop_continues_without_the_slowest() -> None:
    """N_t = 2 of 3: the straggler's late gradients are dropped, and it continues at the clock."""
    made = served.ended(served.world(3, sync="drop:n=2", slow={2: 2.6}))
    clock = served.shards(made)[0].clock
    assert clock.counts.late > 0
    assert clock.clock >= served.ITERATIONS
    assert made.peers[0].blocked_seconds < 3


def test_settings_of_the_optimizer_follow_the_loop() -> None:
    """A schedule in the training loop sets the learning rate of the servers' steps."""

    optimizers: dict[int, torch.optim.Optimizer] = {}

    def step(peer: Any) -> None:
        served.step(peer)
        for group in optimizers[peer.rank].param_groups:
            group["lr"] = 0.1 / (1 + peer.arena.step)

    def worker(rank: int) -> Any:
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            optimizers[rank] = served.plain(parameters)
            return optimizers[rank]

        peer = served.make(rank, 2, optimizer=optimizer)
        peer._gradient_step = step
        return peer

    made = served.world(2, optimizer=served.plain)
    made._makers = {rank: (lambda n, rank=rank: worker(rank)) for rank in range(2)}  # type: ignore[misc]
    served.ended(made)
    module = served.Net()
    for iteration in range(served.ITERATIONS):
        served.gradients(module, [served.batch(rank, iteration) for rank in range(2)])
        torch.optim.SGD(module.parameters(), lr=0.1 / (1 + iteration)).step()
    torch.testing.assert_close(models(made), served.values(module).expand(2, -1), rtol=1e-9, atol=1e-9)
