"""The models of one simulated peer: received models, captured models, and the reference of drift.

Drift, ‖x_t − x_r‖₂, is the distance from the model at the last exchange. It corresponds to
:mod:`gossipx.runtime.captures` and :mod:`gossipx.runtime.driver`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gossipx.compression import Coded, ModelSink, UploadedModelSink, WaveSink
from gossipx.model.arena import ParameterArena
from gossipx.model.drift import DriftReference
from gossipx.model.receive import Incoming
from gossipx.model.snapshots import CapturedModel, Snapshot
from gossipx.peer import PeerRole
from gossipx.protocol import effects, events
from gossipx.protocol.messages import ElasticRequest, PullRequest, RoundRequest, Stage, TakeRequest, fragment_of


@dataclass
class Exchange:
    """One request that this peer sent, or an upload that it received; stored until the role forgets its ticket.

    Attributes:
        send: the effect that sent it.
        began: virtual time of the request.
        incoming: the buffer for the model; None: the exchange has no model.
        open: whether the reply is still awaited.
        their_step: iterations that the received model had done.
        arrived: virtual time of the last byte.
        model_sink: decodes the reply; None: no codec.
        upload_sink: decodes the upload; None: no codec.
    """

    send: effects.Send
    began: float
    incoming: Incoming | None
    open: bool = True
    their_step: int = 0
    arrived: float = 0.0
    model_sink: ModelSink | None = None
    upload_sink: UploadedModelSink | None = None


@dataclass(frozen=True)
class Retrieval:
    """A received model that was mixed, or merged in a wave, while training.

    Attributes:
        time: virtual time of the mixing.
        step: this peer's iteration.
        sender: rank of the model's peer.
        seconds: from the request to the last byte.
        staleness: this peer's iterations minus the model's.
        distance: ‖x_j − base‖₂ over the trained values; of a fragment, the estimate for the model that it gives.
    """

    time: float
    step: int
    sender: int
    seconds: float
    staleness: int
    distance: float | None


class SimModels:
    """Carries out a peer's effects on models.

    Args:
        role: the peer's role.
        arena: the peer's weights.
        codec: encodes models; None: they are sent as raw values.
        note: adds a line to the log.
        handle: called with the events that result from an effect.

    Attributes:
        captures: captured models by ticket.
        reference: the model from which drift is measured.
        retrievals: models that were mixed, or merged in a wave, while training.
    """

    def __init__(
        self,
        role: PeerRole,
        arena: ParameterArena,
        codec: Coded | None,
        note: Callable[[str], None],
        handle: Callable[[events.Event], None],
    ):
        self.captures: dict[int, CapturedModel[Retrieval]] = {}
        self.reference = DriftReference(arena)
        self.retrievals: list[Retrieval] = []
        self._role = role
        self._arena = arena
        self._codec = codec
        self._note = note
        self._handle = handle

    # --- captured models --------------------------------------------------------------------------

    def capture(self, ticket: int, fragment: int) -> None:
        """Capture the model, or a fragment of it, as of the last step boundary under ``ticket``."""
        self.captures[ticket] = CapturedModel(self._arena.snapshot(of=self._arena.fragment(fragment)))
        if self._codec is not None:
            self._codec.captured(ticket, fragment)

    def snapshot_base(self, send: effects.Send) -> Snapshot | None:
        """Return a snapshot of the model that the requested one is subtracted from; the caller must release it.

        None: the requested model is stored as received.
        """
        match send.request:
            case TakeRequest() if self._codec is None or not self._codec.in_pairs:
                captured = self.captures.get(send.ticket)
                return None if captured is None else captured.base.hold()
            case PullRequest() | ElasticRequest():
                fragment = self._arena.fragment(fragment_of(send.request))
                base = self._arena.snapshot(of=fragment)
                if self._role.sync.policy.uses_drift or fragment.outer is not None:
                    self.captures[send.ticket] = CapturedModel(base.hold())
                return base
            case _:
                return None

    def forget(self, ticket: int) -> None:
        """Release the model captured under ``ticket``, if any."""
        if captured := self.captures.pop(ticket, None):
            captured.release()

    # --- received models --------------------------------------------------------------------------

    def mix(self, ticket: int, exchange: Exchange, share: float, now: float) -> None:
        """Mix a share of a received model into the weights, or refuse it if it has a NaN."""
        assert exchange.incoming is not None
        fragment, distance = exchange.incoming.fragment, exchange.incoming.norm()
        if math.isnan(distance):
            self._note(f"refuses the model of {exchange.send.to}")
            self._handle(events.Poisoned(ticket))
        else:
            own = ticket == self._role.pulling  # otherwise another peer pushed the model
            if not exchange.incoming.compares:
                codec = self._codec if own else None
                sent = None if codec is None else codec.of(fragment.number).sent(exchange.send.to)
                distance = fragment.subtract(exchange.incoming.buffer, base=sent)
            captured = self.captures.get(ticket) if own else None
            base = None if captured is None else captured.base
            target = self.reference if self._role.sync.policy.uses_drift else fragment
            target.commit(exchange.incoming.buffer, share, base)
            self._note(f"mixes {exchange.send.to}")
            if isinstance(exchange.send.request, PullRequest | TakeRequest | ElasticRequest):
                self._retrieved(exchange, fragment.distance_of_model(distance), now)
            self._handle(events.Mixed(ticket))

    def _retrieved(self, exchange: Exchange, distance: float | None, now: float) -> None:
        step = self._arena.step
        staleness = step - exchange.their_step
        seconds = exchange.arrived - exchange.began
        self.retrievals.append(Retrieval(now, step, exchange.send.to, seconds, staleness, distance))

    def merge(self, exchange: Exchange, merge: effects.Merge, now: float) -> None:
        """Merge a received model into a captured one, or refuse it if it has a NaN."""
        captured = self.captures[merge.into]
        assert exchange.incoming is not None
        fragment = exchange.incoming.fragment
        if isinstance(exchange.model_sink, WaveSink):
            distance = exchange.model_sink.merge(merge.into, captured.now.buffer, merge.own, merge.theirs)
        else:
            distance = fragment.merge(exchange.incoming.buffer, captured.now.buffer, merge.own, merge.theirs)
        sound = not math.isnan(distance)
        in_wave = isinstance(exchange.send.request, RoundRequest)
        taken = "mixes" if in_wave else "takes in"
        self._note(f"{taken if sound else 'refuses the model of'} {exchange.send.to}")
        if sound:
            seconds = exchange.arrived - exchange.began
            staleness = self._arena.step - exchange.their_step
            estimate = fragment.distance_of_model(distance)
            retrieval = Retrieval(now, self._arena.step, exchange.send.to, seconds, staleness, estimate)
            if in_wave:
                captured.retrievals.append(retrieval)
            step = captured.base.step if in_wave else max(captured.now.step, exchange.their_step)
            captured.now.release()
            captured.now = fragment.snapshot_of(exchange.incoming.give_away(), step)
        self._handle(events.Merged(merge.ticket, merge.into, sound))

    def apply_merged(self, ticket: int) -> None:
        """Write a merged model into the weights."""
        captured = self.captures[ticket]
        training = self._role.stage is Stage.TRAIN
        if self._codec is not None:
            self._codec.wave_ended(ticket, captured.now)
        if training and self._role.sync.policy.uses_drift:
            self.reference.apply_merged(captured.now, captured.base)
        else:
            fragment = self._arena.fragment(captured.now.buffer.fragment)
            fragment.apply_merged(captured.now, captured.base, training)
        self._note("takes the mean in")
        if training:
            self.retrievals += captured.retrievals
        self._handle(events.Mixed(ticket))

    def adopt(self, ticket: int, exchange: Exchange, step: int) -> None:
        """Replace the weights with a received model, or refuse it if it has a NaN."""
        assert exchange.incoming is not None
        taken = self._arena.adopt(exchange.incoming.buffer, step)
        self._note(f"{'adopts' if taken else 'refuses'} the model of {exchange.send.to}")
        self._handle(events.Mixed(ticket) if taken else events.Poisoned(ticket))

    # --- drift ------------------------------------------------------------------------------------

    def record_delivery(self, ticket: int) -> None:
        """Measure drift from the model captured under ``ticket``, which another peer has received."""
        if self._role.sync.policy.uses_drift:
            self.reference.set(self.captures[ticket].base.buffer)

    def drift(self) -> float | None:
        """Return ‖x_t − x_r‖₂ since the exchange that is under way, or else since the last one.

        None: the policy does not use drift.
        """
        if not self._role.sync.policy.uses_drift:
            return None
        captured = None if self._role.pulling is None else self.captures.get(self._role.pulling)
        return self.reference.distance(None if captured is None else captured.base.buffer)
