"""Models as codecs have them: those that peers exchange with each other, and those that a hub takes in."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gossipx.compression.elastic import ElasticCodec, UploadedModelSink
from gossipx.compression.models import ModelCodec
from gossipx.compression.receive import ModelSink
from gossipx.memory import Source
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import ElasticRequest, PullRequest, Request, TakeRequest

__all__ = ["Coded", "ElasticCodec", "ModelCodec", "ModelSink", "UploadedModelSink"]


class Coded:
    """One peer's models on the wire.

    Args:
        models: of those that peers exchange with each other.
        elastic: of the exchanges with a hub.
    """

    def __init__(self, models: ModelCodec, elastic: ElasticCodec | None = None):
        self.models = models
        self.elastic = elastic

    def begin(self, model: Sequence[Tensor] | None) -> None:
        """This is the model that all peers begin with: for each section its values, in host memory.

        None: this peer is not one of those that begin.
        """
        self.models.begin(model)
        if self.elastic is not None:
            self.elastic.begin(model)

    def begin_from(self, arena: ParameterArena) -> None:
        """Begin with the model as it is now; one that has made steps is not the model that all peers begin with."""
        if arena.step:
            self.begin(None)
            return
        snapshot = arena.snapshot()
        self.begin(snapshot.buffer.vectors)
        snapshot.release()

    def model_sink(self, to: int, request: Request, incoming: Incoming) -> ModelSink | None:
        """Takes in the answer to a request; None: it comes as it lies in memory."""
        match request:
            case PullRequest() | TakeRequest():
                return self.models.model_sink(to, incoming)
            case ElasticRequest() if self.elastic is not None and not self.elastic.is_hub:
                return self.elastic.model_sink(incoming)
        return None

    def asked(self, to: int, request: Request, model: Sequence[Tensor]) -> tuple[Request, Source | None]:
        """A request of :meth:`taking` as it leaves, and what it brings.

        Args:
            model: that it brings, if it does: for each section its values, in host memory.
        """
        if isinstance(request, ElasticRequest):
            assert self.elastic is not None
            return self.elastic.bring(request, model)
        return self.models.asked(to, request), None

    def room(self, sender: int, request: ElasticRequest, incoming: Incoming) -> UploadedModelSink | None:
        """Where a model that another brings is taken in; None: it comes as it lies in memory.

        Raises:
            ProtocolError: it is no model of ours.
        """
        if self.elastic is None or not request.sizes:
            return None
        return self.elastic.room(sender, request, incoming)
