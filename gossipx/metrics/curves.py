"""The curves of a run, read back from what its peers have written for TensorBoard."""

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
    """One figure of one peer: at iterations, (n,), at seconds since the epoch, (n,), its values, (n,)."""

    iterations: Values
    moments: Values
    values: Values


@dataclass(frozen=True)
class Band:
    """A figure of all peers at the same points: their mean with the least and the most, (n,) each; ``x`` is a mean."""

    x: Values
    mean: Values
    least: Values
    most: Values


NOTHING = Band(*(np.empty(0) for _ in range(4)))
"""Of a figure that nobody has recorded."""


@dataclass(frozen=True)
class Curves:
    """What is drawn of a run.

    Attributes:
        by_megabytes: accuracy of peers' own models by 10⁶ bytes received a peer while training.
        by_seconds: the same by seconds since the first record.
        retrievals: accumulated, by iteration.
    """

    by_megabytes: Band
    by_seconds: Band
    retrievals: Band


def read(directory: Path) -> Curves:
    """The curves of a run's peers; those of accuracy are empty if no peer has evaluated its model.

    A peer that was lost before its first evaluation, where others have made one, is left out.

    Args:
        directory: the run's.

    Raises:
        UsageError: there are none.
    """
    peers = [_scalars(one) for one in sorted(directory.glob("peer-*")) if any(one.glob("events.out.tfevents.*"))]
    peers = [one for one in peers if {"comm/bytes_received", "sync/retrievals"} <= one.keys()]
    if not peers:
        raise UsageError("nothing to plot: its peers have left no curves of sync/retrievals", directory)
    tested = [one for one in peers if "test/accuracy" in one]
    retrievals = [one["sync/retrievals"] for one in tested or peers]
    taken = _band(retrievals, [one.iterations for one in retrievals])
    if not tested:
        return Curves(NOTHING, NOTHING, taken)
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
        rows = {
            event.step: event for event in events.Scalars(tag)
        }  # of two at one iteration the later, as a page shows
        ordered = [rows[step] for step in sorted(rows)]
        columns = [[float(getattr(row, name)) for row in ordered] for name in ("step", "wall_time", "value")]
        found[tag] = Series(*(np.array(column) for column in columns))
    return found


def _band(series: Sequence[Series], x: Sequence[Values]) -> Band:
    """Of the iterations that all peers have, by a mean of ``x``."""
    common = series[0].iterations
    for one in series[1:]:
        common = np.intersect1d(common, one.iterations)
    at = [np.searchsorted(one.iterations, common) for one in series]
    values = np.stack([one.values[place] for one, place in zip(series, at, strict=True)])
    places = np.stack([one[place] for one, place in zip(x, at, strict=True)])
    return Band(places.mean(0), values.mean(0), values.min(0), values.max(0))
