"""The receive buffer of an encoded model, which is decoded once it is complete."""

from __future__ import annotations

from collections.abc import Callable

from gossipx.compression.sections import Sections
from gossipx.errors import ProtocolError
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import CarryingReply, ModelReply
from gossipx.wire import Bytes, Sink


class ModelSink:
    """The receive buffer of the encoded model in one reply; a :class:`gossipx.wire.SinkFactory`.

    Args:
        sections: the layout of the model.
        incoming: receives the decoded model.
        decoded: decodes the payload to pieces in the memory layout of a model; may raise ProtocolError.
    """

    nbytes = 1  # not 0: there is a payload, but its size is only known with the reply

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
        """Return the sink of the reply's payload. Raises ProtocolError if it does not fit this run's model."""
        if not isinstance(reply, ModelReply) or not self.fits(reply):
            raise ProtocolError("it replied with a model that does not fit this run's layout")
        self._reply = reply
        self._content = memoryview(bytearray(self._sections.nbytes(reply.sizes)))
        return Bytes(self._content)

    def fits(self, reply: ModelReply) -> bool:
        """Return whether the payload of a reply may have its size."""
        return self._sections.fit(reply.sizes, reply.bases)

    def decode(self) -> None:
        """Decode the complete payload and pass the model on. Raises ProtocolError if it is malformed."""
        start = 0
        for view in self._decoded(self._reply, self._content, self._incoming):
            self._incoming.take(start, view)
            start += len(view)
        self._content = memoryview(b"")
