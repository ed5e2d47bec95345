"""Summaries of runs for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossipx.metrics.summary import Summary, per_peer


def summary_of(*reports: Mapping[str, Any] | None, **given: Any) -> Summary:
    """Return the summary of peers with these reports, None for a lost one; ``given``: its fields and figures."""
    figures = per_peer(reports)
    figures.update({name: given.pop(name) for name in figures.keys() & given.keys()})
    lost = [f"localhost:{29400 + rank}" for rank, report in enumerate(reports) if report is None]
    fields = {"name": "mine", "policy": "tau:period=10", "codec": "none", "seed": 0, "peers": len(reports)}
    fields |= {"task": "fashion-mnist", "model": "lenet", "partition": "iid", "iterations": 300, "wall_seconds": 12.5}
    fields |= {"consensus_accuracy": 0.875, "consensus_loss": 0.375, "agreed": True, "lost": lost, "stopped": []}
    return Summary(**{**fields, **given}, figures=figures)
