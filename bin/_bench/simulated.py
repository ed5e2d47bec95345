"""Runs in virtual time for the tables of papers: a scenario as Python values, and its outcome."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossipx.assembly.server import Parts
from gossipx.launch.simulation.run import simulate
from gossipx.metrics import summary
from gossipx.metrics.summary import Summary
from gossipx.settings.scenario import Scenario, load

Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """A simulated run.

    Attributes:
        summary: its figures.
        curves: by rank and tag, the values by iteration; empty unless they were recorded.
    """

    summary: Summary
    curves: list[dict[str, dict[int, float]]]

    @property
    def seconds(self) -> float:
        """Training time of the slowest peer."""
        return max(float(seconds or 0.0) for seconds in self.summary.train_seconds)

    @property
    def retrievals(self) -> float:
        """Mean over the peers that train."""
        return mean(self.summary.of_training(self.summary.retrievals))

    @property
    def accuracy(self) -> float:
        """Mean of the peers' own models at the end of training."""
        return mean(self.summary.test_accuracy_before_finish)


def mean(values: Sequence[float | None]) -> float:
    """Return the mean of the values that are there."""
    there = [float(value) for value in values if value is not None]
    return sum(there) / len(there)


def merged(*layers: Tables) -> dict[str, dict[str, Any]]:
    """Return the tables of a scenario; values of later layers replace those of earlier ones."""
    tables: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for table, values in layer.items():
            tables.setdefault(table, {}).update(values)
    return tables


def written(tables: Tables, **given: Any) -> Scenario:
    """Return a scenario; ``given`` are settings of ``gossipx run`` that replace those of the tables."""
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.toml"
        file.write_text("\n".join(lines) + "\n")
        return load(file, given)


def run(*layers: Tables, curves: bool = False, parts: Parts | None = None) -> Run:
    """Run a scenario.

    Args:
        layers: its tables; later ones replace values of earlier ones.
        curves: whether the curves of all peers are wanted.
        parts: custom parts of a parameter server.

    Raises:
        RuntimeError: it did not end well.
    """
    recorded = {"recorder": "csv" if curves else "none"}
    tables = merged(*layers, {"run": recorded})
    if curves:
        tables["simulation"]["recorded"] = tables["simulation"]["peers"]
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
            code = simulate(written(tables, logdir=folder, name="run"), "run", parts)
        if code:
            raise RuntimeError(f"the simulation ended with exit code {code}: {tables}\n{told.getvalue()}")
        directory = Path(folder) / "run"
        peers = tables["simulation"]["peers"] if curves else 0
        return Run(summary.read(directory), [curves_of(directory / f"peer-{rank:02d}") for rank in range(peers)])


def curves_of(directory: Path) -> dict[str, dict[int, float]]:
    """Return a peer's curves in the directory that it recorded to as CSV: by tag, the values by iteration."""
    found: dict[str, dict[int, float]] = {}
    with (directory / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["tag"], {})[int(row["iteration"])] = float(row["value"])
    return found
