"""The pairs of peers in each round of a wave."""

from __future__ import annotations

import numpy as np
import pytest

from gossipx.topology import RoundPart, part_in_round, wave_rounds

SIZES = range(1, 131)


def parts(size: int) -> list[dict[int, RoundPart]]:
    """Return the parts by round and position."""
    found = []
    for number in range(wave_rounds(size)):
        row = {position: part_in_round(position, number, size) for position in range(size)}
        found.append({position: part for position, part in row.items() if part})
    return found


@pytest.mark.parametrize(
    ("size", "rounds"), [(1, 0), (2, 1), (3, 3), (4, 2), (5, 4), (7, 4), (8, 3), (9, 5), (100, 8), (128, 7)]
)
def test_number_of_rounds(size: int, rounds: int):
    assert wave_rounds(size) == rounds


def test_partners_mean_each_other():
    for size in SIZES:
        for row in parts(size):
            for position, part in row.items():
                other = row[part.partner]
                assert other.partner == position != part.partner
                assert (other.receives, other.sends) == (part.sends, part.receives)
                assert part.receives or part.sends


def test_all_end_with_the_exact_mean():
    """Simulate the last wave: averages are weighted by the number of models that they contain."""
    rng = np.random.default_rng(1)
    for size in SIZES:
        begin = rng.normal(size=(size, 3))
        models, weights = begin.copy(), np.ones(size)
        for row in parts(size):
            models_then, weights_then = models.copy(), weights.copy()
            for position, part in row.items():
                if not part.receives:
                    continue
                theirs, weight = models_then[part.partner], weights_then[part.partner]
                own = 0 if part.replaces else weights_then[position]
                models[position] = (own * models_then[position] + weight * theirs) / (own + weight)
                weights[position] = own + weight
        np.testing.assert_allclose(models, np.broadcast_to(begin.mean(0), (size, 3)), rtol=0, atol=1e-14)
        assert set(weights) == {float(size)}
