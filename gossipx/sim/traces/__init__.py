"""Traces: recorded deltas of real runs, for simulated peers whose model is too large to train.

A trace is a CSV file. Comments begin with ``#``. The first line without one is the header, ``iteration`` and the names
of the peers. Each further line has an iteration, from 1 without gaps, and each peer's delta in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gossipx.errors import UsageError
from gossipx.specs import suggest, texts


@dataclass(frozen=True)
class Trace:
    """Deltas of a run.

    Attributes:
        deltas: ‖x_t − x_{t−1}‖₂ by peer, then by iteration.
    """

    deltas: list[list[float]]

    def delta(self, rank: int, step: int) -> float:
        """Return the delta of a peer's iteration.

        Args:
            rank: of the peer; peers beyond the recorded ones have the deltas of the first ones again.
            step: the iteration, from 1; those beyond the recorded ones have the delta of the last one.
        """
        deltas = self.deltas[rank % len(self.deltas)]
        return deltas[min(step, len(deltas)) - 1]


def names() -> list[str]:
    """Return the names of the traces that come with gossipx."""
    return sorted(_shipped())


def load(name: str | Path) -> Trace:
    """Return a trace.

    Args:
        name: a file, or one of :func:`names`.

    Raises:
        UsageError: an unknown name, or a file that cannot be read or is not a trace.
    """
    path = Path(name)
    if texts.found(path) != "file":
        if path.suffix or path.name != str(name):
            raise UsageError("no such trace file", path)
        if str(name) not in _shipped():
            near = suggest(str(name), _shipped())
            raise UsageError(f"unknown trace '{name}'{near}: give a file, or one of {', '.join(names())}")
        path = _shipped()[str(name)]
    return _parse(texts.read(path, "trace", 2**19), path)


def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in Path(__file__).parent.glob("*.csv")}


def _parse(text: str, file: Path) -> Trace:
    header, *rows = [line for line in text.splitlines() if line.strip() and not line.startswith("#")] or [""]
    if not header.startswith("iteration,") or not rows:
        raise UsageError(
            "a trace has a header, 'iteration' and the name of each peer between commas, and a line per iteration", file
        )
    try:
        table = np.loadtxt(rows, delimiter=",", ndmin=2)
    except ValueError as error:
        raise UsageError(f"not a trace: {error}", file) from error
    deltas = table[:, 1:].T
    if not np.array_equal(table[:, 0], np.arange(1, len(rows) + 1)):
        raise UsageError("the iterations of a trace count from 1 without gaps", file)
    if len(deltas) != header.count(",") or not ((deltas >= 0) & (deltas < np.inf)).all():
        raise UsageError("each iteration of a trace has a delta of at least 0 for each peer of the header", file)
    return Trace(deltas.tolist())
