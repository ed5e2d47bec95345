"""Drift: the distance that a peer's own steps, without mixing, have moved its model; some policies use it."""

from __future__ import annotations

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
        """Set x_r to a copy of ``model``; None: of the last boundary."""
        if model is None:
            now = self._arena.snapshot()
            self.set(now.buffer)
            now.release()
            return
        self.load(model.vectors)

    def commit(self, difference: HostBuffer, share: float, base: Snapshot | None) -> None:
        """Mix a received model into the weights, and move x_r with them. Mixing is not drift.

        Args:
            difference, share: as for :meth:`gossipx.model.arena.ParameterArena.commit`.
            base: our model at the request; x_r becomes what the exchange makes of it, so that drift counts the steps
                since then. None: another peer pushed the model, and the share is added to x_r.
        """
        self._arena.commit(difference, share, base)
        if base is not None and self._arena.outer is not None:
            self.load(self._arena.result_in(difference))
            return
        if self._model is None:  # x_r is the last boundary, which contains the mix: keep a copy of it
            self.set()
            return
        models = self._model, self._model if base is None else base.buffer, difference
        for section, reference, begin, mixed in zip(
            self._arena.sections, *(model.vectors for model in models), strict=True
        ):
            cut = section.trainable
            torch.add(begin[:cut], mixed[:cut], alpha=share, out=reference[:cut])

    def apply_merged(self, merged: Snapshot, captured: Snapshot) -> None:
        """Write a merged model into the weights while training, and make its result x_r."""
        self._arena.apply_merged(merged, captured)
        self.load(self._arena.result_in(merged.buffer))

    def vectors(self) -> list[torch.Tensor]:
        """Return x_r as flat vectors, one per section; empty if x_r is the model of the last boundary."""
        return [] if self._model is None else list(self._model.vectors)

    def load(self, vectors: Sequence[torch.Tensor]) -> None:
        """Set x_r to a copy of ``vectors`` from :meth:`vectors` of an arena with the same layout."""
        self._model = self._model or self._arena.pool.buffer()
        for reference, vector in zip(self._model.vectors, vectors, strict=True):
            reference.copy_(vector)

    def distance(self) -> float:
        """Return ‖x_t − x_r‖₂ over the trained values; keeps a copy of x_r from then on."""
        if self._model is None:
            self.set()
        assert self._model is not None
        return self._arena.distance(self._model)
