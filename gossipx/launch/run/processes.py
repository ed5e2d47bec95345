"""``gossipx run``: the parent process of the peers on this machine. It starts them, shows progress and writes the
summary.

It is not involved in their communication with each other.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from gossipx.errors import DIFFERENT_MODELS, GossipxError, NotEnoughPeersError, UsageError
from gossipx.launch.environment import (
    ENV_PROGRESS,
    ENV_STOP_WITH_INPUT,
)
from gossipx.launch.hosts import bind_host
from gossipx.launch.ports import kept_free
from gossipx.launch.run.children import READ, Child, Spawn, command_of, misplaced
from gossipx.launch.run.curves import RunCurves
from gossipx.launch.run.display import Display, PeerStatus
from gossipx.launch.run.restarts import RESTARTED, Restarts
from gossipx.launch.run.results import sum_up
from gossipx.launch.run.ssh import Command, Remote
from gossipx.launch.run.stopping import Outcome, Stopping, how_to_continue
from gossipx.launch.start import Source, Start
from gossipx.metrics.summary import FILE as SUMMARY_FILE
from gossipx.metrics.summary import Summary
from gossipx.settings import files
from gossipx.settings.modes import Elastic, Server
from gossipx.settings.sections import MOST_ITERATIONS, RunConfig
from gossipx.transports import Address

POLL_INTERVAL = 0.1
"""Seconds between two checks for processes that have ended, and for signals."""


def launch(
    source: Source,
    given: RunConfig,
    script: list[str],
    resumes: int = 0,
    spawn: Spawn = subprocess.Popen,
    over_ssh: Command | None = None,
) -> Outcome:
    """Run the peers of this machine to their end, or under torchrun, srun or mpirun the one peer that is this process.

    Args:
        source: where the peers come from.
        given: settings, presets not yet filled in.
        script: a user's script and its arguments; empty: the built-in task.
        resumes: number of peers that the run of that name had, which resumes from its checkpoints (see
            :mod:`gossipx.launch.directory.resume`); 0: the run is new.
        spawn: starts the process of a peer; called like :class:`subprocess.Popen`.
        over_ssh: this command, to be started on the other hosts too; None: it is not.

    Returns:
        Whether the run was stopped, and the exit code: 0; 1 if no peer finished, or a script failed or a peer crashed;
        3 if the peers hold different models; 2, 4 or 5 if a peer ended with it; 130 if interrupted, by SIGINT or
        SIGHUP; 0 if SIGTERM stopped the run.

    Raises:
        UsageError: settings, hosts file or script are invalid; nothing was started.
        GossipxError: the processes of the run did not find each other in time.
    """
    if source.launcher and over_ssh is not None:
        raise UsageError("--ssh starts the lines of a hosts file; here a launcher has started the processes: omit it")
    return follow(source.start(given, script, resumes), script, spawn, over_ssh)


def follow(start: Start, script: list[str], spawn: Spawn, over_ssh: Command | None = None) -> Outcome:
    """Start peers of this machine and follow them to their end; arguments, result and errors as :func:`launch`."""
    try:
        try:
            remote = {} if over_ssh is None else over_ssh.on_others(start)
        except UsageError:
            start.directory.give_up()
            raise
        return _Run(start, script, spawn, remote).go(start.notice)
    finally:
        start.directory.release()


class _Run:
    """The peers of this machine, from their start to their end."""

    def __init__(self, start: Start, script: list[str], spawn: Spawn, remote: Mapping[str, Sequence[str]]) -> None:
        self._spawn = spawn
        self._settings = settings = start.settings
        self._directory = start.directory
        self._peers = peers = start.peers
        self._script = script
        self._plan = start
        # A script sets its own number of iterations.
        length = 0 if script or settings.run.iterations == MOST_ITERATIONS else settings.run.iterations
        self._statuses = {rank: PeerStatus(peers[rank].name, iterations=length) for rank in start.here}
        for status in self._statuses.values():
            status.begins(script)
        mode, kind, central = settings.mode, "policy", ""
        if isinstance(mode, Elastic):
            central = f", hub {mode.hub}"
        elif isinstance(mode, Server):
            kind, central = "sync", f", servers {mode.servers or 0}"
        title = f"{settings.run.name}: {kind} {settings.decides}, {len(peers)} peers{central}"
        self._display = Display(title, self._statuses, plain=start.shared)
        recorders = [part.partition(":")[0].strip() for part in settings.run.recorder.split("+")]
        is_one_of_many = start.shared or start.joins is not None
        directory = None if is_one_of_many or "tensorboard" not in recorders else start.directory.path
        self._curves = RunCurves(
            directory, self._statuses, lambda: self._settings.hyperparameters(len(peers)), bool(start.resumes)
        )
        self._children: dict[int, Child] = {}
        self._results: dict[int, dict[str, Any]] = {}
        self._departed: dict[int, dict[str, Any] | None] = {}  # left the run on request, with their figures
        self._joined = {rank: peer.name for rank, peer in enumerate(peers)}  # and those that join the run
        self._restarted: dict[int, set[int]] = {}  # by rank: the peers that it knows to be restarted
        self._aborted = False  # an error of a peer has ended the run
        self._failures: set[int] = set()  # whose scripts failed, or that crashed; others that were lost do no harm
        snapshots = settings.task.solver is not None and not script
        self._quiet = start.shared and 0 not in start.here
        self._stopping = Stopping(
            self._children, self._statuses, self._display, settings.exchange.peer_timeout, snapshots, self._quiet
        )
        self._restarts = Restarts(start.directory.path, self._statuses, settings.run.restart, self._display.line)
        self._remote = Remote(remote, self._display.line)
        self._began: float | None = None  # when the first peer began to train

    def go(self, notice: str | None = None) -> Outcome:
        """Start the peers, follow them and write the summary; ``notice`` is shown first."""
        with (
            closing(self._curves),
            self._stopping.signals(),
        ):  # also while the summary is written: launchers may send a signal twice
            return Outcome(self._go(notice), self._stopping.by_signal)

    def _go(self, notice: str | None) -> int:
        stopping = self._stopping
        with selectors.DefaultSelector() as selector, self._display, kept_free(self._binds()):
            if notice is not None:
                self._display.line(notice)
            if self._script and "iterations" in self._settings.given and not self._quiet:
                given = self._settings.run.iterations
                self._display.line(f"{self._script[0]} decides how long it trains: --iterations {given} has no effect")
            if (word := misplaced(self._script)) and not self._quiet:
                place = f"{word} stands after SCRIPT ({self._script[0]}), whose option it is"
                self._display.line(f"{place}; options of gossipx run stand before it")
            try:
                for rank in self._statuses:
                    self._start(rank, selector)
                self._remote.start(selector)
                self._follow(selector)
                self._display.refresh(last=stopping.code is None)
            finally:
                for child in self._children.values():
                    child.signal(signal.SIGKILL)
                    child.process.wait()
                self._remote.end()
                trained = self._began is not None or bool(self._results)
                if not trained:
                    self._directory.give_up()
        seconds = time.monotonic() - (self._began or time.monotonic())
        if self._aborted:
            return stopping.code or 0
        stopped = len(self._results) < len(self._statuses) and (
            stopping.code is not None or (bool(self._departed) and not self._results)
        )
        if not trained:
            self._display.line("stopped before the training began" if stopped else "no peer finished")
            return (stopping.code or 0) if stopped else 1
        return self._end_stopped(seconds) if stopped else self._end(seconds)

    def _end(self, seconds: float) -> int:
        """Write the summary of a run that trained for ``seconds`` to its end, and return the exit code."""
        summary = self._sum_up(seconds)
        self._directory.keep()
        self._curves.conclude(summary)
        self._tell_end(summary, self._directory.conclude(summary))
        if self._failures or not self._results:
            return 1
        elsewhere = max(self._remote.codes.values(), default=0)
        return self._stopping.code or (DIFFERENT_MODELS if summary.agreed is False else elsewhere)

    def _end_stopped(self, seconds: float) -> int:
        """Write the summary of a run that was stopped, say how to continue it, and return the exit code."""
        reports = {rank: report for rank, report in self._departed.items() if report is not None}
        code = self._stopping.code or (1 if self._failures else 0)
        summary = self._sum_up(seconds, reports)
        if not self._quiet:
            ended = reports.keys() | self._results.keys()
            # Of peers on other machines or in other processes, nothing is known.
            lost = [self._peers[rank].name for rank in self._statuses if rank not in ended] if ended else []
            self._tell_lost(lost, code)
            iterations = [report["iterations"] for report in reports.values() if report["iterations"]]
            first = next((reports[rank] for rank in sorted(reports)), {})
            saved = str(first.get("framework", "")), str(first.get("kept", ""))
            stopped = how_to_continue(self._directory.path, iterations, self._stopping.killed, *saved)
            self._display.line(stopped if self._plan.joins is None else "left the run; the same command joins it again")
        if reports or self._results:
            self._directory.keep()
            self._curves.conclude(summary)
            self._directory.conclude(summary)
        return code

    # --- processes ----------------------------------------------------------------------------------

    def _binds(self) -> list[Address]:
        """Return the addresses at which the peers of this machine will listen."""
        here = [self._peers[rank] for rank in self._statuses]
        return [Address(bind_host(peer, self._settings.exchange.bind, None), peer.port) for peer in here]

    def _start(self, rank: int, selector: selectors.BaseSelector, again: bool = False) -> None:
        name = self._peers[rank].name
        try:
            child = Child(
                command_of(self._script),
                self._plan.environment(rank, again),
                ENV_PROGRESS,
                on_line=lambda line: self._display.line(f"[{name}] {line}"),
                on_event=lambda event: self._handle(rank, event),
                spawn=self._spawn,
            )
        except OSError as error:
            what_to_do = "start fewer peers on this machine, or raise its limits (ulimit)"
            raise GossipxError(f"{name} cannot be started: {error.strerror}; {what_to_do}") from error
        child.register(selector)
        self._children[rank] = child

    def _follow(self, selector: selectors.BaseSelector) -> None:
        running = dict(self._children)
        if os.environ.get(ENV_STOP_WITH_INPUT):
            selector.register(0, selectors.EVENT_READ, lambda: self._input(selector))
        while running or self._restarts.pending or (self._remote.running and not self._stopping.killed):
            self._read(selector, POLL_INTERVAL)
            ended = [rank for rank, child in running.items() if child.process.poll() is not None]
            if ended:
                self._read(selector, 0)  # what other peers told before that, such as having met a restarted one
            for rank in ended:
                child = running.pop(rank)
                child.drain(selector)
                self._ended(rank, child)
            self._stopping.check(running, self._remote.running)
            self._restart(running, selector)
            self._follow_remote(bool(running))
            self._display.refresh()

    def _read(self, selector: selectors.BaseSelector, seconds: float) -> None:
        """Read what has arrived, or arrives within ``seconds``."""
        for key, _ in selector.select(seconds):
            if key.fd in selector.get_map():
                key.data()

    def _input(self, selector: selectors.BaseSelector) -> None:
        """Stop when the standard input ends, because the ``gossipx run --ssh`` at its other end stops or is gone."""
        if not os.read(0, READ):
            selector.unregister(0)
            self._stopping.request(signal.SIGTERM)

    def _follow_remote(self, waits_for_own: bool) -> None:
        """Pass a stop on to other hosts, and report those that have failed."""
        for host in self._remote.check():
            if self._stopping.code is not None:
                continue
            if self._began is None:
                self._aborted = True
                self._stopping.kill(1)
                self._display.error(self._remote.why(host))
            else:
                self._display.line(self._remote.why(host))
        if self._stopping.code is not None:
            self._remote.stop()
        elif not waits_for_own and self._remote.running:
            self._remote.remind(time.monotonic(), self._settings.exchange.peer_timeout)

    def _restart(self, running: dict[int, Child], selector: selectors.BaseSelector) -> None:
        """Start peers again that have died, or that somebody has asked to restart."""
        if self._stopping.code is not None:
            self._restarts.give_up()
            return
        now = time.monotonic()
        for rank in self._restarts.asked(now, running):
            running[rank].signal(signal.SIGTERM)
        for rank in self._restarts.left_alone(self._joined):
            if rank in running:
                running.pop(rank).signal(signal.SIGKILL)
        for rank in self._restarts.due(now):
            self._departed.pop(rank, None)
            self._statuses[rank].begins(self._script)
            self._start(rank, selector, again=True)
            running[rank] = self._children[rank]

    def _handle(self, rank: int, event: dict[str, Any]) -> None:
        """Handle a progress event of a peer."""
        status, records = self._statuses[rank], event.pop("records", ())
        if "error" in event:
            self._failed(rank, str(event["error"]), int(event["exit"]))
        elif "result" in event:
            self._results[rank] = event["result"]
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
            if status.state == "train" and self._began is None:
                self._began = self._display.began = time.monotonic()
                self._directory.keep()
            if status.state == "left":
                self._departed[rank] = report
        self._curves.handle(rank, records)

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
        for rank in set().union(*self._restarted.values()) & self._children.keys():
            status = self._statuses[rank]
            if status.state in ("lost", "failed", "left") and self._children[rank].process.returncode is not None:
                status.state = RESTARTED
                self._display.line(f"peer {status.name} is back: it was started again")

    def _failed(self, rank: int, error: str, code: int) -> None:
        """Handle an error that a peer reported before it ended.

        An error that the user must fix ends the run and is shown once. So does any error before training has begun,
        such as a port in use; after that, and if the peer was started again, the other peers continue.
        """
        self._statuses[rank].state = "failed"
        if self._aborted:
            return
        if code == NotEnoughPeersError.exit_code and self._began is not None:
            if self._stopping.code is None:
                self._stopping.stop(code)
                self._display.error(error)
            return
        alone = code == 1 or rank in self._restarts.started
        if (alone and self._began is not None) or self._stopping.code is not None:
            self._failures.add(rank)
            self._display.line(f"{self._peers[rank].name}: {error}")
            return
        self._aborted = True
        self._stopping.kill(code)
        self._display.error(error)

    def _ended(self, rank: int, child: Child) -> None:
        self._restarted.pop(rank, None)
        if self._stopping.killed:
            return
        code, status = child.process.returncode, self._statuses[rank]
        died = self._began is not None and rank not in self._departed
        ended = rank not in self._results and self._stopping.code is None
        if ended and self._restarts.ended(rank, died, child.describe_exit(), time.monotonic()):
            self._failures |= {rank} if child.crashed else set()  # until it trains again
            return
        if rank in self._results or rank in self._departed:
            if child.crashed and rank not in self._failures:  # being killed after that does no harm
                self._failures.add(rank)
                what = "finished" if rank in self._results else "left"
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

    # --- figures ------------------------------------------------------------------------------------

    def _sum_up(self, seconds: float, stopped: Mapping[int, dict[str, Any]] | None = None) -> Summary:
        """Return the summary; ``stopped``: figures of the peers with which the run was stopped, by rank."""
        names = [self._joined.get(rank, "") for rank in range(max(self._joined) + 1)]
        return sum_up(self._settings, names, not self._script, seconds, self._results, stopped or {}, self._statuses)

    def _tell_end(self, summary: Summary, written: bool) -> None:
        tell = self._display.line
        # Without a result nothing is known of the peers on other machines or in other processes.
        self._tell_lost(summary.lost if self._results else [self._peers[rank].name for rank in self._statuses], 1)
        if summary.agreed is False:
            why = "" if self._failures else ": see finish_timeout and peer_timeout in the docs"
            tell(f"the peers hold different models{why}")
        if not self._results:
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
