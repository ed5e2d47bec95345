"""The peer's state machine.

A peer's life: JOINING (it has no model yet) → START (waits for the others) → TRAIN → FINISH (waits for the others) →
AGREE (averages in pairs, the last wave) → DONE (tells its figures) → LEFT. The role passes on what happens to its
parts, each of which decides one matter: what follows in the stage that it is in (stages), who is waited for
(gathering), where a first model comes from (joining), what follows at step boundaries (training), how models go from
peer to peer (an exchange, waves, serving), and what a hub or a server does for all (server).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gossipx.mixing import Average, Mixing
from gossipx.peer.barrier import ANNOUNCE, BARRIER, Barrier
from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.peer.joining import Joining
from gossipx.peer.membership import Membership, Requests
from gossipx.peer.pairs import Pairs
from gossipx.peer.pulls import Pulls
from gossipx.peer.pushes import Pushes
from gossipx.peer.server_role import ServerRole
from gossipx.peer.serving import Outgoing, Serving
from gossipx.peer.settings import PeerSettings
from gossipx.peer.stages import Stages
from gossipx.peer.training import UNSOUND, Training
from gossipx.peer.wave import TIMER, Wave
from gossipx.peer.waves import Waves
from gossipx.protocol.effects import Adopt, Answer, Effect, Forget, Note, Resume, Stop, Wait
from gossipx.protocol.events import (
    Answered,
    ChangeServers,
    Event,
    Failed,
    Fault,
    FiguresReady,
    GradientPoisoned,
    GradientsReady,
    JoinRun,
    LeaveRun,
    Merged,
    Mixed,
    Poisoned,
    Prepared,
    Received,
    Replied,
    Restored,
    StepDone,
    SwitchSync,
    TablesRestored,
    TimerFired,
    TrainingEnded,
)
from gossipx.protocol.messages import (
    LAST_WAVE,
    ArriveRequest,
    ElasticRequest,
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
    Stage,
    TakeRequest,
)
from gossipx.sync import SyncManager
from gossipx.topology import Topology
from gossipx.topology.schedules import Random, Schedule

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
    exchange_of: Callable[[PeerContext, Pulls], Exchange] | None = None

    poisoned: int = field(default=0, init=False)  # models that held NaN or Inf and were refused
    _requests: Requests = field(default_factory=Requests, init=False)
    _leaving: bool = field(default=False, init=False)  # once what it holds for others is handed over

    def __post_init__(self) -> None:
        settings, timeout = self.settings, self.settings.peer_timeout
        self._model_timeout = max(timeout, settings.model_timeout)
        schedule = self.schedule or Random(self.topology)
        self.members = Membership(self.rank, self.size, schedule, timeout, self.rng, self._model_timeout)
        self.outgoing = Outgoing(self.members)
        self.serving = Serving(settings.max_served, settings.serve_share, self._requests, self.outgoing)
        self.barrier = Barrier(self.members, self._requests, timeout)
        self.joining = Joining(self.rank, self.members, self._requests, self.barrier, settings, self._model_timeout)
        self.waves = Waves(self.rank, self.members, self._requests, self.sync, timeout)
        own = self.rank, self.incarnation, timeout, settings.blocking
        self._context = PeerContext(*own, self.members, self.outgoing, self._requests, self.sync)
        self.pulls = Pulls(self._context, self.mixing, self.shares)
        self.exchange = self._made_exchange()
        self.server = self.exchange if isinstance(self.exchange, ServerRole) else ServerRole()
        waves = self.waves, settings.exchange == "waves"
        self.training = Training(self._context, self.barrier, self.exchange, *waves)
        parts = self.barrier, self.joining, self.training, self.waves, self.exchange, self.server
        self.stages = Stages(self.incarnation, settings, self.members, self._requests, *parts)

    def _made_exchange(self) -> Exchange:
        settings = self.settings
        if self.exchange_of is not None:
            return self.exchange_of(self._context, self.pulls)
        if settings.mode == "push":
            return Pushes(self._context, self.mixing, self.shares, settings.push_sum, settings.max_pushes)
        return Pairs(self._context) if settings.mode == "pushpull" else self.pulls

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event in and say what is to be done about it, in order."""
        effects = [*self._handle(event, now), *self.stages.follow(now)]
        if self._leaving and not self.server.stays:
            self._leaving = False
            effects += self.stages.leave(now)
        return effects

    def _handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case StepDone():
                return self.training.step_done(event, now)
            case Received():
                return self._received(event, now)
            case Replied():
                return self._replied(event, now)
            case Failed():
                return self._failed(event, now)
            case Answered():
                return self._answered(event, now)
            case TimerFired():
                return self._timer(event.name, now)
            case Mixed():
                return self._mixed(event.ticket, now)
            case Merged():
                return self._merged(event, now)
            case Poisoned():
                return self._poisoned(event.ticket, now)
            case GradientPoisoned(sender):
                self.poisoned += 1
                return [Note("poisoned", f"a gradient of peer {sender} holds NaN or Inf: it is left out")]
            case JoinRun(resumed):
                self.joining.others_begin = resumed is False
                # With --init own, too: one that is started again takes a model of those that train.
                has_model = resumed or self.size == 1
                return [Wait(), *self.stages.enter_barrier(Stage.START if has_model else Stage.JOINING, now)]
            case TrainingEnded(agrees):
                return self.training.ended(agrees, now)
            case FiguresReady():
                self.stages.report = event.report
                return [Wait(), *self.stages.enter_barrier(Stage.DONE, now)]
            case Restored():
                if event.draws is not None:
                    self._load_draws(event.draws)
                return self.training.restored(event, now)
            case LeaveRun():
                self._leaving = True
                return [Wait(), *self.server.hand_over_all(now)]
            case GradientsReady(buckets):
                return self.server.gradients_ready(buckets, now)
            case SwitchSync():
                return self.server.switch(event, now)
            case ChangeServers():
                return self.server.change(event, now)
            case Prepared():
                return self.server.prepared(event, now)
            case TablesRestored():
                return self.server.tables_restored(event, now)

    @property
    def stage(self) -> Stage:
        """Where in its life it is."""
        return self.stages.stage

    @property
    def report(self) -> dict[str, Any]:
        """Our final figures, once known."""
        return self.stages.report

    @property
    def pulling(self) -> int | None:
        """The ticket of the pull, or of the wave while training, that is under way, or of our captured model."""
        if self.exchange.captured is None and self.waves.current is not None and self.stage is Stage.TRAIN:
            return self.waves.current.ticket
        return self.exchange.captured

    @property
    def weight(self) -> float:
        """Push-sum's w of our own model; 1 without push-sum."""
        return self.exchange.weight

    @property
    def trains(self) -> bool:
        """Whether this peer trains, or only serves those that do."""
        return self.server.gives

    @property
    def rounds_lost(self) -> int:
        """Rounds of the finish that a missing partner cost."""
        last = self.waves.current
        return last.lost if last is not None and last.number == LAST_WAVE else 0

    def draws(self) -> dict[str, Any]:
        """What decides whom we turn to next, as plain data: the generator, and what is known of the others' speed."""
        version, words, gauss = self.rng.getstate()
        members, last = self.members.state_dict(), self.exchange.last
        return {"rng": [version, list(words), gauss], "members": members, "last": last}

    def _load_draws(self, draws: dict[str, Any]) -> None:
        version, words, gauss = draws["rng"]
        self.rng.setstate((version, tuple(words), gauss))
        self.members.load_state_dict(draws["members"])
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
                self.barrier.arrived(event, self.stage)
                self.waves.heard_of(event.request.wave)
                here = HereReply(self.stage, self.report, self.waves.latest)
                return [self._answer(event.key, here, now), *self.server.look(now)]
            case LeaveRequest():
                self.members.others[event.sender].stage = Stage.LEFT
                left = [] if self.stage is Stage.LEFT else self.exchange.left(event.sender, now)
                return [
                    self._answer(event.key, HereReply(self.stage), now),
                    Note("left", f"peer {event.sender} has left"),
                    *left,
                    *self.waves.gone(event.sender, now),
                    *self._enough(),
                    *self.server.look(now),
                ]
            case RoundRequest():
                return self.stages.round_requested(event, event.request, now)
            case InitialRequest() | PullRequest() if self.stage in (Stage.JOINING, Stage.LEFT):
                return [self._answer(event.key, NotReadyReply("it has no model to give yet"), now)]
            case InitialRequest() | PullRequest() if not self.training.sound:
                return [self._answer(event.key, NotReadyReply(UNSOUND), now)]
            case InitialRequest():
                held = self.server.before_giving(event, now)
                given = self._answer(event.key, ModelReply(self.training.step), now, whole=True)
                return [given] if held is None else held
            case PullRequest() if not self.server.gives:
                return [self._answer(event.key, NotReadyReply("it does not train, it only serves"), now)]
            case PullRequest():
                trains = self.stage is Stage.TRAIN and not self.settings.blocking
                return self.serving.requested(event, self.training.step, now, trains)
            case _ if not isinstance(event.request, self.exchange.takes):
                refusal = NotReadyReply("it exchanges models in another way: give all peers the same --mode")
                return [self._answer(event.key, refusal, now)]
            case PushRequest() | PairRequest() if self.stage is not Stage.TRAIN or not self.training.sound:
                return [self._answer(event.key, NotReadyReply("it does not train now"), now)]
            case _:
                return self.exchange.requested(event, now)

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
                self.barrier.replied(to, request, event.reply)
                self.waves.heard_of(event.reply.wave)
                return self.server.look(now)
            case InitialRequest(), ModelReply(step) if self.joining.awaits(event.ticket):
                self._context.step = step
                return [Adopt(event.ticket, step)]
            case PullRequest(), _:
                return self.pulls.replied(event.ticket, to, event.reply, now)
            case RoundRequest(), ModelReply(_, weight) if wave := self._meeting(event.ticket):
                return wave.taken(weight, now)
            case RoundRequest(), NotReadyReply():  # which says nothing about later waves
                return self._came_to_nothing(event.ticket, to, request, now)
            case LeaveRequest(), _:
                return self.stages.gone_if_told()
            case _ if isinstance(request, self.exchange.takes):
                return self.exchange.replied(event.ticket, to, event.reply, now)
            case _, NotReadyReply() if not isinstance(request, ArriveRequest):
                self.members.rest(to, now)
                return self._came_to_nothing(event.ticket, to, request, now)
            case _:  # the answer of a request that is no longer of interest
                return [Forget(event.ticket)]

    def _failed(self, event: Failed, now: float) -> list[Effect]:
        to, request, _ = self._requests.close(event.ticket)
        if isinstance(request, LeaveRequest):
            return self.stages.gone_if_told()
        if event.fault is Fault.POISONED and to != self.rank:
            return [self._suspend(to, now), *self._came_to_nothing(event.ticket, to, request, now)]
        if event.fault is Fault.CANCELLED or to == self.rank:
            return self._came_to_nothing(event.ticket, to, request, now)
        effects: list[Effect] = []
        other = self.members.others[to]
        if isinstance(request, ArriveRequest) and other.stage is Stage.DONE and event.fault is Fault.UNREACHABLE:
            other.knows = True  # it goes once it knows everybody's figures
            return self.server.look(now)
        if isinstance(request, MEASURED) and event.fault is Fault.TIMEOUT:
            self.members.was_late(to)
        if self.members.failed(to, event.fault, now):
            effects.append(Note("lost", f"peer {to} is lost: {event.fault.value}"))
            effects += self._enough()
            effects += self.server.lost(to, now)
        elif not isinstance(request, ArriveRequest):
            effects.append(Note("fault", f"a request to peer {to} failed: {event.fault.value}"))
        return effects + self._came_to_nothing(event.ticket, to, request, now)

    def _came_to_nothing(self, ticket: int, to: int, request: Request, now: float) -> list[Effect]:
        """Continue without a useful answer to our request."""
        match request:
            case ArriveRequest():
                return [*self.barrier.failed(to), *self.server.look(now)]
            case InitialRequest():
                return self.joining.failed(ticket, to, now)
            case PullRequest():
                return self.pulls.failed(ticket, now)
            case RoundRequest() if wave := self._meeting(ticket):
                return [Forget(ticket), *wave.partner_lost(now)]
            case _ if isinstance(request, self.exchange.takes):
                return self.exchange.failed(ticket, now)
            case _:
                return [Forget(ticket)]

    def _answered(self, event: Answered, now: float) -> list[Effect]:
        self.barrier.answered(event)
        self.outgoing.answered(event, now)
        if served := self.serving.answered(event):
            return served
        if (wave := self.waves.answering(event.key)) and self.stage is not Stage.LEFT:
            return wave.answered(event, now)
        return self.exchange.answered(event, now) if self.stage is Stage.TRAIN else self.server.look(now)

    def _timer(self, name: str, now: float) -> list[Effect]:
        what, _, rank = name.partition(" ")
        if what == ANNOUNCE:
            return self.barrier.again(int(rank), now) or self.server.look(now)
        if what == BARRIER:
            return self.stages.late(now) if self.barrier.on else []
        if self.stage is Stage.LEFT:
            return []
        if what in self.exchange.timers:
            return self.exchange.timer(name, now)
        return self.waves.timer(now) if what == TIMER else []

    def _enough(self) -> list[Effect]:
        alive = self.members.alive()
        if alive >= self.settings.min_peers:
            return []
        return [Stop(f"{alive} of {self.size} peers left, fewer than min_peers = {self.settings.min_peers}"), Resume()]

    # --- models that have come --------------------------------------------------------------------

    def _mixed(self, ticket: int, now: float) -> list[Effect]:
        if self.stage is Stage.LEFT:
            return []
        if self.joining.adopted(ticket):
            return self.stages.enter_barrier(Stage.START, now)
        if (adopted := self.server.adopted(ticket, now)) is not None:
            over = self.waves.leave(now, "it has the hub's centre") if self.stage is Stage.AGREE else []
            return [*adopted, *over]  # where that is what the run ends with, there is no last wave
        if self.stage is Stage.AGREE and self.waves.is_taken_in(ticket):
            return [Resume()]
        return self.training.mixed(ticket, now)

    def _poisoned(self, ticket: int, now: float) -> list[Effect]:
        if self.stage is Stage.LEFT:
            self.poisoned += 1
            return []
        if (source := self.joining.poisoned(ticket)) is not None:
            note = self._suspend(source, now)
            later = self.barrier.retry_at(source, self.members.others[source].suspended_until)
            return [note, later, *self.server.look(now)]
        note = self._suspend(self.pulls.poisoned(), now)
        return [note, *self.training.go_on(now)]

    def _suspend(self, sender: int, now: float) -> Note:
        """A model of ``sender`` cannot be used: count it, and ask it for none for a while."""
        self.poisoned += 1
        self.members.others[sender].suspended_until = now + self.settings.peer_timeout
        text = f"the model of peer {sender} holds NaN or Inf: not mixed, and it is set aside for a while"
        return Note("poisoned", text)

    def _meeting(self, ticket: int) -> Wave | None:
        """The wave, if ``ticket`` is our request of the round that it is in."""
        return None if self.stage is Stage.LEFT else self.waves.meeting(ticket)

    def _merged(self, event: Merged, now: float) -> list[Effect]:
        if (taken := self.server.merged(event, now)) is not None:
            self.poisoned += not event.sound
            return taken
        wave = self._meeting(event.ticket)
        if wave is None:  # it was given up meanwhile
            return []
        if not event.sound:
            self._suspend(wave.partner, now)
        return wave.was_merged(event.sound, now)
