"""What surrounds a peer's training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from gossipx.errors import UsageError


@dataclass(frozen=True)
class PeerOptions:
    """What surrounds a peer's training.

    Attributes:
        name: this peer's.
        policy: in words.
        codec: as its spec.
        directory: the run's; None: nothing is written.
        log_interval: iterations between two records of the figures of every step.
        distance_interval: iterations between two estimates of the consensus distance (Eq. 8).
        split: indices of a data set's samples for each rank, from its labels.
        by_label: whether that looks at the labels, or at how many there are alone.
        save_model: whether the final model is written.
        under_run: whether ``gossipx run`` started this process: SIGTERM then means leave.
    """

    name: str
    policy: str
    directory: Path | None
    log_interval: int
    distance_interval: int
    split: Callable[[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]
    by_label: bool = False
    save_model: bool = True
    under_run: bool = False
    codec: str = "none"

    def part(self, dataset: Dataset[Any], rank: int) -> list[int]:
        """The indices of a peer's samples of a data set.

        Raises:
            UsageError: it has no labels, and the split needs them.
        """
        return [int(index) for index in self.split(labels_of(dataset, self.by_label))[rank]]


def labels_of(dataset: Dataset[Any], by_label: bool) -> np.ndarray[Any, Any]:
    """The label of each sample, to deal a data set out by; zeros where it has none, and they do not matter.

    Raises:
        UsageError: it has none, and they matter.
    """
    labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if labels is None and by_label:
        raise UsageError("shard deals by label under --partition dirichlet: the data set has no targets or labels")
    length = len(dataset)  # type: ignore[arg-type]
    return np.zeros(length, dtype=np.int64) if labels is None else np.asarray(labels)
