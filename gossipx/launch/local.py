"""``gossipx run``: the parent process of the peers on this machine. It starts them, shows them, and sums them up.

It does not restart peers, and it takes no part in what they tell each other.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from gossipx.config.settings import RunConfig
from gossipx.errors import UsageError
from gossipx.launch.children import Child, Spawn, command_of
from gossipx.launch.cluster.world import World, find, why_none
from gossipx.launch.directory import HOSTS_FILE
from gossipx.launch.environment import (
    ENV_CONFIG,
    ENV_DEVICE,
    ENV_PEERS,
    ENV_PROGRESS,
    ENV_RANK,
    ENV_RESUME,
    ENV_RESUME_AT,
)
from gossipx.launch.progress import Display, PeerStatus
from gossipx.launch.start import Start, by_servers, from_hosts, goes_by
from gossipx.metrics.summary import FILE as SUMMARY_FILE
from gossipx.metrics.summary import Summary, per_peer

LOOK_EVERY = 0.1
"""Seconds between two looks at processes that may have ended."""
INTERRUPT_GRACE = 3.0
"""Seconds that interrupted peers have before they are killed."""


def who(hosts: Path | None, environ: Mapping[str, str]) -> tuple[Path | None, World | None]:
    """Who says who the peers of a run are: the hosts file that is given or that GOSSIPX_PEERS names, and the launcher.

    Raises:
        UsageError: neither does, or variables of a launcher do not go together.
    """
    world = find(environ)
    if hosts is None and environ.get(ENV_PEERS) and not environ.get(ENV_CONFIG):
        hosts = Path(environ[ENV_PEERS])
    if world is None and hosts is None:
        raise UsageError(
            "who the peers are is not given: --peers hosts.txt, a line a host such as 'localhost slots=4'"
            + why_none(environ)
        )
    return hosts, None if hosts is not None and world is not None and world.size == 1 else world


def launch(
    given: RunConfig,
    hosts: Path | None,
    script: list[str],
    environ: Mapping[str, str],
    resumes: bool = False,
    spawn: Spawn = subprocess.Popen,
) -> int:
    """Run the peers of this machine to their end, or the one that this process is under torchrun, srun or mpirun.

    Args:
        given: settings, presets not yet filled in.
        hosts: the hosts file; None: the environment says who the peers are.
        script: a user's script and its arguments; empty: the built-in task.
        environ: what torchrun, srun or mpirun tells this process, and GOSSIPX_RANK and its like before them.
        resumes: the run of that name goes on from its checkpoints; see :mod:`gossipx.launch.resume`.
        spawn: starts the process of a peer; called as :class:`subprocess.Popen` is.

    Returns:
        The exit code: 0 if a peer finished and its script ended well, 1 if none did, 2, 4 or 5 if a peer ended so,
        130 if interrupted.

    Raises:
        UsageError: settings, hosts file or script are not right; nothing was started then.
        GossipxError: the processes of the run did not meet.
    """
    hosts, world = who(hosts, environ)
    if world is not None:
        from gossipx.launch.cluster.multi_process import (
            from_world,  # and torch, whose store is where the processes meet
        )

        start = from_world(given, world, hosts, script, resumes)
    else:
        assert hosts is not None
        start = from_hosts(given, hosts, script, resumes)
    try:
        return _Run(start, script, spawn).go(start.notice)
    finally:
        start.directory.release()


class _Run:
    """The peers of this machine, from their start to their end."""

    def __init__(self, start: Start, script: list[str], spawn: Spawn) -> None:
        self._spawn = spawn
        self._settings = settings = start.settings
        self._directory = start.directory
        self._peers = peers = start.peers
        self._script = script
        self._resumes = start.resumes
        self._resumes_at = start.resumes_at
        length = 0 if script else settings.run.iterations  # a script has a length of its own
        self._statuses = {rank: PeerStatus(peers[rank].name, iterations=length) for rank in start.here}
        around = "" if settings.hub.hub is None else f", hub {settings.hub.hub}"
        if by_servers(settings):
            around = f", servers {settings.server.servers or 0}"
        kind = "sync" if by_servers(settings) else "policy"
        title = f"{settings.run.name}: {kind} {goes_by(settings)}, {len(peers)} peers{around}"
        self._display = Display(title, self._statuses, plain=start.shared)
        self._children: dict[int, Child] = {}
        self._results: dict[int, dict[str, Any]] = {}
        self._left: set[int] = set()
        self._failed_after: set[int] = set()  # finished, and then their scripts failed
        self._exit: int | None = None  # why all are stopped, once they are
        self._stop_by: float | None = None
        self._sent: int | None = None  # the signal that peers were sent last
        self._interrupts = 0
        self._began: float | None = None

    def go(self, notice: str | None = None) -> int:
        """Start them, follow them, sum them up; ``notice`` is told first."""
        with selectors.DefaultSelector() as selector, self._signals(), self._display:
            if notice is not None:
                self._display.line(notice)
            try:
                for rank in self._statuses:
                    self._start(rank, selector)
                self._follow(selector)
                self._display.refresh(last=self._exit is None)
            finally:
                for child in self._children.values():
                    child.signal(signal.SIGKILL)
                    child.process.wait()
                trained = self._began is not None or bool(self._results)
                if not trained:
                    self._directory.give_up()
        ended = time.monotonic()
        if not trained:
            if self._exit is None and not self._left:
                self._display.line("no peer finished")
                return 1
            return self._exit or 0
        if self._exit is not None:
            return self._exit
        if self._left and not self._results:
            return 0
        summary = self._sum_up(ended - (self._began or ended))
        self._directory.keep()
        written = self._directory.conclude(summary)
        self._tell_end(summary, written)
        return 0 if self._results.keys() - self._failed_after else 1

    # --- processes ----------------------------------------------------------------------------------

    def _start(self, rank: int, selector: selectors.BaseSelector) -> None:
        threads = str(self._settings.run.threads)
        environment = {
            "OMP_NUM_THREADS": threads,
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            ENV_CONFIG: str(self._directory.config.resolve()),
            ENV_PEERS: str((self._directory.path / HOSTS_FILE).resolve()),
            ENV_RANK: str(rank),
            ENV_DEVICE: self._peers[rank].device or self._settings.run.device,
        }
        environment[ENV_RESUME] = "1" if self._resumes else ""
        environment[ENV_RESUME_AT] = "" if self._resumes_at is None else str(self._resumes_at)
        name = self._peers[rank].name
        child = Child(
            command_of(self._script),
            environment,
            ENV_PROGRESS,
            on_line=lambda line: self._printed(name, line),
            on_word=lambda word: self._told(rank, word),
            spawn=self._spawn,
        )
        child.register(selector)
        self._children[rank] = child
        if self._sent is not None:  # it came while peers were being started
            child.signal(self._sent)

    def _follow(self, selector: selectors.BaseSelector) -> None:
        running = dict(self._children)
        while running:
            for key, _ in selector.select(LOOK_EVERY):
                if key.fd in selector.get_map():
                    key.data()
            for rank, child in list(running.items()):
                if child.process.poll() is not None:
                    del running[rank]
                    child.drain(selector)
                    self._ended(rank, child)
            self._display.refresh()
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                for child in running.values():
                    child.signal(signal.SIGKILL)

    def _printed(self, name: str, line: str) -> None:
        if self._exit != 130:  # what interrupted processes still print are tracebacks of the interruption
            self._display.line(f"[{name}] {line}")

    def _told(self, rank: int, word: dict[str, Any]) -> None:
        status = self._statuses[rank]
        if "error" in word:
            self._failed(rank, str(word["error"]), int(word["exit"]))
        elif "result" in word:
            self._results[rank] = word["result"]
            report = word["result"]["report"]
            status.state = "done"
            status.accuracy = report.get("test_accuracy")
            status.retrievals = report.get("retrievals", status.retrievals)
        elif "state" in word:
            for key, value in word.items():
                setattr(status, key, value)
            if status.state == "train" and self._began is None:
                self._began = time.monotonic()
                self._directory.keep()
            if status.state == "left":
                self._left.add(rank)

    def _failed(self, rank: int, error: str, code: int) -> None:
        """A peer ended with an error of its own. One that the user must mend ends the run, and is told once.

        So does any error before training has begun, such as a port in use; after that the others go on.
        """
        self._statuses[rank].state = "failed"
        if self._exit is not None:
            return
        if code == 1 and self._began is not None:
            self._display.line(f"{self._peers[rank].name}: {error}")
            return
        self._stop(code, signal.SIGKILL)
        self._display.error(error)

    def _ended(self, rank: int, child: Child) -> None:
        if rank in self._left or self._exit is not None:
            return
        if rank in self._results:
            if child.process.returncode > 0:  # killed after it has finished: as good as done
                self._failed_after.add(rank)
                self._display.line(f"{self._peers[rank].name} finished, but its process ended: {child.how_it_ended()}")
            return
        code, status = child.process.returncode, self._statuses[rank]
        if code == 0 and status.state == "starting":
            name = self._peers[rank].name
            self._failed(rank, f"{name}: its script ended without gossipx.join, the line that makes it a peer", 1)
            return
        early = code == -signal.SIGTERM and status.state == "starting"  # before it could say that it leaves
        if self._sent == signal.SIGTERM or early:  # asked to; or it took too long to go and was killed
            status.state = "left"
            self._left.add(rank)
            return
        status.state = "lost"
        self._display.line(f"peer {self._peers[rank].name} is lost: {child.how_it_ended()}")
        alive = len(self._peers) - sum(status.state in ("lost", "failed") for status in self._statuses.values())
        least = self._settings.sync.min_peers
        if 0 < alive < least:  # with none left the run has failed, of what was told
            self._stop(4, signal.SIGTERM)
            self._display.error(f"{alive} of {len(self._peers)} peers left, fewer than --min-peers {least}")

    # --- stopping -----------------------------------------------------------------------------------

    def _stop(self, code: int, number: int) -> None:
        self._exit = code
        self._stop_by = time.monotonic() + INTERRUPT_GRACE
        self._send(number)

    def _send(self, number: int) -> None:
        self._sent = number
        for child in self._children.values():
            child.signal(number)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C stops every peer at once, a second one without grace; SIGTERM asks them to leave.

        Caffe's solvers take a snapshot at SIGHUP.
        """
        handlers = {signal.SIGINT: self._interrupted, signal.SIGTERM: self._terminated}
        if self._settings.task.solver is not None and not self._script:
            handlers[signal.SIGHUP] = self._hung_up
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        self._stop(130, signal.SIGINT if self._interrupts == 1 else signal.SIGKILL)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self._stop_by = time.monotonic() + self._settings.exchange.peer_timeout + INTERRUPT_GRACE
        self._send(signal.SIGTERM)

    def _hung_up(self, number: int, frame: FrameType | None) -> None:
        for rank, child in self._children.items():
            if self._statuses[rank].state == "train":
                child.signal(number)

    # --- figures ------------------------------------------------------------------------------------

    def _sum_up(self, seconds: float) -> Summary:
        reports: list[dict[str, Any] | None] = [None] * len(self._peers)
        accuracy = None
        for rank, result in sorted(self._results.items()):
            reports[rank] = result["report"]
            # Peers on other machines have told theirs to these.
            for other, report in result["reports"].items():
                reports[int(other)] = reports[int(other)] or report
            accuracy = result["consensus_accuracy"] if accuracy is None else accuracy
        built_in = not self._script
        settings = self._settings
        assert settings.run.name is not None
        before = max((result.get("seconds_before", 0.0) for result in self._results.values()), default=0.0)
        done = [report["iterations"] for report in reports if report and "iterations" in report]
        return Summary(
            name=settings.run.name,
            policy=_reported("policy", reports, goes_by(settings)),
            codec=_reported("codec", reports, settings.sync.codec),
            seed=settings.run.seed,
            peers=len(self._peers),
            task=settings.task.task if built_in else None,
            model=settings.task.model if built_in else None,
            partition=settings.task.partition,
            # A script has a length of its own, which the settings do not know.
            iterations=settings.run.iterations if built_in or not done else max(done),
            consensus_accuracy=accuracy,
            lost=[self._peers[rank].name for rank, report in enumerate(reports) if report is None],
            wall_seconds=before + seconds,
            **per_peer(reports),
        )

    def _tell_end(self, summary: Summary, written: bool) -> None:
        tell = self._display.line
        if summary.lost:
            tell(f"lost: {', '.join(summary.lost)}")
        if not self._results:
            tell("no peer finished")
            return
        if not written:  # who has written it tells
            return
        path = self._directory.path
        tell(f"{path / SUMMARY_FILE} is written; compare runs: gossipx compare {path} ...")
        tell(f"curves: tensorboard --logdir {self._settings.run.logdir}")


def _reported(key: str, reports: Sequence[Mapping[str, Any] | None], configured: str) -> str:
    """Return what peers say of themselves: a script may have brought an object that no setting names."""
    return next((str(report[key]) for report in reports if report and key in report), configured)
