"""Partitions: disjoint, complete, the same for all peers, and as skewed as alpha requires."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipx.errors import UsageError
from gossipx.tasks.partition import IID, Contiguous, DataPartition, Dirichlet, partition_from

partitions = st.one_of(
    st.sampled_from([IID(), Contiguous()]),
    st.floats(1e-6, 1e6).map(Dirichlet),
    st.sampled_from([Dirichlet(1e-6), Dirichlet(1e308)]),
)
labellings = st.lists(st.integers(0, 12), max_size=120).map(lambda labels: np.array(labels, np.uint8))
seeds = st.integers(0, 2**64 - 1)
BALANCED = np.arange(12_000) % 10


def class_counts(parts: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    """(parts, classes)."""
    return np.stack([np.bincount(labels[part], minlength=10) for part in parts])


@settings(deadline=None)
@given(partition=partitions, labels=labellings, parts=st.integers(1, 40), seed=seeds)
def test_parts_are_disjoint_and_complete_and_not_empty_if_possible(
    partition: DataPartition, labels: np.ndarray, parts: int, seed: int
) -> None:
    split = partition.split(labels, parts, seed)
    assert len(split) == parts
    assert sorted(np.concatenate(split).tolist()) == list(range(len(labels)))
    assert sum(len(part) > 0 for part in split) == min(parts, len(labels))
    for part in split:
        assert part.dtype == np.int64
        assert np.array_equal(part, np.sort(part))


@settings(deadline=None)
@given(partition=partitions, labels=labellings, parts=st.integers(1, 9), seed=seeds)
def test_every_peer_computes_the_same_split(
    partition: DataPartition, labels: np.ndarray, parts: int, seed: int
) -> None:
    again = partition.split(labels.astype(np.int64), parts, seed)
    for ours, theirs in zip(partition.split(labels, parts, seed), again, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("partition", [IID(), Dirichlet()])
def test_another_seed_is_another_split(partition: DataPartition) -> None:
    splits = [tuple(partition.split(BALANCED, 4, seed)[0].tolist()) for seed in (0, 1, 2**32, 2**63)]
    assert len(set(splits)) == 4


def test_a_split_is_fixed_for_good() -> None:
    """Peers with different versions of numpy must agree, so that these numbers must never change."""
    labels = np.arange(12) % 3
    iid, skewed = (partition.split(labels, 3, 1) for partition in (IID(), Dirichlet(0.5)))
    assert [part.tolist() for part in iid] == [[2, 6, 9, 11], [1, 3, 7, 8], [0, 4, 5, 10]]
    assert [part.tolist() for part in skewed] == [[0, 6, 9], [2, 3, 5, 7, 8, 10, 11], [1, 4]]


@settings(deadline=None)
@given(labels=labellings, parts=st.integers(1, 40), seed=seeds)
def test_iid_parts_differ_by_one_sample_at_most(labels: np.ndarray, parts: int, seed: int) -> None:
    sizes = [len(part) for part in IID().split(labels, parts, seed)]
    assert max(sizes) - min(sizes) <= 1


def test_iid_parts_have_all_classes_alike() -> None:
    counts = class_counts(IID().split(BALANCED, 8, 0), BALANCED)
    # 150 expected of each; a hypergeometric count has a deviation of 11, so that 5 of them bound 80 counts.
    assert np.abs(counts - 150).max() < 55


def test_dirichlet_proportions_have_the_distributions_mean_and_variance() -> None:
    """A component of Dir(α, ..., α) over n parts has mean 1/n and variance (n − 1) / (n² (nα + 1))."""
    parts, alpha = 4, 0.3
    drawn = [class_counts(Dirichlet(alpha).split(BALANCED, parts, seed), BALANCED) / 1_200 for seed in range(100)]
    shares = np.concatenate(drawn, axis=1)  # (parts, 1,000 draws)
    variance = (parts - 1) / (parts**2 * (parts * alpha + 1))
    # Four standard errors of a mean, with 1,000 independent draws of each component.
    assert np.abs(shares.mean(1) - 1 / parts).max() < 4 * np.sqrt(variance / 1_000)
    assert np.abs(shares.var(1) / variance - 1).max() < 0.15


def test_empty_parts_get_one_sample_each_from_the_largest() -> None:
    labels = np.zeros(50, np.int64)  # one class and a tiny alpha: one part draws everything
    sizes = sorted(len(part) for part in Dirichlet(1e-6).split(labels, 6, 0))
    assert sizes == [1, 1, 1, 1, 1, 45]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("dirichlet:alpha=0", "alpha must be a finite number above 0"),
        ("dirichlet:alpha=nan", "alpha must be a finite number above 0"),
        ("dirichlet:alpha=inf", "alpha must be a finite number above 0"),
        ("iid:alpha=1", "takes no keys"),
        ("dirichlett", "did you mean 'dirichlet'"),
    ],
)
def test_wrong_specs_say_what_would_be_right(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        partition_from(spec)


def test_contiguous_parts_are_the_data_set_in_order_whatever_the_seed() -> None:
    parts = Contiguous().split(BALANCED[:11], 4, seed=7)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


@pytest.mark.parametrize("partition", [IID(), Dirichlet(), Contiguous()])
def test_no_parts_are_refused(partition: DataPartition) -> None:
    with pytest.raises(UsageError, match="at least one part, not 0"):
        partition.split(BALANCED, 0, 0)
