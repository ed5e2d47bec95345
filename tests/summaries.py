"""Summaries of runs for tests."""

from __future__ import annotations

from typing import Any

from gossipx.figures import PER_PEER
from gossipx.metrics.summary import Summary


def summary_of(**given: Any) -> Summary:
    """Return a summary, given its fields and its figures by name."""
    figures = {name: given.pop(name) for name in PER_PEER}
    return Summary(**given, figures=figures)
