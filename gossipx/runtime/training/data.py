"""A peer's part of a data set: indices of one that has a length, and every ``size``-th item of a stream."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from gossipx.errors import UsageError

Split = Callable[[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]


def shard_of(dataset: Any, split: Split, by_label: bool, rank: int, size: Callable[[], int]) -> Dataset[Any]:
    """Return a peer's part of a data set: a Subset, or a stream of a stream.

    Args:
        dataset: has a length; or a stream, torch's or that of Hugging Face's ``datasets``.
        split: returns the sample indices of each rank, given the labels of a data set with a length.
        by_label: whether ``split`` uses the values of the labels, or only their number.
        rank, size: the peer's rank, and the number of peers, asked for each item of a stream.

    Raises:
        UsageError: the split needs labels, and the data set has none.
    """
    if not isinstance(dataset, IterableDataset):
        return Subset(dataset, [int(index) for index in split(labels_of(dataset, by_label))[rank]])
    if by_label:
        raise UsageError("--partition dirichlet divides by label, and a stream has no list of labels: leave it out")
    if type(dataset).__module__.partition(".")[0] == "datasets":
        # It divides itself among the workers of a DataLoader, and by files if their number is a multiple of the size.
        from datasets.distributed import split_dataset_by_node  # type: ignore[import-not-found, unused-ignore]

        stream: Dataset[Any] = split_dataset_by_node(dataset, rank, size())
        return stream
    return StreamPart(dataset, rank, size)


def labels_of(dataset: Dataset[Any], by_label: bool) -> np.ndarray[Any, Any]:
    """Return the label of each sample; zeros if there are no labels and ``by_label`` is false.

    Raises:
        UsageError: there are no labels, and ``by_label`` is true.
    """
    labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if labels is None and by_label:
        raise UsageError("--partition dirichlet divides by label, and the data set has no targets or labels")
    length = len(dataset)  # type: ignore[arg-type]
    return np.zeros(length, dtype=np.int64) if labels is None else np.asarray(labels)


class StreamPart(IterableDataset[Any]):
    """Every ``size``-th item of a stream, from item ``rank`` on.

    The workers of a DataLoader each read the whole stream and take these items in turn. A stream that divides itself
    among workers sees none, since each of them would else take a part of a part, and the other items would never come.

    Args:
        stream: yields the same items in the same order in all peers.
        rank: the peer's rank.
        size: returns the number of peers; asked at each item, so that a peer that joins the run gets its share of the
            items that are still to come. A worker process asks when it starts.
    """

    def __init__(self, stream: IterableDataset[Any], rank: int, size: Callable[[], int]):
        self._stream = stream
        self._rank = rank
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        with _no_workers():
            items = enumerate(self._stream)
        while True:
            with _no_workers():
                index, item = next(items, (-1, None))
            if index < 0:
                return
            turn, owner = divmod(index, self._size())
            if owner == self._rank and turn % workers == worker:
                yield item

    def __len__(self) -> int:
        """Return the number of items if the stream tells its own; a TypeError, as without this method, if not."""
        return len(range(self._rank, len(self._stream), self._size()))  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker process, which has no peer to ask."""
        return {**vars(self), "_size": functools.partial(int, self._size())}


@contextlib.contextmanager
def _no_workers() -> Iterator[None]:
    """Let ``get_worker_info`` return None meanwhile, as outside of a DataLoader's worker."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info
