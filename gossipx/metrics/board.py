"""The recorder that writes a peer's metrics to TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = {
    "gossipx": {
        "Accuracy against iterations": ["Multiline", ["test/accuracy"]],
        "Accumulated retrievals (Figure 7)": ["Multiline", ["sync/retrievals"]],
        "Delta (Figure 3)": ["Multiline", ["sync/delta$"]],
        "Consensus distance (Eq. 8, Figure 4)": ["Multiline", ["sync/consensus_distance"]],
        "Difference of delta (Figure 5)": ["Multiline", ["sync/delta_difference"]],
        "Training loss": ["Multiline", ["train/loss"]],
        "Bytes received": ["Multiline", ["comm/bytes_received"]],
        "Share of time blocked": ["Multiline", ["time/blocked_fraction"]],
    },
    "gossipx: hub": {
        "Distance to the centre before each exchange": ["Multiline", ["sync/elastic_distance"]],
        "The centre's exchanges": ["Multiline", ["hub/exchanges"]],
    },
    "gossipx: servers": {
        "Clock of each shard": ["Multiline", ["server/clock/"]],
        "Delayed pulls (DPRs) of each shard": ["Multiline", ["server/delayed_pulls/"]],
        "Gradients that each shard took in": ["Multiline", ["server/gradients/"]],
        "Staleness of the gradients that each shard applied": ["Multiline", ["server/staleness/"]],
        "Gradients in each shard's buffer": ["Multiline", ["server/buffered/"]],
        "Threshold K of each shard's buffer (hybrid)": ["Multiline", ["server/threshold/"]],
        "Share of time that workers wait for tables": ["Multiline", ["time/tables_fraction"]],
    },
}
"""Parts of the custom-scalars page; each chart overlays all peers of all runs. Figure and equation numbers are those of
Adaptive Communication."""


class TensorBoardRecorder:
    """Writes scalars to a TensorBoard directory (a :class:`~gossipx.metrics.recorder.Recorder`).

    Args:
        directory: directory of this peer.
        hparams: settings by which TensorBoard's HPARAMS page compares runs.
        parts: parts of :data:`PAGE` that this run has curves for.
        goes_on_from: iteration to resume from; later records in the directory are hidden. None: a new run.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(
        self,
        directory: Path,
        hparams: Mapping[str, Any],
        parts: Sequence[str] = ("gossipx",),
        goes_on_from: int | None = None,
    ):
        # Imported here: reading summaries and comparing runs needs no torch.
        from torch.utils.tensorboard import summary

        from gossipx.metrics.event_file import EventFile

        self._scalar = summary.scalar
        self._file = EventFile(directory, goes_on_from)
        self._file.add(summary.custom_scalars({part: PAGE[part] for part in parts}))  # type: ignore[no-untyped-call]
        # SummaryWriter.add_hparams would create a separate run beside this one. Only the name of the metric is used,
        # not its value.
        for part in summary.hparams(dict(hparams), {"test/accuracy": 0.0}):  # type: ignore[no-untyped-call]
            self._file.add(part)

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Record ``value`` under ``tag`` at iteration ``step``."""
        self._file.add(self._scalar(tag, value), step)  # type: ignore[no-untyped-call]

    def unwritten(self) -> int:
        """Write what waits for the disk. Return how many records could not be written."""
        return self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()
