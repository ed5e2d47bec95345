"""``gossipx run --seeds``: one run per seed, one after the other."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gossipx.errors import NotAuthorisedError, UsageError
from gossipx.launch.directory import check_name
from gossipx.launch.run.processes import launch
from gossipx.launch.start import stem_of
from gossipx.launch.world.source import PeerSource
from gossipx.metrics.summary import FILE as SUMMARY_FILE
from gossipx.settings.sections import KEYS, RunConfig

MOST = 1000
"""Maximum number of seeds; more are a typing error."""
FOR_THE_USER = (UsageError.exit_code, NotAuthorisedError.exit_code)
"""Exit codes of errors that the next seed would only repeat."""


def seeds_from(text: str) -> tuple[int, ...]:
    """Return the seeds of ``0-4``, ``0,2,5`` or a mixture of both.

    Raises:
        UsageError: it is neither, or names a seed twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = (one.strip() for one in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--seeds {text}: seeds such as 0-4 or 0,2,5 are required, not '{part.strip()}'")
        begin, end = int(first), int(last or first)
        most = KEYS["seed"].most
        assert most is not None
        if end > most:
            raise UsageError(f"--seeds {text}: a seed is at most {most}")
        if not 0 <= end - begin < MOST:
            what = "ends before it begins" if end < begin else f"names more than {MOST} seeds"
            raise UsageError(f"--seeds {text}: '{part.strip()}' {what}")
        seeds += range(begin, end + 1)
    if len(set(seeds)) < len(seeds):
        twice = next(seed for seed in seeds if seeds.count(seed) > 1)
        raise UsageError(f"--seeds {text}: seed {twice} is given twice")
    return tuple(seeds)


def launch_each(source: PeerSource, given: RunConfig, seeds: Sequence[int], script: list[str]) -> int:
    """Run the peers of this machine once per seed; a signal ends the run in progress and all that would follow.

    Args:
        source, given, script: as for :func:`gossipx.launch.run.processes.launch`.
        seeds: at least one.

    Returns:
        The highest exit code of the runs.

    Raises:
        UsageError: an argument is invalid or a name is in use; nothing was started.
    """
    if source.launcher:
        raise UsageError(f"--seeds starts all peers of a hosts file, and {source.launcher} starts one run: give --seed")
    runs = _named(given, seeds)
    for run in runs:
        check_name(run)
    worst, ended = 0, []
    for run in runs:
        print(f"seed {run.run.seed}: {run.run.name}", flush=True)
        directory = Path(run.run.logdir) / str(run.run.name)
        earlier = _time_of_summary(directory)  # of a run to be overwritten, which stays if the new one does not start
        outcome = launch(source, run, script)
        if _time_of_summary(directory) not in (None, earlier):
            ended.append(shlex.quote(str(directory)))
        worst = max(worst, outcome.code)
        if outcome.stopped or outcome.code in FOR_THE_USER:
            return worst
    if ended:
        print(f"compare the seeds: gossipx compare {' '.join(ended)}", flush=True)
    return worst


def _time_of_summary(directory: Path) -> int | None:
    file = directory / SUMMARY_FILE
    return file.stat().st_mtime_ns if file.is_file() else None


def _named(given: RunConfig, seeds: Sequence[int]) -> list[RunConfig]:
    """Return the settings of each run: the given name, or the policy's with a number if taken, and the seed."""
    base, number = given.run.name or stem_of(given), 1
    logdir = Path(given.run.logdir)
    while given.run.name is None and any((logdir / f"{base}-seed{seed}").exists() for seed in seeds):
        number += 1
        base = f"{stem_of(given)}-{number}"
    seeded = [replace(given.run, seed=seed, name=f"{base}-seed{seed}") for seed in seeds]
    return [replace(given, run=run, given=given.given | {"seed"}) for run in seeded]
