"""Captured models of this peer: copies that an exchange works on while training continues.

An exchange captures the model, merges received models into the copy, and then writes the result into the weights.
Drift, ‖x_t − x_r‖₂, is the distance from the model at the last exchange; its reference is stored here, too.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from gossipx.model.arena import ParameterArena
from gossipx.model.drift import DriftReference
from gossipx.model.snapshots import CapturedModel, Snapshot
from gossipx.protocol.messages import RoundRequest
from gossipx.runtime.model_transfers import Transfer


@dataclass(frozen=True)
class Retrieval:
    """A received model that was mixed while training.

    Attributes:
        seconds: from the request to the last byte of the reply.
        staleness: this peer's iterations minus the received model's.
        distance: ‖x_j − base‖₂ over the trained values. The base is this peer's model at the time of the request, or of
            the mixing for a pushed model. None if either model is a mean of several peers' models.
        of_centre: whether the model was a hub's centre, before this exchange changed it.
    """

    seconds: float
    staleness: int
    distance: float | None
    of_centre: bool = False


class Captures:
    """Captured models by ticket; each is kept until its ticket is forgotten.

    Args:
        arena: holds the weights that are captured.
        uses_drift: whether the policy uses drift; if not, no model is kept for it.

    Attributes:
        reference: the model from which drift is measured. For the training thread, or others while it waits.
        saved: a captured model from a checkpoint, and its iterations; None without one.
    """

    def __init__(self, arena: ParameterArena, uses_drift: bool):
        self.reference = DriftReference(arena)
        self.saved: tuple[list[Tensor], int] | None = None
        self._arena = arena
        self._uses_drift = uses_drift
        # Both are guarded by the arena's lock, like the reference counts of its snapshots.
        self._captured: dict[int, CapturedModel[Retrieval]] = {}
        self._delivered: deque[CapturedModel[Retrieval]] = deque()  # the last one becomes the reference of drift

    def __len__(self) -> int:
        return len(self._captured)

    def capture(self, ticket: int, saved: bool = False) -> None:
        """Capture the model as of the last step boundary; with ``saved``, the model from the checkpoint if any."""
        if saved and self.saved is not None:
            vectors, step = self.saved
            buffer = self._arena.pool.buffer()
            for target, source in zip(buffer.vectors, vectors, strict=True):
                target.copy_(source)
            self._captured[ticket] = CapturedModel(self._arena.held(buffer, step))
        else:
            self._captured[ticket] = CapturedModel(self._arena.snapshot())

    def base(self, ticket: int) -> Snapshot:
        """Return a reference to the model as of the last step boundary; with drift also capture it as ``ticket``."""
        base = self._arena.snapshot()
        if self._uses_drift:
            with self._arena.lock:
                self._captured[ticket] = CapturedModel(base.hold())
        return base

    def hold(self, ticket: int) -> Snapshot | None:
        """Return a reference to the current state of a captured model; None if it was forgotten."""
        with self._arena.lock:
            captured = self._captured.get(ticket)
            return None if captured is None else captured.now.hold()

    def merge(self, transfer: Transfer, into: int, own: float, theirs: float) -> bool | None:
        """Merge a received model into the one captured under ``into``; see :class:`gossipx.protocol.effects.Merge`.

        Runs outside the training thread. The computation needs no lock: it does not touch the weights, and the role
        allows one merge per captured model at a time.

        Returns:
            Whether the received model was finite; None if the captured model was forgotten.
        """
        before = self.hold(into)
        if before is None:
            transfer.incoming.release()
            return None
        distance = self._arena.merge(transfer.incoming.buffer, before.buffer, own, theirs)
        before.release()
        if math.isnan(distance):
            transfer.incoming.release()
            return False
        in_wave = isinstance(transfer.request, RoundRequest)  # otherwise a hub merges a worker's model into its centre
        step = before.step if in_wave else max(before.step, transfer.their_step)
        merged = self._arena.held(transfer.incoming.give_away(), step)
        staleness = self._arena.step - transfer.their_step
        with self._arena.lock:
            captured = self._captured.get(into)
            if captured is not None:
                two_models = captured.now is captured.base and transfer.weight == 1
                if in_wave:
                    captured.retrievals.append(Retrieval(transfer.seconds, staleness, distance if two_models else None))
                captured.now, merged = merged, captured.now
        merged.release()
        return True

    def take_in(self, ticket: int, training: bool) -> list[Retrieval]:
        """Write the merged model into the weights; see :class:`gossipx.protocol.effects.TakeIn`.

        Args:
            training: whether the peer is training, not in the finish.

        Returns:
            The models that were merged while training.
        """
        with self._arena.lock:
            captured = self._captured.pop(ticket)
        self._arena.take_in(captured.now, captured.base)
        if training and self._uses_drift:
            self.reference.set(captured.now.buffer)
        captured.release()
        return captured.retrievals if training else []

    def forget(self, ticket: int) -> None:
        """Release the model captured under ``ticket``, if any."""
        with self._arena.lock:
            captured = self._captured.pop(ticket, None)
        if captured is not None:
            captured.release()

    # --- drift ------------------------------------------------------------------------------------

    def delivered(self, ticket: int) -> None:
        """Measure drift from the model captured under ``ticket``, which another peer has received."""
        if self._uses_drift:
            with self._arena.lock:
                self._delivered.append(self._captured.pop(ticket))  # the training thread may be using the reference
        else:
            self.forget(ticket)

    def moved(self, transfer: Transfer, share: float, ticket: int | None) -> None:
        """Move the reference of drift after a share of a received model was mixed.

        Args:
            share: the share of the difference that was added to the weights.
            ticket: the ticket under which the base is captured; None: another peer pushed the model, and the current
                reference is moved.
        """
        if not self._uses_drift:
            return
        base = None if ticket is None else self.hold(ticket)
        self.reference.move(transfer.incoming.buffer, share, None if base is None else base.buffer)
        if base is not None:
            base.release()

    def drift(self, pulling: int | None) -> float:
        """Return ‖x_t − x_r‖₂: how far this peer's own steps have moved the model since the last exchange.

        For the training thread only, which owns the reference.

        Args:
            pulling: the ticket of an exchange under way, from whose start drift is measured; None: the last exchange.
        """
        while self._delivered:
            delivered = self._delivered.popleft()
            self.reference.set(delivered.base.buffer)
            delivered.release()
        base = None
        if pulling is not None:
            with self._arena.lock:
                captured = self._captured.get(pulling)
                base = None if captured is None else captured.base.hold()
        if base is None:
            return self.reference.distance()
        distance = self._arena.distance(base.buffer)
        base.release()
        return distance
