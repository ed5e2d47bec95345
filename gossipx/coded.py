"""Models as codecs have them, from a peer that gives its own to one that takes it.

A model that is pulled is no change of state, so that what travels is its difference to a *reference* that both ends
hold: what this taker took last from this giver, at first the model that all began with. The taker names it by
checksums; a giver that has no such reference gives the model as it is. Each end keeps so many references: those of who
exchanged last. Without references each model is encoded by itself.

What lags behind its model pulls others back when it is mixed. CHOCO-SGD mixes it with what lags as far, so that who
takes keeps for each giver what the codec would make of its own model: its *public* copy.

Of each section the trained values are encoded, tensor by tensor; buffers, such as BatchNorm's statistics, are given as
they are.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gossipx.arena import ParameterArena
from gossipx.buffers import typed
from gossipx.codecs import Codec, State, Tensors, decode_into
from gossipx.codecs.changes import FULL, Changes, checksum
from gossipx.errors import ProtocolError
from gossipx.incoming import Incoming
from gossipx.layout import Section, Slot
from gossipx.memory import Source
from gossipx.messages import CarryingReply, ModelReply
from gossipx.wire import Bytes, Sink

T = TypeVar("T")


class ModelCodec:
    """One peer's models, both ways.

    Args:
        codec: of the differences, or of models.
        arena: whose models they are.
        references: kept of who takes, and of who gives; 0: none.
        norms: names of the parameters of normalisation layers.
        seed: of what is drawn.
        public: what comes is compared with the public copy of one's own model: x̂_j − x̂_i comes in as if it were
            x_j − x_i (CHOCO-SGD, Algorithm 2).
    """

    def __init__(
        self,
        codec: Codec,
        arena: ParameterArena,
        references: int,
        norms: Collection[str] = (),
        seed: int = 0,
        public: bool = False,
    ):
        self._codec = codec
        self._arena = arena
        self._references = references
        self._lock = threading.Lock()
        self._tensors = [_tensors(section, arena.slots, norms) for section in arena.sections]
        self._changes = [
            Changes(codec, tensors, seed + number, most=references) for number, tensors in enumerate(self._tensors)
        ]
        self._states: list[State] = [codec.init(tensors, seed + number) for number, tensors in enumerate(self._tensors)]
        self._most = [codec.most(state) + 1024 for state in self._states]
        self._begun: list[Tensor] | None = None  # what all began with
        self._taken: dict[int, list[Tensor]] = {}  # references, by who gave; the one that was last of use last
        self._public = [
            Changes(codec, tensors, seed + number, most=references) for number, tensors in enumerate(self._tensors)
        ] * public
        self._own: dict[int, list[int]] = {}  # checksums of public copies, by for whom

    def begin(self, model: Sequence[Tensor]) -> None:
        """This is the model that all peers begin with.

        Args:
            model: for each section its values, in host memory.
        """
        if not self._references:
            return
        with self._lock:
            rows = zip(model, self._tensors, strict=True)
            self._begun = [vector[: tensors.length].clone() for vector, tensors in rows]
            for sections in filter(None, (self._changes, self._public)):
                for changes, vector in zip(sections, self._begun, strict=True):
                    changes.common(vector)

    # --- giving -----------------------------------------------------------------------------------

    def give(
        self, taker: int, bases: Sequence[int], model: Sequence[Tensor], reply: ModelReply
    ) -> tuple[ModelReply, Source]:
        """A model as it travels to ``taker``, who has ``bases``; and the reply that goes with it.

        Args:
            model: for each section its values, in host memory.
        """
        told, sizes = [], []
        parts: list[memoryview] = []
        with self._lock:
            for number, (vector, tensors) in enumerate(zip(model, self._tensors, strict=True)):
                base = bases[number] if number < len(bases) else FULL
                part, base = self._part(number, taker, base, vector[: tensors.length])
                told.append(base)
                sizes.append(len(part))
                parts += [part, _bytes(vector[self._arena.sections[number].trainable :])]
        content = memoryview(bytearray().join(parts))
        made = ModelReply(reply.step, reply.weight, tuple(told), tuple(sizes))
        return made, Source(content)

    def _part(self, number: int, taker: int, base: int, values: Tensor) -> tuple[memoryview, int]:
        if not self._references:
            frame, self._states[number] = self._codec.encode(values, self._states[number])
            return frame, FULL
        change = self._changes[number].frame(taker, base, checksum(values), values)
        return (_bytes(values), FULL) if change is None else (change.source.view, base)

    # --- taking -----------------------------------------------------------------------------------

    def bases(self, giver: int) -> tuple[int, ...]:
        """Checksums of what is here of the last model that ``giver`` gave."""
        with self._lock:
            held = self._held(giver)
            return tuple(map(checksum, held)) if held is not None else (FULL,) * len(self._tensors)

    def _held(self, giver: int) -> list[Tensor] | None:
        return self._taken.get(giver, self._begun)

    def taking(self, giver: int, incoming: Incoming) -> Taking:
        """Takes in what ``giver`` answers by."""
        return Taking(self, giver, incoming)

    def sizes_fit(self, reply: ModelReply) -> bool:
        """Whether a reply's sizes and bases are those of a model here."""
        if not len(reply.sizes) == len(reply.bases) == len(self._tensors):
            return False
        plain = [tensors.length * tensors.dtype.itemsize for tensors in self._tensors]
        return all(
            size <= most if base or not self._references else size == own
            for size, base, most, own in zip(reply.sizes, reply.bases, self._most, plain, strict=True)
        )

    def buffers(self) -> list[int]:
        """Bytes of each section's buffers."""
        return [(one.mixed - one.trainable) * one.values.itemsize for one in self._arena.sections]

    def taken(self, giver: int, reply: ModelReply, content: memoryview, incoming: Incoming) -> list[memoryview]:
        """A model of ``giver`` as it lies in memory, section by section, of what has come.

        Args:
            incoming: that it is for.

        Raises:
            ProtocolError: it is malformed, or changes what is not here.
        """
        parts, buffers = self._cut(reply, content)
        with self._lock:
            held: Sequence[Tensor | None] = self._held(giver) or [None] * len(parts)
            made = [self._decoded(*row) for row in zip(self._tensors, parts, reply.bases, held, strict=True)]
            if self._references:
                self._keep(self._taken, giver, made)
            if self._public:
                made = self._from_public(giver, reply.bases, made, incoming)
        views = []
        for section, vector, others in zip(self._arena.sections, made, buffers, strict=True):
            values = torch.zeros(section.trainable, dtype=vector.dtype)
            values[: len(vector)] = vector
            views += [_bytes(values), others]
        return views

    def _cut(self, reply: ModelReply, content: memoryview) -> tuple[list[memoryview], list[memoryview]]:
        """What has come of the sections' trained values, and of their buffers."""
        parts, others = [], []
        start = 0
        for size, buffers in zip(reply.sizes, self.buffers(), strict=True):
            parts.append(content[start : start + size])
            others.append(content[start + size : start + size + buffers])
            start += size + buffers
        return parts, others

    def _decoded(self, tensors: Tensors, part: memoryview, base: int, held: Tensor | None) -> Tensor:
        """A section's trained values."""
        if base:
            if held is None or checksum(held) != base:
                raise ProtocolError("it answered by a change of another model than the one that is here")
            values = held.clone()
            decode_into(part, values, add=True, tensors=tensors)
        elif self._references:
            values = typed(memoryview(bytearray(part)), tensors.dtype)
        else:
            values = torch.zeros(tensors.length, dtype=tensors.dtype)
            decode_into(part, values, tensors=tensors)
        return values

    def _from_public(self, giver: int, bases: Sequence[int], made: list[Tensor], incoming: Incoming) -> list[Tensor]:
        """x_i + (x̂_j − x̂_i) of each section, x_i being what the model that comes is compared with."""
        held = self._own.get(giver) or [changes.begun for changes in self._public]
        own, moved = [], []
        for number, (changes, theirs) in enumerate(zip(self._public, made, strict=True)):
            vector = incoming.compared_with(number)
            assert vector is not None  # those who pull compare
            values = vector[: len(theirs)]
            # A model that came as it is does not lag: then one's own does not, either.
            base = held[number] if bases[number] else FULL
            version = checksum(values)
            change = changes.frame(giver, base, version, values)
            own.append(version if change is None else change.check)
            moved.append(values + (theirs - changes.values(own[number])))
        self._keep(self._own, giver, own)
        return moved

    def _keep(self, kept: dict[int, list[T]], giver: int, what: list[T]) -> None:
        """As the last of as many as references are kept."""
        kept.pop(giver, None)
        kept[giver] = what
        while len(kept) > self._references:
            del kept[next(iter(kept))]


class Taking:
    """Takes in one model; a :class:`gossipx.wire.Fitting`.

    Args:
        codec: that it is decoded by.
        giver: whose it is.
        incoming: takes it in as it lies in memory, once it is whole.
    """

    nbytes = 1  # of which nothing is known yet, but that bytes come

    def __init__(self, codec: ModelCodec, giver: int, incoming: Incoming):
        self._codec = codec
        self._giver = giver
        self._incoming = incoming
        self._reply = ModelReply(0)
        self._content = memoryview(b"")

    def fit(self, reply: CarryingReply) -> Sink:
        """What takes in what ``reply`` brings; ProtocolError if it is no model of ours."""
        if not isinstance(reply, ModelReply) or not self._codec.sizes_fit(reply):
            raise ProtocolError("it answered by a model that does not fit")
        self._reply = reply
        self._content = memoryview(bytearray(sum(reply.sizes) + sum(self._codec.buffers())))
        return Bytes(self._content)

    def decode(self) -> None:
        """It is whole: hand the model on. ProtocolError if it is malformed."""
        start = 0
        for view in self._codec.taken(self._giver, self._reply, self._content, self._incoming):
            self._incoming.take(start, view)
            start += len(view)
        self._content = memoryview(b"")


def _tensors(section: Section, slots: Sequence[Slot], norms: Collection[str]) -> Tensors:
    """The trained tensors of a section, where they lie in it; tied ones once."""
    found: dict[int, Slot] = {}
    for slot in slots:
        if slot.kind == 0 and slot.tensor.dtype == section.storage.dtype and slot.tensor.numel():
            found.setdefault(int(slot.tensor.storage_offset()), slot)
    starts = tuple(sorted(found))
    shapes = tuple(
        tuple(found[start].tensor.shape) if found[start].tensor.is_contiguous() else (found[start].tensor.numel(),)
        for start in starts
    )
    plain = tuple(found[start].name in norms for start in starts)
    return Tensors(shapes, section.values.dtype, starts, plain)


def _bytes(vector: Tensor) -> memoryview:
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]] = vector.contiguous().view(torch.uint8).numpy()
    return memoryview(flat.data) if len(flat) else memoryview(b"")
