"""``gossipx run``: the parent process of the peers on this machine, which starts and follows them.

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

from gossipx.errors import GossipxError, UsageError
from gossipx.launch.environment import ENV_PROGRESS, ENV_STOP_WITH_INPUT
from gossipx.launch.hosts import bind_host
from gossipx.launch.ports import kept_free
from gossipx.launch.run.children import READ, Child, LocalPeers, Spawn, command_of, misplaced
from gossipx.launch.run.display import Display, PeerStatus
from gossipx.launch.run.outcome import RunOutcome
from gossipx.launch.run.restarts import Restarts
from gossipx.launch.run.ssh import Command, Remote
from gossipx.launch.run.stopping import RunEnd, Stopping
from gossipx.launch.start import Start
from gossipx.launch.world.source import PeerSource
from gossipx.settings.sections import MOST_ITERATIONS, RunConfig
from gossipx.transports import Address

POLL_INTERVAL = 0.1
"""Seconds between two checks for processes that have ended, and for signals."""


def launch(
    source: PeerSource,
    given: RunConfig,
    script: list[str],
    resumed_size: int = 0,
    spawn: Spawn = subprocess.Popen,
    over_ssh: Command | None = None,
) -> RunEnd:
    """Run the peers of this machine to their end, or under torchrun, srun or mpirun the one peer that is this process.

    Args:
        source: where the peers come from.
        given: settings; :mod:`gossipx.assembly.presets` fills in the others.
        script: a user's script and its arguments; empty: the built-in task.
        resumed_size: number of peers that the run of that name had, which resumes from its checkpoints (see
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
    return follow(source.start(given, script, resumed_size), script, spawn, over_ssh)


def follow(start: Start, script: list[str], spawn: Spawn, over_ssh: Command | None = None) -> RunEnd:
    """Start peers of this machine and follow them to their end; arguments, result and errors as :func:`launch`."""
    try:
        try:
            remote = {} if over_ssh is None else over_ssh.on_others(start)
        except UsageError:
            start.directory.revert()
            raise
        return _Processes(start, script, spawn, remote).go()
    finally:
        start.directory.release()


class _Processes:
    """The processes of the peers of this machine, and of the ssh clients of other hosts, from start to end."""

    def __init__(self, start: Start, script: list[str], spawn: Spawn, remote: Mapping[str, Sequence[str]]) -> None:
        settings, self._plan, self._script, self._spawn = start.settings, start, script, spawn
        # 0: unknown. A script sets its own number of iterations, and with --seconds alone it is as high as can be.
        length = 0 if script or settings.run.iterations == MOST_ITERATIONS else settings.run.iterations
        self._statuses = {rank: PeerStatus(start.peers[rank].name, iterations=length) for rank in start.here}
        for status in self._statuses.values():
            status.begins(script)
        self._display = Display(start.title, self._statuses, plain=start.shared)
        here = LocalPeers(start, script, self._statuses, self._display)
        self._children = here.children
        self._stopping = Stopping(here)
        self._restarts = Restarts(here)
        self._outcome = RunOutcome(here, self._stopping, self._restarts)
        self._remote = Remote(remote, self._display.line)

    def go(self) -> RunEnd:
        """Start the peers, follow them and write the summary."""
        # Signals are noted also while the summary is written: launchers may send one twice.
        with closing(self._outcome.curves), self._stopping.signals():
            with selectors.DefaultSelector() as selector, self._display, kept_free(self._binds()):
                self._tell_options()
                try:
                    for rank in self._statuses:
                        self._start(rank, selector)
                    self._remote.start(selector)
                    self._follow(selector)
                    self._display.refresh(last=self._stopping.code is None)
                finally:
                    for child in self._children.values():
                        child.signal(signal.SIGKILL)
                        child.process.wait()
                    self._remote.end()
                    if not self._outcome.trained:
                        self._plan.directory.revert()
            code = self._outcome.conclude(max(self._remote.codes.values(), default=0))
            return RunEnd(code, self._stopping.by_signal)

    def _tell_options(self) -> None:
        """Show what the user should know before the peers start."""
        if self._plan.notice is not None:
            self._display.line(self._plan.notice)
        if self._plan.is_quiet:
            return
        if self._script and "iterations" in self._plan.settings.given:
            given = self._plan.settings.run.iterations
            self._display.line(f"{self._script[0]} decides how long it trains: --iterations {given} has no effect")
        if word := misplaced(self._script):
            place = f"{word} stands after SCRIPT ({self._script[0]}), whose option it is"
            self._display.line(f"{place}; options of gossipx run stand before it")

    def _binds(self) -> list[Address]:
        """Return the addresses at which the peers of this machine will listen."""
        here = [self._plan.peers[rank] for rank in self._statuses]
        return [Address(bind_host(peer, self._plan.settings.exchange.bind, None), peer.port) for peer in here]

    def _start(self, rank: int, selector: selectors.BaseSelector, again: bool = False) -> None:
        name = self._plan.peers[rank].name
        try:
            child = Child(
                command_of(self._script),
                self._plan.environment(rank, again),
                ENV_PROGRESS,
                on_line=lambda line: self._display.line(f"[{name}] {line}"),
                on_event=lambda event: self._outcome.handle(rank, event),
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
                self._read(selector, 0)  # all that peers have told before that, such as which others were started again
            for rank in ended:
                child = running.pop(rank)
                child.drain(selector)
                self._outcome.ended(rank, child)
            self._stopping.check(running, self._remote.running)
            self._restart(running, selector)
            self._follow_remote(selector, bool(running))
            self._display.refresh()

    def _read(self, selector: selectors.BaseSelector, seconds: float) -> None:
        """Read what has arrived, or arrives within ``seconds``."""
        for key, _ in selector.select(seconds):
            if key.fd in selector.get_map():  # else a call before this one has closed it
                key.data()

    def _input(self, selector: selectors.BaseSelector) -> None:
        """Stop when the standard input ends, because the ``gossipx run --ssh`` at its other end stops or is gone."""
        if not os.read(0, READ):
            selector.unregister(0)
            self._stopping.request(signal.SIGTERM)

    def _follow_remote(self, selector: selectors.BaseSelector, waits_for_own: bool) -> None:
        """Pass a stop on to other hosts, and report those that have failed."""
        for host in self._remote.check(selector):
            self._outcome.host_failed(self._remote.why(host))
        if self._stopping.code is not None:
            self._remote.stop()
        elif not waits_for_own and self._remote.running:
            self._remote.remind(time.monotonic(), every=self._plan.settings.exchange.peer_timeout)

    def _restart(self, running: dict[int, Child], selector: selectors.BaseSelector) -> None:
        """Start peers again that have died, or that somebody has asked to restart.

        One that was started again, but has nobody to train with as all others have ended meanwhile, is killed.
        """
        if self._stopping.code is not None:
            self._restarts.give_up()
            return
        now = time.monotonic()
        for rank in self._restarts.asked(now, running):
            running[rank].signal(signal.SIGTERM)
        for rank in self._outcome.left_alone():
            if rank in running:
                running.pop(rank).signal(signal.SIGKILL)
        for rank in self._restarts.due(now):
            self._outcome.starts_again(rank)
            self._start(rank, selector, again=True)
            running[rank] = self._children[rank]
