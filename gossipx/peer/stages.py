"""Stage transitions: the current stage of a peer, and what leads from each stage to the next.

The stages and their order are listed in :mod:`gossipx.peer.role`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gossipx.peer.agreement import Agreement
from gossipx.peer.barrier import Barrier
from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.peer.joining.first_model import Joining
from gossipx.peer.joining.newcomers import Newcomers
from gossipx.peer.last_wave import Finish
from gossipx.peer.server_role import ServerRole
from gossipx.peer.training import Training
from gossipx.peer.waves import WaveSequence
from gossipx.protocol.effects import Answer, Effect, Forget, Note, Resume, Stop, Wait
from gossipx.protocol.events import Received
from gossipx.protocol.messages import (
    ArriveRequest,
    HereReply,
    LeaveRequest,
    NotReadyReply,
    RoundRequest,
    ShardRequest,
    Stage,
)
from gossipx.settings.sections import RunConfig


@dataclass
class Stages:
    """The stage of a peer. After each event, the role calls :meth:`follow`, the only place that decides transitions.

    Args:
        context: state shared by the role's components.
        settings: of the run.
        agreement, barrier, joining, training, waves, finish, exchange, server, newcomers: the role's components.

    Attributes:
        stage: the current stage.
        report: the final figures of this peer; empty before DONE.
    """

    context: PeerContext
    settings: RunConfig
    agreement: Agreement
    barrier: Barrier
    joining: Joining
    training: Training
    waves: WaveSequence
    finish: Finish
    exchange: Exchange
    server: ServerRole
    newcomers: Newcomers
    stage: Stage = field(default=Stage.JOINING, init=False)
    report: dict[str, Any] = field(default_factory=dict, init=False)
    _trained: bool = field(default=False, init=False)  # training is over; the stage may still be TRAIN
    _finish_by: float = field(default=math.inf, init=False)  # when this peer no longer waits for peers that still train

    def follow(self, now: float) -> list[Effect]:
        """Return the effects that follow from the last event, through as many transitions as it causes."""
        effects: list[Effect] = []
        while True:
            stage = self.stage
            followed = self._follow(now)
            effects += followed
            if not followed and self.stage is stage:
                return effects

    def _follow(self, now: float) -> list[Effect]:
        last = self.finish.wave
        match self.stage:
            case Stage.TRAIN:
                followed = self.training.follow(now)
                return self._finish(now) if self.training.over and not followed else followed
            case Stage.AGREE if last is None:
                # If the peer that holds the final model is lost, average all models instead.
                return [] if self.server.failed_source is None else self._last_wave(None, now)
            case Stage.AGREE if last is not None and self.finish.over:
                return [*self.finish.take_in(), *([] if last.merged else [Resume()])]
            case Stage.JOINING if self.barrier.active:
                if requested := self.joining.ask(now):
                    return requested
                return self.enter_barrier(Stage.START, now) if self.joining.may_begin() else []
            case Stage.START | Stage.FINISH | Stage.COMPARE | Stage.DONE if self.barrier.active:
                return self._barrier_passed(now) if self.barrier.complete() else []
        return []

    # --- barriers: JOINING, START, FINISH, COMPARE, DONE ------------------------------------------

    def here(self) -> HereReply:
        """Return the reply to an announcement of another peer: how far this one is."""
        final = self.agreement
        own = self.context.incarnation, self.report, self.waves.latest, self.training.step
        return HereReply(self.stage, *own, final.comparison, final.digest, final.weight, self.newcomers.listed)

    def enter_barrier(self, stage: Stage, now: float) -> list[Effect]:
        """Enter ``stage``, announce it to all others, and start waiting for them."""
        self.stage = stage
        here, until = self.here(), math.inf
        self.agreement.since = now if stage is Stage.FINISH else self.agreement.since
        if stage is Stage.FINISH and self.settings.sync.finish_timeout and not self._is_needed:
            until = self._finish_by = now + self.settings.sync.finish_timeout
        elif stage > Stage.FINISH:
            until = max(self._finish_by, now + self.settings.exchange.peer_timeout)
        arrival = ArriveRequest(**msgspec.structs.asdict(here))
        return [*self.barrier.begin(arrival, now, until), *self.server.members_changed(now)]

    def begin(self, resumed: bool | None, now: float) -> list[Effect]:
        """Enter the first stage; ``resumed`` as in :class:`~gossipx.protocol.events.JoinRun`."""
        self.joining.must_adopt = resumed is False or self.joining.joins
        # Also with --init own: a restarted peer must adopt the model of a peer that trains.
        has_model = resumed or self.context.members.size == 1
        return self.enter_barrier(Stage.START if has_model else Stage.JOINING, now)

    def begin_at_once(self, now: float) -> list[Effect]:
        """Enter TRAIN without a barrier: all other peers are known to be present and to do the same."""
        assert self.stage is Stage.JOINING and not self.barrier.active
        self.context.members.others.all_train()
        self.stage = Stage.START
        return [*self.server.members_changed(now), *self._barrier_passed(now)]

    @property
    def _is_needed(self) -> bool:
        """Whether the finish must wait for all peers that train."""
        return self.server.is_needed_at_finish or self.server.awaits_all

    def timed_out(self, now: float) -> list[Effect]:
        """Handle the timeout of the current barrier."""
        if self.stage is Stage.JOINING:
            return self.joining.timed_out(now) or self.enter_barrier(Stage.START, now)
        if self.stage >= Stage.FINISH:
            finishes = self.stage is Stage.FINISH
            needed, serves = finishes and self._is_needed, finishes and not self.server.trains
            if extended := self.barrier.extend_for_living(now, needed, serves):
                return extended
        return [*self.barrier.timed_out(now), *self._barrier_passed(now)]

    def _barrier_passed(self, now: float) -> list[Effect]:
        self.barrier.end()
        if self.stage is Stage.START:
            self.stage = Stage.TRAIN
            return [*self.server.start_serving(now), *self.training.begin(now)]
        if self.stage is Stage.FINISH and self._agrees:
            return self._agree(now)
        if self.stage is Stage.COMPARE:
            compared = self.agreement.compare(self.barrier.arrived_ranks(), now)
            return self._compare_again(now) if compared is None else compared
        notes = self.agreement.note_unseen() if self.stage is Stage.DONE else []
        return [*notes, Resume()]  # or this peer only serves the others

    # --- the finish -------------------------------------------------------------------------------

    def _finish(self, now: float) -> list[Effect]:
        self.training.over, self._trained = False, True
        refused = self.waves.give_up(HereReply(Stage.FINISH), now)
        if not (self._agrees or self.server.is_needed_at_finish):
            return [*refused, Resume()]
        return [*refused, *self.enter_barrier(Stage.FINISH, now)]

    @property
    def _agrees(self) -> bool:
        """Whether this peer takes part in the final averaging."""
        return self.settings.sync.finish != "none" and self.training.sound

    def _agree(self, now: float, members: tuple[int, ...] | None = None) -> list[Effect]:
        """Start the final averaging: adopt the server role's final model if there is one, else start the last wave.

        Args:
            members: ranks that take part in the last wave; None: all that have reached the finish.
        """
        self.stage = Stage.AGREE
        if members is None and (requested := self.server.fetch_final_model(now)) is not None:
            return requested
        return self._last_wave(members, now)

    def _last_wave(self, members: tuple[int, ...] | None, now: float) -> list[Effect]:
        step, weight = self.training.step, self.exchange.weight
        begun = self.finish.begin(members, step, weight, now, self.server.failed_source)
        assert self.finish.wave is not None
        self.agreement.averaged = self.finish.wave.members
        return begun

    # --- comparing the final models ---------------------------------------------------------------

    @property
    def compares(self) -> bool:
        """Whether the driver must next report the final model as it is now."""
        unsettled = self.stage is Stage.COMPARE and self.agreement.settled is None
        return unsettled or self.stage is Stage.AGREE

    def compare(self, digest: str, now: float) -> list[Effect]:
        """Announce our final model, of this checksum, and compare it with those of the others."""
        final, wave = self.agreement, self.finish.wave
        if self.stage is Stage.AGREE:  # the model of a hub or of servers stands for all models
            final.weight = float(self.context.members.size) if wave is None else wave.weight
        final.digest = digest
        return [Wait(), *self._compare_again(now)]

    def _compare_again(self, now: float) -> list[Effect]:
        self.agreement.comparison += 1
        return self.enter_barrier(Stage.COMPARE, now)

    def final_failed(self, ticket: int, now: float) -> list[Effect]:
        """Handle a request for a final model that brought none."""
        failed = self.agreement.failed(ticket, now)
        return [Forget(ticket), *self._compare_again(now)] if failed is None else failed

    # --- waves ------------------------------------------------------------------------------------

    def wave_requested(self, event: Received, now: float) -> list[Effect]:
        """Handle a request of a wave while training."""
        match self.stage:
            case Stage.START | Stage.TRAIN if not self._trained:
                return self.training.wave_requested(event, self.stage is Stage.TRAIN, now)
            case Stage.TRAIN | Stage.FINISH | Stage.AGREE | Stage.COMPARE | Stage.DONE if isinstance(
                event.request, ShardRequest
            ):
                here = HereReply(max(self.stage, Stage.FINISH))
                return [Answer(event.key, here, now + self.settings.exchange.peer_timeout)]
        return [self.waves.refuse(event, "it takes part in no wave", now)]

    def round_requested(self, event: Received, request: RoundRequest, now: float) -> list[Effect]:
        """Handle a request for our model in a round of the finish."""
        match self.stage:
            case Stage.START | Stage.TRAIN | Stage.FINISH:
                self.finish.defer(event)
                # The sender's barrier is over; adopt its member list, which must be the same for all.
                if self.stage is Stage.FINISH and self.barrier.active and self.finish.may_join(event):
                    self.barrier.end()
                    return self._agree(now, request.members)
                return []
            case Stage.AGREE | Stage.COMPARE | Stage.DONE if self.finish.wave is not None:
                return self.finish.wave.requested(event, now)
            case Stage.AGREE:  # undecided until the server role's final model arrives or fails
                self.finish.defer(event)
                return []
        return [self.finish.refuse(event, "it takes part in no wave", now)]

    # --- leaving ----------------------------------------------------------------------------------

    def peer_left(self, rank: int, now: float) -> list[Effect]:
        """Handle the departure of another peer."""
        self.context.members.others[rank].stage = Stage.LEFT
        left = [] if self.stage is Stage.LEFT else self.exchange.peer_left(rank, now)
        note = Note(f"left {rank}", f"peer {rank} has left")
        waves = [*self.waves.peer_left(rank, now), *self.finish.peer_left(rank, now)]
        return [note, *left, *waves, *self.check_min_peers(), *self.server.members_changed(now)]

    def check_min_peers(self) -> list[Effect]:
        """Stop if too few peers are left."""
        alive, least = self.context.members.alive(), self.settings.sync.min_peers
        if alive >= least:
            return []
        return [Stop(f"{alive} of {self.context.members.size} peers left, fewer than min_peers = {least}"), Resume()]

    def leave(self, now: float) -> list[Effect]:
        """Enter LEFT: abandon everything under way and tell the others."""
        self.stage = Stage.LEFT
        self.barrier.end()
        # Models that still arrive are dropped: the others count on the state that we announce here.
        self.joining.leave()
        self.agreement.leave()
        dropped = self.training.leave(now)
        deadline = now + self.settings.exchange.peer_timeout / 10
        leaving: list[Effect] = [
            self.context.requests.send(rank, LeaveRequest(), now, deadline) for rank in self.context.members.awaited()
        ]
        refused = [*self.waves.give_up(NotReadyReply("it leaves"), now), *self.finish.leave(now)]
        return [Wait(), *dropped, *leaving, *refused, *self.resume_if_announced()]

    def resume_if_announced(self) -> list[Effect]:
        """Return Resume once every LeaveRequest was answered or has failed."""
        telling = any(self.context.requests.opened(LeaveRequest))
        return [] if telling or self.stage is not Stage.LEFT else [Resume()]
