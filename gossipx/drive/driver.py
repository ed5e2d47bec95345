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
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from gossipx.actor import (
    Adopt,
    Answer,
    Answered,
    Effect,
    Event,
    Failed,
    Fault,
    Forget,
    Given,
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
    TimerFired,
    Wait,
)
from gossipx.arena import HostBuffer, ParameterArena, Snapshot
from gossipx.comm import CommManager
from gossipx.drift import DriftReference
from gossipx.drive.timers import Timers
from gossipx.errors import (
    GossipxError,
    LocalFaultError,
    NotEnoughPeersError,
    PeerTimeoutError,
    PeerUnreachableError,
    UsageError,
)
from gossipx.messages import (
    InitialRequest,
    ModelReply,
    ModelRequest,
    NotReadyReply,
    PullRequest,
    Reply,
    Request,
    TakeRequest,
)
from gossipx.peer import PeerRole

log = logging.getLogger("gossipx")

NOTE_EVERY = 10.0
"""Seconds between two log lines of one topic; what falls between is counted and told with the next."""
LOOK_EVERY = 0.5
"""Seconds between two looks at signals and errors while the training thread waits."""


@dataclass
class _Transfer:
    """A model on its way to us (buffer), or our own, captured for a request (base), or both."""

    request: Request
    buffer: HostBuffer | None
    base: Snapshot | None
    began: float
    distance: float | None = None  # to the base, once the buffer holds the difference to it
    seconds: float = 0.0
    their_step: int = 0


@dataclass(frozen=True)
class Retrieval:
    """One model that was mixed while training.

    Attributes:
        seconds: from the request to the last byte.
        staleness: own iterations minus those that the model had seen.
        distance: ‖x_j − base‖₂ over the trained values.
    """

    seconds: float
    staleness: int
    distance: float


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
        self._given: deque[_Transfer] = deque()  # drift is to count from the last of these
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
            for effect in effects:
                if isinstance(effect, Send):
                    self._prepare(effect)
                elif isinstance(effect, Wait):
                    self._may_go_on.clear()
                elif isinstance(effect, Resume):
                    self._may_go_on.set()
                elif isinstance(effect, Stop):
                    self.fail(NotEnoughPeersError(effect.reason))
        for effect in effects:
            self._carry_out(effect)

    def received(self, sender: int, key: Hashable, request: Request) -> None:
        """A request came in; for the CommManager."""
        self.tell(Received(sender, key, request))

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

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect)
            case Answer():
                self._answer(effect)
            case Mix(ticket, share):
                self._mix(ticket, share)
            case Adopt(ticket):
                transfer = self._transfers.pop(ticket)
                assert transfer.buffer is not None
                with self.committing:
                    taken = self.arena.adopt(transfer.buffer, transfer.their_step)
                self._release(transfer)
                self.tell(Mixed(ticket) if taken else Poisoned(ticket))
            case Forget(ticket):
                self._forget(ticket)
            case Given(ticket):
                self._given_away(ticket)
            case SetTimer(name, at):
                self._timers.set(name, at)
            case Note(topic, text):
                self._note(topic, text)
            case Wait() | Resume() | Stop():
                pass  # done while deciding

    def _prepare(self, send: Send) -> None:
        """Room for the model that comes, and a hold on our own. Under the lock: an answer may ask for it at once."""
        buffer = None
        if isinstance(send.request, ModelRequest):
            buffer = self.arena.buffer(whole=isinstance(send.request, InitialRequest))
        base = self.arena.snapshot() if send.capture else None
        if buffer is not None or base is not None:
            self._transfers[send.ticket] = _Transfer(send.request, buffer, base, time.monotonic())

    def _send(self, send: Send) -> None:
        transfer = self._transfers.get(send.ticket)
        payload = None if transfer is None or transfer.buffer is None else transfer.buffer.view
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
            if transfer.base is not None:  # all but the last pass over the model is done outside the training thread
                assert transfer.buffer is not None
                transfer.distance = self.arena.compare(transfer.buffer, transfer.base.buffer)
                if math.isnan(transfer.distance) and isinstance(transfer.request, TakeRequest):
                    self.tell(Failed(ticket, Fault.POISONED))  # before the other side counts on it
                    return
        match result:
            case UsageError():
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

    def _answer(self, answer: Answer) -> None:
        snapshot: Snapshot | None = None
        reply = answer.reply
        if isinstance(reply, ModelReply):
            snapshot = self._model_for(answer)
            if snapshot is None:
                reply = NotReadyReply("it was given up meanwhile")
            else:
                reply = dataclasses.replace(reply, step=snapshot.step)
        assert self.comm is not None

        def done(whole: bool) -> None:
            if snapshot is not None:
                snapshot.release()
            self.tell(Answered(answer.key, whole))

        payload = None if snapshot is None else snapshot.buffer.view
        self.comm.answer(answer.key, reply, payload=payload, deadline=answer.deadline, done=done)

    def _model_for(self, answer: Answer) -> Snapshot | None:
        """The model to answer by, held; None: the captured one that was meant has been forgotten."""
        if answer.captured is None:
            return self.arena.snapshot(answer.whole_model)
        transfer = self._transfers.get(answer.captured)
        base = None if transfer is None else transfer.base
        return base if base is not None and base.hold() else None

    def _mix(self, ticket: int, share: float) -> None:
        own = ticket == self.role.pulling
        transfer = self._transfers.pop(ticket)
        assert transfer.buffer is not None
        distance = transfer.distance
        if distance is None:
            distance = self.arena.compare(transfer.buffer)
        poisoned = math.isnan(distance)
        if not poisoned:
            with self.committing:
                self.arena.commit(transfer.buffer, share)
        if not poisoned and isinstance(transfer.request, PullRequest | TakeRequest):
            self.on_retrieval(Retrieval(transfer.seconds, self.arena.step - transfer.their_step, distance))
            if self.role.sync.policy.uses_drift:
                if transfer.base is None:  # a blocking pull: no own step came between
                    self.reference.set()
                else:  # not own: another has pushed it, and drift goes on from where it began
                    self.reference.move(transfer.buffer, share, transfer.base.buffer if own else None)
        self._release(transfer)
        self.tell(Poisoned(ticket) if poisoned else Mixed(ticket))

    def _forget(self, ticket: int) -> None:
        transfer = self._transfers.pop(ticket, None)
        if transfer is not None:
            self._release(transfer)

    def _given_away(self, ticket: int) -> None:
        if self.role.sync.policy.uses_drift:
            self._given.append(self._transfers.pop(ticket))  # the training thread may be at work on the reference
        else:
            self._forget(ticket)

    def _release(self, transfer: _Transfer) -> None:
        if transfer.buffer is not None:
            self.arena.free(transfer.buffer)
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
            sync = self.role.sync.state_dict()
            return {"iteration": self.arena.step, "sync": sync, "weight": self.role.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; the weights are there already."""
        self.arena.set_boundary(state["iteration"])
        self.tell(Restored(state["iteration"], state["sync"], state["weight"]))
        if self.role.sync.policy.uses_drift:
            self.reference.set()

    # --- drift --------------------------------------------------------------------------------------

    def drift(self) -> float:
        """‖x_t − x_r‖₂, the way that own steps have led since the last retrieval's request went out.

        For the training thread, which alone works on the reference.
        """
        while self._given:
            given = self._given.popleft()
            assert given.base is not None
            self.reference.set(given.base.buffer)
            self._release(given)
        pulling = self.role.pulling
        transfer = None if pulling is None else self._transfers.get(pulling)
        base = None if transfer is None else transfer.base
        if base is None or not base.hold():
            return self.reference.distance()
        distance = self.arena.distance(base.buffer)
        base.release()
        return distance
