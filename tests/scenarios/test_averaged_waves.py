"""Waves in virtual time: means of codes that owners of shards make; their members, and faults.

Tracked models are float64, so that sums and means can be told from nearly equal ones.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

import pytest
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st
from modes import agree, slow
from property_tests import examples
from seeds import some
from torch import Tensor
from toy import ITERATIONS, SIZE, TIMEOUT, Point, before, bound, ended, models, sgd, spread, until, within, world
from transcripts import LoggedWorld, trained_bytes

from gossipx import policies
from gossipx.protocol.effects import Answer, Resume
from gossipx.protocol.events import Received, Restored, TrainingEnded
from gossipx.protocol.messages import HereReply, ShardRequest, Stage
from gossipx.sim import Network, SimPeer

EXACT = {"rtol": 0.0, "atol": 1e-12}


class Tracked:
    """Worlds of peers with a float64 model.

    Attributes:
        own: by rank, the sum of a peer's own training steps.
    """

    def __init__(self) -> None:
        self.own: dict[int, Tensor] = defaultdict(lambda: torch.zeros(SIZE, dtype=torch.float64))

    def step(self, peer: SimPeer) -> None:
        was = peer.weights()
        sgd(peer.module)
        self.own[peer.rank] += peer.weights() - was

    def world(
        self, size: int, *rest: Any, by_rank: dict[int, dict[str, Any]] | None = None, **options: Any
    ) -> LoggedWorld:
        each = {rank: {"module": exact(rank), **(by_rank or {}).get(rank, {})} for rank in range(size)}
        given = {"exchange": "waves", "finish": "none", **options}
        return toy.world(size, *rest, by_rank=each, gradient_step=self.step, **given)


def exact(rank: int) -> Point:
    """Return a peer's model in float64."""
    module = Point(rank).double()
    module.target = module.target.double()
    return module


def start() -> Tensor:
    """Return the initial weights of all peers, which are peer 0's."""
    return exact(0).x.detach()


def conserved(made: LoggedWorld, tracked: Tracked) -> None:
    """Assert that the sum of all models has changed by the training steps of the peers, and by nothing else."""
    size = len(made.peers)
    expected = size * start() + sum(tracked.own.values())
    torch.testing.assert_close(models(made).sum(0), expected, **EXACT)


def waves(made: LoggedWorld, rank: int) -> list[int]:
    """Return the numbers of the waves in which ``rank`` sent codes, in order."""
    numbers = [int(line.rsplit(" ", 1)[1]) for line in made.lines(rank, "sends") if " of wave " in line]
    return [number for number, _ in itertools.groupby(numbers)]


def counts(made: LoggedWorld) -> list[int]:
    return [made.peers[rank].role.sync.retrievals for rank in sorted(made.peers)]


def lost(made: LoggedWorld) -> int:
    """Return how many shards were left out, and how many codes came too late."""
    return sum(peer.role.waves.lost for peer in made.peers.values())


# --- without faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", some(range(1, 10), 1, 2, 5, 8))
def test_a_blocking_wave_leaves_all_with_the_exact_mean(size: int):
    """As if all models were averaged in one process every five iterations, for any number of peers; bit for bit."""
    tracked = Tracked()
    made = ended(tracked.world(size, policy="tau:5", blocking=True, iterations=15), bound(size, 15))
    replicas = [exact(rank) for rank in range(size)]
    for replica in replicas:
        replica.x.data.copy_(start())
    for _ in range(3):
        for replica in replicas:
            for _ in range(5):
                sgd(replica)
        mean = torch.stack([replica.x.detach() for replica in replicas]).mean(0)
        for replica in replicas:
            replica.x.data.copy_(mean)
    torch.testing.assert_close(models(made), mean.expand(size, -1), **EXACT)
    assert torch.equal(models(made), models(made)[:1].expand(size, -1))
    assert all(waves(made, rank) in ([1, 2, 3], []) for rank in range(size))
    assert lost(made) == 0
    conserved(made, tracked)


@examples(40, few=6)
@given(
    size=st.integers(2, 9),
    paces=st.lists(st.floats(0.4, 3.0), min_size=9, max_size=9),
    delay=st.floats(0, 0.5),
    policy=st.sampled_from(["tau:1", "tau:3", "random:p=0.3", "travel:0.2"]),
    blocking=st.booleans(),
)
def test_the_sum_of_all_models_is_kept_while_they_train(
    size: int, paces: list[float], delay: float, policy: str, blocking: bool
):
    """At any pace, and no matter which peer starts it: a wave only moves differences between models."""
    tracked, each = Tracked(), {}
    for rank, pace in enumerate(paces[:size]):
        mean = policies.parse(policy)

        def until_20(o: policies.Observation, mean: policies.Policy = mean, pace: float = pace) -> bool:
            return o.step * pace < 20 and mean.decide(mean.init(), o)[0]

        each[rank] = {"policy": until_20, "iterations": math.ceil(40 / pace), "compute": pace}
    network = Network(bandwidth=8 * SIZE / 0.1, delay=delay)
    made = ended(tracked.world(size, 0, network, by_rank=each, blocking=blocking, peer_timeout=1e3), 1e5)
    assert min(counts(made)) > 0
    assert lost(made) == 0
    if not blocking or all(waves(made, rank) == waves(made, 0) for rank in range(size)):
        conserved(made, tracked)  # blocked peers are late, and some end before others start a wave


def test_training_continues_during_a_wave():
    """A model takes as long as two steps, so a wave lasts for three and its messages; training does not wait for it.

    After the wave each peer has the mean of the captured models plus its own steps since the capture.
    """
    tracked = Tracked()
    made = until(tracked.world(4, 0, Network(bandwidth=8 * SIZE / 2), policy="tau:10", iterations=19), 0, "step 10")
    made.run(limit=made.now + 0.0005)  # less than a message takes
    captured = models(made)
    tracked.own.clear()
    made.run(limit=made.now + 8)
    own = torch.stack([tracked.own[rank] for rank in range(4)])
    assert own.abs().max() > 0.05
    torch.testing.assert_close(models(made), captured.mean(0) + own, **EXACT)
    for peer in made.peers.values():
        life = [line for line in made.lines(peer.rank) if line.startswith(("step", "takes the mean in"))]
        assert life.count("takes the mean in") == 1
        assert life.index("takes the mean in") - life.index("step 10") > 3
        assert peer.blocked_seconds == 0


@pytest.mark.parametrize("size", some(range(2, 10), 2, 5, 8))
def test_one_starts_and_all_join(size: int):
    """For any starter, including one that only sends in the first round."""
    for starter in range(size):
        tracked = Tracked()
        made = ended(tracked.world(size, starters=[starter], policy="tau:10", iterations=14), bound(size, 14))
        assert all(count > 0 for count in counts(made))
        assert lost(made) == 0 and made.now < 15
        assert {number for rank in range(size) for number in waves(made, rank)} == {1}
        assert not any(peer.role.sync.failed for peer in made.peers.values())
        conserved(made, tracked)


@pytest.mark.parametrize("starters", [(0, 3), (1, 2), (0, 1, 2, 3), (2, 6), tuple(range(7))])
def test_waves_that_start_together_are_one(starters: tuple[int, ...]):
    """Two starters, or all: one number, one mean, one code for each owner."""
    size = 7 if len(starters) == 7 or 6 in starters else 4
    tracked = Tracked()
    made = ended(tracked.world(size, starters=starters, policy="tau:10", iterations=14), bound(size, 14))
    assert {number for rank in range(size) for number in waves(made, rank)} == {1}
    assert counts(made) == [1] * size
    conserved(made, tracked)


def test_peers_of_similar_pace_do_not_each_start_a_wave():
    """A wave every 20 iterations of the fastest peer; all others count from the last wave, however far behind."""
    slow = {0: 1.0, 1: 1.3, 2: 1.73, 3: 2.2, 4: 1.11}
    made = world(5, slow=slow, policy="tau:20", iterations=300, exchange="waves")
    made.run(299.0)
    assert waves(made, 0) == list(range(1, 300 // 20))
    assert [len(waves(made, rank)) for rank in range(5)] == [14] * 5


def test_a_wave_counts_once_for_the_policy():
    """Δ_r and drift restart for all, no matter which peer started it; a policy that fires meanwhile is skipped."""
    options = {"by_rank": {1: {"policy": "tau:10"}}, "iterations": 9, "model_timeout": 60.0}
    made = until(Tracked().world(2, policy="tau:6", **options), 0, "step 2")
    made.network.bandwidth = 8 * SIZE / 20.0  # the wave outlasts the training
    ended(made, bound(2, 9, waits=5))
    assert waves(made, 0) == waves(made, 1) == [1]
    assert [peer.role.sync.skipped for peer in made.peers.values()] == [0, 0]
    busy = world(2, network=Network(bandwidth=4 * SIZE / 4.5), policy="tau:1", exchange="waves", iterations=11)
    ended(busy, bound(2))
    for peer in busy.peers.values():
        assert peer.role.sync.skipped >= 4 and len(waves(busy, peer.rank)) <= 3


POLICIES = ["adaptive:threshold=0.02", "travel:distance=1", "drift:distance=1", "random:p=0.3"]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("policy", some(POLICIES, *POLICIES[:2]))
def test_any_policy_starts_waves(policy: str, blocking: bool):
    made = ended(world(4, policy=policy, blocking=blocking, exchange="waves", iterations=40), bound(4, 40))
    apart = ended(world(4, policy="never", iterations=40), bound(4, 40))
    assert not any(made.lines(rank, "pulls") for rank in range(4))
    assert min(counts(made)) > 0
    assert spread(before(made)) < spread(before(apart))
    for peer in made.peers.values():
        assert len(made.retrievals(peer.rank)) == peer.role.sync.retrievals
        models_received = trained_bytes(peer) / peer.arena.nbytes()  # 2 (N - 1) / N in a wave of N, and late codes
        assert 1 <= models_received / peer.role.sync.retrievals <= 1.6


@pytest.mark.parametrize("slow", [{}, {1: 1.7}])
def test_own_steps_alone_are_drift_from_a_wave(slow: dict[int, float]):
    """The change made by a wave is not drift: x_r is the mean that it produced."""
    way, begun = [torch.zeros(SIZE).double() for _ in range(2)], [0, 0]

    def step(peer: SimPeer) -> None:
        rank, retrievals = peer.rank, peer.role.sync.retrievals
        if retrievals > begun[rank]:
            begun[rank], way[rank] = retrievals, torch.zeros(SIZE).double()
        drift = peer.driver.captures.drift(None)
        assert drift is not None and abs(drift - way[rank].norm()) < 1e-5
        was = peer.weights()
        sgd(peer.module)
        way[rank] += peer.weights() - was

    options = {"policy": "drift:distance=0.5", "blocking": True, "exchange": "waves"}
    ended(world(2, slow=slow, iterations=60, gradient_step=step, **options), bound(2, 120))
    assert min(begun) > 5


# --- membership ---------------------------------------------------------------------------------------


def test_training_that_ends_in_a_wave_ends_it_first():
    """The others rely on it: no round is lost, and its model is part of their average."""
    tracked = Tracked()
    made = tracked.world(4, 0, Network(bandwidth=8 * SIZE / 2), policy="tau:10", iterations=11)
    ended(made, bound(4, 11, waits=1))
    assert counts(made) == [1] * 4 and lost(made) == 0
    conserved(made, tracked)


def test_a_peer_that_has_ended_is_no_member():
    """Only a straggler is left: it asks no peer that has announced the end of its training."""
    made = ended(world(3, slow={2: 2.0}, policy="tau:4", exchange="waves", peer_timeout=50.0), 2 * ITERATIONS + 100)
    assert lost(made) == 0
    done = next(entry.time for entry in made.log if entry.rank == 1 and entry.what == "is FINISH")
    assert not [entry for entry in made.log if entry.time > done + 1 and entry.what.startswith("sends")]
    assert made.peers[2].role.sync.skipped > 0


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_peer_that_has_just_ended_costs_no_shard(size: int, blocking: bool):
    """Its announcement is still on its way to the peer that starts the wave: it is told by the answer, as no fault."""
    slow, network = dict.fromkeys(range(1, size), 1.01), Network(delay=0.5)
    options = {"exchange": "waves", "policy": "tau:20", "blocking": blocking, "starters": slow}
    made = ended(world(size, 0, network, slow, **options), bound(size, waits=1))
    assert made.lines(1, "sends 0 its code of wave 1")
    assert lost(made) == 0 and not any(peer.role.sync.failed for peer in made.peers.values())


@pytest.mark.parametrize("blocking", [False, True])
def test_a_peer_without_a_finish_says_at_once_that_it_has_ended(blocking: bool):
    """It may evaluate its final model for long before it announces that it is done: the asker must not wait for it."""
    made = until(world(2, policy="never", exchange="waves", blocking=blocking, finish="none"), 0, "step 3")
    role = made.peers[0].role
    assert Resume() in role.handle(TrainingEnded(True), made.now)
    code = ShardRequest(1, (0, 1), 0, (1, 1), (), TIMEOUT)
    (answer,) = role.handle(Received(1, "k", code), made.now)
    assert isinstance(answer, Answer) and answer.reply == HereReply(Stage.FINISH)


def test_a_peer_at_the_start_takes_part_once_it_trains():
    """It waits for a third peer at START, and gets a request from a peer that no longer does."""
    tracked = Tracked()
    made = ended(tracked.world(3, absent=[2], policy="tau:1", iterations=6, compute=0.01), bound(3, 6, waits=1))
    assert min(counts(made)) > 0
    conserved(made, tracked)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.fault(4)
def test_a_peer_leaves_in_a_wave(blocking: bool):
    """It takes no mean in any more, and costs the others its shard, but no time."""
    made = world(4, network=Network(bandwidth=4 * SIZE / 2), policy="tau:6", blocking=blocking, exchange="waves")
    until(made, 2, "sends 3 its code of wave 1")
    made.leave(2, made.now + 0.1)
    ended(made, bound(4))
    life = made.lines(2)
    assert not [line for line in life[life.index("is LEFT") :] if line.startswith(("mixes", "takes", "sends", "meets"))]
    assert 1 <= lost(made) <= 2 * 3, "its shard, and its codes of others, on each of three"
    assert made.now < ITERATIONS + 10 * 2.1 + (TIMEOUT if blocking else 0), "ten models one after the other"
    agree(made, [0, 1, 3])


def test_a_checkpoint_restored_in_a_wave_takes_no_part():
    """The wave's mean belongs to a model that was replaced."""
    made = world(2, network=Network(bandwidth=4 * SIZE / 3), policy="tau:5", exchange="waves", finish="none")
    peer = until(made, 0, "step 7").peers[0]
    assert peer.role.waves.current is not None
    state = peer.role.sync.state_dict()
    kept = peer.weights()
    peer.arena.set_boundary(3)
    peer.handle(Restored(3, state))
    assert peer.role.waves.current is None and not peer.driver.captures._captured
    made.run(made.now + 0.5)
    assert torch.equal(peer.weights(), kept)
    ended(made, bound(2, 2 * ITERATIONS))


@pytest.mark.fault(36)
def test_others_join_the_waves_of_a_restarted_peer():
    """Only this peer starts waves: as it joins, it learns which numbers are over."""
    options = {"policy": "tau:5", "exchange": "waves", "iterations": 80}
    made = world(3, network=Network(delay=0.01), slow={1: 1.01, 2: 1.02}, starters=[1], **options)
    made.restart(1, 42.3)
    made.run(42.0)
    before_it = waves(made, 1)
    assert len(before_it) >= 7
    made.run(79.0)
    after_it = [number for number in waves(made, 1) if number not in before_it]
    assert len(after_it) >= 4 and min(after_it) > max(before_it)
    again = made.peers[1].role
    assert again.sync.failed == again.waves.lost == 0 and again.sync.retrievals == len(after_it)
    ended(made, bound(3, 80, 1.1, waits=4))


# --- faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("when", ["sends 0 its code", "averages", "takes the mean in"])
@pytest.mark.parametrize("blocking", some([False, True], False))
def test_crash_in_a_wave(size: int, when: str, blocking: bool):
    """[1, 2] It costs the others its shard but no wait, as its address refuses. Later waves leave it out."""
    options = {"policy": "tau:6", "exchange": "waves", "blocking": blocking, "iterations": 40}
    made = world(size, network=slow(), **options)
    at = until(made, 1, when).now
    made.crash(1, at + 0.3)
    ended(made, bound(size, 40, waits=8 * blocking))
    left = [rank for rank in range(size) if rank != 1]
    assert made.fired["crash"] == 1
    if len(left) > 1:
        assert [entry for entry in made.log if entry.time > at + 12 and entry.what.startswith("averages")]
        references_agree(made, left)
    for rank in left:
        sent = [entry.time for entry in made.log if entry.rank == rank and entry.what.startswith("sends 1 ")]
        assert len([time for time in sent if time > at + 0.3]) <= 2, "until its loss is known"
    waited = [entry.time for entry in made.log if entry.rank in left and entry.what == "is AGREE"]
    if max(waited) - min(waited) < 1:  # blocking waves delay them unequally
        agree(made, left)
    assert within(models(made, left), before(made, left))


def references_agree(made: LoggedWorld, ranks: list[int]) -> None:
    """Assert that the references of these peers are equal, bit for bit."""
    codecs = [made.peers[rank].driver.waves.codecs[0] for rank in ranks]
    for codec in codecs[1:]:
        assert codec._number == codecs[0]._number
        assert all(map(torch.equal, codec._reference, codecs[0]._reference))


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.fault(3)
def test_a_silent_member_costs_its_shard_and_not_the_wave(blocking: bool):
    """Paused for longer than peer_timeout. The others average their shards; it fetches their reference afterwards."""
    made = world(4, policy="tau:10", exchange="waves", blocking=blocking, iterations=100)
    made.pause(1, 10.5, 60.5)  # the wave at 10 is over by then, so 1 is first missing in the wave at 20
    made.run(45.0)
    assert made.fired["pause"] == 1
    assert [entry for entry in made.log if entry.time > 21 and entry.what == "averages the codes of (0, 2, 3)"]
    ended(made, bound(4, 100, waits=6))
    assert [entry for entry in made.log if entry.time > 61 and entry.what == "averages the codes of (0, 1, 2, 3)"]
    assert made.peers[1].role.counts["references"] >= 1 and made.peers[1].arena.step == 100


def test_a_straggler_takes_part_at_its_own_pace():
    """Its steps take longer than peer_timeout, but its transfers do not wait for them."""
    tracked = Tracked()
    made = tracked.world(4, slow={3: 2.5 * TIMEOUT}, policy="tau:25", iterations=100)
    made.run(99.0)
    assert lost(made) == 0
    assert len(waves(made, 0)) == 3 == len(waves(made, 3))
    ended(made, bound(4, 100, 2.5 * TIMEOUT))


@pytest.mark.fault(5)
def test_partition_that_heals():
    """Each side has waves and a reference of its own; then one side takes the other's, and all meet."""
    made = world(4, policy="tau:5", slow={2: 0.9, 3: 0.9}, exchange="waves", iterations=200, peer_timeout=4.0)
    made.network.cut([0, 1], [2, 3], 5.5, 80.0)
    made.run(80.0)
    apart = spread(models(made))
    assert made.fired["cut"] > 0
    averaged = {entry.what for entry in made.log if entry.time > 50 and entry.what.startswith("averages")}
    assert averaged == {"averages the codes of (0, 1)", "averages the codes of (2, 3)"}
    made.run(150.0)
    assert spread(models(made)) < 0.5 * apart
    assert [entry for entry in made.log if entry.time > 130 and entry.what == "averages the codes of (0, 1, 2, 3)"]
    references_agree(made, [0, 1, 2, 3])
    ended(made, bound(4, 200, waits=4))


@pytest.mark.parametrize("starters", [(0, 1), (0, 2), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("without", [(1,), (2,), (3,), (1, 3)])
def test_different_member_lists_cost_only_shards(starters: tuple[int, ...], without: tuple[int, ...]):
    """Several start at once, one of them with fewer members. No wait ends by timeout; nobody moves without a mean."""
    tracked = Tracked()
    made = until(tracked.world(4, starters=starters, policy="tau:10", iterations=14), 0, "step 9")
    for rank in without:
        made.peers[0].role.members.others[rank].suspended_until = 1e9
    ended(made, bound(4, 14))
    assert made.now < 15
    assert sum(counts(made)) > 0
    assert {number for rank in range(4) for number in waves(made, rank)} == {1}
    own = torch.stack([tracked.own[rank] for rank in range(4)])
    for moved in models(made) - start() - own:
        assert moved.abs().max() < own.abs().max(), "differences of own steps, a share of each at most"


def test_a_peer_that_exchanged_nothing_yet_switches_to_the_better_list():
    """0 starts with only 1, while 1 starts with all: when 0 hears of that, it has not sent its model yet."""
    tracked = Tracked()
    made = until(tracked.world(4, starters=[0, 1], policy="tau:10", iterations=14), 0, "step 9")
    for rank in (2, 3):  # as it starts, before it hears of 1
        made.peers[0].role.members.others[rank].suspended_until = made.now + 1.0005
    ended(made, bound(4, 14, waits=1))
    assert counts(made) == [1] * 4 and lost(made) == 0
    conserved(made, tracked)


@pytest.mark.parametrize("size", [2, 4, 6])
def test_a_repeated_request_costs_no_shard(size: int):
    """It is answered twice, and the requester takes the first answer; the second is no reason to wait for another."""
    network = Network(bandwidth=4000, delay=0.02, repeat=1.0)
    made = ended(world(size, network=network, policy="tau:4", exchange="waves", blocking=True), bound(size))
    assert made.fired["repeated"] > 50 and lost(made) == 0
    assert made.now < ITERATIONS + 3.0
