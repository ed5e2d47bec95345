"""Compression of models on the wire: encoded differences to references that both ends of an exchange keep."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gossipx.compression.elastic import ElasticCodec, UploadedModelSink
from gossipx.compression.models import ModelCodec
from gossipx.compression.receive import ModelSink
from gossipx.memory import Source
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import ElasticRequest, PullRequest, Request, TakeRequest, fragment_of

__all__ = ["Coded", "ElasticCodec", "ModelCodec", "ModelSink", "UploadedModelSink"]


class Coded:
    """The compression of one peer's models.

    Args:
        models: for exchanges between peers: the codec of each fragment of the model, in the order of their numbers.
        elastic: for exchanges with a hub; None: the run has none.
        in_pairs: whether a pair mixes x̂_j − x̂_i, what both have sent each other, rather than x̂_j − x_i.
    """

    def __init__(self, models: Sequence[ModelCodec], elastic: ElasticCodec | None = None, in_pairs: bool = False):
        self.elastic = elastic
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
        if self.elastic is not None:
            self.elastic.begin(model)

    def begin_from(self, arena: ParameterArena) -> None:
        """Set the initial model from the arena; after the first step the arena no longer holds it."""
        if arena.step:
            self.begin(None)
            return
        snapshot = arena.snapshot()
        self.begin(snapshot.buffer.vectors)
        snapshot.release()

    def model_sink(self, to: int, request: Request, incoming: Incoming) -> ModelSink | None:
        """Return the sink that decodes the reply to a request; None: the model arrives uncompressed."""
        match request:
            case PullRequest() | TakeRequest():
                return self.of(request.fragment).model_sink(to, incoming)
            case ElasticRequest() if self.elastic is not None and not self.elastic.is_hub:
                return self.elastic.model_sink(incoming)
        return None

    def prepared(self, to: int, request: Request, model: Sequence[Tensor]) -> tuple[Request, Source | None]:
        """Complete a request that is about to be sent; return it and its payload, if it has one.

        Args:
            model: for an :class:`ElasticRequest`, the model to upload: the values of each section, in host memory.
        """
        if isinstance(request, ElasticRequest):
            assert self.elastic is not None
            return self.elastic.bring(request, model)
        return self.of(fragment_of(request)).prepared(to, request), None

    def upload_sink(self, sender: int, request: ElasticRequest, incoming: Incoming) -> UploadedModelSink | None:
        """Return the sink of a model that a worker uploads; None: the model arrives uncompressed.

        Raises:
            ProtocolError: its sizes do not fit this run's model.
        """
        if self.elastic is None or not request.sizes:
            return None
        return self.elastic.upload_sink(sender, request, incoming)
