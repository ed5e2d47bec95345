"""Runs one peer role in a real process: tells it of events and carries out its effects.

Events come from the training thread, from the CommManager's threads and from the timers' thread. Each is decided under
one lock; what is to be done is done after it is released, by the thread that told the event. Only whether the training
thread may go on, and why not, is set under the lock, so that it always follows the order of the decisions.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from gossipx.actor import (
    Adopt,
    Answer,
    Answered,
    Cancel,
    Capture,
    Effect,
    Event,
    Failed,
    Fault,
    Forget,
    Given,
    Merge,
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
    Stop,
    TakeIn,
    TimerFired,
    Wait,
)
from gossipx.arena import ParameterArena
from gossipx.comm import CommManager
from gossipx.drift import DriftReference
from gossipx.drive.timers import Timers
from gossipx.errors import (
    CancelledError,
    GossipxError,
    LocalFaultError,
    NotAuthorisedError,
    NotEnoughPeersError,
    PeerTimeoutError,
    PeerUnreachableError,
    RefusedError,
    UsageError,
)
from gossipx.incoming import Incoming
from gossipx.messages import (
    InitialRequest,
    ModelReply,
    ModelRequest,
    NotReadyReply,
    PullRequest,
    Reply,
    Request,
    Stage,
    TakeRequest,
)
from gossipx.peer import PeerRole
from gossipx.snapshots import Captured, Snapshot

log = logging.getLogger("gossipx")

NOTE_EVERY = 10.0
"""Seconds between two log lines of one topic; what falls between is counted and told with the next."""
LOOK_EVERY = 0.5
"""Seconds between two looks at signals and errors while the training thread waits."""


@dataclass
class _Transfer:
    """A model on its way to us."""

    request: Request
    incoming: Incoming
    began: float
    distance: float = math.nan  # to what it is compared with, once all has come; NaN: it is poisoned
    seconds: float = 0.0
    their_step: int = 0
    weight: float = 1.0  # the number of models that are averaged in it
    cancel: Callable[[], None] | None = None  # once it was asked for; for the outbox alone


@dataclass(frozen=True)
class Retrieval:
    """One model that was mixed while training.

    Attributes:
        seconds: from the request to the last byte.
        staleness: own iterations minus those that the model had seen.
        distance: ‖x_j − base‖₂ over the trained values, the base being the own model as of the request, or when a push
            is mixed; None where either is a mean of several peers' models.
    """

    seconds: float
    staleness: int
    distance: float | None


class Driver:
    """One role, its arena and its CommManager in one process.

    Args:
        role: told of every event.
        arena: whose weights are given and mixed.

    Attributes:
        comm: made with ``on_request`` = :meth:`received`; set, started and closed by the caller.
        on_retrieval: told of each model mixed while training, from the thread that mixed it.
        error: why training cannot go on, once it cannot.
        committing: held while another model enters the weights.
        reference: what drift counts from.
    """

    def __init__(self, role: PeerRole, arena: ParameterArena):
        self.role = role
        self.arena = arena
        self.comm: CommManager | None = None
        self.on_retrieval: Callable[[Retrieval], None] = lambda retrieval: None
        self.error: GossipxError | None = None
        self.committing = threading.Lock()
        self.reference = DriftReference(arena)
        self._lock = threading.Lock()
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self._transfers: dict[int, _Transfer] = {}
        self._cancelled: set[int] = set()  # until they are forgotten
        # Guarded by the arena's lock, as what its snapshots are held for:
        self._held: dict[int, Captured[Retrieval]] = {}
        self._given: deque[Captured[Retrieval]] = deque()  # drift is to count from the last of these
        self._notes: dict[str, tuple[float, int]] = {}
        # Handing a request to the CommManager wakes its threads, which would take the processor from a training step.
        self._outbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._post, name=f"gossipx-outbox-{role.rank}", daemon=True).start()
        self._timers = Timers(lambda name: self.tell(TimerFired(name)), str(role.rank))
        self._closed = False

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

    def received(self, sender: int, key: Hashable, request: Request) -> None:
        """A request came in; for the CommManager."""
        if isinstance(request, PullRequest):
            self.arena.pool.wait_for_buffers()
        self.tell(Received(sender, key, request))

    @property
    def stranger(self) -> NotAuthorisedError | RefusedError | None:
        """Why no other peer takes this one in, if that is so."""
        return None if self.comm is None else self.comm.trust.doubt

    @property
    def waiting(self) -> bool:
        """Whether the training thread may not go on."""
        return not self._may_go_on.is_set()

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
        self._outbox.put(None)

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
            case Capture(ticket):
                self._held[ticket] = Captured(self.arena.snapshot())
            case Answer(captured=int(ticket)):
                return self._hold(ticket)
            case Cancel(ticket):
                self._cancelled.add(ticket)
        return None

    def _carry_out(self, effect: Effect, given: Snapshot | None) -> None:
        match effect:
            case Send():
                self._send(effect)
            case Cancel(ticket):
                self._outbox.put(functools.partial(self._cancel, ticket))
            case Answer():
                self._answer(effect, given)
            case Merge():
                self._merge(effect)
            case TakeIn(ticket):
                self._take_in(ticket)
            case Mix(ticket, share):
                self._mix(ticket, share)
            case Adopt(ticket):
                transfer = self._transfers.pop(ticket)
                with self.committing:
                    taken = self.arena.adopt(transfer.incoming.buffer, transfer.their_step)
                transfer.incoming.release()
                self.tell(Mixed(ticket) if taken else Poisoned(ticket))
            case Forget(ticket):
                self._forget(ticket)
            case Given(ticket):
                self._given_away(ticket)
            case SetTimer(name, at):
                self._timers.set(name, at)
            case Note(topic, text):
                self._note(topic, text)
            case Wait() | Resume() | Stop() | Capture():
                pass  # done while deciding

    def _send(self, send: Send) -> None:
        payload = base = None
        if isinstance(send.request, ModelRequest):
            base = self._base(send)
            payload = Incoming(self.arena, base, whole=isinstance(send.request, InitialRequest))
            self._transfers[send.ticket] = _Transfer(send.request, payload, time.monotonic())
        assert self.comm is not None

        def done(result: Reply | GossipxError) -> None:
            self._replied(send.ticket, result)

        request = self.comm.request

        def post() -> None:
            if send.ticket in self._cancelled:
                self._replied(send.ticket, CancelledError("its request was not sent yet"))
                return
            try:
                cancel = request(send.to, send.request, deadline=send.deadline, payload=payload, done=done)
            except Exception as error:  # the role still has to hear of its request
                self._replied(send.ticket, LocalFaultError(f"a request could not be sent: {error}"))
                return
            transfer = self._transfers.get(send.ticket)
            if transfer is not None:
                transfer.cancel = cancel

        if base is None:
            self._outbox.put(post)
        else:  # before that, nothing can be made of what comes
            base.when_settled(lambda: self._outbox.put(post))

    def _cancel(self, ticket: int) -> None:
        transfer = self._transfers.get(ticket)
        if transfer is not None and transfer.cancel is not None:
            transfer.cancel()

    def _post(self) -> None:
        while (post := self._outbox.get()) is not None:
            post()

    def _replied(self, ticket: int, result: Reply | GossipxError) -> None:
        if isinstance(result, ModelReply):
            transfer = self._transfers[ticket]
            transfer.seconds = time.monotonic() - transfer.began
            transfer.their_step = result.step
            transfer.weight = result.weight
            if isinstance(transfer.request, PullRequest | TakeRequest):
                transfer.distance = transfer.incoming.norm()
            if math.isnan(transfer.distance) and isinstance(transfer.request, TakeRequest):
                self.tell(Failed(ticket, Fault.POISONED))  # before the other side counts on it
                return
        match result:
            case UsageError():
                self.fail(result)
            case NotAuthorisedError() | RefusedError() if self.comm is not None and self.comm.trust.is_outcast:
                self.fail(result)
            case PeerUnreachableError():
                self.tell(Failed(ticket, Fault.UNREACHABLE))
            case PeerTimeoutError():
                self.tell(Failed(ticket, Fault.TIMEOUT))
            case LocalFaultError():
                self._note("local", str(result))
                self.tell(Failed(ticket, Fault.LOCAL))
            case CancelledError():
                self.tell(Failed(ticket, Fault.CANCELLED))
            case GossipxError():
                self._note("protocol", str(result))
                self.tell(Failed(ticket, Fault.PROTOCOL))
            case _:
                self.tell(Replied(ticket, result))

    def _answer(self, answer: Answer, snapshot: Snapshot | None) -> None:
        assert self.comm is not None
        if isinstance(answer.reply, ModelReply):
            self._answer_model(answer, answer.reply, snapshot or self.arena.snapshot(answer.whole_model))
            return

        def done(whole: bool) -> None:
            self.tell(Answered(answer.key, whole))

        self.comm.answer(answer.key, answer.reply, payload=None, deadline=answer.deadline, done=done)

    def _answer_model(self, answer: Answer, reply: ModelReply, snapshot: Snapshot) -> None:
        assert self.comm is not None
        comm = self.comm

        def done(whole: bool) -> None:
            snapshot.release()
            self.tell(Answered(answer.key, whole))

        def give() -> None:
            try:
                told, payload = dataclasses.replace(reply, step=snapshot.step), snapshot.source
            except LocalFaultError as error:
                refusal = NotReadyReply(str(error))
                comm.answer(answer.key, refusal, payload=None, deadline=answer.deadline, done=lambda whole: done(False))
                return
            comm.answer(answer.key, told, payload=payload, deadline=answer.deadline, begins=answer.begins, done=done)

        if snapshot.settled:
            give()
        else:  # at the next step boundary, and not in the training thread
            snapshot.when_settled(lambda: self._outbox.put(give))

    def _mix(self, ticket: int, share: float) -> None:
        own = ticket == self.role.pulling  # else another has pushed it, and drift goes on from where it began
        transfer = self._transfers.pop(ticket)
        poisoned = math.isnan(transfer.distance)
        if not poisoned:
            with self.committing:
                if not transfer.incoming.compares:
                    drifts = self.role.sync.policy.uses_drift
                    transfer.distance = self.arena.subtract(transfer.incoming.buffer, on_host=drifts)
                self.arena.commit(transfer.incoming.buffer, share)
            self.on_retrieval(Retrieval(transfer.seconds, self.arena.step - transfer.their_step, transfer.distance))
            if self.role.sync.policy.uses_drift:
                base = self._hold(ticket) if own else None
                self.reference.move(transfer.incoming.buffer, share, None if base is None else base.buffer)
                if base is not None:
                    base.release()
        transfer.incoming.release()
        self._forget(ticket)
        self.tell(Poisoned(ticket) if poisoned else Mixed(ticket))

    # --- captured models ----------------------------------------------------------------------------

    def _base(self, send: Send) -> Snapshot | None:
        """What the model that is asked for is compared with, held; None: it is kept as it comes."""
        match send.request:
            case TakeRequest():
                return self._hold(send.ticket)
            case PullRequest():
                base = self.arena.snapshot()
                if self.role.sync.policy.uses_drift:
                    with self.arena.lock:
                        self._held[send.ticket] = Captured(base.hold())
                return base
            case _:
                return None

    def _hold(self, ticket: int) -> Snapshot | None:
        """What is held under ``ticket`` by now; release it after use. None: it was forgotten."""
        with self.arena.lock:
            held = self._held.get(ticket)
            return None if held is None else held.now.hold()

    def _merge(self, merge: Merge) -> None:
        """Outside the training thread, and with no lock: weights are not touched, and nobody else merges meanwhile."""
        transfer, before = self._transfers.pop(merge.ticket), self._hold(merge.into)
        if before is None:  # the wave was given up
            transfer.incoming.release()
            return
        distance = self.arena.merge(transfer.incoming.buffer, before.buffer, merge.own, merge.theirs)
        before.release()
        if math.isnan(distance):
            transfer.incoming.release()
            self.tell(Merged(merge.ticket, merge.into, sound=False))
            return
        merged = self.arena.held(transfer.incoming.give_away(), before.step)
        staleness = self.arena.step - transfer.their_step
        with self.arena.lock:
            held = self._held.get(merge.into)
            if held is not None:
                two_models = held.now is held.base and transfer.weight == 1
                held.retrievals.append(Retrieval(transfer.seconds, staleness, distance if two_models else None))
                held.now, merged = merged, held.now
        merged.release()
        self.tell(Merged(merge.ticket, merge.into, sound=True))

    def _take_in(self, ticket: int) -> None:
        with self.arena.lock:
            held = self._held.pop(ticket)
        with self.committing:
            self.arena.take_in(held.now, held.base)
        if self.role.stage is Stage.TRAIN:
            for retrieval in held.retrievals:
                self.on_retrieval(retrieval)
            if self.role.sync.policy.uses_drift:
                self.reference.set(held.now.buffer)
        held.release()
        self.tell(Mixed(ticket))

    def _forget(self, ticket: int) -> None:
        self._cancelled.discard(ticket)
        with self.arena.lock:
            held = self._held.pop(ticket, None)
        if held is not None:
            held.release()
        transfer = self._transfers.pop(ticket, None)
        if transfer is not None:
            transfer.incoming.release()

    def _given_away(self, ticket: int) -> None:
        if self.role.sync.policy.uses_drift:
            with self.arena.lock:
                self._given.append(self._held.pop(ticket))  # the training thread may be at work on the reference
        else:
            self._forget(ticket)

    def _note(self, topic: str, text: str) -> None:
        now = time.monotonic()
        told, held_back = self._notes.get(topic, (-NOTE_EVERY, 0))
        if now - told < NOTE_EVERY:
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
            self.reference.set()

    # --- drift --------------------------------------------------------------------------------------

    def drift(self) -> float:
        """‖x_t − x_r‖₂, the way that own steps have led since the last exchange.

        For the training thread, which alone works on the reference.
        """
        while self._given:
            given = self._given.popleft()
            self.reference.set(given.base.buffer)
            given.release()
        pulling = self.role.pulling
        base = None
        if pulling is not None:
            with self.arena.lock:
                held = self._held.get(pulling)
                base = None if held is None else held.base.hold()
        if base is None:
            return self.reference.distance()
        distance = self.arena.distance(base.buffer)
        base.release()
        return distance
