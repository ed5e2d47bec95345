"""Random faults at random times: every peer ends in bounded time, and no model is partly applied."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from toy import SIZE, TIMEOUT, bound, world

from gossipx.sim import Network
from gossipx.topology import wave_rounds
from gossipx.topology.schedules import SCHEDULES

ITERATIONS = 10
PULLS = 5

MODES = [
    *({}, {"exchange": "waves"}, {"mode": "push"}, {"mode": "push", "weights": "push-sum"}, {"mode": "pushpull"}),
    *({"fragments": 3}, {"fragments": 2, "mode": "push"}, {"fragments": 3, "mode": "pushpull"}),
    *({"across": "momentum:0.3"}, {"across": "momentum:0.3", "mode": "pushpull"}),
    *({"across": "nesterov", "exchange": "waves"}, {"across": "nesterov", "exchange": "waves", "fragments": 3}),
]
times = st.floats(0, 40, allow_nan=False)
ranks = st.integers(0, 4)
FAULTS = st.one_of(
    st.tuples(st.sampled_from(["crash", "restart", "leave"]), ranks, times),
    st.tuples(st.just("pause"), ranks, times, st.floats(0, 30)),
    st.tuples(st.just("poison"), ranks, times, st.floats(0, 30)),
    st.tuples(st.just("cut"), ranks, times, st.floats(0, 30), ranks, st.booleans()),
)


@examples(400, few=60)
@given(
    size=st.integers(2, 5),
    seed=st.integers(0, 100),
    faults=st.lists(FAULTS, max_size=5),
    paces=st.lists(st.floats(0.5, 3), min_size=5, max_size=5),
    loss=st.sampled_from([0.0, 0.0, 0.05]),
    bandwidth=st.sampled_from([4.0 * SIZE, 1e9]),
    repeat=st.sampled_from([0.0, 0.0, 0.1]),
    mode=st.sampled_from(MODES),
    options=st.fixed_dictionaries(
        {
            "blocking": st.booleans(),
            "init": st.sampled_from(["first", "own"]),
            "graph": st.sampled_from(["full", "full", "exponential", "star"]),
            "schedule": st.sampled_from(["random", *SCHEDULES]),
        }
    ),
)
def test_every_run_ends(size, seed, faults, paces, loss, bandwidth, repeat, mode, options):
    network = Network(bandwidth=bandwidth, loss=loss, repeat=repeat, jitter=repeat)
    options.update(mode)
    made = world(size, seed, network, dict(enumerate(paces)), policy="tau:2", iterations=ITERATIONS, **options)
    made.run(0.0)  # run until all have started
    for name, rank, at, *more in faults:
        rank %= size
        match name:
            case "crash" | "restart" | "leave":
                getattr(made, name)(rank, at)
            case "pause" | "poison":
                getattr(made, name)(rank, at, at + more[0])
            case "cut":
                network.cut([rank], [more[1] % size], at, at + more[0], one_way=more[2])
    # The last incarnation starts by 40 s and may be paused for 30 s. A blocking pull may try all neighbours, and a
    # blocking wave, which any peer may start, may wait in each round.
    blocked = PULLS * (size * wave_rounds(size) if "exchange" in mode else size - 1)
    waits = (40 + 5 * 30) / TIMEOUT + 2 + wave_rounds(size) + blocked * options["blocking"]
    limit = bound(size, ITERATIONS, 3.0, waits)
    assert made.run(limit), "\n".join(map(str, made.log[-40:]))
    for rank, peer in made.peers.items():
        life = made.lines(rank)
        begun = len(life) - life[::-1].index("starts")  # its last incarnation
        gone = life.index("is LEFT", begun) if "is LEFT" in life[begun:] else len(life)
        taking_part = "mixes", "adopts", "pulls", "takes", "pushes", "asks"
        assert not [line for line in life[gone:] if line.startswith(taking_part)]
        assert torch.isfinite(peer.weights()).all()
        assert peer.weights().abs().max() < 10  # an average of steps towards targets within this bound
