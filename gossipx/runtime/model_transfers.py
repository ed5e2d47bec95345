"""Models on their way to a peer: what it asks others for, what they bring, and what is kept of both by its ticket."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from gossipx.compression import Coded, ModelSink, UploadedModelSink
from gossipx.errors import ProtocolError
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.model.snapshots import Snapshot
from gossipx.protocol.effects import Send
from gossipx.protocol.events import Fault
from gossipx.protocol.messages import (
    CarryingRequest,
    ElasticRequest,
    InitialRequest,
    ModelReply,
    ModelRequest,
    PullRequest,
    Reply,
    Request,
    TakeRequest,
)
from gossipx.runtime.requests import Outbox, Prepared


@dataclass
class Transfer:
    """A model on its way to us."""

    request: Request
    incoming: Incoming
    began: float
    distance: float = math.nan  # to what it is compared with, once all has come; NaN: it is poisoned
    seconds: float = 0.0
    their_step: int = 0
    weight: float = 1.0  # the number of models that are averaged in it
    model_sink: ModelSink | None = None  # where models have a codec
    upload_sink: UploadedModelSink | None = None  # ... and others bring theirs


class Transfers:
    """Sends requests, and keeps the models that come until they are forgotten.

    Args:
        arena: that of the models.
        outbox: of the peer.

    Attributes:
        codec: of models; None: they travel as they are.
    """

    def __init__(self, arena: ParameterArena, outbox: Outbox):
        self.codec: Coded | None = None
        self._arena = arena
        self._outbox = outbox
        self._transfers: dict[int, Transfer] = {}

    # --- out --------------------------------------------------------------------------------------

    def send(self, send: Send, base: Snapshot | None) -> None:
        """Send a request for a model, or one that carries nothing.

        Args:
            base: what the requested model is compared with; None: it is kept as it comes. An elastic request carries
                it. This takes ownership of the caller's reference.
        """
        if not isinstance(send.request, ModelRequest):
            self._outbox.send(send, lambda: (send.request, None, None), lambda reply: None)
            return
        brought = None
        if isinstance(send.request, CarryingRequest):
            assert base is not None
            brought = base.hold()
        payload = Incoming(self._arena, base, whole=isinstance(send.request, InitialRequest))
        model_sink = None if self.codec is None else self.codec.model_sink(send.to, send.request, payload)
        self._transfers[send.ticket] = Transfer(send.request, payload, time.monotonic(), model_sink=model_sink)

        def over() -> None:
            if brought is not None:
                brought.release()

        def post() -> None:
            self._outbox.send(
                send,
                lambda: self._prepared(send, payload, model_sink, brought),
                lambda reply: self._arrived(send.ticket, reply),
                over,
            )

        if base is None:
            post()
        else:  # before that, nothing can be made of what comes
            base.when_settled(post)

    def _prepared(
        self, send: Send, payload: Incoming, model_sink: ModelSink | None, brought: Snapshot | None
    ) -> Prepared:
        if self.codec is None or model_sink is None:
            return send.request, payload, None if brought is None else brought.source
        request, source = self.codec.prepared(send.to, send.request, brought.buffer.vectors if brought else [])
        return request, model_sink, source

    def _arrived(self, ticket: int, reply: Reply) -> Fault | None:
        if not isinstance(reply, ModelReply):
            return None
        transfer = self._transfers[ticket]
        transfer.seconds = time.monotonic() - transfer.began
        transfer.their_step, transfer.weight = reply.step, reply.weight
        if transfer.model_sink is not None:
            try:
                transfer.model_sink.decode()
            except ProtocolError as error:
                raise ProtocolError(f"a model cannot be decoded: {error}") from error
        if isinstance(transfer.request, PullRequest | TakeRequest | ElasticRequest):
            transfer.distance = transfer.incoming.norm()
        # Of a take or an elastic exchange it has to be known before the other side counts on it.
        at_once = isinstance(transfer.request, TakeRequest | ElasticRequest)
        return Fault.POISONED if at_once and math.isnan(transfer.distance) else None

    # --- by ticket --------------------------------------------------------------------------------

    def upload_sink(self, ticket: int) -> UploadedModelSink | None:
        """What has decoded the model that another has brought, and that is under ``ticket``; None: nothing had to."""
        transfer = self._transfers.get(ticket)
        return None if transfer is None else transfer.upload_sink

    def keep(self, ticket: int, brought: Transfer) -> None:
        """Keep the model that another has brought."""
        self._transfers[ticket] = brought

    def pop(self, ticket: int) -> Transfer:
        """Give the model under ``ticket`` away to the caller."""
        return self._transfers.pop(ticket)

    def forget(self, ticket: int) -> None:
        """Release what is under ``ticket``."""
        if transfer := self._transfers.pop(ticket, None):
            transfer.incoming.release()
