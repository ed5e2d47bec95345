"""Takes in what an answer brings of a model by a codec, and decodes it once it is whole."""

from __future__ import annotations

from collections.abc import Callable

from gossipx.compression.sections import Sections
from gossipx.errors import ProtocolError
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import CarryingReply, ModelReply
from gossipx.wire import Bytes, Sink


class ModelSink:
    """Takes in one model; a :class:`gossipx.wire.SinkFactory`.

    Args:
        sections: of models here.
        incoming: takes the model in as it lies in memory, once all has come.
        decoded: makes that of what has come; it may raise ProtocolError.
    """

    nbytes = 1  # of which nothing is known yet, but that bytes come

    def __init__(
        self,
        sections: Sections,
        incoming: Incoming,
        decoded: Callable[[ModelReply, memoryview, Incoming], list[memoryview]],
    ):
        self._sections = sections
        self._incoming = incoming
        self._decoded = decoded
        self._reply = ModelReply(0)
        self._content = memoryview(b"")

    def fit(self, reply: CarryingReply) -> Sink:
        """What takes in what ``reply`` brings; ProtocolError if it is no model of ours."""
        if not isinstance(reply, ModelReply) or not self._sections.fit(reply.sizes, reply.bases):
            raise ProtocolError("it answered by a model that does not fit")
        self._reply = reply
        self._content = memoryview(bytearray(self._sections.nbytes(reply.sizes)))
        return Bytes(self._content)

    def decode(self) -> None:
        """It is whole: hand the model on. ProtocolError if it is malformed."""
        start = 0
        for view in self._decoded(self._reply, self._content, self._incoming):
            self._incoming.take(start, view)
            start += len(view)
        self._content = memoryview(b"")
