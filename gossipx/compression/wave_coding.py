"""Waves that keep what they did not send: one peer's reference, its codes, and the mean of the shard that it owns.

All peers hold a *reference* r. In a wave peer i, whose model is x_i, encodes d_i = x_i − r to its code c_i = C(d_i),
and keeps the *residual* e_i = d_i − c_i, which takes no memory, since it stays in the model. The owner of a shard has a
residual E of its own, as the mean is encoded too::

    E ← E + mean_i c_i;  A = C(E);  E ← E − A                         the owner, in its shard
    v ← μ v + A;  r ← r + η (A + μ v)                                 every peer
    x_i ← r + e_i, and the training steps made since                  every peer

With η = 1 and μ = 0 this averages models: the mean of all x_i, plus E, changes by training steps alone. With a codec
that keeps everything all models are equal afterwards. Other values are DiLoCo's outer optimizer (Douillard et al.,
2023, arXiv:2311.08105, Algorithm 1: −A is the outer gradient), as in MuLoCo (Thérien et al., 2025, arXiv:2505.23725).

All peers take the same means into r and v, so both are bit for bit equal. A mean counts the codes that have arrived;
its reply says whose. If ours is not among them, d_i stays in the model. A wave in which a peer leaves out a shard that
others have taken in leaves it with an outdated reference. It then takes a later one whole, with the part of d_i that
was counted meanwhile subtracted. If the two have diverged, as after a partition, the model stays as it is, so that the
mean of all models counts the work of both sides. If the members change, so do the shards: a peer adds its E to its own
model.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from gossipx.codecs import Codec, State, Tensors, decode_into
from gossipx.codecs.changes import checksum
from gossipx.compression.model_coding import tensors_in, vector_bytes
from gossipx.errors import ProtocolError
from gossipx.memory import Source
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import HostBuffer, typed
from gossipx.outer import Nesterov
from gossipx.protocol.messages import NO_REFERENCE, WHOLE, ReferenceReply, ReferenceRequest, ShareReply

Reference = tuple[int, int]
Content = tuple[Sequence[int], memoryview]
"""Sizes by section, and the bytes of a code or a mean."""
HISTORY = 64
"""Waves that a peer remembers to have taken in."""
UNSETTLED = 10
"""Waves that a peer remembers in which its codes may have been counted without its knowledge. More of them follow only
where nobody was reached for long."""


@dataclass
class _Piece:
    """The part of one section that lies in one shard.

    Attributes:
        trained, buffers: ranges of the section's vector in the fragment.
        wire: dtype of values that are sent without a codec.
        tensors: layout of the trained values, for codecs.
        codes, means: states of the codec for codes and for means.
        longest: most bytes of a code.
    """

    trained: slice
    buffers: slice
    wire: torch.dtype
    tensors: Tensors
    codes: State | None
    means: State | None
    longest: int

    @property
    def count(self) -> int:
        """Number of trained values."""
        return int(self.trained.stop - self.trained.start)

    @property
    def buffer_bytes(self) -> int:
        """Size of the module's buffers on the wire."""
        return int(self.buffers.stop - self.buffers.start) * self.wire.itemsize


Shard = Sequence[_Piece]
"""One piece of each section."""


@dataclass
class _Wave:
    """The record of a wave.

    Attributes:
        number: of the wave.
        shards: their layout, by owner.
        codes: ours, by owner.
        means: those that are known, by owner, as they were sent: whose codes are counted, and the content.
        residual: E before the wave.
        unsettled: owners whose mean we do not know, though they may have counted our code.
        is_unapplied: whether r has been updated and our weights have not.
    """

    number: int
    shards: Mapping[int, Shard]
    codes: Mapping[int, Content]
    means: dict[int, tuple[tuple[int, ...], Content]] = field(default_factory=dict)
    residual: tuple[Shard, list[Tensor]] | None = None
    unsettled: set[int] = field(default_factory=set)
    is_unapplied: bool = False


class WaveCodec:
    """The reference of one peer for one fragment, with what waves need to update it. Thread-safe.

    Args:
        codec: encodes codes and means; None: they are sent as raw values.
        arena: the peer's parameters.
        rank: of this peer.
        outer: η and μ; None: 1 and 0.
        norms: names of the parameters of normalisation layers.
        seed: seeds the codec's random draws.
        fragment: number of the fragment of the model.
    """

    def __init__(
        self,
        codec: Codec | None,
        arena: ParameterArena,
        rank: int,
        outer: Nesterov | None = None,
        norms: Collection[str] = (),
        seed: int = 0,
        fragment: int = WHOLE,
    ):
        self.fragment = arena.fragment(fragment)
        self._codec = None if codec is None else codec.in_feedback()
        self._rank, self._outer, self._norms, self._seed = rank, outer, norms, seed
        self._slots = arena.slots
        self._wide = [torch.promote_types(one.values.dtype, torch.float32) for one in self.fragment.sections]
        self._lock = threading.Lock()
        self._layout: tuple[tuple[int, ...], Mapping[int, Shard]] = (), {}
        self.begin(None)

    def begin(self, model: Sequence[Tensor] | None) -> None:
        """Set the reference, and forget all that was known.

        Args:
            model: the values of each section, in host memory, equal on all peers; None: there is no common model.
        """
        with self._lock:
            self._reference = [] if model is None else [values.clone() for values in self._trained(model)]
            self._velocity = [torch.zeros_like(values) for values in self._reference if self._outer is not None]
            self._residual: tuple[Shard, list[Tensor]] | None = None  # E, and where it lies
            self._carried: tuple[Shard, list[Tensor]] | None = None  # the E of a former shard, to be added to our model
            self._waves: dict[int, _Wave] = {}  # by ticket: the last ones
            self._taken: dict[int, tuple[Reference, set[int]]] = {}  # by wave: r before it, and owners of its means
            self._last_counted: dict[
                int, tuple[int, set[int]]
            ] = {}  # by rank: a wave, and owners that counted its code
            self._number = NO_REFERENCE if model is None else self._numbered(1)

    def _numbered(self, count: int) -> Reference:
        vectors = [*self._reference, *self._velocity]
        checks = b"".join(checksum(values).to_bytes(8, "little") for values in vectors)
        return count, xxhash.xxh3_64_intdigest(checks) >> 1

    def _trained(self, model: Sequence[Tensor]) -> list[Tensor]:
        rows = zip(model, self.fragment.sections, self._wide, strict=True)
        return [values[: section.trainable].to(wide) for values, section, wide in rows]

    # --- shards -----------------------------------------------------------------------------------

    def _shards(self, members: tuple[int, ...]) -> Mapping[int, Shard]:
        """Return the shards of a wave by owner, of equal size but for one value of each section.

        If the members have changed, what is left of our shard's means goes to our own model.
        """
        if self._layout[0] != members:
            self._layout = members, {rank: self._shard(index, len(members)) for index, rank in enumerate(members)}
            if self._residual is not None:
                self._carried, self._residual = self._residual, None
        return self._layout[1]

    def _shard(self, index: int, count: int) -> Shard:
        pieces = []
        for section, within, wide in zip(self.fragment.sections, self.fragment.ranges, self._wide, strict=True):
            cut, others = section.trainable, section.mixed - section.trainable
            first, last = cut * index // count, cut * (index + 1) // count
            buffers = slice(*(cut + others * (index + k) // count for k in (0, 1)))
            own = slice(within.start + first, within.start + last)
            tensors = tensors_in(section, own, self._slots, self._norms, wide)
            codes, means, longest = None, None, (last - first) * section.values.itemsize
            if self._codec is not None:
                codes, means = (self._codec.init(tensors, self._seed + 2 * index + k) for k in (0, 1))
                longest = self._codec.longest(tensors)
            wire = section.values.dtype
            pieces.append(_Piece(slice(first, last), buffers, wire, tensors, codes, means, longest))
        return pieces

    def nbytes(self, shard: Shard, sizes: Sequence[int]) -> int:
        """Return the size of a code or a mean with these sizes of its sections. Raises ProtocolError if impossible."""
        exact = self._codec is None
        if len(sizes) != len(shard) or any(
            size > piece.longest or (exact and size != piece.longest) for size, piece in zip(sizes, shard, strict=False)
        ):
            raise ProtocolError("a code of a wave does not fit this run's model")
        return sum(sizes) + sum(piece.buffer_bytes for piece in shard)

    def fit(self, members: tuple[int, ...], owner: int, sizes: Sequence[int]) -> int:
        """Return the size of a code or a mean of a shard; errors as :meth:`nbytes`."""
        with self._lock:
            shards = self._layout[1] if self._layout[0] == members else None
        index, count = members.index(owner), len(members)
        return self.nbytes(self._shard(index, count) if shards is None else shards[owner], sizes)

    def _encoded(self, shard: Shard, values: Sequence[Tensor], buffers: Sequence[Tensor], means: bool) -> Content:
        """Encode the values of a shard, by section; append its buffers."""
        parts, sizes = bytearray(), []
        for piece, vector, others in zip(shard, values, buffers, strict=True):
            frame: memoryview | bytes = b""
            state = piece.means if means else piece.codes
            if self._codec is None or state is None:
                frame = vector_bytes(vector.to(piece.wire))
            elif piece.count:
                frame, _ = self._codec.encode(vector, state)
            sizes.append(len(frame))
            parts += frame
            parts += vector_bytes(others)
        return sizes, memoryview(parts)

    def _decoded(self, shard: Shard, content: Content) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values of a shard and its buffers, by section."""
        values, buffers, start = [], [], 0
        sizes, view = content
        for piece, size, wide in zip(shard, sizes, self._wide, strict=True):
            part, others = view[start : start + size], view[start + size : start + size + piece.buffer_bytes]
            if self._codec is None:
                vector = typed(memoryview(bytearray(part)), piece.wire).to(wide)
            else:
                vector = torch.zeros(piece.count, dtype=wide)
                if piece.count:
                    decode_into(part, vector, tensors=piece.tensors)
            values.append(vector)
            buffers.append(typed(memoryview(bytearray(others)), piece.wire))
            start += size + piece.buffer_bytes
        return values, buffers

    # --- a wave -----------------------------------------------------------------------------------

    def encode(
        self, ticket: int, number: int, members: tuple[int, ...], model: Sequence[Tensor], founds: bool
    ) -> Reference:
        """Encode the codes of all shards; return the reference from which they are measured.

        Args:
            ticket: of the wave.
            model: the captured values of each section, in host memory.
            founds: whether the model becomes the reference of a peer that has none.
        """
        if founds and self._number == NO_REFERENCE:
            self.begin(model)
        with self._lock:
            if self._number == NO_REFERENCE:
                return NO_REFERENCE
            shards = self._shards(members)
            moved = self._differences(model)
            codes = {
                owner: self._encoded(
                    shard,
                    [vector[piece.trained] for piece, vector in zip(shard, moved, strict=True)],
                    [vector[piece.buffers] for piece, vector in zip(shard, model, strict=True)],
                    means=False,
                )
                for owner, shard in shards.items()
            }
            self._waves[ticket] = _Wave(number, shards, codes, unsettled=set(members) - {self._rank})
            return self._number

    def _differences(self, model: Sequence[Tensor]) -> list[Tensor]:
        moved = [own - past for own, past in zip(self._trained(model), self._reference, strict=True)]
        if self._carried is not None:
            for piece, vector, left in zip(self._carried[0], moved, self._carried[1], strict=True):
                vector[piece.trained] += left
        return moved

    def code(self, number: int, members: tuple[int, ...], owner: int) -> Content | None:
        """Return our code of a shard; None: the wave was forgotten."""
        with self._lock:
            for wave in self._waves.values():
                if (wave.number, tuple(wave.shards)) == (number, members):
                    return wave.codes[owner]
            return None

    def average(self, ticket: int, codes: Mapping[int, Content]) -> tuple[int, ...]:
        """Average the codes of our shard, given those of other members by rank; return whose are counted."""
        with self._lock:
            wave = self._waves.get(ticket)
            if wave is None:
                return ()
            shard = wave.shards[self._rank]
            counted, total, buffers = self._sum(shard, {**codes, self._rank: wave.codes[self._rank]})
            if len(counted) < 2:
                return counted
            wave.residual = self._residual
            left = [torch.zeros_like(values) for values in total]
            if self._residual is not None:
                left = [values.clone() for values in self._residual[1]]
            self._residual = shard, left
            for values, residual in zip(total, left, strict=True):
                residual += values / len(counted)
            means = [(values / len(counted)).to(piece.wire) for values, piece in zip(buffers, shard, strict=True)]
            content = self._encoded(shard, left, means, means=True)
            for residual, sent in zip(left, self._decoded(shard, content)[0], strict=True):
                residual -= sent
            wave.means[self._rank] = counted, content
            return counted

    def _sum(self, shard: Shard, codes: Mapping[int, Content]) -> tuple[tuple[int, ...], list[Tensor], list[Tensor]]:
        """Add codes up in the order of ranks, without those that are malformed or not finite; return whose are in."""
        counted: list[int] = []
        total = [torch.zeros(piece.count, dtype=wide) for piece, wide in zip(shard, self._wide, strict=True)]
        buffers = [torch.zeros(one.buffers.stop - one.buffers.start, dtype=torch.float64) for one in shard]
        for rank in sorted(codes):
            try:
                values, others = self._decoded(shard, codes[rank])
            except ProtocolError:
                continue
            if all(bool(vector.isfinite().all()) for vector in values):
                counted.append(rank)
                for sums, vectors in ((total, values), (buffers, others)):
                    for whole, vector in zip(sums, vectors, strict=True):
                        whole += vector
        return tuple(counted), total, buffers

    def share(self, ticket: int, owner: int) -> tuple[ShareReply, Source] | None:
        """Return the mean of a shard's codes; None: the wave was forgotten."""
        with self._lock:
            wave = self._waves.get(ticket)
            if wave is None or owner not in wave.means:
                return None
            counted, (sizes, view) = wave.means[owner]
            return ShareReply(counted, tuple(sizes)), Source(view)

    def end(
        self,
        ticket: int,
        shares: Mapping[int, tuple[ShareReply, memoryview]],
        with_own: bool,
        model: Sequence[Tensor],
        out: HostBuffer,
    ) -> tuple[int, ...] | None:
        """Take the means of a wave in.

        Args:
            ticket: of the wave.
            shares: those of other owners, by rank.
            with_own: whether the mean of our own shard counts; if not, E becomes what it was.
            model: the captured values of each section, in host memory.
            out: receives the model that the captured one becomes.

        Returns:
            Owners whose mean was malformed or not finite, and was left out; None: the wave was forgotten.
        """
        with self._lock:
            wave = self._waves.get(ticket)
            if wave is None:
                return None
            wave.means.update({owner: (one.counted, (one.sizes, view)) for owner, (one, view) in shares.items()})
            if not with_own and wave.means.pop(self._rank, None) is not None:
                self._residual = wave.residual
            moved, poisoned, taken = self._differences(model), [], 0
            self._copy(model, out)
            self._add(self._carried, out)
            for owner in sorted(wave.means):
                if self._take(wave, owner, moved, out):
                    taken += 1
                else:
                    poisoned.append(owner)
                    del wave.means[owner]
            if taken:
                for other in self._waves.values():  # others had our reference, so they have counted nothing else
                    other.unsettled.difference_update(wave.means if other is wave else other.shards)
                self._taken[wave.number] = self._number, set(wave.means)
                while len(self._taken) > HISTORY:
                    del self._taken[next(iter(self._taken))]
                self._number = self._numbered(self._number[0] + taken)
                self._carried, wave.is_unapplied = None, True
            return tuple(poisoned)

    def _take(self, wave: _Wave, owner: int, moved: Sequence[Tensor], out: HostBuffer) -> bool:
        """Update r, v and ``out`` in one shard; return False, and change nothing, if its mean is not finite."""
        counted, content = wave.means[owner]
        shard = wave.shards[owner]
        try:
            means, buffers = self._decoded(shard, content)
        except ProtocolError:
            return False
        if not all(bool(values.isfinite().all()) for values in means):
            return False
        codes, _ = self._decoded(shard, wave.codes[owner])
        for number, (piece, mean) in enumerate(zip(shard, means, strict=True)):
            past = self._reference[number][piece.trained]
            if self._outer is None:
                past += mean
            else:  # each product is rounded by itself, so that all processors compute the same
                velocity = self._velocity[number][piece.trained]
                velocity.mul_(self._outer.momentum).add_(mean)
                past += (mean + velocity * self._outer.momentum) * self._outer.lr
            left = moved[number][piece.trained]
            if self._rank in counted:
                left = left - codes[number]
            out.vectors[number][piece.trained] = past + left
            out.vectors[number][piece.buffers] = buffers[number]
        for rank in counted:
            before, owners = self._last_counted.get(rank, (0, set()))
            self._last_counted[rank] = wave.number, {owner, *(owners if before == wave.number else ())}
        return True

    def applied(self, ticket: int) -> None:
        """Record that the result of a wave is in the weights."""
        with self._lock:
            if ticket in self._waves:
                self._waves[ticket].is_unapplied = False

    def forget(self, ticket: int) -> None:
        """Drop all waves but this one, for peers that ask late, and those that are unsettled.

        If r was updated and the weights were not, the reference is dropped: it no longer fits them.
        """
        wave = self._waves.get(ticket)
        if wave is None:
            return
        if wave.is_unapplied:
            self.begin(None)
            return
        with self._lock:
            unsettled = [(one, other) for one, other in self._waves.items() if other.unsettled and one != ticket]
            self._waves = {**dict(unsettled[-UNSETTLED:]), ticket: wave}

    # --- whole references -------------------------------------------------------------------------

    @property
    def reference_bytes(self) -> int:
        """Size of a reference on the wire."""
        lengths = zip(self.fragment.sections, self._wide, strict=True)
        return (1 + (self._outer is not None)) * sum(one.trainable * wide.itemsize for one, wide in lengths)

    def asked(self) -> ReferenceRequest:
        """Return the request for a later reference."""
        with self._lock:
            wave, (before, owners) = next(reversed(self._taken.items()), (0, (NO_REFERENCE, set[int]())))
            return ReferenceRequest(self.fragment.number, self._number, before, wave, tuple(sorted(owners)))

    def give(self, receiver: int, theirs: ReferenceRequest) -> tuple[ReferenceReply, Source] | None:
        """Return our reference for a peer that has another one; None: we have none."""
        with self._lock:
            if self._number == NO_REFERENCE:
                return None
            earlier = theirs.reference in (before for before, _ in self._taken.values())
            if not earlier and (known := self._taken.get(theirs.wave)) is not None:  # it took in fewer means
                earlier = known[0] == theirs.before and set(theirs.taken) <= known[1]
            wave, owners = self._last_counted.get(receiver, (0, set()))
            content = bytearray().join(vector_bytes(values) for values in (*self._reference, *self._velocity))
            reply = ReferenceReply(self._number, earlier, wave, tuple(sorted(owners)))
            return reply, Source(memoryview(content))

    def take(self, reply: ReferenceReply, content: memoryview, model: Sequence[Tensor], out: HostBuffer) -> bool:
        """Replace the reference by a later one; return False, and change nothing, if that is not finite.

        Args:
            reply, content: of the peer that has it.
            model: the captured values of each section, in host memory.
            out: receives the model that the captured one becomes.
        """
        with self._lock:
            vectors = list(self._split(content))
            if not all(bool(values.isfinite().all()) for values in vectors):
                return False
            later, velocity = self._halves(vectors)
            self._copy(model, out)
            if reply.follows:
                for vector, past, now in zip(out.vectors, self._reference, later, strict=True):
                    vector[: len(now)] += now - past
                self._settle(reply, out)
            else:
                self._add(self._residual, out)
                self._residual = None
            self._taken.clear()
            self._reference, self._velocity, self._number = later, velocity, reply.reference
            return True

    @staticmethod
    def _copy(model: Sequence[Tensor], out: HostBuffer) -> None:
        for vector, own in zip(out.vectors, model, strict=True):
            vector.copy_(own)

    @staticmethod
    def _add(left: tuple[Shard, list[Tensor]] | None, out: HostBuffer) -> None:
        if left is not None:
            for piece, values, vector in zip(*left, out.vectors, strict=True):
                vector[piece.trained] += values

    def _settle(self, reply: ReferenceReply, out: HostBuffer) -> None:
        """Subtract those of our codes that others have counted, as we now learn."""
        for wave in self._waves.values():
            if wave.number == reply.wave:
                for owner in wave.unsettled & set(reply.counted):
                    codes, _ = self._decoded(wave.shards[owner], wave.codes[owner])
                    for piece, code, vector in zip(wave.shards[owner], codes, out.vectors, strict=True):
                        vector[piece.trained] -= code
            wave.unsettled.clear()

    def _halves(self, vectors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return list(vectors[: len(self._wide)]), list(vectors[len(self._wide) :])

    def _split(self, content: memoryview) -> Iterator[Tensor]:
        start = 0
        for _ in range(1 + (self._outer is not None)):
            for section, wide in zip(self.fragment.sections, self._wide, strict=True):
                end = start + section.trainable * wide.itemsize
                yield typed(content[start:end], wide).clone()
                start = end

    # --- checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the reference and what belongs to it, for a checkpoint; empty if it does not fit the weights yet."""
        with self._lock:
            if self._number == NO_REFERENCE or any(wave.is_unapplied for wave in self._waves.values()):
                return {}
            residual = [] if self._residual is None else [values.clone() for values in self._residual[1]]
            vectors = [values.clone() for values in (*self._reference, *self._velocity)]
            members = list(self._layout[0])
            return {"number": list(self._number), "vectors": vectors, "members": members, "residual": residual}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on a peer with the same layout."""
        self.begin(None)
        with self._lock:
            if state:
                shards = self._shards(tuple(state["members"]))
                count, check = state["number"]
                self._reference, self._velocity = self._halves(state["vectors"])
                self._residual = (shards[self._rank], list(state["residual"])) if state["residual"] else None
                self._number = count, check
