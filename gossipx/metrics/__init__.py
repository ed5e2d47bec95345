"""The metrics of a run: TensorBoard curves, a summary, plots, and the table that compares runs."""

from gossipx.metrics.board import TensorBoardRecorder
from gossipx.metrics.summary import Summary

__all__ = ["Summary", "TensorBoardRecorder"]
