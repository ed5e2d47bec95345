"""The CommManager of a simulated peer: the interface of :class:`gossipx.comm.CommManager` over an :class:`Endpoint`."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from gossipx.errors import CancelledError, GossipxError, PeerTimeoutError, PeerUnreachableError, ProtocolError
from gossipx.memory import Source
from gossipx.protocol.events import Fault
from gossipx.protocol.messages import Reply, Request
from gossipx.protocol.server_messages import CarryingReply, CarryingRequest
from gossipx.sim.world import Endpoint, Process
from gossipx.wire import Sink, SinkFactory, UploadSink

ERRORS: dict[Fault, Callable[[str], GossipxError]] = {
    Fault.UNREACHABLE: PeerUnreachableError,
    Fault.TIMEOUT: PeerTimeoutError,
    Fault.CANCELLED: CancelledError,
}


class _Trust:
    """Nobody is turned away in a simulated run."""

    doubt = None
    is_outcast = False


class SimComm:
    """The CommManager of one simulated peer.

    Args:
        process: the peer, in its world.
        sink_for, on_request: as for :class:`gossipx.comm.CommManager`.
        changed: called with the bytes of each model before they are sent; returns those that are sent.

    Attributes:
        endpoint: sends and receives.
    """

    def __init__(
        self,
        process: Process,
        sink_for: Callable[[int, CarryingRequest], UploadSink],
        on_request: Callable[[Endpoint, Hashable, Request, UploadSink | None], None],
        changed: Callable[[memoryview], memoryview],
    ):
        self.endpoint = Endpoint(process, self._received)
        self.trust = _Trust()
        self._world = process.world
        self._later = process.later
        self._sink_for = sink_for
        self._on_request = on_request
        self._changed = changed

    @property
    def bytes_received(self) -> int:
        """Bytes of models and tables that other peers have sent."""
        return self.endpoint.bytes_received

    def request(
        self,
        to: int,
        request: Request,
        *,
        deadline: float,
        payload: Sink | SinkFactory | None,
        done: Callable[[Reply | GossipxError], None],
        upload: Source | None = None,
    ) -> Callable[[], None]:
        """Send a request; see :meth:`gossipx.comm.CommManager.request`."""

        def ended(result: Reply | Fault, content: memoryview | None) -> None:
            if isinstance(result, Fault):
                error = ERRORS[result](f"peer {to}: {result.name}")
                done(error)
                return
            problem = None if content is None else _store(payload, result, content)
            self._later(self._world.now, lambda: done(result if problem is None else problem))

        content = None if upload is None else memoryview(bytearray(self._changed(upload.view)))
        return self.endpoint.request(to, request, _size(content), content, deadline, ended)

    def answer(
        self,
        key: Hashable,
        reply: Reply,
        *,
        payload: Source | None,
        deadline: float,
        done: Callable[[bool], None],
        begins: float = 0.0,
    ) -> None:
        """Answer a request; see :meth:`gossipx.comm.CommManager.answer`."""
        content = None if payload is None else self._changed(payload.view)

        def send() -> None:
            self.endpoint.answer(key, reply, _size(content), content, deadline, done)

        if begins > self._world.now:
            self._later(begins, send)
        else:
            send()

    def _received(self, sender: Endpoint, key: Hashable, request: Request, content: memoryview | None) -> None:
        upload = None
        if content is not None and isinstance(request, CarryingRequest):
            upload = self._sink_for(sender.rank, request)
            upload.take(0, content)
        self._on_request(sender, key, request, upload)


def _size(content: memoryview | None) -> int:
    return 0 if content is None else content.nbytes


def _store(payload: Sink | SinkFactory | None, reply: Reply, content: memoryview) -> GossipxError | None:
    """Store the payload of a reply. Return the error if it does not fit."""
    if payload is None or not isinstance(reply, CarryingReply):
        return None
    try:
        sink = payload.fit(reply) if isinstance(payload, SinkFactory) else payload
        sink.take(0, content)
    except ProtocolError as error:
        return error
    return None
