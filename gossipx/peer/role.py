"""The peer's state machine: ``handle(event, now) -> effects``.

One instance decides everything that one peer does. It opens no socket, starts no thread and reads no clock. A driver
(:mod:`gossipx.runtime` in real processes, :mod:`gossipx.sim` in virtual time) reports events: a finished step, a
received request, a reply, an expired timer. It carries out the returned effects in order: send a request, answer one,
capture or mix a model, set a timer, block or release the training thread.

For example, StepDone lets the policy decide. If it fires, the role returns Send with a PullRequest to a neighbour;
Replied reports that the model is here; the next StepDone returns Mix; and Mixed ends the exchange. If Failed arrives
instead, another neighbour is asked.

A peer passes through these stages, never backwards:

=========  ====================================  ======================================================================
stage      the peer                              the stage ends when
=========  ====================================  ======================================================================
JOINING    has no model; requests one            it has adopted a model, or no peer has one and it starts with its own
START      announces its arrival and waits       all other peers have arrived, or ``peer_timeout`` has passed
TRAIN      trains and exchanges models           training has ended (TrainingEnded) and no exchange is under way
FINISH     announces its arrival and waits       as START
AGREE      averages its model with all others    the last wave is merged, or the hub's or server's model is adopted
COMPARE    compares its final model, adopts one  all hold one model, or after a limited number of comparisons
DONE       announces its final figures, waits    as START, and all others have its figures
LEFT       takes no further part                 never
=========  ====================================  ======================================================================

JoinRun starts the machine, or AllPresent, which leads to TRAIN at once. FiguresReady takes it to DONE; a run without a
finish skips FINISH to COMPARE. LeaveRun leads to LEFT from any stage. From FINISH on, a wait lasts as long as absent
peers answer and make progress. While a peer waits in a stage other than TRAIN, a Wait effect has blocked the training
thread; a Resume effect releases it.

The role dispatches each event to a component, in a module of this package: stages (transitions), barrier (waiting for
other peers), joining (the first model), training (step boundaries), exchange with pulls, pushes and pairs (models
between two peers), waves (averaging over all peers), agreement (comparing final models), serving (answering pulls),
server_role (work for all peers).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossipx.figures import Counters
from gossipx.mixing import Average, Mixing
from gossipx.peer import last_wave, waves
from gossipx.peer.agreement import Agreement
from gossipx.peer.barrier import ANNOUNCE, BARRIER, Barrier
from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.peer.fragment_order import OTHER_FRAGMENTS, FragmentOrder
from gossipx.peer.joining.first_model import Joining
from gossipx.peer.joining.newcomers import Newcomers
from gossipx.peer.last_wave import Finish, LastWave
from gossipx.peer.membership import Membership, Requests
from gossipx.peer.pairs import PairExchange
from gossipx.peer.pulls import PullExchange
from gossipx.peer.pushes import PushExchange
from gossipx.peer.server_role import ServerRole
from gossipx.peer.serving import Outgoing, Serving
from gossipx.peer.stages import Stages
from gossipx.peer.training import UNSOUND, Training
from gossipx.peer.waves import WaveSequence
from gossipx.protocol import events
from gossipx.protocol.effects import Adopt, Answer, Effect, Forget, Note, Resume, Wait
from gossipx.protocol.fields import JoinedPeer
from gossipx.protocol.messages import (
    ArriveRequest,
    BusyReply,
    ElasticRequest,
    FinalRequest,
    HereReply,
    InitialRequest,
    LeaveRequest,
    ModelReply,
    NotReadyReply,
    PairRequest,
    PullRequest,
    PushRequest,
    ReferenceRequest,
    Reply,
    Request,
    RoundRequest,
    ShardRequest,
    ShareReply,
    ShareRequest,
    Stage,
    TakeRequest,
)
from gossipx.settings.modes import HasFragments, HasPolicy, HasServing, Pairs, Pushes, Waves
from gossipx.settings.sections import RunConfig
from gossipx.sync import SyncManager
from gossipx.topology import Topology
from gossipx.topology.schedules import RandomNeighbour, Schedule

TIMED_REQUESTS = PullRequest | TakeRequest | RoundRequest | ElasticRequest | ShardRequest
"""Requests whose round-trip time updates the latency estimate; InitialRequest, which many send at once, does not."""


@dataclass
class PeerRole:
    """The state machine of one peer: pass events to :meth:`handle` and carry out the effects that it returns.

    Args:
        rank, size: this peer's rank, from 0, and the number of peers that begin the run.
        sync: decides when to exchange; not shared with other peers.
        topology: the graph whose neighbours this peer exchanges models with.
        rng: this peer's own random generator.
        incarnation: distinguishes this process from an earlier one of the same rank.
        mixing: the share of a received model that enters our own.
        schedule: chooses the next partner within ``topology``; None: a random neighbour.
        shares: factors on the mixing share, by rank of the model's sender; 1 for ranks that are missing.
        settings: of the run.
        exchange_of: builds the exchange of a run with a hub or servers.
        joined: peers that joined the run before this one starts; it is one of them if its rank is not below ``size``.
        model_timeout: seconds that a model may take before any transfer was measured; ``peer_timeout`` if that is more.
        why_closed: why no peer can join the run while it is in progress; empty: one can.

    Attributes:
        counts: what this role, its parts and its driver count.
        requests: the requests of this peer that await a reply.
    """

    rank: int
    size: int
    sync: SyncManager
    topology: Topology
    rng: random.Random
    incarnation: int
    mixing: Mixing = field(default_factory=Average)
    settings: RunConfig = field(default_factory=RunConfig)
    schedule: Schedule | None = None
    shares: Mapping[int, float] = field(default_factory=dict)
    exchange_of: Callable[[PeerContext, PullExchange], Exchange] | None = None
    joined: Sequence[JoinedPeer] = ()
    model_timeout: float = 0.0
    why_closed: str = ""

    counts: Counters = field(default_factory=Counters, init=False)
    requests: Requests = field(default_factory=Requests, init=False)
    _leaving: bool = field(default=False, init=False)  # set by LeaveRun until the hand-over is complete

    def __post_init__(self) -> None:
        mode, timeout = self.settings.mode, self.settings.exchange.peer_timeout
        limits = mode if isinstance(mode, HasServing) else HasServing()  # first models are pulled in every mode
        schedule = self.schedule or RandomNeighbour(self.topology)
        self.members = Membership(self.rank, self.size, schedule, timeout, self.rng, self.model_timeout, self.counts)
        self.outgoing = Outgoing(self.members)
        self.serving = Serving(limits.max_served, limits.serve_share, self.requests, self.outgoing, self.counts)
        own = self.rank, self.incarnation, timeout, isinstance(mode, HasPolicy) and mode.blocking
        order = FragmentOrder(mode.fragments if isinstance(mode, HasFragments) else 1)
        self._context = context = PeerContext(
            *own, self.members, self.outgoing, self.requests, self.sync, order, self.counts
        )
        self.barrier = Barrier(self.members, self.requests, timeout)
        self.joining = Joining(context, self.barrier, self.settings.sync.init == "own")
        self.agreement = Agreement(self.rank, self.members, self.requests)
        self.waves = WaveSequence(context)
        in_waves = isinstance(mode, Waves)
        self.finish = Finish(context, in_waves)
        self.pulls = PullExchange(context, self.mixing, self.shares)
        self.exchange = self._build_exchange()
        self.server = self.exchange if isinstance(self.exchange, ServerRole) else ServerRole()
        self.training = Training(context, self.barrier, self.exchange, self.waves, in_waves)
        joined = self.barrier, self.why_closed, self.joined
        self.newcomers = Newcomers(self.rank, self.size, self.members, *joined)
        self.joining.joins = self.newcomers.is_one
        before = self.agreement, self.barrier, self.joining, self.training, self.waves, self.finish
        self.stages = Stages(context, self.settings, *before, self.exchange, self.server, self.newcomers)

    def _build_exchange(self) -> Exchange:
        if self.exchange_of is not None:
            return self.exchange_of(self._context, self.pulls)
        match self.settings.mode:
            case Pushes(weights=weights, max_pushes=most):
                return PushExchange(self._context, self.mixing, self.shares, weights == "push-sum", most)
            case Pairs():
                return PairExchange(self._context, self.mixing)
        return self.pulls

    def handle(self, event: events.Event, now: float) -> list[Effect]:
        """Handle one event and return the effects to carry out, in order.

        Args:
            now: seconds on the driver's monotonic clock.
        """
        effects = [*self.newcomers.told(event, now), *self._handle(event, now), *self.stages.follow(now)]
        if self._leaving and not self.server.is_handing_over:
            self._leaving = False
            effects += self.stages.leave(now)
        return effects

    def _handle(self, event: events.Event, now: float) -> list[Effect]:
        match event:
            case events.StepDone():
                return self.training.step_done(event, now)
            case events.Received():
                return self._received(event, now)
            case events.Replied():
                return self._replied(event, now)
            case events.Failed():
                return self._failed(event, now)
            case events.Answered():
                return self._answered(event, now)
            case events.TimerFired():
                return self._timer(event.name, now)
            case events.Mixed():
                return self._mixed(event.ticket, now)
            case events.Merged():
                return self._merged(event, now)
            case events.Poisoned():
                return self._poisoned(event.ticket, now)
            case events.WaveEncoded() | events.ShardAveraged() | events.WaveEnded():
                return self.waves.progressed(event, now)
            case events.GradientPoisoned(sender):
                self.counts.add("poisoned")
                return [Note("poisoned", f"a gradient of peer {sender} holds NaN or Inf: the gradient is ignored")]
            case events.JoinRun(resumed):
                return [Wait(), *self.stages.begin(resumed, now)]
            case events.AllPresent():
                return [Wait(), *self.stages.begin_at_once(now)]
            case events.TrainingEnded(agrees):
                return self.training.ended(agrees, now)
            case events.FinalModel(digest):
                return self.stages.compare(digest, now)
            case events.FiguresReady():
                self.stages.report = event.report
                return [Wait(), *self.stages.enter_barrier(Stage.DONE, now)]
            case events.Restored():
                return self.training.restored(event, now)
            case events.LeaveRun():
                self._leaving = True
                return [Wait(), *self.server.hand_over_all(now)]
            case events.Woke():
                self.members.woke()
                return []
            case events.AskEntry():
                return self.newcomers.asked(event, self.stage, now)
            case events.PeerMet():
                return self.newcomers.met(event, now)
            case _:
                return self.server.handle(event, now)

    @property
    def stage(self) -> Stage:
        """The current stage."""
        return self.stages.stage

    @property
    def report(self) -> dict[str, Any]:
        """The final figures of this peer; empty before DONE."""
        return self.stages.report

    @property
    def pulling(self) -> int | None:
        """The ticket of the current exchange, or of the current wave while training; None if there is neither."""
        if self.exchange.captured_ticket is None and self.waves.current is not None and self.stage is Stage.TRAIN:
            return self.waves.current.ticket
        return self.exchange.captured_ticket

    @property
    def weight(self) -> float:
        """The push-sum weight w of our model; 1 without push-sum."""
        return self.exchange.weight

    @property
    def trains(self) -> bool:
        """Whether this peer trains, rather than only serving others."""
        return self.server.trains

    @property
    def claims_agreement(self) -> bool:
        """Whether this peer is to end with the same model as all others."""
        return self.settings.sync.finish != "none" and self.trains

    # --- requests and replies ---------------------------------------------------------------------

    def _received(self, event: events.Received, now: float) -> list[Effect]:
        if event.sender != self.rank:
            self.members.heard_from(event.sender)
        match event.request:
            case ArriveRequest():
                self.barrier.arrived(event, self.stage, now)
                self.waves.record_over(event.request.wave)
                return [self._answer(event.key, self.stages.here(), now), *self.server.members_changed(now)]
            case FinalRequest(digest):
                return [self.agreement.requested(event, digest, now)]
            case LeaveRequest():
                answer, known = self._answer(event.key, self.stages.here(), now), self._has_left(event.sender)
                return [answer] if known else [answer, *self.stages.peer_left(event.sender, now)]
            case _ if not self._context.fragment_order.fits(event.request):
                return [self._answer(event.key, NotReadyReply(OTHER_FRAGMENTS), now)]
            case RoundRequest():
                return self.stages.round_requested(event, event.request, now)
            case ShardRequest() | ShareRequest() | ReferenceRequest():
                return self.stages.wave_requested(event, now)
            case InitialRequest() | PullRequest() if self.stage in (Stage.JOINING, Stage.LEFT):
                return [self._answer(event.key, NotReadyReply("it has no model yet, or has left the run"), now)]
            case InitialRequest() | PullRequest() if not self.training.sound:
                return [self._answer(event.key, NotReadyReply(UNSOUND), now)]
            case InitialRequest():
                deferred = self.server.initial_model_requested(event, now)
                return deferred or [self.outgoing.answer_initial(event, self.training.step, now)]
            case PullRequest() if not self.server.trains:
                return [self._answer(event.key, NotReadyReply("it only serves and has no model of its own"), now)]
            case PullRequest():
                trains = self.stage is Stage.TRAIN and not self._context.blocking
                return self.serving.requested(event, self.training.step, now, trains)
            case _ if not isinstance(event.request, self.exchange.request_types):
                refusal = NotReadyReply("it uses another kind of exchange: give all peers the same --mode")
                return [self._answer(event.key, refusal, now)]
            case PushRequest() | PairRequest() if self.stage is not Stage.TRAIN or not self.training.sound:
                return [self._answer(event.key, NotReadyReply("it is not training now"), now)]
            case _:
                return self.exchange.requested(event, now)

    def _answer(self, key: Hashable, reply: Reply, now: float) -> Answer:
        return Answer(key, reply, now + self.settings.exchange.peer_timeout)

    def _replied(self, event: events.Replied, now: float) -> list[Effect]:
        to, request, asked = self.requests.close(event.ticket)
        if to != self.rank:
            self.members.heard_from(to)
            self.members.others[to].missed = False
            if _is_transfer(request, event.reply):
                self.members.record_transfer(to, now - asked, now)
        match request, event.reply:
            case ArriveRequest(), HereReply():
                known = self._has_left(to)
                self.barrier.replied(to, request, event.reply, now)
                self.waves.record_over(event.reply.wave)
                if self._has_left(to) and not known:  # its LeaveRequest may be lost
                    return self.stages.peer_left(to, now)
                return self.server.members_changed(now)
            case InitialRequest(), ModelReply(step) if self.joining.awaits(event.ticket):
                self._context.step = step
                return [Adopt(event.ticket, step)]
            case InitialRequest(), BusyReply():
                return self.joining.put_off(event.ticket, to, now)
            case FinalRequest(), ModelReply():
                return self.agreement.replied(event.ticket)
            case PullRequest(), _:
                return self.pulls.replied(event.ticket, to, event.reply, now)
            case RoundRequest(), ModelReply(_, weight) if wave := self._meeting(event.ticket):
                return wave.model_received(weight, now)
            case RoundRequest(), NotReadyReply():  # no back-off: the peer may take part in a later round
                return self._request_failed(event.ticket, to, request, now)
            case ShardRequest() | ShareRequest() | ReferenceRequest(), _:
                return self.waves.replied(event.ticket, event.reply, now)
            case LeaveRequest(), _:
                return self.stages.resume_if_announced()
            case _ if isinstance(request, self.exchange.request_types):
                return self.exchange.replied(event.ticket, to, event.reply, now)
            case _, NotReadyReply() if not isinstance(request, ArriveRequest):
                self.members.back_off(to, now)
                return self._request_failed(event.ticket, to, request, now)
            case _:  # the request was given up meanwhile
                return [Forget(event.ticket)]

    def _has_left(self, rank: int) -> bool:
        return self.members.others.peek(rank).stage is Stage.LEFT

    def _failed(self, event: events.Failed, now: float) -> list[Effect]:
        to, request, _ = self.requests.close(event.ticket)
        if isinstance(request, LeaveRequest):
            return self.stages.resume_if_announced()
        if event.fault is events.Fault.POISONED and to != self.rank:
            return [self._suspend(to, now), *self._request_failed(event.ticket, to, request, now)]
        if event.fault is events.Fault.CANCELLED or to == self.rank:
            return self._request_failed(event.ticket, to, request, now)
        effects: list[Effect] = []
        other = self.members.others[to]
        if isinstance(request, ArriveRequest) and other.stage is Stage.DONE and event.fault is events.Fault.UNREACHABLE:
            other.knows_report = True  # it exits only once it has everybody's figures
            return self.server.members_changed(now)
        if isinstance(request, TIMED_REQUESTS) and event.fault is events.Fault.TIMEOUT:
            self.members.record_late(to)
        if self.members.failed(to, event.fault, now):
            effects.append(Note(f"lost {to}", f"peer {to} is lost: {event.fault.value}"))
            effects += self.stages.check_min_peers()
            effects += self.server.peer_lost(to, now)
        elif not isinstance(request, ArriveRequest) and not other.lost:
            effects.append(Note("fault", f"a request to peer {to} failed: {event.fault.value}"))
        return effects + self._request_failed(event.ticket, to, request, now)

    def _request_failed(self, ticket: int, to: int, request: Request, now: float) -> list[Effect]:
        """Handle a request of ours that brought nothing useful."""
        match request:
            case ArriveRequest():
                return [*self.barrier.failed(to), *self.server.members_changed(now)]
            case InitialRequest():
                return self.joining.failed(ticket, to, now)
            case FinalRequest():
                return self.stages.final_failed(ticket, now)
            case PullRequest():
                return self.pulls.failed(ticket, now)
            case RoundRequest() if wave := self._meeting(ticket):
                return [Forget(ticket), *wave.partner_lost(now)]
            case ShardRequest() | ShareRequest() | ReferenceRequest():
                return self.waves.failed(ticket, now)
            case _ if isinstance(request, self.exchange.request_types):
                return self.exchange.failed(ticket, now)
            case _:
                return [Forget(ticket)]

    def _answered(self, event: events.Answered, now: float) -> list[Effect]:
        self.barrier.answered(event)
        self.outgoing.answered(event, now)
        if served := self.serving.answered(event):
            return served
        if (wave := self.finish.answering(event.key)) and self.stage is not Stage.LEFT:
            return wave.answered(event, now)
        if self.stage is not Stage.TRAIN:
            return self.server.members_changed(now)
        return [*self.waves.answered(event, now), *self.exchange.answered(event, now)]

    def _timer(self, name: str, now: float) -> list[Effect]:
        what, _, rank = name.partition(" ")
        if what == ANNOUNCE:
            return self.barrier.retry(int(rank), now) or self.server.members_changed(now)
        if what == BARRIER:
            return self.stages.timed_out(now) if self.barrier.active else []
        if self.stage is Stage.LEFT:
            return []
        if what in self.exchange.timers:
            return self.exchange.timer_fired(name, now)
        if what == waves.TIMER:
            return self.waves.timer_fired(now)
        return self.finish.timer_fired(now) if what == last_wave.TIMER else []

    # --- models that were mixed, refused or merged --------------------------------------------------

    def _mixed(self, ticket: int, now: float) -> list[Effect]:
        if self.stage is Stage.LEFT:
            return []
        if self.joining.adopted(ticket):
            return self.stages.enter_barrier(Stage.START, now)
        if (adopted := self.server.adopted(ticket, now)) is not None:
            over = self.finish.leave(now, "it has the hub's centre") if self.stage is Stage.AGREE else []
            return [*adopted, *over]  # this model replaces the last wave
        if self.agreement.adopted(ticket) or (self.stage is Stage.AGREE and self.finish.is_taken_in(ticket)):
            return [Resume()]
        return self.training.mixed(ticket, now)

    def _poisoned(self, ticket: int, now: float) -> list[Effect]:
        if self.stage is Stage.LEFT:
            self.counts.add("poisoned")
            return []
        if (source := self.agreement.source_of(ticket)) is not None:
            return [self._suspend(source, now), *self.stages.final_failed(ticket, now)]
        if (source := self.joining.poisoned(ticket)) is not None:
            note = self._suspend(source, now)
            later = self.barrier.retry_at(source, self.members.others.peek(source).suspended_until)
            return [note, later, *self.server.members_changed(now)]
        note = self._suspend(self.pulls.poisoned(), now)
        return [note, *self.training.proceed(now)]

    def _suspend(self, sender: int, now: float) -> Note:
        """Count a model of ``sender`` that holds NaN or Inf, and request no model from it for peer_timeout."""
        self.counts.add("poisoned")
        self.members.others[sender].suspended_until = now + self.settings.exchange.peer_timeout
        text = f"the model of peer {sender} holds NaN or Inf: not mixed, and no more are requested for a while"
        return Note("poisoned", text)

    def _meeting(self, ticket: int) -> LastWave | None:
        """Return the last wave if ``ticket`` is our request of its current round."""
        return None if self.stage is Stage.LEFT else self.finish.meeting(ticket)

    def _merged(self, event: events.Merged, now: float) -> list[Effect]:
        if (taken := self.server.merged(event, now)) is not None:
            self.counts.add("poisoned", not event.sound)
            return taken
        wave = self._meeting(event.ticket)
        if wave is None:  # the wave was given up meanwhile
            return []
        if not event.sound:
            self._suspend(wave.partner, now)
        return wave.merge_ended(event.sound, now)


def _is_transfer(request: Request, reply: Reply) -> bool:
    """Return whether a reply's time is that of a transfer: for a mean, if its owner waited for no code in vain."""
    if isinstance(request, ShardRequest) and isinstance(reply, ShareReply):
        return reply.counted == request.members
    return isinstance(request, TIMED_REQUESTS) and isinstance(reply, ModelReply)
