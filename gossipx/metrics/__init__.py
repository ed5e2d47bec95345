"""What a run leaves behind: TensorBoard curves, a summary, and the table that compares runs."""

from gossipx.metrics.board import TensorBoardRecorder
from gossipx.metrics.summary import Summary

__all__ = ["Summary", "TensorBoardRecorder"]
