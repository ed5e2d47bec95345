"""The curves of a run, read from the TensorBoard files of its peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gossipx.errors import UsageError

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One metric of one peer: iterations, seconds since the epoch, and values, (n,) each."""

    iterations: Values
    moments: Values
    values: Values


@dataclass(frozen=True)
class Band:
    """One metric of all peers at common points: mean, minimum and maximum, (n,) each; ``x`` is a mean over peers."""

    x: Values
    mean: Values
    least: Values
    most: Values


EMPTY = Band(*(np.empty(0) for _ in range(4)))
"""The band of a metric without records."""


@dataclass(frozen=True)
class Curves:
    """The curves that are drawn for a run.

    Attributes:
        by_megabytes: accuracy of peers' own models against 10⁶ bytes received per peer while training.
        by_seconds: the same accuracy against seconds since the first record.
        retrievals: accumulated retrievals against iterations.
    """

    by_megabytes: Band
    by_seconds: Band
    retrievals: Band


def read(directory: Path) -> Curves:
    """Read the curves of a run's peers; those of accuracy are empty if no peer has evaluated its model.

    If some peers have evaluated their models, those that were lost before are left out.

    Args:
        directory: directory of the run.

    Raises:
        UsageError: the peers have recorded no curves.
    """
    peers = [_scalars(one) for one in sorted(directory.glob("peer-*")) if any(one.glob("events.out.tfevents.*"))]
    peers = [one for one in peers if {"comm/bytes_received", "sync/retrievals"} <= one.keys()]
    if not peers:
        raise UsageError("nothing to plot: its peers have recorded no curves of sync/retrievals", directory)
    tested = [one for one in peers if "test/accuracy" in one]
    retrievals = [one["sync/retrievals"] for one in tested or peers]
    taken = _band(retrievals, [one.iterations for one in retrievals])
    if not tested:
        return Curves(EMPTY, EMPTY, taken)
    accuracy = [one["test/accuracy"] for one in tested]
    traffic = [one["comm/bytes_received"] for one in tested]
    megabytes = [
        np.interp(seen.iterations, sent.iterations, sent.values) / 1e6
        for seen, sent in zip(accuracy, traffic, strict=True)
    ]
    began = min(float(one.moments[0]) for peer in tested for one in peer.values())
    seconds = [one.moments - began for one in accuracy]
    return Curves(_band(accuracy, megabytes), _band(accuracy, seconds), taken)


def _scalars(directory: Path) -> dict[str, Series]:
    # Imported here: comparing runs by their summaries needs no TensorBoard.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        rows = {event.step: event for event in events.Scalars(tag)}  # a later record of an iteration replaces the first
        ordered = [rows[step] for step in sorted(rows)]
        columns = [[float(getattr(row, name)) for row in ordered] for name in ("step", "wall_time", "value")]
        found[tag] = Series(*(np.array(column) for column in columns))
    return found


def _band(series: Sequence[Series], x: Sequence[Values]) -> Band:
    """Combine the peers at their common iterations; the points are means of ``x``."""
    common = series[0].iterations
    for one in series[1:]:
        common = np.intersect1d(common, one.iterations)
    at = [np.searchsorted(one.iterations, common) for one in series]
    values = np.stack([one.values[place] for one, place in zip(series, at, strict=True)])
    places = np.stack([one[place] for one, place in zip(x, at, strict=True)])
    return Band(places.mean(0), values.mean(0), values.min(0), values.max(0))
