"""A peer's part of a data set: streams. Row 84 of the table of faults."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gossipx.errors import UsageError
from gossipx.runtime.training.data import StreamPart, shard_of

pytestmark = pytest.mark.fault(84)
ITEMS = 23


class Stream(IterableDataset[int]):
    """A stream that knows nothing of workers."""

    def __iter__(self) -> Iterator[int]:
        yield from range(ITEMS)


class Divided(Stream):
    """A stream that divides itself among the workers, as the documentation of torch shows it, and knows its length."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(ITEMS) if info is None else range(info.id, ITEMS, info.num_workers)

    def __len__(self) -> int:
        return ITEMS


def nothing(labels: Any) -> Any:
    raise AssertionError("a stream has no labels")


def part(rank: int, size: int, stream: Any = None) -> Any:
    return shard_of(stream or Stream(), nothing, False, rank, lambda: size)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [Stream, Divided])
def test_the_workers_of_a_data_loader_divide_the_part(kind: type[Stream], workers: int) -> None:
    """A peer gets every size-th item from its rank on, and each comes once, from one worker of one peer."""
    loaders = [DataLoader(part(rank, 2, kind()), batch_size=None, num_workers=workers) for rank in range(2)]
    found = [list(loader) for loader in loaders]
    assert [sorted(items) for items in found] == [list(range(rank, ITEMS, 2)) for rank in range(2)]


@pytest.mark.slow
def test_workers_that_are_spawned_divide_it_too() -> None:
    loader = DataLoader(part(1, 2), batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert sorted(loader) == list(range(1, ITEMS, 2))


def test_a_part_is_as_long_as_its_stream_tells() -> None:
    assert [len(DataLoader(part(rank, 3, Divided()), batch_size=None)) for rank in range(3)] == [8, 8, 7]
    with pytest.raises(TypeError, match="'Stream' has no len"):
        len(part(0, 3))


def test_the_items_to_come_are_shared_with_a_newcomer() -> None:
    """When two peers at item 6 learn of a third, the items from there on are divided anew, and none is taken twice."""
    size, taken = 2, {rank: [] for rank in range(3)}
    parts = [iter(StreamPart(Stream(), rank, lambda: size)) for rank in range(3)]
    for rank in range(2):
        while len(taken[rank]) < 3:
            taken[rank].append(next(parts[rank]))
    size = 3
    for rank in range(3):
        taken[rank] += [item for item in parts[rank] if rank < 2 or item >= 6]  # a newcomer starts where others are
    assert sorted(item for items in taken.values() for item in items) == list(range(ITEMS))
    assert taken[2] == [8, 11, 14, 17, 20]


def test_a_stream_has_no_labels_to_divide_by() -> None:
    with pytest.raises(UsageError, match="--partition dirichlet divides by label, and a stream has no list of labels"):
        shard_of(Stream(), nothing, True, 0, lambda: 2)


def test_a_stream_of_datasets_divides_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's streams know their files and the workers of a DataLoader."""
    found = types.ModuleType("datasets.distributed")
    found.split_dataset_by_node = lambda dataset, rank, world_size: (dataset, rank, world_size)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    monkeypatch.setitem(sys.modules, "datasets.distributed", found)
    kind = type("IterableDataset", (Stream,), {"__module__": "datasets.iterable_dataset"})
    stream = kind()
    assert part(1, 3, stream) == (stream, 1, 3)
