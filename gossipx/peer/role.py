"""The peer's state machine.

A peer's life: JOINING (it has no model yet) → START (waits for the others) → TRAIN → FINISH (waits for the others) →
AGREE (averages in pairs, the last wave) → DONE (tells its figures) → LEFT. Each part below is one section of the class.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gossipx.actor import (
    Adopt,
    Answer,
    Answered,
    Effect,
    Event,
    Failed,
    Fault,
    FiguresReady,
    Forget,
    JoinRun,
    LeaveRun,
    Merged,
    Mix,
    Mixed,
    Note,
    Poisoned,
    Received,
    Replied,
    Restored,
    Resume,
    Send,
    SetTimer,
    StepDone,
    Stop,
    TimerFired,
    TrainingEnded,
    Wait,
)
from gossipx.messages import (
    LAST_WAVE,
    ArriveRequest,
    BusyReply,
    HereReply,
    InitialRequest,
    LeaveRequest,
    ModelReply,
    NotReadyReply,
    PairRequest,
    PullRequest,
    PushRequest,
    Reply,
    Request,
    RoundRequest,
    SettleRequest,
    Stage,
    TakeRequest,
)
from gossipx.mixing import Average, Mixing
from gossipx.peer.exchange import OFFER, SETTLE, Counts, Exchange, Ground
from gossipx.peer.membership import Membership
from gossipx.peer.pairs import Pairs
from gossipx.peer.pushes import Pushes
from gossipx.peer.requests import Requests
from gossipx.peer.serving import Serving
from gossipx.peer.wave import TIMER, Wave
from gossipx.peer.waves import Waves
from gossipx.sync import SyncManager
from gossipx.topology import Topology
from gossipx.topology.schedules import Random, Schedule

BUSY = "busy"
"""The timer of a blocking pull that found all neighbours busy."""
BUSY_REST = 1 / 10_000
"""Share of peer_timeout (3 ms of 30 s) until it asks again: what a small model takes to be given to another."""
UNSOUND = "its model holds NaN or Inf"
TRAINED = "its training is over"


@dataclass(frozen=True)
class PeerSettings:
    """How a peer behaves.

    Attributes:
        peer_timeout: seconds after which another peer is no longer waited for. Every deadline but a model's is this or
            a fixed share of it. 30 s: several times what a model of 100 MB takes at 100 Mbit/s, short enough for a
            person to wait.
        model_timeout: seconds that a model may take on its way if that is more, and none of a pull was measured yet.
        max_served: pulls that are answered at a time.
        exchange: what a policy that fires begins: an exchange with one other peer, or a wave of all.
        mode: ``pull``: fetch another's model; ``push``: have another fetch ours; ``pushpull``: average a pair.
        push_sum: a push gives away half of one's weight, so that the average is kept on directed graphs too.
        blocking: wait for each exchange, as Algorithm 2 is printed, or each wave, instead of training on meanwhile.
        finish: ``consensus``: average all models at the end; ``none``: do not, as in the paper.
        init: ``first``: all begin with one peer's weights; ``own``: each with its own, as Algorithm 2 is printed.
        min_peers: stop (exit code 4) when fewer are left, oneself included; 1: go on alone.
    """

    peer_timeout: float = 30.0
    model_timeout: float = 0.0
    max_served: int = 4
    exchange: Literal["pulls", "waves"] = "pulls"
    mode: Literal["pull", "push", "pushpull"] = "pull"
    push_sum: bool = False
    blocking: bool = False
    finish: Literal["consensus", "none"] = "consensus"
    init: Literal["first", "own"] = "first"
    min_peers: int = 1


@dataclass
class _Pull:
    """A pull under way since ``began``. ``reply`` is there once the model has arrived and waits for a step boundary."""

    ticket: int
    to: int
    tried: frozenset[int]
    fault: bool  # one of those that were tried failed, rather than said no
    began: float
    decided: float  # when the policy has fired
    reply: ModelReply | None = None


@dataclass
class PeerRole:
    """One peer, decided purely: tell it of events by :meth:`handle`, carry out what it asks for.

    Args:
        rank: from 0 to ``size`` − 1.
        size: peers in the run.
        sync: decides when to pull; not shared with any other peer.
        topology: whom to pull from, push to, or pair with.
        rng: this peer's own generator.
        incarnation: tells this life of the peer from an earlier one under the same rank.
        schedule: whose turn it is, over ``topology``; None: a random neighbour's.
        shares: by rank, what the mixing's share is multiplied by; 1 where none is given.
    """

    rank: int
    size: int
    sync: SyncManager
    topology: Topology
    rng: random.Random
    incarnation: int
    mixing: Mixing = field(default_factory=Average)
    settings: PeerSettings = field(default_factory=PeerSettings)
    schedule: Schedule | None = None
    shares: Mapping[int, float] = field(default_factory=dict)

    stage: Stage = field(default=Stage.JOINING, init=False)
    step: int = field(default=0, init=False)
    counts: Counts = field(default_factory=Counts, init=False)
    report: dict[str, Any] = field(default_factory=dict, init=False)  # our final figures, once known
    sound: bool = field(default=True, init=False)  # whether our own model is finite: no other is given
    _pull: _Pull | None = field(default=None, init=False)
    _decide_after_mix: StepDone | None = field(default=None, init=False)
    _finish_after_mix: bool = field(default=False, init=False)
    _requests: Requests = field(default_factory=Requests, init=False)
    _deadline: float = field(default=0.0, init=False)  # of the stage that others are waited for in
    _gathering: bool = field(default=False, init=False)  # others are waited for
    _telling: dict[Hashable, int] = field(default_factory=dict, init=False)  # answers with our figures, and to whom
    _adopting: int | None = field(default=None, init=False)  # JOINING: the ticket of a first model
    _giver: int = field(default=-1, init=False)  # ... and who was asked for it

    def __post_init__(self) -> None:
        settings, timeout = self.settings, self.settings.peer_timeout
        self._model_timeout = max(timeout, settings.model_timeout)
        schedule = self.schedule or Random(self.topology)
        self.members = Membership(self.rank, self.size, schedule, timeout, self.rng, self._model_timeout)
        self.serving = Serving(settings.max_served, self._requests)
        self.waves = Waves(self.rank, self.members, self._requests, self.sync, self._model_timeout)
        own = self.rank, self.incarnation, self._model_timeout, settings.blocking
        ground = Ground(*own, self.members, self._requests, self.sync, self.counts)
        self.exchange: Exchange | None = None  # of a mode in which an exchange is more than one pull
        if settings.mode == "push":
            self.exchange = Pushes(ground, self.mixing, settings.push_sum)
        elif settings.mode == "pushpull":
            self.exchange = Pairs(ground)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event in and say what is to be done about it, in order."""
        match event:
            case StepDone():
                return self._step_done(event, now)
            case Received():
                return self._received(event, now)
            case Replied():
                return self._replied(event, now)
            case Failed():
                return self._failed(event, now)
            case Mixed():
                return self._mixed(event.ticket, now)
            case Poisoned():
                return self._poisoned(event.ticket, now)
            case Merged():
                return self._merged(event, now)
            case Answered():
                return self._answered(event, now)
            case TimerFired():
                return self._timer(event.name, now)
            case JoinRun():
                return self._join(now)
            case TrainingEnded(agrees):
                self.sound = self.sound and agrees
                return self._training_ended(now)
            case FiguresReady():
                self.report = event.report
                return [Wait(), *self._gather(Stage.DONE, now)]
            case Restored(step, sync, weight):
                return self._restored(step, sync, weight, now)
            case LeaveRun():
                return self._leave(now)

    @property
    def pulling(self) -> int | None:
        """The ticket of the pull, or of the wave while training, that is under way, or of our captured model."""
        if self.exchange:
            return self.exchange.captured
        if self._pull is None and self.waves.current is not None and self.stage is Stage.TRAIN:
            return self.waves.current.ticket
        return None if self._pull is None else self._pull.ticket

    @property
    def weight(self) -> float:
        """Push-sum's w of our own model; 1 without push-sum."""
        return self.exchange.weight if self.exchange else 1.0

    @property
    def rounds_lost(self) -> int:
        """Rounds of the finish that a missing partner cost."""
        last = self.waves.current
        return last.lost if last is not None and last.number == LAST_WAVE else 0

    def missing(self) -> list[int]:
        """Ranks whose final figures have not come."""
        return [rank for rank, other in self.members.others.items() if other.stage is not Stage.DONE]

    # --- requests in general ----------------------------------------------------------------------

    def _received(self, event: Received, now: float) -> list[Effect]:
        self.members.heard(event.sender)
        other = self.members.others[event.sender]
        match event.request:
            case ArriveRequest(stage, incarnation, report):
                other.came_to(stage, incarnation, report)
                if self.stage is Stage.DONE:
                    self._telling[event.key] = event.sender
                return [self._answer(event.key, HereReply(self.stage, self.report), now), *self._look(now)]
            case LeaveRequest():
                other.stage = Stage.LEFT
                left: list[Effect] = [self._answer(event.key, HereReply(self.stage), now)]
                left.append(Note("left", f"peer {event.sender} has left"))
                if self.exchange and self.stage is not Stage.LEFT:
                    left += self._exchanged(self.exchange.left(event.sender, now), now)
                in_wave = self._went_on(self.waves.gone(event.sender, now), now)
                return [*left, *in_wave, *self._enough(), *self._look(now)]
            case RoundRequest():
                return self._round_requested(event, event.request, now)
            case InitialRequest() | PullRequest() if self.stage in (Stage.JOINING, Stage.LEFT):
                return [self._answer(event.key, NotReadyReply("it has no model to give yet"), now)]
            case InitialRequest() | PullRequest() if not self.sound:
                return [self._answer(event.key, NotReadyReply(UNSOUND), now)]
            case InitialRequest():
                return [self._answer(event.key, ModelReply(self.step), now, whole=True)]
            case PullRequest():
                return self.serving.requested(event, self.step, now)
            case _ if self.exchange is None:
                return [self._answer(event.key, NotReadyReply("it pulls: give all peers the same --mode"), now)]
            case TakeRequest() | SettleRequest():
                return self._exchanged(self.exchange.requested(event, now), now)
            case _ if self.stage is not Stage.TRAIN or not self.sound:
                return [self._answer(event.key, NotReadyReply("it does not train now"), now)]
            case _:
                return self._exchanged(self.exchange.offered(event, now), now)

    def _answer(self, key: Hashable, reply: Reply, now: float, whole: bool = False) -> Answer:
        return Answer(key, reply, now + self._model_timeout, whole)

    def _replied(self, event: Replied, now: float) -> list[Effect]:
        to, request = self._requests.close(event.ticket)
        self.members.heard(to)
        match request, event.reply:
            case ArriveRequest(), HereReply(stage, report):
                other = self.members.others[to]
                other.stage = stage if other.stage is None else max(stage, other.stage)
                other.report = report or other.report
                other.knows = other.knows or request.stage is Stage.DONE
                return self._look(now)
            case InitialRequest(), ModelReply(step) if self._adopting == event.ticket:
                self.step = step
                return [Adopt(event.ticket)]
            case PullRequest(), ModelReply() if self._pull and self._pull.ticket == event.ticket:
                return self._arrived(event.reply, now)
            case RoundRequest(), ModelReply(_, weight) if wave := self._meeting(event.ticket):
                return self._went_on(wave.taken(weight, now), now)
            case RoundRequest(), NotReadyReply():  # which says nothing about later waves
                return self._came_to_nothing(event.ticket, to, request, now)
            case LeaveRequest(), _:
                return self._gone_if_told()
            case ((PushRequest() | PairRequest() | TakeRequest() | SettleRequest()), _) if self.exchange:
                return self._exchanged(self.exchange.replied(event.ticket, to, event.reply, now), now)
            case PullRequest(), BusyReply() if self._pull and self._pull.ticket == event.ticket:
                return [Forget(event.ticket), *self._pull_elsewhere(now, fault=False)]
            case _, NotReadyReply() if not isinstance(request, ArriveRequest):
                self.members.rest(to, now)
                return self._came_to_nothing(event.ticket, to, request, now)
            case _:  # the answer of a request that is no longer of interest
                return [Forget(event.ticket)]

    def _failed(self, event: Failed, now: float) -> list[Effect]:
        to, request = self._requests.close(event.ticket)
        if isinstance(request, LeaveRequest):
            return self._gone_if_told()
        if event.fault is Fault.POISONED:
            return [self._set_aside(to, now), *self._came_to_nothing(event.ticket, to, request, now)]
        effects: list[Effect] = []
        other = self.members.others[to]
        if isinstance(request, ArriveRequest) and other.stage is Stage.DONE and event.fault is Fault.UNREACHABLE:
            other.knows = True  # it goes once it knows everybody's figures
            return self._look(now)
        if isinstance(request, PullRequest) and event.fault is Fault.TIMEOUT:
            self.members.was_late(to)
        if self.members.failed(to, event.fault, now):
            effects.append(Note("lost", f"peer {to} is lost: {event.fault.value}"))
            effects += self._enough()
        elif not isinstance(request, ArriveRequest):
            effects.append(Note("fault", f"a request to peer {to} failed: {event.fault.value}"))
        return effects + self._came_to_nothing(event.ticket, to, request, now)

    def _came_to_nothing(self, ticket: int, to: int, request: Request, now: float) -> list[Effect]:
        """Our request got no useful answer; what now?"""
        match request:
            case ArriveRequest():
                again = min(self.members.others[to].rests_until, self._deadline)
                return [SetTimer(f"announce {to}", again), *self._look(now)] if self._gathering else []
            case InitialRequest() if self._adopting == ticket:
                self._adopting = None
                return [Forget(ticket), SetTimer(f"announce {to}", self.members.others[to].rests_until)]
            case PullRequest() if self._pull and self._pull.ticket == ticket:
                return [Forget(ticket), *self._pull_elsewhere(now)]
            case RoundRequest() if wave := self._meeting(ticket):
                return self._went_on([Forget(ticket), *wave.partner_lost(now)], now)
            case PushRequest() | PairRequest() | TakeRequest() | SettleRequest() if self.exchange:
                return self._exchanged(self.exchange.failed(ticket, now), now)
            case _:
                return [Forget(ticket)]

    def _timer(self, name: str, now: float) -> list[Effect]:
        what, _, rank = name.partition(" ")
        if what == "announce":
            return self._announce_again(int(rank), now) if self._gathering else []
        if what == "gather":
            return self._gather_timer(now) if self._gathering else []
        if what == BUSY:
            return self._pull_again(now)
        if what in (OFFER, SETTLE) and self.exchange and self.stage is not Stage.LEFT:
            return self._exchanged(self.exchange.timer(what, now), now)
        if what == TIMER and self.stage is not Stage.LEFT:
            return self._went_on(self.waves.timer(now), now)
        return []

    def _enough(self) -> list[Effect]:
        alive = self.members.alive()
        if alive >= self.settings.min_peers:
            return []
        return [Stop(f"{alive} of {self.size} peers left, fewer than min_peers = {self.settings.min_peers}"), Resume()]

    # --- waiting for the others: START, FINISH, DONE, and JOINING ---------------------------------

    def _gather(self, stage: Stage, now: float) -> list[Effect]:
        """Enter ``stage``, tell all others, and wait until they have come too, or peer_timeout has passed."""
        self.stage = stage
        self._gathering = True
        self._deadline = now + self.settings.peer_timeout
        others = self.members.others
        announced: list[Effect] = [self._announce(rank, now) for rank in others if others[rank].stage is not Stage.LEFT]
        return [*announced, SetTimer("gather", self._deadline), *self._look(now)]

    def _announce(self, rank: int, now: float) -> Send:
        # One that is lost may be back, but is not waited for as long again.
        patience = self.settings.peer_timeout / (10 if self.members.others[rank].lost else 1)
        return self._requests.send(rank, ArriveRequest(self.stage, self.incarnation, self.report), now + patience)

    def _announce_again(self, rank: int, now: float) -> list[Effect]:
        """A rest after a fault of ``rank`` is over: it may be told again, or asked again for its model."""
        unsure = self.stage is Stage.JOINING and self.members.others[rank].silent_since is not None
        if unsure or not self._has_come(rank):
            return [self._announce(rank, now)]
        return self._look(now)

    def _has_come(self, rank: int) -> bool:
        other = self.members.others[rank]
        # After DONE this peer is gone: whoever does not know its figures by then would wait for them in vain.
        return other.stage is not None and other.stage >= self.stage and (self.stage < Stage.DONE or other.knows)

    def _look(self, now: float) -> list[Effect]:
        """Something was heard while waiting: is the wait over?"""
        if not self._gathering:
            return []
        if self.stage is Stage.JOINING:
            return self._look_for_a_model(now)
        if not all(self._has_come(rank) for rank in self.members.awaited()):
            return []
        if any(self.members.others[rank].lost for rank in self._requests.asked(ArriveRequest)):
            return []  # it is being asked whether it is back
        return self._gathered(now)

    def _gather_timer(self, now: float) -> list[Effect]:
        if self.stage is Stage.JOINING:
            return self._no_model(now)
        absent = [rank for rank in self.members.awaited() if not self._has_come(rank)]
        names = ", ".join(map(str, absent))
        late = f"no longer waiting for peer {names} at {self.stage.name}: not there within peer_timeout"
        return [*([Note("absent", late)] if absent else []), *self._gathered(now)]

    def _gathered(self, now: float) -> list[Effect]:
        self._gathering = False
        if self.stage is Stage.START:
            self.stage = Stage.TRAIN
            return self._after_mix(now) if self.settings.blocking else [Resume(), *self._join_wave(now)]
        if self.stage is Stage.FINISH:
            return self._agree(now)
        return [Resume()]  # DONE

    # --- joining ----------------------------------------------------------------------------------

    def _join(self, now: float) -> list[Effect]:
        # With --init own, too: one that is started again takes a model of those that train.
        return [Wait(), *self._gather(Stage.START if self.size == 1 else Stage.JOINING, now)]

    def _look_for_a_model(self, now: float) -> list[Effect]:
        """Take the model of whoever has one. Rank 0 begins with its own once it knows that nobody has.

        With --init own all begin with their own, unless others train already.
        """
        if self._adopting is not None:
            return []
        others = self.members.others
        own = self.settings.init == "own"
        first = Stage.TRAIN if own else Stage.START
        givers = [
            rank
            for rank, other in others.items()
            if other.stage is not None and other.stage >= first and other.may_be_asked(now) and not other.lost
        ]
        if givers:
            request = self._requests.send(min(givers), InitialRequest(), now + self._model_timeout)
            self._adopting, self._giver = request.ticket, request.to
            return [request]
        asked = self._requests.asked(ArriveRequest)
        known = all(rank not in asked or other.stage is not None for rank, other in others.items())
        return self._gather(Stage.START, now) if (own or self.rank == 0) and known else []

    def _no_model(self, now: float) -> list[Effect]:
        """peer_timeout has passed without a model: the lowest rank that is here begins with its own, then."""
        others = self.members.others
        here = [rank for rank in self.members.awaited() if others[rank].stage is Stage.JOINING]
        if self._adopting is not None or (here and min(here) < self.rank and self.settings.init == "first"):
            self._deadline = now + self.settings.peer_timeout
            # They may have died since they were heard of: ask.
            asked: list[Effect] = [self._announce(rank, now) for rank in here if rank < self.rank]
            return [*asked, SetTimer("gather", self._deadline)]
        if not here and self.rank and self.settings.init == "first":
            self._gathering = False
            waited = f"no peer gave a model to begin with within peer_timeout = {self.settings.peer_timeout:g} s"
            return [Stop(f"{waited}: is any other running? Raise --peer-timeout, or --init own"), Resume()]
        return self._gather(Stage.START, now)

    # --- training: policy, exchange, mix ----------------------------------------------------------

    def _step_done(self, event: StepDone, now: float) -> list[Effect]:
        self.step = event.step
        was, self.sound = self.sound, math.isfinite(event.delta)
        if not self.sound:
            # Nothing is pulled into it; the policy's state stays fit for a loop that goes back to a sound model.
            text = f"own model holds NaN or Inf since iteration {event.step}: it is not given to others; a lower"
            told: list[Effect] = [Note("diverged", f"{text} learning rate may help")] if was else []
            dropped = self.exchange.drop(now) if self.exchange else []
            return [*told, *dropped, *self.waves.give_up(UNSOUND, now)]
        if self.exchange:
            entered = self.exchange.boundary(now)
            if mix := self.exchange.mix(self.step, at_boundary=True):
                self._decide_after_mix = event
                return [*entered, mix]
            return [*entered, *self._decide(event, now)]
        if self._pull and self._pull.reply:
            self._decide_after_mix = event
            return [self._mix_pulled(self._pull, self._pull.reply)]
        if self.waves.over:
            self._decide_after_mix = event
            return self.waves.take_in()
        return self._decide(event, now)

    def _decide(self, event: StepDone, now: float) -> list[Effect]:
        wanted = self.sync.step(event.step, event.delta, event.drift)
        if self.settings.exchange == "waves":
            return self._begin_wave(wanted, now)
        if not wanted:
            return []
        if self.exchange:
            return self.exchange.begin(now)
        to = self.members.draw(now)
        if to is None:
            self.counts.alone += 1
            return []
        self.sync.requested()
        request = self._pull_from(to, frozenset(), False, now, now)
        return [Wait(), request] if self.settings.blocking else [request]

    def _pull_from(self, to: int, tried: frozenset[int], fault: bool, decided: float, now: float) -> Send:
        patience = self.members.patience(to)
        send = self._requests.send(to, PullRequest(self.step, patience), now + patience)
        self._pull = _Pull(send.ticket, to, tried | {to}, fault, now, decided)
        return send

    def _pull_elsewhere(self, now: float, fault: bool = True) -> list[Effect]:
        """The pull came to nothing, by a fault or since the other is busy: another neighbour, if there is one."""
        assert self._pull is not None
        fault = fault or self._pull.fault
        to = self.members.draw(now, besides=self._pull.tried, again=True)
        if to is not None and self.stage is Stage.TRAIN:
            return [self._pull_from(to, self._pull.tried, fault, self._pull.decided, now)]
        waits = self.settings.blocking and not fault and now - self._pull.decided < self._model_timeout
        if waits and self.stage is Stage.TRAIN:  # Algorithm 2 does not go on without a model
            return [SetTimer(BUSY, now + BUSY_REST * self.settings.peer_timeout)]
        self._pull = None
        if fault:
            self.sync.abandoned()
        else:
            self.sync.found_nobody()
        return [Resume()] if self.settings.blocking else []

    def _pull_again(self, now: float) -> list[Effect]:
        """All neighbours were busy a moment ago, and training waits."""
        if self._pull is None or self.stage is not Stage.TRAIN:
            return []
        self._pull.tried = frozenset()
        return self._pull_elsewhere(now, fault=False)

    def _exchanged(self, effects: list[Effect], now: float) -> list[Effect]:
        """An exchange has gone on: may it be mixed now, or is it over, for which the end of training waited?"""
        assert self.exchange is not None
        if mix := self.exchange.mix(self.step, at_boundary=False):
            return [*effects, mix]
        if self._finish_after_mix and self.exchange.over:
            self._finish_after_mix = False
            return [*effects, *self._finish(now)]
        return effects

    def _arrived(self, reply: ModelReply, now: float) -> list[Effect]:
        assert self._pull is not None
        self._pull.reply = reply
        self.members.measured(self._pull.to, now - self._pull.began)
        return [self._mix_pulled(self._pull, reply)] if self.settings.blocking else []

    def _mix_pulled(self, pull: _Pull, reply: ModelReply) -> Mix:
        return Mix(pull.ticket, self.mixing.share(self.step, reply.step) * self.shares.get(pull.to, 1.0))

    def _mixed(self, ticket: int, now: float) -> list[Effect]:
        if self.stage is Stage.LEFT:
            return []
        if self._adopting == ticket:
            self._adopting = None
            return self._gather(Stage.START, now)
        if self.waves.is_taken_in(ticket):
            return [Resume()] if self.stage is Stage.AGREE else self._after_mix(now)
        if self.exchange:
            return self._after_mix(now) if self.exchange.mixed(ticket) else []
        if self._pull and self._pull.ticket == ticket:
            self.sync.completed()
        return self._after_mix(now)

    def _poisoned(self, ticket: int, now: float) -> list[Effect]:
        if self.stage is Stage.LEFT:
            self.counts.poisoned += 1
            return []
        adopting = self._adopting == ticket
        assert adopting or self._pull is not None
        sender = self._giver if adopting or self._pull is None else self._pull.to
        note = self._set_aside(sender, now)
        if adopting:
            self._adopting = None
            aside = self.members.others[sender].aside_until
            return [note, SetTimer(f"announce {sender}", aside), *self._look(now)]
        self.sync.abandoned()
        return [note, *self._after_mix(now)]

    def _set_aside(self, sender: int, now: float) -> Note:
        """A model of ``sender`` cannot be used: count it, and ask it for none for a while."""
        self.counts.poisoned += 1
        self.members.others[sender].aside_until = now + self.settings.peer_timeout
        return Note(
            "poisoned", f"the model of peer {sender} holds NaN or Inf: not mixed, and it is set aside for a while"
        )

    def _after_mix(self, now: float) -> list[Effect]:
        self._pull = None
        if self._finish_after_mix:
            self._finish_after_mix = False
            return self._finish(now)
        event, self._decide_after_mix = self._decide_after_mix, None
        if event:
            return self._decide(event, now)
        joined = self._join_wave(now)
        return joined if joined or not self.settings.blocking else [Resume()]

    def _restored(self, step: int, sync: dict[str, Any], weight: float, now: float) -> list[Effect]:
        self.step = step
        if self.exchange:
            dropped = self.exchange.drop(now)
            self.exchange.weight = weight
            self.sync.load_state_dict(sync)
            return dropped
        self.sync.load_state_dict(sync)
        # A pull under way would add its difference to the model that is no more; its answer is forgotten when it comes.
        pull, self._pull = self._pull, None
        forget = [Forget(pull.ticket)] if pull and pull.reply else []
        return [*forget, *self.waves.give_up("its model was set anew", now)]

    # --- the finish -------------------------------------------------------------------------------

    def _training_ended(self, now: float) -> list[Effect]:
        if self.exchange:
            self._finish_after_mix = True
            return [Wait(), *self._exchanged(self.exchange.end(now), now)]
        if self._pull and self._pull.reply:
            self._finish_after_mix = True
            return [Wait(), self._mix_pulled(self._pull, self._pull.reply)]
        wave = self.waves.join(self.step, now) if self.sound else self.waves.give_up(UNSOUND, now)
        if self.waves.current is not None:  # the others count on us in it
            self._finish_after_mix = True
            return self._went_on([Wait(), *wave], now)
        self._pull = None  # its answer, should it still come, is forgotten
        self.sync.abandoned(failed=False)
        return [Wait(), *wave, *self._finish(now)]

    def _finish(self, now: float) -> list[Effect]:
        refused = self.waves.give_up(TRAINED, now)
        if self.settings.finish == "none" or not self.sound:
            return [*refused, Resume()]
        return [*refused, *self._gather(Stage.FINISH, now)]

    def _agree(self, now: float, members: tuple[int, ...] | None = None) -> list[Effect]:
        """Begin the last wave with ``members``; None: all that are here."""
        self.stage = Stage.AGREE
        here = [r for r in self.members.awaited() if self.members.others[r].stage in (Stage.FINISH, Stage.AGREE)]
        members = members or tuple(sorted([self.rank, *here]))
        return self._went_on(self.waves.finish(members, self.step, self.weight, now), now)

    # --- waves ------------------------------------------------------------------------------------

    def _join_wave(self, now: float) -> list[Effect]:
        return self._went_on(self.waves.join(self.step, now), now)

    def _begin_wave(self, wanted: bool, now: float) -> list[Effect]:
        """At a step boundary: take part in what others have begun, or begin one if the policy wants it."""
        begun = self.waves.join(self.step, now)
        asking: list[Effect] = []
        if wanted and not begun:
            asked = self._requests.asked(ArriveRequest)
            asking = [self._announce(rank, now) for rank in self.members.to_probe(now) if rank not in asked]
            begun = self.waves.start(self.step, now)
            self.counts.alone += not begun
        waiting: list[Effect] = [Wait()] if begun and self.settings.blocking else []
        return self._went_on([*waiting, *begun, *asking], now)

    def _round_requested(self, event: Received, request: RoundRequest, now: float) -> list[Effect]:
        waves, last, refusal = self.waves, request.wave == LAST_WAVE, "it takes part in no wave"
        match self.stage:
            case Stage.START | Stage.TRAIN | Stage.FINISH if last:
                waves.hold(event)
                # One that no longer waits for others asks: all must mean the same members, so follow it.
                if self.stage is Stage.FINISH and self._gathering and waves.may_join(event):
                    self._gathering = False
                    return self._agree(now, request.members)
                return []
            case Stage.AGREE | Stage.DONE if last and waves.current is not None:
                return self._went_on(waves.current.requested(event, now), now)
            case Stage.START | Stage.TRAIN if self.settings.exchange == "waves":
                if not self.sound:
                    return [waves.refuse(event, UNSOUND, now)]
                effects = waves.requested(event, self.step, now)
                # A peer that waits for its waves begins them between two steps alone.
                at_once = self.stage is Stage.TRAIN and not self.settings.blocking
                return self._went_on(effects + (waves.join(self.step, now) if at_once else []), now)
            case Stage.START | Stage.TRAIN:
                refusal = "it exchanges models by pulls"
            case Stage.FINISH | Stage.AGREE | Stage.DONE:
                refusal = TRAINED
        return [waves.refuse(event, refusal, now)]

    def _meeting(self, ticket: int) -> Wave | None:
        """The wave, if ``ticket`` is our request of the round that it is in."""
        return None if self.stage is Stage.LEFT else self.waves.meeting(ticket)

    def _merged(self, event: Merged, now: float) -> list[Effect]:
        wave = self._meeting(event.ticket)
        if wave is None:  # it was given up meanwhile
            return []
        if not event.sound:
            self.counts.poisoned += 1
            self.members.others[wave.partner].aside_until = now + self.settings.peer_timeout
        return self._went_on(wave.was_merged(event.sound, now), now)

    def _went_on(self, effects: list[Effect], now: float) -> list[Effect]:
        """A wave may be over now: take its mean in at once if training waits, else at the next step boundary."""
        wave, last = self.waves.current, self.stage is Stage.AGREE
        if wave is None or not self.waves.over or self.stage is Stage.LEFT:
            return effects
        merged = wave.merged > 0
        if merged and not (last or self.settings.blocking or self._finish_after_mix):
            return effects
        effects = effects + self.waves.take_in()
        if merged:
            return effects
        return [*effects, Resume()] if last else effects + self._after_mix(now)

    def _answered(self, event: Answered, now: float) -> list[Effect]:
        told = self._telling.pop(event.key, None)
        if told is not None and event.whole:
            self.members.others[told].knows = True
        if served := self.serving.answered(event):
            return [*served, *self._look(now)]
        if (wave := self.waves.answering(event.key)) and self.stage is not Stage.LEFT:
            return self._went_on(wave.answered(event, now), now)
        if self.exchange and self.stage is Stage.TRAIN:
            return self._exchanged(self.exchange.answered(event, now), now)
        return self._look(now)

    # --- leaving ----------------------------------------------------------------------------------

    def _leave(self, now: float) -> list[Effect]:
        self.stage = Stage.LEFT
        self._gathering = False
        # Models that still come are forgotten: whoever has been told that this peer leaves counts on its last word.
        self._pull = self._adopting = None
        self._finish_after_mix = False
        self.sync.abandoned(failed=False)
        dropped = self.exchange.drop(now) if self.exchange else []
        deadline = now + self.settings.peer_timeout / 10
        told: list[Effect] = [self._requests.send(rank, LeaveRequest(), deadline) for rank in self.members.awaited()]
        return [Wait(), *dropped, *told, *self.waves.leave(now), *self._gone_if_told()]

    def _gone_if_told(self) -> list[Effect]:
        """Resume once every peer that could be told has been told."""
        telling = self._requests.asked(LeaveRequest)
        return [] if telling or self.stage is not Stage.LEFT else [Resume()]
