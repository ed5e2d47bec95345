"""The outbox: it sends requests from a thread of its own and reports the outcome of each to the role.

Transfers of models and of tables both use it; they differ only in the payloads of request and reply.
"""

from __future__ import annotations

from collections.abc import Callable

from gossipx import errors
from gossipx.comm import CommManager
from gossipx.memory import Source
from gossipx.protocol.effects import Send
from gossipx.protocol.events import Event, Failed, Fault, Replied
from gossipx.protocol.messages import Reply, Request
from gossipx.runtime.driver.clock import DriverClock
from gossipx.wire import Sink, SinkFactory

PreparedRequest = tuple[Request, Sink | SinkFactory | None, Source | None]
"""The request that is sent, the sink for the reply's payload, and the request's own payload."""


def nothing(*args: object) -> None:
    """Do nothing: the default callback, and the one that replaces the others after ``close``."""


class Outbox:
    """A queue of outgoing requests.

    Args:
        rank: this peer's rank, for the thread's name.
        clock: makes the thread.
        handle: called once per request with a Replied or Failed event.
        note: called with a topic and a text for each fault that is worth logging.
        fail: called with an error that ends training.

    Attributes:
        comm: the CommManager; set before the first request, and None again once the peer is closed.
    """

    def __init__(
        self,
        rank: int,
        clock: DriverClock,
        handle: Callable[[Event], None],
        note: Callable[[str, str], None],
        fail: Callable[[errors.GossipxError], None],
    ):
        self.comm: CommManager | None = None
        self._handle, self.note, self.fail = handle, note, fail
        self._cancelled: set[int] = set()  # tickets, until they are forgotten
        self._cancels: dict[int, Callable[[], None]] = {}
        # Passing a request to the CommManager wakes its threads; in the training thread that would delay the step.
        self._worker = clock.worker(f"gossipx-outbox-{rank}")

    def send(
        self,
        send: Send,
        prepare: Callable[[], PreparedRequest],
        arrived: Callable[[Reply], Fault | None],
        over: Callable[[], None] = nothing,
    ) -> None:
        """Send a request.

        Args:
            prepare: called just before the request is sent; raises CancelledError to drop it.
            arrived: called with the reply before the role handles it; raises ProtocolError, or returns a fault, if the
                reply is unusable.
            over: called once the request's payload is no longer read.
        """
        ticket, ended = send.ticket, False

        def done(result: Reply | errors.GossipxError) -> None:
            nonlocal ended
            ended = True
            self._cancels.pop(ticket, None)
            over()
            self._done(ticket, result, arrived)

        def post() -> None:
            comm = self.comm
            try:
                if comm is None or ticket in self._cancelled:  # None: the peer was closed meanwhile
                    raise errors.CancelledError("the request was cancelled before it was sent")
                request, sink, source = prepare()
                cancel = comm.request(send.to, request, deadline=send.deadline, payload=sink, done=done, upload=source)
            except errors.CancelledError as error:
                done(error)
            except Exception as error:  # the role waits for the outcome of every request
                done(errors.LocalFaultError(f"a request could not be sent: {error}"))
            else:
                self._cancels[ticket] = cancel
                if ended:  # done() ran before the cancel function was stored
                    self._cancels.pop(ticket, None)

        self.post(post)

    def _done(self, ticket: int, result: Reply | errors.GossipxError, arrived: Callable[[Reply], Fault | None]) -> None:
        fault = None
        if not isinstance(result, errors.GossipxError):
            try:
                fault = arrived(result)
            except errors.ProtocolError as error:
                result = error
        match result:
            case _ if fault is not None:
                self._handle(Failed(ticket, fault))
            case errors.UsageError():
                self.fail(result)
            case errors.NotAuthorisedError() | errors.RefusedError() if (
                self.comm is not None and self.comm.trust.is_outcast
            ):
                self.fail(result)
            case errors.PeerUnreachableError():
                self._handle(Failed(ticket, Fault.UNREACHABLE))
            case errors.PeerTimeoutError():
                self._handle(Failed(ticket, Fault.TIMEOUT))
            case errors.LocalFaultError():
                self.note("local", str(result))
                self._handle(Failed(ticket, Fault.LOCAL))
            case errors.CancelledError():
                self._handle(Failed(ticket, Fault.CANCELLED))
            case errors.GossipxError():
                self.note("protocol", str(result))
                self._handle(Failed(ticket, Fault.PROTOCOL))
            case _:
                self._handle(Replied(ticket, result))

    def give_up(self, ticket: int) -> None:
        """Mark a request as cancelled, so that it is not sent if it is still queued; :meth:`cancel` follows."""
        self._cancelled.add(ticket)

    def cancel(self, ticket: int) -> None:
        """Cancel a request that has been sent."""
        self.post(lambda: self._cancels.get(ticket, nothing)())

    def forget(self, ticket: int) -> None:
        """Drop what is stored for a request that the role no longer refers to."""
        self._cancelled.discard(ticket)

    def post(self, job: Callable[[], None]) -> None:
        """Queue a job for the outbox's thread."""
        self._worker.put(job)

    @property
    def busy_for(self) -> float:
        """Seconds that the job under way has taken; 0 between jobs."""
        return self._worker.busy_for

    def close(self) -> None:
        """Stop sending, and make no more callbacks."""
        self._worker.close()
        self._handle = self.note = self.fail = nothing  # break the reference cycle with the driver
