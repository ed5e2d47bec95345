"""Captured models of this peer: snapshots that an exchange works on while training continues.

An exchange that averages, such as a wave, captures this peer's model, merges received models into the captured one, and
at last writes the result into the weights. A hub's centre is such a captured model, too. Captured models are stored by
*ticket*, a number that the role (:mod:`gossipx.peer`) allocates for each request and each model.

*Drift*, ‖x_t − x_r‖₂, is the distance that this peer's own steps have moved its model since the last exchange; some
policies use it. This module also keeps its reference x_r.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gossipx.figures import Counters
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import CapturedModel, HostBuffer, Snapshot
from gossipx.model.receive import DriftReference
from gossipx.protocol.messages import WHOLE, RoundRequest
from gossipx.runtime.driver.transfers import ReceivedModel


@dataclass(frozen=True)
class Retrieval:
    """The measurements of one received model x_j that was mixed in during training.

    Attributes:
        seconds: time from the request to the last byte of the reply.
        staleness: number of iterations of this peer minus that of the received model.
        distance: ‖x_j − base‖₂ over the trained values. The base is this peer's model at the time of the request; for a
            pushed model, at the time of mixing. Of a fragment, it is the estimate for the whole model that Eq. 8 needs
            (:meth:`gossipx.model.arena.Fragment.distance_of_model`). None: one of the two models is a mean of
            several peers' models, or the fragment has no trained values.
        sender: rank of the model's peer; None: unknown.
        of_centre: whether the model was a hub's centre, as it was before this exchange changed it.
    """

    seconds: float
    staleness: int
    distance: float | None
    sender: int | None
    of_centre: bool = False


class Captures:
    """Stores captured models by ticket, until they are written into the weights or forgotten.

    Args:
        arena: holds the weights that are captured.
        uses_drift: whether the policy uses drift; if not, no model is kept to measure it.
        outliers: judges the models that are merged.

    Attributes:
        reference: x_r, from which drift is measured. Only the training thread may use it, or others while that waits.
        saved: the captured model in the checkpoint that the peer resumed from (a hub's centre), as vectors and number
            of iterations; None: the checkpoint has none.
    """

    def __init__(self, arena: ParameterArena, uses_drift: bool, outliers: Outliers):
        self._outliers = outliers
        self.reference = DriftReference(arena)
        self.saved: tuple[list[Tensor], int] | None = None
        self._arena = arena
        self._uses_drift = uses_drift
        # Both are guarded by the arena's lock, like the reference counts of its snapshots.
        self._captured: dict[int, CapturedModel[Retrieval]] = {}
        self._delivered: deque[CapturedModel[Retrieval]] = deque()  # pushed models; the last one becomes x_r

    def __len__(self) -> int:
        return len(self._captured)

    def capture(self, ticket: int, saved: bool = False, fragment: int = WHOLE) -> None:
        """Capture the model of the last step boundary under ``ticket``.

        Args:
            saved: capture the model in :attr:`saved` instead, if there is one.
            fragment: number of the part that is captured.
        """
        if saved and self.saved is not None:
            vectors, step = self.saved
            buffer = self._arena.pool.buffer()
            for target, source in zip(buffer.vectors, vectors, strict=True):
                target.copy_(source)
            self._captured[ticket] = CapturedModel(self._arena.exchanged.snapshot_of(buffer, step))
        else:
            self._captured[ticket] = CapturedModel(self._arena.snapshot(of=self._arena.fragment(fragment)))

    def snapshot_base(self, ticket: int, number: int) -> Snapshot:
        """Return a snapshot of the last step boundary, which will be subtracted from the received model.

        If drift is used, also capture the snapshot under ``ticket``, as the next x_r, and for an outer optimizer as
        y_t. The caller must release the result.

        Args:
            number: that of the fragment which is received.
        """
        fragment = self._arena.fragment(number)
        base = self._arena.snapshot(of=fragment)
        if self._uses_drift or fragment.outer is not None:
            with self._arena.lock:
                self._captured[ticket] = CapturedModel(base.hold())
        return base

    def hold(self, ticket: int) -> Snapshot | None:
        """Return a captured model, with all merges so far; the caller must release it. None: it was forgotten."""
        with self._arena.lock:
            captured = self._captured.get(ticket)
            return None if captured is None else captured.now.hold()

    def merge(self, model: ReceivedModel, into: int, own: float, theirs: float) -> bool | None:
        """Merge a received model x_j into a captured model h: h ← (own · h + theirs · x_j) / (own + theirs).

        This implements :class:`gossipx.protocol.effects.Merge`, outside the training thread. The computation needs no
        lock: it does not touch the weights, and the role allows one merge per captured model at a time.

        Args:
            model: holds x_j; its memory is taken or released.
            into: ticket of h.
            own: weight of h.
            theirs: weight of x_j.

        Returns:
            Whether x_j was finite; if not, h is unchanged. None: h was forgotten.
        """
        before = self.hold(into)
        if before is None:
            model.incoming.release()
            return None
        fragment = model.incoming.fragment
        with self._arena.lock:
            captured = self._captured.get(into)
            before_is_base = captured is not None and captured.now is captured.base
        distance = fragment.merge(model.incoming.buffer, before.buffer, own, theirs)
        before.release()
        if math.isnan(distance):
            model.incoming.release()
            return False
        in_finish = isinstance(model.request, RoundRequest)  # else a hub merges a worker's model into its centre
        step = before.step if in_finish else max(before.step, model.their_step)
        merged = fragment.snapshot_of(model.incoming.give_away(), step)
        judged = in_finish and model.weight == 1 and before_is_base
        self._outliers.judge(fragment.distance_of_model(distance) if judged else None, model.sender)
        self._put(into, merged)
        return True

    def replace(self, ticket: int, model: HostBuffer, retrieval: Retrieval) -> None:
        """Let ``model``, the result of a wave, be what :meth:`apply_merged` writes for a captured model."""
        before = self.hold(ticket)
        if before is None:
            return
        fragment = self._arena.fragment(model.fragment)
        self._put(ticket, fragment.snapshot_of(model, before.step), retrieval)
        before.release()

    def _put(self, ticket: int, model: Snapshot, *retrievals: Retrieval) -> None:
        with self._arena.lock:
            captured = self._captured.get(ticket)
            if captured is not None:
                captured.retrievals.extend(retrievals)
                captured.now, model = model, captured.now
        model.release()

    def apply_merged(self, ticket: int, training: bool) -> list[Retrieval]:
        """Write the result of all merges into the weights; see :class:`gossipx.protocol.effects.ApplyWave`.

        Steps that were made since the capture are kept. The ticket is released.

        Args:
            training: whether the peer still trains; False: this is the average at the finish.

        Returns:
            The measurements of the merged models; none at the finish.
        """
        with self._arena.lock:
            captured = self._captured.pop(ticket)
        if training and self._uses_drift:
            self.reference.apply_merged(captured.now, captured.base)
        else:
            fragment = self._arena.fragment(captured.now.buffer.fragment)
            fragment.apply_merged(captured.now, captured.base, training)
        captured.release()
        return captured.retrievals if training else []

    def forget(self, ticket: int) -> None:
        """Release the model captured under ``ticket``, if any."""
        with self._arena.lock:
            captured = self._captured.pop(ticket, None)
        if captured is not None:
            captured.release()

    # --- drift ------------------------------------------------------------------------------------

    def record_delivery(self, ticket: int) -> None:
        """Record that another peer has received the model captured under ``ticket``, which becomes x_r."""
        if self._uses_drift:
            with self._arena.lock:
                self._delivered.append(self._captured.pop(ticket))  # not x_r yet: the training thread may be reading it
        else:
            self.forget(ticket)

    def commit(self, model: ReceivedModel, share: float, ticket: int | None) -> None:
        """Mix a received model into the weights.

        Args:
            model: holds the difference of the received model to its base.
            share: the share of this difference that is added to the weights.
            ticket: ticket under which the base may be captured; None: another peer pushed the model.
        """
        difference = model.incoming.buffer
        base = None if ticket is None else self.hold(ticket)
        (self.reference if self._uses_drift else model.incoming.fragment).commit(difference, share, base)
        if base is not None:
            base.release()

    def drift(self, pulling: int | None) -> float:
        """Return the drift ‖x_t − x_r‖₂. Only the training thread may call this.

        Args:
            pulling: ticket of an exchange under way; drift is then measured from its start instead of x_r. None: no
                exchange is under way.
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
        distance = self.reference.distance(None if base is None else base.buffer)
        if base is not None:
            base.release()
        return distance


RECENT = 16
"""Number of distances that a new one is compared with."""
LEAST = 4
"""Number of distances before the first judgement: all peers may begin with one model, at a distance of 0."""
FACTOR = 10.0
"""A model is an outlier only if it is farther away than this many times the largest recent distance."""
NORMS = 2.0
"""And only if it is farther away than this many times the norm of our model.

The distance alone also grows from one retrieval to the next where a schedule starts the learning rate again, but stays
far below the norm. And if it is our model that is damaged, all others are at a distance of its norm.
"""


class Outliers:
    """The judgement of received models, one after the other.

    Args:
        arena: this peer's model.
        note: logs a text on a topic.
        counts: gets the number of outliers.
    """

    def __init__(self, arena: ParameterArena, note: Callable[[str, str], None], counts: Counters):
        self._counts = counts
        self._arena = arena
        self._note = note
        self._recent: deque[float] = deque(maxlen=RECENT)

    def judge(self, distance: float | None, sender: int | None) -> None:
        """Judge a model of ``sender`` by its distance from ours, ‖x_j − x_i‖₂; None: the distance is not known.

        An outlier is mixed in like any model, which moves ours, and so becomes one of the recent distances: of a peer
        that stays away, only the first model is counted.
        """
        if distance is None:
            return
        largest = max(self._recent, default=0.0)
        if len(self._recent) >= LEAST and distance > FACTOR * largest and distance > NORMS * self._norm():
            self._counts.add("outliers")
            if self._counts["outliers"] == 1:
                times = f"more than {FACTOR:g} times as far from ours as the last {len(self._recent)} models"
                text = (
                    f"the model of peer {sender} is {times}: it is mixed in, and counted in outliers; look at that peer"
                )
                self._note("outlier", text)
        self._recent.append(distance)

    def _norm(self) -> float:
        """Return ‖x_i‖₂ over the trained values."""
        norms = [torch.linalg.vector_norm(s.values[: s.trainable], dtype=torch.float64) for s in self._arena.sections]
        return math.hypot(*map(float, norms))
