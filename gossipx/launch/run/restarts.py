"""When ``gossipx run`` starts a peer again: one that died (``--restart``), or on request (``gossipx peer restart``)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from pathlib import Path

from gossipx.errors import MALFORMED
from gossipx.launch.run.children import LocalPeers
from gossipx.launch.run.control_files import RESTART
from gossipx.launch.run.display import PeerStatus
from gossipx.runtime.ending.control import DIRECTORY, MAX_BYTES, take

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the first restart of a peer that died, which double with each one, and their limit: a fault that is
over by itself, such as a lack of memory, may take some time, and a fault that stays must not keep a machine busy."""
LOOK_EVERY = 0.5
"""Seconds between two looks for requests."""
WAITING = "restarts"
"""State of a peer that will be started again."""
ENDED = ("done", "left", "lost", "failed")
"""States of a peer that takes no part in the run any more."""
RESTARTED = "restarted"
"""State of a peer whose process ended, and which the others meet again: a process that this one did not start."""


class Restarts:
    """The restarts of the peers of this machine. They are started by the caller, when :meth:`due` names them.

    Attributes:
        started: ranks that have been started again.
    """

    def __init__(self, here: LocalPeers) -> None:
        self._directory = here.start.directory.path / DIRECTORY
        self._statuses = here.statuses
        self._most = here.start.settings.run.restart  # how often each peer that dies is started again
        self._tell = here.display.line
        self.started: set[int] = set()
        self._died: dict[int, int] = {}  # by rank: how often it was started again because it died
        self._at: dict[int, float] = {}  # by rank: when it is started again
        self._asked: set[int] = set()  # ranks that end because somebody asked for a restart
        self._look_at = 0.0
        self._commands: list[Path] = []  # seen, and not carried out yet

    @property
    def pending(self) -> bool:
        """Whether a peer that has ended will be started again."""
        return bool(self._at)

    def asked(self, now: float, running: Collection[int]) -> list[int]:
        """Return the ranks that somebody had asked to restart by the last call; they have to end first.

        Commands are carried out one call later, so that what peers reported before is known by then.

        Args:
            running: ranks whose processes run.
        """
        found: list[int] = []
        for command in self._commands:
            if (rank := self._meant(command)) is not None:
                take(command, lambda _, rank=rank: self._carry_out(rank, now, running, found))  # type: ignore[misc]
        self._commands = []
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY
            self._commands = sorted(self._directory.glob(f"*{RESTART}"))
        return found

    def _meant(self, command: Path) -> int | None:
        """Return the rank of the peer that a command is about; None: it is not one of this machine."""
        with contextlib.suppress(OSError, *MALFORMED, AttributeError):
            name = json.loads(command.read_bytes()[:MAX_BYTES]).get("peer")
            return next((rank for rank, status in self._statuses.items() if status.name == name), None)
        return None

    def _carry_out(self, rank: int, now: float, running: Collection[int], found: list[int]) -> str:
        status = self._statuses[rank]
        if status.state == "done":
            return f"{status.name} has finished"
        if status.state == RESTARTED:
            return f"{status.name} was started by hand: end it with 'gossipx peer drain', and start it again by hand"
        if rank in running:
            self._asked.add(rank)
            found.append(rank)
        else:
            self._at[rank] = now
            status.state = WAITING
        self._tell(f"{status.name} is restarted, as asked")
        return ""

    def ended(self, rank: int, died: bool, how: str, now: float) -> bool:
        """Handle the end of a peer's process before it has finished.

        Args:
            died: whether it was not asked to end, and training has begun.
            how: how it ended, for messages.

        Returns:
            Whether it will be started again.
        """
        status = self._statuses[rank]
        if rank in self._asked:
            self._asked.discard(rank)
            self._at[rank] = now
        elif died and (count := self._died.get(rank, 0)) < self._most:
            self._died[rank] = count + 1
            pause = min(FIRST_PAUSE * 2**count, LONGEST_PAUSE)
            self._at[rank] = now + pause
            self._tell(f"{status.name} has died ({how}): restart {count + 1} of {self._most} in {pause:g} s")
        else:
            return False
        status.state = WAITING
        return True

    def due(self, now: float) -> list[int]:
        """Return the ranks to start now."""
        due = [rank for rank, at in self._at.items() if at <= now]
        self.started.update(due)
        for rank in due:
            del self._at[rank]
        return due

    def left_alone(self, peers: Collection[int]) -> list[int]:
        """Return the ranks that are being started again although all other peers have ended, and start none any more.

        Alone such a peer would wait for a model that nobody has, or train one that differs from that of the others.

        Args:
            peers: the ranks of all peers of the run.
        """
        again = {rank for rank, status in self._statuses.items() if rank in self._at or self._begins(rank, status)}
        ended = {rank for rank, status in self._statuses.items() if status.state in ENDED}
        if not again or again | ended != set(peers) or all(self._statuses[rank].state != "done" for rank in ended):
            return []
        self.give_up()
        for rank in sorted(again):
            self._statuses[rank].state = "lost"
            self._tell(f"peer {self._statuses[rank].name} is lost: the others have finished before it was back")
        return sorted(again)

    def _begins(self, rank: int, status: PeerStatus) -> bool:
        return rank in self.started and (status.state == "joining" or not (status.joins or status.state in ENDED))

    def give_up(self) -> None:
        """Start no peer any more."""
        self._at.clear()
        self._most = 0
