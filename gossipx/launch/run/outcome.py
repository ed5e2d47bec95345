"""The outcome of a run on this machine: the states and figures of its peers, the curves, the summary, the exit code.

Nothing here starts or follows a process; that does :mod:`gossipx.launch.run.processes`.
"""

from __future__ import annotations

import logging
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossipx.errors import DIFFERENT_MODELS, NotEnoughPeersError
from gossipx.launch.run.children import Child, LocalPeers
from gossipx.launch.run.display import PeerStatus
from gossipx.launch.run.restarts import RESTARTED, Restarts
from gossipx.launch.run.results import sum_up
from gossipx.launch.run.stopping import Stopping
from gossipx.metrics.aggregate import Aggregate, Record
from gossipx.metrics.summary import FILE as SUMMARY_FILE
from gossipx.metrics.summary import Summary
from gossipx.runtime.ending.stop_signals import continue_by
from gossipx.settings import files
from gossipx.settings.modes import Server
from gossipx.settings.sections import RunSettings

log = logging.getLogger("gossipx")

GONE = ("lost", "failed", "restarted", "serve")
"""States of peers whose iterations are not awaited: no records of theirs will come."""


@dataclass
class RunCurves:
    """The aggregate curves of a run.

    Attributes:
        curves: where they are written; None: several processes write there, each with one peer, so nothing is written.
        statuses: states of the peers, by rank.
    """

    curves: Aggregate | None
    statuses: Mapping[int, PeerStatus]
    _serving: set[int] = field(default_factory=set, init=False)

    def handle(self, rank: int, records: Sequence[Record]) -> None:
        """Take in the records of a peer whose state has just been updated."""
        if self.statuses[rank].state == "serve":
            self._serving.add(rank)
        if self.statuses[rank].state == "train":
            self._attempt(Aggregate.begin)
        self._attempt(lambda curves: curves.add(rank, records))
        # The figures of the iteration that a peer is at may still follow.
        self._attempt(lambda curves: curves.write(self._slowest() - 1))

    def conclude(self, summary: Summary) -> None:
        """Write the last iterations and the figures of the final models."""
        self._attempt(lambda curves: curves.write(self._slowest()))
        self._attempt(lambda curves: curves.conclude(summary))

    def _slowest(self) -> int:
        """Return the iteration of the slowest peer that trains, or has trained to its end."""
        steps = [
            status.step
            for rank, status in self.statuses.items()
            if status.state not in GONE and rank not in self._serving
        ]
        return min(steps, default=0)

    def close(self) -> None:
        """Flush and close the file."""
        if self.curves is not None:
            self.curves.close()

    def _attempt(self, write: Callable[[Aggregate], None]) -> None:
        try:
            if self.curves is not None:
                write(self.curves)
        except OSError as error:
            log.warning(
                "the aggregate curves cannot be written (%s): the run has only those of its peers", error.strerror
            )
            self.curves = None


class RunOutcome:
    """The reports of the peers of this machine and the ends of their processes, and what follows from them for the run.

    Attributes:
        began: when the first peer began to train, on time.monotonic(); None: none has.
        aborted: whether an error has ended the run.
        results: what the peers that finished have reported, by rank.
        curves: the aggregate curves of the run.
    """

    def __init__(self, here: LocalPeers, stopping: Stopping, restarts: Restarts) -> None:
        self.began: float | None = None
        self.aborted = False
        self.results: dict[int, dict[str, Any]] = {}
        start = here.start
        self._here = here
        self._script = here.script
        self._settings = start.settings  # with the policy that a script has passed
        self._peers = start.peers
        self._directory = start.directory
        self._statuses = here.statuses
        self._display = here.display
        self._stopping = stopping
        self._restarts = restarts
        self._departed: dict[int, dict[str, Any] | None] = {}  # left the run on request, with their figures
        self._joined = {rank: peer.name for rank, peer in enumerate(start.peers)}  # and those that join the run
        self._restarted: dict[int, set[int]] = {}  # by rank: the peers that it knows to be restarted
        self._failures: set[int] = set()  # whose scripts failed, or that crashed; others that were lost do no harm
        recorders = [part.partition(":")[0].strip() for part in start.settings.run.recorder.split("+")]
        curves = None
        if not start.shared and start.joins is None and "tensorboard" in recorders:
            directory, size = start.directory.path, len(start.peers)
            curves = Aggregate(directory, lambda: self._settings.hyperparameters(size), bool(start.resumed_size))
        self.curves = RunCurves(curves, here.statuses)

    @property
    def trained(self) -> bool:
        """Whether any peer of this machine has trained."""
        return self.began is not None or bool(self.results)

    def starts_again(self, rank: int) -> None:
        """Note that a peer that has ended is started again."""
        self._departed.pop(rank, None)
        self._statuses[rank].begins(self._script)

    def left_alone(self) -> list[int]:
        """Return the ranks of the peers that are being started again although all others have ended."""
        return self._restarts.left_alone(self._joined)

    def host_failed(self, why: str) -> None:
        """Handle the end of other hosts' peers by an error; before the training it ends the run."""
        if self._stopping.code is not None:
            return
        if self.began is None:
            self._abort(why, 1)
        else:
            self._display.line(why)

    def _abort(self, error: str, code: int) -> None:
        self.aborted = True
        self._stopping.kill(code)
        self._display.error(error)

    # --- events -------------------------------------------------------------------------------------

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        """Handle a progress event of a peer."""
        status, records = self._statuses[rank], event.pop("records", ())
        if "error" in event:
            self._failed(rank, str(event["error"]), int(event["exit"]))
        elif "result" in event:
            self.results[rank] = event["result"]
            status.done(event["result"]["report"])
            self._joined.update({int(other): name for other, name in event["result"].get("joined", {}).items()})
            for other, report in event["result"]["reports"].items():
                restarted = self._statuses.get(int(other))
                if restarted is not None and restarted.state == RESTARTED:
                    restarted.done(report)
        elif "state" in event:
            self._follow_restarts(rank, set(event.pop("restarted", ())))
            for other, name in event.pop("joined", {}).items():
                if self._joined.get(int(other)) != name:
                    self._joined[int(other)] = name
                    self._display.line(f"peer {name} has joined the run")
            report = event.pop("report", None)
            self._record_policy(event.pop("policy", None))
            status.update(event, time.monotonic())
            if status.state == "train" and rank in self._restarts.started:
                self._failures.discard(rank)
            if status.state == "train" and self.began is None:
                self.began = self._display.began = time.monotonic()
                self._directory.keep()
            if status.state == "left":
                self._departed[rank] = report
        self.curves.handle(rank, records)

    def _record_policy(self, policy: str | None) -> None:
        """Record the policy with which a peer begins to train: a script may pass an object, which no setting names."""
        if policy is None or isinstance(self._settings.mode, Server) or policy == self._settings.decides:
            return
        self._settings = files.changed(self._settings, ["policy"], policy=policy)
        self._directory.record(self._settings)

    def _follow_restarts(self, by: int, restarted: set[int]) -> None:
        """Update the states of peers that were started again by hand, which only other peers know about.

        A peer is lost again when a peer that knew it says so, not when that one ends: others may not have met it yet.

        Args:
            by: rank of the peer that reports.
            restarted: ranks of the peers, of all machines, that it knows to be present and started again.
        """
        before, self._restarted[by] = self._restarted.get(by, set()), restarted
        self._note_restarts()
        for rank in before.difference(*self._restarted.values()) & self._statuses.keys():
            if self._statuses[rank].state == RESTARTED:
                self._statuses[rank].state = "lost"
                self._display.line(f"peer {self._statuses[rank].name} is lost again")

    def _note_restarts(self) -> None:
        for rank in set().union(*self._restarted.values()) & self._here.children.keys():
            status = self._statuses[rank]
            if status.state in ("lost", "failed", "left") and self._here.children[rank].process.returncode is not None:
                status.state = RESTARTED
                self._display.line(f"peer {status.name} is back: it was started again")

    def _failed(self, rank: int, error: str, code: int) -> None:
        """Handle an error that a peer reported before it ended.

        An error that the user must fix ends the run and is shown once. So does any error before training has begun,
        such as a port in use; after that, and if the peer was started again, the other peers continue.
        """
        self._statuses[rank].state = "failed"
        if self.aborted:
            return
        if code == NotEnoughPeersError.exit_code and self.began is not None:
            if self._stopping.code is None:
                self._stopping.stop(code)
                self._display.error(error)
            return
        alone = code == 1 or rank in self._restarts.started
        if (alone and self.began is not None) or self._stopping.code is not None:
            self._failures.add(rank)
            self._display.line(f"{self._peers[rank].name}: {error}")
            return
        self._abort(error, code)

    def ended(self, rank: int, child: Child) -> None:
        """Handle the end of a peer's process, whose output has been read."""
        self._restarted.pop(rank, None)
        if self._stopping.killed:
            return
        code, status = child.process.returncode, self._statuses[rank]
        died = self.began is not None and rank not in self._departed
        ended = rank not in self.results and self._stopping.code is None
        if ended and self._restarts.ended(rank, died, child.describe_exit(), time.monotonic()):
            self._failures |= {rank} if child.crashed else set()  # until it trains again
            return
        if rank in self.results or rank in self._departed:
            if child.crashed and rank not in self._failures:  # being killed after that does no harm
                self._failures.add(rank)
                what = "finished" if rank in self.results else "left"
                self._display.line(f"{status.name} {what}, but its process ended: {child.describe_exit()}")
            elif code == -signal.SIGTERM and self._stopping.code is not None:
                self._display.line(f"{status.name} had finished; what its script did then was stopped")
            return
        if code == 0 and not status.joins:
            error = f"{status.name}: its script ended without a call of gossipx.join, which makes it a peer"
            self._failed(rank, error, 1)
            return
        if code == -signal.SIGTERM and not status.joins:  # before it could report that it leaves
            status.state = "left"
            self._departed[rank] = None
            return
        if child.crashed:
            self._failures.add(rank)
        status.state = "lost"
        self._display.line(f"peer {status.name} is lost: {child.describe_exit()}")
        self._note_restarts()
        alive = len(self._peers) - sum(status.state in ("lost", "failed") for status in self._statuses.values())
        least = self._settings.sync.min_peers
        if 0 < alive < least and self._stopping.code is None:  # with none left, the peers' own errors explain the end
            self._stopping.stop(4)
            self._display.error(f"{alive} of {len(self._peers)} peers left, fewer than --min-peers {least}")

    # --- the end ------------------------------------------------------------------------------------

    def conclude(self, elsewhere: int) -> int:
        """Write the summary, show how the run ended, and return the exit code.

        Args:
            elsewhere: the highest exit code of other hosts.
        """
        code, seconds = self._stopping.code, time.monotonic() - (self.began or time.monotonic())
        if self.aborted:
            return code or 0
        stopped = len(self.results) < len(self._statuses) and (
            code is not None or (bool(self._departed) and not self.results)
        )
        if not self.trained:
            self._display.line("stopped before the training began" if stopped else "no peer finished")
            return (code or 0) if stopped else 1
        return self._end_stopped(seconds) if stopped else self._end(seconds, elsewhere)

    def _end(self, seconds: float, elsewhere: int) -> int:
        """Write the summary of a run that trained for ``seconds`` to its end, and return the exit code."""
        summary = self._sum_up(seconds)
        self._directory.keep()
        self.curves.conclude(summary)
        self._tell_end(summary, self._directory.conclude(summary))
        if self._failures or not self.results:
            return 1
        return self._stopping.code or (DIFFERENT_MODELS if summary.agreed is False else elsewhere)

    def _end_stopped(self, seconds: float) -> int:
        """Write the summary of a run that was stopped, say how to continue it, and return the exit code."""
        reports = {rank: report for rank, report in self._departed.items() if report is not None}
        code = self._stopping.code or (1 if self._failures else 0)
        summary = self._sum_up(seconds, reports)
        if not self._here.start.is_quiet:
            ended = reports.keys() | self.results.keys()
            # Of peers on other machines or in other processes, nothing is known.
            lost = [self._peers[rank].name for rank in self._statuses if rank not in ended] if ended else []
            self._tell_lost(lost, code)
            iterations = [report["iterations"] for report in reports.values() if report["iterations"]]
            first = next((reports[rank] for rank in sorted(reports)), {})
            saved = str(first.get("framework", "")), str(first.get("kept", ""))
            stopped = how_to_continue(self._directory.path, iterations, self._stopping.killed, *saved)
            is_newcomer = self._here.start.joins is not None
            self._display.line("left the run; the same command joins it again" if is_newcomer else stopped)
        if reports or self.results:
            self._directory.keep()
            self.curves.conclude(summary)
            self._directory.conclude(summary)
        return code

    def _sum_up(self, seconds: float, stopped: Mapping[int, dict[str, Any]] | None = None) -> Summary:
        """Return the summary; ``stopped``: figures of the peers with which the run was stopped, by rank."""
        names = [self._joined.get(rank, "") for rank in range(max(self._joined) + 1)]
        return sum_up(self._settings, names, not self._script, seconds, self.results, stopped or {}, self._statuses)

    def _tell_end(self, summary: Summary, written: bool) -> None:
        tell = self._display.line
        # Without a result nothing is known of the peers on other machines or in other processes.
        self._tell_lost(summary.lost if self.results else [self._peers[rank].name for rank in self._statuses], 1)
        if summary.agreed is False:
            why = "" if self._failures else ": see finish_timeout and peer_timeout in the docs"
            tell(f"the peers hold different models{why}")
        if not self.results:
            tell("no peer finished")
            return
        if not written:  # the process that wrote it prints this
            return
        path = self._directory.path
        tell(f"wrote {path / SUMMARY_FILE}; compare runs: gossipx compare {path} ...")
        tell(f"curves: tensorboard --logdir {self._settings.run.logdir}")

    def _tell_lost(self, lost: Sequence[str], code: int) -> None:
        """Name the peers that were lost and those that failed; ``code``: the run's exit code if any failed."""
        if lost:
            self._display.line(f"lost: {', '.join(lost)}")
        if self._failures:
            failed = ", ".join(self._peers[rank].name for rank in sorted(self._failures))
            self._display.line(f"failed: {failed}" + ("; the exit code is 1" if code == 1 else ""))


def checkpoints_in(run: Path) -> list[int]:
    """Return the iterations of the complete checkpoints of all peers in the run's directory."""
    found = (one.parent.name for one in run.glob("peer-*/checkpoints/*/manifest.json"))
    return [int(name) for name in found if name.isdecimal()]


def how_to_continue(path: Path, iterations: Sequence[int], at_once: bool, framework: str = "", kept: str = "") -> str:
    """Return the line that says where a run has stopped, and how to continue it.

    Args:
        path: the run's directory.
        iterations: of the peers that stopped in order.
        at_once: whether peers were killed.
        framework, kept: as attributes of :class:`gossipx.runtime.ending.lifecycle.Lifecycle`, of the first peer.
    """
    where = "at once" if at_once else f"at {min(iterations)}" if iterations else "before the first iteration"
    if not at_once and len(set(iterations)) > 1:
        where += f" to {max(iterations)}"
    if framework:
        return f"stopped {where}; {continue_by(framework, kept)}"
    found = checkpoints_in(path)
    if not found:
        return f"stopped {where}; there is no checkpoint to continue from"
    run = path.name if path.parent == Path(RunSettings().logdir) else str(path)
    newest = " from the last checkpoints" if at_once or max(found) < min(iterations, default=0) else ""
    return f"stopped {where}; continue{newest} with: gossipx run --resume {shlex.quote(run)}"
