"""The stages of a peer's life: the one that it is in, and the steps from each to the next."""

from __future__ import annotations

from typing import Any

from gossipx.peer.barrier import Barrier
from gossipx.peer.exchange import Exchange
from gossipx.peer.joining import Joining
from gossipx.peer.membership import Membership, Requests
from gossipx.peer.server_role import ServerRole
from gossipx.peer.settings import PeerSettings
from gossipx.peer.training import Training
from gossipx.peer.waves import Waves
from gossipx.protocol.effects import Effect, Resume, Wait
from gossipx.protocol.events import Received
from gossipx.protocol.messages import LAST_WAVE, ArriveRequest, LeaveRequest, RoundRequest, Stage

TRAINED = "its training is over"


class Stages:
    """Takes a peer from stage to stage. What follows from an event is decided in one place, :meth:`follow`.

    Args:
        incarnation: tells this life of the peer from an earlier one under the same rank.
        members: the role's; ``requests`` and the parts that decide one matter each, too.

    Attributes:
        stage: the current one.
        report: the peer's final figures, once known.
    """

    def __init__(
        self,
        incarnation: int,
        settings: PeerSettings,
        members: Membership,
        requests: Requests,
        barrier: Barrier,
        joining: Joining,
        training: Training,
        waves: Waves,
        exchange: Exchange,
        server: ServerRole,
    ):
        self.stage = Stage.JOINING
        self.report: dict[str, Any] = {}
        self._incarnation = incarnation
        self._settings = settings
        self._members = members
        self._requests = requests
        self._barrier = barrier
        self._joining = joining
        self._training = training
        self._waves = waves
        self._exchange = exchange
        self._server = server

    def follow(self, now: float) -> list[Effect]:
        """Return what follows, in this stage and the next ones, from what has just happened."""
        effects: list[Effect] = []
        while True:
            stage = self.stage
            followed = self._follow(now)
            effects += followed
            if not followed and self.stage is stage:
                return effects

    def _follow(self, now: float) -> list[Effect]:
        last = self._waves.current
        match self.stage:
            case Stage.TRAIN:
                followed = self._training.follow(now)
                return self._finish(now) if self._training.over and not followed else followed
            case Stage.AGREE if last is None:
                # The model that the run was to end with may be unavailable.
                return [] if self._server.forsaken is None else self._last_wave(None, now)
            case Stage.AGREE if last is not None and self._waves.over:
                return [*self._waves.take_in(), *([] if last.merged else [Resume()])]
            case Stage.JOINING if self._barrier.on:
                if asked := self._joining.ask(now):
                    return asked
                return self.enter_barrier(Stage.START, now) if self._joining.may_begin() else []
            case Stage.START | Stage.FINISH | Stage.DONE if self._barrier.on and self._barrier.complete():
                return self._barrier_passed(now)
        return []

    # --- waiting for the others: START, FINISH, DONE, and JOINING ---------------------------------

    def enter_barrier(self, stage: Stage, now: float) -> list[Effect]:
        """Enter ``stage``, tell all others, and wait until they have come too, or peer_timeout has passed."""
        self.stage = stage
        arrival = ArriveRequest(stage, self._incarnation, self.report, self._waves.latest)
        return [*self._barrier.begin(arrival, now), *self._server.look(now)]

    def late(self, now: float) -> list[Effect]:
        """Stop waiting for the others: it has been long enough."""
        if self.stage is Stage.JOINING:
            return self._joining.late(now) or self.enter_barrier(Stage.START, now)
        if self.stage is Stage.FINISH and (self._server.attends or self._server.awaits_all):
            # One that does not answer will be lost, and waited for no longer.
            return self._barrier.go_on(self._barrier.absent(), now)
        return [*self._barrier.late(), *self._barrier_passed(now)]

    def _barrier_passed(self, now: float) -> list[Effect]:
        self._barrier.end()
        if self.stage is Stage.START:
            self.stage = Stage.TRAIN
            return [*self._server.begun(now), *self._training.begin(now)]
        if self.stage is Stage.FINISH and self._agrees:
            return self._agree(now)
        return [Resume()]  # DONE, or it has only attended

    # --- the finish -------------------------------------------------------------------------------

    def _finish(self, now: float) -> list[Effect]:
        self._training.over = False
        refused = self._waves.give_up(TRAINED, now)
        if not (self._agrees or self._server.attends):
            return [*refused, Resume()]
        return [*refused, *self.enter_barrier(Stage.FINISH, now)]

    @property
    def _agrees(self) -> bool:
        """Whether it takes part in what the run ends with."""
        return self._settings.finish != "none" and self._training.sound

    def _agree(self, now: float, members: tuple[int, ...] | None = None) -> list[Effect]:
        """Begin the last wave with ``members``; None: all that are here. Or take what the run's mode ends with."""
        self.stage = Stage.AGREE
        if members is None and (asked := self._server.agree(now)) is not None:
            return asked
        return self._last_wave(members, now)

    def _last_wave(self, members: tuple[int, ...] | None, now: float) -> list[Effect]:
        return self._waves.finish(members, self._training.step, self._exchange.weight, now, self._server.forsaken)

    # --- waves ------------------------------------------------------------------------------------

    def round_requested(self, event: Received, request: RoundRequest, now: float) -> list[Effect]:
        """Another asks for our model in a wave."""
        waves, last, refusal = self._waves, request.wave == LAST_WAVE, "it takes part in no wave"
        match self.stage:
            case Stage.START | Stage.TRAIN | Stage.FINISH if last:
                waves.hold(event)
                # One that no longer waits for others asks: all must mean the same members, so follow it.
                if self.stage is Stage.FINISH and self._barrier.on and waves.may_join(event):
                    self._barrier.end()
                    return self._agree(now, request.members)
                return []
            case Stage.AGREE | Stage.DONE if last and waves.current is not None:
                return waves.current.requested(event, now)
            case Stage.AGREE if last:  # it depends on what our exchange ends with
                waves.hold(event)
                return []
            case Stage.START | Stage.TRAIN:
                return self._training.round_requested(event, self.stage is Stage.TRAIN, now)
            case Stage.FINISH | Stage.AGREE | Stage.DONE:
                refusal = TRAINED
        return [waves.refuse(event, refusal, now)]

    # --- leaving ----------------------------------------------------------------------------------

    def leave(self, now: float) -> list[Effect]:
        """Take part in nothing any more, and tell the others."""
        self.stage = Stage.LEFT
        self._barrier.end()
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
