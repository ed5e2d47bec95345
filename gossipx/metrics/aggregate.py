"""The curves of a whole run: mean and worst of its peers, so that TensorBoard shows one line per run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossipx.metrics.summary import Summary

if TYPE_CHECKING:
    from gossipx.metrics.event_file import EventFile

DIRECTORY = "all"
"""Name of the directory beside those of the peers."""
WORST: dict[str, Callable[[Collection[float]], float] | None] = {
    "test/accuracy": min,
    "test/loss": max,
    "test/bits_per_character": max,
    "train/loss": None,
    "sync/retrievals": None,
    "sync/consensus_distance": None,
    "comm/bytes_received": max,
    "time/blocked_fraction": max,
}
"""The tags that are aggregated, and for those where peers may be bad, which value is the worst."""
METRICS = ("mean/test/accuracy", "mean/test/loss", "mean/comm/bytes_received")
"""Tags that TensorBoard's HPARAMS page shows beside the hyperparameters."""
Record = tuple[str, int, float]
"""Tag, iteration and value of one peer's curve."""


class Aggregate:
    """Collects records of peers and writes their mean and worst under ``mean/TAG`` and ``worst/TAG``.

    An iteration is written once all peers have passed it, so that peers of different speed do not distort the mean.

    Args:
        directory: directory of the run.
        hparams: returns the hyperparameters of the run, when the first curve begins.
        resumes: whether the run resumes: later records in the directory are then hidden.
    """

    def __init__(self, directory: Path, hparams: Callable[[], Mapping[str, str | float]], resumes: bool = False):
        self._directory = directory / DIRECTORY
        self._hparams = hparams
        self._resumes = resumes
        self._file: EventFile | None = None
        self._waiting: dict[tuple[int, str], dict[int, float]] = {}  # by iteration and tag, values by rank
        self._last: dict[str, tuple[int, float]] = {}  # by tag: what was written last

    def add(self, rank: int, records: Sequence[Record]) -> None:
        """Add records of a peer; other tags than those of :data:`WORST` are left out."""
        for tag, step, value in records:
            if tag in WORST:
                self._waiting.setdefault((step, tag), {})[rank] = value

    def write(self, passed: int) -> None:
        """Write the iterations that all peers have ``passed``."""
        for step, tag in sorted(key for key in self._waiting if key[0] <= passed):
            self._add(tag, list(self._waiting.pop((step, tag)).values()), step)

    def conclude(self, summary: Summary) -> None:
        """Write the figures of the final models, for which peers need not have made equally many iterations."""
        figures = {
            "test/accuracy": summary.test_accuracy_before_finish,
            "test/accuracy_after_finish": summary.test_accuracy,
            "test/loss": summary.test_loss_before_finish,
            "test/loss_after_finish": summary.test_loss,
        }
        for tag, values in figures.items():
            present = [value for value in summary.of_training(values) if value is not None]
            if present:
                self._add(tag, present, summary.iterations)

    def close(self) -> None:
        """Flush and close the file, if one was begun."""
        if self._file is not None:
            self._file.close()

    def _add(self, tag: str, values: Sequence[float], step: int) -> None:
        self._scalar(f"mean/{tag}", sum(values) / len(values), step)
        worst = WORST.get(tag.removesuffix("_after_finish"))
        if worst is not None:
            self._scalar(f"worst/{tag}", worst(values), step)

    def _scalar(self, tag: str, value: float, step: int) -> None:
        if self._last.get(tag) == (step, value):
            return
        self._last[tag] = step, value
        from gossipx.metrics import records

        if self._file is None:
            self._file = self._begun(step)
        self._file.add(records.scalar(tag, value), step)

    def _begun(self, step: int) -> Any:
        # Imported here: reading summaries and comparing runs needs no TensorBoard.
        from gossipx.metrics import records
        from gossipx.metrics.event_file import EventFile

        file = EventFile(self._directory, step - 1 if self._resumes else None)
        for part in records.trial(self._hparams(), METRICS):
            file.add(part)
        return file
