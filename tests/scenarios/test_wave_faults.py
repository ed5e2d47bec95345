"""Waves in virtual time: membership and faults."""

from __future__ import annotations

import pytest
import torch
from modes import agree, slow
from seeds import some
from toy import ITERATIONS, SIZE, TIMEOUT, before, bound, ended, models, spread, until, within, world
from wave_worlds import Tracked, conserved, counts, rounds_lost, start, waves

from gossipx.protocol.events import Restored
from gossipx.sim import Network

# --- membership ---------------------------------------------------------------------------------------


def test_training_that_ends_in_a_wave_ends_it_first():
    """The others rely on it: no round is lost, and its model is part of their average."""
    tracked = Tracked()
    made = tracked.world(4, 0, Network(bandwidth=8 * SIZE / 2), policy="tau:10", iterations=11)
    ended(made, bound(4, 11, waits=1))
    assert counts(made) == [2] * 4 and rounds_lost(made) == 0
    conserved(made, tracked)


def test_a_peer_that_has_ended_is_no_member():
    """Only a straggler is left: it asks no peer that has announced the end of its training."""
    made = ended(world(3, slow={2: 2.0}, policy="tau:4", exchange="waves", peer_timeout=50.0), 2 * ITERATIONS + 100)
    assert rounds_lost(made) == 0
    done = next(entry.time for entry in made.log if entry.rank == 1 and entry.what == "is FINISH")
    assert not [entry for entry in made.log if entry.time > done + 1 and " of wave " in entry.what]
    assert made.peers[2].role.sync.skipped > 0


def test_a_peer_at_the_start_takes_part_once_it_trains():
    """It waits for a third peer at START, and gets a request from a peer that no longer does."""
    tracked = Tracked()
    made = ended(tracked.world(3, absent=[2], policy="tau:1", iterations=6, compute=0.01), bound(3, 6, waits=1))
    assert min(counts(made)) > 0
    conserved(made, tracked)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.fault(4)
def test_a_peer_leaves_in_a_wave(blocking: bool):
    """It takes in no mean any more, and costs each partner a round, but no time."""
    made = world(4, network=Network(bandwidth=4 * SIZE / 2), policy="tau:6", blocking=blocking, exchange="waves")
    until(made, 2, "meets 3 in round 0 of wave 1")
    made.leave(2, made.now + 0.1)
    ended(made, bound(4))
    life = made.lines(2)
    said = life.index("is LEFT")
    assert not [line for line in life[said:] if line.startswith(("mixes", "takes", "meets"))]
    assert 1 <= rounds_lost(made) <= 3
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


@pytest.mark.parametrize(("size", "number"), [(2, 0), (4, 0), (4, 1), (5, 0), (5, 1), (5, 2), (8, 2)])
@pytest.mark.parametrize("blocking", some([False, True], False))
def test_crash_in_each_round(size: int, number: int, blocking: bool):
    """[1, 2] It costs its partners a round but no wait, as its address refuses. Later waves leave it out."""
    options = {"policy": "tau:6", "exchange": "waves", "blocking": blocking, "iterations": 40}
    made = world(size, network=slow(), **options)
    rank = 1 if size != 5 or number else 4
    asker, met = (0, 4) if (size, number) == (5, 0) else (rank, rank ^ (1 << (number - (size == 5))))
    at = until(made, asker, f"meets {met} in round {number}").now
    made.crash(rank, at + 0.5)
    ended(made, bound(size, 40, waits=8 * blocking))
    left = [other for other in range(size) if other != rank]
    assert made.fired["crash"] == 1 and rounds_lost(made) >= 1
    if len(left) > 1:
        assert [entry for entry in made.log if entry.time > at + 12 and " of wave " in entry.what]
    for other in left:
        asked = [entry for entry in made.log if entry.rank == other and f"meets {rank} " in entry.what]
        assert len([entry for entry in asked if entry.time > at + 0.5]) <= 2, "once is enough, and the finish"
    waited = [entry.time for entry in made.log if entry.rank in left and entry.what == "is AGREE"]
    if max(waited) - min(waited) < 1:  # blocking waves delay them unequally
        agree(made, left)
    assert within(models(made, left), before(made, left))


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.fault(1)
def test_a_peer_that_only_sends_does_not_wait_for_the_dead(rank: int, blocking: bool):
    """2 sends 0 its model and crashes before it fetches the mean; or 0, which told 2 of the wave, before it fetches."""
    network = Network(bandwidth=4 * SIZE / 0.4, delay=0.05)
    made = world(3, network=network, starters=[0], policy="tau:6", exchange="waves", blocking=blocking)
    other = 2 - rank
    asks = until(made, 0, "meets 2 in round 0 of wave 1").now
    made.crash(rank, asks + (0.7 if rank == 2 else 0.01))
    made.run(asks + 4.0)
    assert made.fired["crash"] == 1 and made.lines(other).count(f"meets {rank} in round 0 of wave 1") <= 1
    assert made.peers[other].role.waves.current is None, "it has given up the round, and the wave"
    ended(made, bound(3, waits=2))


def test_peers_that_never_meet_the_dead_detect_its_loss_too():
    """Of eight, four never meet 1 in a round; their probes detect its loss, and they start waves without it."""
    made = world(8, policy="tau:4", exchange="waves", iterations=200)
    made.crash(1, 10.5)
    ended(made, bound(8, 200))
    asked = [entry.time for entry in made.log if entry.time > 10.5 and "meets 1 in round" in entry.what]
    assert asked and not [time for time in asked if 150 < time < 195]
    members = [peer.role.members.in_training(made.now) for rank, peer in made.peers.items() if rank != 1]
    assert not any(1 in known for known in members)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.fault(3)
def test_a_silent_partner_costs_its_round_and_not_the_wave(blocking: bool):
    """Paused for longer than peer_timeout. A peer that waited for it in vain still meets the others afterwards."""
    made = world(4, policy="tau:10", exchange="waves", blocking=blocking, iterations=80, compute=1.0)
    made.pause(1, 10.5, 60.5)
    # The wave at 10 is over by then, so 1 is first missing in the wave at 20.
    made.run(45.0)
    assert made.fired["pause"] == 1
    meant = [entry for entry in made.log if entry.time > 11 and entry.rank != 1 and entry.what.startswith("mixes")]
    pairs = {(entry.rank, entry.what) for entry in meant}
    assert {(2, "mixes 3"), (3, "mixes 2"), (0, "mixes 2"), (2, "mixes 0")} <= pairs
    ended(made, bound(4, 80, waits=6))
    again = [entry for entry in made.log if entry.time > 61 and entry.what == "mixes 1"]
    assert again, "it is back"
    assert made.peers[1].arena.step == 80


def test_a_straggler_takes_part_at_its_own_pace():
    """Its steps take longer than peer_timeout, but its transfers do not wait for them."""
    tracked = Tracked()
    made = tracked.world(4, slow={3: 2.5 * TIMEOUT}, policy="tau:25", iterations=100)
    made.run(99.0)
    assert rounds_lost(made) == 0
    assert len(waves(made, 0)) == 3 == len(waves(made, 3))
    ended(made, bound(4, 100, 2.5 * TIMEOUT))


@pytest.mark.fault(5)
def test_partition_that_heals():
    """Each side has its own waves and wave numbers; afterwards all take part in common ones again."""
    made = world(4, policy="tau:5", slow={2: 0.9, 3: 0.9}, exchange="waves", iterations=200, peer_timeout=4.0)
    made.network.cut([0, 1], [2, 3], 5.5, 80.0)
    made.run(80.0)
    apart = spread(models(made))
    assert made.fired["cut"] > 0
    mixed = {f"{rank} {what}" for time, rank, what in made.log if time > 50 and what.startswith("mixes")}
    assert mixed == {"0 mixes 1", "1 mixes 0", "2 mixes 3", "3 mixes 2"}
    made.run(150.0)
    assert spread(models(made)) < 0.5 * apart
    mixed = {f"{rank} {what}" for time, rank, what in made.log if time > 130 and what.startswith("mixes")}
    assert mixed >= {"0 mixes 2", "2 mixes 0", "1 mixes 3", "3 mixes 1"}
    ended(made, bound(4, 200, waits=4))


@pytest.mark.parametrize("starters", [(0, 1), (0, 2), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("without", [(1,), (2,), (3,), (1, 3)])
def test_different_member_lists_cost_only_rounds(starters: tuple[int, ...], without: tuple[int, ...]):
    """Several start at once, one of them with fewer members. No wait ends by timeout, no model is partly applied."""
    tracked = Tracked()
    made = until(tracked.world(4, starters=starters, policy="tau:10", iterations=14), 0, "step 9")
    for rank in without:
        made.peers[0].role.members.others[rank].suspended_until = 1e9
    ended(made, bound(4, 14))
    assert made.now < 15
    assert sum(counts(made)) > 0
    assert {number for rank in range(4) for number in waves(made, rank)} == {1}
    if len(without) == 2:  # among two or four, partners average equally despite lost rounds
        conserved(made, tracked)
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
    assert counts(made) == [2] * 4 and rounds_lost(made) == 0
    conserved(made, tracked)


def test_a_peer_that_exchanges_by_pulls_takes_no_part():
    """Different settings cost rounds, but no peer hangs."""
    options = {"policy": "tau:5", "exchange": "waves", "finish": "none"}
    made = ended(world(3, by_rank={2: {"exchange": "pulls"}}, **options), bound(3))
    assert made.peers[2].role.sync.retrievals > 0 and not made.lines(2, "meets")
    assert made.peers[0].role.waves.lost > 0


@pytest.mark.parametrize("size", [2, 4, 6])
def test_a_repeated_request_costs_no_round(size: int):
    """It is answered twice, and the requester takes the first answer; the second is no reason to wait for another."""
    network = Network(bandwidth=4000, delay=0.02, repeat=1.0)
    made = ended(world(size, network=network, policy="tau:4", exchange="waves", blocking=True), bound(size))
    assert made.fired["repeated"] > 50 and rounds_lost(made) == 0
    assert made.now < ITERATIONS + 3.0
