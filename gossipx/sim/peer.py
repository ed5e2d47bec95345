"""The driver of one peer role in virtual time, over a real arena of a real module."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gossipx import actor, effects
from gossipx.actor import Fault
from gossipx.arena import ParameterArena
from gossipx.buffers import typed
from gossipx.coded import Coded
from gossipx.errors import ProtocolError
from gossipx.hub import Elastic
from gossipx.incoming import Incoming
from gossipx.messages import (
    LAST_WAVE,
    BusyReply,
    CarryingRequest,
    CentreRequest,
    ElasticRequest,
    InitialRequest,
    ModelReply,
    ModelRequest,
    PairRequest,
    PullRequest,
    PushRequest,
    Reply,
    RoundRequest,
    Stage,
    TakeRequest,
)
from gossipx.peer import PeerRole
from gossipx.server_messages import CopyReply, GradientRequest, RangesRequest, RecordRequest, ServerRequest, TablesReply
from gossipx.sim.models import Exchange, Retrieval, SimModels
from gossipx.sim.tables import SimTables
from gossipx.storage.client import Client
from gossipx.storage.desk import Desk

if TYPE_CHECKING:
    from gossipx.sim.world import World


class SimPeer:
    """One peer: its life is join, train, finish, tell its figures, end.

    Args:
        role: fresh, with this peer's rank.
        module: laid out in an arena here.
        gradient_step: one real optimizer step on ``peer.module``; called when the step's time has passed.
        iterations: steps in all, those counted that an adopted model has seen.
        compute_seconds: virtual seconds a step takes.
        mix_buffers: see :class:`~gossipx.arena.ParameterArena`.
        desk_of: of a run with a parameter server: makes the tables of the module. ``gradient_step`` then makes
            gradients alone.

    Attributes:
        down_since: when it ended or crashed; None while it runs.
        before_finish: trained values as it entered the finish; None before.
        reason: why it had to stop, if it had to.
        bytes_received, finish_bytes: of models, while training and in the finish.
        blocked_seconds: how long training stood still for the role, from the first step to the last.
    """

    def __init__(
        self,
        role: PeerRole,
        module: nn.Module,
        gradient_step: Callable[[SimPeer], None],
        iterations: int,
        compute_seconds: float = 1.0,
        mix_buffers: bool = True,
        desk_of: Callable[[nn.Module], Desk] | None = None,
        codec_of: Callable[[ParameterArena], Coded] | None = None,
    ):
        self.role = role
        self.resumed: bool | None = None
        self.rank = role.rank
        self.module = module
        self.arena = ParameterArena(module, mix_buffers)
        self.compute_seconds = compute_seconds
        self.iterations = iterations
        self.down_since: float | None = None
        self.paused_until = 0.0
        self.poisoned = False
        self.reason: str | None = None
        self.before_finish: Tensor | None = None
        self.bytes_received = self.finish_bytes = 0
        self.blocked_seconds = 0.0
        self._gradient_step = gradient_step
        self._events: deque[actor.Event] = deque()
        self._handling = False
        self._exchanges: dict[int, Exchange] = {}
        self.models = SimModels(role, self.arena, self._note, self._events.append)
        self._requests = 0  # received so far: the keys of requests
        self._requesters: dict[Hashable, tuple[SimPeer, int]] = {}
        self._brought: dict[Hashable, Exchange] = {}  # by the key of the request
        self._timers: dict[str, float] = {}
        self._phase = "join"
        self._leaving = False
        self._waits_since: float | None = None
        self._stepping = False
        self.codec = None if codec_of is None else codec_of(self.arena)
        self.tables = None if desk_of is None else SimTables(desk_of(module), self._events.append)
        self._lacks_since: float | None = None  # tables that are to be computed with
        self._computed = False  # an iteration's gradients are made, and to be pushed

    @property
    def retrievals(self) -> list[Retrieval]:
        """Models that were mixed, or merged in a wave, while training."""
        return self.models.retrievals

    def weights(self) -> Tensor:
        """All trained values, one float64 vector."""
        parts = [section.values[: section.trainable].double() for section in self.arena.sections]
        return torch.cat(parts).clone()

    def centre(self) -> Tensor:
        """The centre that this peer, the hub, holds: one float64 vector of trained values."""
        assert isinstance(self.role.exchange, Elastic) and self.role.exchange.centre
        held = self.models.held[self.role.exchange.centre.ticket].now
        rows = zip(self.arena.sections, held.vectors, strict=True)
        return torch.cat([vector[: section.trainable].double() for section, vector in rows])

    # --- its life -----------------------------------------------------------------------------------

    def begin(self, world: World) -> None:
        """Join the run; called by the world."""
        self._world = world
        self._tell(actor.JoinRun(self.resumed))

    def tell(self, event: actor.Event) -> None:
        """Tell its role of an event from outside."""
        self._tell(event)

    def ask_to_leave(self) -> None:
        """SIGTERM."""
        self._leaving = True
        self._later(self._world.now, self._go_on)

    def _go_on(self) -> None:
        """What the training thread does next, if it may."""
        if self._stepping or self.down_since is not None:
            return
        if self.reason is not None:
            self._world.end(self, "stops")
        elif self._leaving and self._phase != "leave":
            self._phase = "leave"
            self._tell(actor.LeaveRun())
        elif self._waits_since is None and (self._phase == "leave" or self._has_tables()):
            self._next_phase()

    def _has_tables(self) -> bool:
        """Whether all tables that were asked for are here; they are in the model then."""
        if self.tables is None:
            return True
        now = self._world.now
        if not self.tables.desk.client.ready():
            self._lacks_since = now if self._lacks_since is None else self._lacks_since
            return False
        if self._lacks_since is not None:
            self.blocked_seconds += now - self._lacks_since
            self._lacks_since = None
        self.tables.desk.client.apply()
        return True

    def _next_phase(self) -> None:
        match self._phase:
            case "join":
                self._phase = "train"
                if self.role.sync.policy.uses_drift:
                    self.models.reference.set()
                self._go_on()
            case "train" if self._computed:
                self._computed = False
                assert self.tables is not None
                self._push(self.tables.desk.client)
                self._step_done()
            case "train" if self.arena.step < self.iterations:
                self._stepping = True
                self._later(self._world.now + self.compute_seconds, self._step)
            case "train":
                self._phase = "finish"
                self._tell(actor.TrainingEnded())
            case "finish":
                self._phase = "figures"
                report: dict[str, object] = {"iterations": self.arena.step, "retrievals": self.role.sync.retrievals}
                self._tell(actor.FiguresReady(report))
            case "figures":
                self._world.end(self, "ends")
            case "leave":
                self._world.end(self, "has left")

    def _step(self) -> None:
        self._stepping = False
        self._gradient_step(self)
        if self.tables is None:
            self._step_done()
        else:  # which may have to wait before the first gradient
            self._computed = True
            self._tell(actor.GradientsReady(()))

    def _step_done(self) -> None:
        delta = self.arena.step_done()
        self._note(f"step {self.arena.step}")
        self._tell(actor.StepDone(self.arena.step, delta, self.models.drift()))

    def _push(self, client: Client) -> None:
        """Gradients leave as backward makes them: those of the last tables first."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._stepping = True  # until the step is done
        for number in reversed(range(len(trained))):
            gradient = trained[number].grad
            if gradient is not None and (whole := client.update(number, gradient)):
                self._tell(actor.GradientsReady(tuple(whole)))
        if whole := client.flush():
            self._tell(actor.GradientsReady(tuple(whole)))
        self._stepping = False

    def _later(self, time: float, action: Callable[[], None]) -> None:
        """Do ``action`` at ``time`` if this process then lives, or when it is no longer paused."""

        def act() -> None:
            if self.down_since is not None:
                return
            if self.paused_until > self._world.now:
                self._world.at(self.paused_until, act)
            else:
                action()

        self._world.at(time, act)

    # --- events and effects ---------------------------------------------------------------------------

    def _tell(self, event: actor.Event) -> None:
        """Tell the role, carry out what follows, and let training go on if it may."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        while self._events:
            stage = self.role.stage
            for effect in self.role.handle(self._events.popleft(), self._world.now):
                self._carry_out(effect)
            if self.role.stage is not stage:
                self._note(f"is {self.role.stage.name}")
                if stage < Stage.FINISH <= self.role.stage < Stage.LEFT:
                    self.before_finish = self.weights()
        self._handling = False
        self._go_on()

    def _carry_out(self, effect: effects.Effect) -> None:
        now = self._world.now
        if self.tables is not None and self.tables.carry_out(effect):
            return
        match effect:
            case effects.Send():
                self._send(effect)
            case effects.Cancel(ticket):
                self.fail(ticket, Fault.CANCELLED)
            case effects.Answer(begins=begins) if begins > now:
                self._later(begins, lambda: self._answer(effect))
            case effects.Answer():
                self._answer(effect)
            case effects.Keep(key, ticket):
                self._exchanges[ticket] = self._brought.pop(key)
            case effects.Capture(ticket, _):
                self.models.capture(ticket)
            case effects.Merge():
                self.models.merge(self._exchanges[effect.ticket], effect, now)
                self._forget(effect.ticket)
            case effects.TakeIn(ticket):
                self.models.take_in(ticket)
                self._forget(ticket)
            case effects.Mix(ticket, share):
                self.models.mix(ticket, self._exchanges[ticket], share, now)
                self._forget(ticket)
            case effects.Adopt(ticket, step):
                self.models.adopt(ticket, self._exchanges[ticket], self.arena.step if step is None else step)
                self.begin_codec()
                self._forget(ticket)
            case effects.Forget(ticket):
                self._forget(ticket)
            case effects.Given(ticket):
                self.models.given(ticket)
                self._forget(ticket)
            case effects.SetTimer(name, at):
                self._timers[name] = at
                self._later(at, lambda: self._fire(name, at))
            case effects.Wait():
                self._waits_since = now if self._waits_since is None else self._waits_since
            case effects.Resume():
                if self._waits_since is not None and self._phase == "train":
                    self.blocked_seconds += now - self._waits_since
                self._waits_since = None
            case effects.Switched(_, problem):
                self._note(problem or "has had the sync model switched")
            case effects.Note(_, text):
                self._note(text)
            case effects.Stop(reason):
                self._note(f"must stop: {reason}")
                self.reason = self.reason or reason

    def begin_codec(self) -> None:
        """All peers begin with the model as it is now; unless it has made steps: then they have begun already."""
        if self.codec is not None and self.arena.step:
            self.codec.begin(None)
        elif self.codec is not None:
            snapshot = self.arena.snapshot()
            self.codec.begin(snapshot.buffer.vectors)
            snapshot.release()

    def _note(self, what: str) -> None:
        self._world.note(self.rank, what)

    def _fire(self, name: str, at: float) -> None:
        if self._timers.get(name) == at:
            del self._timers[name]
            self._tell(actor.TimerFired(name))

    # --- requests of its own ----------------------------------------------------------------------------

    def _send(self, send: effects.Send) -> None:
        incoming = taking = None
        brought = bytearray()
        if isinstance(send.request, ModelRequest):
            base = self.models.base(send)
            if isinstance(send.request, ElasticRequest):
                assert base is not None
                brought += self._poison(bytearray(base.buffer.view))
            incoming = Incoming(self.arena, base, whole=isinstance(send.request, InitialRequest))
            if self.codec is not None:
                taking = self.codec.taking(send.to, send.request, incoming)
            if self.codec is not None and taking is not None:
                told, source = self.codec.asked(send.to, send.request, [] if base is None else base.buffer.vectors)
                send = dataclasses.replace(send, request=told)
                if source is not None:
                    brought[:] = source.view
        if self.tables is not None and isinstance(send.request, ServerRequest | RangesRequest):
            send, brought = self.tables.outgoing(send)
        exchange = Exchange(send, self._world.now, incoming, taking=taking)
        self._exchanges[send.ticket] = exchange
        match send.request:
            case InitialRequest():
                self._note(f"asks {send.to} for a model to begin with")
            case PullRequest():
                self._note(f"pulls {send.to}")
            case PushRequest():
                self._note(f"pushes to {send.to}")
            case PairRequest():
                self._note(f"asks {send.to} to pair")
            case TakeRequest():
                self._note(f"takes from {send.to}")
            case RoundRequest(wave, number):
                which = "" if wave == LAST_WAVE else f" of wave {wave}"
                self._note(f"meets {send.to} in round {number}{which}")
            case ElasticRequest():
                self._note(f"brings its model to {send.to}")
            case CentreRequest():
                self._note(f"asks {send.to} for the centre")
        self._world.carry(self, send.to, len(brought), lambda: self._arrive(send, brought))
        self._later(send.deadline, lambda: self.fail(send.ticket, Fault.TIMEOUT))

    def _arrive(self, send: effects.Send, brought: bytearray) -> None:
        """Our request is at the other's address, with what it brings."""
        other = self._world.peers.get(send.to)
        if other is None or other.down_since is not None:
            self._world.refuse(self, send.ticket, send.to)
        else:
            other.receive(self, send, brought)

    def waiting_for(self, rank: int) -> list[int]:
        """Tickets of open requests to ``rank``."""
        return [ticket for ticket, exchange in self._exchanges.items() if exchange.open and exchange.send.to == rank]

    def fail(self, ticket: int, fault: Fault) -> None:
        """Our request ``ticket`` gets no answer; nothing if it had one before."""

        def failed() -> None:
            exchange = self._exchanges.get(ticket)
            if exchange is not None and exchange.open:
                exchange.open = False
                self._note(f"has no answer of {exchange.send.to}: {fault.name}")
                self._tell(actor.Failed(ticket, fault))
                self._close(exchange)

        self._later(self._world.now, failed)

    def replied(self, ticket: int, reply: Reply, payload: bytearray) -> bool:
        """The last byte of an answer is here; returns whether it was still wanted."""
        exchange = self._exchanges.get(ticket)
        if self.down_since is not None or exchange is None or not exchange.open:
            return False
        exchange.open = False
        unread = ""
        if isinstance(reply, TablesReply | CopyReply):
            assert self.tables is not None
            self.tables.arrived(ticket, reply, payload)
            self.bytes_received += len(payload) if exchange.send.to != self.rank else 0
        if isinstance(reply, ModelReply):
            assert exchange.incoming is not None
            exchange.their_step = reply.step
            exchange.arrived = self._world.now
            if exchange.taking is None:
                exchange.incoming.take(0, memoryview(payload))
            else:
                exchange.taking.fit(reply).take(0, memoryview(payload))
                try:
                    exchange.taking.decode()
                except ProtocolError as error:
                    unread = str(error)
            request = exchange.send.request
            if isinstance(request, RoundRequest) and request.wave == LAST_WAVE:
                self.finish_bytes += len(payload)
            elif not isinstance(request, InitialRequest):
                self.bytes_received += len(payload)

        def told() -> None:
            if unread:
                self._note(f"cannot decode the model of {exchange.send.to}: {unread}")
                self._tell(actor.Failed(ticket, Fault.PROTOCOL))
                return
            if isinstance(reply, ModelReply) and isinstance(exchange.send.request, TakeRequest | ElasticRequest):
                assert exchange.incoming is not None
                if math.isnan(exchange.incoming.norm()):  # known before the other side counts on it
                    self._note(f"refuses the model of {exchange.send.to}")
                    self._tell(actor.Failed(ticket, Fault.POISONED))
                    return
            self._tell(actor.Replied(ticket, reply))
            self._close(exchange)

        self._later(self._world.now, told)
        return True

    def _close(self, exchange: Exchange) -> None:
        """It has its answer: unless it holds a model, nobody refers to it any more."""
        if exchange.incoming is None:
            self._exchanges.pop(exchange.send.ticket, None)

    # --- requests of others -----------------------------------------------------------------------------

    def receive(self, sender: SimPeer, send: effects.Send, brought: bytearray) -> None:
        """A request is here."""
        self._requests += 1
        key = self._requests
        self._requesters[key] = (sender, send.ticket)

        def told() -> None:
            if isinstance(send.request, GradientRequest | RecordRequest):
                assert self.tables is not None
                self.tables.brought(sender.rank, key, send.request, brought)
                self.bytes_received += len(brought) if sender is not self else 0
            elif isinstance(send.request, CarryingRequest):
                incoming = Incoming(self.arena, None)
                self.bytes_received += len(brought) if sender is not self else 0
                came = dataclasses.replace(send, to=sender.rank)
                assert isinstance(send.request, ElasticRequest)
                bringing = None if self.codec is None else self.codec.room(sender.rank, send.request, incoming)
                (bringing or incoming).take(0, memoryview(brought))
                now, step = self._world.now, send.request.step
                exchange = Exchange(came, now, incoming, open=False, their_step=step, arrived=now, bringing=bringing)
                try:
                    if bringing is not None:
                        bringing.decode()
                except ProtocolError as error:
                    self._note(f"leaves out what {sender.rank} brings: {error}")
                    incoming.release()
                    self._answer(effects.Answer(key, BusyReply(), now + send.request.patience))
                    return
                self._brought[key] = exchange
            self._tell(actor.Received(sender.rank, key, send.request))

        self._later(self._world.now, told)

    def _answer(self, answer: effects.Answer) -> None:
        requester, ticket = self._requesters.pop(answer.key)
        if self.tables is not None:
            self.tables.drop(answer.key)
        if dropped := self._brought.pop(answer.key, None):
            assert dropped.incoming is not None
            dropped.incoming.release()
        reply = answer.reply
        payload = bytearray()
        if isinstance(reply, TablesReply | CopyReply):
            assert self.tables is not None
            reply, payload = self.tables.answer(answer, reply)
        if isinstance(reply, ModelReply):
            if answer.captured is None:
                snapshot = self.arena.snapshot(answer.whole_model)
            else:
                snapshot = self.models.held[answer.captured].now.hold()
            reply = dataclasses.replace(reply, step=snapshot.step)
            differs = None if answer.differs is None else self._exchanges[answer.differs].bringing
            if differs is not None:
                reply, source = differs.answered(snapshot.buffer.vectors, reply)
                payload += source.view
            elif self.codec is not None and answer.taker is not None:
                reply, source = self.codec.models.give(*answer.taker, snapshot.buffer.vectors, reply)
                payload += source.view
            else:
                payload += self._poison(bytearray(snapshot.buffer.view))
            snapshot.release()
        told = False

        def answered(whole: bool) -> None:
            nonlocal told
            if not told:
                told = True
                self._later(self._world.now, lambda: self._tell(actor.Answered(answer.key, whole)))

        self._world.carry(
            self, requester.rank, len(payload), lambda: answered(requester.replied(ticket, reply, payload))
        )
        self._later(answer.deadline, lambda: answered(False))

    def _poison(self, model: bytearray) -> bytearray:
        """A model that goes out, with a NaN if this peer's do."""
        if self.poisoned:
            self._world.fired["poison"] += 1
            dtype = next(section.values.dtype for section in self.arena.sections if section.mixed)
            typed(memoryview(model), dtype)[0] = math.nan
        return model

    def _forget(self, ticket: int) -> None:
        if self.tables is not None:
            self.tables.forget(ticket)
        self.models.forget(ticket)
        exchange = self._exchanges.pop(ticket, None)
        if exchange is None:
            return
        if exchange.incoming is not None:
            exchange.incoming.release()
