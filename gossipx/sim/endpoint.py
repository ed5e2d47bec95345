"""The requests that one simulated peer sends and receives, over the modelled network.

It does in virtual time what :class:`gossipx.comm.CommManager` does over connections: each request ends exactly once, by
its reply or by a fault, at its deadline at the latest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from gossipx.protocol.events import Fault
from gossipx.protocol.messages import Reply, Request
from gossipx.sim.network import Transfer
from gossipx.wire import ANSWERS

if TYPE_CHECKING:
    from gossipx.sim.world import World

Outcome = Callable[[Reply | Fault, Any], None]
"""Called once with the reply and its content, or with the fault."""


def _nothing() -> None:
    pass


class Open:
    """A request that awaits its reply.

    Attributes:
        sender: the endpoint that sent it.
        to: rank of the receiver.
        done: called with the outcome.
        transfer: its bytes, or those of its reply, while they are under way.
        given_up: called if it ends before its reply is complete; the receiver sets it.
    """

    __slots__ = ("done", "given_up", "request", "sender", "to", "transfer")

    def __init__(self, sender: Endpoint, to: int, request: Request, done: Outcome):
        self.sender = sender
        self.to = to
        self.request = request
        self.done: Outcome | None = done
        self.transfer: Transfer | None = None
        self.given_up: Callable[[], None] = _nothing


class _Answer:
    """An answer under way; ``done`` is called once with whether it was delivered."""

    __slots__ = ("_asked", "_by", "_content", "_done", "_nbytes", "_reply", "transfer")

    def __init__(
        self, by: Endpoint, asked: Open, reply: Reply, nbytes: int, content: Any, done: Callable[[bool], None]
    ):
        self._by = by
        self._asked = asked
        self._reply = reply
        self._nbytes = nbytes
        self._content = content
        self._done: Callable[[bool], None] | None = done
        self.transfer: Transfer | None = None

    def arrive(self) -> None:
        """Deliver the answer: its last byte is there."""
        self.transfer = None
        self._end(self._asked.sender.replied(self._asked, self._reply, self._nbytes, self._content))

    def abandon(self) -> None:
        """Abandon the answer, unless it has arrived."""
        if self._done is not None:
            if self.transfer is not None:
                self._by.world.stop(self.transfer)
            self._end(False)

    def _end(self, whole: bool) -> None:
        self._content = None  # the deadline's action keeps this object
        done, self._done = self._done, None
        if done is not None:
            self._by.later(self._by.world.now, lambda: done(whole))


class Endpoint:
    """One peer's requests and answers.

    Args:
        world: carries them.
        rank: the peer's rank.
        received: called with (sender's rank, key, request, content, its sender's endpoint) for each request.
        later: schedules an action of this peer; it is dropped if the peer is down by then.

    Attributes:
        bytes_received, bytes_sent: bytes of models and tables, from and to other peers.
    """

    def __init__(
        self,
        world: World[Any],
        rank: int,
        received: Callable[[Endpoint, Hashable, Request, Any], None],
        later: Callable[[float, Callable[[], None]], None],
    ):
        self.rank = rank
        self.is_down = False
        self.bytes_received = self.bytes_sent = 0
        self.world = world
        self._received = received
        self.later = later
        self._open: dict[Open, None] = {}
        self._keys = itertools.count(1)
        self._requests: dict[Hashable, Open] = {}  # received, and not answered yet

    # --- requests -----------------------------------------------------------------------------------

    def request(
        self, to: int, request: Request, nbytes: int, content: Any, deadline: float, done: Outcome
    ) -> Callable[[], None]:
        """Send a request; return a function that cancels it.

        Args:
            nbytes: size of what it carries; 0: nothing.
            content: passed to the receiver.
            deadline: in seconds of virtual time.
        """
        asked = Open(self, to, request, done)
        self._open[asked] = None
        self.world.awaiting(to)[asked] = None
        self.bytes_sent += nbytes if to != self.rank else 0
        asked.transfer = self.world.carry(self, to, nbytes, lambda: self._arrive(asked, nbytes, content))
        self.world.at(deadline, lambda: self.fail(asked, Fault.TIMEOUT))
        return lambda: self.fail(asked, Fault.CANCELLED)

    def _arrive(self, asked: Open, nbytes: int, content: Any) -> None:
        asked.transfer = None
        other = self.world.endpoint(asked.to)
        if other is None:
            self.world.refuse(asked)
        else:
            other.receive(asked, nbytes, content)

    def fail(self, asked: Open, fault: Fault) -> None:
        """End a request by a fault, unless it has ended before."""
        if asked.done is not None:
            done = self._close(asked)
            if asked.transfer is not None:
                self.world.stop(asked.transfer)
            asked.given_up()
            self.later(self.world.now, lambda: done(fault, None))

    def replied(self, asked: Open, reply: Reply, nbytes: int, content: Any) -> bool:
        """Handle a reply whose last byte has arrived. Return False if the request has ended before."""
        if self.is_down or asked.done is None:
            return False
        done = self._close(asked)
        self.bytes_received += nbytes if asked.to != self.rank else 0
        done(reply, content)
        return True

    def _close(self, asked: Open) -> Outcome:
        done, asked.done = asked.done, None
        assert done is not None
        del self._open[asked]
        del self.world.awaiting(asked.to)[asked]
        return done

    @property
    def idle(self) -> bool:
        """Whether no request awaits a reply, and no received one its answer."""
        return not self._open and not self._requests

    # --- answers ------------------------------------------------------------------------------------

    def receive(self, asked: Open, nbytes: int, content: Any) -> None:
        """Pass a request of another peer on; called when its last byte has arrived."""
        key = next(self._keys)
        self._requests[key] = asked
        self.bytes_received += nbytes if asked.sender is not self else 0
        self._received(asked.sender, key, asked.request, content)

    def answer(
        self, key: Hashable, reply: Reply, nbytes: int, content: Any, deadline: float, done: Callable[[bool], None]
    ) -> None:
        """Answer a received request.

        Args:
            nbytes: size of what the reply carries.
            deadline: time after which an incomplete answer is abandoned.
            done: called once with whether it was delivered.
        """
        asked = self._requests.pop(key)
        # Over a connection another reply is a fault, after which the request is repeated.
        assert isinstance(reply, ANSWERS[type(asked.request)]), f"{reply} does not answer {asked.request}"
        if asked.done is None:  # the requester has given up
            self.later(self.world.now, lambda: done(False))
            return
        answer = _Answer(self, asked, reply, nbytes, content, done)
        self.bytes_sent += nbytes if asked.sender is not self else 0
        answer.transfer = self.world.carry(self, asked.sender.rank, nbytes, answer.arrive)
        asked.given_up = answer.abandon
        self.world.at(deadline, answer.abandon)

    def close(self) -> None:
        """Drop everything: the peer is down."""
        self.is_down = True
        for asked in list(self._open):
            self._close(asked)
            asked.given_up()
        self._requests.clear()
