"""Compressed model exchange between two peers, and what it shares with the other exchanges: the sections of a model.

A sender encodes its model as the difference to a *reference* that both ends keep: the model that the receiver last got
from this sender, initially the common initial model. The receiver identifies its reference by checksums. If the sender
no longer has that reference, it sends the model in full. Each end keeps references for a limited number of peers, those
of the most recent exchanges. Without references each model is encoded by itself.

A decoded model lags behind the true one and would pull back the model that it is mixed with. CHOCO-SGD therefore mixes
the difference of two lagging models. In a pair both of them are known, as each peer has sent its own: what one gains
the other loses. For pulls, a receiver also keeps a *public* copy of its own model per sender: what the codec would have
made of it.

A section is a vector of all values of one dtype in the parameter arena. The trained values of each are encoded, tensor
by tensor. Buffers, such as BatchNorm's statistics, are sent unencoded. If the model is exchanged in fragments, each has
a codec with references of its own.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from gossipx.codecs import Codec, Tensors, decode_into
from gossipx.codecs.changes import ALONE, FULL, Changes, checksum
from gossipx.codecs.packing import as_bytes
from gossipx.errors import ProtocolError
from gossipx.memory import Source
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import typed
from gossipx.model.receive import Incoming
from gossipx.model.section import Section, Slot, TensorKind
from gossipx.protocol.messages import WHOLE, ModelReply, PullRequest, Request, TakeRequest
from gossipx.protocol.server_messages import CarryingReply
from gossipx.wire import Bytes, Sink


class SectionCodec(abc.ABC):
    """The sections of a fragment of a peer's model, with the codec that encodes them; base class of all exchanges.

    Args:
        codec: encodes them.
        arena: the peer's parameters.
        norms: names of the parameters of normalisation layers.
        seed: seeds the codec's random draws.
        fragment: number of the fragment of the model.

    Attributes:
        fragment: that fragment.
        codec: the codec, set up for error feedback.
        tensors: layout of the trained tensors in each section; of a tensor that lies in several fragments, the piece
            in this one, as a flat vector.
    """

    def __init__(
        self, codec: Codec, arena: ParameterArena, norms: Collection[str] = (), seed: int = 0, fragment: int = WHOLE
    ):
        self.fragment = arena.fragment(fragment)
        rows = zip(self.fragment.sections, self.fragment.ranges, strict=True)
        self.tensors = [tensors_in(section, own, arena.slots, norms, section.values.dtype) for section, own in rows]
        self.codec = codec.in_feedback()
        self._seed = seed
        self._lock = threading.Lock()
        self._max_bytes = [self.codec.longest(tensors) for tensors in self.tensors]

    @abc.abstractmethod
    def begin(self, model: Sequence[Tensor] | None) -> None:
        """Set the initial model, which all peers share as their first reference, and forget all others.

        Args:
            model: the values of each section, in host memory; None: this peer joined later and does not have it.
        """

    def trained(self, model: Sequence[Tensor]) -> list[Tensor]:
        """Return views of the encoded part of each section's vector."""
        return [vector[: tensors.length] for vector, tensors in zip(model, self.tensors, strict=True)]

    def nbytes(self, sizes: Sequence[int]) -> int:
        """Return the size of a payload, buffers included."""
        return sum(sizes) + sum(self._buffers())

    def fits(self, sizes: Sequence[int], bases: Sequence[int]) -> bool:
        """Return whether the sections' encoded sizes are possible for their bases."""
        if not len(sizes) == len(bases) == len(self.tensors):
            return False
        plain = [tensors.length * tensors.dtype.itemsize for tensors in self.tensors]
        rows = zip(sizes, bases, self._max_bytes, plain, strict=True)
        return all(size == full if base == FULL else size <= bound for size, base, bound, full in rows)

    def joined(self, parts: Sequence[memoryview], model: Sequence[Tensor]) -> memoryview:
        """Return the payload: the encoded values of each section, followed by its buffers."""
        rows = zip(parts, model, self.fragment.sections, strict=True)
        pieces = [
            piece for part, vector, section in rows for piece in (part, vector_bytes(vector[section.trainable :]))
        ]
        return memoryview(bytearray().join(pieces))

    def cut(self, sizes: Sequence[int], content: memoryview) -> tuple[list[memoryview], list[memoryview]]:
        """Split a payload into the encoded values and the buffers of each section."""
        parts, others = [], []
        start = 0
        for size, buffers in zip(sizes, self._buffers(), strict=True):
            parts.append(content[start : start + size])
            others.append(content[start + size : start + size + buffers])
            start += size + buffers
        return parts, others

    def laid_out(self, values: Sequence[Tensor], buffers: Sequence[memoryview]) -> list[memoryview]:
        """Return a model in its memory layout, in pieces."""
        views = []
        for section, vector, others in zip(self.fragment.sections, values, buffers, strict=True):
            trained = torch.zeros(section.trainable, dtype=vector.dtype)
            trained[: len(vector)] = vector
            views += [vector_bytes(trained), others]
        return views

    def decoded_section(self, number: int, part: memoryview, base: int, base_values: Tensor | None = None) -> Tensor:
        """Decode the trained values of a section.

        Args:
            number: index of the section.
            part: the encoded values.
            base: checksum of the base that ``part`` changes, :data:`FULL` or :data:`ALONE`.
            base_values: this side's base; None: not available.

        Raises:
            ProtocolError: it is malformed, or changes another base.
        """
        tensors = self.tensors[number]
        if base == FULL:
            return typed(memoryview(bytearray(part)), tensors.dtype)
        if base == ALONE:
            values = torch.zeros(tensors.length, dtype=tensors.dtype)
            decode_into(part, values, tensors=tensors)
            return values
        if base_values is None or checksum(base_values) != base:
            raise ProtocolError("a model arrived as a change from another base than this peer's")
        values = base_values.clone()
        decode_into(part, values, add=True, tensors=tensors)
        return values

    def _buffers(self) -> list[int]:
        """Return the size of each section's buffers in bytes."""
        return [(one.mixed - one.trainable) * one.values.itemsize for one in self.fragment.sections]


def vector_bytes(vector: Tensor) -> memoryview:
    """Return a vector's bytes as a view."""
    return as_bytes(vector).data


def tensors_in(
    section: Section, own: slice, slots: Sequence[Slot], norms: Collection[str], dtype: torch.dtype
) -> Tensors:
    """Return the layout of the trained tensors in a range of a section; tied ones are listed once.

    Args:
        own: the range of the model's section.
        dtype: of the values.
    """
    found: dict[int, tuple[tuple[int, ...], bool]] = {}  # by start: shape, and whether it is sent unencoded
    for slot in slots:
        if slot.kind is not TensorKind.TRAINABLE or slot.tensor.dtype != section.storage.dtype:
            continue
        count = slot.tensor.numel()
        begin, end = max(slot.start, own.start), min(slot.start + count, own.stop)
        if begin < end:
            is_cut = end - begin < count
            flat = is_cut or not slot.tensor.is_contiguous()
            shape = (end - begin,) if flat else tuple(slot.tensor.shape)
            found.setdefault(begin - own.start, (shape, slot.name in norms))
    starts = tuple(sorted(found))
    shapes = tuple(found[start][0] for start in starts)
    return Tensors(shapes, dtype, starts, tuple(found[start][1] for start in starts))


class ModelSink:
    """The receive buffer of the encoded model in one reply; a :class:`gossipx.wire.SinkFactory`.

    Args:
        codec: that of the exchange, with the layout of the model.
        incoming: receives the decoded model.
        decoded: decodes the payload to pieces in the memory layout of a model; may raise ProtocolError.
    """

    nbytes = 1  # not 0: there is a payload, but its size is only known with the reply

    def __init__(
        self,
        codec: SectionCodec,
        incoming: Incoming,
        decoded: Callable[[ModelReply, memoryview, Incoming], list[memoryview]],
    ):
        self._codec = codec
        self._incoming = incoming
        self._decoded = decoded
        self._reply = ModelReply(0)
        self._content = memoryview(b"")

    def fit(self, reply: CarryingReply) -> Sink:
        """Return the sink of the reply's payload. Raises ProtocolError if it does not fit this run's model."""
        if not isinstance(reply, ModelReply) or not self._codec.fits(reply.sizes, reply.bases):
            raise ProtocolError("it replied with a model that does not fit this run's layout")
        self._reply = reply
        self._content = memoryview(bytearray(self._codec.nbytes(reply.sizes)))
        return Bytes(self._content)

    def decode(self) -> None:
        """Decode the complete payload and pass the model on. Raises ProtocolError if it is malformed."""
        start = 0
        for view in self._decoded(self._reply, self._content, self._incoming):
            self._incoming.take(start, view)
            start += len(view)
        self._content = memoryview(b"")


@dataclass
class _Reference:
    """The references for one sender: the trained values of each section.

    Attributes:
        taken: x̂_j, the last model from this sender, as decoded.
        public: x̂_i, the public copy of the own model; only for CHOCO mixing.
    """

    taken: list[Tensor]
    public: list[Tensor]


class ModelCodec(SectionCodec):
    """Encoder and decoder of one peer's exchanges.

    Args:
        codec: encodes differences or, without references, models.
        arena: the peer's parameters.
        references: number of receivers, and of senders, to keep references for; 0: no references.
        norms: names of the parameters of normalisation layers.
        seed: seeds the codec's random draws.
        public: whether to mix pulled models as x̂_j − x̂_i, with the public copy x̂_i, in place of x_j − x_i (CHOCO-SGD,
            Algorithm 2).
        fragment: number of the fragment of the model that it encodes.
    """

    def __init__(
        self,
        codec: Codec,
        arena: ParameterArena,
        references: int,
        norms: Collection[str] = (),
        seed: int = 0,
        public: bool = False,
        fragment: int = WHOLE,
    ):
        super().__init__(codec, arena, norms, seed, fragment)
        self._references = references
        self._public = public
        self.begin(None)

    def begin(self, model: Sequence[Tensor] | None) -> None:
        with self._lock:
            self._begun: list[Tensor] | None = None  # the initial model
            if model is not None and self._references:
                self._begun = [values.clone() for values in self.trained(model)]
            numbered = list(enumerate(self.tensors, self._seed))
            self._changes = [Changes(self.codec, tensors, seed, self._references) for seed, tensors in numbered]
            for changes, values in zip(self._changes, self._begun or (), strict=self._begun is not None):
                changes.set_initial(values)
            self._states = [self.codec.init(tensors, seed) for seed, tensors in numbered]
            self._taken: dict[int, _Reference] = {}  # by sender, least recently used first
            self._met: set[int] = set()  # senders of an earlier model, whose reference is no longer the initial one

    # --- sending ----------------------------------------------------------------------------------

    def give(
        self, receiver: int, bases: Sequence[int], model: Sequence[Tensor], reply: ModelReply
    ) -> tuple[ModelReply, Source]:
        """Encode a model for a receiver; return the completed reply and the payload.

        Args:
            receiver: rank of the receiver.
            bases: checksums of the receiver's references, from its request.
            model: the values of each section, in host memory.
        """
        used, parts = [], []
        with self._lock:
            for number, values in enumerate(self.trained(model)):
                base = bases[number] if number < len(bases) else FULL if self._references else ALONE
                part, base = self._part(number, receiver, base, values)
                used.append(base)
                parts.append(part)
        completed = msgspec.structs.replace(reply, bases=tuple(used), sizes=tuple(map(len, parts)))
        return completed, Source(self.joined(parts, model))

    def _part(self, number: int, receiver: int, base: int, values: Tensor) -> tuple[memoryview, int]:
        if base == ALONE:
            frame, self._states[number] = self.codec.encode(values, self._states[number])
            return frame, ALONE
        if not self._references:
            return vector_bytes(values), FULL
        change = self._changes[number].frame(receiver, base, checksum(values), values)
        return (vector_bytes(values), FULL) if change is None else (change.source.view, base)

    def sent(self, receiver: int) -> list[Tensor] | None:
        """Return x̂_i, this peer's model as ``receiver`` has decoded it last, by section; None: it was sent none."""
        with self._lock:
            values = [changes.sent(receiver) for changes in self._changes]
        return [each for each in values if each is not None] or None

    # --- receiving --------------------------------------------------------------------------------

    def bases(self, sender: int) -> tuple[int, ...]:
        """Return the checksums of the references for ``sender``; empty: its model is encoded by itself."""
        with self._lock:
            if not self._references:
                return ()
            reference = self._reference(sender)
            return (FULL,) * len(self.tensors) if reference is None else tuple(map(checksum, reference.taken))

    def prepared(self, sender: int, request: Request) -> Request:
        """Return a request for a model, completed by the checksums of this peer's references."""
        assert isinstance(request, PullRequest | TakeRequest)
        return msgspec.structs.replace(request, bases=self.bases(sender))

    def _reference(self, sender: int) -> _Reference | None:
        if sender in self._met or self._begun is None:
            return self._taken.get(sender)
        return _Reference(self._begun, self._begun)

    def model_sink(self, sender: int, incoming: Incoming) -> ModelSink:
        """Return the sink of a reply from ``sender``."""
        return ModelSink(self, incoming, functools.partial(self._decoded, sender))

    def _decoded(self, sender: int, reply: ModelReply, content: memoryview, incoming: Incoming) -> list[memoryview]:
        """Decode a model from ``sender`` to the memory layout of a model, in pieces."""
        parts, buffers = self.cut(reply.sizes, content)
        with self._lock:
            reference = self._reference(sender)
            before: Sequence[Tensor | None] = [None] * len(parts) if reference is None else reference.taken
            rows = enumerate(zip(parts, reply.bases, before, strict=True))
            decoded = taken = [self.decoded_section(number, *row) for number, row in rows]
            if self._references:
                own = self.trained(incoming.base()) if self._public else []
                public = self._published(reply.bases, reference, own) if self._public else []
                self._keep(sender, _Reference(taken, public))
                if self._public:  # as if x_j were x_i + x̂_j − x̂_i
                    changed = zip(own, taken, public, strict=True)
                    decoded = [values + (theirs - ours) for values, theirs, ours in changed]
        return self.laid_out(decoded, buffers)

    def _published(self, bases: Sequence[int], reference: _Reference | None, own: Sequence[Tensor]) -> list[Tensor]:
        """Return the next public copy x̂_i of each section; ``own`` is the current model x_i."""
        public = []
        for number, (base, values) in enumerate(zip(bases, own, strict=True)):
            if base == FULL:  # a model that was sent in full does not lag, so the public copy must not either
                public.append(values.clone())
                continue
            if reference is None:
                raise ProtocolError("a model arrived encoded by itself, expected a change from a reference")
            moved = reference.public[number].clone()
            frame, self._states[number] = self.codec.encode(values - moved, self._states[number])
            decode_into(frame, moved, add=True, tensors=self.tensors[number])
            public.append(moved)
        return public

    def _keep(self, sender: int, reference: _Reference) -> None:
        """Store a reference and evict the least recently used; a non-finite one could never become finite again."""
        self._met.add(sender)
        self._taken.pop(sender, None)
        if all(bool(values.isfinite().all()) for values in (*reference.taken, *reference.public)):
            self._taken[sender] = reference
        while len(self._taken) > self._references:
            del self._taken[next(iter(self._taken))]
