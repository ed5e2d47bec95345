"""The curves of a run or of several seeds, read from the TensorBoard files of the peers."""

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
    """One metric of one peer: iterations and values, (n,) each."""

    iterations: Values
    values: Values

    def at(self, iterations: Values) -> Values:
        """Return the values at other iterations, on straight lines between the own ones."""
        return np.interp(iterations, self.iterations, self.values)


@dataclass(frozen=True)
class Band:
    """One metric of all peers at common points, (n,) each: mean, minimum and maximum; ``x`` is a mean over peers."""

    x: Values
    mean: Values
    least: Values
    most: Values


EMPTY = Band(*(np.empty(0) for _ in range(4)))
"""The band of a metric without records."""


@dataclass(frozen=True)
class Curves:
    """The curves that are drawn for a run, or for runs that differ only in their seeds.

    Attributes:
        by_megabytes: test figure of peers' own models against 10⁶ bytes received per peer while training.
        by_seconds: the same figure against seconds of training.
        retrievals: accumulated retrievals against iterations.
        figure: what is measured on test data: ``accuracy``, or ``loss`` where no accuracy is recorded.
    """

    by_megabytes: Band
    by_seconds: Band
    retrievals: Band
    figure: str = "accuracy"


NEEDED = {"comm/bytes_received", "sync/retrievals", "time/train_seconds"}
FIGURES = ("accuracy", "loss")
"""Figures that peers measure on test data during training, under ``test/``; the first one found is drawn."""


def read(*directories: Path) -> Curves:
    """Read the curves of the peers of runs; those of test data are empty if no peer has evaluated its model.

    If some peers have evaluated their models, those that were lost before are left out. A peer that only serves others
    records none of these curves.

    Args:
        directories: directories of the runs, at least one.

    Raises:
        UsageError: the peers of a run have recorded no curves.
    """
    peers: list[dict[str, Series]] = []
    for directory in directories:
        found = [scalars(one) for one in sorted(directory.glob("peer-*")) if any(one.glob("events.out.tfevents.*"))]
        found = [one for one in found if one.keys() >= NEEDED]
        if not found:
            raise UsageError(
                f"nothing to plot: none of its peers has recorded all of {', '.join(sorted(NEEDED))} with"
                " --recorder tensorboard",
                directory,
            )
        peers += found
    figure = next((name for name in FIGURES if any(f"test/{name}" in one for one in peers)), FIGURES[0])
    tested = [one for one in peers if f"test/{figure}" in one]
    retrievals = [one["sync/retrievals"] for one in tested or peers]
    taken = _band(retrievals, [one.iterations for one in retrievals])
    if not tested:
        return Curves(EMPTY, EMPTY, taken)
    seen = [one[f"test/{figure}"] for one in tested]
    places = [one.iterations for one in seen]
    rows = list(zip(tested, places, strict=True))
    megabytes = [one["comm/bytes_received"].at(place) / 1e6 for one, place in rows]
    seconds = [one["time/train_seconds"].at(place) for one, place in rows]
    return Curves(_band(seen, megabytes), _band(seen, seconds), taken, figure)


def scalars(directory: Path) -> dict[str, Series]:
    """Return the curves of one peer by tag, read from its directory."""
    # Imported here: comparing runs by their summaries needs no TensorBoard.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        rows = {event.step: event for event in events.Scalars(tag)}  # a later record of an iteration replaces the first
        ordered = [rows[step] for step in sorted(rows)]
        columns = [[float(getattr(row, name)) for row in ordered] for name in ("step", "value")]
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
