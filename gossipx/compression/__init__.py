"""Compression of models on the wire: encoded differences to references that both ends of an exchange keep."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gossipx.compression.model_coding import ModelCodec, ModelSink
from gossipx.compression.wave_coding import WaveCodec, WaveSink
from gossipx.errors import LocalFaultError
from gossipx.memory import Source
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import Snapshot
from gossipx.model.receive import Incoming
from gossipx.protocol import messages
from gossipx.protocol.effects import Answer

__all__ = ["Coded", "ModelCodec", "ModelSink", "WaveCodec", "WaveSink"]


class Coded:
    """The compression of one peer's models.

    Args:
        models: for exchanges between peers: the codec of each fragment of the model, in the order of their numbers.
        in_pairs: whether a pair mixes x̂_j − x̂_i, what both have sent each other, rather than x̂_j − x_i.
        waves: for waves in place of exchanges between two peers: the codec of each fragment.
    """

    def __init__(
        self,
        models: Sequence[ModelCodec],
        in_pairs: bool = False,
        waves: Sequence[WaveCodec] = (),
    ):
        self.in_pairs = in_pairs
        self._models = {codec.fragment.number: codec for codec in models}
        self._waves = {codec.fragment.number: codec for codec in waves}

    def resize(self, peers: int) -> None:
        """Expect waves of this many peers from now on."""
        for codec in self._waves.values():
            codec.peers = peers

    def of(self, fragment: int) -> ModelCodec:
        """Return the codec of a fragment of the model."""
        return self._models[fragment]

    def begin(self, model: Sequence[Tensor] | None) -> None:
        """Set the initial model, which all peers share as their first reference.

        Args:
            model: the values of each section, in host memory; None: this peer joined later and does not have it.
        """
        codecs: list[ModelCodec | WaveCodec] = [*self._models.values(), *self._waves.values()]
        for codec in codecs:
            codec.begin(None if model is None else codec.fragment.vectors_of(model))

    def begin_from(self, arena: ParameterArena) -> None:
        """Set the initial model from the arena; after the first step the arena no longer holds it."""
        if arena.step:
            self.begin(None)
            return
        snapshot = arena.snapshot()
        self.begin(snapshot.buffer.vectors)
        snapshot.release()

    def captured(self, ticket: int, fragment: int) -> None:
        """Record that a model was captured, which enters a wave if the exchanges of this peer are waves."""
        if fragment in self._waves:
            self._waves[fragment].enter(ticket)

    def wave_ended(self, ticket: int, average: Snapshot) -> None:
        """Record the result of a wave, which becomes the weights now."""
        buffer = average.buffer
        if buffer.fragment in self._waves:
            self._waves[buffer.fragment].applied(ticket, buffer.vectors)

    def give(self, answer: Answer, reply: messages.ModelReply, model: Snapshot) -> tuple[messages.ModelReply, Source]:
        """Encode the model of an answer; return the completed reply and the payload.

        Raises:
            LocalFaultError: it belongs to a wave that is over, or to no wave in a run of waves.
        """
        if answer.receiver is None:
            return reply, model.source
        buffer, (receiver, bases) = model.buffer, answer.receiver
        if buffer.fragment in self._waves:
            if answer.captured is None:
                raise LocalFaultError("in this run models are exchanged in waves")
            return self._waves[buffer.fragment].give(answer.captured, bases, buffer.vectors, reply)
        return self.of(buffer.fragment).give(receiver, bases, buffer.vectors, reply)

    def model_sink(self, to: int, request: messages.Request, incoming: Incoming) -> ModelSink | None:
        """Return the sink that decodes the reply to a request; None: the model arrives uncompressed."""
        match request:
            case messages.PullRequest() | messages.TakeRequest():
                return self.of(request.fragment).model_sink(to, incoming)
            case messages.RoundRequest() if request.wave != messages.LAST_WAVE and self._waves:
                return self._waves[request.fragment].model_sink(incoming)
        return None

    def prepared(self, to: int, request: messages.Request) -> messages.Request:
        """Return a request for a model, completed by what this peer has to decode it."""
        if isinstance(request, messages.RoundRequest):
            return self._waves[request.fragment].prepared(request)
        return self.of(messages.fragment_of(request)).prepared(to, request)
