"""The driver of one peer role in a real process: it passes events to the role and carries out the role's effects.

A role is a pure state machine: it maps an event to a list of effects. Events come from the training thread, the
CommManager's threads and the timer thread. The driver calls the role under one lock and carries out most effects after
releasing it, in the thread that reported the event. Effects whose order must match the order of the decisions, such as
blocking and resuming the training thread, are carried out under the lock.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import msgspec

from gossipx import errors
from gossipx.comm import CommManager
from gossipx.memory import Source
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import Snapshot
from gossipx.peer import PeerRole
from gossipx.protocol import events, messages
from gossipx.protocol.effects import (
    AddPeer,
    Adopt,
    Answer,
    ApplyWave,
    AverageShard,
    Cancel,
    Capture,
    Effect,
    EncodeWave,
    EndWave,
    Forget,
    Keep,
    Merge,
    Mix,
    MoveReference,
    Note,
    ReportEntry,
    ReportOutcome,
    Resume,
    Send,
    SetTimer,
    Stop,
    Wait,
)
from gossipx.protocol.fields import JoinedPeer
from gossipx.protocol.server_messages import CarryingRequest
from gossipx.protocol.table_effects import Fetched, TableEffect
from gossipx.runtime.driver.captures import Captures, Outliers, Retrieval
from gossipx.runtime.driver.clock import DriverClock, LimitedLog
from gossipx.runtime.driver.commands import Commands
from gossipx.runtime.driver.joins import JoinHandler
from gossipx.runtime.driver.outbox import Outbox
from gossipx.runtime.driver.tables import TableRequest, TableWork
from gossipx.runtime.driver.transfers import ModelTransfers
from gossipx.runtime.driver.waves import WaveWork
from gossipx.wire import UploadSink

T = TypeVar("T")
LOG_INTERVAL = 10.0
"""Minimum seconds between two log lines on one topic."""
POLL_INTERVAL = 0.5
"""Seconds between two checks for signals and errors while the training thread waits."""


class Driver:
    """One role with its parameter arena and its CommManager.

    Args:
        role: handles every event.
        arena: holds the weights of this peer.
        places: number of models that other peers may upload at the same time.
        clock: the time, and the threads that depend on it, an attribute, too; None: those of this machine.
        note: logs a text on a topic; None: as a warning, at a limited rate.

    Attributes:
        outbox: sends requests.
        models: models that are being received, also those that other peers upload with their requests.
        captures: captured models of this peer.
        tables: carries out effects on the tables of a parameter server.
        outliers: counts received models that are suddenly far from this peer's.
        commands: requests of users, programs and newcomers that the role answers.
        join_handler: names and addresses of all peers, and those that join; None: they do not matter.
        on_retrieval: called with each model mixed during training, in the thread that mixed it.
        error: why training cannot continue; None while it can.
        committing: lock that is held while a received model is written into the weights.
    """

    def __init__(
        self,
        role: PeerRole,
        arena: ParameterArena,
        places: int = 4,
        clock: DriverClock | None = None,
        note: Callable[[str, str], None] | None = None,
    ):
        self.role = role
        self.arena = arena
        self.on_retrieval: Callable[[Retrieval], None] = lambda retrieval: None
        self.error: errors.GossipxError | None = None
        self.committing = threading.Lock()
        self.clock = clock = clock or DriverClock()
        self._note = note or LimitedLog(LOG_INTERVAL).warn
        self.outliers = Outliers(arena, self._note, role.counts)
        self.captures = Captures(arena, role.sync.policy.uses_drift, self.outliers)
        self.outbox = Outbox(role.rank, clock, self.handle, self._note, self.fail)
        self.tables = TableWork(role.rank, clock, self.outbox, self.handle, self._reply)
        self.models = ModelTransfers(arena, self.outbox, clock, self.tables, places)
        self.waves = WaveWork(role.rank, self.captures, self.outbox, clock, self.handle, self._reply)
        self._received_at: dict[messages.Stage, int] = {}  # bytes received when the role reached a stage
        self._lock = threading.Lock()
        self._resumed = threading.Event()
        self._resumed.set()
        self.commands = Commands(self.handle, role.settings.exchange.peer_timeout)
        self.join_handler: JoinHandler | None = None
        self._timers = clock.timers(lambda name: self.handle(events.TimerFired(name)), str(role.rank))
        self._closed = False

    @property
    def comm(self) -> CommManager | None:
        """The CommManager, built with ``on_request`` = :meth:`received` and ``sink_for`` = :meth:`sink_for`."""
        return self.outbox.comm

    @comm.setter
    def comm(self, comm: CommManager | None) -> None:
        self.outbox.comm = comm

    # --- events -------------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        """Pass ``event`` to the role and carry out the resulting effects in the calling thread."""
        with self._lock:
            if self._closed:
                return
            now, slept = self.clock.now(), self._timers.gap() > self.role.settings.exchange.peer_timeout
            effects = [effect for one in ([events.Woke()] * slept + [event]) for effect in self.role.handle(one, now)]
            if self.comm is not None:
                self._received_at.setdefault(self.role.stage, self.comm.bytes_received)
            snapshots = [self._carry_out_locked(effect) for effect in effects]
        for effect, snapshot in zip(effects, snapshots, strict=True):
            self._carry_out(effect, snapshot)

    def sink_for(self, sender: int, request: CarryingRequest) -> UploadSink:
        """Return the sink of another peer's upload; called by the CommManager."""
        if isinstance(request, messages.ShardRequest):
            return self.waves.sink_for(sender, request)
        return self.models.sink_for(sender, request)

    def received(self, sender: int, key: Hashable, request: messages.Request, upload: UploadSink | None) -> None:
        """Handle a request of another peer; called by the CommManager."""
        if isinstance(request, messages.PullRequest):
            self.arena.pool.wait_for_buffers()
        if isinstance(request, messages.WaveRequest):
            self.waves.store(key, sender, request, upload)
        elif isinstance(request, CarryingRequest) and upload is not None:
            self.models.store(key, request, upload)
        self.handle(events.Received(sender, key, request))

    @property
    def step(self) -> int:
        """Iterations done."""
        return self.arena.step

    @property
    def has_tables(self) -> bool:
        """Whether the run has a parameter server."""
        return self.tables.store is not None

    def now(self) -> float:
        """Return the time of the driver's clock in seconds."""
        return self.clock.now()

    def read(self, look: Callable[[PeerRole], T]) -> T:
        """Return what ``look`` reads from the role, between two events."""
        with self._lock:
            return look(self.role)

    def received_before(self, stage: messages.Stage) -> int:
        """Return the bytes received before the role reached ``stage``; all so far if it has not.

        The training thread notices a new stage later, when other peers may already have sent models.
        """
        assert self.comm is not None
        return next((count for at, count in self._received_at.items() if at >= stage), self.comm.bytes_received)

    @property
    def rejection(self) -> errors.NotAuthorisedError | errors.RefusedError | None:
        """Why all other peers refuse connections from this one; None if they do not."""
        return None if self.comm is None else self.comm.trust.doubt

    @property
    def waiting(self) -> bool:
        """Whether the training thread must wait."""
        return not self._resumed.is_set()

    def wait_for_resume(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until the training thread may continue. Return whether it may."""
        return self._resumed.wait(seconds)

    def wait(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Block the training thread until the role lets it continue. The role's timers bound the wait.

        Args:
            interrupted: called every :data:`POLL_INTERVAL` seconds; the wait ends early when it returns true.

        Raises:
            GossipxError: training cannot continue.
        """
        while not self._resumed.wait(POLL_INTERVAL) and self.error is None and not interrupted():
            pass
        if self.error is not None:
            raise self.error

    def fail(self, error: errors.GossipxError) -> None:
        """Stop the training: the training thread raises ``error`` at its next step or wait."""
        self.error = self.error or error
        self._resumed.set()

    def close(self) -> None:
        """Ignore all later events and stop the driver's threads."""
        with self._lock:
            self._closed = True
        self._timers.close()
        self.outbox.close()
        self.commands.close()
        if self.join_handler is not None:
            self.join_handler.close()
        self.tables.close()
        self.waves.close()
        self.on_retrieval = lambda retrieval: None  # break the reference cycle with the reporter

    # --- effects ------------------------------------------------------------------------------------

    def _carry_out_locked(self, effect: Effect) -> Snapshot | None:
        """Carry out, under the lock, the part of an effect that must follow the order of the decisions.

        Returns:
            For an answer with a captured model, a reference to it as of now: another thread may merge into the captured
            model before the answer is sent.
        """
        match effect:
            case Wait():
                self._resumed.clear()
            case Resume():
                self._resumed.set()
            case Stop(reason):
                self.fail(self.rejection or errors.NotEnoughPeersError(reason))
            case Capture(ticket, saved, fragment):
                self.captures.capture(ticket, saved, fragment)
                self.waves.entered(ticket, fragment)
            case Answer(captured=int(ticket)):
                return self.captures.hold(ticket)
            case Keep(key, ticket):
                if not self.waves.keep(key, ticket):
                    self.models.keep(key, ticket)
            case AddPeer(peer):
                self._add(peer)
            case Cancel(ticket):
                self.outbox.give_up(ticket)
            case Send():
                self.tables.expect(effect)
            case Answer() if self.tables.answers(effect):
                self.tables.answer(effect)
            case _ if isinstance(effect, TableEffect):
                self.tables.do(effect)
        return None

    def _carry_out(self, effect: Effect, snapshot: Snapshot | None) -> None:
        match effect:
            case Send() if isinstance(effect.request, TableRequest):
                self.tables.send(effect)
            case Send(_, _, messages.ShardRequest() | messages.ShareRequest() | messages.ReferenceRequest() as request):
                self.waves.send(effect, request)
            case Send():
                self.models.send(effect, self._base(effect))
            case Cancel(ticket):
                self.outbox.cancel(ticket)
            case Answer():
                self._answer(effect, snapshot)
            case Merge():
                self._merge(effect)
            case EncodeWave():
                self.waves.encode(effect)
            case AverageShard():
                self.waves.average(effect)
            case EndWave():
                self.waves.end(effect)
            case ApplyWave(ticket):
                self._apply_merged(ticket)
            case Mix(ticket, share):
                self._mix(ticket, share)
            case Adopt(ticket, step):
                model = self.models.received.pop(ticket)
                with self.committing:
                    taken = self.arena.adopt(model.incoming.buffer, self.arena.step if step is None else step)
                model.incoming.release()
                if taken:
                    self.begin_codec()
                self.handle(events.Mixed(ticket) if taken else events.Poisoned(ticket))
            case Forget(ticket):
                self._forget(ticket)
            case MoveReference(ticket):
                self.captures.record_delivery(ticket)
            case Fetched(ticket) if not self.tables.raw_pulls:
                self.tables.fetched(ticket)
            case ReportOutcome() | ReportEntry():
                self.commands.answered(effect)
            case SetTimer(name, at):
                self._timers.set(name, at)
            case Note(topic, text):
                self._note(topic, text)
            case _:
                pass  # carried out under the lock

    def _base(self, send: Send) -> Snapshot | None:
        """Return a reference to the model that the requested one is subtracted from.

        None: the requested model is stored as received.
        """
        codec = self.models.codec
        match send.request:
            case messages.TakeRequest() if codec is None or not codec.in_pairs:
                return self.captures.hold(send.ticket)
            case messages.PullRequest() | messages.ElasticRequest():
                return self.captures.snapshot_base(send.ticket, messages.fragment_of(send.request))
            case _:
                return None

    def _add(self, peer: JoinedPeer) -> None:
        replaces = self.join_handler is not None and self.join_handler.add(peer)
        if replaces and isinstance(self.comm, CommManager):
            self.comm.forget(peer.rank)

    def begin_codec(self) -> None:
        """Set the first references: the current weights at step 0, when they are the same on all peers; else none."""
        snapshot = None if self.arena.step else self.arena.snapshot()
        model = None if snapshot is None else snapshot.buffer.vectors
        self.waves.begin(model)
        if self.models.codec is not None:
            self.models.codec.begin(model)
        if snapshot is not None:
            snapshot.release()

    def _answer(self, answer: Answer, snapshot: Snapshot | None) -> None:
        assert self.comm is not None
        self.models.drop(answer.key)
        if not self.tables.answers(answer):
            self._answer_now(answer, snapshot)  # answers about tables are queued on the table thread instead

    def _answer_now(self, answer: Answer, snapshot: Snapshot | None) -> None:
        if isinstance(answer.reply, messages.ModelReply):
            self._answer_model(answer, answer.reply, snapshot or self.arena.snapshot(answer.whole_model))
        elif answer.fragment is not None:
            self.waves.answer(answer, answer.fragment)
        else:
            self._reply(answer, answer.reply, None)
        self.waves.drop(answer.key)

    def _reply(
        self, answer: Answer, reply: messages.Reply, source: Source | None, sent: Callable[[], None] = lambda: None
    ) -> None:
        assert self.comm is not None

        def done(whole: bool) -> None:
            sent()
            self.handle(events.Answered(answer.key, whole))

        self.comm.answer(answer.key, reply, payload=source, deadline=answer.deadline, done=done)

    def _answer_model(self, answer: Answer, reply: messages.ModelReply, snapshot: Snapshot) -> None:
        assert self.comm is not None
        comm = self.comm

        def done(whole: bool) -> None:
            snapshot.release()
            self.handle(events.Answered(answer.key, whole))

        def send() -> None:
            try:
                encoded, payload = msgspec.structs.replace(reply, step=snapshot.step), snapshot.source
                if self.models.codec is not None:
                    encoded, payload = self.models.codec.give(answer, encoded, snapshot)
            except errors.LocalFaultError as error:
                refusal = messages.NotReadyReply(str(error))
                comm.answer(answer.key, refusal, payload=None, deadline=answer.deadline, done=lambda whole: done(False))
                return
            comm.answer(answer.key, encoded, payload=payload, deadline=answer.deadline, begins=answer.begins, done=done)

        if snapshot.settled:
            send()
        else:  # the copy is complete at the next step boundary; the outbox thread sends it, not the training thread
            snapshot.when_settled(lambda: self.outbox.post(send))

    def _mix(self, ticket: int, share: float) -> None:
        own = ticket == self.role.pulling  # else another peer has pushed the model, and drift keeps its reference
        model = self.models.received.pop(ticket)
        sender, fragment, poisoned = model.sender, model.incoming.fragment, math.isnan(model.distance)
        if not poisoned:
            with self.committing:
                if not model.incoming.compares:
                    drifts = self.role.sync.policy.uses_drift
                    codec = self.models.codec if own else None
                    base = None if codec is None or sender is None else codec.of(fragment.number).sent(sender)
                    model.distance = fragment.subtract(model.incoming.buffer, drifts, base)
                distance = fragment.distance_of_model(model.distance)
                self.outliers.judge(distance, sender)
                self.captures.commit(model, share, ticket if own else None)
            staleness = self.arena.step - model.their_step
            of_centre = isinstance(model.request, messages.ElasticRequest)
            self.on_retrieval(Retrieval(model.seconds, staleness, distance, sender, of_centre))
        model.incoming.release()
        self._forget(ticket)
        self.handle(events.Poisoned(ticket) if poisoned else events.Mixed(ticket))

    def _merge(self, merge: Merge) -> None:
        sound = self.captures.merge(self.models.received.pop(merge.ticket), merge.into, merge.own, merge.theirs)
        if sound is not None:  # None: the model to merge into was forgotten
            self.handle(events.Merged(merge.ticket, merge.into, sound))

    def _apply_merged(self, ticket: int) -> None:
        with self.committing:
            taken = self.captures.apply_merged(ticket, self.role.stage is messages.Stage.TRAIN)
        self.waves.applied(ticket)
        for retrieval in taken:
            self.on_retrieval(retrieval)
        self.handle(events.Mixed(ticket))

    def _forget(self, ticket: int) -> None:
        self.captures.forget(ticket)
        self.outbox.forget(ticket)
        self.models.forget(ticket)
        self.waves.forget(ticket)
        self.tables.forget(ticket)

    # --- checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the role's next decision depends on, as plain data; no models."""
        with self._lock:
            sync = self.role.sync.state_dict()
            draws = self.role.training.draw_state()
            return {"iteration": self.arena.step, "sync": sync, "weight": self.role.weight, "draws": draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. The weights must have been restored before.

        The outer optimizer and the codecs start anew: what they kept belongs to the earlier weights.
        """
        self.arena.start_from(state["iteration"])
        self.handle(events.Restored(state["iteration"], state["sync"], state["weight"], state["draws"]))
        self.begin_codec()  # after all exchanges under way were dropped, whose models refer to earlier references
        if self.role.sync.policy.uses_drift:
            self.captures.reference.set()
