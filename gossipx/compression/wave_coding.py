"""Compressed waves, in which peers average what their models have moved since the last wave, as encoded changes.

The result of a wave, θ, is a *reference* that all its members hold. In the next wave a peer whose model is y encodes
θ − y, with error feedback, to the change q, and gives θ − q in place of y. What the codec leaves out stays with the
peer, in the accumulated error, and training continues from the new mean: so peers agree after each wave, however coarse
the codec is. With ``topk2`` this is SparseLoCo (Sarfi et al., 2025, arXiv:2508.15706, Algorithm 1) with an outer
learning rate of 1, and without the all-gather: a peer passes on the encoded changes of all peers whose models it has
averaged, so that after log2 N rounds each member has received each change once.

The mean of a set of peers is θ − Σ q / n, added up in the order of ranks, so that it is bit for bit the same wherever
it is computed. Two partners whose references differ send each other values without encoding: after a wave that lost a
partner, and where a peer joins late or resumes. Such a wave makes the references equal again.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from gossipx.codecs import Codec, ErrorFeedback, State, decode_into
from gossipx.codecs.changes import FULL, checksum
from gossipx.compression.model_coding import ModelSink, SectionCodec, vector_bytes
from gossipx.errors import LocalFaultError, ProtocolError
from gossipx.memory import Source
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import HostBuffer
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import WHOLE, ModelReply, RoundRequest

Frames = Mapping[int, Sequence[memoryview]]
"""The encoded changes of peers: by rank, one frame per section."""
_FRAME = struct.Struct("<IQ")
"""Before each frame in the payload: the rank of its peer, and its size in bytes."""


@dataclass
class _Wave:
    """The wave that this peer takes part in.

    Attributes:
        ticket: of the captured model.
        frames: the encoded changes whose mean is the current average; None: it is not known as such.
        states: of the codec, after this peer's change was encoded; None: it has not been encoded.
        merged: whether the current average includes models of other peers.
    """

    ticket: int
    frames: Frames | None
    states: Sequence[State] | None = None
    merged: bool = False


class WaveCodec(SectionCodec):
    """Encoder and decoder of one peer's waves.

    Args:
        codec: encodes the changes.
        arena: the peer's parameters.
        rank: of this peer.
        peers: number of peers in the run.
        norms: names of the parameters of normalisation layers.
        seed: seeds the codec's random draws.
        fragment: number of the fragment of the model that it encodes.

    Attributes:
        peers: number of peers in the run, which may grow.
    """

    def __init__(
        self,
        codec: Codec,
        arena: ParameterArena,
        rank: int,
        peers: int,
        norms: Collection[str] = (),
        seed: int = 0,
        fragment: int = WHOLE,
    ):
        super().__init__(codec, arena, norms, seed, fragment)
        self._encoder = ErrorFeedback(self.codec)
        self._rank = rank
        self._longest = [_FRAME.size + longest for longest in self._max_bytes]  # of one peer
        self.peers = peers
        self.begin(None)

    def begin(self, model: Sequence[Tensor] | None) -> None:
        with self._lock:
            self._wave = _Wave(-1, None)  # one under way belongs to another model
            self._set_reference(model)
            layouts = enumerate(self.tensors)
            self._states: Sequence[State] = [
                self._encoder.init(tensors, self._seed + number) for number, tensors in layouts
            ]

    def _set_reference(self, model: Sequence[Tensor] | None) -> None:
        self._reference = None if model is None else [values.clone() for values in self.trained(model)]
        self._bases = () if self._reference is None else tuple(map(checksum, self._reference))

    def enter(self, ticket: int) -> None:
        """Record that the model captured under ``ticket`` enters a wave. This takes no lock."""
        self._wave = _Wave(ticket, None if self._reference is None else {})

    # --- sending ----------------------------------------------------------------------------------

    def prepared(self, request: RoundRequest) -> RoundRequest:
        """Return a request completed by the checksums of the reference, if the current average can be encoded."""
        wave = self._wave
        return request if wave.frames is None else msgspec.structs.replace(request, bases=self._bases)

    def give(
        self, ticket: int, bases: Sequence[int], model: Sequence[Tensor], reply: ModelReply
    ) -> tuple[ModelReply, Source]:
        """Encode the current average of a wave for the partner of a round; return the completed reply and the payload.

        Args:
            ticket: of the captured model.
            bases: checksums of the partner's reference, from its request.
            model: the values of each section, in host memory: the captured model, or the average after a merge.

        Raises:
            LocalFaultError: the wave is over.
        """
        with self._lock:
            wave = self._entered(ticket, model)
            if wave.frames is not None and tuple(bases) == self._bases:
                parts = [_joined(wave.frames, number) for number in range(len(self._bases))]
                used = self._bases
            else:
                parts = [vector_bytes(values) for values in self._average(wave, model)]
                used = (FULL,) * len(parts)
        completed = msgspec.structs.replace(reply, bases=used, sizes=tuple(map(len, parts)))
        return completed, Source(self.joined(parts, model))

    def _entered(self, ticket: int, model: Sequence[Tensor]) -> _Wave:
        """Return the wave of a captured model; encode the change to that model, if it has not been encoded."""
        wave = self._wave
        if wave.ticket != ticket:
            raise LocalFaultError("the wave is over")
        self._encode(wave, model)
        return wave

    def _encode(self, wave: _Wave, model: Sequence[Tensor]) -> None:
        if wave.states is None:
            wave.states = [_copied(state) for state in self._states]
            if self._reference is not None:
                rows = zip(self._reference, self.trained(model), wave.states, strict=True)
                encoded = [self._encoder.encode(was - now, state) for was, now, state in rows]
                wave.states = [state for _, state in encoded]
                wave.frames = {self._rank: [memoryview(bytes(frame)) for frame, _ in encoded]}  # without spare memory

    def _average(self, wave: _Wave, model: Sequence[Tensor]) -> list[Tensor]:
        """Return the trained values of the current average; ``model`` as for :meth:`give`."""
        if wave.merged or wave.frames is None:
            return self.trained(model)
        return self._mean_of(wave.frames)

    def _mean_of(self, frames: Frames) -> list[Tensor]:
        """Return θ − Σ q / n."""
        assert self._reference is not None
        means = []
        for number, (reference, tensors) in enumerate(zip(self._reference, self.tensors, strict=True)):
            total = reference.new_zeros(len(reference))
            for rank in sorted(frames):
                decode_into(frames[rank][number], total, add=True, tensors=tensors)
            means.append(reference - total / len(frames))
        return means

    # --- receiving --------------------------------------------------------------------------------

    def model_sink(self, incoming: Incoming) -> WaveSink:
        """Return the sink of the reply to a request."""
        return WaveSink(self, incoming)

    def fits(self, sizes: Sequence[int], bases: Sequence[int]) -> bool:
        """Return whether the sizes of a payload are possible: of values without encoding, or of up to all peers."""
        if tuple(bases) == (FULL,) * len(self._longest):
            return super().fits(sizes, bases)
        is_complete = len(sizes) == len(bases) == len(self._longest) and FULL not in bases
        return is_complete and all(size <= self.peers * most for size, most in zip(sizes, self._longest, strict=True))

    def decoded(self, reply: ModelReply, content: memoryview) -> tuple[Frames | None, list[memoryview]]:
        """Decode the average of another peer.

        Returns:
            The changes of which it is the mean, or None; and the average in the memory layout of a model, in pieces.

        Raises:
            ProtocolError: it is malformed, or relative to another reference.
        """
        parts, buffers = self.cut(reply.sizes, content)
        with self._lock:
            if FULL in reply.bases:
                values = [self.decoded_section(number, part, FULL) for number, part in enumerate(parts)]
                return None, self.laid_out(values, buffers)
            if reply.bases != self._bases:
                raise ProtocolError("an average arrived as a change from another model than the last mean of this peer")
            frames = _split(parts)
            return frames, self.laid_out(self._mean_of(frames), buffers)

    def merge(
        self, ticket: int, incoming: Incoming, frames: Frames | None, before: HostBuffer, own: float, theirs: float
    ) -> float:
        """Merge a received average into this peer's; the result is left in the buffer of ``incoming``.

        Args:
            ticket: of the captured model.
            frames: the changes of which the received one is the mean; None: they are not known.
            before: this peer's average, or the captured model before the first merge.
            own: weight of this peer's average; if 0, the result is the received one.
            theirs: weight of the received average.

        Returns:
            A number; NaN if a value is not finite, and then the average is unchanged.
        """
        with self._lock:
            wave = self._wave
            if wave.ticket != ticket:  # the wave is over, and nobody needs the result
                return self.fragment.merge(incoming.buffer, before, own, theirs)
            self._encode(wave, before.vectors)
            average = before
            if not wave.merged and wave.frames is not None:
                average = self.fragment.pool.buffer()
                average.view[:] = before.view
                _write(self._mean_of(wave.frames), average)
            distance = self.fragment.merge(incoming.buffer, average, own, theirs)
            if average is not before:
                self.fragment.pool.free(average)
            if math.isnan(distance):
                return distance
            wave.merged = True
            if frames is None or wave.frames is None:
                wave.frames = None
            else:
                wave.frames = {**frames, **wave.frames} if own else frames
                _write(self._mean_of(wave.frames), incoming.buffer)
            return distance

    def applied(self, ticket: int, average: Sequence[Tensor]) -> None:
        """Take the result of a wave as the next reference.

        Args:
            ticket: of the captured model.
            average: the values of each section, in host memory.
        """
        with self._lock:
            wave = self._wave
            if wave.ticket == ticket and wave.states is not None:
                self._states = wave.states
                self._set_reference(average)
                wave.frames = None


class WaveSink(ModelSink):
    """The receive buffer of a partner's average.

    Args:
        codec: decodes it.
        incoming: receives the decoded average.
    """

    def __init__(self, codec: WaveCodec, incoming: Incoming):
        super().__init__(codec, incoming, self._decode)
        self._waves = codec
        self._frames: Frames | None = None

    def _decode(self, reply: ModelReply, content: memoryview, incoming: Incoming) -> list[memoryview]:
        self._frames, views = self._waves.decoded(reply, content)
        return views

    def merge(self, ticket: int, before: HostBuffer, own: float, theirs: float) -> float:
        """Merge the received average into this peer's, see :meth:`WaveCodec.merge`."""
        return self._waves.merge(ticket, self._incoming, self._frames, before, own, theirs)


def _copied(state: State) -> State:
    """Return a copy of a codec's state, which encoding changes in place."""
    return dataclasses.replace(state, kept={name: values.clone() for name, values in state.kept.items()})


def _write(values: Sequence[Tensor], buffer: HostBuffer) -> None:
    for vector, trained in zip(buffer.vectors, values, strict=True):
        vector[: len(trained)] = trained


def _joined(frames: Frames, number: int) -> memoryview:
    """Return the frames of a section, each after its peer's rank and its size."""
    joined = bytearray()
    for rank in sorted(frames):
        frame = frames[rank][number]
        joined += _FRAME.pack(rank, len(frame))
        joined += frame
    return memoryview(joined)


def _split(parts: Sequence[memoryview]) -> Frames:
    """Return the frames that :func:`_joined` has joined, of all sections. Raises ProtocolError if malformed."""
    sections = []
    for part in parts:
        found: dict[int, memoryview] = {}
        start = 0
        while start < len(part):
            if len(part) - start < _FRAME.size:
                raise ProtocolError("the encoded changes of a wave end within a header")
            rank, size = _FRAME.unpack_from(part, start)
            start += _FRAME.size
            if size > len(part) - start or rank in found:
                raise ProtocolError("the encoded changes of a wave are malformed")
            found[rank] = part[start : start + size]
            start += size
        sections.append(found)
    if not all(found.keys() == sections[0].keys() for found in sections) or not sections[0]:
        raise ProtocolError("the encoded changes of a wave are not of the same peers in all sections")
    return {rank: [found[rank] for found in sections] for rank in sections[0]}
