"""Runs one peer role in a real process: tells it of events and carries out its effects.

Events come from the training thread, from the CommManager's threads and from the timers' thread. Each is decided under
one lock; what is to be done is done after it is released, by the thread that told the event. Only whether the training
thread may go on, and why not, is set under the lock, so that it always follows the order of the decisions.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from gossipx.actor import (
    Adopt,
    Answer,
    Answered,
    Capture,
    Effect,
    Event,
    Failed,
    Fault,
    Forget,
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
from gossipx.arena import ParameterArena, Snapshot
from gossipx.buffers import HostBuffer
from gossipx.comm import CommManager
from gossipx.drive.timers import Timers
from gossipx.errors import (
    GossipxError,
    LocalFaultError,
    NotAuthorisedError,
    NotEnoughPeersError,
    PeerTimeoutError,
    PeerUnreachableError,
    UsageError,
)
from gossipx.incoming import Incoming
from gossipx.messages import InitialRequest, ModelReply, PullRequest, Reply, Request, RoundRequest, Stage
from gossipx.peer import PeerRole

log = logging.getLogger("gossipx")

NOTE_EVERY = 10.0
"""Seconds between two log lines of one topic; what falls between is counted and told with the next."""
LOOK_EVERY = 0.5
"""Seconds between two looks at signals and errors while the training thread waits."""


@dataclass
class _Transfer:
    """A model on its way to us."""

    incoming: Incoming
    base: Snapshot | None  # held for the policy's drift alone
    began: float
    distance: float = math.nan  # to the base, once all has come
    seconds: float = 0.0
    their_step: int = 0
    models: int = 1  # that are averaged in it


@dataclass(frozen=True)
class Retrieval:
    """One model that was mixed while training.

    Attributes:
        seconds: from the request to the last byte.
        staleness: own iterations minus those that the model had seen.
        distance: ‖x_j − base‖₂ over the trained values; None where either is a mean of several peers' models.
    """

    seconds: float
    staleness: int
    distance: float | None


@dataclass
class _Held:
    """A captured model of ours, and what was merged into it so far; it holds both."""

    base: Snapshot
    now: Snapshot = field(init=False)
    retrievals: list[Retrieval] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = self.base.hold()

    def release(self) -> None:
        self.base.release()
        self.now.release()


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
    """

    def __init__(self, role: PeerRole, arena: ParameterArena):
        self.role = role
        self.arena = arena
        self.comm: CommManager | None = None
        self.on_retrieval: Callable[[Retrieval], None] = lambda retrieval: None
        self.error: GossipxError | None = None
        self.committing = threading.Lock()
        self._lock = threading.Lock()
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self._transfers: dict[int, _Transfer] = {}
        self._held: dict[int, _Held] = {}  # guarded by the arena's lock, as what its snapshots are held for
        self._reference: HostBuffer | None = None
        self._notes: dict[str, tuple[float, int]] = {}
        # Handing a request to the CommManager wakes its threads, which would take the processor from a training step.
        self._outbox: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
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
        self.tell(Received(sender, key, request))

    @property
    def stranger(self) -> NotAuthorisedError | None:
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
                self._held[ticket] = _Held(self.arena.snapshot())
            case Answer(captured=int(ticket)):
                return self._hold(ticket)
        return None

    def _carry_out(self, effect: Effect, given: Snapshot | None) -> None:
        match effect:
            case Send():
                self._send(effect)
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
                self._release(transfer)
                self.tell(Mixed(ticket) if taken else Poisoned(ticket))
            case Forget(ticket):
                self._forget(ticket)
            case SetTimer(name, at):
                self._timers.set(name, at)
            case Note(topic, text):
                self._note(topic, text)
            case Wait() | Resume() | Stop() | Capture():
                pass  # done while deciding

    def _send(self, send: Send) -> None:
        payload = None
        if isinstance(send.request, InitialRequest | PullRequest | RoundRequest):
            pulls = isinstance(send.request, PullRequest)
            payload = Incoming(
                self.arena, self.arena.snapshot() if pulls else None, whole=isinstance(send.request, InitialRequest)
            )
            base = self.arena.snapshot() if pulls and self.role.sync.policy.uses_drift else None
            self._transfers[send.ticket] = _Transfer(payload, base, time.monotonic())
        assert self.comm is not None

        def done(result: Reply | GossipxError) -> None:
            self._replied(send.ticket, result)

        request = self.comm.request

        def post() -> None:
            request(send.to, send.request, deadline=send.deadline, payload=payload, done=done)

        self._outbox.put((send.ticket, post))

    def _post(self) -> None:
        while (item := self._outbox.get()) is not None:
            ticket, post = item
            try:
                post()
            except Exception as error:  # the role still has to hear of its request
                self._replied(ticket, LocalFaultError(f"a request could not be sent: {error}"))

    def _replied(self, ticket: int, result: Reply | GossipxError) -> None:
        if isinstance(result, ModelReply):
            transfer = self._transfers[ticket]
            transfer.seconds = time.monotonic() - transfer.began
            transfer.their_step = result.step
            transfer.models = result.weight
            if transfer.incoming.compares:
                transfer.distance = transfer.incoming.distance()
        match result:
            case UsageError():
                self.fail(result)
            case NotAuthorisedError() if self.comm is not None and self.comm.trust.is_outcast:
                self.fail(result)
            case PeerUnreachableError():
                self.tell(Failed(ticket, Fault.UNREACHABLE))
            case PeerTimeoutError():
                self.tell(Failed(ticket, Fault.TIMEOUT))
            case LocalFaultError():
                self._note("local", str(result))
                self.tell(Failed(ticket, Fault.LOCAL))
            case GossipxError():
                self._note("protocol", str(result))
                self.tell(Failed(ticket, Fault.PROTOCOL))
            case _:
                self.tell(Replied(ticket, result))

    def _answer(self, answer: Answer, snapshot: Snapshot | None) -> None:
        reply = answer.reply
        if isinstance(reply, ModelReply):
            if snapshot is None:
                snapshot = self.arena.snapshot(answer.whole_model)
            reply = dataclasses.replace(reply, step=snapshot.step)
        assert self.comm is not None

        def done(whole: bool) -> None:
            if snapshot is not None:
                snapshot.release()
            self.tell(Answered(answer.key, whole))

        payload = None if snapshot is None else snapshot.buffer
        self.comm.answer(answer.key, reply, payload=payload, deadline=answer.deadline, done=done)

    def _mix(self, ticket: int, share: float) -> None:
        transfer = self._transfers.pop(ticket)
        poisoned = math.isnan(transfer.distance)
        if not poisoned:
            with self.committing:
                self.arena.commit(transfer.incoming.buffer, share)
        if not poisoned and self.role.sync.in_flight:
            self.on_retrieval(Retrieval(transfer.seconds, self.arena.step - transfer.their_step, transfer.distance))
            if self.role.sync.policy.uses_drift:
                self._move_reference(transfer, share)
        self._release(transfer)
        self.tell(Poisoned(ticket) if poisoned else Mixed(ticket))

    # --- waves --------------------------------------------------------------------------------------

    def _hold(self, ticket: int) -> Snapshot | None:
        """What is held under ``ticket`` by now; release it after use. None: it was forgotten."""
        with self.arena.lock:
            held = self._held.get(ticket)
            return None if held is None else held.now.hold()

    def _merge(self, merge: Merge) -> None:
        """Outside the training thread, and with no lock: weights are not touched, and nobody else merges meanwhile."""
        transfer, before = self._transfers.pop(merge.ticket), self._hold(merge.into)
        if before is None:  # the wave was given up
            self._release(transfer)
            return
        distance = self.arena.merge(transfer.incoming.buffer, before.buffer, merge.own, merge.theirs)
        before.release()
        if math.isnan(distance):
            self._release(transfer)
            self.tell(Merged(merge.ticket, merge.into, sound=False))
            return
        merged = self.arena.held(transfer.incoming.give_away(), before.step)
        staleness = self.arena.step - transfer.their_step
        with self.arena.lock:
            held = self._held.get(merge.into)
            if held is not None:
                two_models = held.now is held.base and transfer.models == 1
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
                self._count_drift_from(held.now)
        held.release()
        self.tell(Mixed(ticket))

    def _forget(self, ticket: int) -> None:
        with self.arena.lock:
            held = self._held.pop(ticket, None)
        if held is not None:
            held.release()
        transfer = self._transfers.pop(ticket, None)
        if transfer is not None:
            self._release(transfer)

    def _release(self, transfer: _Transfer) -> None:
        transfer.incoming.release()
        if transfer.base is not None:
            transfer.base.release()

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
            return {"iteration": self.arena.step, "sync": self.role.sync.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; the weights are there already."""
        self.arena.set_boundary(state["iteration"])
        self.tell(Restored(state["iteration"], state["sync"]))
        if self.role.sync.policy.uses_drift:
            self.set_reference()

    # --- drift --------------------------------------------------------------------------------------

    def drift(self) -> float:
        """‖x_t − x_r‖₂, the way that own steps have led since the last retrieval's request went out."""
        with self.arena.lock:  # in which no base is given back
            ticket = -1 if self.role.pulling is None else self.role.pulling
            under_way = self._transfers.get(ticket) or self._held.get(ticket)
            base = None if under_way is None else under_way.base
            if base is not None:
                base.hold()
        if base is not None:
            distance = self.arena.distance(base.buffer)
            base.release()
            return distance
        if self._reference is None:
            self.set_reference()
        assert self._reference is not None
        return self.arena.distance(self._reference)

    def set_reference(self) -> None:
        """Count drift from the model as of the last boundary."""
        now = self.arena.snapshot()
        self._count_drift_from(now)
        now.release()

    def _count_drift_from(self, model: Snapshot) -> None:
        self._reference = self._reference or self.arena.buffer()
        for reference, vector in zip(self._reference.vectors, model.buffer.vectors, strict=True):
            reference.copy_(vector)

    def _move_reference(self, transfer: _Transfer, share: float) -> None:
        """x_r ← the model at the request plus the change that was mixed: mixing itself is no drift."""
        if transfer.base is None:  # a blocking pull: no own step came between
            self.set_reference()
            return
        self._reference = self._reference or self.arena.buffer()
        models = self._reference, transfer.base.buffer, transfer.incoming.buffer
        for section, reference, base, difference in zip(
            self.arena.sections, *(model.vectors for model in models), strict=True
        ):
            cut = section.trainable
            torch.add(base[:cut], difference[:cut], alpha=share, out=reference[:cut])
