"""Scenarios of ``gossipx simulate``, and what comes out of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from gossipx.cli import main
from gossipx.metrics import summary
from gossipx.metrics.summary import Summary

MODEL = 4 * 1_727_962
"""Bytes of resnet110."""
TRAFFIC = {
    "simulation": {"peers": 6, "work": "traffic", "model": "resnet110"},
    "run": {"iterations": 200, "recorder": "none"},
}
ALONE = {"simulation": {"announcements": False}, "sync": {"finish": "none"}}


def scenario(folder: Path, *layers: dict[str, Any], faults: list[dict[str, Any]] | None = None) -> Path:
    """Write a scenario: tables of values, of which later ones replace earlier ones."""
    tables: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for table, values in layer.items():
            tables.setdefault(table, {}).update(values)
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    for fault in faults or []:
        lines += ["[[faults]]", *(f"{name} = {json.dumps(value)}" for name, value in fault.items())]
    file = folder / "mine.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def command(file: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["simulate", str(file), "--logdir", str(file.parent / "runs"), *options])


def simulated(file: Path, *options: str, code: int = 0) -> Summary:
    """Run a scenario; return its summary."""
    done = command(file, "--overwrite", "--name", "one", *options)
    assert done.exit_code == code, done.output + str(done.exception)
    return summary.read(file.parent / "runs" / "one")
