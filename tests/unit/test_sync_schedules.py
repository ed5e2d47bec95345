"""Properties of sync models under random schedules of messages, arrivals, losses and switches.

Workers push, then pull, then wait for the answer (``tests/shards.py``).
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from seeds import some
from shards import Answer, Message, Run

from gossipx.server.conditions import Apply
from gossipx.server.shard_clock import ShardClock
from gossipx.server.sync_models import DSPS, SSP, ConstantPSSP, DynamicPSSP, sync_model_from

RANKS = 6
Event = tuple[str, int]

MODELS = [
    "bsp",
    "asp",
    "ssp:0",
    "ssp:2",
    "ssp:inf",
    "dsps:staleness=1,low=0,high=3,window=2",
    "drop:2",
    "drop:1,late=add",
    "drop:3",
    "pssp:staleness=1,p=0.5",
    "pssp:staleness=2,alpha=0.8",
    "hybrid:fixed=1",
    "hybrid:fixed=3",
    "hybrid:step=4",
    "hybrid:double=5",
    "hybrid:fixed=3,wait=true",
    "hybrid:step=4,wait=true,reduce=sum",
]
WAYS = [None, "push", "each", "tick"]


def events(*extra: str) -> st.SearchStrategy[list[Event]]:
    """Generate events: a worker sends a message or rushes ahead, or one of ``extra``. The number selects a worker or a
    model.

    Short schedules keep failures readable; in long ones the clock advances far.
    """
    event = st.tuples(st.sampled_from(["send"] * 8 + ["rush"] * 2 + list(extra)), st.integers(0, 10**6))
    return st.lists(event, max_size=12) | st.lists(event, min_size=30, max_size=60)


CHANGES = ("join", "lose", "switch")
setups = st.tuples(
    st.sampled_from(MODELS),
    st.sampled_from(WAYS),
    st.sampled_from(["lazy", "soft"]),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(0, 100),
)


def start(setup: tuple[str, str | None, str, int, int, int]) -> Run:
    model, way, pulls, workers, tables, seed = setup
    return Run(model, range(workers), None if "hybrid" in model else way, pulls, tables, seed)


def play(run: Run, event: Event) -> None:
    kind, number = event
    able = run.able
    if kind == "send" and able:
        run.send(able[number % len(able)])
    elif kind == "rush" and able:
        rank = able[number % len(able)]
        for _ in range(4):
            if not run.workers[rank].waiting:
                run.iterate(rank)
    elif kind == "join" and len(run.workers) < RANKS:
        free = [rank for rank in range(RANKS) if rank not in run.workers]
        run.join(free[number % len(free)])
    elif kind == "lose" and run.workers:
        run.lose(sorted(run.workers)[number % len(run.workers)])
    elif kind == "switch":
        model = MODELS[number % len(MODELS)]
        way = None if "hybrid" in model else WAYS[number // 100 % len(WAYS)]
        run.model = model
        run.switch(model, way, ["lazy", "soft", None][number // 1000 % 3])


# --- equal models -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ssp:0", "tick"), ("bsp", "tick")),
        (("ssp:0", "push"), ("bsp", "push")),
        (("ssp:inf", None), ("asp", None)),
        (("dsps:staleness=2,low=2,high=2", None), ("ssp:2", None)),
        (("pssp:staleness=2,p=1", None), ("ssp:2", None)),
        (("pssp:staleness=2,p=0", None), ("asp", None)),
        (("pssp:staleness=2,alpha=0", None), ("asp", None)),
        (("pssp:staleness=2,alpha=2", None), ("ssp:2", None)),  # P is ½ · 2 at least
        (("hybrid:fixed=1", None), ("asp", "each")),
        (("hybrid:fixed=1,wait=true,reduce=sum", None), ("asp", "each")),
        (("hybrid:fixed=1,at_once=true", None), ("hybrid:fixed=1", None)),
        (("hybrid:fixed=100,wait=true", None), ("bsp", "tick")),
        (("drop:100", "tick"), ("bsp", "tick")),
    ],
)
@given(st.data())
def test_equal_models(one: tuple[str, str], other: tuple[str, str], data: st.DataObject):
    """Equal clocks, equal answers and an equal sequence of applied gradients, so equal weights to the last bit."""
    tables = 1 if other == ("asp", "each") else data.draw(st.integers(1, 2))
    workers, pulls = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(["lazy", "soft"]))
    runs = [Run(model, range(workers), way, pulls, tables) for model, way in (one, other)]
    for event in data.draw(events("join", "lose")):
        for run in runs:
            play(run, event)
        assert runs[0].state == runs[1].state


# --- no lost wake-up, no early tick, every push once --------------------------------------------------


def condition(run: Run, progress: int, draw: float, applied: bool) -> bool:
    """Table III, written independently of the models' code."""
    name, _, rest = run.model.partition(":")
    lead = progress - run.clock.clock
    if name in ("bsp", "drop"):
        return lead < 0
    if name == "asp":
        return True
    if name == "hybrid":
        return applied or "wait" not in run.model
    if name == "dsps":
        return lead < run.clock.state_dict()["model"]["staleness"]
    if name == "ssp":
        return lead < float(rest)
    staleness = int(rest[len("staleness=")])
    gate = {"pssp:staleness=1,p=0.5": 0.5}.get(run.model, 0.8 / (1 + 2.718281828459045 ** (staleness - lead)))
    return lead < staleness or draw >= gate


def check_nothing_waits_in_vain(run: Run, switched: bool) -> None:
    """Check after every event, by the test's own bookkeeping, that the clock may not tick and no delayed pull may be
    answered.
    """
    clock = run.clock.clock
    needed = len(run.workers)
    if run.model.startswith("drop"):
        needed = min(needed, int(run.model.partition(":")[2].partition(",")[0]))
    have = sum(worker.progress >= clock for worker in run.workers.values())
    assert not run.workers or have < needed, "the clock ticks as soon as it may"
    buffered = {message.life for message in run.buffer}
    for worker in run.workers.values():
        if worker.waiting:
            passes = condition(run, worker.iteration, worker.draw, worker.life not in buffered)
            if "hybrid" in run.model:
                assert not passes
            else:
                assert clock <= worker.index
                assert not (switched and passes), "after a switch the new condition decides at once"
    keys = [(worker.life, worker.iteration) for worker in run.workers.values() if worker.waiting]
    assert sorted(run.clock.waiting) == sorted(keys), "the clock knows every waiting worker"


def check_ticks_are_earned(run: Run, before: int) -> None:
    """Check that all living workers (N_t with drop) have pushed iteration i at the tick from i to i + 1."""
    if run.clock.clock > before:
        reached = sum(worker.progress >= run.clock.clock - 1 for worker in run.workers.values())
        drops = run.model.startswith("drop")
        needed = int(run.model.partition(":")[2].partition(",")[0]) if drops else len(run.workers)
        assert reached >= min(needed, len(run.workers)) >= 1


def check_every_message_once(run: Run) -> None:
    everywhere = [*run.applied, *run.buffer, *run.dropped]
    assert sorted(everywhere) == sorted(run.sent)
    assert len(set(run.sent)) == len(run.sent), "the workers of the test send nothing twice"
    dropped = {message[:2] for message in run.dropped}
    assert not dropped & {message[:2] for message in (*run.applied, *run.buffer)}, (
        "a push is dropped as a whole or not at all"
    )


def check_holding_up(run: Run) -> None:
    """Check that pulls wait for pushes of the clock's iteration, or (hybrid) for gradients in the buffer."""
    expected = {rank for rank, worker in run.workers.items() if worker.progress < run.clock.clock}
    if run.clock.apply is Apply.THRESHOLD and len(run.able) < len(run.workers):
        pushes = {(message.life, message.iteration) for message in run.buffer}
        buffered = {
            rank
            for rank, one in run.workers.items()
            if any(life == one.life and iteration <= one.progress for life, iteration in pushes)
        }
        expected = set(run.workers) - buffered
    assert set(run.clock.holding_up) == expected


@given(events(*CHANGES), setups)
def test_nothing_waits_in_vain_and_every_push_counts_once(played: list[Event], setup: tuple):
    run = start(setup)
    for event in played:
        before = run.clock.clock
        play(run, event)
        check_nothing_waits_in_vain(run, event[0] == "switch")
        check_ticks_are_earned(run, before)
        check_every_message_once(run)
        assert run.clock.progress == {rank: worker.progress for rank, worker in run.workers.items()}
        check_holding_up(run)


@given(events(*CHANGES), setups, st.sampled_from(["drop:1", "drop:2"]))
def test_exactly_the_late_pushes_are_dropped(played: list[Event], setup: tuple, model: str):
    """With drop:late=drop, exactly the pushes whose first message arrives after the tick of their iteration."""
    run = start((model, *setup[1:]))
    late: set[tuple[int, int]] = set()
    for event in played:
        sent = len(run.sent)
        clock, rule = run.clock.clock, run.clock.model.drops_late
        play(run, ("send" if event[0] == "rush" else event[0], event[1]))  # records the decision for each message
        late |= {
            (one.life, one.iteration) for one in run.sent[sent:] if not one.table and rule and one.iteration < clock
        }
        assert {message[:2] for message in run.dropped} == late
    complete = [push for push in late if Message(*push, run.tables - 1) in run.dropped]
    assert run.clock.counts.late == len(complete)


@given(events(*CHANGES), setups)
def test_counts(played: list[Event], setup: tuple):
    run = start(setup)
    for event in played:
        play(run, event)
    counts = run.clock.counts
    complete = [one for one in run.sent if one.table == run.tables - 1]
    assert counts.gradients + counts.late == counts.pulls == len(complete)
    at_once = sum(answer.at_once for answer in run.answers)
    assert counts.delayed == counts.pulls - at_once, "a pull that waits counts once"
    assert run.clock.epoch == sum(kind == "switch" for kind, _ in played)
    assert run.clock.buffered == len({one[:2] for one in run.buffer} & {one[:2] for one in complete})


# --- liveness -----------------------------------------------------------------------------------------


@given(events(*CHANGES), setups)
def test_a_worker_that_keeps_pushing_is_answered(played: list[Event], setup: tuple):
    run = start(setup)
    for event in played:
        play(run, event)
    before = {rank: worker.progress for rank, worker in run.workers.items()}
    apart = max(before.values(), default=0) - min(before.values(), default=0)
    for _ in range(apart + 8):
        assert run.able or not run.workers, "some worker can always continue"
        for rank in run.able:
            if not run.workers[rank].waiting:
                run.iterate(rank)
    for rank, worker in run.workers.items():
        assert worker.progress >= before[rank] + 3, "waiting pulls were answered, and later ones"


# --- staleness of answers -----------------------------------------------------------------------------


def staleness_of(model: str, answers: list[Answer]) -> float:
    """Return s. dsps adapts it, and a worker keeps its lead when s shrinks: the largest s of these answers."""
    made = sync_model_from(model)
    if isinstance(made, DSPS):
        values = [answer.state["staleness"] for answer in answers if isinstance(answer.state, dict)]
        assert len(values) == len(answers) and all(made.low <= value <= made.high for value in values)
        return max([made.staleness, *values])
    assert isinstance(made, SSP | ConstantPSSP | DynamicPSSP)
    return made.staleness


@pytest.mark.parametrize("way", ["push", "tick"])
@pytest.mark.parametrize("pulls", some(["lazy", "soft"], "soft"))
@pytest.mark.parametrize(
    "model",
    [
        *some([f"ssp:{staleness}" for staleness in range(4)], "ssp:0", "ssp:2"),
        "pssp:staleness=1,p=1",
        "pssp:staleness=2,alpha=2",  # P is ½ · 2 at least
        "dsps:staleness=1,low=0,high=3,window=2",
    ],
)
@given(events("join", "lose"), st.integers(1, 4), st.integers(1, 3))
def test_no_answer_is_older_than_the_staleness_allows(
    model: str, pulls: str, way: str, played: list[Event], workers: int, tables: int
):
    """progress < V_train + s: an answer contains all living workers' pushes up to V_train − 1 ≥ progress − s.

    That is the bound of SSP [26]: in iteration c = progress + 1 all updates up to c − s − 1 are seen, in every table. A
    delayed lazy pull waits for V_train > progress: it contains all pushes up to its own iteration, as with BSP.
    """
    run = Run(model, range(workers), way, pulls, tables)
    for event in played:
        seen = len(run.answers)
        play(run, event)
        for answer in run.answers[seen:]:
            allowed = 0 if pulls == "lazy" and not answer.at_once else staleness_of(model, run.answers)
            for worker in run.workers.values():
                due = range(worker.start, int(answer.iteration - allowed) + 1)
                pushes = (Message(worker.life, iteration, table) for iteration in due for table in range(tables))
                assert all(push in answer.applied for push in pushes)


@pytest.mark.parametrize("way", ["push", "tick"])
@pytest.mark.parametrize("pulls", ["lazy", "soft"])
@pytest.mark.parametrize("late", ["drop", "add"])
@given(events("join", "lose"), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_no_answer_lacks_the_pushes_that_drop_waits_for(
    late: str, pulls: str, way: str, played: list[Event], n: int, workers: int, tables: int
):
    """progress < V_train, and Count[i] == N_t for the tick from i: an answer contains, for each iteration up to the
    worker's own, the pushes of N_t workers, or of all workers living then, in every table.
    """
    run = Run(f"drop:{n},late={late}", range(workers), way, pulls, tables)
    for event in played:
        seen = len(run.answers)
        play(run, event)
        for answer in run.answers[seen:]:
            held = Counter((push.iteration, push.table) for push in answer.applied)
            for iteration in range(answer.iteration + 1):
                least = min(n, run.crews[iteration])
                assert all(held[iteration, table] >= least for table in range(tables))


# --- restored clocks ----------------------------------------------------------------------------------


@given(events(*CHANGES), setups, st.integers(0, 40))
def test_a_restored_clock_decides_the_same(played: list[Event], setup: tuple, moment: int):
    run = start(setup)
    rest = iter(played)
    for index, event in enumerate(rest):
        play(run, event)
        if index >= moment and not run.clock.waiting:
            break
    assume(not run.clock.waiting)
    other = copy.deepcopy(run)
    state = json.loads(json.dumps(run.clock.state_dict()))
    made = state["made"]
    other.clock = ShardClock(sync_model_from(made["model"]), made["apply"], made["pulls"], rng=random.Random(12345))
    other.clock.load_state_dict(state)
    assert other.clock.counts == run.clock.counts and other.clock.epoch == run.clock.epoch
    for event in rest:
        play(run, event)
        play(other, event)
        assert run.state == other.state
    assert run.clock.state_dict() == other.clock.state_dict()
