"""Buckets: which tables of a shard travel in one message."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies

from gossipx.server.placement import Bucket, Partition, bucket_size, cut_into_buckets

SIZES = strategies.lists(strategies.tuples(strategies.integers(0, 50), strategies.sampled_from("ab")), max_size=20)


@given(SIZES, strategies.integers(0, 120))
def test_buckets_are_ordered_uniform_and_limited(sizes: list[tuple[int, str]], least: int) -> None:
    partitions = [Partition(number, 0, size) for number, (size, _) in enumerate(sizes)]
    made = cut_into_buckets(partitions, lambda table: (sizes[table][1], 4), least)
    ends = [0, *(one.stop for one in made)]
    assert [one.first for one in made] == ends[:-1] and ends[-1] == len(sizes)
    for one in made:
        held = sizes[one.first : one.stop]
        assert held and len({kind for _, kind in held}) == 1
        assert len(held) == 1 or 4 * sum(size for size, _ in held) <= least
    for one, other in itertools.pairwise(made):  # no bucket had room for the next partition
        held, (size, kind) = sizes[one.first : one.stop], sizes[other.first]
        assert held[0][1] != kind or 4 * (sum(of for of, _ in held) + size) > least


@given(strategies.integers(0, 2**34))
def test_a_shard_is_cut_in_four_at_least_unless_buckets_would_be_too_small_or_too_large(nbytes: int) -> None:
    least = bucket_size(nbytes)
    assert 2**20 <= least <= 2**22
    assert 4 * least <= nbytes or least == 2**20
    assert 4 * (least + 1) > nbytes or least == 2**22


def test_with_zero_each_table_of_some_elements_travels_alone() -> None:
    partitions = [Partition(number, 0, 3) for number in range(4)]
    assert cut_into_buckets(partitions, lambda table: ("float32", 4), 0) == [Bucket(n, n + 1) for n in range(4)]
    assert cut_into_buckets([], lambda table: ("float32", 4), 0) == []
