"""The options of a peer that its role does not need: names, output, intervals, and the split of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PeerOptions:
    """Options of a peer that its role does not need.

    Attributes:
        name: this peer's name.
        policy: description of the policy, for the summary.
        codec: spec of the codec, for the summary.
        directory: the run's directory; None: nothing is written.
        log_interval: iterations between two records of the per-step figures.
        distance_interval: iterations between two estimates of the consensus distance (Eq. 8).
        split: returns the sample indices of each rank, given a data set's labels.
        by_label: whether ``split`` uses the values of the labels, or only their number.
        save_model: whether the final model is written.
        under_run: whether ``gossipx run`` started this process.
        metrics: address at which this peer serves its figures to Prometheus; None: it does not.
        peer_timeout: seconds; a peer whose parent process has died ends its step within them.
    """

    name: str
    policy: str
    directory: Path | None
    log_interval: int
    distance_interval: int
    peer_timeout: float
    split: Callable[[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]
    by_label: bool = False
    save_model: bool = True
    under_run: bool = False
    codec: str = "none"
    metrics: tuple[str, int] | None = None
