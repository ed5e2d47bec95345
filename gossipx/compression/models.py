"""Models as codecs have them, from a peer that gives its own to one that takes it.

A model that is pulled is no change of state, so that what travels is its difference to a *reference* that both ends
hold: what this taker took last from this giver, at first the model that all began with. The taker names it by
checksums; where one of them no longer has it, the model is given as it is. Each end keeps references of so many others:
of those that exchanged last. Without references each model is encoded by itself.

What lags behind its model pulls others back when it is mixed. CHOCO-SGD mixes it with what lags as far, so that who
takes keeps for each giver what the codec would have made of its own model as well: its *public* copy.

Of each section the trained values are encoded, tensor by tensor; buffers, such as BatchNorm's statistics, are given as
they are.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from gossipx.codecs import Codec, decode_into
from gossipx.codecs.changes import ALONE, FULL, checksum
from gossipx.compression.receive import ModelSink
from gossipx.compression.sections import Sections, as_bytes
from gossipx.errors import ProtocolError
from gossipx.memory import Source
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import ModelReply, PullRequest, Request, TakeRequest


@dataclass
class _Reference:
    """What is here of one giver; of each section the trained values.

    Attributes:
        taken: x̂_j, the model that it gave last, as it came.
        public: x̂_i, what the codec would have made of one's own; of mixing by CHOCO alone.
    """

    taken: list[Tensor]
    public: list[Tensor]


class ModelCodec:
    """One peer's models, both ways.

    Args:
        codec: of the differences, or of models.
        arena: whose models they are.
        references: how many others they are kept of, of those that take and of those that give; 0: none.
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
        self._references = references
        self._lock = threading.Lock()
        self._sections = Sections(codec, arena, norms)
        self._changes = self._sections.changes(seed, references)
        self._states = self._sections.states(seed)
        self._public = public
        self._begun: list[Tensor] | None = None  # what all began with
        self._taken: dict[int, _Reference] = {}  # by who gave; the one that was last of use last
        self._met: set[int] = set()  # who has given a model already, of whom there is a reference or none
        self._apart: set[int] = set()  # whose last model was too far from one's own to be recovered

    def begin(self, model: Sequence[Tensor] | None) -> None:
        """This is the model that all peers begin with.

        Args:
            model: for each section its values, in host memory; None: this peer is not one of those that begin.
        """
        if not self._references:
            return
        with self._lock:
            self._begun = None if model is None else [values.clone() for values in self._sections.trained(model)]
            for number, changes in enumerate(self._changes):
                changes.common(None if self._begun is None else self._begun[number])

    # --- giving -----------------------------------------------------------------------------------

    def give(
        self, taker: int, bases: Sequence[int], model: Sequence[Tensor], reply: ModelReply
    ) -> tuple[ModelReply, Source]:
        """A model as it travels to ``taker``, who has ``bases``; and the reply that goes with it.

        Args:
            model: for each section its values, in host memory.
        """
        told, parts = [], []
        with self._lock:
            for number, values in enumerate(self._sections.trained(model)):
                base = bases[number] if number < len(bases) else FULL if self._references else ALONE
                part, base = self._part(number, taker, base, values)
                told.append(base)
                parts.append(part)
        made = dataclasses.replace(reply, bases=tuple(told), sizes=tuple(map(len, parts)))
        return made, Source(self._sections.joined(parts, model))

    def _part(self, number: int, taker: int, base: int, values: Tensor) -> tuple[memoryview, int]:
        if base == ALONE:
            frame, self._states[number] = self._sections.codec.encode(values, self._states[number])
            return frame, ALONE
        if not self._references:
            return as_bytes(values), FULL
        change = self._changes[number].frame(taker, base, checksum(values), values)
        return (as_bytes(values), FULL) if change is None else (change.source.view, base)

    # --- taking -----------------------------------------------------------------------------------

    def bases(self, sender: int) -> tuple[int, ...]:
        """Checksums of what is here of the last model that ``sender`` gave; none: its model is to come by itself."""
        with self._lock:
            if not self._references and sender not in self._apart:
                return ()
            held = self._held(sender)
            return (FULL,) * len(self._sections.tensors) if held is None else tuple(map(checksum, held.taken))

    def asked(self, sender: int, request: Request) -> Request:
        """A request for a model as it leaves."""
        assert isinstance(request, PullRequest | TakeRequest)
        return dataclasses.replace(request, bases=self.bases(sender))

    def _held(self, sender: int) -> _Reference | None:
        if sender in self._met or self._begun is None:
            return self._taken.get(sender)
        return _Reference(self._begun, self._begun)

    def model_sink(self, sender: int, incoming: Incoming) -> ModelSink:
        """Takes in what ``sender`` answers by."""
        return ModelSink(self._sections, incoming, functools.partial(self._taken_of, sender))

    def _taken_of(self, sender: int, reply: ModelReply, content: memoryview, incoming: Incoming) -> list[memoryview]:
        """A model of ``sender`` as it lies in memory, piece by piece, of what has come."""
        parts, buffers = self._sections.cut(reply.sizes, content)
        with self._lock:
            held = self._held(sender)
            had: Sequence[Tensor | None] = [None] * len(parts) if held is None else held.taken
            near = [self._near(number, incoming) for number in range(len(parts))]
            rows = enumerate(zip(parts, reply.bases, had, near, strict=True))
            self._apart.add(sender)
            taken = [self._sections.decoded(number, *row) for number, row in rows]
            self._apart.discard(sender)
            made = taken
            if self._references:
                own = [values for values in near if values is not None] if self._public else []
                public = self._published(reply.bases, held, own) if self._public else []
                self._keep(sender, _Reference(taken, public))
                if self._public:  # as if x_j were x_i + x̂_j − x̂_i
                    changed = zip(own, taken, public, strict=True)
                    made = [values + (theirs - ours) for values, theirs, ours in changed]
        return self._sections.as_they_lie(made, buffers)

    def _near(self, number: int, incoming: Incoming) -> Tensor | None:
        """One's own values of a section."""
        own = incoming.compared_with(number)
        return None if own is None else own[: self._sections.tensors[number].length]

    def _published(self, bases: Sequence[int], held: _Reference | None, own: Sequence[Tensor]) -> list[Tensor]:
        """x̂_i of each section, one's own model being x_i now."""
        made = []
        for number, (base, values) in enumerate(zip(bases, own, strict=True)):
            if base == FULL:  # a model that came as it is does not lag, and one's own does not, either
                made.append(values.clone())
                continue
            if held is None:
                raise ProtocolError("a model came by itself, where a change was asked for")
            moved = held.public[number].clone()
            frame, self._states[number] = self._sections.codec.encode(values - moved, self._states[number])
            decode_into(frame, moved, add=True, tensors=self._sections.tensors[number])
            made.append(moved)
        return made

    def _keep(self, sender: int, reference: _Reference) -> None:
        """As the last of as many as are kept; nothing of what would never be finite again."""
        self._met.add(sender)
        self._taken.pop(sender, None)
        if all(bool(values.isfinite().all()) for values in (*reference.taken, *reference.public)):
            self._taken[sender] = reference
        while len(self._taken) > self._references:
            del self._taken[next(iter(self._taken))]
