"""Uploads: models and gradients that other peers send as payloads of their requests.

The payload arrives before the role has handled the request; it is stored under the request's key until the role keeps
it under a ticket or drops it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from gossipx.compression import UploadedModelSink
from gossipx.errors import LocalFaultError, ProtocolError
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import CarryingRequest, ElasticRequest
from gossipx.protocol.server_messages import GradientRequest, RecordRequest
from gossipx.runtime.clock import Clock
from gossipx.runtime.model_transfers import Transfer, Transfers
from gossipx.runtime.table_transfers import TableTransfers
from gossipx.tables.store import Gradient
from gossipx.wire import UploadSink


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


class Uploads:
    """Receives uploads and stores each until it is kept or dropped.

    Args:
        arena: lends the buffers for models.
        transfers: stores the models that are kept.
        tables: stores the gradients that are kept.
        places: number of models that may be uploaded at the same time; further senders wait.
        clock: says when an upload arrived.
    """

    def __init__(self, arena: ParameterArena, transfers: Transfers, tables: TableTransfers, places: int, clock: Clock):
        self._arena = arena
        self._transfers = transfers
        self._tables = tables
        self._uploads: dict[Hashable, Transfer | Gradient] = {}  # by the request's key
        self._clock = clock
        self._places = threading.BoundedSemaphore(places)

    def sink_for(self, sender: int, request: CarryingRequest) -> UploadSink:
        """Return the sink for an upload; wait for a free place if it is a model. Called by the CommManager.

        Raises:
            LocalFaultError: no place became free while the sender waits.
            ProtocolError: it is a gradient, and its tables are not on this peer.
        """
        sink: UploadSink | None = None
        if isinstance(request, GradientRequest | RecordRequest):
            table_store = self._tables.table_store
            if table_store is None:
                raise ProtocolError("it sent a gradient, and this peer is not a server")
            sink = table_store.sink_for(request)
            if isinstance(sink, Gradient) and isinstance(request, GradientRequest):
                sink.sender = sender
        elif self._places.acquire(timeout=request.patience):
            model = _UploadedModel(self._arena, self._places.release)
            codec = self._transfers.codec
            try:
                sink = None if codec is None else codec.upload_sink(sender, request, model)
            except ProtocolError:
                model.release()
                raise
            sink = sink or model
        if sink is None:
            raise LocalFaultError(f"no memory for the upload of peer {sender}: too many peers upload at once")
        return sink

    def store(self, key: Hashable, request: CarryingRequest, upload: UploadSink) -> None:
        """Store the upload of the request ``key``.

        Raises:
            ProtocolError: it is malformed, or a difference to a model that this peer no longer holds.
        """
        if isinstance(upload, Gradient):
            self._uploads[key] = upload
        elif isinstance(request, ElasticRequest):
            upload_sink = upload if isinstance(upload, UploadedModelSink) else None
            if upload_sink is not None:
                upload_sink.decode()
            incoming = upload.incoming if isinstance(upload, UploadedModelSink) else upload
            assert isinstance(incoming, Incoming)
            began = self._clock.now()
            self._uploads[key] = Transfer(request, incoming, began, their_step=request.step, upload_sink=upload_sink)

    def keep(self, key: Hashable, ticket: int) -> None:
        """Move the upload of the request ``key`` to ``ticket``."""
        upload = self._uploads.pop(key)
        if isinstance(upload, Gradient):
            self._tables.keep(ticket, upload)
        else:
            self._transfers.keep(ticket, upload)

    def drop(self, key: Hashable) -> None:
        """Release the upload of the request ``key`` unless it was kept."""
        upload = self._uploads.pop(key, None)
        if isinstance(upload, Gradient):
            upload.release()
        elif upload is not None:
            upload.incoming.release()
