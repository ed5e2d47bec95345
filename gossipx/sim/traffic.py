"""A simulated peer without a model: what it sends has a size, and its deltas come from a trace.

It serves runs that cannot be trained on one machine, such as a thousand peers or a model of a billion parameters. The
role decides as in any other run. What a mix does to a model is not known, so neither is the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from gossipx.errors import GossipxError, NotEnoughPeersError
from gossipx.peer import PeerRole
from gossipx.protocol import effects, events, messages, server_messages, table_effects
from gossipx.protocol.events import Fault
from gossipx.runtime.driver.captures import Retrieval
from gossipx.sim.base import BasePeer
from gossipx.sim.clock import VirtualTimers
from gossipx.sim.world import Endpoint

T = TypeVar("T")

Where = tuple[int, int]
"""A bucket's address: shard and bucket number."""


@dataclass(frozen=True)
class Segment:
    """A bucket of tables in an iteration of a worker.

    Attributes:
        place: shard and number of the bucket.
        raw: bytes of its values.
        pushed: bytes of its gradients on the wire.
        pulled: bytes of its values on the wire, between the first and the last pull, which have no codec.
        compute: its share of the computation.
    """

    place: Where
    raw: int
    pushed: int
    pulled: int
    compute: float


FORWARD = 1 / 3
"""Share of the forward pass: backpropagation computes two products per layer where it computes one."""


@dataclass(frozen=True)
class Sizes:
    """The bytes of a model on the wire.

    Attributes:
        raw: of a fragment's values, by its number; 0: of the model.
        encoded: what a codec leaves of them; 1 without one.
        segments: the buckets of a parameter server, in the order in which the forward pass uses them.
        wait_free: whether a worker pushes each bucket as soon as its gradients are computed, not all at the end.
        forward: the share of the forward pass in the computation of an iteration.
    """

    raw: Mapping[int, int]
    encoded: float
    segments: Sequence[Segment] = ()
    wait_free: bool = True
    forward: float = FORWARD

    @property
    def whole(self) -> int:
        """Bytes of the model's values."""
        return self.raw[messages.WHOLE]

    def model(self, request: messages.Request, whole_model: bool) -> int:
        """Return the bytes of the model that answers a request, or that it carries.

        The first model of a peer, a reference and the models of the finish are sent without a codec.
        """
        raw = self.whole if whole_model else self.raw[messages.fragment_of(request)]
        match request:
            case messages.ShardRequest() | messages.ShareRequest():
                return round(raw * self.encoded / len(request.members))
            case messages.InitialRequest() | messages.FinalRequest() | messages.CentreRequest():
                return raw
            case messages.RoundRequest() | messages.ReferenceRequest():
                return raw
        return round(raw * self.encoded)

    def bucket(self, place: Where) -> Segment:
        """Return a bucket."""
        return self._by_place[place]

    _by_place: dict[Where, Segment] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_place.update((segment.place, segment) for segment in self.segments)


@dataclass
class _Received:
    """A model that has arrived.

    Attributes:
        sender: rank of its peer.
        step: iterations that it had done.
        seconds: from the request to the last byte.
        request: the request.
    """

    sender: int
    step: int
    seconds: float
    request: messages.Request


class TrafficPeer(BasePeer):
    """A simulated peer without a model.

    Args:
        role, iterations, compute: as for :class:`~gossipx.sim.base.BasePeer`.
        sizes: bytes of the model.
        delta: returns Δ_t, given t.

    Attributes:
        on_retrieval: called with each model mixed during training.
    """

    arena = None  # it has no model

    def __init__(
        self, role: PeerRole, iterations: int, compute: Callable[[], float], sizes: Sizes, delta: Callable[[int], float]
    ):
        super().__init__(role, iterations, compute)
        self.on_retrieval: Callable[[Retrieval], None] = lambda retrieval: None
        self.error: GossipxError | None = None
        self._sizes = sizes
        self._delta = delta
        self._step = 0
        self._waits = False
        self._timers = VirtualTimers(self.later, lambda name: self.handle(events.TimerFired(name)), float)
        self._captured: dict[int, int] = {}  # by ticket, the iterations of the captured model
        self._received: dict[int, _Received] = {}
        self._waves_began: dict[int, float] = {}  # by ticket
        self._cancels: dict[int, Callable[[], None]] = {}
        self._received_at: dict[messages.Stage, int] = {}
        self._lacks: set[Where] = set()  # buckets that training must have before it uses them
        self._fetching: dict[int, Where] = {}  # by ticket
        self._requests: dict[Hashable, messages.Request] = {}  # for models and tables, by key
        self._seconds = 0.0  # of computation in this iteration
        self._held: Callable[[], None] | None = None  # what the training thread does once it may
        self._held_for: Where | None = None  # the bucket that it needs; None: it waits for the role
        self._held_since = 0.0

    # --- BasePeer -----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._step

    @property
    def waits(self) -> bool:
        return self._waits

    @property
    def reason(self) -> str | None:
        return None if self.error is None else str(self.error)

    @property
    def has_tables(self) -> bool:
        """Whether the run has a parameter server."""
        return bool(self._sizes.segments)

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self.world.now

    def read(self, look: Callable[[PeerRole], T]) -> T:
        """Return what ``look`` reads from the role."""
        return look(self.role)

    def received_before(self, stage: messages.Stage) -> int:
        """Return the bytes received before the role reached ``stage``; all so far if it has not."""
        return next((count for at, count in self._received_at.items() if at >= stage), self.endpoint.bytes_received)

    def connect(self) -> Endpoint:
        return Endpoint(self, self._arrived)

    def digest(self) -> str:
        return "-"  # all final models count as equal

    def handle(self, event: events.Event) -> None:
        effects_of = self.role.handle(event, self.world.now)
        self._received_at.setdefault(self.role.stage, self.endpoint.bytes_received)
        for effect in effects_of:
            if carry_out := _CARRY_OUT.get(type(effect)):
                carry_out(self, effect)
        if self._held is not None and not self._waits and self._held_for not in self._lacks:
            go_on, self._held = self._held, None
            if self._held_for is not None:
                self.blocked_seconds += self.world.now - self._held_since
            self.later(self.world.now, go_on)

    # --- training -----------------------------------------------------------------------------------

    def train(self) -> None:
        self._step += 1
        self.delta = self._delta(self._step)
        self.handle(events.StepDone(self._step, self.delta, None))

    def may_compute(self) -> bool:
        # With a parameter server the forward pass waits for each bucket as it comes to use it.
        return bool(self._sizes.segments) or not self._lacks

    def iterate(self, seconds: float) -> None:
        if self._sizes.segments:
            self._seconds = seconds
            self._forward(0)
        else:
            super().iterate(seconds)

    def _forward(self, number: int) -> None:
        """Compute forwards from a segment on; wait for each until its tables are here."""
        segments = self._sizes.segments
        if number == len(segments):
            self.handle(events.GradientsReady(()))
            self._hold(lambda: self._backward(len(segments) - 1), None)
        elif segments[number].place in self._lacks:
            self._hold(lambda: self._forward(number), segments[number].place)
        else:
            seconds = self._seconds * self._sizes.forward * segments[number].compute
            self.compute(seconds, lambda: self._forward(number + 1))

    def _backward(self, number: int) -> None:
        """Compute the gradients of a segment, push them, and continue with the segment before it."""
        segment = self._sizes.segments[number]

        def computed() -> None:
            if self._sizes.wait_free:
                self.handle(events.GradientsReady((segment.place,)))
            elif number == 0:
                self.handle(events.GradientsReady(tuple(one.place for one in self._sizes.segments[::-1])))
            if number == 0:
                self._computed()
            else:
                self._backward(number - 1)

        self.compute(self._seconds * (1 - self._sizes.forward) * segment.compute, computed)

    def _hold(self, go_on: Callable[[], None], place: Where | None) -> None:
        """Continue once the role lets training proceed and, unless None, the bucket is here."""
        if not self._waits and place not in self._lacks:
            go_on()
        else:
            self._held, self._held_for, self._held_since = go_on, place, self.world.now

    # --- requests -----------------------------------------------------------------------------------

    def _send(self, send: effects.Send) -> None:
        request, nbytes, began = send.request, 0, self.world.now
        if isinstance(request, messages.ElasticRequest | messages.ShardRequest):
            nbytes = self._sizes.model(request, False)
        elif isinstance(request, server_messages.GradientRequest):
            nbytes = self._sizes.bucket((request.shard, request.bucket)).pushed
        elif isinstance(request, server_messages.TablesRequest) and request.bucket >= 0:
            self._fetching[send.ticket] = request.shard, request.bucket

        def done(result: messages.Reply | Fault, content: Any) -> None:
            self._cancels.pop(send.ticket, None)
            if isinstance(result, Fault):
                self.handle(events.Failed(send.ticket, result))
                return
            if isinstance(result, messages.ModelReply):
                seconds = self.world.now - began
                self._received[send.ticket] = _Received(send.to, result.step, seconds, request)
            self.later(self.world.now, lambda: self.handle(events.Replied(send.ticket, result)))

        self._cancels[send.ticket] = self.endpoint.request(send.to, request, nbytes, self._step, send.deadline, done)

    def _cancel(self, cancel: effects.Cancel) -> None:
        if stop := self._cancels.get(cancel.ticket):
            stop()

    def _arrived(self, sender: Endpoint, key: Hashable, request: messages.Request, content: Any) -> None:
        if isinstance(request, messages.ModelRequest | messages.WaveRequest | server_messages.TablesRequest):
            self._requests[key] = request
        self.later(self.world.now, lambda: self.handle(events.Received(sender.rank, key, request)))

    def _answer(self, answer: effects.Answer) -> None:
        if answer.begins > self.world.now:  # served models are spaced, so that training is not slowed down
            self.later(answer.begins, lambda: self._answer_now(answer))
        else:
            self._answer_now(answer)

    def _answer_now(self, answer: effects.Answer) -> None:
        reply, nbytes, request = answer.reply, 0, self._requests.pop(answer.key, None)
        if isinstance(reply, messages.ModelReply):
            step = self._step if answer.captured is None else self._captured.get(answer.captured, self._step)
            reply = msgspec.structs.replace(reply, step=step)
            assert request is not None
            nbytes = self._sizes.model(request, answer.whole_model)
        elif isinstance(reply, messages.ShareReply | messages.ReferenceReply):
            assert request is not None
            nbytes = self._sizes.model(request, False)
        elif isinstance(reply, server_messages.TablesReply) and answer.tables is not None:
            bucket = self._sizes.bucket((answer.tables.shard, answer.tables.bucket))
            # A worker's first pull and its last follow no push, and bring plain values.
            after_push = isinstance(request, server_messages.TablesRequest) and request.progress >= 0
            nbytes = bucket.pulled if after_push else bucket.raw
        key = answer.key
        self.endpoint.answer(
            key, reply, nbytes, None, answer.deadline, lambda delivered: self.handle(events.Answered(key, delivered))
        )

    # --- models -------------------------------------------------------------------------------------

    def _capture(self, capture: effects.Capture) -> None:
        self._captured[capture.ticket] = self._step

    def _retrieval(self, received: _Received) -> Retrieval:
        return Retrieval(received.seconds, self._step - received.step, None, received.sender)

    def _mix(self, mix: effects.Mix) -> None:
        received = self._received.pop(mix.ticket, None)
        if received is not None and isinstance(
            received.request, messages.PullRequest | messages.TakeRequest | messages.ElasticRequest
        ):
            self.on_retrieval(self._retrieval(received))
        self.handle(events.Mixed(mix.ticket))

    def _merge(self, merge: effects.Merge) -> None:
        self._received.pop(merge.ticket, None)
        self.handle(events.Merged(merge.ticket, merge.into, True))

    def _encode_wave(self, encode: effects.EncodeWave) -> None:
        self._waves_began[encode.ticket] = self.world.now
        self.later(self.world.now, lambda: self.handle(events.WaveEncoded(encode.ticket, (1, 0))))

    def _average_shard(self, average: effects.AverageShard) -> None:
        counted = tuple(sorted([self.role.rank, *(rank for rank, _ in average.codes)]))
        self.later(self.world.now, lambda: self.handle(events.ShardAveraged(average.ticket, counted)))

    def _end_wave(self, end: effects.EndWave) -> None:
        self.later(self.world.now, lambda: self.handle(events.WaveEnded(end.ticket, ())))

    def _apply_wave(self, apply: effects.ApplyWave) -> None:
        self._captured.pop(apply.ticket, None)
        if (began := self._waves_began.pop(apply.ticket, None)) is not None:
            self.on_retrieval(Retrieval(self.world.now - began, 0, None, None))
        self.handle(events.Mixed(apply.ticket))

    def _adopt(self, adopt: effects.Adopt) -> None:
        self._received.pop(adopt.ticket, None)
        if adopt.step is not None:
            self._step = adopt.step
        self.handle(events.Mixed(adopt.ticket))

    def _forget(self, forget: effects.Forget) -> None:
        self._captured.pop(forget.ticket, None)
        self._received.pop(forget.ticket, None)
        self._waves_began.pop(forget.ticket, None)
        self._fetching.pop(forget.ticket, None)

    # --- everything else ----------------------------------------------------------------------------

    def _set_timer(self, timer: effects.SetTimer) -> None:
        self._timers.set(timer.name, timer.at)

    def _wait(self, wait: effects.Wait) -> None:
        self._waits = True

    def _resume(self, resume: effects.Resume) -> None:
        self._waits = False

    def _stop(self, stop: effects.Stop) -> None:
        self.error = self.error or NotEnoughPeersError(stop.reason)
        self._waits = False
        if self._held is not None:  # the training thread waits within an iteration, which it gives up
            self._held, self._stepping = None, False

    def _tell(self, note: effects.Note) -> None:
        self.warn(note.topic, note.text)

    # --- tables -------------------------------------------------------------------------------------

    def _fetch(self, fetch: table_effects.Fetch) -> None:
        self._lacks.update(fetch.buckets)

    def _fetched(self, fetched: table_effects.Fetched) -> None:
        self._lacks.discard(self._fetching.pop(fetched.ticket))

    def _restore(self, restore: table_effects.RestoreTables) -> None:
        self.handle(events.TablesRestored(restore.shard, restore.epoch, None))

    def _unchanged(self, unchanged: table_effects.Unchanged) -> None:
        self._lacks.difference_update(unchanged.buckets)


_CARRY_OUT: dict[type, Callable[[TrafficPeer, Any], None]] = {
    effects.Send: TrafficPeer._send,
    effects.Cancel: TrafficPeer._cancel,
    effects.Answer: TrafficPeer._answer,
    effects.Capture: TrafficPeer._capture,
    effects.Mix: TrafficPeer._mix,
    effects.Merge: TrafficPeer._merge,
    effects.EncodeWave: TrafficPeer._encode_wave,
    effects.AverageShard: TrafficPeer._average_shard,
    effects.EndWave: TrafficPeer._end_wave,
    effects.ApplyWave: TrafficPeer._apply_wave,
    effects.Adopt: TrafficPeer._adopt,
    effects.Forget: TrafficPeer._forget,
    effects.SetTimer: TrafficPeer._set_timer,
    effects.Wait: TrafficPeer._wait,
    effects.Resume: TrafficPeer._resume,
    effects.Stop: TrafficPeer._stop,
    effects.Note: TrafficPeer._tell,
    table_effects.Fetch: TrafficPeer._fetch,
    table_effects.Fetched: TrafficPeer._fetched,
    table_effects.Unchanged: TrafficPeer._unchanged,
    table_effects.RestoreTables: TrafficPeer._restore,
}
"""The effects that concern a peer without a model; the others are about values."""
