"""The recorder that writes a peer's metrics to TensorBoard, and the page that overlays the curves of runs."""

from __future__ import annotations

import importlib.resources
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gossipx.specs import toml

WHOLE = "gossipx"
"""The page's part with one curve per run."""
TEXT = "gossipx: text"
PEERS = "gossipx: peers"
HUB = "gossipx: hub"
SERVERS = "gossipx: servers"

_CHARTS = importlib.resources.files("gossipx.metrics").joinpath("page.toml").read_text("utf-8")
PAGE: dict[str, dict[str, list[str]]] = toml.loads(_CHARTS, Path("page.toml"))
"""Parts of the custom-scalars page: for each chart by title, the patterns that the tags of its curves begin with."""


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
