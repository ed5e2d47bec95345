"""Runs one peer role in a real process: tells it of events and carries out its effects.

Events come from the training thread, from the CommManager's threads and from the timers' thread. Each is decided under
one lock; what is to be done is done after it is released, by the thread that told the event. Only whether the training
thread may go on, and why not, is set under the lock, so that it always follows the order of the decisions.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

from gossipx.comm import CommManager
from gossipx.errors import (
    GossipxError,
    LocalFaultError,
    NotAuthorisedError,
    NotEnoughPeersError,
    ProtocolError,
    RefusedError,
)
from gossipx.memory import Source
from gossipx.model.arena import ParameterArena
from gossipx.model.snapshots import Snapshot
from gossipx.peer import PeerRole
from gossipx.protocol.effects import (
    Adopt,
    Answer,
    Cancel,
    Capture,
    Delivered,
    Effect,
    Forget,
    Keep,
    Merge,
    Mix,
    Note,
    Resume,
    Send,
    SetTimer,
    Stop,
    Switched,
    TakeIn,
    Wait,
)
from gossipx.protocol.events import (
    Answered,
    ChangeServers,
    Event,
    Merged,
    Mixed,
    Poisoned,
    Received,
    Restored,
    SwitchSync,
    TimerFired,
)
from gossipx.protocol.messages import (
    BusyReply,
    CarryingRequest,
    ElasticRequest,
    ModelReply,
    NotReadyReply,
    PullRequest,
    Reply,
    Request,
    Stage,
    TakeRequest,
)
from gossipx.protocol.table_effects import Fetched, TableEffect
from gossipx.runtime.captures import Captures, Retrieval
from gossipx.runtime.model_transfers import Transfers
from gossipx.runtime.requests import Outbox
from gossipx.runtime.table_transfers import TableRequest
from gossipx.runtime.tables import TableWork
from gossipx.runtime.timers import Timers
from gossipx.runtime.uploads import Uploads
from gossipx.wire import UploadSink

log = logging.getLogger("gossipx")

NOTE_EVERY = 10.0
"""Seconds between two log lines of one topic; what falls between is counted and told with the next."""
LOOK_EVERY = 0.5
"""Seconds between two looks at signals and errors while the training thread waits."""


class Driver:
    """One role, its arena and its CommManager in one process.

    Args:
        role: told of every event.
        arena: whose weights are given and mixed.
        places: models that others may bring at a time.

    Attributes:
        outbox: requests on their way.
        transfers: models on their way.
        brought: what others bring with theirs.
        held: captured models.
        tables: what is done to tables of a parameter server.
        on_retrieval: told of each model mixed while training, from the thread that mixed it.
        error: why training cannot go on, once it cannot.
        committing: held while another model enters the weights.
    """

    def __init__(self, role: PeerRole, arena: ParameterArena, places: int = 4):
        self.role = role
        self.arena = arena
        self.on_retrieval: Callable[[Retrieval], None] = lambda retrieval: None
        self.error: GossipxError | None = None
        self.committing = threading.Lock()
        self.captures = Captures(arena, role.sync.policy.uses_drift)
        self.outbox = Outbox(role.rank, self.tell, self._note, self.fail)
        self.transfers = Transfers(arena, self.outbox)
        self.tables = TableWork(role.rank, self.outbox, self.tell, self._give)
        self.uploads = Uploads(arena, self.transfers, self.tables.transfers, places)
        self._lock = threading.Lock()
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self._notes: dict[str, tuple[float, int]] = {}
        self._numbers = itertools.count(1)
        self._switches: dict[int, Future[str]] = {}
        self._timers = Timers(lambda name: self.tell(TimerFired(name)), str(role.rank))
        self._closed = False

    @property
    def comm(self) -> CommManager | None:
        """Made with ``on_request`` = :meth:`received` and ``room_for`` = that of :attr:`brought`."""
        return self.outbox.comm

    @comm.setter
    def comm(self, comm: CommManager | None) -> None:
        self.outbox.comm = comm

    # --- events -------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Tell the role of ``event`` and carry out what follows, in this thread."""
        with self._lock:
            if self._closed:
                return
            effects = self.role.handle(event, time.monotonic())
            given = [self._at_once(effect) for effect in effects]
        for effect, snapshot in zip(effects, given, strict=True):
            self._carry_out(effect, snapshot)

    def received(self, sender: int, key: Hashable, request: Request, brought: UploadSink | None) -> None:
        """A request came in; for the CommManager."""
        if isinstance(request, PullRequest):
            self.arena.pool.wait_for_buffers()
        if isinstance(request, CarryingRequest) and brought is not None:
            try:
                self.uploads.take(key, request, brought)
            except ProtocolError as error:  # it changes what is not here any more: the next is brought whole
                self._note("protocol", f"what peer {sender} brings is left out: {error}")
                brought.release()
                self._give(Answer(key, BusyReply(), time.monotonic() + request.patience), BusyReply(), None)
                return
        self.tell(Received(sender, key, request))

    def switch_sync(self, sync: str, shard: int | None, apply: str, pulls: str) -> str:
        """Have shards go over to another sync model; why that cannot be, or nothing."""
        patience = 2 * self.role.settings.peer_timeout
        return self._ask(lambda number: SwitchSync(number, shard, sync, apply, pulls), patience)

    def change_servers(self, servers: Sequence[int]) -> str:
        """Have these peers hold the shards; why that cannot be, or nothing."""
        return self._ask(lambda number: ChangeServers(number, tuple(servers)))  # the role bounds it

    def _ask(self, event: Callable[[int], Event], patience: float | None = None) -> str:
        number = next(self._numbers)
        result = self._switches[number] = Future()
        self.tell(event(number))
        try:
            return result.result(patience)
        except TimeoutError:
            return "no answer within peer_timeout"

    def counted(self) -> dict[str, tuple[int, float]]:
        """Return what a hub or the shards here have counted by now; see ``ServerRole.counted``."""
        with self._lock:
            return self.role.server.counted

    @property
    def stranger(self) -> NotAuthorisedError | RefusedError | None:
        """Why no other peer takes this one in, if that is so."""
        return None if self.comm is None else self.comm.trust.doubt

    @property
    def waiting(self) -> bool:
        """Whether the training thread may not go on."""
        return not self._may_go_on.is_set()

    def may_go_on(self, seconds: float) -> bool:
        """Wait at most so long until the training thread may go on; whether it may."""
        return self._may_go_on.wait(seconds)

    def wait(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Keep the training thread here until it may go on. The role's timers bound it.

        Args:
            interrupted: looked at now and then; the wait ends early when it is true.

        Raises:
            GossipxError: training cannot go on.
        """
        while not self._may_go_on.wait(LOOK_EVERY) and self.error is None and not interrupted():
            pass
        if self.error is not None:
            raise self.error

    def fail(self, error: GossipxError) -> None:
        """Training cannot go on: the training thread raises ``error`` at its next step or wait."""
        self.error = self.error or error
        self._may_go_on.set()

    def close(self) -> None:
        """Decide nothing any more."""
        with self._lock:
            self._closed = True
        self._timers.close()
        self.outbox.close()
        self.tables.close()
        self.on_retrieval = lambda retrieval: None  # who is told holds us

    # --- effects ------------------------------------------------------------------------------------

    def _at_once(self, effect: Effect) -> Snapshot | None:
        """What has to follow the order of the decisions, under the lock.

        Returns:
            The held model that an answer gives: another thread may merge into it before the answer is carried out.
        """
        match effect:
            case Wait():
                self._may_go_on.clear()
            case Resume():
                self._may_go_on.set()
            case Stop(reason):
                self.fail(self.stranger or NotEnoughPeersError(reason))
            case Capture(ticket, saved):
                self.captures.capture(ticket, saved)
            case Answer(captured=int(ticket)):
                return self.captures.hold(ticket)
            case Keep(key, ticket):
                self.uploads.keep(key, ticket)
            case Cancel(ticket):
                self.outbox.give_up(ticket)
            case Send():
                self.tables.transfers.expect(effect)
            case Answer() if self.tables.answers(effect):
                self.tables.answer(effect)
            case _ if isinstance(effect, TableEffect):
                self.tables.do(effect)
        return None

    def _carry_out(self, effect: Effect, given: Snapshot | None) -> None:
        match effect:
            case Send() if isinstance(effect.request, TableRequest):
                self.tables.transfers.send(effect)
            case Send():
                self.transfers.send(effect, self._base(effect))
            case Cancel(ticket):
                self.outbox.cancel(ticket)
            case Answer():
                self._answer(effect, given)
            case Merge():
                self._merge(effect)
            case TakeIn(ticket):
                self._take_in(ticket)
            case Mix(ticket, share):
                self._mix(ticket, share)
            case Adopt(ticket, step):
                transfer = self.transfers.pop(ticket)
                with self.committing:
                    taken = self.arena.adopt(transfer.incoming.buffer, self.arena.step if step is None else step)
                transfer.incoming.release()
                if taken:
                    self.begin_codec()
                self.tell(Mixed(ticket) if taken else Poisoned(ticket))
            case Forget(ticket):
                self._forget(ticket)
            case Delivered(ticket):
                self.captures.given(ticket)
            case Fetched(ticket) if not self.tables.raw_pulls:
                self.tables.transfers.fetched(ticket)
            case Switched(number, problem):
                self._switches.pop(number).set_result(problem)
            case SetTimer(name, at):
                self._timers.set(name, at)
            case Note(topic, text):
                self._note(topic, text)
            case _:
                pass  # done while deciding

    def _base(self, send: Send) -> Snapshot | None:
        """What the model that is asked for is compared with, held; None: it is kept as it comes."""
        match send.request:
            case TakeRequest():
                return self.captures.hold(send.ticket)
            case PullRequest() | ElasticRequest():
                return self.captures.base(send.ticket)
            case _:
                return None

    def begin_codec(self) -> None:
        """Begin with the model as it is now, like all peers."""
        if self.transfers.codec is not None:
            self.transfers.codec.begin_from(self.arena)

    def _answer(self, answer: Answer, snapshot: Snapshot | None) -> None:
        assert self.comm is not None
        self.uploads.drop(answer.key)
        if not self.tables.answers(answer):
            self._answer_now(answer, snapshot)  # else when all that was decided before is done

    def _answer_now(self, answer: Answer, snapshot: Snapshot | None) -> None:
        if isinstance(answer.reply, ModelReply):
            self._answer_model(answer, answer.reply, snapshot or self.arena.snapshot(answer.whole_model))
        else:
            self._give(answer, answer.reply, None)

    def _give(
        self, answer: Answer, reply: Reply, source: Source | None, sent: Callable[[], None] = lambda: None
    ) -> None:
        assert self.comm is not None

        def done(whole: bool) -> None:
            sent()
            self.tell(Answered(answer.key, whole))

        self.comm.answer(answer.key, reply, payload=source, deadline=answer.deadline, done=done)

    def _answer_model(self, answer: Answer, reply: ModelReply, snapshot: Snapshot) -> None:
        assert self.comm is not None
        comm = self.comm

        def done(whole: bool) -> None:
            snapshot.release()
            self.tell(Answered(answer.key, whole))

        def give() -> None:
            try:
                told, payload = self._coded(answer, dataclasses.replace(reply, step=snapshot.step), snapshot)
            except LocalFaultError as error:
                refusal = NotReadyReply(str(error))
                comm.answer(answer.key, refusal, payload=None, deadline=answer.deadline, done=lambda whole: done(False))
                return
            comm.answer(answer.key, told, payload=payload, deadline=answer.deadline, begins=answer.begins, done=done)

        if snapshot.settled or answer.differs is not None:  # what this is for is merged next, which waits, too
            give()
        else:  # at the next step boundary, and not in the training thread
            snapshot.when_settled(lambda: self.outbox.post(give))

    def _coded(self, answer: Answer, reply: ModelReply, snapshot: Snapshot) -> tuple[ModelReply, Source]:
        """A model as it is given, and the reply that goes with it."""
        codec = self.transfers.codec
        upload_sink = None if answer.differs is None else self.transfers.upload_sink(answer.differs)
        if upload_sink is not None:
            return upload_sink.answered(snapshot.buffer.vectors, reply)
        if codec is None or answer.taker is None:
            return reply, snapshot.source
        return codec.models.give(*answer.taker, snapshot.buffer.vectors, reply)

    def _mix(self, ticket: int, share: float) -> None:
        own = ticket == self.role.pulling  # else another has pushed it, and drift goes on from where it began
        transfer = self.transfers.pop(ticket)
        poisoned = math.isnan(transfer.distance)
        if not poisoned:
            with self.committing:
                if not transfer.incoming.compares:
                    drifts = self.role.sync.policy.uses_drift
                    transfer.distance = self.arena.subtract(transfer.incoming.buffer, on_host=drifts)
                self.arena.commit(transfer.incoming.buffer, share)
            staleness, of_centre = self.arena.step - transfer.their_step, isinstance(transfer.request, ElasticRequest)
            self.on_retrieval(Retrieval(transfer.seconds, staleness, transfer.distance, of_centre))
            self.captures.moved(transfer, share, ticket if own else None)
        transfer.incoming.release()
        self._forget(ticket)
        self.tell(Poisoned(ticket) if poisoned else Mixed(ticket))

    def _merge(self, merge: Merge) -> None:
        sound = self.captures.merge(self.transfers.pop(merge.ticket), merge.into, merge.own, merge.theirs)
        if sound is not None:  # else what it was for was given up
            self.tell(Merged(merge.ticket, merge.into, sound))

    def _take_in(self, ticket: int) -> None:
        with self.committing:
            taken = self.captures.take_in(ticket, self.role.stage is Stage.TRAIN)
        for retrieval in taken:
            self.on_retrieval(retrieval)
        self.tell(Mixed(ticket))

    def _forget(self, ticket: int) -> None:
        self.captures.forget(ticket)
        self.outbox.forget(ticket)
        self.transfers.forget(ticket)
        self.tables.transfers.forget(ticket)

    def _note(self, topic: str, text: str) -> None:
        now = time.monotonic()
        told, held_back = self._notes.get(topic, (-NOTE_EVERY, 0))
        if topic and now - told < NOTE_EVERY:
            self._notes[topic] = (told, held_back + 1)
            return
        self._notes[topic] = (now, 0)
        log.warning("%s%s", text, f" ({held_back} more like it before)" if held_back else "")

    # --- checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the next decision depends on, as plain data."""
        with self._lock:
            sync = self.role.sync.state_dict()
            draws = self.role.draws()
            return {"iteration": self.arena.step, "sync": sync, "weight": self.role.weight, "draws": draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; the weights are there already."""
        self.arena.set_boundary(state["iteration"])
        self.tell(Restored(state["iteration"], state["sync"], state["weight"], state["draws"]))
        if self.role.sync.policy.uses_drift:
            self.captures.reference.set()
