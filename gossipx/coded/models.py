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

import dataclasses
import functools
import threading
from collections.abc import Collection, Sequence
from typing import TypeVar

from torch import Tensor

from gossipx.arena import ParameterArena
from gossipx.codecs import Codec
from gossipx.codecs.changes import ALONE, FULL, checksum
from gossipx.coded.sections import Sections, as_bytes
from gossipx.coded.taking import Taking
from gossipx.incoming import Incoming
from gossipx.memory import Source
from gossipx.messages import ModelReply, PullRequest, Request, TakeRequest

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
        self._references = references
        self._lock = threading.Lock()
        self._sections = Sections(codec, arena, norms)
        self._changes = self._sections.changes(seed, references)
        self._states = self._sections.states(seed)
        self._begun: list[Tensor] | None = None  # what all began with
        self._taken: dict[int, list[Tensor]] = {}  # references, by who gave; the one that was last of use last
        self._public = self._sections.changes(seed, references) if public else []
        self._own: dict[int, list[int]] = {}  # checksums of public copies, by for whom
        self._apart: set[int] = set()  # whose last model was too far from one's own to be recovered

    def begin(self, model: Sequence[Tensor]) -> None:
        """This is the model that all peers begin with.

        Args:
            model: for each section its values, in host memory.
        """
        if not self._references:
            return
        with self._lock:
            self._begun = [values.clone() for values in self._sections.trained(model)]
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

    def bases(self, giver: int) -> tuple[int, ...]:
        """Checksums of what is here of the last model that ``giver`` gave; none: its model is to come by itself."""
        with self._lock:
            if not self._references and giver not in self._apart:
                return ()
            held = self._held(giver)
            return tuple(map(checksum, held)) if held is not None else (FULL,) * len(self._sections.tensors)

    def asked(self, giver: int, request: Request) -> Request:
        """A request for a model as it leaves."""
        assert isinstance(request, PullRequest | TakeRequest)
        return dataclasses.replace(request, bases=self.bases(giver))

    def _held(self, giver: int) -> list[Tensor] | None:
        return self._taken.get(giver, self._begun)

    def taking(self, giver: int, incoming: Incoming) -> Taking:
        """Takes in what ``giver`` answers by."""
        return Taking(self._sections, incoming, functools.partial(self._taken_of, giver))

    def _taken_of(self, giver: int, reply: ModelReply, content: memoryview, incoming: Incoming) -> list[memoryview]:
        """A model of ``giver`` as it lies in memory, piece by piece, of what has come."""
        parts, buffers = self._sections.cut(reply.sizes, content)
        with self._lock:
            held: Sequence[Tensor | None] = self._held(giver) or [None] * len(parts)
            near = [self._near(number, incoming) for number in range(len(parts))]
            rows = enumerate(zip(parts, reply.bases, held, near, strict=True))
            self._apart.add(giver)
            made = [self._sections.decoded(number, *row) for number, row in rows]
            self._apart.discard(giver)
            if self._references:
                self._keep(self._taken, giver, made, made)
            if self._public:
                made = self._from_public(giver, reply.bases, made, incoming)
        return self._sections.as_they_lie(made, buffers)

    def _near(self, number: int, incoming: Incoming) -> Tensor | None:
        """One's own values of a section."""
        own = incoming.compared_with(number)
        return None if own is None else own[: self._sections.tensors[number].length]

    def _from_public(self, giver: int, bases: Sequence[int], made: list[Tensor], incoming: Incoming) -> list[Tensor]:
        """x_i + (x̂_j − x̂_i) of each section, x_i being what the model that comes is compared with."""
        held = self._own.get(giver) or [changes.begun for changes in self._public]
        own, moved = [], []
        for number, (changes, theirs) in enumerate(zip(self._public, made, strict=True)):
            values = self._near(number, incoming)
            assert values is not None  # those who pull compare
            # A model that came as it is does not lag: then one's own does not, either.
            base = held[number] if bases[number] else FULL
            version = checksum(values)
            change = changes.frame(giver, base, version, values)
            own.append(version if change is None else change.check)
            moved.append(values + (theirs - changes.values(own[number])))
        self._keep(self._own, giver, own, moved)
        return moved

    def _keep(self, kept: dict[int, list[T]], giver: int, what: list[T], of: Sequence[Tensor]) -> None:
        """As the last of as many as references are kept; nothing of what would never be finite again."""
        kept.pop(giver, None)
        if all(bool(values.isfinite().all()) for values in of):
            kept[giver] = what
        while len(kept) > self._references:
            del kept[next(iter(kept))]
