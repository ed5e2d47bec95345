"""Training: what a peer does at step boundaries, and when an exchange or a wave completes.

At a boundary, a received model is mixed before the policy decides on the step. Between boundaries, models are mixed
only while training is blocked (``blocking``) or has ended. After the last step, the peer waits until received models
are mixed, and until exchanges and waves that other peers rely on are complete.
"""

from __future__ import annotations

import math
from typing import Any

from gossipx.peer.barrier import Barrier
from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.peer.waves import WaveSequence
from gossipx.protocol.effects import Effect, Note, Resume, Wait
from gossipx.protocol.events import Received, Restored, StepDone
from gossipx.protocol.messages import ArriveRequest, NotReadyReply, Stage

UNSOUND = "its model holds NaN or Inf"


class Training:
    """The training stage of one peer, between START and FINISH. Methods return the effects to carry out.

    Args:
        context: state shared by the role's components.
        barrier: announces this peer to those that a wave probes.
        exchange: the role's exchanges.
        waves: the role's waves.
        in_waves: whether a policy that fires starts a wave, rather than an exchange.

    Attributes:
        sound: whether our model is finite; if not, it is not sent to others.
        over: whether training has ended and everything that its end waits for is complete.
    """

    def __init__(self, context: PeerContext, barrier: Barrier, exchange: Exchange, waves: WaveSequence, in_waves: bool):
        self.sound = True
        self.over = False
        self._context = context
        self._barrier = barrier
        self._exchange = exchange
        self._waves = waves
        self._in_waves = in_waves
        self._undecided: StepDone | None = None  # the policy decides on this step after the mix
        self._ending = False  # training has ended, exchanges may be under way

    @property
    def step(self) -> int:
        """Iterations that our model has seen."""
        return self._context.step

    def begin(self, now: float) -> list[Effect]:
        """Start training: the START barrier is over."""
        return self.proceed(now) if self._context.blocking else [Resume(), *self._waves.join(now)]

    # --- step boundaries --------------------------------------------------------------------------

    def step_done(self, event: StepDone, now: float) -> list[Effect]:
        """Mix a received model, if any, and then let the policy decide on the step."""
        self._context.step = event.step
        was, self.sound = self.sound, math.isfinite(event.delta)
        if not self.sound:
            # Mix nothing, and keep NaN out of the policy's state: the training loop may restore a finite model.
            text = f"own model holds NaN or Inf since iteration {event.step}: it is not sent to others; a lower"
            notes: list[Effect] = [Note("diverged", f"{text} learning rate may help")] if was else []
            return [*notes, *self._exchange.diverged(now), *self._waves.give_up(NotReadyReply(UNSOUND), now)]
        entered = self._exchange.step_ended(now)
        if mix := self._exchange.mix(at_boundary=True):
            self._undecided = event
            return [*entered, mix]
        if self._waves.over:
            self._undecided = event
            return [*entered, *self._waves.take_in(now)]
        return [*entered, *self._decide(event, now)]

    def _decide(self, event: StepDone, now: float) -> list[Effect]:
        sync = self._context.sync
        wanted = sync.step(event.step, event.delta, event.drift)
        told = [Note(topic, text) for topic, text in sync.warnings().items()]
        if self._in_waves:
            return [*told, *self._begin_wave(wanted, now)]
        return [*told, *(self._exchange.begin(now) if wanted else [])]

    def _begin_wave(self, wanted: bool, now: float) -> list[Effect]:
        """Join a wave that others have started, or start one if the policy ``wanted`` it."""
        begun = self._waves.join(now)
        asking: list[Effect] = []
        if wanted and not begun:
            asked = self._context.requests.open_ranks(ArriveRequest)
            probed = [rank for rank in self._context.members.to_probe(now) if rank not in asked]
            here = ArriveRequest(Stage.TRAIN, self._context.incarnation, wave=self._waves.latest, step=self.step)
            asking = [self._barrier.announce(rank, here, now) for rank in probed]
            begun = self._waves.start(now)
            self._context.sync.skipped += not begun
        waiting: list[Effect] = [Wait()] if begun and self._context.blocking else []
        return [*waiting, *begun, *asking]

    # --- completions ------------------------------------------------------------------------------

    def follow(self, now: float) -> list[Effect]:
        """Return the effects that follow from the last event between two steps; none if there is nothing left to do."""
        if mix := self._exchange.mix(at_boundary=False):
            return [mix]
        wave = self._waves.current
        if wave is None:
            if self._ending and self._exchange.over:
                self._ending, self.over = False, True
            return []
        if not self._waves.over or (wave.merged and not (self._context.blocking or self._ending)):
            return []  # unless training is blocked, the mean enters at the next step boundary
        taken = self._waves.take_in(now)
        return taken if wave.merged else [*taken, *self.proceed(now)]

    def wave_requested(self, event: Received, begun: bool, now: float) -> list[Effect]:
        """Handle a request of a wave; ``begun``: the START barrier is over."""
        if not self._in_waves:
            return [self._waves.refuse(event, "it does not use waves: give all peers the same --exchange", now)]
        if not self.sound:
            return [self._waves.refuse(event, UNSOUND, now)]
        effects = self._waves.requested(event, now)
        # In blocking mode waves start at step boundaries only.
        at_once = begun and not self._context.blocking
        return [*effects, *(self._waves.join(now) if at_once else [])]

    def mixed(self, ticket: int, now: float) -> list[Effect]:
        """Continue after a model was mixed or the mean of a wave was taken in."""
        closed = self._waves.taken_in(ticket, now)
        return [*(closed or ()), *self.proceed(now)] if closed is not None or self._exchange.mixed(ticket) else []

    def proceed(self, now: float) -> list[Effect]:
        """Continue after a mix: mix the next model, let the policy decide, or join a wave."""
        if self._ending:
            return []
        if self._undecided and (mix := self._exchange.mix(at_boundary=True)):
            return [mix]
        event, self._undecided = self._undecided, None
        if event:
            return self._decide(event, now)
        joined = self._waves.join(now)
        return joined if self._waves.current is not None or not self._context.blocking else [Resume()]

    def draw_state(self) -> dict[str, Any]:
        """Return the state that partner choices depend on, as plain data: generator, measured transfer times, turns."""
        return {
            **self._context.members.draw_state(),
            "last": self._exchange.last,
            "fragments": self._context.fragment_order.order,
        }

    def restored(self, event: Restored, now: float) -> list[Effect]:
        """Continue from a model that was loaded from a checkpoint."""
        if event.draws is not None:
            self._context.members.load_draw_state(event.draws)
            self._exchange.last = event.draws["last"]
            self._context.fragment_order.load(event.draws["fragments"])
        self._context.step = event.step
        dropped = [*self._exchange.drop(now), *self._waves.give_up(NotReadyReply("its model was replaced"), now)]
        self._exchange.weight = event.weight
        self._context.sync.load_state_dict(event.sync)
        return dropped

    # --- the end ----------------------------------------------------------------------------------

    def ended(self, agrees: bool, now: float) -> list[Effect]:
        """Handle the end of training; ``agrees``: our model is still fit to be averaged with others."""
        self.sound = self.sound and agrees
        self._ending = True
        ended = self._exchange.end(now)
        # Other peers rely on us in a wave that has started.
        wave = self._waves.join(now) if self.sound else self._waves.give_up(NotReadyReply(UNSOUND), now)
        return [Wait(), *ended, *wave]

    def leave(self, now: float) -> list[Effect]:
        """Abandon all exchanges; models that still arrive are dropped."""
        self._ending = False
        dropped = self._exchange.drop(now)
        self._context.sync.abandoned(failed=False)
        return dropped
