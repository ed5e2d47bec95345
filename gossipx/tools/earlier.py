"""What runs in ``--logdir`` have done, for who wants to know what another one like them will do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from gossipx import policies
from gossipx.config import files
from gossipx.config.settings import RunConfig
from gossipx.errors import UsageError
from gossipx.launch.directory import CONFIG_FILE, SCRIPT_FILE
from gossipx.metrics import summary
from gossipx.metrics.summary import Summary
from gossipx.tools.traffic import ObservedRetrievals


def seen(settings: RunConfig, script: list[str], policy: policies.Policy) -> ObservedRetrievals | None:
    """What runs in ``logdir`` that trained the same under the same policy have needed."""
    often: dict[str, float] = {}
    for file in sorted(Path(settings.run.logdir).glob(f"*/{summary.FILE}")):
        try:
            found = summary.read(file)
            same = policies.parse(found.policy) == policy
        except UsageError:  # of another version, or under a policy that is not installed any more
            continue
        done = [count for count in found.retrievals if count is not None]
        if same and done and found.iterations and _is_alike(found, file.parent, settings, script):
            other = "" if found.iterations == settings.run.iterations else f" of {found.iterations:,} iterations"
            often[f"{found.name}{other}"] = sum(done) / len(done) / found.iterations
    return ObservedRetrievals(tuple(often), min(often.values()), max(often.values())) if often else None


def _is_alike(found: Summary, directory: Path, settings: RunConfig, script: list[str]) -> bool:
    """Whether a run trained what this one would, and exchanged as it would."""
    try:
        then = files.resolve(files.load(directory / CONFIG_FILE))
    except UsageError:  # of another version, say
        return False
    if not script:
        task = replace(then.task, data_dir=settings.task.data_dir)  # wherever the data lay
        return found.task is not None and (task, _exchange(then)) == (settings.task, _exchange(settings))
    if _exchange(then) != _exchange(settings):
        return False
    try:
        noted = json.loads((directory / SCRIPT_FILE).read_bytes())
    except (OSError, ValueError):  # it had none, or somebody has put something else there
        return False
    return isinstance(noted, list) and noted[:1] == [str(Path(script[0]).absolute())]


def _exchange(settings: RunConfig) -> tuple[object, ...]:
    """What the settings say of who exchanges with whom, and in which way."""
    sync = settings.sync
    return sync.mode, sync.exchange, sync.blocking, settings.hub.hub, settings.server.servers
