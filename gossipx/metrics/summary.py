"""``summary.json``: the figures of a finished run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossipx.errors import UsageError

FILE = "summary.json"
Figures = list[float | None]
"""One number a peer, by rank; None for a peer that did not finish."""


@dataclass(frozen=True)
class Summary:
    """The figures of a run. Lists have an entry a peer, by rank, None for a peer that is lost.

    A run that has gone on from checkpoints counts from its beginning: all that led to its final models. What a process
    did after its last checkpoint, and lost, does not count.

    Attributes:
        name: of the run.
        policy: as a spec.
        codec: of models on the wire.
        seed: of the run.
        peers: how many began.
        task: the data that were trained on; None for a user's script.
        model: what was trained; None for a user's script.
        partition: how the data were dealt out.
        iterations: the run's length.
        retrievals: models of others mixed while training, whoever began it.
        taken_in: models of others that a hub took into its centre.
        delayed_pulls: DPRs of the shards that this peer holds: an iteration's pulls by one worker count once a shard if
            they had to wait; 0 elsewhere.
        bytes_received: while training, on the wire.
        finish_bytes: received in the finish.
        test_accuracy: each peer's own model, after the finish.
        test_accuracy_before_finish: the same before it.
        consensus_accuracy: of the average of all final models.
        consensus_distance: estimate of Eq. 8 at the end of training, each peer's.
        lost: names of peers that did not finish.
        wall_seconds: from the first peer's first iteration to the last peer's end.
        train_seconds: each peer's, from its first iteration to its last.
        blocked_seconds: the training thread stopped by gossipx, while training; None where a peer only serves others.
        overhead_seconds: the training thread measuring its own model and recording figures.
        skipped: decisions to exchange while one was under way, or when no other could be asked or all were busy.
        failed: exchanges begun and not completed.
        poisoned: received models refused for NaN or Inf.
    """

    name: str
    policy: str
    codec: str
    seed: int
    peers: int
    task: str | None
    model: str | None
    partition: str
    iterations: int
    retrievals: Figures
    taken_in: Figures
    delayed_pulls: Figures
    bytes_received: Figures
    finish_bytes: Figures
    test_accuracy: Figures
    test_accuracy_before_finish: Figures
    consensus_accuracy: float | None
    consensus_distance: Figures
    lost: list[str]
    wall_seconds: float
    train_seconds: Figures
    blocked_seconds: Figures
    overhead_seconds: Figures
    skipped: Figures
    failed: Figures
    poisoned: Figures

    def write(self, directory: Path, by: int | None = None) -> None:
        """Write it whole, or leave what was there; ``by``: which of several processes does, maybe at a time."""
        unfinished = directory / f"{FILE}{'' if by is None else f'.{by}'}.tmp"
        unfinished.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        unfinished.replace(directory / FILE)


PER_PEER = tuple(field.name for field in dataclasses.fields(Summary) if field.type == "Figures")
"""The fields that have an entry a peer; reports of peers have a figure under each of these names."""


def per_peer(reports: Sequence[Mapping[str, Any] | None]) -> dict[str, Figures]:
    """The lists of a summary from the peers' reports, by rank; None for a peer without one."""
    return {name: [None if report is None else report.get(name) for report in reports] for name in PER_PEER}


def read(path: Path) -> Summary:
    """The summary of a run, from its directory or its file.

    Raises:
        UsageError: there is none, or it is not one.
    """
    file = path / FILE if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError("no summary here: name the directory of a run that has ended", file) from error
    except ValueError as error:
        raise UsageError(f"not a summary: {error}", file) from error
    names = {field.name for field in dataclasses.fields(Summary)}
    if not isinstance(data, dict):
        raise UsageError("not a summary: it holds no JSON object", file)
    if not names <= data.keys():
        raise UsageError(f"not a summary: it lacks '{min(names - data.keys())}'", file)
    for field in dataclasses.fields(Summary):
        if not _fits(str(field.type), data[field.name], data["peers"]):
            raise UsageError(f"not a summary: '{field.name}' is {_WANTED[str(field.type)]}", file)
    return Summary(**{name: data[name] for name in names})


_WANTED = {
    "str": "not text",
    "str | None": "neither text nor null",
    "int": "not an integer",
    "float": "not a number",
    "float | None": "neither a number nor null",
    "list[str]": "not a list of names",
    "Figures": "not one number or null a peer",
}


def _fits(kind: str, value: Any, peers: int) -> bool:
    """Whether a value of the file is what a field of type ``kind`` holds."""
    if kind.endswith(" | None"):
        return value is None or _fits(kind.removesuffix(" | None"), value, peers)
    if kind == "str":
        return isinstance(value, str)
    if kind == "list[str]":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if kind == "Figures":
        return isinstance(value, list) and len(value) == peers and all(_fits("float | None", v, peers) for v in value)
    return isinstance(value, int if kind == "int" else int | float) and not isinstance(value, bool)
