"""Model transfers: requested models and uploads of other peers, stored by ticket until the role forgets them.

The payload of a request arrives before the role has handled the request; it is stored under the request's key until the
role keeps it under a ticket or drops it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from gossipx.compression import Coded, ModelSink
from gossipx.errors import LocalFaultError, ProtocolError
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import Snapshot
from gossipx.model.receive import Incoming
from gossipx.protocol.effects import Send
from gossipx.protocol.events import Fault
from gossipx.protocol.messages import (
    ElasticRequest,
    InitialRequest,
    ModelReply,
    ModelRequest,
    PullRequest,
    Reply,
    Request,
    TakeRequest,
    fragment_of,
)
from gossipx.protocol.server_messages import CarryingRequest, GradientRequest
from gossipx.runtime.driver.clock import DriverClock
from gossipx.runtime.driver.outbox import Outbox, PreparedRequest
from gossipx.runtime.driver.tables import TableWork
from gossipx.tables.store import Gradient
from gossipx.wire import UploadSink


@dataclass
class ReceivedModel:
    """A model that is being received, or was received.

    Attributes:
        request: the request whose reply, or whose payload, is the model.
        incoming: the buffer that receives it.
        began: time of the request, on the driver's clock.
        sender: rank of the model's peer, if this peer requested it.
        distance: the distance to the base once everything has arrived; NaN: the model has a NaN or Inf.
        seconds: from the request to the last byte.
        their_step: iterations that the model had done.
        weight: the number of models of which it is the mean.
        model_sink: decodes a reply; None: no codec.
    """

    request: Request
    incoming: Incoming
    began: float
    sender: int | None = None
    distance: float = math.nan
    seconds: float = 0.0
    their_step: int = 0
    weight: float = 1.0
    model_sink: ModelSink | None = None


class _UploadedModel(Incoming):
    """A model that another peer uploads; it occupies one of the limited places."""

    def __init__(self, arena: ParameterArena, free_place: Callable[[], None]):
        super().__init__(arena, None)
        self._free_place: Callable[[], None] | None = free_place

    def release(self) -> None:
        """Release the buffers and the place."""
        super().release()
        free_place, self._free_place = self._free_place, None
        if free_place is not None:
            free_place()


class ModelTransfers:
    """Sends requests for models, receives uploads, and stores received models by ticket.

    Args:
        arena: lends the buffers.
        outbox: sends this peer's requests.
        clock: measures transfers.
        tables: stores the gradients that are uploaded.
        places: number of models that may be uploaded at the same time; further senders wait.

    Attributes:
        codec: encodes models; None: they are sent as raw values.
        received: models that are being received or were received, by ticket.
    """

    def __init__(self, arena: ParameterArena, outbox: Outbox, clock: DriverClock, tables: TableWork, places: int):
        self.codec: Coded | None = None
        self.received: dict[int, ReceivedModel] = {}
        self._arena = arena
        self._outbox = outbox
        self._clock = clock
        self._tables = tables
        self._uploads: dict[Hashable, ReceivedModel | Gradient] = {}  # by the request's key
        self._places = threading.BoundedSemaphore(places)

    def forget(self, ticket: int) -> None:
        """Release the model stored under ``ticket``, if any."""
        if model := self.received.pop(ticket, None):
            model.incoming.release()

    # --- requests -----------------------------------------------------------------------------------

    def send(self, send: Send, base: Snapshot | None) -> None:
        """Send a request for a model, or one without a payload.

        Args:
            base: the model that the requested one is subtracted from; None: the requested one is stored as received. An
                elastic request uploads it, too. This takes ownership of the caller's reference.
        """
        if not isinstance(send.request, ModelRequest):
            self._outbox.send(send, lambda: (send.request, None, None), lambda reply: None)
            return
        upload = None
        if isinstance(send.request, CarryingRequest):
            assert base is not None
            upload = base.hold()
        is_whole, fragment = isinstance(send.request, InitialRequest), fragment_of(send.request)
        payload = Incoming(self._arena, base, is_whole, fragment)
        model_sink = None if self.codec is None else self.codec.model_sink(send.to, send.request, payload)
        began = self._clock.now()
        self.received[send.ticket] = ReceivedModel(send.request, payload, began, send.to, model_sink=model_sink)

        def over() -> None:
            if upload is not None:
                upload.release()

        def post() -> None:
            self._outbox.send(
                send,
                lambda: self._prepared(send, payload, model_sink, upload),
                lambda reply: self._arrived(send.ticket, reply),
                over,
            )

        if base is None:
            post()
        else:  # the reply is subtracted from the base as it arrives, so the base must be complete first
            base.when_settled(post)

    def _prepared(
        self, send: Send, payload: Incoming, model_sink: ModelSink | None, upload: Snapshot | None
    ) -> PreparedRequest:
        if self.codec is None or model_sink is None:
            return send.request, payload, None if upload is None else upload.source
        return self.codec.prepared(send.to, send.request), model_sink, None

    def _arrived(self, ticket: int, reply: Reply) -> Fault | None:
        if not isinstance(reply, ModelReply):
            return None
        model = self.received[ticket]
        model.seconds = self._clock.now() - model.began
        model.their_step, model.weight = reply.step, reply.weight
        if model.model_sink is not None:
            try:
                model.model_sink.decode()
            except ProtocolError as error:
                raise ProtocolError(f"a received model cannot be decoded: {error}") from error
        if isinstance(model.request, PullRequest | TakeRequest | ElasticRequest):
            model.distance = model.incoming.norm()
        # In a take or an elastic exchange the other side relies on the mixing, so a NaN must be refused now.
        is_paired = isinstance(model.request, TakeRequest | ElasticRequest)
        return Fault.POISONED if is_paired and math.isnan(model.distance) else None

    # --- uploads ------------------------------------------------------------------------------------

    def sink_for(self, sender: int, request: ElasticRequest | GradientRequest) -> UploadSink:
        """Return the sink for an upload; wait for a free place if it is a model.

        Raises:
            LocalFaultError: no place became free while the sender waits.
            ProtocolError: it is a gradient, and its tables are not on this peer.
        """
        sink: UploadSink | None = None
        if isinstance(request, GradientRequest):
            store = self._tables.store
            if store is None:
                raise ProtocolError("it sent a gradient, and this peer is not a server")
            sink = store.sink_for(request)
            if isinstance(sink, Gradient):
                sink.sender = sender
        elif self._places.acquire(timeout=request.patience):
            sink = _UploadedModel(self._arena, self._places.release)
        if sink is None:
            raise LocalFaultError(f"no memory for the upload of peer {sender}: too many peers upload at once")
        return sink

    def store(self, key: Hashable, request: CarryingRequest, upload: UploadSink) -> None:
        """Store the upload of the request ``key``."""
        if isinstance(upload, Gradient):
            self._uploads[key] = upload
        elif isinstance(request, ElasticRequest):
            assert isinstance(upload, Incoming)
            self._uploads[key] = ReceivedModel(request, upload, self._clock.now(), their_step=request.step)

    def keep(self, key: Hashable, ticket: int) -> None:
        """Move the upload of the request ``key`` to ``ticket``."""
        upload = self._uploads.pop(key)
        if isinstance(upload, Gradient):
            self._tables.gradients[ticket] = upload
        else:
            self.received[ticket] = upload

    def drop(self, key: Hashable) -> None:
        """Release the upload of the request ``key`` unless it was kept."""
        upload = self._uploads.pop(key, None)
        if isinstance(upload, Gradient):
            upload.release()
        elif upload is not None:
            upload.incoming.release()
