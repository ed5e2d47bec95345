"""The pairs of peers in each round of an agreement."""

from __future__ import annotations

import numpy as np
import pytest

from gossipx.topology import Meeting, agreement_meeting, agreement_rounds

SIZES = range(1, 131)


def meetings(size: int) -> list[dict[int, Meeting]]:
    """Return the meetings by round and position."""
    found = []
    for number in range(agreement_rounds(size)):
        row = {position: agreement_meeting(position, number, size) for position in range(size)}
        found.append({position: meeting for position, meeting in row.items() if meeting})
    return found


@pytest.mark.parametrize(
    ("size", "rounds"), [(1, 0), (2, 1), (3, 3), (4, 2), (5, 4), (7, 4), (8, 3), (9, 5), (100, 8), (128, 7)]
)
def test_number_of_rounds(size: int, rounds: int):
    assert agreement_rounds(size) == rounds


def test_partners_mean_each_other():
    for size in SIZES:
        for row in meetings(size):
            for position, meeting in row.items():
                other = row[meeting.partner]
                assert other.partner == position != meeting.partner
                assert (other.takes, other.gives) == (meeting.gives, meeting.takes)
                assert meeting.takes or meeting.gives


def test_all_end_with_the_exact_mean():
    """Simulate the last wave: averages are weighted by the number of models that they contain."""
    rng = np.random.default_rng(1)
    for size in SIZES:
        begin = rng.normal(size=(size, 3))
        models, weights = begin.copy(), np.ones(size)
        for row in meetings(size):
            models_then, weights_then = models.copy(), weights.copy()
            for position, meeting in row.items():
                if not meeting.takes:
                    continue
                theirs, weight = models_then[meeting.partner], weights_then[meeting.partner]
                own = 0 if meeting.whole else weights_then[position]
                models[position] = (own * models_then[position] + weight * theirs) / (own + weight)
                weights[position] = own + weight
        np.testing.assert_allclose(models, np.broadcast_to(begin.mean(0), (size, 3)), rtol=0, atol=1e-14)
        assert set(weights) == {float(size)}
