"""A consistency controller that decides when workers push: Modularized Parameter Server, Code 4.4 and Figure 2.3d.

In virtual time, with the same roles and tables as in real processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import served
import torch
from adaptive import AdaptiveConsistency
from seeds import seeds, some
from torch import Tensor
from transcripts import LoggedWorld

from gossipx.parts import Parts, SyncModel
from gossipx.protocol.events import Received
from gossipx.protocol.server_messages import GradientRequest, TablesRequest
from gossipx.server.sync_models import ASP
from gossipx.sim import Network


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def models(made: LoggedWorld) -> Tensor:
    return torch.stack([served.values(peer.module) for peer in made.peers.values()])


@dataclass(frozen=True)
class EveryThird(SyncModel):
    """Pushes in every third iteration, and no worker waits."""

    def pushes(self, progress: int, fetched: int) -> bool:
        return progress % 3 == 2

    def may_pull(self, state: Any, view: Any, pull: Any) -> bool:
        return True


@dataclass(frozen=True)
class PullsSeldom(EveryThird):
    """Pushes always, and pulls after every third iteration."""

    def pushes(self, progress: int, fetched: int) -> bool:
        return True

    def fetches(self, progress: int, fetched: int) -> bool:
        return progress % 3 == 2


def exchanges(made: LoggedWorld) -> list[tuple[str, int, int]]:
    """Return the list to which the pushes and pulls that reach peer 0 are added: what, worker and iteration."""
    made.run(0.0)
    role = made.peers[0].role
    handle, seen = role.handle, []

    def observed(event: Any, now: float) -> Any:
        if isinstance(event, Received) and isinstance(event.request, GradientRequest | TablesRequest):
            what = "push" if isinstance(event.request, GradientRequest) else "pull"
            seen.append((what, event.sender, event.request.progress))
        return handle(event, now)

    role.handle = observed  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("overlap", [True, False])
def test_workers_send_and_request_only_when_a_criterion_is_met(overlap: bool) -> None:
    """Section 2.3.2, Figure 2.3d: "send and request data only when some criteria are met". Figure 2.3b does so always.

    The iterations of each worker's pushes and pulls; the last push is the rest at the end of training, and the last
    pull is of the final values. Without overlap a worker also asks first whether the shard would answer.
    """
    expected = {
        EveryThird(): ([2, 5, 8, 11, 13], [2, 5, 8, 11]),  # Figure 2.3d
        PullsSeldom(): ([*range(14)], [2, 5, 8, 11]),
        ASP(): ([*range(14)], [*range(14)]),  # Figure 2.3b
    }
    for sync, (pushes, pulls) in expected.items():
        made = served.world(
            *(3, 0, Network(delay=0.05), {2: 2.3}),
            servers="0",
            bucket=10**6,
            iterations=14,
            overlap=overlap,
            parts=Parts(sync=sync),
        )
        seen = exchanges(made)
        served.ended(made)
        for worker in range(3):
            assert [i for what, rank, i in seen if (what, rank) == ("push", worker)] == pushes
            got = [i for what, rank, i in seen if (what, rank) == ("pull", worker) and i >= 0]
            assert got == sorted(pulls * (1 if overlap else 2))


@pytest.mark.parametrize("iterations", [12, 13, 14])
def test_gradients_gather_until_the_push(iterations: int) -> None:
    """Code 4.4: exactly, for one worker. Three gradients at one point are one step with their sum."""
    options: dict[str, Any] = {"servers": "0", "optimizer": plain, "apply": "each", "iterations": iterations}
    made = served.ended(served.world(1, parts=Parts(sync=EveryThird()), **options))
    here = served.Net()
    gathered = [torch.zeros_like(one) for one in here.parameters()]
    for iteration in range(iterations):
        served.gradients(here, [served.batch(0, iteration)])
        for one, total in zip(here.parameters(), gathered, strict=True):
            total += 0 if one.grad is None else one.grad
        if iteration % 3 == 2 or iteration == iterations - 1:
            with torch.no_grad():
                for one, total in zip(here.parameters(), gathered, strict=True):
                    one -= 0.1 * total
                    total.zero_()
    torch.testing.assert_close(models(made)[0], served.values(here), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pulls", ["lazy", "soft"])
@pytest.mark.parametrize("staleness", some([0, 1, 3, 5], 3))
def test_ssp_that_exchanges_only_stale_tables_limits_the_lead(staleness: int, pulls: str) -> None:
    """Code 4.4, AfterClientUpdate: push_to_server and pull_from_server if min < iteration − s."""
    parts = Parts(sync=AdaptiveConsistency(staleness))
    options: dict[str, Any] = {"optimizer": plain, "pulls": pulls, "iterations": 24, "bucket": 0}
    made = served.ended(served.world(3, 0, Network(delay=0.01), {2: 3.0}, servers="0,1", parts=parts, **options))
    done = dict.fromkeys(range(3), 0)
    for entry in made.log:
        if entry.what.startswith("step "):
            done[entry.rank] += 1
            # A worker that computes iteration i (from 0) has tables of a clock above i − 1 − s.
            assert done[entry.rank] - 2 < done[2] + staleness or entry.rank == 2
    for rank, index in ((0, 0), (1, 1)):
        clock = made.peers[rank].role.exchange.shards[index].clock  # type: ignore[union-attr]
        assert clock.clock == 24 and clock.counts.gradients == clock.counts.applied
        # Tables fetched at clock c are valid up to iteration c + s. Only a worker's last push has no pull after it.
        assert clock.counts.pulls <= clock.counts.gradients <= clock.counts.pulls + 3
        assert staleness < 3 or clock.counts.gradients <= 2 * 24
    assert torch.isfinite(models(made)).all()


def constant(peer: Any) -> None:
    """Compute a gradient of ones."""
    for parameter in peer.module.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("change", ["servers", "sync", "both"])
def test_no_gathered_gradient_is_lost_or_counted_twice(change: str, seed: int) -> None:
    """The servers or the sync model change while gradients gather, at workers with different iterations."""
    options: dict[str, Any] = {"optimizer": plain, "apply": "each", "iterations": 20, "min_peers": 2}
    slow = {1: 1.3, 2: 0.4 + 0.3 * seed}
    made = served.world(3, seed, Network(delay=0.05), slow, servers="0,1", parts=Parts(sync=EveryThird()), **options)
    made.run(0.0)
    for peer in made.peers.values():
        peer._gradient_step = constant
    if change != "sync":
        made.change_servers(0, 4.2 + seed, [2])
    if change != "servers":
        made.switch_sync(0, 11.0 + seed, "asp", apply="each")
    served.ended(made)
    there = served.Net()
    with torch.no_grad():
        for parameter in there.parameters():
            parameter -= 0.1 * 3 * 20
    torch.testing.assert_close(models(made), served.values(there).expand(3, -1), rtol=1e-9, atol=1e-9)
    if change != "sync":
        assert made.peers[2].role.exchange.shards, "the servers were changed"  # type: ignore[union-attr]
