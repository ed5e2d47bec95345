"""Models as codecs have them, from a peer that gives its own to one that takes it.

A model that is pulled is no change of state, so that what travels is its difference to a *reference* that both ends
hold: what this taker took last from this giver, at first the model that all began with. The taker names it by
checksums; a giver that has no such reference gives the model as it is. Each end keeps so many references: those of who
exchanged last. Without references each model is encoded by itself.

Of each section the trained values are encoded, tensor by tensor; buffers, such as BatchNorm's statistics, are given as
they are.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

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


class ModelCodec:
    """One peer's models, both ways.

    Args:
        codec: of the differences, or of models.
        arena: whose models they are.
        references: kept of who takes, and of who gives; 0: none.
        norms: names of the parameters of normalisation layers.
        seed: of what is drawn.
    """

    def __init__(
        self, codec: Codec, arena: ParameterArena, references: int, norms: Collection[str] = (), seed: int = 0
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
            for changes, vector in zip(self._changes, self._begun, strict=True):
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

    def taken(self, giver: int, reply: ModelReply, content: memoryview) -> list[memoryview]:
        """A model of ``giver`` as it lies in memory, section by section, of what has come.

        Raises:
            ProtocolError: it is malformed, or changes what is not here.
        """
        views: list[memoryview] = []
        kept: list[Tensor] = []
        start = 0
        with self._lock:
            held = self._held(giver)
            rows = zip(self._tensors, self._arena.sections, reply.bases, reply.sizes, self.buffers(), strict=True)
            for number, (tensors, section, base, size, buffers) in enumerate(rows):
                values = torch.zeros(section.trainable, dtype=tensors.dtype)
                part = content[start : start + size]
                start += size
                if base:
                    if held is None or checksum(held[number]) != base:
                        raise ProtocolError("it answered by a change of another model than the one that is here")
                    values[: tensors.length] = held[number]
                    decode_into(part, values, add=True, tensors=tensors)
                elif self._references:
                    values[: tensors.length] = typed(memoryview(bytearray(part)), tensors.dtype)
                else:
                    decode_into(part, values, tensors=tensors)
                kept.append(values[: tensors.length])
                views += [_bytes(values), content[start : start + buffers]]
                start += buffers
            if self._references:
                self._taken.pop(giver, None)
                self._taken[giver] = kept
                while len(self._taken) > self._references:
                    del self._taken[next(iter(self._taken))]
        return views


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
        for view in self._codec.taken(self._giver, self._reply, self._content):
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
