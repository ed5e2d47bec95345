"""Training: what a peer does at its step boundaries, and what follows from an exchange or a wave that has gone on.

At a boundary a model that has come is mixed first, and only then the policy decides on the step. While training waits
(``blocking``), and at its end, models are mixed as soon as they are there. The end waits for a model that is here to be
mixed, and for what others count on: an exchange that may stand, a wave.
"""

from __future__ import annotations

import math

from gossipx.actor import Received, Restored, StepDone
from gossipx.effects import Effect, Note, Resume, Wait
from gossipx.messages import ArriveRequest, Stage
from gossipx.peer.exchange import Exchange, Ground
from gossipx.peer.gathering import Gathering
from gossipx.peer.pulls import Pulls
from gossipx.peer.waves import Waves

UNSOUND = "its model holds NaN or Inf"


class Training:
    """One peer's training, between START and FINISH. Each method says what is to be done; then ask :meth:`is_over`.

    Args:
        gathering: the role's; ``pulls``, ``exchange`` (None: pulls) and ``waves`` too.
        in_waves: a policy that fires begins a wave, rather than an exchange.

    Attributes:
        step: iterations that our model has seen.
        sound: whether it is finite: no other is given.
    """

    def __init__(
        self,
        ground: Ground,
        gathering: Gathering,
        pulls: Pulls,
        exchange: Exchange | None,
        waves: Waves,
        in_waves: bool,
    ):
        self.step = 0
        self.sound = True
        self._ground = ground
        self._gathering = gathering
        self._pulls = pulls
        self._exchange = exchange
        self._waves = waves
        self._in_waves = in_waves
        self._undecided: StepDone | None = None  # a step that is decided on after the mix
        self._ending = False  # training has ended, but for what is under way
        self._over = False

    def is_over(self) -> bool:
        """Whether training has ended, and nothing is under way that its end waited for; said once."""
        over, self._over = self._over, False
        return over

    def begin(self, now: float) -> list[Effect]:
        """All have come to START."""
        begun = self._exchange.begun(now) if self._exchange else []
        return [*begun, *(self.go_on(now) if self._ground.blocking else [Resume(), *self._join_wave(now)])]

    # --- a step is done ---------------------------------------------------------------------------

    def step_done(self, event: StepDone, now: float) -> list[Effect]:
        """Mix what has come; then, or at once if nothing has, decide."""
        self.step = event.step
        was, self.sound = self.sound, math.isfinite(event.delta)
        if not self.sound:
            # Nothing is pulled into it; the policy's state stays fit for a loop that goes back to a sound model.
            text = f"own model holds NaN or Inf since iteration {event.step}: it is not given to others; a lower"
            told: list[Effect] = [Note("diverged", f"{text} learning rate may help")] if was else []
            dropped = self._exchange.unsound(now) if self._exchange else []
            return [*told, *dropped, *self._waves.give_up(UNSOUND, now)]
        if self._exchange:
            entered = self._exchange.boundary(now)
            if mix := self._exchange.mix(self.step, at_boundary=True):
                self._undecided = event
                return [*entered, mix]
            return [*entered, *self._decide(event, now)]
        if mix := self._pulls.mix(self.step):
            self._undecided = event
            return [mix]
        if self._waves.over:
            self._undecided = event
            return self._waves.take_in()
        return self._decide(event, now)

    def _decide(self, event: StepDone, now: float) -> list[Effect]:
        wanted = self._ground.sync.step(event.step, event.delta, event.drift)
        if self._in_waves:
            return self._begin_wave(wanted, now)
        if not wanted:
            return []
        return self._exchange.begin(now) if self._exchange else self._pulls.begin(self.step, now)

    def _begin_wave(self, wanted: bool, now: float) -> list[Effect]:
        """At a step boundary: take part in what others have begun, or begin one if the policy wants it."""
        begun = self._waves.join(self.step, now)
        asking: list[Effect] = []
        if wanted and not begun:
            asked = self._ground.requests.asked(ArriveRequest)
            probed = [rank for rank in self._ground.members.to_probe(now) if rank not in asked]
            here = ArriveRequest(Stage.TRAIN, self._ground.incarnation, wave=self._waves.latest)
            asking = [self._gathering.tell(rank, here, now) for rank in probed]
            begun = self._waves.start(self.step, now)
            self._ground.sync.skipped += not begun
        waiting: list[Effect] = [Wait()] if begun and self._ground.blocking else []
        return self.waved([*waiting, *begun, *asking], now)

    def _join_wave(self, now: float) -> list[Effect]:
        return self.waved(self._waves.join(self.step, now), now)

    # --- what has gone on -------------------------------------------------------------------------

    def exchanged(self, effects: list[Effect]) -> list[Effect]:
        """An exchange has gone on: may it be mixed now, or is it over, for which the end of training waited?"""
        assert self._exchange is not None
        if mix := self._exchange.mix(self.step, at_boundary=False):
            return [*effects, mix]
        if self._ending and self._exchange.over:
            self._end()
        return effects

    def waved(self, effects: list[Effect], now: float) -> list[Effect]:
        """A wave may be over now: take its mean in at once if training waits, else at the next step boundary."""
        wave = self._waves.current
        if wave is None or not self._waves.over:
            return effects
        merged = wave.merged > 0
        if merged and not (self._ground.blocking or self._ending):
            return effects
        effects = effects + self._waves.take_in()
        return effects if merged else effects + self.go_on(now)

    def round_requested(self, event: Received, begun: bool, now: float) -> list[Effect]:
        """Another asks for our model in a wave; ``begun``: all have come to START."""
        if not self._in_waves:
            return [self._waves.refuse(event, "it exchanges models by pulls", now)]
        if not self.sound:
            return [self._waves.refuse(event, UNSOUND, now)]
        effects = self._waves.requested(event, self.step, now)
        # A peer that waits for its waves begins them between two steps alone.
        at_once = begun and not self._ground.blocking
        return self.waved(effects + (self._waves.join(self.step, now) if at_once else []), now)

    def mixed(self, ticket: int, now: float) -> list[Effect]:
        """A model is mixed, or the mean of a wave taken in."""
        if self._waves.is_taken_in(ticket):
            return self.go_on(now)
        if self._exchange:
            return self.go_on(now) if self._exchange.mixed(ticket) else []
        self._pulls.mixed(ticket)
        return self.go_on(now)

    def go_on(self, now: float) -> list[Effect]:
        """Nothing is being mixed any more: what waited for that comes now."""
        if self._ending:
            if self._exchange:
                return self.exchanged([])
            self._end()
            return []
        if self._undecided and self._exchange and (mix := self._exchange.mix(self.step, at_boundary=True)):
            return [mix]
        event, self._undecided = self._undecided, None
        if event:
            return self._decide(event, now)
        joined = self._join_wave(now)
        return joined if joined or not self._ground.blocking else [Resume()]

    def restored(self, event: Restored, now: float) -> list[Effect]:
        """The model is another one now."""
        self.step = event.step
        if self._exchange:
            dropped = self._exchange.drop(now)
            self._exchange.weight = event.weight
            self._ground.sync.load_state_dict(event.sync)
            return dropped
        self._ground.sync.load_state_dict(event.sync)
        return [*self._pulls.drop(), *self._waves.give_up("its model was set anew", now)]

    # --- the end ----------------------------------------------------------------------------------

    def ended(self, agrees: bool, now: float) -> list[Effect]:
        """The last iteration is done; ``agrees``: the model is still one that can be averaged with others."""
        self.sound = self.sound and agrees
        self._ending = True
        if self._exchange:
            return [Wait(), *self.exchanged(self._exchange.end(now))]
        if mix := self._pulls.end(self.step):
            return [Wait(), mix]
        dropped = self._pulls.leave()
        wave = self._waves.join(self.step, now) if self.sound else self._waves.give_up(UNSOUND, now)
        if self._waves.current is not None:  # the others count on us in it
            return self.waved([Wait(), *dropped, *wave], now)
        self._ground.sync.abandoned(failed=False)
        self._end()
        return [Wait(), *dropped, *wave]

    def _end(self) -> None:
        self._ending, self._over = False, True

    def leave(self, now: float) -> list[Effect]:
        """Take part in no exchange any more. Models that still come are forgotten."""
        self._ending = False
        dropped = self._pulls.leave()
        self._ground.sync.abandoned(failed=False)
        return self._exchange.drop(now) if self._exchange else dropped
