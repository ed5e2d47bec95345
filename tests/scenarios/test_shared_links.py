"""The modelled network: transfers share links, and each moves at the least of its shares."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipx.sim import Network, World
from gossipx.sim.network import limit_of_loss


def idle() -> World:
    """Return a world without peers that runs as long as actions are due."""
    made = World(0)
    made.start(0, lambda number: (_ for _ in ()).throw(AssertionError), at=1e9)
    return made


def arrivals(network: Network, transfers: list[tuple[float, int, int, float]]) -> list[float]:
    """Return when each transfer (start, sender, receiver, bytes) arrives."""
    made, found = idle(), [math.nan] * len(transfers)

    def start(number: int) -> None:
        _, sender, receiver, nbytes = transfers[number]
        network.carry(sender, receiver, nbytes, made, random.Random(0), lambda: arrived(number))

    def arrived(number: int) -> None:
        found[number] = made.now

    for number, (at, *_) in enumerate(transfers):
        made.at(at, functools.partial(start, number))
    made.run(1e6)
    return found


SITES = {"sites": [0, 0, 1, 1]}
ACROSS = [(0, 0, 2, 100), (0, 1, 3, 100)]


@pytest.mark.parametrize(
    ("options", "transfers", "expected"),
    [
        ({}, [(0, 0, 1, 100), (0, 0, 2, 100)], [20, 20]),
        ({}, [(0, 0, 1, 100), (0, 2, 1, 100)], [20, 20]),
        ({}, [(0, 0, 1, 100), (0, 1, 0, 100)], [10, 10]),
        # From 5 s on they share: 50 bytes are left of the first, in 10 s; the second has its rest alone.
        ({}, [(0, 0, 1, 100), (5, 0, 2, 100)], [15, 20]),
        ({"links": {1: (10, 2)}}, [(0, 0, 1, 100)], [50]),
        ({**SITES, "uplink": 10}, [*ACROSS, (0, 2, 3, 100)], [20, 20, 20]),
        (SITES, ACROSS, [10, 10]),
        # Two messages of 100 bytes take 2 s longer together, and one of 200 bytes takes 1 s longer.
        ({"per_message": 1.0}, [(0, 0, 1, 100), (0, 0, 2, 100), (100, 0, 1, 200)], [22, 22, 121]),
    ],
    ids=[
        *("one sender", "one receiver", "both directions", "another ends", "narrower link", "one uplink"),
        *("wide uplinks", "time of each message"),
    ],
)
def test_transfers_share_links_of_10_bytes_a_second(
    options: dict[str, Any], transfers: list[tuple[float, int, int, float]], expected: list[float]
) -> None:
    assert arrivals(Network(bandwidth=10, **options), transfers) == expected


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 4), st.integers(0, 4), st.floats(1, 100)), min_size=1, max_size=12
    )
)
def test_no_link_carries_more_than_it_can(transfers: list[tuple[float, int, int, float]]) -> None:
    chosen = [one for one in transfers if one[1] != one[2]]
    found = arrivals(Network(bandwidth=10), chosen)
    for (start, _, _, nbytes), end in zip(chosen, found, strict=True):
        assert end - start >= nbytes / 10 - 1e-6
    for end_of in (1, 2):
        for peer in range(5):
            own = [(one, end) for one, end in zip(chosen, found, strict=True) if one[end_of] == peer]
            if own:
                span = max(end for _, end in own) - min(one[0] for one, _ in own)
                assert sum(one[3] for one, _ in own) <= 10 * span + 1e-6


def test_loss_limits_a_connection_by_mathis() -> None:
    """Mathis et al. 1997, Eq. 3: MSS / RTT · √(3/2) / √p."""
    assert limit_of_loss(0.01, 0.05) == pytest.approx(1448 / 0.1 * math.sqrt(1.5) / 0.1)
    assert limit_of_loss(0.0, 0.05) == math.inf
    limited = Network(bandwidth=1e9, delay=0.05, lossy=0.01)
    assert arrivals(limited, [(0, 0, 1, 1e6)])[0] == pytest.approx(1e6 / limit_of_loss(0.01, 0.05))


def test_latency_between_sites_is_longer() -> None:
    network, rng = Network(delay=0.001, far=0.1, sites=[0, 0, 1]), random.Random(0)
    assert network.latency(0, 1, 0, 0.0, rng) == 0.001
    assert network.latency(0, 2, 0, 0.0, rng) == pytest.approx(0.101)


def test_actions_at_one_time_keep_their_order() -> None:
    made, seen = idle(), []
    for number in range(5):
        made.at(1.0, lambda number=number: seen.append(number))  # type: ignore[misc]
    made.at(0.5, lambda: made.at(0.1, lambda: seen.append("late")))
    made.run(limit=50)
    assert seen == ["late", 0, 1, 2, 3, 4], "an action that is past is due now"
