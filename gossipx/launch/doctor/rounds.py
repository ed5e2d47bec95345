"""One host's course through a checkup: reach all others, measure with each in turn, and tell each other what was found.

Nobody leads. A host waits until it has reached all others, or its patience or another's is over. Then each pair is
measured by the one of the two that comes first in the hosts file, or if that does not reach the other, by the other.
A pair holds the turns of both meanwhile, and takes the first one's before the second one's, so that nobody waits in a
ring. A host leaves once all whom it has heard of are done, and it has told them so.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gossipx.errors import GossipxError
from gossipx.launch.doctor.findings import TALKED, UNASKED, Host, Name, Port, Reached, Row, Way, merge, turns
from gossipx.launch.doctor.station import Station
from gossipx.launch.doctor.visit import TURN, Guest, reach, visit
from gossipx.settings import ExchangeSettings

_AGAIN = 0.3
"""Seconds between two looks at who is not there yet, and between two exchanges of findings."""
_NO_NEWS = 15.0
"""Seconds without news, or as long as others are waited for if that is more, after which none is expected: one pair may
take twice a load's limit, and tells of its latency before."""
_SECOND_TURN = 10.0
"""Seconds that a visit may be silent while its host's own turn is waited for."""


class Rounds:
    """A host's doctor.

    Args:
        host: whose.
        hosts: all.
        guest: by whom others are visited.
        exchange, binds: see :class:`Station`.
        row: what is known of the machine already.
        wait: seconds that others are waited for; and after which, without news, they are given up.
        tell: told now and then who is still waited for.

    Attributes:
        rows: by host, all that is known.
    """

    def __init__(
        self,
        host: Host,
        hosts: Sequence[Host],
        guest: Guest,
        exchange: ExchangeSettings,
        binds: Sequence[str],
        row: Row,
        wait: float,
        tell: Callable[[Host, list[Host]], None],
    ):
        self._host = host
        self._hosts = hosts
        self._guest = guest
        self._wait = wait
        self._tell = tell
        self._news = threading.Condition()
        # Everything below is touched under the condition alone.
        self.rows: dict[int, Row] = {host.number: row}
        self._changed = time.monotonic()
        self._agreed: set[int] = set()  # hosts that know as much, when all was done
        # A host's own lines reach each other, too; a single line visits itself if there is no other.
        meets_itself = len(host.peers) > 1 or len(hosts) == 1
        self._targets = [one for one in hosts if one is not host or meets_itself]
        self._station = Station(host, guest, exchange, binds, len(hosts), self._swap, self._told)
        self._note(ports=tuple(self._whose(port) for port in self._station.ports))

    def _whose(self, port: Port) -> Port:
        """A port that is taken may be taken by a peer of a run, or by another doctor."""
        if port.state != "taken":
            return port
        peer = self._guest.peers[port.rank]
        found = reach(self._guest, peer, self._addresses(self._host))
        if found.facts is not None:
            return replace(port, state="run" if found.facts.role == "run" else "doctor")
        return replace(port, state=found.outcome, cause=found.text) if found.outcome in UNASKED else port

    def _addresses(self, host: Host) -> tuple[str, ...]:
        return next((one for one in self.row.names if one.host == host.number), Name(host.number, ())).addresses

    # --- what is known --------------------------------------------------------------------------------

    @property
    def row(self) -> Row:
        """This host's own."""
        with self._news:
            return self.rows[self._host.number]

    def _note(self, **found: object) -> None:
        with self._news:
            own = self.rows[self._host.number]
            self.rows[self._host.number] = replace(own, version=own.version + 1, **found)  # type: ignore[arg-type]
            self._changed = time.monotonic()
            self._news.notify_all()

    def _swap(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Take in what another knows; what is known now, this host's own row first."""
        with self._news:
            before = self.rows
            self.rows = merge(before, rows)
            if self.rows != before:
                self._changed = time.monotonic()
                self._news.notify_all()
            return sorted(self.rows.values(), key=lambda row: row.host != self._host.number)

    def _told(self, host: int, rows: Sequence[Row]) -> None:
        """That host has now all of these, and so has this one: if all are done, nothing is left to tell each other."""
        with self._news:
            if all(row.done for row in rows) and self.rows.keys() <= {row.host for row in rows}:
                self._agreed.add(host)
                self._news.notify_all()

    # --- reaching -------------------------------------------------------------------------------------

    def go(self) -> None:
        """The whole course; :attr:`rows` has what came of it."""
        until = time.monotonic() + self._wait
        for host in self._targets:
            self._guest.links.spawn(f"reach-{host.number}", self._keep_reaching, host)
        self._await_others(until)
        self._note(settled=True)
        self._measure_all()
        self._part()

    def close(self) -> None:
        """Answer no more."""
        self._station.close()

    def _keep_reaching(self, host: Host) -> None:
        """Try all lines of a host, and those that did not answer again, to the end of the checkup."""
        left = list(host.peers)
        while left and not self._guest.links.closed.is_set():
            found = [reach(self._guest, peer, self._addresses(host)) for peer in left]
            self._reached(found)
            left = [peer for peer, one in zip(left, found, strict=True) if one.outcome != "ok"]
            self._guest.links.closed.wait(_AGAIN)

    def _reached(self, found: Sequence[Reached]) -> None:
        with self._news:
            had = {one.rank: one for one in self.rows[self._host.number].reached}
            for one in found:
                if one.rank not in had or one.outcome in TALKED or had[one.rank].outcome not in TALKED:
                    had[one.rank] = one
            reached = tuple(had[rank] for rank in sorted(had))
            if reached != self.rows[self._host.number].reached:
                self._note(reached=reached)

    def _others(self) -> list[Host]:
        return [host for host in self._hosts if host is not self._host]

    def _await_others(self, until: float) -> None:
        """Until all are reached, or nobody is waited for any more."""
        while True:
            with self._news:
                own = self.rows[self._host.number]
                tried = all(own.reach(peer.rank) for host in self._targets for peer in host.peers)
                missing = [host for host in self._others() if not all(_is_ok(own.reach(p.rank)) for p in host.peers)]
                given_up = any(row.waited for row in self.rows.values())
            if tried and (not missing or given_up):
                break
            if time.monotonic() > until and tried:
                self._note(waited=True)
                break
            if tried:
                self._tell(self._host, missing)
            self._exchange()
            self._pause()
        self._exchange()

    def _pause(self) -> None:
        with self._news:
            self._news.wait(_AGAIN)

    # --- measuring ------------------------------------------------------------------------------------

    def _measure_all(self) -> None:
        """Measure with all that are this host's to measure, in the order of a tournament."""
        number = self._host.number
        left = turns(number, len(self._hosts))
        if self._host in self._targets:
            self._measure(number)
        while left and not self._is_over():
            for other in list(left):
                mine = self._is_mine(other)
                if mine is None:
                    continue
                if mine:
                    self._measure(other)
                left.remove(other)
            if left:
                self._exchange()
                self._pause()
        self._note(done=True)

    def _is_mine(self, other: int) -> bool | None:
        """Whether the pair is this host's to measure; None: the other has not said yet."""
        with self._news:
            own, theirs = self.rows[self._host.number], self.rows.get(other)
            if not self._way_in(own, other):
                return False
            if own.host < other:
                return True
            if theirs is None or not theirs.settled:
                doctors = any(_role(own.reach(peer.rank)) == "doctor" for peer in self._hosts[other].peers)
                return None if doctors else True  # a run does not measure
            return not self._way_in(theirs, own.host)

    def _way_in(self, row: Row, to: int) -> bool:
        return any(_is_ok(row.reach(peer.rank)) for peer in self._hosts[to].peers)

    def _measure(self, other: int) -> None:
        """Measure with a host, while both have their turn: the first of the file takes its own first."""
        own = self.row
        lines = [peer for peer in self._hosts[other].peers if _is_ok(own.reach(peer.rank))]
        if not lines:
            return
        # A run takes no load; of its own lines a host visits another than the one it visits as.
        mine = self._guest.me.rank
        line = min(lines, key=lambda peer: (_role(own.reach(peer.rank)) != "doctor", peer.rank == mine))
        loads = _role(own.reach(line.rank)) == "doctor"
        try:
            with self._own_turn(own.host < other, TURN), visit(self._guest, line) as visited:
                if loads and not visited.turn():
                    raise GossipxError("it was busy with others")
                with self._own_turn(own.host > other, _SECOND_TURN):
                    way = visited.measure(other, loads)
        except GossipxError as error:
            way = Way(other, None, None, None, why=str(error))
        self._note(ways=(*self.row.ways, way))

    @contextlib.contextmanager
    def _own_turn(self, wanted: bool, seconds: float) -> Iterator[None]:
        if not wanted:
            yield
            return
        if not self._station.turn.acquire(timeout=seconds):
            raise GossipxError("this host was busy with others")
        try:
            yield
        finally:
            self._station.turn.release()

    # --- parting --------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Swap findings with every doctor that is reached."""
        own = self.row
        for host in self._others():
            line = next((peer for peer in host.peers if _role(own.reach(peer.rank)) == "doctor"), None)
            if line is not None:
                with contextlib.suppress(GossipxError), visit(self._guest, line) as visited:
                    heard = visited.exchange(self._swap(()), len(self._hosts))
                    self._swap(heard)
                    self._told(host.number, heard)

    def _is_over(self) -> bool:
        """Whether there was no news for so long that none is to be expected."""
        with self._news:
            return time.monotonic() > self._changed + max(self._wait, _NO_NEWS)

    def _part(self) -> None:
        """Stay until all that were heard of know all, or are gone."""
        while not self._is_over():
            with self._news:
                if all(row.done for row in self.rows.values()) and self._neighbours() <= self._agreed:
                    return
            self._exchange()
            self._pause()

    def _neighbours(self) -> set[int]:
        """Hosts whose doctors can exchange findings with this one, either way; others hear by these."""
        own = self.rows[self._host.number]
        reached = {
            host.number for host in self._others() if any(_role(own.reach(p.rank)) == "doctor" for p in host.peers)
        }
        ranks = [peer.rank for peer in self._host.peers]
        return reached | {
            row.host
            for row in self.rows.values()
            if row.host != own.host and any(_role(row.reach(rank)) == "doctor" for rank in ranks)
        }


def _is_ok(reached: Reached | None) -> bool:
    return reached is not None and reached.outcome == "ok"


def _role(reached: Reached | None) -> str:
    return reached.facts.role if reached is not None and reached.outcome == "ok" and reached.facts else ""
