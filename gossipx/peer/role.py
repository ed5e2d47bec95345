"""The peer's state machine.

A peer's life: JOINING (it has no model yet) → START (waits for the others) → TRAIN → FINISH (waits for the others) →
AGREE (averages in pairs, the last wave) → DONE (tells its figures) → LEFT. The role goes from stage to stage and passes
on what happens to its parts, each of which decides one matter: who is waited for (gathering), where a first model comes
from (joining), what follows at step boundaries (training), and how models go from peer to peer (pulls, an exchange of
pushes or pairs, waves, serving).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gossipx.actor import (
    Adopt,
    Answer,
    Answered,
    CameBack,
    ChangeServers,
    Effect,
    Event,
    Failed,
    Fault,
    FiguresReady,
    Forget,
    GradientPoisoned,
    GradientsReady,
    JoinRun,
    LeaveRun,
    Merged,
    Mixed,
    Note,
    Poisoned,
    Prepared,
    Received,
    Replied,
    Restored,
    Resume,
    StepDone,
    Stop,
    Switched,
    SwitchSync,
    TimerFired,
    TrainingEnded,
    Wait,
)
from gossipx.messages import (
    LAST_WAVE,
    ArriveRequest,
    CentreRequest,
    CopyRequest,
    ElasticRequest,
    GradientRequest,
    HereReply,
    InitialRequest,
    LeaveRequest,
    ModelReply,
    NotReadyReply,
    PauseRequest,
    PlaceRequest,
    PrepareRequest,
    PullRequest,
    RangesRequest,
    RecordRequest,
    Reply,
    Request,
    RoundRequest,
    ServersRequest,
    SettleRequest,
    Stage,
    SwitchRequest,
    TablesRequest,
    TakeRequest,
    WaitingRequest,
)
from gossipx.mixing import Average, Mixing
from gossipx.peer.exchange import Exchange, Ground
from gossipx.peer.gathering import ANNOUNCE, GATHER, Gathering
from gossipx.peer.giving import Giving
from gossipx.peer.joining import Joining
from gossipx.peer.membership import Membership
from gossipx.peer.pairs import Pairs
from gossipx.peer.pulls import BUSY, Pulls
from gossipx.peer.pushes import Pushes
from gossipx.peer.requests import Requests
from gossipx.peer.serving import Serving
from gossipx.peer.settings import PeerSettings
from gossipx.peer.training import UNSOUND, Training
from gossipx.peer.wave import TIMER, Wave
from gossipx.peer.waves import Waves
from gossipx.sync import SyncManager
from gossipx.topology import Topology
from gossipx.topology.schedules import Random, Schedule

TRAINED = "its training is over"
MEASURED = PullRequest | TakeRequest | RoundRequest | ElasticRequest
"""Whose answers tell how long a model takes. An InitialRequest's does not: all that join ask one peer at once."""


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
        shares: by rank of who gives a model, what the mixing's share is multiplied by; 1 where none is given.
        exchange_of: makes what is exchanged in a mode that the settings have no name for, a hub's or a server's.
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
    exchange_of: Callable[[Ground, Pulls], Exchange] | None = None

    stage: Stage = field(default=Stage.JOINING, init=False)
    poisoned: int = field(default=0, init=False)  # models that held NaN or Inf and were refused
    report: dict[str, Any] = field(default_factory=dict, init=False)  # our final figures, once known
    _requests: Requests = field(default_factory=Requests, init=False)
    _leaving: bool = field(default=False, init=False)  # once what it holds for others is handed over

    def __post_init__(self) -> None:
        settings, timeout = self.settings, self.settings.peer_timeout
        self._model_timeout = max(timeout, settings.model_timeout)
        schedule = self.schedule or Random(self.topology)
        self.members = Membership(self.rank, self.size, schedule, timeout, self.rng, self._model_timeout)
        self.giving = Giving(self.members)
        self.serving = Serving(settings.max_served, settings.serve_share, self._requests, self.giving)
        self.gathering = Gathering(self.members, self._requests, timeout)
        self.joining = Joining(self.rank, self.members, self._requests, self.gathering, settings, self._model_timeout)
        self.waves = Waves(self.rank, self.members, self._requests, self.sync, timeout)
        own = self.rank, self.incarnation, timeout, settings.blocking
        ground = Ground(*own, self.members, self.giving, self._requests, self.sync)
        self.pulls = Pulls(ground, self.mixing, self.shares, timeout)
        self.exchange: Exchange | None = None  # of a mode in which an exchange is more than one pull
        if self.exchange_of is not None:
            self.exchange = self.exchange_of(ground, self.pulls)
        elif settings.mode == "push":
            self.exchange = Pushes(ground, self.mixing, self.shares, settings.push_sum, settings.max_pushes)
        elif settings.mode == "pushpull":
            self.exchange = Pairs(ground)
        in_waves = settings.exchange == "waves"
        self.training = Training(ground, self.gathering, self.pulls, self.exchange, self.waves, in_waves)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event in and say what is to be done about it, in order."""
        effects = self._handle(event, now)
        if self._leaving and not (self.exchange and self.exchange.stays):
            self._leaving = False
            effects = [*effects, *self._leave(now)]
        return effects

    def _handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case GradientsReady(buckets):
                return self.exchange.gradients_ready(buckets, now) if self.exchange else []
            case SwitchSync(number):
                nothing: list[Effect] = [Switched(number, "this run has no parameter server")]
                return self._exchanged(self.exchange.switch(event, now), now) if self.exchange else nothing
            case ChangeServers(number):
                none: list[Effect] = [Switched(number, "this run has no parameter server")]
                return self._exchanged(self.exchange.change(event, now), now) if self.exchange else none
            case Prepared():
                return self._exchanged(self.exchange.prepared(event, now), now) if self.exchange else []
            case StepDone():
                return self._trained(self.training.step_done(event, now), now)
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
            case CameBack():
                return self._exchanged(self.exchange.came_back(event, now), now) if self.exchange else []
            case GradientPoisoned(sender):
                self.poisoned += 1
                return [Note("poisoned", f"a gradient of peer {sender} holds NaN or Inf: it is left out")]
            case Merged():
                return self._merged(event, now)
            case Answered():
                return self._answered(event, now)
            case TimerFired():
                return self._timer(event.name, now)
            case JoinRun(resumed):
                self.joining.others_begin = resumed is False
                # With --init own, too: one that is started again takes a model of those that train.
                has_model = resumed or self.size == 1
                return [Wait(), *self._gather(Stage.START if has_model else Stage.JOINING, now)]
            case TrainingEnded(agrees):
                return self._trained(self.training.ended(agrees, now), now)
            case FiguresReady():
                self.report = event.report
                return [Wait(), *self._gather(Stage.DONE, now)]
            case Restored():
                if event.draws is not None:
                    self._load_draws(event.draws)
                return self.training.restored(event, now)
            case LeaveRun():
                self._leaving = True
                return [Wait(), *self.exchange.hand_over_all(now)] if self.exchange else []

    @property
    def pulling(self) -> int | None:
        """The ticket of the pull, or of the wave while training, that is under way, or of our captured model."""
        if self.exchange:
            return self.exchange.captured
        if self.pulls.ticket is None and self.waves.current is not None and self.stage is Stage.TRAIN:
            return self.waves.current.ticket
        return self.pulls.ticket

    @property
    def weight(self) -> float:
        """Push-sum's w of our own model; 1 without push-sum."""
        return self.exchange.weight if self.exchange else 1.0

    @property
    def trains(self) -> bool:
        """Whether this peer trains, or only serves those that do."""
        return self.exchange is None or self.exchange.gives

    @property
    def taken_in(self) -> int:
        """Models of others that were taken into what this peer holds for all."""
        return self.exchange.taken_in if self.exchange else 0

    @property
    def delayed_pulls(self) -> int:
        """Pulls that had to wait at the shards that this peer holds."""
        return self.exchange.delayed_pulls if self.exchange else 0

    @property
    def counted(self) -> dict[str, tuple[int, float]]:
        """What a hub or the shards here have counted; see :attr:`gossipx.peer.exchange.Exchange.counted`."""
        return self.exchange.counted if self.exchange else {}

    @property
    def rounds_lost(self) -> int:
        """Rounds of the finish that a missing partner cost."""
        last = self.waves.current
        return last.lost if last is not None and last.number == LAST_WAVE else 0

    def draws(self) -> dict[str, Any]:
        """What decides whom we turn to next, as plain data: the generator, and what is known of the others' speed."""
        version, words, gauss = self.rng.getstate()
        last = self.exchange.last if self.exchange else None
        return {"rng": [version, list(words), gauss], "members": self.members.state_dict(), "last": last}

    def _load_draws(self, draws: dict[str, Any]) -> None:
        version, words, gauss = draws["rng"]
        self.rng.setstate((version, tuple(words), gauss))
        self.members.load_state_dict(draws["members"])
        if self.exchange:
            self.exchange.last = draws["last"]

    def missing(self) -> list[int]:
        """Ranks whose final figures have not come."""
        return [rank for rank, other in self.members.others.items() if other.stage is not Stage.DONE]

    # --- requests in general ----------------------------------------------------------------------

    def _received(self, event: Received, now: float) -> list[Effect]:
        if event.sender != self.rank:
            self.members.heard(event.sender)
        match event.request:
            case ArriveRequest():
                self.gathering.arrived(event, self.stage)
                self.waves.heard_of(event.request.wave)
                here = HereReply(self.stage, self.report, self.waves.latest)
                return [self._answer(event.key, here, now), *self._look(now)]
            case LeaveRequest():
                self.members.others[event.sender].stage = Stage.LEFT
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
            case InitialRequest() | PullRequest() if not self.training.sound:
                return [self._answer(event.key, NotReadyReply(UNSOUND), now)]
            case InitialRequest():
                held = self.exchange.before_giving(event, now) if self.exchange else None
                given = self._answer(event.key, ModelReply(self.training.step), now, whole=True)
                return [given] if held is None else held
            case PullRequest() if self.exchange and not self.exchange.gives:
                return [self._answer(event.key, NotReadyReply("it does not train, it only serves"), now)]
            case PullRequest():
                trains = self.stage is Stage.TRAIN and not self.settings.blocking
                return self.serving.requested(event, self.training.step, now, trains)
            case _ if self.exchange is None or not isinstance(event.request, self.exchange.takes):
                refusal = NotReadyReply("it exchanges models in another way: give all peers the same --mode")
                return [self._answer(event.key, refusal, now)]
            case (
                TakeRequest()
                | SettleRequest()
                | ElasticRequest()
                | CentreRequest()
                | GradientRequest()
                | TablesRequest()
                | SwitchRequest()
                | WaitingRequest()
                | RecordRequest()
                | CopyRequest()
                | ServersRequest()
                | PauseRequest()
                | PrepareRequest()
                | RangesRequest()
                | PlaceRequest()
            ):
                return self._exchanged(self.exchange.requested(event, now), now)
            case _ if self.stage is not Stage.TRAIN or not self.training.sound:
                return [self._answer(event.key, NotReadyReply("it does not train now"), now)]
            case _:
                return self._exchanged(self.exchange.offered(event, now), now)

    def _answer(self, key: Hashable, reply: Reply, now: float, whole: bool = False) -> Answer:
        return Answer(key, reply, now + (self._model_timeout if whole else self.settings.peer_timeout), whole)

    def _replied(self, event: Replied, now: float) -> list[Effect]:
        to, request, asked = self._requests.close(event.ticket)
        if to != self.rank:
            self.members.heard(to)
            if isinstance(event.reply, ModelReply) and isinstance(request, MEASURED):
                self.members.measured(to, now - asked)
        match request, event.reply:
            case ArriveRequest(), HereReply():
                self.gathering.replied(to, request, event.reply)
                self.waves.heard_of(event.reply.wave)
                return self._look(now)
            case InitialRequest(), ModelReply(step) if self.joining.awaits(event.ticket):
                self.training.step = step
                return [Adopt(event.ticket, step)]
            case PullRequest(), _:
                return self._pulled(self.pulls.replied(event.ticket, to, event.reply, self.training.step, now), now)
            case RoundRequest(), ModelReply(_, weight) if wave := self._meeting(event.ticket):
                return self._went_on(wave.taken(weight, now), now)
            case RoundRequest(), NotReadyReply():  # which says nothing about later waves
                return self._came_to_nothing(event.ticket, to, request, now)
            case LeaveRequest(), _:
                return self._gone_if_told()
            case _ if self.exchange and isinstance(request, self.exchange.takes):
                return self._exchanged(self.exchange.replied(event.ticket, to, event.reply, now), now)
            case _, NotReadyReply() if not isinstance(request, ArriveRequest):
                self.members.rest(to, now)
                return self._came_to_nothing(event.ticket, to, request, now)
            case _:  # the answer of a request that is no longer of interest
                return [Forget(event.ticket)]

    def _failed(self, event: Failed, now: float) -> list[Effect]:
        to, request, _ = self._requests.close(event.ticket)
        if isinstance(request, LeaveRequest):
            return self._gone_if_told()
        if event.fault is Fault.POISONED and to != self.rank:
            return [self._set_aside(to, now), *self._came_to_nothing(event.ticket, to, request, now)]
        if event.fault is Fault.CANCELLED or to == self.rank:
            return self._came_to_nothing(event.ticket, to, request, now)
        effects: list[Effect] = []
        other = self.members.others[to]
        if isinstance(request, ArriveRequest) and other.stage is Stage.DONE and event.fault is Fault.UNREACHABLE:
            other.knows = True  # it goes once it knows everybody's figures
            return self._look(now)
        if isinstance(request, MEASURED) and event.fault is Fault.TIMEOUT:
            self.members.was_late(to)
        if self.members.failed(to, event.fault, now):
            effects.append(Note("lost", f"peer {to} is lost: {event.fault.value}"))
            effects += self._enough()
            effects += self.exchange.lost(to, now) if self.exchange else []
        elif not isinstance(request, ArriveRequest):
            effects.append(Note("fault", f"a request to peer {to} failed: {event.fault.value}"))
        return effects + self._came_to_nothing(event.ticket, to, request, now)

    def _came_to_nothing(self, ticket: int, to: int, request: Request, now: float) -> list[Effect]:
        """Our request got no useful answer; what now?"""
        match request:
            case ArriveRequest():
                return [*self.gathering.failed(to), *self._look(now)]
            case InitialRequest():
                return self.joining.failed(ticket, to)
            case PullRequest():
                return self._pulled(self.pulls.failed(ticket, self.training.step, now), now)
            case RoundRequest() if wave := self._meeting(ticket):
                return self._went_on([Forget(ticket), *wave.partner_lost(now)], now)
            case _ if self.exchange and isinstance(request, self.exchange.takes):
                return self._exchanged(self.exchange.failed(ticket, now), now)
            case _:
                return [Forget(ticket)]

    def _answered(self, event: Answered, now: float) -> list[Effect]:
        self.gathering.answered(event)
        self.giving.answered(event, now)
        if served := self.serving.answered(event):
            return [*served, *self._look(now)]
        if (wave := self.waves.answering(event.key)) and self.stage is not Stage.LEFT:
            return self._went_on(wave.answered(event, now), now)
        if self.exchange and self.stage is Stage.TRAIN:
            return self._exchanged(self.exchange.answered(event, now), now)
        return self._look(now)

    def _timer(self, name: str, now: float) -> list[Effect]:
        what, _, rank = name.partition(" ")
        if what == ANNOUNCE:
            return self.gathering.again(int(rank), now) or self._look(now)
        if what == GATHER:
            return self._late(now) if self.gathering.on else []
        if what == BUSY:
            return self.pulls.timer(self.training.step, now)
        if self.exchange and what in self.exchange.timers and self.stage is not Stage.LEFT:
            return self._exchanged(self.exchange.timer(name, now), now)
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
        arrival = ArriveRequest(stage, self.incarnation, self.report, self.waves.latest)
        return [*self.gathering.begin(arrival, now), *self._look(now)]

    def _look(self, now: float) -> list[Effect]:
        """Something was heard of another, or of its loss: what follows for an exchange, and is a wait over?"""
        looked = self.exchange.look(now) if self.exchange else []
        if not self.gathering.on:
            return self._exchanged(looked, now) if self.exchange and self.stage is Stage.TRAIN else looked
        if self.stage is not Stage.JOINING:
            return [*looked, *(self._gathered(now) if self.gathering.complete() else [])]
        asked = self.joining.ask(now)
        return [*looked, *(self._gather(Stage.START, now) if self.joining.may_begin() else asked)]

    def _late(self, now: float) -> list[Effect]:
        """They were waited for long enough."""
        if self.stage is Stage.JOINING:
            return self.joining.late(now) or self._gather(Stage.START, now)
        if self.stage is Stage.FINISH and self.exchange and (self.exchange.attends or self.exchange.awaits_all):
            # One that does not answer will be lost, and waited for no longer.
            return self.gathering.go_on(self.gathering.absent(), now)
        return [*self.gathering.late(), *self._gathered(now)]

    def _gathered(self, now: float) -> list[Effect]:
        self.gathering.end()
        if self.stage is Stage.START:
            self.stage = Stage.TRAIN
            return self._trained(self.training.begin(now), now)
        if self.stage is Stage.FINISH and self._agrees:
            return self._agree(now)
        return [Resume()]  # DONE, or it has only attended

    # --- training ---------------------------------------------------------------------------------

    def _trained(self, effects: list[Effect], now: float) -> list[Effect]:
        """Training has gone on; what comes after it is the finish."""
        return [*effects, *self._finish(now)] if self.training.is_over() else effects

    def _pulled(self, effects: list[Effect], now: float) -> list[Effect]:
        """A pull has gone on; it may be in an exchange's place."""
        return self._exchanged(effects, now) if self.exchange else effects

    def _exchanged(self, effects: list[Effect], now: float) -> list[Effect]:
        """An exchange has gone on."""
        return self._trained(self.training.exchanged(effects), now)

    def _mixed(self, ticket: int, now: float) -> list[Effect]:
        if self.stage is Stage.LEFT:
            return []
        if self.joining.adopted(ticket):
            return self._gather(Stage.START, now)
        if self.exchange and (adopted := self.exchange.adopted(ticket, now)) is not None:
            return adopted
        if self.stage is Stage.AGREE and self.waves.is_taken_in(ticket):
            return [Resume()]
        return self._trained(self.training.mixed(ticket, now), now)

    def _poisoned(self, ticket: int, now: float) -> list[Effect]:
        if self.stage is Stage.LEFT:
            self.poisoned += 1
            return []
        if (giver := self.joining.poisoned(ticket)) is not None:
            note = self._set_aside(giver, now)
            later = self.gathering.tell_later(giver, self.members.others[giver].aside_until)
            return [note, later, *self._look(now)]
        note = self._set_aside(self.pulls.poisoned(), now)
        return [note, *self._trained(self.training.go_on(now), now)]

    def _set_aside(self, sender: int, now: float) -> Note:
        """A model of ``sender`` cannot be used: count it, and ask it for none for a while."""
        self.poisoned += 1
        self.members.others[sender].aside_until = now + self.settings.peer_timeout
        return Note(
            "poisoned", f"the model of peer {sender} holds NaN or Inf: not mixed, and it is set aside for a while"
        )

    # --- the finish -------------------------------------------------------------------------------

    def _finish(self, now: float) -> list[Effect]:
        refused = self.waves.give_up(TRAINED, now)
        attends = self.exchange is not None and self.exchange.attends
        if not (self._agrees or attends):
            return [*refused, Resume()]
        return [*refused, *self._gather(Stage.FINISH, now)]

    @property
    def _agrees(self) -> bool:
        """Whether it takes part in what the run ends with."""
        return self.settings.finish != "none" and self.training.sound

    def _agree(self, now: float, members: tuple[int, ...] | None = None) -> list[Effect]:
        """Begin the last wave with ``members``; None: all that are here. Or take what the run's mode ends with."""
        self.stage = Stage.AGREE
        if self.exchange and members is None and (asked := self.exchange.agree(now)) is not None:
            return asked
        return self._went_on(self.waves.finish(members, self.training.step, self.weight, now), now)

    # --- waves ------------------------------------------------------------------------------------

    def _round_requested(self, event: Received, request: RoundRequest, now: float) -> list[Effect]:
        waves, last, refusal = self.waves, request.wave == LAST_WAVE, "it takes part in no wave"
        match self.stage:
            case Stage.START | Stage.TRAIN | Stage.FINISH if last:
                waves.hold(event)
                # One that no longer waits for others asks: all must mean the same members, so follow it.
                if self.stage is Stage.FINISH and self.gathering.on and waves.may_join(event):
                    self.gathering.end()
                    return self._agree(now, request.members)
                return []
            case Stage.AGREE | Stage.DONE if last and waves.current is not None:
                return self._went_on(waves.current.requested(event, now), now)
            case Stage.START | Stage.TRAIN:
                begun = self.stage is Stage.TRAIN
                return self._trained(self.training.round_requested(event, begun, now), now)
            case Stage.FINISH | Stage.AGREE | Stage.DONE:
                refusal = TRAINED
        return [waves.refuse(event, refusal, now)]

    def _meeting(self, ticket: int) -> Wave | None:
        """The wave, if ``ticket`` is our request of the round that it is in."""
        return None if self.stage is Stage.LEFT else self.waves.meeting(ticket)

    def _merged(self, event: Merged, now: float) -> list[Effect]:
        if self.exchange and (taken := self.exchange.merged(event, now)) is not None:
            self.poisoned += not event.sound
            return taken
        wave = self._meeting(event.ticket)
        if wave is None:  # it was given up meanwhile
            return []
        if not event.sound:
            self.poisoned += 1
            self.members.others[wave.partner].aside_until = now + self.settings.peer_timeout
        return self._went_on(wave.was_merged(event.sound, now), now)

    def _went_on(self, effects: list[Effect], now: float) -> list[Effect]:
        """A wave has gone on; if it was the last, take its mean in at once."""
        if self.stage is Stage.LEFT:
            return effects
        if self.stage is not Stage.AGREE:
            return self._trained(self.training.waved(effects, now), now)
        last = self.waves.current
        if last is None or not self.waves.over:
            return effects
        return [*effects, *self.waves.take_in(), *([] if last.merged else [Resume()])]

    # --- leaving ----------------------------------------------------------------------------------

    def _leave(self, now: float) -> list[Effect]:
        self.stage = Stage.LEFT
        self.gathering.end()
        # Models that still come are forgotten: whoever has been told that this peer leaves counts on its last word.
        self.joining.leave()
        dropped = self.training.leave(now)
        deadline = now + self.settings.peer_timeout / 10
        told: list[Effect] = [
            self._requests.send(rank, LeaveRequest(), now, deadline) for rank in self.members.awaited()
        ]
        return [Wait(), *dropped, *told, *self.waves.leave(now), *self._gone_if_told()]

    def _gone_if_told(self) -> list[Effect]:
        """Resume once every peer that could be told has been told."""
        telling = self._requests.asked(LeaveRequest)
        return [] if telling or self.stage is not Stage.LEFT else [Resume()]
