"""The token bucket of ``--max-rate``: when bytes may be sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipx.errors import UsageError
from gossipx.memory import PIECE
from gossipx.transports.pace import BURST, PIECE_LEAST, Pace, parse_rate


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 12.5e6), ("2.5gbit", 312.5e6), ("8kbit", 1e3), ("1 GBIT".replace(" ", ""), 125e6), ("8000bit", 1e3)],
)
def test_rates_use_the_notation_of_tc(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


WRONG = ["100", "mbit", "100MB/s", "-1mbit", "0mbit", "nan bit", "1e9bit", ""]
OUT_OF_RANGE = ["7.999kbit", "1000.001gbit", "9" * 18 + "bit", "9" * 330 + "mbit"]
"""The last one overflows a float."""


@pytest.mark.parametrize("text", [*WRONG, *OUT_OF_RANGE])
def test_an_invalid_rate_is_refused_with_an_example(text: str) -> None:
    told = r"--max-rate .* not a rate from 8kbit to 1000gbit, such as 100mbit or 2.5gbit"
    with pytest.raises(UsageError, match=told):
        parse_rate(text)


def test_the_lowest_and_the_highest_rate_are_sent_in_pieces() -> None:
    for rate in map(parse_rate, ("8kbit", "1000gbit")):
        assert len(next(Pace(rate).parts([bytes(PIECE)]))) in (PIECE_LEAST, PIECE)


@given(
    rate=st.floats(1e3, 1e10),
    sends=st.lists(st.tuples(st.floats(0, 1), st.integers(1, PIECE)), min_size=1, max_size=50),
)
def test_no_interval_sends_more_than_the_rate_and_one_burst(rate: float, sends: list[tuple[float, int]]) -> None:
    """The bound of a token bucket over every interval: bytes ≤ rate · (seconds + BURST), plus the last reservation."""
    clock = Clock()
    pace = Pace(rate, clock)
    begun: list[tuple[float, int]] = []
    for idle, nbytes in sends:
        clock.now += idle
        begun.append((clock.now + pace.reserve(nbytes), nbytes))
        clock.now = begun[-1][0]
    for first in range(len(begun)):
        total = 0
        for when, nbytes in begun[first:]:
            assert total <= rate * (when - begun[first][0] + BURST) * (1 + 1e-9) + 1e-3
            total += nbytes


def test_concurrent_senders_take_turns() -> None:
    """Each sender gets its next piece only after the others had theirs, so all are equally fast."""
    clock = Clock()
    pace = Pace(1e6, clock)
    waits = [pace.reserve(10_000) for _ in range(6)]
    assert waits == pytest.approx([0.01 * place for place in range(6)])


@given(sizes=st.lists(st.integers(0, 3 * PIECE), max_size=4), rate=st.sampled_from([1e3, 1e6, 1e9]))
def test_the_pieces_are_the_bytes_in_their_order(sizes: list[int], rate: float) -> None:
    buffers = [bytes([number]) * size for number, size in enumerate(sizes)]
    pieces = [bytes(part) for part in Pace(rate).parts(buffers)]
    assert b"".join(pieces) == b"".join(buffers)
    assert all(0 < len(piece) <= max(PIECE_LEAST, min(rate / 100, PIECE)) for piece in pieces)


def test_a_refused_reservation_is_not_charged() -> None:
    clock = Clock()
    pace = Pace(1.0, clock)
    clock.now += 100
    assert pace.reserve(2) == 0.0
    late = 2.0 - BURST
    assert [pace.reserve(5, within=1.0) for _ in range(3)] == pytest.approx([late] * 3), "all have the same wait"
    assert pace.reserve(1, within=2.0) == pytest.approx(late)
    assert pace.reserve(1) == pytest.approx(late + 1)
