"""The stages of a peer's life: which it is in, and what takes it to the next."""

from __future__ import annotations

from typing import Any

from gossipx.actor import Received
from gossipx.effects import Effect, Resume, Wait
from gossipx.messages import LAST_WAVE, ArriveRequest, LeaveRequest, RoundRequest, Stage
from gossipx.peer.exchange import Exchange
from gossipx.peer.gathering import Gathering
from gossipx.peer.joining import Joining
from gossipx.peer.membership import Membership
from gossipx.peer.requests import Requests
from gossipx.peer.settings import PeerSettings
from gossipx.peer.training import Training
from gossipx.peer.waves import Waves

TRAINED = "its training is over"


class Stages:
    """Goes from stage to stage as the role's parts go on; what a part has decided passes through here.

    Args:
        incarnation: tells this life of the peer from an earlier one under the same rank.
        members: the role's; ``requests`` and the parts that decide one matter each, too.
        exchange: None: an exchange is no more than one pull.

    Attributes:
        stage: the one that it is in.
        report: its final figures, once known.
    """

    def __init__(
        self,
        incarnation: int,
        settings: PeerSettings,
        members: Membership,
        requests: Requests,
        gathering: Gathering,
        joining: Joining,
        training: Training,
        waves: Waves,
        exchange: Exchange | None,
    ):
        self.stage = Stage.JOINING
        self.report: dict[str, Any] = {}
        self._incarnation = incarnation
        self._settings = settings
        self._members = members
        self._requests = requests
        self._gathering = gathering
        self._joining = joining
        self._training = training
        self._waves = waves
        self._exchange = exchange

    # --- waiting for the others: START, FINISH, DONE, and JOINING ---------------------------------

    def gather(self, stage: Stage, now: float) -> list[Effect]:
        """Enter ``stage``, tell all others, and wait until they have come too, or peer_timeout has passed."""
        self.stage = stage
        arrival = ArriveRequest(stage, self._incarnation, self.report, self._waves.latest)
        return [*self._gathering.begin(arrival, now), *self.look(now)]

    def look(self, now: float) -> list[Effect]:
        """Something was heard of another, or of its loss: what follows for an exchange, and is a wait over?"""
        looked = self._exchange.look(now) if self._exchange else []
        if not self._gathering.on:
            return self.exchanged(looked, now) if self._exchange and self.stage is Stage.TRAIN else looked
        if self.stage is not Stage.JOINING:
            return [*looked, *(self._gathered(now) if self._gathering.complete() else [])]
        asked = self._joining.ask(now)
        return [*looked, *(self.gather(Stage.START, now) if self._joining.may_begin() else asked)]

    def late(self, now: float) -> list[Effect]:
        """They were waited for long enough."""
        if self.stage is Stage.JOINING:
            return self._joining.late(now) or self.gather(Stage.START, now)
        if self.stage is Stage.FINISH and self._exchange and (self._exchange.attends or self._exchange.awaits_all):
            # One that does not answer will be lost, and waited for no longer.
            return self._gathering.go_on(self._gathering.absent(), now)
        return [*self._gathering.late(), *self._gathered(now)]

    def _gathered(self, now: float) -> list[Effect]:
        self._gathering.end()
        if self.stage is Stage.START:
            self.stage = Stage.TRAIN
            return self.trained(self._training.begin(now), now)
        if self.stage is Stage.FINISH and self._agrees:
            return self._agree(now)
        return [Resume()]  # DONE, or it has only attended

    # --- training ---------------------------------------------------------------------------------

    def trained(self, effects: list[Effect], now: float) -> list[Effect]:
        """Training has gone on; what comes after it is the finish."""
        return [*effects, *self._finish(now)] if self._training.is_over() else effects

    def pulled(self, effects: list[Effect], now: float) -> list[Effect]:
        """A pull has gone on; it may be in an exchange's place."""
        return self.exchanged(effects, now) if self._exchange else effects

    def exchanged(self, effects: list[Effect], now: float) -> list[Effect]:
        """An exchange has gone on; at the end it may turn out that what it was to end with cannot be had."""
        if self.stage is Stage.AGREE:
            assert self._exchange is not None
            forsaken = self._exchange.forsaken is not None and self._waves.current is None
            return [*effects, *self._last_wave(None, now)] if forsaken else effects
        return self.trained(self._training.exchanged(effects), now)

    def adopted(self, effects: list[Effect], now: float) -> list[Effect]:
        """An exchange's model was adopted: if that is what the run ends with, there is no last wave."""
        over = self.stage is Stage.AGREE
        return [*effects, *(self._waves.leave(now, "it has the hub's centre") if over else [])]

    # --- the finish -------------------------------------------------------------------------------

    def _finish(self, now: float) -> list[Effect]:
        refused = self._waves.give_up(TRAINED, now)
        attends = self._exchange is not None and self._exchange.attends
        if not (self._agrees or attends):
            return [*refused, Resume()]
        return [*refused, *self.gather(Stage.FINISH, now)]

    @property
    def _agrees(self) -> bool:
        """Whether it takes part in what the run ends with."""
        return self._settings.finish != "none" and self._training.sound

    def _agree(self, now: float, members: tuple[int, ...] | None = None) -> list[Effect]:
        """Begin the last wave with ``members``; None: all that are here. Or take what the run's mode ends with."""
        self.stage = Stage.AGREE
        if self._exchange and members is None and (asked := self._exchange.agree(now)) is not None:
            return asked
        return self._last_wave(members, now)

    def _last_wave(self, members: tuple[int, ...] | None, now: float) -> list[Effect]:
        weight, without = (self._exchange.weight, self._exchange.forsaken) if self._exchange else (1.0, None)
        return self.waved(self._waves.finish(members, self._training.step, weight, now, without), now)

    # --- waves ------------------------------------------------------------------------------------

    def round_requested(self, event: Received, request: RoundRequest, now: float) -> list[Effect]:
        """Another asks for our model in a wave."""
        waves, last, refusal = self._waves, request.wave == LAST_WAVE, "it takes part in no wave"
        match self.stage:
            case Stage.START | Stage.TRAIN | Stage.FINISH if last:
                waves.hold(event)
                # One that no longer waits for others asks: all must mean the same members, so follow it.
                if self.stage is Stage.FINISH and self._gathering.on and waves.may_join(event):
                    self._gathering.end()
                    return self._agree(now, request.members)
                return []
            case Stage.AGREE | Stage.DONE if last and waves.current is not None:
                return self.waved(waves.current.requested(event, now), now)
            case Stage.AGREE if last:  # it depends on what our exchange ends with
                waves.hold(event)
                return []
            case Stage.START | Stage.TRAIN:
                begun = self.stage is Stage.TRAIN
                return self.trained(self._training.round_requested(event, begun, now), now)
            case Stage.FINISH | Stage.AGREE | Stage.DONE:
                refusal = TRAINED
        return [waves.refuse(event, refusal, now)]

    def waved(self, effects: list[Effect], now: float) -> list[Effect]:
        """A wave has gone on; if it was the last, take its mean in at once."""
        if self.stage is Stage.LEFT:
            return effects
        if self.stage is not Stage.AGREE:
            return self.trained(self._training.waved(effects, now), now)
        last = self._waves.current
        if last is None or not self._waves.over:
            return effects
        return [*effects, *self._waves.take_in(), *([] if last.merged else [Resume()])]

    # --- leaving ----------------------------------------------------------------------------------

    def leave(self, now: float) -> list[Effect]:
        """Take part in nothing any more, and tell the others."""
        self.stage = Stage.LEFT
        self._gathering.end()
        # Models that still come are forgotten: whoever has been told that this peer leaves counts on its last word.
        self._joining.leave()
        dropped = self._training.leave(now)
        deadline = now + self._settings.peer_timeout / 10
        told: list[Effect] = [
            self._requests.send(rank, LeaveRequest(), now, deadline) for rank in self._members.awaited()
        ]
        return [Wait(), *dropped, *told, *self._waves.leave(now), *self.gone_if_told()]

    def gone_if_told(self) -> list[Effect]:
        """Resume once every peer that could be told has been told."""
        telling = self._requests.asked(LeaveRequest)
        return [] if telling or self.stage is not Stage.LEFT else [Resume()]
