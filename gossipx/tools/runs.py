"""The runs of a directory, for ``gossipx runs``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE, is_in_progress, settings_in
from gossipx.launch.hosts import read_hosts
from gossipx.launch.run.outcome import checkpoints_in
from gossipx.metrics import summary
from gossipx.metrics.compare import Row, compare
from gossipx.settings import files
from gossipx.tools import recorded


@dataclass(frozen=True)
class ListedRun:
    """One run of a directory. Figures are None without a value.

    Attributes:
        name: its directory's name.
        state: ``in progress``; ``done``; ``models differ``: its peers ended with different models; ``peers lost``: some
            did not finish; ``failed``: none did; ``stopped``: on request; ``killed``: it has no summary;
            ``unreadable``: another version has written it, or its files are damaged.
        peers: number of peers at the start.
        began: when it began, as a Unix time.
        policy: the policy or sync model.
        iterations: that it has trained, as far as is recorded.
        accuracy, loss: means over the peers of the last measurement.
        received_mb: 10⁶ bytes received per peer while training.
        resumable: the newest iteration that a peer has a checkpoint of; None: there is no checkpoint.
    """

    name: str
    state: str
    peers: int
    began: float
    policy: str
    iterations: int | None = None
    accuracy: float | None = None
    loss: float | None = None
    received_mb: float | None = None
    resumable: int | None = None


def runs_in(logdir: Path) -> list[ListedRun]:
    """Return the runs of a directory, the oldest first."""
    found = [_listed(file.parent) for file in logdir.glob(f"*/{CONFIG_FILE}")]
    return sorted(found, key=lambda run: (run.began, run.name))


def _listed(run: Path) -> ListedRun:
    began = (run / CONFIG_FILE).stat().st_mtime
    resumable = max(checkpoints_in(run), default=None)
    in_progress = is_in_progress(run)
    try:
        policy = files.resolve(settings_in(run)).decides
        peers = len(read_hosts(run / HOSTS_FILE))
    except UsageError:
        return ListedRun(run.name, "unreadable", 0, began, "", resumable=resumable)
    has_summary = (run / summary.FILE).is_file()
    try:
        ended = recorded.read(run)
    except UsageError:
        state = "in progress" if in_progress else "unreadable" if has_summary else "killed"
        return ListedRun(run.name, state, peers, began, policy, iterations=resumable, resumable=resumable)
    [row] = compare([ended])
    return ListedRun(
        name=run.name,
        state="in progress" if in_progress else _state(ended) if has_summary else "killed",
        peers=ended.peers,
        began=began,
        policy=ended.policy,
        iterations=ended.iterations,
        accuracy=_either(row, "accuracy"),
        loss=_either(row, "loss"),
        received_mb=row.received_mb,
        resumable=resumable,
    )


def _state(ended: summary.Summary) -> str:
    if ended.stopped:
        return "stopped"
    if ended.agreed is False:
        return "models differ"
    if len(ended.lost) == ended.peers:
        return "failed"
    return "peers lost" if ended.lost else "done"


def _either(row: Row, figure: str) -> float | None:
    """Return a figure after the finish, or else before it."""
    after: float | None = getattr(row, figure)
    before: float | None = getattr(row, f"{figure}_before_finish")
    return before if after is None else after
