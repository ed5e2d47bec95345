"""Elastic averaging by a codec: the model that a worker brings, and the elastic difference that both move by.

What a worker brings is the change since what the hub has of it, x̂; the hub answers by what the codec makes of
d = x̂ − x̃, and both move by that: x ← x − α d̂ and x̃ ← x̃ + β/p · d̂ (Adaptive Communication, Algorithm 1, lines 5 and 6).
So with β = p·α their sum stays as it was, whatever the codec leaves out; that is still there in the next difference.

A hub keeps one model for each worker. A worker that does not know whether the last that it brought has come brings the
next as it is.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Sequence

from torch import Tensor

from gossipx.codecs import Codec, State, decode_into
from gossipx.codecs.changes import ALONE, FULL, checksum
from gossipx.compression.receive import ModelSink
from gossipx.compression.sections import Sections, as_bytes
from gossipx.errors import ProtocolError
from gossipx.memory import Source
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import ElasticRequest, ModelReply
from gossipx.wire import Bytes

HUB = 0
"""A worker's changes are for one taker."""


class ElasticCodec:
    """A worker's side, and the hub's.

    Args:
        codec: of models and of elastic differences.
        arena: whose models they are.
        is_hub: whether others bring theirs here. It brings its own as it is.
        references: whether the hub keeps what workers brought; else they bring models.
        norms: names of the parameters of normalisation layers.
        seed: of what is drawn.
    """

    def __init__(
        self,
        codec: Codec,
        arena: ParameterArena,
        is_hub: bool,
        references: bool = True,
        norms: Collection[str] = (),
        seed: int = 0,
    ):
        self.is_hub = is_hub
        self._references = references
        self._seed = seed
        self._lock = threading.Lock()
        self._sections = Sections(codec, arena, norms)
        self._changes = self._sections.changes(seed)
        self._known = [FULL] * len(self._changes)  # what the hub has for sure
        self._sent = list(self._known)  # what it has if the last that was brought has come
        self._states: dict[int, list[State]] = {}  # of differences, by worker
        self._alone = self._sections.states(seed)
        self._begun: list[Tensor] | None = None
        self._brought: dict[int, list[Tensor]] = {}  # by worker

    def begin(self, model: Sequence[Tensor] | None) -> None:
        """This is the model that all peers begin with.

        Args:
            model: for each section its values, in host memory; None: this peer is not one of those that begin.
        """
        with self._lock:
            self._begun = None if model is None else [values.clone() for values in self._sections.trained(model)]
            for number, changes in enumerate(self._changes):
                changes.common(None if self._begun is None else self._begun[number])
            self._known = [changes.begun for changes in self._changes]

    # --- a worker ---------------------------------------------------------------------------------

    def bring(self, request: ElasticRequest, model: Sequence[Tensor]) -> tuple[ElasticRequest, Source]:
        """A model as it travels to the hub, and the request that brings it.

        Args:
            model: for each section its values, in host memory.
        """
        bases, parts = [], []
        with self._lock:
            known, self._known = self._known, [FULL] * len(self._known)
            for number, values in enumerate(self._sections.trained(model)):
                base, part, self._sent[number] = self._part(number, known[number], values)
                bases.append(base)
                parts.append(part)
        told = dataclasses.replace(request, bases=tuple(bases), sizes=tuple(map(len, parts)))
        return told, Source(self._sections.joined(parts, model))

    def _part(self, number: int, base: int, values: Tensor) -> tuple[int, memoryview, int]:
        """Its base, what travels, and the checksum of what it leads to."""
        if not self._references:
            frame, self._alone[number] = self._sections.codec.encode(values, self._alone[number])
            return ALONE, frame, FULL
        version = checksum(values)
        finite = bool(values.isfinite().all())  # what is not would never be again
        change = self._changes[number].frame(HUB, base, version, values) if finite else None
        if change is None:
            return FULL, as_bytes(values), version if finite else FULL
        return base, change.source.view, change.check

    def model_sink(self, incoming: Incoming) -> ModelSink:
        """Takes in what the hub answers by."""
        return ModelSink(self._sections, incoming, self._moved)

    def _moved(self, reply: ModelReply, content: memoryview, incoming: Incoming) -> list[memoryview]:
        """x − d̂, as if it were the centre."""
        parts, buffers = self._sections.cut(reply.sizes, content)
        made = []
        for number, (part, tensors) in enumerate(zip(parts, self._sections.tensors, strict=True)):
            own = incoming.compared_with(number)
            assert own is not None  # a worker compares
            made.append(own[: tensors.length] - self._sections.decoded(number, part, ALONE))
        with self._lock:
            self._known = list(self._sent)
        return self._sections.as_they_lie(made, buffers)

    # --- the hub ----------------------------------------------------------------------------------

    def room(self, sender: int, request: ElasticRequest, incoming: Incoming) -> UploadedModelSink:
        """Where what a worker brings is taken in.

        Raises:
            ProtocolError: it is no model of ours.
        """
        if not self._sections.fit(request.sizes, request.bases):
            raise ProtocolError(f"peer {sender} brings a model that does not fit")
        return UploadedModelSink(self, sender, request, incoming, self._sections.nbytes(request.sizes))

    def brought(self, sender: int, request: ElasticRequest, content: memoryview) -> list[memoryview]:
        """What a worker has brought as it lies in memory, piece by piece.

        Raises:
            ProtocolError: it is malformed, or changes what is not here.
        """
        parts, buffers = self._sections.cut(request.sizes, content)
        with self._lock:
            held: Sequence[Tensor | None] = self._brought.get(sender) or self._begun or [None] * len(parts)
            rows = enumerate(zip(parts, request.bases, held, strict=True))
            made = [self._sections.decoded(number, *row) for number, row in rows]
            if self._references:
                self._brought[sender] = made
        return self._sections.as_they_lie(made, buffers)

    def differ(
        self, worker: int, brought: Sequence[Tensor], centre: Sequence[Tensor], reply: ModelReply
    ) -> tuple[ModelReply, Source]:
        """The elastic difference as it travels, and the reply that goes with it.

        Args:
            brought: x̂; x̃ + d̂ afterwards.
            centre: x̃, both for each section, in host memory.
        """
        parts = []
        with self._lock:
            states = self._states.get(worker) or self._sections.states(self._seed + 1000 * (worker + 1))
            rows = zip(self._sections.trained(brought), self._sections.trained(centre), strict=True)
            for number, (theirs, ours) in enumerate(rows):
                frame, states[number] = self._sections.codec.encode(theirs - ours, states[number])
                theirs.zero_()
                decode_into(frame, theirs, tensors=self._sections.tensors[number])
                theirs += ours
                parts.append(frame)
            self._states[worker] = states
        told = dataclasses.replace(reply, bases=(ALONE,) * len(parts), sizes=tuple(map(len, parts)))
        return told, Source(self._sections.joined(parts, centre))


class UploadedModelSink(Bytes):
    """Takes in what a worker brings; a :class:`gossipx.wire.UploadSink`.

    Args:
        codec: that it is decoded by.
        sender: the worker.
        request: that it comes with.
        incoming: takes the model in as it lies in memory, once it is whole.
        nbytes: that come.
    """

    def __init__(self, codec: ElasticCodec, sender: int, request: ElasticRequest, incoming: Incoming, nbytes: int):
        super().__init__(memoryview(bytearray(nbytes)))
        self.incoming = incoming
        self._codec = codec
        self._sender = sender
        self._request = request

    def decode(self) -> None:
        """It is whole: hand the model on. ProtocolError if it is malformed."""
        start = 0
        for view in self._codec.brought(self._sender, self._request, self.view):
            self.incoming.take(start, view)
            start += len(view)

    def answered(self, centre: Sequence[Tensor], reply: ModelReply) -> tuple[ModelReply, Source]:
        """What is answered; see :meth:`ElasticCodec.differ`."""
        return self._codec.differ(self._sender, self.incoming.buffer.vectors, centre, reply)

    def release(self) -> None:
        """Give the room back."""
        self.incoming.release()
