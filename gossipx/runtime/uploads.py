"""What others bring with their requests: models and gradients, by the request that brought them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

from gossipx.compression import UploadedModelSink
from gossipx.errors import LocalFaultError, ProtocolError
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import CarryingRequest, ElasticRequest
from gossipx.protocol.server_messages import GradientRequest, RecordRequest
from gossipx.runtime.model_transfers import Transfer, Transfers
from gossipx.runtime.table_transfers import TableTransfers
from gossipx.tables.store import Gradient
from gossipx.wire import UploadSink


class _UploadPlace(Incoming):
    """A model that another brings, in one of the places there are."""

    def __init__(self, arena: ParameterArena, leave: Callable[[], None]):
        super().__init__(arena, None)
        self._leave: Callable[[], None] | None = leave

    def release(self) -> None:
        """Give all memory back, and the place."""
        super().release()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class Uploads:
    """Takes in what others bring, and holds it until it is kept or dropped.

    Args:
        arena: whose models they are.
        transfers: of the peer; models that are kept go there.
        tables: of the peer; gradients that are kept go there.
        places: models that others may bring at a time; who brings more waits.
    """

    def __init__(self, arena: ParameterArena, transfers: Transfers, tables: TableTransfers, places: int):
        self._arena = arena
        self._transfers = transfers
        self._tables = tables
        self._uploads: dict[Hashable, Transfer | Gradient] = {}  # by the key of the request
        self._places = threading.BoundedSemaphore(places)

    def room_for(self, sender: int, request: CarryingRequest) -> UploadSink:
        """Where a model or a gradient that another brings is taken in, once there is a place; for the CommManager.

        Raises:
            LocalFaultError: there was none for as long as its sender waits.
            ProtocolError: it is a gradient of tables that are not here.
        """
        room: UploadSink | None = None
        if isinstance(request, GradientRequest | RecordRequest):
            table_store = self._tables.table_store
            if table_store is None:
                raise ProtocolError("it brought a gradient, and this peer is no server")
            room = table_store.room_for(request)
            if isinstance(room, Gradient) and isinstance(request, GradientRequest):
                room.sender = sender
        elif self._places.acquire(timeout=request.patience):
            placed = _UploadPlace(self._arena, self._places.release)
            codec = self._transfers.codec
            try:
                room = None if codec is None else codec.upload_sink(sender, request, placed)
            except ProtocolError:
                placed.release()
                raise
            room = room or placed
        if room is None:
            raise LocalFaultError(f"no place for what peer {sender} brings: too many bring something at once")
        return room

    def take(self, key: Hashable, request: CarryingRequest, room: UploadSink) -> None:
        """The request ``key`` has brought this.

        Raises:
            ProtocolError: it is malformed, or changes what is not here.
        """
        if isinstance(room, Gradient):
            self._uploads[key] = room
        elif isinstance(request, ElasticRequest):
            upload_sink = room if isinstance(room, UploadedModelSink) else None
            if upload_sink is not None:
                upload_sink.decode()
            incoming = room.incoming if isinstance(room, UploadedModelSink) else room
            assert isinstance(incoming, Incoming)
            began = time.monotonic()
            self._uploads[key] = Transfer(request, incoming, began, their_step=request.step, upload_sink=upload_sink)

    def keep(self, key: Hashable, ticket: int) -> None:
        """What ``key`` has brought is under ``ticket`` from now on."""
        brought = self._uploads.pop(key)
        if isinstance(brought, Gradient):
            self._tables.keep(ticket, brought)
        else:
            self._transfers.keep(ticket, brought)

    def drop(self, key: Hashable) -> None:
        """What ``key`` has brought is not needed, if it is not kept."""
        brought = self._uploads.pop(key, None)
        if isinstance(brought, Gradient):
            brought.release()
        elif brought is not None:
            brought.incoming.release()
