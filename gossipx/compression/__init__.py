"""Compression of models on the wire: encoded differences to references that both ends of an exchange keep."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gossipx.compression.model_coding import ModelCodec, ModelSink
from gossipx.compression.wave_coding import WaveCodec
from gossipx.memory import Source
from gossipx.model.pool import Snapshot
from gossipx.model.receive import Incoming
from gossipx.protocol import messages
from gossipx.protocol.effects import Answer

__all__ = ["Coded", "ModelCodec", "ModelSink", "WaveCodec"]


class Coded:
    """The compression of one peer's models.

    Args:
        models: for exchanges between peers: the codec of each fragment of the model, in the order of their numbers.
        in_pairs: whether a pair mixes x̂_j − x̂_i, what both have sent each other, rather than x̂_j − x_i.
    """

    def __init__(self, models: Sequence[ModelCodec], in_pairs: bool = False):
        self.in_pairs = in_pairs
        self._models = {codec.fragment.number: codec for codec in models}

    def of(self, fragment: int) -> ModelCodec:
        """Return the codec of a fragment of the model."""
        return self._models[fragment]

    def begin(self, model: Sequence[Tensor] | None) -> None:
        """Set the initial model, which all peers share as their first reference.

        Args:
            model: the values of each section, in host memory; None: this peer joined later and does not have it.
        """
        for codec in self._models.values():
            codec.begin(None if model is None else codec.fragment.vectors_of(model))

    def give(self, answer: Answer, reply: messages.ModelReply, model: Snapshot) -> tuple[messages.ModelReply, Source]:
        """Encode the model of an answer; return the completed reply and the payload."""
        if answer.receiver is None:
            return reply, model.source
        buffer, (receiver, bases) = model.buffer, answer.receiver
        return self.of(buffer.fragment).give(receiver, bases, buffer.vectors, reply)

    def model_sink(self, to: int, request: messages.Request, incoming: Incoming) -> ModelSink | None:
        """Return the sink that decodes the reply to a request; None: the model arrives uncompressed."""
        if isinstance(request, messages.PullRequest | messages.TakeRequest):
            return self.of(request.fragment).model_sink(to, incoming)
        return None

    def prepared(self, to: int, request: messages.Request) -> messages.Request:
        """Return a request for a model, completed by what this peer has to decode it."""
        return self.of(messages.fragment_of(request)).prepared(to, request)
