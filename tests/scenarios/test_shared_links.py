"""The modelled network: transfers share links, and each moves at the least of its shares."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipx.sim import Network, World
from gossipx.sim.network import Agenda, limit_of_loss


class Clock:
    """Actions in order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._due.append((time, len(self._due), action))

    def run(self) -> None:
        done: set[int] = set()
        while left := [one for one in self._due if one[1] not in done]:
            self.now, number, action = min(left, key=lambda one: one[:2])
            done.add(number)
            action()


def arrivals(network: Network, transfers: list[tuple[float, int, int, float]]) -> list[float]:
    """Return when each transfer (start, sender, receiver, bytes) arrives."""
    clock, found = Clock(), [math.nan] * len(transfers)
    agenda: Agenda = clock
    rng = random.Random(0)

    def start(number: int) -> None:
        _, sender, receiver, nbytes = transfers[number]

        def arrived() -> None:
            found[number] = clock.now

        network.carry(sender, receiver, nbytes, agenda, rng, arrived)

    for number, (at, *_) in enumerate(transfers):
        clock.at(at, lambda number=number: start(number))  # type: ignore[misc]
    clock.run()
    return found


def test_two_transfers_from_one_peer_take_twice_as_long() -> None:
    assert arrivals(Network(bandwidth=10), [(0, 0, 1, 100), (0, 0, 2, 100)]) == [20, 20]
    assert arrivals(Network(bandwidth=10), [(0, 0, 1, 100), (0, 2, 1, 100)]) == [20, 20]


def test_a_message_occupies_its_links_besides_its_bytes() -> None:
    """Two messages of 100 bytes take 2 s longer together, and one of 200 bytes takes 1 s longer."""
    network = Network(bandwidth=10, per_message=1.0)
    assert arrivals(network, [(0, 0, 1, 100), (0, 0, 2, 100), (100, 0, 1, 200)]) == [22, 22, 121]


def test_both_directions_of_a_link_are_independent() -> None:
    assert arrivals(Network(bandwidth=10), [(0, 0, 1, 100), (0, 1, 0, 100)]) == [10, 10]


def test_a_transfer_speeds_up_when_another_ends() -> None:
    """From 5 s on they share: 50 bytes are left of the first, which then takes 10 s; the second has its rest alone."""
    assert arrivals(Network(bandwidth=10), [(0, 0, 1, 100), (5, 0, 2, 100)]) == [15, 20]


def test_the_narrower_link_counts() -> None:
    assert arrivals(Network(bandwidth=10, links={1: (10, 2)}), [(0, 0, 1, 100), (0, 0, 2, 100)])[0] == 50


def test_sites_share_their_uplink() -> None:
    network = Network(bandwidth=10, sites=[0, 0, 1, 1], uplink=10)
    assert arrivals(network, [(0, 0, 2, 100), (0, 1, 3, 100), (0, 2, 3, 100)]) == [20, 20, 20]
    assert arrivals(Network(bandwidth=10, sites=[0, 0, 1, 1]), [(0, 0, 2, 100), (0, 1, 3, 100)]) == [10, 10]


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
    made, seen = World(0), []
    for number in range(5):
        made.at(1.0, lambda number=number: seen.append(number))  # type: ignore[misc]
    made.at(0.5, lambda: made.at(0.1, lambda: seen.append("late")))
    made.start(0, lambda number: (_ for _ in ()).throw(AssertionError), at=99.0)
    made.run(limit=50)
    assert seen == ["late", 0, 1, 2, 3, 4], "an action that is past is due now"
