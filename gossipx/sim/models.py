"""The models of one peer in virtual time: those that come, those that are held, and what drift counts from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gossipx.compression import ModelSink, UploadedModelSink
from gossipx.model.arena import ParameterArena
from gossipx.model.drift import DriftReference
from gossipx.model.receive import Incoming
from gossipx.model.snapshots import CapturedModel, Snapshot
from gossipx.peer import PeerRole
from gossipx.protocol import effects, events
from gossipx.protocol.messages import ElasticRequest, PullRequest, RoundRequest, Stage, TakeRequest


@dataclass
class Exchange:
    """A request of ours: open until it is answered or has failed, kept until it is forgotten."""

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
    """One model mixed, or merged in a wave, while training: at ``time``, after own iteration ``step``.

    ``seconds`` from the request to the last byte; ``staleness`` own iterations minus the model's; ``distance``
    ‖x_j − base‖₂ over the trained values.
    """

    time: float
    step: int
    sender: int
    seconds: float
    staleness: int
    distance: float


class SimModels:
    """What of a peer's effects is about models.

    Args:
        role: the peer's.
        arena: its weights.
        note: told of what happens, for the log.
        tell: told of what has come of an effect.

    Attributes:
        held: captured models, by ticket.
        reference: what drift counts from.
        retrievals: models that were mixed, or merged in a wave, while training.
    """

    def __init__(
        self,
        role: PeerRole,
        arena: ParameterArena,
        note: Callable[[str], None],
        tell: Callable[[events.Event], None],
    ):
        self.captures: dict[int, CapturedModel[Retrieval]] = {}
        self.reference = DriftReference(arena)
        self.retrievals: list[Retrieval] = []
        self._role = role
        self._arena = arena
        self._note = note
        self._tell = tell

    # --- held models ------------------------------------------------------------------------------

    def capture(self, ticket: int) -> None:
        """Hold the model as of the last step boundary."""
        self.captures[ticket] = CapturedModel(self._arena.snapshot())

    def base(self, send: effects.Send) -> Snapshot | None:
        """What the model that is asked for is compared with, held; None: it is kept as it comes."""
        match send.request:
            case TakeRequest():
                held = self.captures.get(send.ticket)
                return None if held is None else held.base.hold()
            case PullRequest() | ElasticRequest():
                if self._role.sync.policy.uses_drift:
                    self.captures[send.ticket] = CapturedModel(self._arena.snapshot())
                return self._arena.snapshot()
            case _:
                return None

    def forget(self, ticket: int) -> None:
        """What is held under ``ticket`` is no longer needed."""
        if held := self.captures.pop(ticket, None):
            held.release()

    # --- models that come -------------------------------------------------------------------------

    def mix(self, ticket: int, exchange: Exchange, share: float, now: float) -> None:
        """Mix the model that is under ``ticket``."""
        assert exchange.incoming is not None
        distance = exchange.incoming.norm()
        if math.isnan(distance):
            self._note(f"refuses the model of {exchange.send.to}")
            self._tell(events.Poisoned(ticket))
        else:
            if not exchange.incoming.compares:
                distance = self._arena.subtract(exchange.incoming.buffer)
            self._arena.commit(exchange.incoming.buffer, share)
            self._note(f"mixes {exchange.send.to}")
            if isinstance(exchange.send.request, PullRequest | TakeRequest | ElasticRequest):
                self._retrieved(exchange, distance, share, now)
            self._tell(events.Mixed(ticket))

    def _retrieved(self, exchange: Exchange, distance: float, share: float, now: float) -> None:
        step = self._arena.step
        staleness = step - exchange.their_step
        seconds = exchange.arrived - exchange.began
        self.retrievals.append(Retrieval(now, step, exchange.send.to, seconds, staleness, distance))
        if self._role.sync.policy.uses_drift:
            assert exchange.incoming is not None  # it holds the difference now, of which a share was added
            own = exchange.send.ticket == self._role.pulling  # else another has pushed it
            base = self.captures[exchange.send.ticket].base.buffer if own else None
            self.reference.move(exchange.incoming.buffer, share, base)

    def merge(self, exchange: Exchange, merge: effects.Merge, now: float) -> None:
        """Merge a model into a held one."""
        held = self.captures[merge.into]
        assert exchange.incoming is not None
        distance = self._arena.merge(exchange.incoming.buffer, held.now.buffer, merge.own, merge.theirs)
        sound = not math.isnan(distance)
        in_wave = isinstance(exchange.send.request, RoundRequest)
        taken = "mixes" if in_wave else "takes in"
        self._note(f"{taken if sound else 'refuses the model of'} {exchange.send.to}")
        if sound:
            seconds = exchange.arrived - exchange.began
            staleness = self._arena.step - exchange.their_step
            found = Retrieval(now, self._arena.step, exchange.send.to, seconds, staleness, distance)
            if in_wave:
                held.retrievals.append(found)
            step = held.base.step if in_wave else max(held.now.step, exchange.their_step)
            held.now.release()
            held.now = self._arena.held(exchange.incoming.give_away(), step)
        self._tell(events.Merged(merge.ticket, merge.into, sound))

    def take_in(self, ticket: int) -> None:
        """Put what is held in the captured model's place."""
        held = self.captures[ticket]
        self._arena.take_in(held.now, held.base)
        self._note("takes the mean in")
        if self._role.stage is Stage.TRAIN:
            self.retrievals += held.retrievals
            if self._role.sync.policy.uses_drift:
                self.reference.set(held.now.buffer)
        self._tell(events.Mixed(ticket))

    def adopt(self, ticket: int, exchange: Exchange, step: int) -> None:
        """Begin with the model that is under ``ticket``."""
        assert exchange.incoming is not None
        taken = self._arena.adopt(exchange.incoming.buffer, step)
        self._note(f"{'adopts' if taken else 'refuses'} the model of {exchange.send.to}")
        self._tell(events.Mixed(ticket) if taken else events.Poisoned(ticket))

    # --- drift ------------------------------------------------------------------------------------

    def given(self, ticket: int) -> None:
        """The model captured under ``ticket`` has been given away: drift counts from it."""
        if self._role.sync.policy.uses_drift:
            self.reference.set(self.captures[ticket].base.buffer)

    def drift(self) -> float | None:
        """‖x_t − x_r‖₂: from the request that is under way, which is forgotten if it fails, or the last retrieval."""
        if not self._role.sync.policy.uses_drift:
            return None
        held = None if self._role.pulling is None else self.captures.get(self._role.pulling)
        return self.reference.distance() if held is None else self._arena.distance(held.base.buffer)
