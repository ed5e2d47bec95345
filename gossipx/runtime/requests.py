"""Requests on their way: they leave by a thread of their own, and the role is told what came of each.

Models and tables travel alike but for what a request carries and what its reply brings; both use this.
"""

from __future__ import annotations

from collections.abc import Callable

from gossipx.comm import CommManager
from gossipx.errors import (
    CancelledError,
    GossipxError,
    LocalFaultError,
    NotAuthorisedError,
    PeerTimeoutError,
    PeerUnreachableError,
    ProtocolError,
    RefusedError,
    UsageError,
)
from gossipx.memory import Source
from gossipx.protocol.effects import Send
from gossipx.protocol.events import Event, Failed, Fault, Replied
from gossipx.protocol.messages import Reply, Request
from gossipx.runtime.serial_worker import SerialWorker
from gossipx.wire import Sink, SinkFactory

Prepared = tuple[Request, Sink | SinkFactory | None, Source | None]
"""A request as it leaves, the sink of its reply's payload, and its own payload."""


def nothing(*told: object) -> None:
    """Do nothing: of a request that holds nothing, or in the place of those that are told once all is over."""


class Outbox:
    """Sends requests.

    Args:
        rank: our own, for the thread's name.
        tell: told Replied or Failed of each request, once.
        note: told of faults worth a line in the log, with their topic.
        fail: told of what ends training.

    Attributes:
        comm: set before the first request; None again once the peer is closed.
    """

    def __init__(
        self,
        rank: int,
        tell: Callable[[Event], None],
        note: Callable[[str, str], None],
        fail: Callable[[GossipxError], None],
    ):
        self.comm: CommManager | None = None
        self._tell, self.note, self.fail = tell, note, fail
        self._cancelled: set[int] = set()  # until they are forgotten
        self._cancels: dict[int, Callable[[], None]] = {}
        # Handing a request to the CommManager wakes its threads, which would take the processor from a training step.
        self._serial_worker = SerialWorker(f"gossipx-outbox-{rank}")

    def send(
        self,
        send: Send,
        prepare: Callable[[], Prepared],
        arrived: Callable[[Reply], Fault | None],
        over: Callable[[], None] = nothing,
    ) -> None:
        """Send a request.

        Args:
            prepare: called just before the request leaves; raises CancelledError if it is not to leave.
            arrived: called with a reply before the role is told of it; raises ProtocolError, or returns a fault, if
                the reply is of no use.
            over: called once the request's payload is no longer read.
        """
        ticket, ended = send.ticket, False

        def done(result: Reply | GossipxError) -> None:
            nonlocal ended
            ended = True
            self._cancels.pop(ticket, None)
            over()
            self._done(ticket, result, arrived)

        def post() -> None:
            comm = self.comm
            try:
                if comm is None or ticket in self._cancelled:  # None: the peer was closed meanwhile
                    raise CancelledError("its request was not sent yet")
                request, sink, source = prepare()
                cancel = comm.request(send.to, request, deadline=send.deadline, payload=sink, done=done, brought=source)
            except CancelledError as error:
                done(error)
            except Exception as error:  # the role still has to hear of its request
                done(LocalFaultError(f"a request could not be sent: {error}"))
            else:
                self._cancels[ticket] = cancel
                if ended:  # before there was anything to cancel
                    self._cancels.pop(ticket, None)

        self.post(post)

    def _done(self, ticket: int, result: Reply | GossipxError, arrived: Callable[[Reply], Fault | None]) -> None:
        fault = None
        if not isinstance(result, GossipxError):
            try:
                fault = arrived(result)
            except ProtocolError as error:
                result = error
        match result:
            case _ if fault is not None:
                self._tell(Failed(ticket, fault))
            case UsageError():
                self.fail(result)
            case NotAuthorisedError() | RefusedError() if self.comm is not None and self.comm.trust.is_outcast:
                self.fail(result)
            case PeerUnreachableError():
                self._tell(Failed(ticket, Fault.UNREACHABLE))
            case PeerTimeoutError():
                self._tell(Failed(ticket, Fault.TIMEOUT))
            case LocalFaultError():
                self.note("local", str(result))
                self._tell(Failed(ticket, Fault.LOCAL))
            case CancelledError():
                self._tell(Failed(ticket, Fault.CANCELLED))
            case GossipxError():
                self.note("protocol", str(result))
                self._tell(Failed(ticket, Fault.PROTOCOL))
            case _:
                self._tell(Replied(ticket, result))

    def give_up(self, ticket: int) -> None:
        """Note that the reply is not wanted any more; :meth:`cancel` follows."""
        self._cancelled.add(ticket)

    def cancel(self, ticket: int) -> None:
        """Have the request end."""
        self.post(lambda: self._cancels.get(ticket, nothing)())

    def forget(self, ticket: int) -> None:
        """Note that the role does not refer to the request any more."""
        self._cancelled.discard(ticket)

    def post(self, what: Callable[[], None]) -> None:
        """Have something done, in order, by the outbox's thread."""
        self._serial_worker.put(what)

    def close(self) -> None:
        """Send nothing any more, and tell nobody."""
        self._serial_worker.close()
        self._tell = self.note = self.fail = nothing  # those that are told hold us
