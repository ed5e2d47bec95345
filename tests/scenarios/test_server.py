"""Parameter server runs in virtual time: switches, members that join and leave, faults."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import served
import torch
import toy
from seeds import seeds, some
from transcripts import LoggedWorld

from gossipx.assembly.server import Parts
from gossipx.protocol.effects import Answer, Effect
from gossipx.protocol.events import Event, Received, TablesRestored
from gossipx.protocol.messages import Stage
from gossipx.protocol.server_messages import TablesReply, TablesRequest
from gossipx.server.conditions import Conditions, Pull, View
from gossipx.server.mode import ServerMode
from gossipx.server.shard import Shard
from gossipx.sim import Network


def shard(made: LoggedWorld, rank: int = 0, index: int = 0) -> Shard:
    exchange = made.peers[rank].role.exchange
    assert isinstance(exchange, ServerMode)
    return exchange.shards[index]


def done(made: LoggedWorld, ranks: range | list[int], iterations: int = served.ITERATIONS) -> None:
    """Check that all workers have finished their iterations and have the servers' values."""
    for rank in ranks:
        assert made.peers[rank].arena.step == iterations, (rank, made.peers[rank].arena.step)
        assert made.peers[rank].role.stage is Stage.DONE
    rows = torch.stack([served.values(made.peers[rank].module) for rank in ranks])
    torch.testing.assert_close(rows, rows[:1].expand(len(rows), -1), rtol=0, atol=0)


# --- switches ---------------------------------------------------------------------------------------


def test_a_switch_during_the_run() -> None:
    """After a switch from bsp, in which all wait for the slowest, to asp, waiting pulls are answered at once."""
    made = served.world(3, slow={2: 8.0}, servers="0,1")
    made.switch_sync(2, 12.0, "asp")
    made.run(12.5)
    before = made.peers[0].arena.step
    assert before <= 2
    served.ended(made)
    assert made.lines(0, "shard 0 switches from bsp to asp at clock")
    assert made.lines(1, "shard 1 switches from bsp to asp")
    assert made.lines(2, "has switched the sync model")
    reached = [entry.time for entry in made.log if entry.rank == 0 and entry.what == f"step {served.ITERATIONS}"]
    assert reached[0] < 12.5 + served.ITERATIONS + 1, "it no longer waits for the slowest"
    done(made, range(3))


def test_a_switch_to_a_sync_model_for_one_server_is_refused_by_two() -> None:
    made = served.world(2, servers="0,1")
    made.switch_sync(1, 3.5, "hybrid:wait=true")
    served.ended(made)
    assert not made.lines(0, "shard 0 switches") and not made.lines(1, "has switched")
    done(made, range(2))


SYNCS = [
    *("bsp", "asp", "ssp:staleness=1", "drop:n=2", "pssp:staleness=1,p=0.5", "dsps:staleness=1"),
    "hybrid:step=4",
]


@pytest.mark.parametrize("seed", seeds(12))
def test_switches_lose_no_push_and_strand_no_pull(seed: int) -> None:
    rng = random.Random(seed)
    slow = {rank: rng.uniform(0.5, 4.0) for rank in range(4)}
    pulls = rng.choice(["lazy", "soft"])
    made = served.world(4, seed, Network(delay=0.05), slow, servers="0,3", sync=rng.choice(SYNCS), pulls=pulls)
    for _ in range(8):
        made.switch_sync(rng.randrange(4), rng.uniform(2, 40), rng.choice(SYNCS), rng.choice([None, 0, 1]))
    served.ended(made)
    assert all(peer.arena.step == served.ITERATIONS for peer in made.peers.values())
    for rank, index in ((0, 0), (3, 1)):
        counts = shard(made, rank, index).clock.counts
        assert counts.gradients + counts.late == 4 * served.ITERATIONS, "each push is counted once"


@pytest.mark.parametrize("sync", some(SYNCS, *SYNCS[::3]))
@pytest.mark.parametrize("seed", seeds(4))
def test_all_end_with_the_servers_values_after_the_slowest_worker(sync: str, seed: int) -> None:
    """The others wait for the slowest worker as long as it answers."""
    slow = {0: 1.0, 1: 0.2, 2: 0.3, 3: 4.0}
    assert served.ITERATIONS * 4.0 > served.ITERATIONS * 1.0 + toy.TIMEOUT
    made = served.world(4, seed, Network(delay=0.05), slow, servers="0,1", sync=sync)
    served.ended(made)
    done(made, range(4))
    for rank, index in ((0, 0), (1, 1)):
        counts = shard(made, rank, index).clock.counts
        assert counts.gradients + counts.late == 4 * served.ITERATIONS


@pytest.mark.parametrize("begins", ["pssp:staleness=0,alpha=significance", "asp"])
def test_workers_send_significance_from_the_start_and_after_a_switch(begins: str) -> None:
    """FluentPS, section III-E.2: alpha = |g| / |w|; a model that is switched to needs it as well."""
    made = served.world(2, slow={1: 3.0}, servers="0", pulls="soft", sync=begins, iterations=30)
    if begins == "asp":
        made.switch_sync(0, 1.5, "pssp:staleness=0,alpha=significance")
    served.ended(made)
    assert shard(made).clock.counts.delayed > 0


def test_custom_conditions_receive_significance_on_request() -> None:
    seen: dict[bool, list[float]] = {True: [], False: []}
    for asks, told in seen.items():

        def pull(view: View, pull: Pull, told: list[float] = told) -> bool:
            told.append(pull.significance)
            return True

        own = Conditions(pull, lambda view: view.pushed == view.workers, significance=asks)
        served.ended(served.world(2, servers="0", parts=Parts(sync=own)))
    assert all(0 < value < math.inf for value in seen[True]) and set(seen[False]) == {0.0}


# --- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
def test_a_restore_after_the_shard_has_moved_is_ignored(index: int) -> None:
    """The checkpoint and journal are read only after the change: shard 1 lies elsewhere by then, and shard 0 is new."""
    made = served.world(3, servers="0,1", checkpoint_every="100")
    made.change_servers(1, 4.5, [0, 2])
    made.run(until=lambda: made.lines(0, "the servers are now 0,2"))
    exchange = made.peers[0].role.exchange
    assert isinstance(exchange, ServerMode)
    before = json.dumps({number: one.state_dict() for number, one in exchange.shards.items()})
    assert exchange.handle(TablesRestored(index, 0, {"clock": "of another layout"}), made.now) == []
    assert json.dumps({number: one.state_dict() for number, one in exchange.shards.items()}) == before


# --- NaN and Inf --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", some(SYNCS, *SYNCS[::3]))
@pytest.mark.fault(22)
def test_a_gradient_that_is_not_finite_is_skipped(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as a push, so that no worker waits, and its worker continues with the next tables."""
    whole = served.batch

    def batch(rank: int, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = whole(rank, iteration)
        return (x * math.nan, y) if (rank, iteration) == (1, 3) else (x, y)

    monkeypatch.setattr(served, "batch", batch)
    made = served.world(3, servers="0", sync=sync)
    served.ended(made)
    done(made, range(3))
    assert made.peers[0].role.counts["poisoned"] > 0 and made.lines(0, "a gradient of peer 1 holds NaN or Inf")
    end = served.values(made.peers[0].module)
    assert end.isfinite().all()
    if sync == "bsp":
        module = served.Net()
        optimizer = served.sgd(module.parameters())
        for iteration in range(served.ITERATIONS):
            served.gradients(module, [whole(rank, iteration) for rank in range(3) if (rank, iteration) != (1, 3)])
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            optimizer.step()
        torch.testing.assert_close(end, served.values(module), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sync", ["bsp", "asp", "hybrid:fixed=2", "hybrid:fixed=2,wait=true"])
def test_diverging_training_ends(sync: str) -> None:
    def steep(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e300)

    made = served.world(3, servers="0", sync=sync, optimizer=steep)
    served.ended(made, 100)
    assert all(peer.arena.step == served.ITERATIONS for peer in made.peers.values())
    assert all(made.lines(rank, "own model holds NaN or Inf") for rank in range(3))


# --- the order of pushes and pulls ----------------------------------------------------------------------


class Orders:
    """Observes the pulls of all workers at shards 0 and 1, on peers 0 and 1.

    Attributes:
        pulls: of tables, in order: worker, iteration, shard; whether each shard had replied before that it would
            answer, and whether each had the worker's whole push.
    """

    def __init__(self, made: LoggedWorld):
        self._made = made
        self._agreed: set[tuple[int, int, int]] = set()  # shards that would answer a worker after an iteration
        self._asked: dict[tuple[int, Hashable], tuple[int, int, int]] = {}
        self.pulls: list[tuple[int, int, int, bool, bool]] = []
        for rank in range(2):
            role = made.peers[rank].role
            role.handle = functools.partial(self._handle, rank, role.handle)  # type: ignore[method-assign]

    def _handle(
        self, rank: int, handle: Callable[[Event, float], list[Effect]], event: Event, now: float
    ) -> list[Effect]:
        if isinstance(event, Received) and isinstance(event.request, TablesRequest) and event.request.progress >= 0:
            self._pull(event.sender, event.key, event.request)
        effects = handle(event, now)
        for effect in effects:
            if isinstance(effect, Answer) and isinstance(effect.reply, TablesReply):
                self._agreed.update([self._asked[rank, effect.key]] if (rank, effect.key) in self._asked else [])
        return effects

    def _pull(self, worker: int, key: Hashable, pull: TablesRequest) -> None:
        if pull.bucket < 0:
            self._asked[pull.shard, key] = worker, pull.progress, pull.shard
            return
        agreed = all((worker, pull.progress, index) in self._agreed for index in range(2))
        clocks = [shard(self._made, index, index).clock for index in range(2)]
        pushed = all(clock.progress.get(worker, math.inf) >= pull.progress for clock in clocks)  # inf: it has trained
        self.pulls.append((worker, pull.progress, pull.shard, agreed, pushed))


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:staleness=1"])
@pytest.mark.parametrize("overlap", [False, True])
def test_pushes_and_pulls_of_different_shards_overlap_or_not(sync: str, overlap: bool) -> None:
    """FluentPS, Figure 5.

    (a) No tables are pulled before all shards have all gradients of the iteration and would answer. (b) Each shard is
    pulled from independently, even while gradients are still in flight to the other.
    """
    # The worker's link to itself is the fast one.
    made = served.world(3, network=Network(delay=0.2), slow={1: 1.3}, servers="0,1", sync=sync, overlap=overlap)
    made.run(0.0)
    orders = Orders(made)
    served.ended(made)
    done(made, range(3))
    every = {(worker, iteration, index) for worker in range(3) for iteration in range(11) for index in range(2)}
    assert every <= {(worker, iteration, index) for worker, iteration, index, _, _ in orders.pulls}
    if overlap:
        assert any(not pushed for *_, pushed in orders.pulls)
        assert not any(agreed for *_, agreed, _ in orders.pulls), "no shard is asked first"
    else:
        assert all(agreed and pushed for *_, agreed, pushed in orders.pulls)


# --- workers join and leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["bsp", "ssp:staleness=1", "hybrid:fixed=3", "hybrid:fixed=3,wait=true"])
@pytest.mark.fault(1, 39)
def test_a_worker_killed_is_not_waited_for_beyond_peer_timeout(sync: str) -> None:
    made = served.world(3, sync=sync)
    made.crash(2, 5.2)
    served.ended(made, served.ITERATIONS + 5 * toy.TIMEOUT)
    assert made.fired["crash"] == 1
    done(made, [0, 1])
    assert made.peers[1].blocked_seconds < 2 * toy.TIMEOUT
    if sync == "bsp":
        module, optimizer = served.Net(), None
        optimizer = served.sgd(module.parameters())
        for iteration in range(served.ITERATIONS):
            ranks = range(3) if iteration < len(made.lines(2, "step ")) else range(2)
            served.gradients(module, [served.batch(rank, iteration) for rank in ranks])
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            optimizer.step()
        torch.testing.assert_close(served.values(made.peers[0].module), served.values(module), rtol=1e-9, atol=1e-9)


@pytest.mark.fault(3)
def test_a_worker_that_is_silent_for_a_while_rejoins() -> None:
    made = served.world(3, sync="bsp", iterations=30)
    made.pause(2, 5.2, 40.0)
    served.ended(made)
    assert made.fired["pause"] == 1
    assert made.lines(0, "peer 2 is lost")
    assert [made.peers[rank].arena.step for rank in (0, 1)] == [30, 30]
    assert made.peers[2].role.stage is Stage.DONE and made.peers[2].arena.step > 10


def test_a_slow_worker_is_not_considered_lost() -> None:
    """Its steps take longer than peer_timeout and than a pull waits: no peer is lost, and no pull fails."""
    made = served.ended(served.world(2, slow={1: 3.5 * toy.TIMEOUT}, iterations=4))
    assert not [entry for entry in made.log if "lost" in entry.what or "TIMEOUT" in entry.what]
    done(made, range(2), 4)


@pytest.mark.fault(37)
def test_a_worker_that_joins_late_starts_at_the_current_clock() -> None:
    made = served.world(3, absent=[2], iterations=40, slow={0: 1.0, 1: 1.0})
    made.start(2, served.maker(2, 3, iterations=40), at=25.0)
    made.run(25.0 + 3 * toy.TIMEOUT, until=lambda: made.lines(2, "step "))
    started = shard(made).clock.clock
    assert shard(made).clock.progress[2] >= started - 2 > 5
    served.ended(made)
    assert made.peers[2].role.stage is Stage.DONE


@pytest.mark.fault(36)
def test_a_worker_that_is_started_again_starts_at_the_current_clock() -> None:
    made = served.world(3, iterations=40)
    made.crash(2, 8.2)
    made.restart(2, 20.0)
    served.ended(made)
    assert made.fired["restart"] == 1
    done(made, [0, 1], 40)
    assert made.peers[2].role.stage is Stage.DONE


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.fault(26)
def test_a_bad_network_loses_no_push_and_counts_none_twice(seed: int) -> None:
    network = Network(delay=0.2, loss=0.05, repeat=0.1, jitter=0.5)
    made = served.world(3, seed, network, {1: 1.4}, servers="0,1", iterations=8)
    served.ended(made, 4000)
    assert made.fired["lost"] and made.fired["repeated"]
    done(made, range(3), 8)
    torch.testing.assert_close(served.values(made.peers[0].module), served.joined(range(3), 8), rtol=1e-9, atol=1e-9)
