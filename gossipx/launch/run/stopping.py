"""How ``gossipx run`` stops its peers: what signals ask for, and how long it waits."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from gossipx.launch.run.children import LocalPeers

STOP_GRACE = 300.0
"""Seconds that peers have to stop, beyond ``peer_timeout``, before SIGKILL: as long as one waits for its checkpoint."""
CODES = {signal.SIGINT: 130, signal.SIGHUP: 130, signal.SIGTERM: 0}
"""Exit codes of a run by the signal that stopped it. SIGTERM is obeyed; SIGINT and a closed terminal interrupt."""


@dataclass(frozen=True)
class RunEnd:
    """The end of a run: its exit code, and whether a signal has asked to stop it."""

    code: int
    stopped: bool


class Stopping:
    """The end of the peers of this machine before their training is over.

    Attributes:
        code: exit code of the run; None: the peers have not been told to stop.
        killed: whether they were killed without the time to stop in order.
    """

    def __init__(self, here: LocalPeers) -> None:
        self.code: int | None = None
        self.killed = False
        self._here = here
        self._display = here.display
        self._patience = here.start.settings.exchange.peer_timeout  # until the peers that have not stopped are named
        self._received: list[int] = []
        self._obeyed = False
        self._told: set[int] = set()  # ranks of the children that were told to stop
        self._remind_at = self._kill_at = 0.0

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Note signals within this context, for :meth:`check`. An ignored SIGHUP (nohup) stays ignored."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def by_signal(self) -> bool:
        """Whether a signal has asked to stop, also one that arrived when the peers had ended."""
        return self._obeyed or bool(self._received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.request(number)

    def request(self, number: int) -> None:
        """Do at the next :meth:`check` what a signal asks for."""
        self._received.append(number)

    def check(self, running: Collection[int], hosts: Sequence[str] = ()) -> None:
        """Do what signals have asked for since the last call; name peers that take long to stop, and kill them at last.

        Args:
            running: ranks whose processes are running.
            hosts: other hosts that have to stop, too.
        """
        while self._received:
            self._obey(self._received.pop(0))
        if self.code is None or self.killed:
            return
        self._tell()  # also children that were started meanwhile
        now = time.monotonic()
        if now > self._kill_at:
            self._display.line(f"killed, because they did not stop: {self._named(running, hosts)}")
            self.kill(self.code)
        elif now > self._remind_at:
            self._remind_at = now + self._patience
            self._display.line(
                f"waiting for {self._named(running, hosts)} to stop; killed in {self._kill_at - now:.0f} s,"
                " or at once by Ctrl-C"
            )

    def _obey(self, number: int) -> None:
        if self.code is None:
            if not self._here.start.is_quiet:
                self._display.line("stopping: peers end their step and write a checkpoint; Ctrl-C again stops at once")
            self._obeyed = True
            self.stop(CODES[signal.Signals(number)])
        elif number == signal.SIGINT:  # launchers and terminals may send the others more than once
            self.kill(CODES[signal.SIGINT])

    def stop(self, code: int) -> None:
        """Make all peers end their step, write a checkpoint and leave; ``code`` becomes the run's exit code."""
        now = time.monotonic()
        self.code = code
        self._remind_at = now + self._patience
        self._kill_at = self._remind_at + STOP_GRACE
        self._tell()

    def kill(self, code: int) -> None:
        """Kill all peers at once; ``code`` becomes the run's exit code."""
        self.code, self.killed = code, True
        for child in self._here.children.values():
            child.signal(signal.SIGKILL)

    def _tell(self) -> None:
        for rank in self._here.children.keys() - self._told:
            self._told.add(rank)
            self._here.children[rank].signal(signal.SIGTERM)

    def _named(self, ranks: Collection[int], hosts: Sequence[str]) -> str:
        statuses = [self._here.statuses[rank] for rank in sorted(ranks)]
        return ", ".join([*(f"{status.name} ({status.state} {status.step})" for status in statuses), *hosts])
