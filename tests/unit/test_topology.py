"""Who may pull from whom, and who meets whom in an agreement."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gossipx.errors import UsageError
from gossipx.topology import Meeting, agreement_meeting, agreement_rounds, load


@pytest.mark.parametrize(
    ("name", "size", "neighbours"),
    [
        ("full", 1, ((),)),
        ("full", 3, ((1, 2), (0, 2), (0, 1))),
        ("ring", 1, ((),)),
        ("ring", 2, ((1,), (0,))),
        ("ring", 4, ((1, 3), (0, 2), (1, 3), (0, 2))),
        ("star", 1, ((),)),
        ("star", 4, ((1, 2, 3), (0,), (0,), (0,))),
    ],
)
def test_graphs_by_name(name: str, size: int, neighbours: tuple[tuple[int, ...], ...]):
    assert load(name, size).neighbours == neighbours
    assert load(name, size).name == name


def test_an_edge_list(tmp_path: Path):
    path = tmp_path / "line.edges"
    path.write_text("# a line of four\n0 1\n\n2 1  # both ways\n2 3\n3 3\n0 1\n")
    assert load(str(path), 4).neighbours == ((1,), (0, 2), (1, 3), (2,))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0 one\n", "not an edge list"),
        ("0 1 {'weight': \n", "not an edge list"),
        ("0 1\n1 4\n", "node 4 is no rank of a run of 4 peers (0 to 3)"),
        ("0 1\n1 -2\n", "node -2 is no rank"),
        ("0 1\n2 3\n", "reach no others"),
        ("0 1\n1 2\n", "peers [3] reach no others"),
        ("", "reach no others"),
    ],
)
def test_what_a_wrong_file_is_told(tmp_path: Path, text: str, told: str):
    path = tmp_path / "graph.edges"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        load(str(path), 4)
    assert str(raised.value).startswith(f"{path}: ") and told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path):
    path = tmp_path / "graph.edges"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UsageError, match="not an edge list"):
        load(str(path), 2)


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(UsageError) as raised:
        load("rong", 4)
    assert "unknown topology 'rong' (did you mean 'ring'?): one of full, ring, star" in str(raised.value)


# --- the agreement ------------------------------------------------------------------------------------

SIZES = range(1, 131)


def meetings(size: int) -> list[dict[int, Meeting]]:
    """By round and position."""
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
    """By the rule of peer/agreement.py: averages are weighted by how many models they hold."""
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
