"""Compressed elastic averaging: a worker uploads its model to the hub, and both move by an encoded difference.

A worker uploads the change since x̂, the hub's copy of its model. The hub encodes the difference d = x̂ − x̃ to its
centre x̃ and returns it. Both move by the decoded difference d̂: x ← x − α d̂ and x̃ ← x̃ + β/p · d̂ (Adaptive
Communication, Algorithm 1, lines 5 and 6). So with β = p·α the sum of both stays unchanged for any codec, and the next
difference contains the encoding error.

The hub keeps one copy per worker. A worker that does not know whether its last upload arrived sends the next one in
full.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import msgspec
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
"""Key of the hub in the worker's :class:`~gossipx.codecs.changes.Changes`, its only receiver."""


class ElasticCodec:
    """Encoder and decoder of elastic averaging, for the worker's side and the hub's.

    Args:
        codec: encodes models and elastic differences.
        arena: the peer's parameters.
        is_hub: whether this peer is the hub.
        references: whether the hub keeps a copy of each worker's model; otherwise workers upload whole encoded models.
        norms: names of the parameters of normalisation layers.
        seed: seeds the codec's random draws.
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
        self._sections = Sections(codec, arena.exchanged, arena.slots, norms)
        self.begin(None)

    def begin(self, model: Sequence[Tensor] | None) -> None:
        """Set the initial model, which all peers share as their first reference, and forget all others.

        Args:
            model: the values of each section, in host memory; None: this peer joined later and does not have it.
        """
        with self._lock:
            self._changes = self._sections.changes(self._seed)
            self._states: dict[int, list[State]] = {}  # codec states of differences, by worker
            self._alone = self._sections.states(self._seed)
            self._copies: dict[int, list[Tensor]] = {}  # the hub's copy of each worker's model
            self._begun: list[Tensor] | None = None  # the initial model
            if model is not None:
                self._begun = [values.clone() for values in self._sections.trained(model)]
                for changes, values in zip(self._changes, self._begun, strict=True):
                    changes.set_initial(values)
            self._known = [changes.initial for changes in self._changes]  # checksums of what the hub certainly has
            self._sent = list(self._known)  # checksums of what it has if the last upload arrived

    # --- a worker ---------------------------------------------------------------------------------

    def bring(self, request: ElasticRequest, model: Sequence[Tensor]) -> tuple[ElasticRequest, Source]:
        """Encode a model for the upload to the hub; return the completed request and the payload.

        Args:
            model: the values of each section, in host memory.
        """
        bases, parts = [], []
        with self._lock:
            known, self._known = self._known, [FULL] * len(self._known)
            for number, values in enumerate(self._sections.trained(model)):
                base, part, self._sent[number] = self._part(number, known[number], values)
                bases.append(base)
                parts.append(part)
        completed = msgspec.structs.replace(request, bases=tuple(bases), sizes=tuple(map(len, parts)))
        return completed, Source(self._sections.joined(parts, model))

    def _part(self, number: int, base: int, values: Tensor) -> tuple[int, memoryview, int]:
        """Encode a section; return its base, the encoded part, and the checksum of the hub's copy after decoding."""
        if not self._references:
            frame, self._alone[number] = self._sections.codec.encode(values, self._alone[number])
            return ALONE, frame, FULL
        version = checksum(values)
        finite = bool(values.isfinite().all())  # a change from a non-finite base never becomes finite again
        change = self._changes[number].frame(HUB, base, version, values) if finite else None
        if change is None:
            return FULL, as_bytes(values), version if finite else FULL
        return base, change.source.view, change.check

    def model_sink(self, incoming: Incoming) -> ModelSink:
        """Return the sink of the hub's reply."""
        return ModelSink(self._sections, incoming, self._moved)

    def _moved(self, reply: ModelReply, content: memoryview, incoming: Incoming) -> list[memoryview]:
        """Return x − d̂ in the memory layout of a model, as if it were the centre."""
        parts, buffers = self._sections.cut(reply.sizes, content)
        moved = []
        for number, (part, tensors) in enumerate(zip(parts, self._sections.tensors, strict=True)):
            own = incoming.compared_with(number)
            assert own is not None  # always available to a worker
            moved.append(own[: tensors.length] - self._sections.decoded(number, part, ALONE))
        with self._lock:
            self._known = list(self._sent)
        return self._sections.laid_out(moved, buffers)

    # --- the hub ----------------------------------------------------------------------------------

    def upload_sink(self, sender: int, request: ElasticRequest, incoming: Incoming) -> UploadedModelSink:
        """Return the sink of a worker's upload.

        Raises:
            ProtocolError: its sizes do not fit this run's model.
        """
        if not self._sections.fit(request.sizes, request.bases):
            raise ProtocolError(f"peer {sender} uploads a model that does not fit this run's layout")
        return UploadedModelSink(self, sender, request, incoming, self._sections.nbytes(request.sizes))

    def uploaded(self, sender: int, request: ElasticRequest, content: memoryview) -> list[memoryview]:
        """Decode a worker's upload to the memory layout of a model, in pieces.

        Raises:
            ProtocolError: the upload is malformed, or a change from another base than the hub's copy.
        """
        parts, buffers = self._sections.cut(request.sizes, content)
        with self._lock:
            copies: Sequence[Tensor | None] = self._copies.get(sender) or self._begun or [None] * len(parts)
            rows = enumerate(zip(parts, request.bases, copies, strict=True))
            decoded = [self._sections.decoded(number, *row) for number, row in rows]
            if self._references:
                self._copies[sender] = decoded
        return self._sections.laid_out(decoded, buffers)

    def differ(
        self, worker: int, uploaded: Sequence[Tensor], centre: Sequence[Tensor], reply: ModelReply
    ) -> tuple[ModelReply, Source]:
        """Encode the elastic difference; return the completed reply and the payload.

        Args:
            uploaded: x̂ of each section, in host memory; overwritten by x̃ + d̂.
            centre: x̃ of each section, in host memory.
        """
        parts = []
        with self._lock:
            states = self._states.get(worker) or self._sections.states(self._seed + 1000 * (worker + 1))
            rows = zip(self._sections.trained(uploaded), self._sections.trained(centre), strict=True)
            for number, (theirs, ours) in enumerate(rows):
                frame, states[number] = self._sections.codec.encode(theirs - ours, states[number])
                theirs.zero_()
                decode_into(frame, theirs, tensors=self._sections.tensors[number])
                theirs += ours
                parts.append(frame)
            self._states[worker] = states
        completed = msgspec.structs.replace(reply, bases=(ALONE,) * len(parts), sizes=tuple(map(len, parts)))
        return completed, Source(self._sections.joined(parts, centre))


class UploadedModelSink(Bytes):
    """The receive buffer of a worker's encoded upload; a :class:`gossipx.wire.UploadSink`.

    Args:
        codec: decodes the upload.
        sender: rank of the worker.
        request: the request that announces the upload.
        incoming: receives the decoded model.
        nbytes: size of the upload.
    """

    def __init__(self, codec: ElasticCodec, sender: int, request: ElasticRequest, incoming: Incoming, nbytes: int):
        super().__init__(memoryview(bytearray(nbytes)))
        self.incoming = incoming
        self._codec = codec
        self._sender = sender
        self._request = request

    def decode(self) -> None:
        """Decode the complete upload and pass the model on. Raises ProtocolError if it is malformed."""
        start = 0
        for view in self._codec.uploaded(self._sender, self._request, self.view):
            self.incoming.take(start, view)
            start += len(view)

    def answered(self, centre: Sequence[Tensor], reply: ModelReply) -> tuple[ModelReply, Source]:
        """Return the hub's reply and its payload, see :meth:`ElasticCodec.differ`."""
        return self._codec.differ(self._sender, self.incoming.buffer.vectors, centre, reply)

    def release(self) -> None:
        """Release the buffer of the decoded model."""
        self.incoming.release()
