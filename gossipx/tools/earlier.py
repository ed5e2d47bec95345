"""Runs that have something in common: earlier ones with the same task and policy predict the retrievals of the next
run, and those with the same settings but another seed or policy are compared with each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from gossipx import policies
from gossipx.errors import MALFORMED, UsageError
from gossipx.launch.directory import SCRIPT_FILE, settings_in
from gossipx.metrics import summary
from gossipx.metrics.summary import Summary
from gossipx.settings import files
from gossipx.settings.modes import Waves
from gossipx.settings.sections import RunConfig
from gossipx.tools.traffic import ObservedRetrievals, wave


def seen(settings: RunConfig, script: list[str], policy: policies.Policy) -> ObservedRetrievals | None:
    """Return the exchanges of runs in ``logdir`` with the same training and policy, or None without such runs."""
    rates: dict[str, float] = {}
    for file in sorted(Path(settings.run.logdir).glob(f"*/{summary.FILE}")):
        try:
            found = summary.read(file)
            same = policies.parse(found.policy) == policy
        except UsageError:  # written by another version, or its policy is not installed any more
            continue
        done = [count for count in found.retrievals if count is not None]
        if same and done and found.iterations and _is_alike(found, file.parent, settings, script):
            other = "" if found.iterations == settings.run.iterations else f" of {found.iterations:,} iterations"
            size = len(found.retrievals)
            models = float(wave(size).sum()) if isinstance(settings.mode, Waves) and size > 1 else size
            rates[f"{found.name}{other}"] = sum(done) / len(done) / found.iterations * size / models
    return ObservedRetrievals(tuple(rates), min(rates.values()), max(rates.values())) if rates else None


def _is_alike(found: Summary, directory: Path, settings: RunConfig, script: list[str]) -> bool:
    """Return whether a run had the same training and kind of exchange as this one."""
    try:
        then = files.resolve(settings_in(directory))
    except UsageError:  # for example, written by another version
        return False
    if not script:
        task = replace(then.task, data_dir=settings.task.data_dir)  # the location of the data does not matter
        return found.task is not None and (task, _exchange(then)) == (settings.task, _exchange(settings))
    if _exchange(then) != _exchange(settings):
        return False
    try:
        command = json.loads((directory / SCRIPT_FILE).read_bytes())
    except (OSError, *MALFORMED):  # it had no script, or the file is not ours
        return False
    return isinstance(command, list) and command[:1] == [str(Path(script[0]).absolute())]


OF_ONE_RUN = {"run": ("peers", "name", "logdir", "overwrite", "seed"), "sync": ("policy",)}
"""Settings, by table, in which runs of one :func:`setting_of` may differ."""


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


def _exchange(settings: RunConfig) -> tuple[object, ...]:
    """Return the settings that determine the kind of exchange."""
    return tuple(settings.values[name] for name in ("mode", "exchange", "blocking", "hub", "servers"))
