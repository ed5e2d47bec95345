"""Parameter server runs in virtual time: switches, mixtures of sync models, members that join and leave, faults."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import served
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from seeds import seeds, some
from transcripts import LoggedWorld

from gossipx.assembly.server import Parts
from gossipx.protocol.effects import Answer, Effect
from gossipx.protocol.events import Event, Received, TablesRestored
from gossipx.protocol.messages import Stage
from gossipx.protocol.server_messages import TablesReply, TablesRequest
from gossipx.server.conditions import Conditions, Pull, View
from gossipx.sim import Network

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
    served.done(made, range(3))


def test_a_switch_to_a_sync_model_for_one_server_is_refused_by_two() -> None:
    made = served.world(2, servers="0,1")
    made.switch_sync(1, 3.5, "hybrid:wait=true")
    served.ended(made)
    assert not made.lines(0, "shard 0 switches") and not made.lines(1, "has switched")
    served.done(made, range(2))


@pytest.mark.parametrize("sync", some(served.SYNCS, *served.SYNCS[::3]))
@pytest.mark.parametrize("seed", seeds(4))
def test_all_end_with_the_servers_values_after_the_slowest_worker(sync: str, seed: int) -> None:
    """The others wait for the slowest worker as long as it answers."""
    slow = {0: 1.0, 1: 0.2, 2: 0.3, 3: 4.0}
    assert served.ITERATIONS * 4.0 > served.ITERATIONS * 1.0 + toy.TIMEOUT
    made = served.world(4, seed, Network(delay=0.05), slow, servers="0,1", sync=sync)
    served.ended(made)
    served.done(made, range(4))
    assert served.pushes(made) == {4 * served.ITERATIONS}


@pytest.mark.parametrize("begins", ["pssp:staleness=0,alpha=significance", "asp"])
def test_workers_send_significance_from_the_start_and_after_a_switch(begins: str) -> None:
    """FluentPS, section III-E.2: alpha = |g| / |w|; a model that is switched to needs it as well."""
    made = served.world(2, slow={1: 3.0}, servers="0", pulls="soft", sync=begins, iterations=30)
    if begins == "asp":
        made.switch_sync(0, 1.5, "pssp:staleness=0,alpha=significance")
    served.ended(made)
    assert served.mode(made, 0).shards[0].clock.counts.delayed > 0


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
    exchange = served.mode(made, 0)
    before = json.dumps({number: one.state_dict() for number, one in exchange.shards.items()})
    assert exchange.handle(TablesRestored(index, 0, {"clock": "of another layout"}), made.now) == []
    assert json.dumps({number: one.state_dict() for number, one in exchange.shards.items()}) == before


# --- NaN and Inf --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", some(served.SYNCS, *served.SYNCS[::3]))
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
    served.done(made, range(3))
    assert made.peers[0].role.counts["poisoned"] > 0 and made.lines(0, "a gradient of peer 1 holds NaN or Inf")
    end = served.values(made.peers[0].module)
    assert end.isfinite().all()
    if sync == "bsp":
        expected = served.joined(lambda iteration: [0, 2] if iteration == 3 else range(3))
        torch.testing.assert_close(end, expected, rtol=1e-9, atol=1e-9)


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
        clocks = [served.mode(self._made, index).shards[index].clock for index in range(2)]
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
    served.done(made, range(3))
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
    served.done(made, [0, 1])
    assert made.peers[1].blocked_seconds < 2 * toy.TIMEOUT
    if sync == "bsp":
        expected = served.joined(lambda iteration: range(3 if iteration < len(made.lines(2, "step ")) else 2))
        torch.testing.assert_close(served.values(made.peers[0].module), expected, rtol=1e-9, atol=1e-9)


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
    served.done(made, range(2), 4)


@pytest.mark.parametrize("again", [False, True], ids=["late", "started again"])
@pytest.mark.fault(36, 37)
def test_a_worker_that_joins_the_run_starts_at_the_current_clock(again: bool) -> None:
    made = served.world(3, absent=[] if again else [2], iterations=40)
    if again:
        made.crash(2, 8.2)
        made.restart(2, 25.0)
    else:
        made.start(2, served.maker(2, 3, iterations=40), at=25.0)
    made.run(24.9)
    trained = len(made.lines(2, "step "))
    made.run(25.0 + 3 * toy.TIMEOUT, until=lambda: len(made.lines(2, "step ")) > trained)
    clock = served.mode(made, 0).shards[0].clock
    assert clock.progress[2] >= clock.clock - 2 > 5
    served.ended(made)
    assert made.fired["restart"] == again
    served.done(made, [0, 1], 40)
    assert made.peers[2].role.stage is Stage.DONE


# --- shards with different sync models ------------------------------------------------------------------


@pytest.mark.fault(45)
def test_a_buffer_does_not_wait_for_a_dead_worker_that_was_ahead() -> None:
    """Its pushes are ahead of the clock, and it waits nowhere."""
    slow = {0: 3.0, 2: 0.5}
    made = served.world(3, network=Network(delay=0.05), slow=slow, servers="0", sync="hybrid:step=2,wait=true")
    made.crash(2, 4.0)
    served.ended(made, served.ITERATIONS * 3.5 + 3 * toy.TIMEOUT)
    assert made.fired["crash"] and made.lines(0, "peer 2 is lost")
    assert made.peers[0].arena.step == made.peers[1].arena.step == served.ITERATIONS


WAIT = [f"hybrid:{buffer},wait=true" for buffer in ("fixed=2", "fixed=3", "step=4", "double=5")]
"""They are refused with several servers."""
MIXED = [
    *("bsp", "asp", "ssp:staleness=1", "ssp:staleness=3", "dsps:staleness=1,high=3,window=2"),
    *("drop:n=1", "drop:n=1,late=add", "pssp:staleness=1,p=0.5", "pssp:staleness=1,alpha=significance"),
    *("hybrid:fixed=3", "hybrid:step=4,reduce=sum"),
]
FEW = 8  # iterations
indices = st.integers(0, 4)
others = st.sampled_from([*MIXED, *WAIT, "drop:n=2"])  # refused where it would wait for all workers
switches = st.tuples(st.floats(1, 40), indices, indices, others, st.sampled_from(["", "lazy", "soft"]))


@pytest.mark.fault(45)
@examples(80, few=8)
@given(data=st.data())
def test_every_pull_is_answered_and_every_push_counted_once(data: st.DataObject) -> None:
    """Under any mixture of sync models, also when they are switched and when workers leave or die."""
    count = data.draw(st.integers(1, 4), "shards")
    size = data.draw(st.integers(max(2, count), 5), "peers")
    servers = data.draw(st.permutations(range(size)), "servers")[:count]
    only = count < size - 1 and data.draw(st.booleans(), "servers only")
    syncs = st.sampled_from([*MIXED, *WAIT] if count == 1 else MIXED)
    delay, jitter = 0.1, data.draw(st.sampled_from([0.0, 0.3]), "jitter")
    paces = data.draw(st.lists(st.floats(0.5, 4.0), min_size=size, max_size=size), "paces")
    made = served.world(
        size,
        data.draw(st.integers(0, 99), "seed"),
        Network(delay=delay, jitter=jitter),
        dict(enumerate(paces)),
        servers=",".join(map(str, servers)),
        servers_only=only,
        sync="|".join(data.draw(st.lists(syncs, min_size=count, max_size=count), "syncs")),
        pulls=data.draw(st.sampled_from(["lazy", "soft"]), "pulls"),
        overlap=data.draw(st.booleans(), "overlap"),
        bucket=data.draw(st.sampled_from([100, 1000]), "bucket"),
        iterations=FEW,
    )
    for at, rank, shard, sync, pulls in data.draw(st.lists(switches, max_size=4), "switches"):
        made.switch_sync(servers[rank % count], at, sync, shard if shard < count else None, pulls=pulls)
    workers = sorted(set(range(size)) - set(servers))
    gone = data.draw(st.sets(st.sampled_from(workers)), "gone") if workers else set()
    for rank in gone:
        getattr(made, data.draw(st.sampled_from(["leave", "crash"])))(rank, data.draw(st.floats(1, 40), "at"))
    # A worker waits at most for one more step of each other worker. Only the dead are waited for by time.
    served.ended(made, (FEW + 1) * (2 * max(paces) + 20 * (delay + jitter)) + 3 * toy.TIMEOUT * len(gone))
    stay = set(range(size)) - gone - (set(servers) if only else set())
    assert {made.peers[rank].arena.step for rank in stay} <= {FEW}
    if not gone:
        assert served.pushes(made) == {len(stay) * FEW}
