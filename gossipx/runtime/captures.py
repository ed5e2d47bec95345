"""Models of a peer as they were captured, and what has become of them since; and what drift counts from."""

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
    """One model that was mixed while training.

    Attributes:
        seconds: from the request to the last byte.
        staleness: own iterations minus those that the model had seen.
        distance: ‖x_j − base‖₂ over the trained values, the base being the own model as of the request, or when a push
            is mixed; None where either is a mean of several peers' models.
        of_centre: it was a hub's centre, as it was before this exchange.
    """

    seconds: float
    staleness: int
    distance: float | None
    of_centre: bool = False


class Captures:
    """Captured models by ticket; each is held until it is forgotten.

    Args:
        arena: whose models they are.
        uses_drift: whether the policy does; else none is kept for it.

    Attributes:
        reference: what drift counts from; for the training thread, or while it waits.
        saved: a held model that a checkpoint has kept, and the iterations that it has seen.
    """

    def __init__(self, arena: ParameterArena, uses_drift: bool):
        self.reference = DriftReference(arena)
        self.saved: tuple[list[Tensor], int] | None = None
        self._arena = arena
        self._uses_drift = uses_drift
        # Guarded by the arena's lock, as what its snapshots are held for:
        self._held: dict[int, CapturedModel[Retrieval]] = {}
        self._given: deque[CapturedModel[Retrieval]] = deque()  # drift is to count from the last of these

    def __len__(self) -> int:
        return len(self._held)

    def capture(self, ticket: int, saved: bool = False) -> None:
        """Hold the model as of the last step boundary; or (``saved``) what a checkpoint has kept, if it has."""
        if saved and self.saved is not None:
            vectors, step = self.saved
            buffer = self._arena.pool.buffer()
            for own, kept in zip(buffer.vectors, vectors, strict=True):
                own.copy_(kept)
            self._held[ticket] = CapturedModel(self._arena.held(buffer, step))
        else:
            self._held[ticket] = CapturedModel(self._arena.snapshot())

    def base(self, ticket: int) -> Snapshot:
        """The model as of the last boundary, held for the caller, and where the policy uses drift under ``ticket``."""
        base = self._arena.snapshot()
        if self._uses_drift:
            with self._arena.lock:
                self._held[ticket] = CapturedModel(base.hold())
        return base

    def hold(self, ticket: int) -> Snapshot | None:
        """What is held under ``ticket`` by now; release it after use. None: it was forgotten."""
        with self._arena.lock:
            held = self._held.get(ticket)
            return None if held is None else held.now.hold()

    def merge(self, transfer: Transfer, into: int, own: float, theirs: float) -> bool | None:
        """Merge a model into the one held under ``into``; see :class:`gossipx.protocol.effects.Merge`.

        Outside the training thread, and with no lock: no weights are touched, and nobody else merges into it meanwhile.

        Returns:
            Whether it was finite; None: what it was to be merged into was forgotten.
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
        in_wave = isinstance(transfer.request, RoundRequest)  # else it is the centre that has seen as much as the most
        step = before.step if in_wave else max(before.step, transfer.their_step)
        merged = self._arena.held(transfer.incoming.give_away(), step)
        staleness = self._arena.step - transfer.their_step
        with self._arena.lock:
            held = self._held.get(into)
            if held is not None:
                two_models = held.now is held.base and transfer.weight == 1
                if in_wave:
                    held.retrievals.append(Retrieval(transfer.seconds, staleness, distance if two_models else None))
                held.now, merged = merged, held.now
        merged.release()
        return True

    def take_in(self, ticket: int, training: bool) -> list[Retrieval]:
        """Put what is held in the captured model's place; see :class:`gossipx.protocol.effects.TakeIn`.

        Args:
            training: whether the run is at that, and not at its end.
        """
        with self._arena.lock:
            held = self._held.pop(ticket)
        self._arena.take_in(held.now, held.base)
        if training and self._uses_drift:
            self.reference.set(held.now.buffer)
        held.release()
        return held.retrievals if training else []

    def forget(self, ticket: int) -> None:
        """What is held under ``ticket`` is no longer needed."""
        with self._arena.lock:
            held = self._held.pop(ticket, None)
        if held is not None:
            held.release()

    # --- drift ------------------------------------------------------------------------------------

    def given(self, ticket: int) -> None:
        """The model captured under ``ticket`` has been given away: drift counts from it."""
        if self._uses_drift:
            with self._arena.lock:
                self._given.append(self._held.pop(ticket))  # the training thread may be at work on the reference
        else:
            self.forget(ticket)

    def moved(self, transfer: Transfer, share: float, ticket: int | None) -> None:
        """A share of a model was mixed.

        Args:
            ticket: under which its base is held; None: another has pushed it, and drift goes on from where it began.
        """
        if not self._uses_drift:
            return
        base = None if ticket is None else self.hold(ticket)
        self.reference.move(transfer.incoming.buffer, share, None if base is None else base.buffer)
        if base is not None:
            base.release()

    def drift(self, pulling: int | None) -> float:
        """‖x_t − x_r‖₂, the way that own steps have led since the last exchange.

        For the training thread, which alone works on the reference.

        Args:
            pulling: the ticket of an exchange under way, which drift counts from.
        """
        while self._given:
            given = self._given.popleft()
            self.reference.set(given.base.buffer)
            given.release()
        base = None
        if pulling is not None:
            with self._arena.lock:
                held = self._held.get(pulling)
                base = None if held is None else held.base.hold()
        if base is None:
            return self.reference.distance()
        distance = self._arena.distance(base.buffer)
        base.release()
        return distance
