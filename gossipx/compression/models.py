"""Compressed model exchange between two peers.

A sender encodes its model as the difference to a *reference* that both ends keep: the model that the receiver last got
from this sender, initially the common initial model. The receiver identifies its reference by checksums. If the sender
no longer has that reference, it sends the model in full. Each end keeps references for a limited number of peers, those
of the most recent exchanges. Without references each model is encoded by itself.

A decoded model lags behind the true one and would pull back the model that it is mixed with. CHOCO-SGD therefore mixes
the difference of two lagging models. In a pair both of them are known, as each peer has sent its own: what one gains
the other loses. For pulls, a receiver also keeps a *public* copy of its own model per sender: what the codec would have
made of it.

The trained values of each section are encoded, tensor by tensor. Buffers, such as BatchNorm's statistics, are sent
unencoded. If the model is exchanged in fragments, each has a codec with references of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from gossipx.codecs import Codec, decode_into
from gossipx.codecs.changes import ALONE, FULL, checksum
from gossipx.compression.receive import ModelSink
from gossipx.compression.sections import Sections, as_bytes
from gossipx.errors import ProtocolError
from gossipx.memory import Source
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import WHOLE, ModelReply, PullRequest, Request, TakeRequest


@dataclass
class _Reference:
    """The references for one sender: the trained values of each section.

    Attributes:
        taken: x̂_j, the last model from this sender, as decoded.
        public: x̂_i, the public copy of the own model; only for CHOCO mixing.
    """

    taken: list[Tensor]
    public: list[Tensor]


class ModelCodec:
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

    Attributes:
        fragment: that fragment.
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
        self._references = references
        self._lock = threading.Lock()
        self.fragment = arena.fragment(fragment)
        self._sections = Sections(codec, self.fragment, arena.slots, norms)
        self._seed = seed
        self._public = public
        self.begin(None)

    def begin(self, model: Sequence[Tensor] | None) -> None:
        """Set the initial model, which all peers share as their first reference, and forget all others.

        Args:
            model: the values of each section, in host memory; None: this peer joined later and does not have it.
        """
        with self._lock:
            self._changes = self._sections.changes(self._seed, self._references)
            self._states = self._sections.states(self._seed)
            self._begun: list[Tensor] | None = None  # the initial model
            self._taken: dict[int, _Reference] = {}  # by sender, least recently used first
            self._met: set[int] = set()  # senders of an earlier model, whose reference is no longer the initial one
            self._apart: set[int] = set()  # senders whose last model was too far from this peer's to be decoded
            if model is not None and self._references:
                self._begun = [values.clone() for values in self._sections.trained(model)]
                for changes, values in zip(self._changes, self._begun, strict=True):
                    changes.set_initial(values)

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
            for number, values in enumerate(self._sections.trained(model)):
                base = bases[number] if number < len(bases) else FULL if self._references else ALONE
                part, base = self._part(number, receiver, base, values)
                used.append(base)
                parts.append(part)
        completed = msgspec.structs.replace(reply, bases=tuple(used), sizes=tuple(map(len, parts)))
        return completed, Source(self._sections.joined(parts, model))

    def _part(self, number: int, receiver: int, base: int, values: Tensor) -> tuple[memoryview, int]:
        if base == ALONE:
            frame, self._states[number] = self._sections.codec.encode(values, self._states[number])
            return frame, ALONE
        if not self._references:
            return as_bytes(values), FULL
        change = self._changes[number].frame(receiver, base, checksum(values), values)
        return (as_bytes(values), FULL) if change is None else (change.source.view, base)

    def sent(self, receiver: int) -> list[Tensor] | None:
        """Return x̂_i, this peer's model as ``receiver`` has decoded it last, by section; None: it was sent none."""
        with self._lock:
            values = [changes.sent(receiver) for changes in self._changes]
        return [each for each in values if each is not None] or None

    # --- receiving --------------------------------------------------------------------------------

    def bases(self, sender: int) -> tuple[int, ...]:
        """Return the checksums of the references for ``sender``; empty: its model is encoded by itself."""
        with self._lock:
            if not self._references and sender not in self._apart:
                return ()
            reference = self._reference(sender)
            return (FULL,) * len(self._sections.tensors) if reference is None else tuple(map(checksum, reference.taken))

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
        return ModelSink(self._sections, incoming, functools.partial(self._decoded, sender))

    def _decoded(self, sender: int, reply: ModelReply, content: memoryview, incoming: Incoming) -> list[memoryview]:
        """Decode a model from ``sender`` to the memory layout of a model, in pieces."""
        parts, buffers = self._sections.cut(reply.sizes, content)
        with self._lock:
            reference = self._reference(sender)
            before: Sequence[Tensor | None] = [None] * len(parts) if reference is None else reference.taken
            current = [self._current(number, incoming) for number in range(len(parts))]
            rows = enumerate(zip(parts, reply.bases, before, current, strict=True))
            self._apart.add(sender)  # stays if decoding raises
            taken = [self._sections.decoded(number, *row) for number, row in rows]
            self._apart.discard(sender)
            decoded = taken
            if self._references:
                own = [values for values in current if values is not None] if self._public else []
                public = self._published(reply.bases, reference, own) if self._public else []
                self._keep(sender, _Reference(taken, public))
                if self._public:  # as if x_j were x_i + x̂_j − x̂_i
                    changed = zip(own, taken, public, strict=True)
                    decoded = [values + (theirs - ours) for values, theirs, ours in changed]
        return self._sections.laid_out(decoded, buffers)

    def _current(self, number: int, incoming: Incoming) -> Tensor | None:
        """Return the peer's own trained values of a section, if they are available."""
        own = incoming.compared_with(number)
        return None if own is None else own[: self._sections.tensors[number].length]

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
            frame, self._states[number] = self._sections.codec.encode(values - moved, self._states[number])
            decode_into(frame, moved, add=True, tensors=self._sections.tensors[number])
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
