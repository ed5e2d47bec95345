"""Training: what a peer does at its step boundaries, and what follows from its exchanges and waves.

At a boundary a model that has come is mixed first, and only then the policy decides on the step. While training waits
(``blocking``), and at its end, models are mixed as soon as they are there. The end waits for a model that is here to be
mixed, and for what others count on: an exchange that may stand, a wave.
"""

from __future__ import annotations

import math

from gossipx.peer.barrier import Barrier
from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.peer.waves import Waves
from gossipx.protocol.effects import Effect, Note, Resume, Wait
from gossipx.protocol.events import Received, Restored, StepDone
from gossipx.protocol.messages import ArriveRequest, Stage

UNSOUND = "its model holds NaN or Inf"


class Training:
    """One peer's training, between START and FINISH. Each method returns the effects to carry out.

    Args:
        context: of the role; ``barrier``, ``exchange`` and ``waves`` are the role's too.
        in_waves: a policy that fires begins a wave, rather than an exchange.

    Attributes:
        sound: whether our model is finite: no other is given.
        over: whether training has ended, and nothing is under way that its end waited for.
    """

    def __init__(self, context: PeerContext, barrier: Barrier, exchange: Exchange, waves: Waves, in_waves: bool):
        self.sound = True
        self.over = False
        self._context = context
        self._barrier = barrier
        self._exchange = exchange
        self._waves = waves
        self._in_waves = in_waves
        self._undecided: StepDone | None = None  # a step that is decided on after the mix
        self._ending = False  # training has ended, but for what is under way

    @property
    def step(self) -> int:
        """Iterations that our model has seen."""
        return self._context.step

    def begin(self, now: float) -> list[Effect]:
        """Begin, as all have come to START."""
        return self.go_on(now) if self._context.blocking else [Resume(), *self._waves.join(self.step, now)]

    # --- a step is done ---------------------------------------------------------------------------

    def step_done(self, event: StepDone, now: float) -> list[Effect]:
        """Mix what has come; then, or at once if nothing has, decide."""
        self._context.step = event.step
        was, self.sound = self.sound, math.isfinite(event.delta)
        if not self.sound:
            # Nothing is pulled into it; the policy's state stays fit for a loop that goes back to a sound model.
            text = f"own model holds NaN or Inf since iteration {event.step}: it is not given to others; a lower"
            told: list[Effect] = [Note("diverged", f"{text} learning rate may help")] if was else []
            return [*told, *self._exchange.unsound(now), *self._waves.give_up(UNSOUND, now)]
        entered = self._exchange.boundary(now)
        if mix := self._exchange.mix(at_boundary=True):
            self._undecided = event
            return [*entered, mix]
        if self._waves.over:
            self._undecided = event
            return [*entered, *self._waves.take_in()]
        return [*entered, *self._decide(event, now)]

    def _decide(self, event: StepDone, now: float) -> list[Effect]:
        wanted = self._context.sync.step(event.step, event.delta, event.drift)
        if self._in_waves:
            return self._begin_wave(wanted, now)
        return self._exchange.begin(now) if wanted else []

    def _begin_wave(self, wanted: bool, now: float) -> list[Effect]:
        """At a step boundary: take part in what others have begun, or begin one if the policy wants it."""
        begun = self._waves.join(self.step, now)
        asking: list[Effect] = []
        if wanted and not begun:
            asked = self._context.requests.asked(ArriveRequest)
            probed = [rank for rank in self._context.members.to_probe(now) if rank not in asked]
            here = ArriveRequest(Stage.TRAIN, self._context.incarnation, wave=self._waves.latest)
            asking = [self._barrier.tell(rank, here, now) for rank in probed]
            begun = self._waves.start(self.step, now)
            self._context.sync.skipped += not begun
        waiting: list[Effect] = [Wait()] if begun and self._context.blocking else []
        return [*waiting, *begun, *asking]

    # --- what follows -----------------------------------------------------------------------------

    def follow(self, now: float) -> list[Effect]:
        """Return what follows between two steps from what has happened; nothing once all that follows is done."""
        if mix := self._exchange.mix(at_boundary=False):
            return [mix]
        wave = self._waves.current
        if wave is None:
            if self._ending and self._exchange.over:
                self._ending, self.over = False, True
            return []
        if not self._waves.over or (wave.merged and not (self._context.blocking or self._ending)):
            return []  # the mean of a wave is taken in at the next step boundary, unless training waits for it
        taken = self._waves.take_in()
        return taken if wave.merged else [*taken, *self.go_on(now)]

    def round_requested(self, event: Received, begun: bool, now: float) -> list[Effect]:
        """Another asks for our model in a wave; ``begun``: all have come to START."""
        if not self._in_waves:
            return [self._waves.refuse(event, "it exchanges models by pulls", now)]
        if not self.sound:
            return [self._waves.refuse(event, UNSOUND, now)]
        effects = self._waves.requested(event, self.step, now)
        # A peer that waits for its waves begins them between two steps alone.
        at_once = begun and not self._context.blocking
        return [*effects, *(self._waves.join(self.step, now) if at_once else [])]

    def mixed(self, ticket: int, now: float) -> list[Effect]:
        """Continue after a model was mixed, or the mean of a wave taken in."""
        return self.go_on(now) if self._waves.is_taken_in(ticket) or self._exchange.mixed(ticket) else []

    def go_on(self, now: float) -> list[Effect]:
        """Do what waited for the mix that is over now."""
        if self._ending:
            return []
        if self._undecided and (mix := self._exchange.mix(at_boundary=True)):
            return [mix]
        event, self._undecided = self._undecided, None
        if event:
            return self._decide(event, now)
        joined = self._waves.join(self.step, now)
        return joined if joined or not self._context.blocking else [Resume()]

    def restored(self, event: Restored, now: float) -> list[Effect]:
        """Continue from another model."""
        self._context.step = event.step
        dropped = [*self._exchange.drop(now), *self._waves.give_up("its model was set anew", now)]
        self._exchange.weight = event.weight
        self._context.sync.load_state_dict(event.sync)
        return dropped

    # --- the end ----------------------------------------------------------------------------------

    def ended(self, agrees: bool, now: float) -> list[Effect]:
        """End: the last iteration is done; ``agrees``: the model is still one that can be averaged with others."""
        self.sound = self.sound and agrees
        self._ending = True
        ended = self._exchange.end(now)
        # The others count on us in a wave.
        wave = self._waves.join(self.step, now) if self.sound else self._waves.give_up(UNSOUND, now)
        return [Wait(), *ended, *wave]

    def leave(self, now: float) -> list[Effect]:
        """Take part in no exchange any more. Models that still come are forgotten."""
        self._ending = False
        dropped = self._exchange.drop(now)
        self._context.sync.abandoned(failed=False)
        return dropped
