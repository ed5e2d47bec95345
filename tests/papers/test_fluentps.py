"""FluentPS: each test names the section, algorithm, table, figure or equation that it checks."""

from __future__ import annotations

import heapq
import math
import random

import pytest
from shards import Run

from gossipx.server.conditions import Pull, View
from gossipx.server.shard_clock import Decision, Handling, PushDecision, Release, ShardClock, Tick
from gossipx.server.sync_models import DynamicPSSP, sync_model_from


def view(clock: int, pushed: int = 0, workers: int = 4) -> View:
    return View(clock, pushed, workers, fastest=clock + pushed, slowest=clock - 1, buffered=0, gradients=0)


def answers(spec: str, clock: int, draw: float = 0.5) -> list[int]:
    """Return which of the progresses 0 to 9 have their pull answered at that clock."""
    model = sync_model_from(spec)
    pulls = [Pull(0, progress, draw) for progress in range(10)]
    return [pull.progress for pull in pulls if model.may_pull(model.init(), view(clock), pull)]


def ticks(spec: str, workers: int = 4) -> list[int]:
    """Return which of the counts 1 to N let the clock tick."""
    model = sync_model_from(spec)
    counts = range(1, workers + 1)
    return [pushed for pushed in counts if model.may_tick(model.init(), view(3, pushed, workers))]


# --- Table III ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "draw", "answered"),
    [
        ("bsp", 0.5, 4),  # progress < V_train
        ("asp", 0.5, 10),  # progress < V_train + ∞
        ("ssp:0", 0.5, 4),  # progress < V_train + s
        ("ssp:3", 0.5, 7),
        ("drop:3", 0.5, 4),  # progress < V_train
        ("pssp:staleness=3,p=0.3", 0.31, 10),  # progress < V_train + s or rand(0, 1) > P
        ("pssp:staleness=3,p=0.3", 0.29, 7),
        # Section III-E.1: "P equals 0, it becomes ASP, while it reduces to SSP if P is 1", at the draws 0 and nearly 1.
        # Hence draw ≥ P, where Table III has >: a draw of 0 would wait in ASP.
        ("pssp:staleness=3,p=0", 0.0, 10),
        ("pssp:staleness=3,alpha=0", 0.0, 10),
        ("pssp:staleness=3,p=1", 1 - 2**-53, 7),
        ("pssp:staleness=3,alpha=2", 1 - 2**-53, 7),
    ],
)
def test_pull_conditions_at_clock_4(spec: str, draw: float, answered: int):
    """A pull of a progress below ``answered`` is answered; the first column of Table III."""
    assert answers(spec, 4, draw) == list(range(answered))


def test_push_conditions():
    """Count[V_train] == N, and for drop-stragglers Count[V_train] == N_t; the second column of Table III."""
    assert [ticks(spec) for spec in ("bsp", "asp", "ssp", "dsps", "pssp")] == [[4]] * 5
    assert ticks("drop:3") == [3, 4]
    assert ticks("drop:3", workers=2) == [2], "at most the living workers"


def test_dsps():
    """progress < V_train + s with the current s."""
    model = sync_model_from("dsps:staleness=2,low=0,high=4,window=1")
    state = model.init()
    pulls = [Pull(0, progress, 0.5) for progress in range(10)]
    assert [pull.progress for pull in pulls if model.may_pull(state, view(1), pull)] == [0, 1, 2]
    state = model.ticked(state, view(1), 4, 4)
    assert [pull.progress for pull in pulls if model.may_pull(state, view(1), pull)] == [0, 1, 2, 3]


# --- Algorithm 1 --------------------------------------------------------------------------------------


def pushes(clock: ShardClock, worker: int, progress: int) -> list[Decision]:
    clock.push_part(worker, progress)
    return clock.pushed(worker, progress)


def test_every_gradient_is_added_divided_by_the_number_of_workers():
    """Line 15: w ← w + g / N, in the handler of the push."""
    clock = ShardClock(sync_model_from("asp"), workers=range(4))
    assert clock.push_part(0, 0) == PushDecision(Handling.APPLY, 0.25)
    clock.lost(3)
    clock.lost(2)
    assert clock.push_part(1, 0) == PushDecision(Handling.APPLY, 0.5), "N is the number of living workers"
    each = ShardClock(sync_model_from("asp"), "each", workers=range(4))
    assert each.push_part(0, 0) == PushDecision(Handling.APPLY, 1.0)


def test_a_round_of_bulk_synchronous_training():
    """Lines 2 to 5, 12 to 14: pulls wait until all have pushed; they receive one step with the mean."""
    run = Run("bsp", range(3))
    run.iterate(0)
    run.iterate(2)
    assert run.events == [] and run.clock.counts.delayed == 2 and run.weights == [1.0]
    run.iterate(1)
    assert run.events == ["tick 1", "answer 0 0", "answer 2 0", "answer 1 0"]
    assert run.weights == [1.0 - 0.125 * ((1 - 0) + (1 - 2) + (1 - 1)) / 3]
    assert run.clock.counts.delayed == 2, "the last worker's pull finds the clock advanced already"


def test_the_clock_is_ticked_when_the_counted_iteration_is_complete():
    """Lines 16 and 17: Count[progress] of later iterations is known when the clock reaches them."""
    clock = ShardClock(sync_model_from("asp"), workers=range(2))
    assert [pushes(clock, 0, i) for i in range(3)] == [[], [], []]
    assert [pushes(clock, 1, i) for i in range(4)] == [[Tick(1)], [Tick(2)], [Tick(3)], []]


# --- Figure 3: soft barrier and lazy execution --------------------------------------------------------


def figure_3(staleness: int, pulls: str) -> ShardClock:
    """W2 has pushed only g_0, W1 is within the staleness, and W0 one further: its pull is the first that is delayed."""
    clock = ShardClock(sync_model_from(f"ssp:{staleness}"), pulls=pulls, workers=range(3))
    last = {0: staleness + 1, 1: staleness, 2: 0}
    for i in range(staleness + 2):
        for worker in (worker for worker in last if i <= last[worker]):
            pushes(clock, worker, i)
            clock.pull(worker, i, f"W{worker} pulls w_{i + 1}")
    assert clock.clock == 1 and clock.waiting == [f"W0 pulls w_{staleness + 2}"]
    return clock


@pytest.mark.parametrize("staleness", [2, 3])
def test_soft_barrier_answers_after_one_iteration(staleness: int):
    """Figure 3 (a): W0's delayed pull is answered after one more iteration of W2, without W2's g_2 and g_3.

    The figure says s = 3, and stops W0 after g_3 and W2 after g_0. Table III stops it there with s = 2 (progress 3 <
    V_train + s is false with V_train = 1): the figure counts the lead between the last pushes of the two, the table
    between W0's last push and the ticks done. We implement the table; the test shows both.
    """
    clock = figure_3(staleness, "soft")
    pull = f"W0 pulls w_{staleness + 2}"
    assert pushes(clock, 2, 1) == [Tick(2), Release(pull)]
    pushes(clock, 0, staleness + 2)
    assert clock.pull(0, staleness + 2, "next") == [], "the next barrier follows at the next iteration"
    assert clock.counts.delayed == 2


@pytest.mark.parametrize(("staleness", "iterations"), [(2, 3), (3, 4)])
def test_lazy_execution_answers_when_the_slowest_has_caught_up(staleness: int, iterations: int):
    """Figure 3 (b): W0 waits for g_1, g_2 and g_3 of W2 (three; for s see above), then not again soon."""
    clock = figure_3(staleness, "lazy")
    pull = f"W0 pulls w_{staleness + 2}"
    assert pushes(clock, 1, staleness + 1) == []
    for i in range(1, iterations):
        assert pushes(clock, 2, i) == [Tick(i + 1)]
    assert pushes(clock, 2, iterations) == [Tick(iterations + 1), Release(pull)]
    for i in range(staleness + 2, 2 * staleness + 2):
        pushes(clock, 0, i)
        assert clock.pull(0, i, i) == [Release(i)], "it is up to date, so it may lead again"
    assert clock.counts.delayed == 1


def raced(model: str, pulls: str, seconds: tuple[float, ...] = (1.0, 1.25, 2.0), until: float = 200.0) -> Run:
    """Run workers whose iterations take this long, in virtual time."""
    run = Run(model, range(len(seconds)), pulls=pulls)
    ends = [(duration, rank) for rank, duration in enumerate(seconds)]
    while ends and ends[0][0] < until:
        now, rank = heapq.heappop(ends)
        run.iterate(rank)
        at_work = {other for _, other in ends}
        for other in run.able:
            if other not in at_work:
                heapq.heappush(ends, (now + seconds[other], other))
    return run


@pytest.mark.parametrize("staleness", [1, 2, 3, 5])
def test_fewer_pulls_are_delayed_with_lazy_execution(staleness: int):
    """Sections II-B, III-C, IV-B.3: the soft barrier stops a fast worker again and again."""
    lazy, soft = (raced(f"ssp:{staleness}", pulls).clock.counts.delayed for pulls in ("lazy", "soft"))
    assert 0 < lazy < soft / 2


# --- section III-E: probabilistic SSP -----------------------------------------------------------------


def lead_when_stopped(model: str, seed: int) -> int:
    """Return how far a worker gets ahead of a clock that stands still: k = progress − V_train of its delayed pull."""
    clock = ShardClock(sync_model_from(model), workers=range(2), rng=random.Random(seed))
    for progress in range(1000):
        pushes(clock, 0, progress)
        if not clock.pull(0, progress, progress):
            return progress - clock.clock
    raise AssertionError("nothing stops it")


@pytest.mark.parametrize(
    ("staleness", "probability"),
    [
        (3, 0.5),
        pytest.param(3, 0.2, marks=pytest.mark.slow),
        pytest.param(0, 1 / 3, marks=pytest.mark.slow),
    ],
)
def test_constant_pssp_is_ssp_with_a_drawn_staleness(staleness: int, probability: float):
    """Theorem 1: it behaves like SSP with s_i ≥ s at a probability of c (1 − c)^(s_i − s).

    So the mean of s_i is s + 1/c − 1, which is s', the staleness of the SSP whose regret has the same bound (Eq. 3).
    """
    trials = 4000
    leads = [lead_when_stopped(f"pssp:staleness={staleness},p={probability}", seed) for seed in range(trials)]
    for lead in range(staleness, staleness + 4):
        expected = probability * (1 - probability) ** (lead - staleness)
        spread = math.sqrt(expected * (1 - expected) / trials)
        assert leads.count(lead) / trials == pytest.approx(expected, abs=4 * spread)
    assert min(leads) == staleness
    spread = math.sqrt(1 - probability) / probability / math.sqrt(trials)
    assert sum(leads) / trials == pytest.approx(staleness + 1 / probability - 1, abs=4 * spread)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_delayed_pull_waits_for_one_tick_and_its_worker_keeps_its_lead(staleness: int):
    """Sections III-C, III-E.1: the soft barrier's index is V_train, so PSSP behaves "like the SSP model whose staleness
    threshold is s_i", where s_i is the worker's lead, and waits for one iteration of the slowest, not for s_i − s + 1.
    """
    leads = set()
    for seed in range(20):
        clock = ShardClock(
            sync_model_from(f"pssp:staleness={staleness},p=0.4"), pulls="soft", workers=[0, 1], rng=random.Random(seed)
        )
        progress = 0
        for tick in range(1, 4):
            pushes(clock, 0, progress)
            while clock.pull(0, progress, progress):
                progress += 1
                pushes(clock, 0, progress)
            leads.add(progress - clock.clock)
            assert pushes(clock, 1, tick - 1) == [Tick(tick), Release(progress)]
            progress += 1
    assert {staleness, staleness + 1, staleness + 4} <= leads


SLOWER = 1.76
"""Of the time of SSP with the soft barrier and of ASP in Table IV, AlexNet."""


def iterations(model: str, pulls: str) -> float:
    """Return the mean number of iterations of 15 workers, each of which takes a second; the 16th takes ``SLOWER``."""
    run = raced(model, pulls, (1.0,) * 15 + (SLOWER,), 300.0)
    return sum(run.workers[rank].iteration for rank in range(15)) / 15


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5])
def test_constant_pssp_is_faster_than_ssp_at_the_soft_barrier(probability: float):
    """Table IV: 1.15, 1.24 and 1.28 times ASP's time with P = .1, .3 and .5, and 1.76 with SSP.

    Of a worker that is s or more ahead, the jth pull since the last one that waited is the next with a probability of
    c (1 − c)^(j − 1), and then waits for the next tick.
    """
    chances = ((j, probability * (1 - probability) ** (j - 1)) for j in range(1, 400))
    waits = sum(chance * (SLOWER - j % SLOWER) for j, chance in chances)
    expected = 1 + probability * waits
    asp, pssp, ssp = (iterations(model, "soft") for model in ("asp", f"pssp:staleness=3,p={probability}", "ssp:3"))
    assert asp / pssp == pytest.approx(expected, rel=0.03)
    assert asp / pssp < 1.5 < asp / ssp


def test_constant_pssp_saves_time_of_the_ssp_of_the_same_regret():
    """Section IV-B.4: models G and H of Figure 9, "28.5 % training time ... when using soft barrier"."""
    assert 1 - iterations("ssp:12", "soft") / iterations("pssp:staleness=3,p=0.1", "soft") > 0.25


def test_dynamic_probability():
    """Section III-E.2: P(s, k) = 0 for k < s, else α / (1 + e^(s − k)); it grows from α/2 towards α (Theorem 2)."""
    model = sync_model_from("pssp:staleness=3,alpha=0.8")
    assert isinstance(model, DynamicPSSP)
    assert [model.probability(lead, 0.0) for lead in (-1, 0, 2)] == [0, 0, 0]
    assert model.probability(3, 0.0) == pytest.approx(0.4)
    assert model.probability(5, 0.0) == pytest.approx(0.8 / (1 + math.e**-2))
    assert model.probability(1000, 0.0) == pytest.approx(0.8)
    grows = [model.probability(lead, 0.0) for lead in range(3, 20)]
    assert grows == sorted(grows)
    assert sync_model_from("pssp:staleness=3,alpha=5").probability(4, 0.0) == 1.0, "at most 1"


def test_dynamic_probability_by_significance():
    """Section III-E.2: α = SF(g, w) = |g| / |w|: a worker with a larger push waits more often."""
    model = sync_model_from("pssp:staleness=1,alpha=significance")
    seen = view(0)
    for significance, waits in ((0.0, False), (0.5, False), (1.5, True), (math.nan, True), (math.inf, True)):
        pull = Pull(0, 1, draw=0.5, significance=significance)
        assert model.may_pull(None, seen, pull) is not waits
    clock = ShardClock(model, workers=range(2), rng=random.Random(0))
    pushes(clock, 0, 1)
    assert clock.pull(0, 1, "small", significance=1e-9) and not clock.pull(0, 1, "large", significance=10.0)


def test_a_draw_is_kept_while_a_pull_waits():
    """With a new draw at every event, a pull would pass sooner or later, and P would mean nothing."""
    clock = ShardClock(sync_model_from("pssp:staleness=1,p=0.5"), pulls="soft", workers=range(3), rng=random.Random(1))
    assert random.Random(1).random() < 0.5
    pushes(clock, 0, 1)
    assert clock.pull(0, 1, "pull") == []
    for worker in range(3, 40):
        assert clock.joined(worker) == []
