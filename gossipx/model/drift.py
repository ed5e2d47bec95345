"""Drift: the distance that a peer's own steps, without mixing, have moved its model; some policies use it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gossipx.model.arena import ParameterArena
from gossipx.model.buffers import HostBuffer
from gossipx.model.snapshots import Snapshot


class DriftReference:
    """The reference model x_r of the drift ‖x_t − x_r‖₂; for one thread at a time.

    Args:
        arena: holds x_t. Until a method first keeps a copy, x_r is the model at the last step boundary.
    """

    def __init__(self, arena: ParameterArena):
        self._arena = arena
        self._model: HostBuffer | None = None

    def set(self, model: HostBuffer | None = None) -> None:
        """Set x_r to a copy of ``model``, or of the fragment in it; None: of the last boundary."""
        if model is None:
            now = self._arena.snapshot()
            self.set(now.buffer)
            now.release()
            return
        self.load(model.vectors, model.fragment)

    def commit(self, difference: HostBuffer, share: float, base: Snapshot | None) -> None:
        """Mix a received model into the weights, and move x_r with them. Mixing is not drift.

        Args:
            difference, share: as for :meth:`gossipx.model.fragments.Fragment.commit`.
            base: our model at the request; x_r becomes what the exchange makes of it, so that drift counts the steps
                since then. None: another peer pushed the model, and the share is added to x_r.
        """
        fragment = self._arena.fragment(difference.fragment)
        fragment.commit(difference, share, base)
        if base is not None and fragment.outer is not None:
            self.load(fragment.result_in(difference), fragment.number)
            return
        if self._model is None:  # x_r is the last boundary, which contains the mix: keep a copy of it
            self.set()
            return
        references = fragment.vectors_of(self._model.vectors)
        begun = references if base is None else base.buffer.vectors
        rows = zip(fragment.sections, references, begun, difference.vectors, strict=True)
        for section, reference, begin, mixed in rows:
            cut = section.trainable
            torch.add(begin[:cut], mixed[:cut], alpha=share, out=reference[:cut])

    def apply_merged(self, merged: Snapshot, captured: Snapshot) -> None:
        """Write a merged model into the weights while training, and make its result x_r."""
        fragment = self._arena.fragment(merged.buffer.fragment)
        fragment.apply_merged(merged, captured)
        self.load(fragment.result_in(merged.buffer), fragment.number)

    def vectors(self) -> list[torch.Tensor]:
        """Return x_r as flat vectors, one per section; empty if x_r is the model of the last boundary."""
        return [] if self._model is None else list(self._model.vectors)

    def load(self, vectors: Sequence[torch.Tensor], fragment: int = 0) -> None:
        """Set x_r, or a fragment of it, to a copy of ``vectors``: those of :meth:`vectors` with the same layout."""
        if self._model is None and fragment:
            self.set()
        self._model = self._model or self._arena.pool.buffer()
        references = self._arena.fragment(fragment).vectors_of(self._model.vectors)
        for reference, vector in zip(references, vectors, strict=True):
            reference.copy_(vector)

    def distance(self, begun: HostBuffer | None = None) -> float:
        """Return ‖x_t − x_r‖₂ over the trained values; keeps a copy of x_r from then on.

        Args:
            begun: our model, or a fragment of it, as an exchange under way began; drift of that is measured from there.
                None: no exchange is under way.
        """
        squared = 0.0
        for fragment in self._arena.fragments:
            if begun is not None and begun.fragment == fragment.number:
                squared += fragment.squared_distance(begun.vectors)
                continue
            if self._model is None:
                self.set()
            assert self._model is not None
            squared += fragment.squared_distance(fragment.vectors_of(self._model.vectors))
        return math.sqrt(squared)
