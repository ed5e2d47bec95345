"""Later attempts of one job: torchrun with ``--max-restarts`` and SLURM's requeue start the same command again.

Such an attempt continues what the attempt before has left. A counter of attempts alone does not tell what that is: the
job may have failed before it began this run, whose name or directory another job has used. What a run writes therefore
has the mark of its job (:attr:`gossipx.launch.world.rendezvous.Rendezvous.mark`).
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossipx.checkpoint import unpack
from gossipx.errors import UsageError
from gossipx.launch.directory import HOSTS_FILE
from gossipx.launch.environment import ADDED
from gossipx.launch.hosts import read_hosts
from gossipx.launch.world.rendezvous import Rendezvous
from gossipx.metrics import summary
from gossipx.runtime.checkpoints import PEER, store_of
from gossipx.settings.sections import RunConfig

log = logging.getLogger("gossipx")


def earlier_run(meeting: Rendezvous, settings: RunConfig) -> dict[str, Any] | None:
    """Return the run that an earlier attempt of this job began, as rank 0 publishes it; None: no run.

    Returns:
        ``name``; ``peers``: how many it had; ``completed``: whether it has ended, without a loss.
    """
    logdir, name = Path(settings.run.logdir), settings.run.name
    if not meeting.world.attempt:
        return None
    if not meeting.mark:
        log.warning("attempt %d of this %s job: its run is unknown; --resume NAME continues one", *_job(meeting))
        return None
    for run in [file.parent for file in logdir.glob(f"*/{HOSTS_FILE}")] if name is None else [logdir / name]:
        if _is_of(run, meeting.mark):
            return {"name": run.name, "peers": len(read_hosts(run / HOSTS_FILE)), "completed": _completed(run)}
    return None


def continued(meeting: Rendezvous, settings: RunConfig, earlier: dict[str, Any]) -> tuple[RunConfig, int, bool]:
    """Return how this attempt continues the run of an earlier one. All ranks call this together.

    Args:
        settings: with the name of that run.
        earlier: what rank 0 has published.

    Returns:
        The settings, how many peers it had if it resumes, as any rank sees a checkpoint (0: it begins anew), and
        whether nothing is left to do.
    """
    rank, completed = meeting.world.rank, bool(earlier["completed"])
    run = Path(settings.run.logdir) / str(settings.run.name)
    meeting.publish("kept", store_of(run, rank).find() is not None)
    resumes = any(meeting.gather("kept"))
    if rank == 0:
        begins = "without a checkpoint (--checkpoint-every) this one begins anew"
        how = "nothing is left to do" if completed else "this one resumes it" if resumes else begins
        log.warning("attempt %d of this %s job: run %s is of an earlier one; %s", *_job(meeting), run.name, how)
    overwrite = settings.run.overwrite or _is_of(run, meeting.mark)  # without effect if it resumes
    settings = replace(settings, run=replace(settings.run, overwrite=overwrite))
    return settings, int(earlier["peers"]) if resumes else 0, completed


def _is_of(run: Path, mark: str) -> bool:
    """Return whether an attempt of this job has begun a run: its list of peers ends with the mark."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (run / HOSTS_FILE).read_text(encoding="utf-8").endswith(f", {mark}\n")
    return False


def joins_again(meeting: Rendezvous, directory: Path, rank: int) -> str:
    """Return how a peer that was started without ``gossipx run`` resumes, as GOSSIPX_RESUME says it.

    All ranks call this together. They resume if any has a checkpoint of this job; those without one get its model.

    Args:
        directory: of the run.
        rank: of this process's peer.
    """
    if not meeting.world.attempt or not meeting.mark:
        return ""
    found = store_of(directory, rank).load()
    kept = found is not None and unpack(found.parts[PEER]).get("job") == meeting.mark
    meeting.publish("kept", kept)
    resumes = any(meeting.gather("kept"))
    if rank == 0 and resumes:
        log.warning("attempt %d of this %s job: it resumes from the checkpoints of an earlier one", *_job(meeting))
    return "" if not resumes else "1" if kept else ADDED


def _job(meeting: Rendezvous) -> tuple[int, str]:
    return meeting.world.attempt, meeting.world.source


def _completed(run: Path) -> bool:
    try:
        found = summary.read(run)
    except UsageError:
        return False
    return not found.lost and not found.stopped
