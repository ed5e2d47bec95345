"""Requests to a role from outside of the run's traffic: of users, programs, and processes that want to join.

Each call passes an event to the role and waits for the effect that answers it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from gossipx.protocol.effects import ReportEntry, ReportOutcome
from gossipx.protocol.events import AskEntry, ChangeServers, Event, SwitchSync


class Commands:
    """The open requests to one role.

    Args:
        handle: passes an event to the role.
        peer_timeout: seconds.
    """

    def __init__(self, handle: Callable[[Event], None], peer_timeout: float):
        self._handle = handle
        self._peer_timeout = peer_timeout
        self._numbers = itertools.count(1)
        self._open: dict[int, Future[Any]] = {}

    def switch_sync(self, sync: str, shard: int | None, apply: str, pulls: str) -> str:
        """Switch one shard, or all of them, to another sync model. Return why that failed; empty on success."""
        patience = 2 * self._peer_timeout
        answer = self._ask(lambda number: SwitchSync(number, shard, sync, apply, pulls), patience)
        return "no answer within peer_timeout" if answer is None else str(answer)

    def change_servers(self, servers: Sequence[int]) -> str:
        """Move the shards to these peers. Return why that failed; empty on success."""
        return str(self._ask(lambda number: ChangeServers(number, tuple(servers))))  # the role sets a deadline itself

    def admit(self, name: str, host: str, port: int, opener: str) -> ReportEntry | None:
        """Ask the role to admit a process; None: the peer has ended."""
        answer = self._ask(lambda number: AskEntry(number, name, host, port, opener), self._peer_timeout)
        return answer if isinstance(answer, ReportEntry) else None

    def _ask(self, event: Callable[[int], Event], patience: float | None = None) -> Any:
        number = next(self._numbers)
        result = self._open[number] = Future()
        self._handle(event(number))
        try:
            return result.result(patience)
        except FutureTimeoutError:  # in Python 3.10 not the built-in one
            return None

    def close(self) -> None:
        """Break the reference cycle with the driver; later requests have no answer."""
        self._handle = lambda event: None

    def answered(self, effect: ReportOutcome | ReportEntry) -> None:
        """Handle the role's answer."""
        result = effect if isinstance(effect, ReportEntry) else effect.problem
        self._open.pop(effect.number).set_result(result)
