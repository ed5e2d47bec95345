"""Each part of the parameter server replaced alone, and Code 4.1 to 4.4 as users write them.

Modularized Parameter Server, chapter 4 and Figure 2.3d. In virtual time, with the same roles and tables as in real
processes, in which tests/e2e/test_modular.py runs all of them together. The examples are in tests/examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import served
import squares
import torch
from adaptive import AdaptiveConsistency
from round_robin import RoundRobinPlacement
from seeds import seeds, some
from served import models
from stale import SSPConsistency
from top_percent import TopServerStorage, TopTransmitBuffer
from torch import Tensor
from transcripts import LoggedWorld

from gossipx.parts import (
    ApplyBuffer,
    ClientTable,
    Conditions,
    GradientStorage,
    Hybrid,
    Partition,
    Parts,
    Placement,
    ServerStorage,
    ServerTable,
    Storages,
    SyncModel,
    Table,
    TransmitBuffer,
    View,
    WorkerStorage,
    raw,
)
from gossipx.protocol.events import Received
from gossipx.protocol.server_messages import GradientRequest, TablesRequest
from gossipx.server.sync_models import ASP
from gossipx.sim import Network

HOUSE = Path(__file__).parents[2]


def run(parts: Parts, size: int = 3, **options: Any) -> LoggedWorld:
    given = {"servers": "0,1", "placement": "uniform", "optimizer": served.plain, **options}
    return served.ended(served.world(size, parts=parts, **given))


def joined(factor: float = 1.0) -> Tensor:
    """Train one process on the joined batch, with gradients scaled by ``times``."""
    return served.joined(range(3), optimizer=lambda p: torch.optim.SGD(p, lr=0.1 * factor)).expand(3, -1)


# --- single parts --------------------------------------------------------------------------------------


class Doubling(GradientStorage):
    def put(self, gradient: Tensor) -> None:
        super().put(2 * gradient)


class Halving(TransmitBuffer):
    def encode(self) -> bytes:
        return bytes(raw(self.data / 2))


class Tripling(ServerStorage):
    def decode(self, encoded: memoryview) -> Tensor:
        return 3 * super().decode(encoded)


class DoublingTable(ClientTable):
    def update(self, gradient: Tensor) -> None:
        super().update(2 * gradient)


class TriplingTable(ServerTable):
    def update(self, encoded: memoryview) -> Tensor:
        return 3 * super().update(encoded)


@pytest.mark.parametrize(
    ("replaced", "factor"),
    [
        ({"gradient": Doubling}, 2),
        ({"transmit": Halving}, 1 / 2),
        ({"server": Tripling}, 3),
        ({"client_table": DoublingTable}, 2),
        ({"server_table": TriplingTable}, 3),
    ],
)
def test_parts_for_gradients(replaced: dict[str, Any], factor: float) -> None:
    """Table 4.1 and Figure 4.1: one class that scales, for every partition of every table."""
    made = run(Parts(storages=Storages(**replaced)))
    torch.testing.assert_close(models(made), joined(factor), rtol=1e-9, atol=1e-9)


class AddsOne(ServerStorage):
    """Sends values that are larger by one, without changing those that it stores."""

    def encode(self) -> bytes:
        return bytes(raw(self.data + 1))


class TakesOneOff(ApplyBuffer):
    def decode(self, encoded: memoryview) -> None:
        super().decode(encoded)
        self.data.sub_(1)


class TableAddsOne(ServerTable):
    def get(self) -> bytes:
        return bytes(raw(self.storage.data + 1))


class WorkerTakesOneOff(WorkerStorage):
    def apply(self, buffers: Sequence[ApplyBuffer]) -> None:
        super().apply(buffers)
        with torch.no_grad():
            self.parameter.sub_(1)


class ClientTakesOneOff(ClientTable):
    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            self.parameter.sub_(1)


@pytest.mark.parametrize("gives", [{"server": AddsOne}, {"server_table": TableAddsOne}])
@pytest.mark.parametrize(
    "takes", [{"apply": TakesOneOff}, {"worker": WorkerTakesOneOff}, {"client_table": ClientTakesOneOff}]
)
def test_parts_for_values(gives: dict[str, Any], takes: dict[str, Any]) -> None:
    """A part on the worker's side can undo what a part on the server's side does."""
    made = run(Parts(storages=Storages(**gives, **takes)))
    torch.testing.assert_close(models(made), joined(), rtol=1e-9, atol=1e-9)


class Reversed(Placement):
    """Places tables from the last server to the first, each in two halves of which the second comes first."""

    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        placed: list[list[Partition]] = [[] for _ in range(servers)]
        for number, table in enumerate(tables):
            half = table.size // 2
            placed[-1 - number % servers].append(Partition(number, half, table.size))
            placed[-1 - (number + 1) % servers].append(Partition(number, 0, half))
        return placed


@pytest.mark.parametrize("placement", [Reversed(), RoundRobinPlacement()])
def test_a_custom_placement(placement: Placement) -> None:
    """Code 4.1: the decision function."""
    made = run(Parts(placement=placement))
    torch.testing.assert_close(models(made), joined(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "sync",
    [
        Conditions(pull=lambda view, pull: pull.progress < view.clock, push=lambda view: view.pushed == view.workers),
        [SSPConsistency(0), SSPConsistency(0)],
    ],
)
def test_a_custom_consistency_controller(sync: SyncModel | list[SyncModel]) -> None:
    """Conditions of two functions, or a class; one for all shards, or one for each. Here they are equal to bsp."""
    made = run(Parts(sync=sync), apply="tick")
    torch.testing.assert_close(models(made), joined(), rtol=1e-9, atol=1e-9)


# --- Code 4.2 and 4.3: top-1% -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_unsent_values_stay_in_the_buffer(size: int, dtype: torch.dtype) -> None:
    """``val = 0`` in Code 4.2 only concerns what is sent. At all times, the sum of gradients = sent + the buffer."""
    generator = torch.Generator().manual_seed(size)
    buffer = TopTransmitBuffer(torch.zeros(size, dtype=dtype))
    server = TopServerStorage(torch.zeros(size, dtype=dtype))
    made = torch.zeros(size, dtype=dtype)
    sent = torch.zeros(size, dtype=dtype)
    for _ in range(20):
        gradient = torch.randint(-9, 10, (size,), generator=generator).to(dtype)  # their sums are exact
        made += gradient
        buffer.add(gradient)
        largest = buffer.data.abs().max() if size else 0
        encoded = buffer.encode()
        count = -(-size // 100)
        assert len(encoded) == count * (4 + dtype.itemsize)
        decoded = server.decode(memoryview(bytearray(encoded)))
        assert int((decoded != 0).sum()) <= count and (not size or decoded.abs().max() == largest)
        sent += decoded
        assert torch.equal(sent + buffer.data, made)


# --- Code 4.4: SSP, and controllers that decide when workers push and pull ------------------------------------


@pytest.mark.parametrize("pulls", ["lazy", "soft"])
@pytest.mark.parametrize("staleness", some([0, 1, 3, 5], 3))
@pytest.mark.parametrize("controller", [SSPConsistency, AdaptiveConsistency])
def test_ssp_that_exchanges_only_stale_tables_limits_the_lead(
    controller: type[SyncModel], staleness: int, pulls: str
) -> None:
    """Code 4.4: pulls from the servers if min < iteration − s; AdaptiveConsistency pushes to them only then, too."""
    options: dict[str, Any] = {"network": Network(delay=0.01), "slow": {2: 3.0}, "iterations": 24, "bucket": 0}
    made = run(Parts(sync=controller(staleness)), pulls=pulls, **options)
    served.check_lead(made, staleness, slowest=2)
    for shard in served.shards(made).values():
        counts = shard.clock.counts
        assert shard.clock.clock == 24 and counts.gradients == counts.applied
        # Tables fetched at clock c are valid up to iteration c + s.
        assert counts.pulls <= 3 * 24 and (staleness < 3 or counts.pulls <= 2 * 24)
        if controller is SSPConsistency:
            assert counts.gradients == 3 * 24
        else:  # only a worker's last push has no pull after it
            assert counts.pulls <= counts.gradients <= counts.pulls + 3
            assert staleness < 3 or counts.gradients <= 2 * 24
    assert torch.isfinite(models(made)).all()


@dataclasses.dataclass(frozen=True)
class EveryThird(SyncModel):
    """Pushes in every third iteration, and no worker waits."""

    def pushes(self, progress: int, fetched: int) -> bool:
        return progress % 3 == 2

    def may_pull(self, state: Any, view: Any, pull: Any) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
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
    options: dict[str, Any] = {"servers": "0", "optimizer": served.plain, "apply": "each", "iterations": iterations}
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


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", seeds(3))
def test_a_worker_that_does_not_pull_loses_no_gradient(overlap: bool, seed: int) -> None:
    """A push must arrive before the next one, over a network slower than the worker's steps."""
    made = run(
        Parts(sync=PullsSeldom()),
        seed=seed,
        network=Network(delay=0.4),
        overlap=overlap,
        bucket=0,
        iterations=18,
    )
    for shard in served.shards(made).values():
        assert shard.clock.counts.gradients == 3 * 18 and shard.clock.counts.pulls == 3 * 18 / 3


def test_one_worker_that_seldom_pulls_computes_on_what_it_has() -> None:
    """Exactly: three gradients at one point, applied one after the other, then the next point."""
    made = served.ended(
        served.world(1, servers="0", optimizer=served.plain, parts=Parts(sync=PullsSeldom()), apply="each")
    )
    there, here = served.Net(), served.Net()
    for iteration in range(served.ITERATIONS):
        served.gradients(here, [served.batch(0, iteration)])
        with torch.no_grad():
            for one, other in zip(there.parameters(), here.parameters(), strict=True):
                if other.grad is not None:
                    one -= 0.1 * other.grad
            if iteration % 3 == 2:
                here.load_state_dict(there.state_dict())
    torch.testing.assert_close(models(made)[0], served.values(there), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("workers", [1, 3])
def test_after_a_switch_workers_pull_as_the_new_model_says(workers: int) -> None:
    """They learn of it with the next tables that they receive: of iteration 5."""
    iterations = 18
    made = served.world(workers, parts=Parts(sync=PullsSeldom()), servers="0", iterations=iterations)
    made.switch_sync(0, 5.5, "asp")
    served.ended(made)
    clock = served.shards(made)[0].clock
    assert clock.epoch == 1 and clock.counts.pulls == workers * (2 + iterations - 6)


def constant(peer: Any) -> None:
    """Compute a gradient of ones."""
    for parameter in peer.module.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("change", ["servers", "sync", "both"])
def test_no_gathered_gradient_is_lost_or_counted_twice(change: str, seed: int) -> None:
    """The servers or the sync model change while gradients gather, at workers with different iterations."""
    options: dict[str, Any] = {"optimizer": served.plain, "apply": "each", "iterations": 20, "min_peers": 2}
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


# --- another growth of Hybrid, and the documentation ----------------------------------------------------------


def test_a_custom_growth_function() -> None:
    """Hybrid Approach, section 9: "different monotonically increasing functions can also be used"."""
    made = run(squares.parts)
    assert torch.isfinite(models(made)).all()
    for shard in served.shards(made).values():
        assert shard.clock.model == squares.parts.sync and shard.clock.counts.gradients == 3 * served.ITERATIONS
    assert isinstance(squares.parts.sync, Hybrid)
    assert [squares.parts.sync.threshold(View(0, 0, 3, 0, 0, 0, n)) for n in (1, 4, 9, 36)] == [1, 2, 3, 3]


@pytest.mark.parametrize("example", ["round_robin", "top_percent", "stale", "adaptive", "squares", "program"])
def test_the_documentation_shows_the_examples_as_they_are_tested(example: str) -> None:
    text = (HOUSE / "tests" / "examples" / f"{example}.py").read_text(encoding="utf-8")
    assert f"```python\n{text}```\n" in (HOUSE / "docs" / "parts.md").read_text(encoding="utf-8")
