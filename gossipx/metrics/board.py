"""The recorder that writes a peer's metrics to TensorBoard, and the page that overlays the curves of runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

WHOLE = "gossipx"
"""The page's part with one curve per run."""
TEXT = "gossipx: text"
PEERS = "gossipx: peers"
HUB = "gossipx: hub"
SERVERS = "gossipx: servers"

PAGE: dict[str, dict[str, list[str]]] = {
    WHOLE: {
        "Test accuracy: mean over peers": ["mean/test/accuracy$"],
        "Test loss: mean over peers": ["mean/test/loss$"],
        "Test accuracy: worst peer": ["worst/test/accuracy$"],
        "Test loss: worst peer": ["worst/test/loss$"],
        "Accumulated retrievals: mean over peers (Figure 7)": ["mean/sync/retrievals"],
        "Bytes received: mean over peers": ["mean/comm/bytes_received"],
        "Consensus distance: mean over peers (Eq. 8)": ["mean/sync/consensus_distance"],
        "Training loss: mean over peers": ["mean/train/loss"],
        "Share of time blocked: mean over peers": ["mean/time/blocked_fraction"],
    },
    TEXT: {"Test loss in bits per character: mean over peers": ["mean/test/bits_per_character$"]},
    PEERS: {
        "Test accuracy against iterations": ["test/accuracy$"],
        "Test loss against iterations": ["test/loss$"],
        "Accumulated retrievals (Figure 7)": ["sync/retrievals"],
        "Delta": ["sync/delta$"],
        "Deltas between retrievals, by number of the retrieval (Figure 3)": ["retrieval/delta"],
        "Distance, by number of the retrieval (Eq. 8, Figure 4)": ["retrieval/distance"],
        "Consensus distance (Eq. 8)": ["sync/consensus_distance"],
        "Difference of delta (Figure 5)": ["sync/delta_difference"],
        "Distance travelled since the last retrieval": ["sync/travelled"],
        "Training loss": ["train/loss"],
        "Bytes received": ["comm/bytes_received"],
        "Share of time blocked": ["time/blocked_fraction"],
    },
    HUB: {
        "Distance to the centre before each exchange": ["sync/elastic_distance"],
        "The centre's exchanges": ["hub/exchanges"],
    },
    SERVERS: {
        "Clock of each shard": ["server/clock/"],
        "Delayed pulls (DPRs) of each shard": ["server/delayed_pulls/"],
        "Gradients that each shard took in": ["server/gradients/"],
        "Staleness of the gradients that each shard applied": ["server/staleness/"],
        "Gradients in each shard's buffer": ["server/buffered/"],
        "Threshold K of each shard's buffer (hybrid)": ["server/threshold/"],
        "Share of time that workers wait for tables": ["time/tables_fraction"],
    },
}
"""Parts of the custom-scalars page. The charts of the first two have one curve per run; those of the others overlay all
peers of all runs. Figure and equation numbers are those of Adaptive Communication."""


def page(parts: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return the charts of some parts of :data:`PAGE`: without those of accuracy in a run on text, which has none."""
    return {
        part: {title: tags for title, tags in PAGE[part].items() if TEXT not in parts or "accuracy" not in tags[0]}
        for part in parts
    }


class TensorBoardRecorder:
    """Writes scalars to a TensorBoard directory (a :class:`~gossipx.metrics.recorder.Recorder`).

    Args:
        directory: directory of this peer.
        parts: parts of :data:`PAGE` that this run has curves for.
        resume_step: iteration to resume from; later records in the directory are hidden. None: a new run.
        clock: returns the time of a record, in seconds.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(
        self,
        directory: Path,
        parts: Sequence[str] = (WHOLE, PEERS),
        resume_step: int | None = None,
        clock: Callable[[], float] = time.time,
    ):
        # Imported here: reading summaries and comparing runs needs no TensorBoard.
        from gossipx.metrics import records
        from gossipx.metrics.event_file import EventFile

        self._scalar = records.scalar
        self._file = EventFile(directory, resume_step, clock)
        self._file.add(records.page(page(parts)))

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Record ``value`` under ``tag`` at iteration ``step``."""
        self._file.add(self._scalar(tag, value), step)

    def unwritten(self) -> int:
        """Write what waits for the disk. Return how many records could not be written."""
        return self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()
