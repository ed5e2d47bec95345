"""Placements, and moves between two of them.

P.-Y. Wu, Modularized Parameter Server (2018), section 2.3.1, Algorithm 2 and Code 4.1; X. Yao et al., FluentPS (2019),
section III-A; R. L. Graham, Bounds on Multiprocessing Timing Anomalies (1969).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from gossipx.errors import UsageError
from gossipx.server.placement import (
    BUILT_IN,
    Move,
    Partition,
    Placement,
    Sliced,
    Table,
    Uniform,
    checked,
    moves,
    placement_from,
    seated,
)

SIZES = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 5000)), max_size=25)
SERVERS = st.integers(1, 12)
NAMES = sorted(BUILT_IN)


def tables_of(sizes: Sequence[int]) -> list[Table]:
    return [Table(f"layer{number}", size) for number, size in enumerate(sizes)]


def loads(placed: Sequence[Sequence[Partition]]) -> list[int]:
    return [sum(one.stop - one.start for one in held) for held in placed]


def wholes(by_server: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[list[Partition]]:
    """Return the numbers of the tables on each server, all of which are whole."""
    return [[Partition(number, 0, sizes[number]) for number in held] for held in by_server]


# --- decisions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(sizes=SIZES, servers=SERVERS)
def test_every_element_lies_on_one_server_and_every_empty_table_too(name: str, sizes: list[int], servers: int) -> None:
    placed = placement_from(name).decide(tables_of(sizes), servers)
    assert len(placed) == servers
    elements = [(one.table, element) for held in placed for one in held for element in range(one.start, one.stop)]
    assert sorted(elements) == [(table, element) for table, size in enumerate(sizes) for element in range(size)]
    empty = [one for held in placed for one in held if one.start == one.stop]
    assert sorted(one.table for one in empty) == [table for table, size in enumerate(sizes) if size == 0]
    assert all([one.table for one in held] == sorted({one.table for one in held}) for held in placed)
    assert checked(placement_from(name), tables_of(sizes), servers) == placed


def test_where_ranges_and_slices_end() -> None:
    sizes = [3, 5, 1, 3, 6]
    assert placement_from("range").decide(tables_of(sizes), 3) == wholes([[0], [1, 2], [3, 4]], sizes)
    tables = tables_of([5, 0, 4])
    assert Uniform().decide(tables, 2) == [
        [Partition(0, 0, 3), Partition(2, 0, 2)],
        [Partition(0, 3, 5), Partition(1, 0, 0), Partition(2, 2, 4)],
    ]
    assert Sliced().decide(tables, 2) == [
        [Partition(0, 0, 4)],
        [Partition(0, 4, 5), Partition(1, 0, 0), Partition(2, 0, 4)],
    ]
    assert Sliced().decide(tables_of([3, 0, 3]), 2)[1] == [Partition(1, 0, 0), Partition(2, 0, 3)]


@given(sizes=SIZES, servers=SERVERS)
def test_range_gives_each_server_equally_many_tables_in_order(sizes: list[int], servers: int) -> None:
    placed = placement_from("range").decide(tables_of(sizes), servers)
    assert [one.table for held in placed for one in held] == list(range(len(sizes)))
    counts = [len(held) for held in placed]
    assert max(counts) - min(counts) <= 1


@given(sizes=SIZES, servers=SERVERS)
def test_round_robin_is_code_4_1(sizes: list[int], servers: int) -> None:
    table_to_partitions: dict[int, dict[int, Partition]] = {}
    last = 0
    for number, size in enumerate(sizes):
        table_to_partitions[number] = {last: Partition(number, 0, size)}
        last = (last + 1) % servers
    placed = placement_from("round-robin").decide(tables_of(sizes), servers)
    found = {one.table: {server: one} for server, held in enumerate(placed) for one in held}
    assert found == table_to_partitions


@pytest.mark.parametrize("name", ["heuristic", "greedy"])
@given(sizes=SIZES, servers=SERVERS)
def test_heuristic_is_algorithm_2(name: str, sizes: list[int], servers: int) -> None:
    """``greedy`` differs in the order alone; none exceeds mean + longest · (1 − 1/m)."""
    layers = list(enumerate(sizes))
    if name == "heuristic":
        layers.sort(key=lambda layer: (-layer[1], layer[0]))
    nodes: list[set[int]] = [set() for _ in range(servers)]
    for number, _ in layers:
        least = min(range(servers), key=lambda node: sum(sizes[held] for held in nodes[node]))
        nodes[least].add(number)
    placed = placement_from(name).decide(tables_of(sizes), servers)
    assert placed == wholes([sorted(held) for held in nodes], sizes)
    assert max(loads(placed)) * servers <= sum(sizes) + (servers - 1) * max(sizes, default=0)


@given(sizes=SIZES, servers=SERVERS)
def test_uniform_is_even_to_one_element_in_each_table_and_in_all(sizes: list[int], servers: int) -> None:
    placed = Uniform().decide(tables_of(sizes), servers)
    found = loads(placed)
    assert max(found) - min(found) <= 1
    for number in range(len(sizes)):
        shares = loads([[one for one in held if one.table == number] for held in placed])
        assert max(shares) - min(shares) <= 1


@given(sizes=SIZES, servers=SERVERS)
def test_sliced_is_one_key_space_in_even_ranges(sizes: list[int], servers: int) -> None:
    placed = Sliced().decide(tables_of(sizes), servers)
    found = loads(placed)
    assert max(found) - min(found) <= 1
    keys = [(one.table, one.start) for held in placed for one in held]
    assert keys == sorted(keys), "the next server continues where the previous one ends"
    assert len(keys) <= len(sizes) + servers - 1 or not sizes


# --- custom ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed(Placement):
    """Returns what it was constructed with."""

    given: Any = field(hash=False)

    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        return self.given


def test_a_custom_placement() -> None:
    first, last = [Partition(2, 0, 0), Partition(1, 0, 0), Partition(0, 0, 2)], [Partition(2, 0, 1), Partition(0, 2, 4)]
    placed = checked(placement_from(Fixed([first, [], [Partition(1, 0, 0), *last]])), tables_of([4, 0, 1]), 3)
    assert placed == [[Partition(0, 0, 2), Partition(1, 0, 0)], [], [Partition(0, 2, 4), Partition(2, 0, 1)]], (
        "in order, with one empty partition per empty table"
    )


@pytest.mark.parametrize(
    ("decided", "told"),
    [
        (None, "decide must return a list with a list of partitions for each server"),
        ([Partition(0, 0, 10)], "decide must return a list with a list of partitions for each server"),
        ([[]], "it returned 1 servers instead of 2"),
        ([[(0, 0, 10)], []], "a tuple is not a Partition"),
        ([[Partition(0, 0, 5.0)], []], "Partition(table=0, start=0, stop=5.0) has a number that is not an integer"),
        ([[Partition(2, 0, 1)], []], "there is no table 2: tables are 0 to 1"),
        ([[Partition(-1, 0, 0)], []], "there is no table -1"),
        ([[Partition(0, 0, 11)], []], "table 'layer0' of 10 elements: [0, 11) is out of range"),
        ([[Partition(0, -1, 10)], []], "table 'layer0' of 10 elements: [-1, 10) is out of range"),
        ([[Partition(0, 7, 3)], []], "[7, 3) is out of range"),
        ([[], []], "table 'layer0' of 10 elements: it lies on no server"),
        ([[Partition(0, 0, 10)], []], "table 'layer1' of 0 elements: it lies on no server"),
        (
            [[Partition(0, 0, 9)], [Partition(1, 0, 0)]],
            "table 'layer0' of 10 elements: elements [9, 10) lie on no server",
        ),
        ([[Partition(0, 1, 10)], []], "elements [0, 1) lie on no server"),
        ([[Partition(0, 0, 4)], [Partition(0, 6, 10)]], "elements [4, 6) lie on no server"),
        ([[Partition(0, 0, 6)], [Partition(0, 4, 10)]], "elements [4, 6) lie twice, on server 0 and on server 1"),
        ([[], [Partition(0, 0, 10), Partition(0, 3, 5)]], "elements [3, 5) lie twice, on server 1 and on server 1"),
    ],
)
def test_faults_are_reported_in_one_line(decided: Any, told: str) -> None:
    with pytest.raises(UsageError) as raised:
        checked(Fixed(decided), tables_of([10, 0]), 2)
    assert str(raised.value).startswith("placement Fixed: ") and told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_servers_and_no_such_placement() -> None:
    with pytest.raises(UsageError, match="at least 1 server, not 0"):
        checked(Sliced(), tables_of([1]), 0)
    with pytest.raises(UsageError, match=r"unknown placement 'slice' \(did you mean 'sliced'\?\): one of greedy, heur"):
        placement_from("slice")


# --- moves ----------------------------------------------------------------------------------------


def by_server(placement: Placement, tables: Sequence[Table], servers: Sequence[str]) -> dict[str, list[Partition]]:
    return dict(zip(servers, checked(placement, tables, len(servers)), strict=True))


def moved(found: Sequence[Move[str]]) -> int:
    return sum(one.stop - one.start for one in found)


def holders(placed: dict[str, list[Partition]]) -> dict[tuple[int, int], str]:
    """Return the server of each element; a table without elements has element −1."""
    found = {}
    for server, held in placed.items():
        for one in held:
            found.update({(one.table, element): server for element in range(one.start, one.stop) or (-1,)})
    return found


@pytest.mark.parametrize("name", NAMES)
@examples(50)
@given(sizes=st.lists(st.integers(0, 40), max_size=12), data=st.data())
def test_moves_are_exactly_the_difference(name: str, sizes: list[int], data: Any) -> None:
    servers = st.lists(st.sampled_from("abcdefg"), min_size=1, unique=True)
    old, new = (by_server(placement_from(name), tables_of(sizes), data.draw(servers)) for _ in range(2))
    found = moves(old, new)
    before, after = holders(old), holders(new)
    told = {
        (one.table, element): (one.source, one.target)
        for one in found
        for element in range(one.start, one.stop) or (-1,)
    }
    assert told == {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    assert moved(found) == sum(element >= 0 for _, element in told), "no element moves twice"
    assert [(one.table, one.start) for one in found] == sorted((one.table, one.start) for one in found)
    for one, other in itertools.pairwise(found):
        same = (one.table, one.stop, one.source, one.target) == (other.table, other.start, other.source, other.target)
        assert not same, "two moves that should be one"


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ({}, "table 0 after the move: it lies on no server"),
        ({"a": [Partition(0, 0, 5)]}, "table 0 after the move: elements [5, 6) lie on no server"),
        ({"a": [Partition(0, 0, 7)]}, "table 0 before the move: elements [6, 7) lie on no server"),
        ({"a": [Partition(0, 0, 6)], "b": [Partition(0, 0, 1)]}, "elements [0, 1) lie twice"),
        ({"a": [Partition(0, 0, 6), Partition(1, 0, 1)]}, "table 1 before the move: it lies on no server"),
    ],
)
def test_moves_between_placements_of_different_elements_are_refused(after: Any, told: str) -> None:
    with pytest.raises(UsageError) as raised:
        moves({"a": [Partition(0, 0, 6)]}, after)
    assert told in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("servers", range(1, 6))
def test_sliced_moves_as_little_as_an_even_cut_in_order_can(servers: int) -> None:
    """Compared with all orders of the new servers."""
    tables = tables_of([7, 0, 53, 60, 300])  # 420 elements divide evenly by each number of servers here
    names = list("abcdef")[:servers]
    old = by_server(Sliced(), tables, names)

    def cost(order: Sequence[str]) -> int:
        return moved(moves(old, by_server(Sliced(), tables, order)))

    least = min(cost(order) for order in itertools.permutations([*names, "new"]))
    assert cost(seated(names, "new")) == least <= cost([*names, "new"]) == 210
    for gone in names if servers > 1 else ():
        rest = [name for name in names if name != gone]
        assert cost(rest) == min(cost(order) for order in itertools.permutations(rest))
