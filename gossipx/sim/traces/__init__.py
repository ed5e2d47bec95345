"""Traces: recorded deltas of real runs, for simulated peers whose model is too large to train.

A trace is a CSV file. Comments begin with ``#``. The first line without one is the header, ``iteration`` and the names
of the peers. Each further line has an iteration, from 1 without gaps, and each peer's delta in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

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
    numbered = enumerate(text.splitlines(), 1)
    lines = [(number, line.split(",")) for number, line in numbered if line.strip() and not line.startswith("#")]
    if len(lines) < 2:
        raise UsageError("a trace has a header and a line per iteration", file)
    (at, header), *rows = lines
    if header[0] != "iteration" or len(header) < 2:
        raise UsageError("the header of a trace is 'iteration' and the name of each peer, between commas", file, at)
    deltas: list[list[float]] = [[] for _ in header[1:]]
    for iteration, (at, cells) in enumerate(rows, 1):
        if len(cells) != len(header):
            raise UsageError(f"{len(cells)} values, and the header has {len(header)}", file, at)
        if cells[0].strip() != str(iteration):
            raise UsageError(
                f"iteration {cells[0]!r} in place of {iteration}: they count from 1 without gaps", file, at
            )
        for column, cell in zip(deltas, cells[1:], strict=True):
            column.append(_delta(cell, file, at))
    return Trace(deltas)


def _delta(cell: str, file: Path, line: int) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{cell!r} is not a delta: a number of at least 0", file, line)
    return value
