"""The figures and the setting of a run, as its directory has them.

A run without a final summary, which was killed or is in progress, has the last figures that its peers recorded.
"""

from __future__ import annotations

import json
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.figures import TAGS
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE, SCRIPT_FILE, settings_in
from gossipx.launch.hosts import read_hosts
from gossipx.metrics import curves, summary
from gossipx.metrics.summary import Summary, per_peer
from gossipx.settings import files

_TAGS = {name: tag for name, tag in TAGS.items() if not tag.endswith("_after_finish")}
"""Figures of a peer that are recorded during training, with the tags of their curves."""
OF_ONE_RUN = {"run": ("peers", "name", "logdir", "overwrite", "seed"), "sync": ("policy",)}
"""Settings, by table, in which runs of one :func:`setting_of` may differ."""


def read(run: Path) -> Summary:
    """Return the summary of a run; of one that was interrupted, completed by what its peers recorded.

    A run without ``summary.json`` counts as stopped. Accuracy and loss are then those that were last measured during
    training, of the built-in tasks on a part of the test data, and count as "before the finish".

    Args:
        run: the run's directory, or its summary.

    Raises:
        UsageError: there is neither a summary nor a record.
    """
    if (run / summary.FILE).exists() or not (run / CONFIG_FILE).exists():
        found = summary.read(run)
        directory = run if run.is_dir() else run.parent
        return _completed(found, directory) if found.stopped else found
    settings = files.resolve(settings_in(run))
    names = [line.name for line in read_hosts(run / HOSTS_FILE)]
    reports = _last_of(run, len(names))
    if not any(reports):
        raise UsageError("no summary and no curves here: the run has not trained, or not with TensorBoard", run)
    built_in = not (run / SCRIPT_FILE).is_file()
    seconds = [one["train_seconds"] for one in reports if one and "train_seconds" in one]
    return Summary(
        name=settings.run.name or run.name,
        policy=settings.decides,
        codec=settings.values["codec"],
        seed=settings.run.seed,
        peers=len(names),
        task=settings.task.task if built_in else None,
        model=settings.task.model if built_in else None,
        partition=settings.task.partition,
        iterations=int(max(one["iterations"] for one in reports if one)),
        agreed=None,
        lost=[name for name, report in zip(names, reports, strict=True) if not report],
        stopped=[name for name, report in zip(names, reports, strict=True) if report],
        wall_seconds=max(seconds, default=0.0),
        consensus_accuracy=None,
        consensus_loss=None,
        figures=per_peer(reports),
    )


def _completed(found: Summary, directory: Path) -> Summary:
    """Return the summary of a stopped run with its last measured accuracies and losses, which nobody measured again."""
    tested = [name for name in _TAGS if name.startswith("test_")]
    if any(value is not None for name in tested for value in found.figures[name]):
        return found
    last = per_peer(_last_of(directory, found.peers))
    return found.with_figures({name: last[name] for name in tested})


def _last_of(directory: Path, peers: int) -> list[dict[str, float] | None]:
    """Return the last recorded figures of each peer; None for a peer without curves."""
    found: list[dict[str, float] | None] = [None] * peers
    for events in directory.glob("peer-*/events.out.tfevents.*"):
        number = events.parent.name.removeprefix("peer-")
        if not number.isdecimal() or (rank := int(number)) >= peers or found[rank] is not None:
            continue
        series = curves.scalars(events.parent)
        last = {name: float(series[tag].values[-1]) for name, tag in _TAGS.items() if tag in series}
        if series:
            last["iterations"] = float(max(one.iterations[-1] for one in series.values()))
            last["blocked_seconds"] = _blocked(series)
        found[rank] = last or None
    return found


def _blocked(series: dict[str, curves.Series]) -> float:
    """Return the seconds that training was blocked, from the last recorded fraction."""
    fraction, seconds = series.get("time/blocked_fraction"), series.get("time/train_seconds")
    return 0.0 if fraction is None or seconds is None else float(fraction.values[-1] * seconds.values[-1])


def setting_of(run: Path) -> str | None:
    """Return the settings and the script of a run as text, without its seed, its policy and where it was written.

    Args:
        run: its directory, or a file in it.

    Returns:
        Equal texts for runs of the same setting; None: the directory does not have the settings.
    """
    directory = run if run.is_dir() else run.parent
    try:
        tables = files.resolve(settings_in(directory)).tables
    except UsageError:  # for example, only the summary was kept
        return None
    for table, names in OF_ONE_RUN.items():
        for name in names:
            del tables[table][name]
    script = directory / SCRIPT_FILE
    return json.dumps([tables, script.read_text(encoding="utf-8") if script.is_file() else None], sort_keys=True)
